"use strict";
// The page reads without this script; the script adds the theme switch, sorting and filtering.
(() => {
  const root = document.documentElement;

  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`); };
  const remembered = (write) => { try { return write ? localStorage.setItem("flatscope-theme", write) : localStorage.getItem("flatscope-theme"); } catch { return null; } };
  const kept = remembered();
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  button.hidden = false;
  label();
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; remembered(root.dataset.theme); label(); });
  system.addEventListener("change", label);

  // On paper nothing can be opened, so everything is.
  let opened = [];
  window.addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; opened.forEach((d) => { d.open = true; }); });
  window.addEventListener("afterprint", () => { opened.forEach((d) => { d.open = false; }); });

  const table = document.getElementById("measure-table");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const status = document.getElementById("measure-status");
  const filter = document.getElementById("measure-filter");
  const comparable = document.getElementById("measure-comparable");
  document.querySelector(".tools").hidden = false;
  const texts = rows.map((row) => row.textContent.toLowerCase());

  const say = (extra = "") => {
    const shown = rows.filter((row) => !row.hidden).length;
    status.textContent = (shown === rows.length ? `${shown} measures` : `${shown} of ${rows.length} measures`) + extra;
  };
  const apply = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, n) => {
      row.hidden = !words.every((word) => texts[n].includes(word)) || (comparable.checked && row.dataset.standing !== "all");
    });
    say();
  };
  filter.addEventListener("input", apply);
  filter.addEventListener("keydown", (event) => { if (event.key === "Escape") { filter.value = ""; apply(); } });
  comparable.addEventListener("change", apply);

  const headers = [...table.tHead.rows[0].cells];
  const sortBy = (header) => {
    const column = header.cellIndex;
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    const numeric = header.dataset.kind === "number";
    const key = (row) => row.cells[column].dataset.sort;
    const sorted = [...rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");  // what has no value stays at the end
      return (numeric ? x - y : x.localeCompare(y)) * (ascending ? 1 : -1);
    });
    body.append(...sorted);
    headers.forEach((other) => { if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", other === header ? (ascending ? "ascending" : "descending") : "none"); });
    say(`, sorted by ${header.textContent.trim()}, ${ascending ? "ascending" : "descending"}`);
  };
  headers.forEach((header) => { const sorter = header.querySelector("button"); if (sorter) sorter.addEventListener("click", () => sortBy(header)); });
  say();
})();
