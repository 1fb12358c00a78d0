// Tables that sort by their column headers and filter by words; every one has its own tools and status line.
(() => {
  "use strict";
  for (const table of document.querySelectorAll(".tools[id$=-tools] + .scroll > table[id]")) {
    const tools = document.getElementById(`${table.id}-tools`);
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const status = tools.querySelector("[role=status]");
    const filter = tools.querySelector("input[type=search]");
    const comparable = tools.querySelector("input[type=checkbox]");
    const texts = rows.map((row) => row.textContent.toLowerCase());
    tools.hidden = false;

    const say = (extra = "") => {
      const shown = rows.filter((row) => !row.hidden).length;
      status.textContent = `${shown === rows.length ? shown : `${shown} of ${rows.length}`} measures${extra}`;
    };
    const apply = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows.forEach((row, n) => {
        row.hidden = !words.every((word) => texts[n].includes(word)) || (comparable?.checked && row.dataset.invariance !== "all");
      });
      say();
    };
    filter.addEventListener("input", apply);
    filter.addEventListener("keydown", (event) => { if (event.key === "Escape") { filter.value = ""; apply(); } });
    comparable?.addEventListener("change", apply);

    const headers = [...table.tHead.rows[0].cells].filter((header) => header.hasAttribute("aria-sort"));
    const sortBy = (header) => {
      const ascending = header.getAttribute("aria-sort") !== "ascending";
      const numeric = header.dataset.kind === "number";
      const key = (row) => row.cells[header.cellIndex].dataset.sort;
      const sorted = [...rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");  // what has no value stays at the end
        return (numeric ? x - y : x.localeCompare(y)) * (ascending ? 1 : -1);
      });
      body.append(...sorted);
      for (const other of headers) other.setAttribute("aria-sort", other === header ? (ascending ? "ascending" : "descending") : "none");
      say(`, sorted by ${header.textContent.trim()}, ${ascending ? "ascending" : "descending"}`);
    };
    for (const header of headers) header.querySelector("button").addEventListener("click", () => sortBy(header));
    say();
  }
})();
