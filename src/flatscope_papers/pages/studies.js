// Studies of one paper, claims of one verdict.
(() => {
  "use strict";
  const tools = document.getElementById("studies-tools");
  if (!tools) return;
  const studies = [...document.querySelectorAll("article.study")];
  const status = tools.querySelector("[role=status]");
  const [paper, verdict] = ["paper", "verdict"].map((name) => tools.querySelector(`select[data-by=${name}]`));
  const apply = () => {
    let claims = 0, shown = 0;
    for (const study of studies) {
      const rows = [...study.querySelectorAll("tr[data-verdict]")];
      for (const row of rows) row.hidden = Boolean(verdict.value) && row.dataset.verdict !== verdict.value;
      const left = rows.filter((row) => !row.hidden).length;
      study.hidden = (paper.value && study.dataset.paper !== paper.value) || (verdict.value && !left);
      if (!study.hidden) { claims += left; shown += 1; }
    }
    status.textContent = `${claims} claims of ${shown} studies`;
  };
  tools.hidden = false;
  for (const choice of [paper, verdict]) choice.addEventListener("change", apply);
  // A link to a study that is hidden shows it.
  window.addEventListener("hashchange", () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.matches("article.study") && target.hidden) { paper.value = verdict.value = ""; apply(); target.scrollIntoView(); }
  });
  apply();
})();
