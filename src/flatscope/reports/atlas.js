// Curves to choose and read off: drawn as SVG, so that colours follow the theme; all text is set as text.
(() => {
  "use strict";
  const COLOURS = 6;  // then they come again, with other dashes
  const DASHES = ["none", "7 3", "2 3"];
  const HEIGHT = 372;
  const PLOT = { left: 44, right: 12, top: 10, bottom: 282 };
  const BARS = { top: 306, bottom: 330 };
  const make = (tag, attributes = {}, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    return made;
  };
  const line = (tag, text = "") => { const made = document.createElement(tag); made.textContent = text; return made; };
  const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
  const plain = (value) => value.toFixed(2).replace("-", "−");
  const colour = (measure) => `var(--c${measure % COLOURS})`;
  const dash = (measure) => DASHES[Math.floor(measure / COLOURS) % DASHES.length];

  for (const box of document.querySelectorAll(".atlas")) {
    const data = JSON.parse(box.dataset.atlas);
    const svg = box.querySelector(".curves");
    const output = box.querySelector("output");
    const said = box.querySelector(".said");
    const choose = Object.fromEntries(["axis", "scope", "kind"].map((name) => [name, box.querySelector(`select.${name}`)]));
    const wide = box.querySelector("input.wide");
    const boxes = [...box.querySelectorAll(".measures-shown input")];
    box.hidden = false;
    boxes.forEach((input, measure) => {
      input.checked = measure === 0;
      const swatch = make("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" });
      swatch.append(make("line", { x1: 0, x2: 24, y1: 4, y2: 4, stroke: colour(measure), "stroke-width": 2.4, "stroke-dasharray": dash(measure) }));
      input.nextElementSibling.append(swatch);
    });
    let active = null;  // the last point

    // What is chosen: the axis, and for every measure shown its correlations, ends of intervals, numbers of networks.
    const chosen = () => {
      const [axis, scope, kind] = ["axis", "scope", "kind"].map((name) => Number(choose[name].value));
      const panel = (kind * data.scopes.length + scope) * data.axes.length + axis;
      const shown = boxes.flatMap((input, measure) => (input.checked ? [measure] : []));
      const curves = shown.map((measure) => {
        const number = panel * data.measures.length + measure;
        const [values, reaches, counts] = data.curves[number];
        const ends = (factor) => values.map((value, n) => (value === null || reaches[n] === null ? null
          : [-1, 1].map((side) => Math.tanh(Math.atanh(value / data.fine) + (side * factor * reaches[n]) / data.fine))));
        return { measure, values: values.map((value) => (value === null ? null : value / data.fine)), counts, ends: ends(1), band: ends(data.factors[panel]), said: data.said[number] };
      });
      return { axis: data.axes[axis], networks: data.networks[scope], scope: data.scopes[scope], curves };
    };

    const draw = () => {
      const width = svg.clientWidth || svg.parentElement.clientWidth;
      if (!width) return;
      const { axis, networks, curves } = chosen();
      const across = (n) => PLOT.left + 6 + axis.x[n] * (width - PLOT.left - PLOT.right - 12);
      const up = (value) => PLOT.bottom - ((value + 1) / 2) * (PLOT.bottom - PLOT.top);
      const last = axis.x.length - 1;
      if (active === null || active > last) active = last;
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      svg.replaceChildren();
      const add = (...parts) => svg.append(make(...parts));
      for (const value of [-1, -0.5, 0, 0.5, 1]) {
        add("line", { x1: PLOT.left, x2: width - PLOT.right, y1: up(value), y2: up(value), stroke: value ? "var(--line)" : "var(--strong-line)" });
        add("text", { x: PLOT.left - 6, y: up(value) + 4, "text-anchor": "end" }, String(value).replace("-", "−"));
      }
      // Labels that fit: both ends, and from the left what leaves room.
      const room = (n) => 10 + 7 * axis.labels[n].length;
      const edge = (n) => Math.min(Math.max(across(n), PLOT.left + room(n) / 2 - 6), width - room(n) / 2);
      let taken = -Infinity;
      axis.labels.forEach((label, n) => {
        const ends = n === last || edge(n) + room(n) / 2 <= edge(last) - room(last) / 2;
        if (!ends || edge(n) - room(n) / 2 < taken) return;
        taken = edge(n) + room(n) / 2;
        add("line", { x1: across(n), x2: across(n), y1: BARS.bottom, y2: BARS.bottom + 4, stroke: "var(--strong-line)" });
        add("text", { x: edge(n), y: BARS.bottom + 17, "text-anchor": "middle" }, label);
      });
      add("text", { x: (PLOT.left + width) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, axis.words);
      add("text", { x: PLOT.left, y: BARS.top - 6 }, `networks at each point, of ${networks}`);
      add("line", { x1: across(active), x2: across(active), y1: PLOT.top, y2: BARS.bottom, stroke: "var(--strong-line)", "stroke-dasharray": "3 3" });
      const closest = Math.min(...axis.x.slice(1).map((_, n) => across(n + 1) - across(n)));
      const step = Math.max(2, Math.min(9, closest - 1));
      (curves[0]?.counts ?? []).forEach((count, n) => {
        const tall = (count / Math.max(networks, 1)) * (BARS.bottom - BARS.top);
        add("rect", { x: across(n) - step / 2, y: BARS.bottom - tall, width: step, height: tall, fill: n === active ? "var(--ink)" : "var(--strong-line)" });
      });
      const runs = (known) => axis.x.map((_, n) => n).filter(known).reduce((found, n) => { found.at(-1)?.at(-1) === n - 1 ? found.at(-1).push(n) : found.push([n]); return found; }, []);
      const shade = ({ measure }, ends, opacity) => runs((n) => ends[n]).forEach((run) => {
        const corners = [...run.map((n) => [n, ends[n][1]]), ...run.toReversed().map((n) => [n, ends[n][0]])];
        add("polygon", { points: corners.map(([n, value]) => `${across(n)},${up(value)}`).join(" "), fill: colour(measure), "fill-opacity": opacity });
      });
      for (const curve of curves) {
        if (wide.checked) shade(curve, curve.band, 0.1);
        shade(curve, curve.ends, 0.17);
      }
      for (const { measure, values } of curves) {
        for (const run of runs((n) => values[n] !== null)) {
          add("polyline", { points: run.map((n) => `${across(n)},${up(values[n])}`).join(" "), fill: "none", stroke: colour(measure), "stroke-width": 2, "stroke-dasharray": dash(measure) });
          for (const n of run) add("circle", { cx: across(n), cy: up(values[n]), r: n === active ? 4.5 : 2.2, fill: colour(measure) });
        }
      }
      say();
    };

    const say = () => {
      const { axis, networks, scope, curves } = chosen();
      const head = `${axis.words} ${axis.labels[active]}, ${scope}${axis.passed[active] ? `; ${axis.passed[active]}` : ""}`;
      const lines = curves.map(({ measure, values, counts, ends, band }) => {
        const row = document.createElement("p");
        const share = `${counts[active]} of ${networks} networks (${Math.round((100 * counts[active]) / Math.max(networks, 1))}\u202f%)`;
        const of = (pair) => `[${plain(pair[0])}, ${plain(pair[1])}]`;
        const value = values[active] === null ? "no value" : `${signed(values[active])}${ends[active] ? ` ${of(ends[active])}` : ""}`;
        const all = band[active] && wide.checked ? `, for all at once ${of(band[active])}` : "";
        row.append(line("strong", `${data.measures[measure]} ${value}`), `${all}, ${share}`);
        return row;
      });
      const first = line("p", head);
      first.className = "quiet";
      output.replaceChildren(first, ...lines);
      said.replaceChildren(...curves.map((curve) => line("li", curve.said)));
      svg.dataset.at = axis.labels[active];
    };

    const move = (n) => { active = Math.min(Math.max(n, 0), chosen().axis.x.length - 1); draw(); };
    const keys = { ArrowLeft: () => move(active - 1), ArrowRight: () => move(active + 1), Home: () => move(0), End: () => move(Infinity) };
    svg.addEventListener("keydown", (event) => {
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    for (const kind of ["pointermove", "pointerdown"]) {
      svg.addEventListener(kind, (event) => {
        const { x } = chosen().axis;
        const frame = svg.getBoundingClientRect();
        const share = (event.clientX - frame.left - PLOT.left - 6) / (frame.width - PLOT.left - PLOT.right - 12);
        const nearest = x.reduce((best, place, n) => (Math.abs(place - share) < Math.abs(x[best] - share) ? n : best), 0);
        if (nearest !== active) move(nearest);
      });
    }
    choose.axis.addEventListener("change", () => { active = null; });
    for (const part of [...Object.values(choose), wide, ...boxes]) part.addEventListener("change", draw);
    let before = 0;
    new ResizeObserver(() => { if (svg.clientWidth !== before) { before = svg.clientWidth; draw(); } }).observe(svg);
    draw();
  }
})();
