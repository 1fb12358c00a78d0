({
  // Labels of one picture that lie on each other, by more than a rounding.
  collisions() {
    const apart = (p, q) =>
      Math.min(p.right, q.right) - Math.max(p.left, q.left) <= 1 || Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) <= 1.5;
    return this.seen("svg.chart").flatMap((svg) => {
      const texts = [...svg.querySelectorAll("text")].map((e) => [e.textContent, e.getBoundingClientRect()]);
      return texts.flatMap(([a, p], n) => texts.slice(n + 1).filter(([, q]) => !apart(p, q)).map(([b]) => `${a} on ${b}`));
    });
  },
  // Labels that stick out of the card, or of the column, in which their picture is.
  cut() {
    return this.seen("svg.chart text").filter((e) => {
      const [box, frame] = [e, e.closest(".card, .hero")].map((part) => part.getBoundingClientRect());
      return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
    }).map((e) => e.textContent);
  },
  // Text beyond the edges of the window; tables scroll in their frames, and the links above in theirs.
  outside() {
    const own = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    return this.seen("main *, header *").filter((e) => own(e) && !e.closest(".hidden, math, title, nav, tbody, thead")).filter((e) => {
      const box = e.getBoundingClientRect();
      return box.left < -1 || box.right > innerWidth + 1;
    }).map((e) => e.textContent.trim().slice(0, 40));
  },
  // Text whose contrast with its ground is below 4.5, by the formula of the Web Content Accessibility Guidelines.
  faint() {
    const channels = (text) => (text.match(/[\d.]+/g) || []).map(Number);
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const ground = (e) => {
      for (let part = e; part; part = part.parentElement) {
        const found = channels(getComputedStyle(part).backgroundColor);
        if (found.length === 3) return found;
      }
      return [255, 255, 255];
    };
    const kinds = "main p, main th, main td, main li, main h1, main h2, main h3, main small, .badge, .chart text, summary, .gist";
    return this.seen(kinds).filter((e) => e.textContent.trim()).filter((e) => {
      const [style, picture] = [getComputedStyle(e), e.closest("svg")];
      const shades = [light(channels(picture ? style.fill : style.color)), light(ground(picture?.parentElement ?? e))];
      return (Math.max(...shades) + 0.05) / (Math.min(...shades) + 0.05) < 4.5;
    }).map((e) => e.textContent.trim().slice(0, 40));
  },
  // Controls and pictures that nothing names to those who do not see them.
  unnamed() {
    return this.seen("button, select, input, a, canvas, svg[role=img], img, [role=region]")
      .filter((e) => !(e.getAttribute("aria-label") || e.labels?.length || (e.tagName !== "svg" && e.textContent.trim()) || e.alt))
      .map((e) => e.outerHTML.slice(0, 80));
  },
  seen(selector) { return [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility()); },
})
