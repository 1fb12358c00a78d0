// A population's scatter: measure, colour and scales by choice; the arrow keys walk from network to network.
(() => {
  const SVG = "http:/" + "/www.w3.org/2000/svg";
  const made = (tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const axisOf = (values, log) => {
    const finite = values.filter((value) => value !== null);
    const [low, high] = finite.length ? [Math.min(...finite), Math.max(...finite)] : [0, 1];
    const place = (value) => (!(high > low) ? 0 : log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
    return { place, ticks: (most) => (log ? logTicks(low, high) : linearTicks(low, high, most)) };
  };
  const onRamp = (ramp, place) => {
    const position = Math.min(Math.max(place, 0), 1) * (ramp.length - 1);
    const n = Math.min(Math.floor(position), ramp.length - 2);
    const channel = (hex, k) => parseInt(hex.slice(k, k + 2), 16);
    return `rgb(${[1, 3, 5].map((k) => Math.round(channel(ramp[n], k) + (channel(ramp[n + 1], k) - channel(ramp[n], k)) * (position - n))).join(",")})`;
  };

  for (const box of document.querySelectorAll(".population")) {
    const data = JSON.parse(box.querySelector("script").textContent);
    const find = (selector) => box.querySelector(selector);
    const [plot, axes, here, read, legend] = [".scatter", ".axes", ".here", ".read", "figure .legend"].map(find);
    const marks = [...find(".marks").children];
    const cells = [...find(".points").tBodies[0].rows].map((row) => row.cells[row.cells.length - 1]);
    const [measure, colour, logX, logY] = ["measure", "colour", "logx", "logy"].map((name) => find(`[name=${name}]`));
    const { top, height, side } = Object.fromEntries(Object.entries(plot.dataset).map(([key, value]) => [key, Number(value)]));
    const percent = (place) => side + (100 - 2 * side) * place;
    const positive = (values) => values.every((value) => value === null || value > 0);
    let order = [];
    let current = -1;

    const point = (n) => {
      current = n;
      here.setAttribute("display", n < 0 ? "none" : "inline");
      if (n < 0) { read.textContent = ""; return; }
      here.setAttribute("cx", marks[n].getAttribute("x"));
      here.setAttribute("cy", marks[n].getAttribute("y"));
      const chosen = data.colours[colour.value];
      const level = !chosen ? "" : `, ${colour.value} ${chosen.levels.length ? (chosen.levels[chosen.index[n]] ?? "not known") : written(chosen.numbers[n] ?? NaN)}`;
      read.textContent = `${data.names[n]}: ${measure.value} ${written(data.measures[measure.value][n])}, ${data.targetName} ${written(data.target[n])}${level}`;
    };

    const paint = () => {
      const chosen = data.colours[colour.value];
      const { shapes, ramp } = data;
      const ends = chosen ? chosen.numbers.filter((value) => value !== null) : [];
      const [low, high] = [Math.min(...ends), Math.max(...ends)];
      const look = (level, number) => {
        if (!chosen) return { d: shapes[0], class: "mark c0" };
        if (chosen.levels.length) return level >= 0 ? { d: shapes[level], class: `mark c${level}` } : { d: shapes[0], class: "mark none" };
        return number === null ? { d: shapes[0], class: "mark none" } : { d: shapes[0], class: "mark", fill: onRamp(ramp, (number - low) / (high - low || 1)) };
      };
      marks.forEach((mark, n) => mark.replaceChildren(made("path", look(chosen?.index[n], chosen?.numbers[n]))));
      const middle = [...ends].sort((a, b) => a - b)[Math.floor(ends.length / 2)];
      const entries = !chosen ? [] : chosen.levels.length ? chosen.levels.map((label, n) => [label, look(n)]) : [low, middle, high].map((value) => [written(value), look(-1, value)]);
      legend.hidden = !entries.length;
      legend.replaceChildren(...entries.map(([label, shape]) => {
        const item = document.createElement("li");
        const picture = made("svg", { width: 12, height: 12, viewBox: "-6 -6 12 12", "aria-hidden": "true" });
        picture.append(made("path", shape));
        item.append(picture, label);
        return item;
      }));
    };

    const draw = () => {
      const [x, y] = [data.measures[measure.value], data.target];
      logX.disabled = !positive(x);
      logY.disabled = !positive(y);
      const [useX, useY] = [logX.checked && !logX.disabled, logY.checked && !logY.disabled];
      const [across, down] = [axisOf(x, useX), axisOf(y, useY)];
      const fromTop = (value) => top + height * (1 - down.place(value));
      const lines = [];
      for (const tick of across.ticks(6)) {
        const at = `${percent(across.place(tick)).toFixed(2)}%`;
        lines.push(made("line", { x1: at, x2: at, y1: top, y2: top + height, class: "grid" }), made("text", { x: at, y: top + height + 19, "text-anchor": "middle" }, written(tick)));
      }
      for (const tick of down.ticks(5)) {
        const at = fromTop(tick).toFixed(1);
        lines.push(made("line", { x1: 0, x2: "100%", y1: at, y2: at, class: "grid" }), made("text", { x: 0, y: at, dy: -4 }, written(tick)));
      }
      axes.replaceChildren(...lines);
      marks.forEach((mark, n) => {
        const known = x[n] !== null && y[n] !== null;
        mark.setAttribute("display", known ? "inline" : "none");
        if (!known) return;
        mark.setAttribute("x", `${percent(across.place(x[n])).toFixed(2)}%`);
        mark.setAttribute("y", fromTop(y[n]).toFixed(1));
      });
      cells.forEach((cell, n) => { cell.textContent = written(x[n] ?? NaN); });
      order = marks.map((_, n) => n).filter((n) => x[n] !== null && y[n] !== null).sort((a, b) => x[a] - x[b]);
      for (const name of box.querySelectorAll(".chosen")) name.textContent = measure.value;
      const found = data.statistics[measure.value];
      find(".correlation").textContent = `Pearson ${found.pearson[(useX ? "x" : "") + (useY ? "y" : "")] ?? "n/a"} on these axes, Spearman ${found.spearman}, Kendall ${found.kendall}; ${written(found.n)} networks.`;
      plot.setAttribute("aria-label", `${data.targetName} over ${measure.value}, one mark per network`);
      plot.dataset.measure = measure.value;
      point(-1);
    };

    const choose = () => { logX.checked = data.statistics[measure.value].log; draw(); };
    measure.addEventListener("change", choose);
    for (const control of [logX, logY]) control.addEventListener("change", draw);
    colour.addEventListener("change", () => { paint(); point(current); });
    for (const button of box.querySelectorAll(".pick")) button.addEventListener("click", () => { measure.value = button.dataset.measure; choose(); find("figure").scrollIntoView({ block: "start" }); });

    plot.addEventListener("pointermove", (event) => {
      const frame = plot.getBoundingClientRect();
      const away = (n) => Math.hypot(event.clientX - frame.left - (parseFloat(marks[n].getAttribute("x")) / 100) * frame.width, event.clientY - frame.top - Number(marks[n].getAttribute("y")));
      const closest = order.reduce((best, n) => (best < 0 || away(n) < away(best) ? n : best), -1);
      point(closest >= 0 && away(closest) < 16 ? closest : -1);
    });
    plot.addEventListener("pointerleave", () => point(-1));
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (event.key === "Escape") point(-1);
      if (!step || !order.length) return;
      event.preventDefault();
      const place = order.indexOf(current);
      point(order[place < 0 ? (step > 0 ? 0 : order.length - 1) : Math.min(Math.max(place + step, 0), order.length - 1)]);
    });
    find(".controls").hidden = false;
    draw();
  }
})();
