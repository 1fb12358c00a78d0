(() => {
  const seen = (selector) => [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility());
  const text = (e) => e.textContent.trim().slice(0, 40);
  const own = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const faults = [];

  // The page does not move sideways; wide tables, code and formulas scroll in frames of their own.
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) {
    const frames = "pre, .md-typeset__scrollwrap, .arithmatex, .output, .md-tabs__list, nav, .hidden";
    const wide = seen("main *").find((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(frames));
    faults.push(`wider than the window by ${root.scrollWidth - root.clientWidth}: ${wide ? wide.outerHTML.slice(0, 80) : "?"}`);
  }
  for (const img of seen("img")) {
    if (img.complete && !img.naturalWidth) faults.push(`picture that does not open: ${img.getAttribute("src")}`);
    if (!img.hasAttribute("alt")) faults.push(`picture without words: ${img.getAttribute("src")}`);
  }

  // Contrast of text with its ground, by the formula of the Web Content Accessibility Guidelines.
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const ground = (e) => {
    const layers = [];
    for (let part = e; part; part = part.parentElement) {
      const color = rgba(getComputedStyle(part).backgroundColor);
      if (color[3]) layers.push(color);
      if (color[3] === 1) break;
    }
    return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  const linear = (v) => (v <= 10.31 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const faint = new Set();
  const kinds = "main p, main th, main td, main li, main h1, main h2, main h3, main a, main code, main span, main summary, header a, header span, nav a, footer a, footer div";
  for (const e of seen(kinds).filter(own)) {
    if (e.closest(".headerlink, .md-annotation, math, svg, [hidden]")) continue;
    let opacity = 1;
    for (let part = e; part; part = part.parentElement) opacity *= getComputedStyle(part).opacity;
    if (opacity < 0.2) continue;
    const below = ground(e);
    const ink = rgba(getComputedStyle(e).color);
    const shades = [light(over([ink[0], ink[1], ink[2], ink[3] * opacity], below)), light(below)];
    const contrast = (Math.max(...shades) + 0.05) / (Math.min(...shades) + 0.05);
    if (contrast < 4.5) faint.add(`faint (${contrast.toFixed(1)} to 1): <${e.tagName.toLowerCase()} class="${e.className}"> ${text(e)}`);
  }
  faults.push(...[...faint].slice(0, 5));
  return faults;
})()
