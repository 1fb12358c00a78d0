// The page reads without this script; the script adds the theme switch, and opens what a link leads to.
(() => {
  "use strict";
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

  // What is linked to is opened.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const inside = target.querySelector(":scope > details.section");
    if (inside) inside.open = true;
    for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    target.scrollIntoView();
  };
  window.addEventListener("hashchange", reveal);
  for (const link of document.querySelectorAll("nav a, #answer a")) link.addEventListener("click", () => setTimeout(reveal));
  if (location.hash) reveal();

  // A table that is wider than its frame says that it scrolls.
  const frames = [...document.querySelectorAll(".scroll")];
  const hint = new ResizeObserver((entries) => { for (const { target } of entries) target.classList.toggle("wide", target.scrollWidth > target.clientWidth + 8); });
  frames.forEach((frame) => hint.observe(frame));

  // Of several pictures the chosen one.
  for (const box of document.querySelectorAll(".chooser")) {
    const choice = box.querySelector("select");
    const pictures = [...box.querySelectorAll("figure")];
    const show = () => pictures.forEach((picture, n) => { picture.hidden = n !== choice.selectedIndex; });
    choice.parentElement.hidden = false;
    choice.addEventListener("change", show);
    show();
  }

  // On paper nothing can be opened, so everything is.
  let opened = [];
  window.addEventListener("beforeprint", () => { opened = [...document.querySelectorAll("details:not([open])")]; opened.forEach((d) => { d.open = true; }); });
  window.addEventListener("afterprint", () => { opened.forEach((d) => { d.open = false; }); });
})();
