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
})();
