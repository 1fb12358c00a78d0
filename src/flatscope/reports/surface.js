// Surfaces that turn: a grid of heights drawn on a 2-D canvas from back to front, so that no graphics card is needed.
(() => {
  "use strict";
  // Numbers as the page writes them.
  const written = (value, digits = 4) => {
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "n/a" : value > 0 ? "∞" : "−∞";
    if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en").replaceAll(",", Math.abs(value) < 1e4 ? "" : "\u202f").replace("-", "−");
    const size = Math.floor(Math.log10(Math.abs(value)));
    const text = size < -4 || size >= digits ? value.toExponential(digits - 1) : value.toPrecision(digits);
    const [mantissa, power] = text.split("e");
    const short = (mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa).replace("-", "−");
    if (power === undefined) return short;
    const raised = [...String(Math.abs(power))].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");
    return `${short}×10${power < 0 ? "⁻" : ""}${raised}`;
  };

  const HOLE = 65535;
  const START = { azimuth: -38, elevation: 32, zoom: 1 };
  const DISTANCE = 5;  // of the eye, in half-widths of the plane
  const TALL = 1.15;  // height of the scale, in the same unit
  const radians = (degrees) => (degrees * Math.PI) / 180;
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const numbers = (text) => text.split(" ").map(Number);

  const mixed = (ramp, place) => {
    const position = clamp(place, 0, 1) * (ramp.length - 1);
    const n = Math.min(Math.floor(position), ramp.length - 2);
    return ramp[n].map((channel, k) => channel + (ramp[n + 1][k] - channel) * (position - n));
  };

  // What does not depend on the view: corners in space, and the colour of every cell in a light that stands still.
  const read = (canvas) => {
    const bytes = Uint8Array.from(atob(canvas.dataset.heights), (letter) => letter.charCodeAt(0));
    const raw = new Uint16Array(bytes.buffer);
    const columns = Number(canvas.dataset.columns);
    const rows = raw.length / columns;
    const [low, high, log] = numbers(canvas.dataset.scale);
    const ramp = canvas.dataset.ramp.split(" ").map((hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16)));
    const places = Float32Array.from(raw, (number) => (number === HOLE ? NaN : number / (HOLE - 1)));
    const value = (place) => (log ? low * (high / low) ** place : low + (high - low) * place);
    const place = (height) => (log ? Math.log(height / low) / Math.log(high / low) : (height - low) / (high - low));
    const cells = [];
    for (let r = 0; r < rows - 1; r += 1) {
      for (let c = 0; c < columns - 1; c += 1) {
        const n = r * columns + c;
        const around = [n, n + 1, n + columns + 1, n + columns];
        const corners = around.filter((corner) => !Number.isNaN(places[corner]));
        if (corners.length < 3) { cells.push({ corners: [] }); continue; }
        const mean = corners.reduce((sum, corner) => sum + places[corner], 0) / corners.length;
        const [a, b, d, e] = around.map((corner) => (Number.isNaN(places[corner]) ? mean : places[corner]));
        const slopeX = ((b + d - a - e) / 2) * TALL * ((columns - 1) / 2);
        const slopeY = ((e + d - a - b) / 2) * TALL * ((rows - 1) / 2);
        const length = Math.hypot(slopeX, slopeY, 1);
        const light = clamp((0.45 * slopeX + 0.35 * slopeY + 0.82) / length, 0, 1);
        const colour = mixed(ramp, mean).map((channel) => Math.round(channel * (0.62 + 0.42 * light)));
        cells.push({ corners, colour: `rgb(${colour.map((channel) => Math.min(channel, 255)).join(",")})` });
      }
    }
    return {
      canvas, columns, rows, places, cells, value, place, log,
      across: numbers(canvas.dataset.across), up: numbers(canvas.dataset.up), ticks: numbers(canvas.dataset.ticks),
      output: canvas.parentElement.querySelector("output"), screen: new Float32Array(3 * raw.length),
    };
  };

  const eye = (view, width, height) => {
    const [a, e] = [radians(view.azimuth), radians(view.elevation)];
    const [ca, sa, ce, se] = [Math.cos(a), Math.sin(a), Math.cos(e), Math.sin(e)];
    const size = Math.min((width - 84) / 2.85, height / 2.6) * view.zoom;
    return (x, y, place) => {
      const z = (place - 0.5) * TALL;
      const right = x * ca - y * sa;
      const away = x * sa + y * ca;
      const depth = away * ce - z * se;
      const scale = (size * DISTANCE) / (DISTANCE + depth);
      return [width / 2 + 16 + right * scale, height * (0.5 - 0.09 * Math.sin(2 * e)) - (z * ce + away * se) * scale, depth];
    };
  };

  const draw = (surface, view) => {
    const { canvas, columns, rows, places, cells, screen } = surface;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    const density = Math.min(window.devicePixelRatio || 1, 2);
    if (canvas.width !== Math.round(width * density)) { canvas.width = Math.round(width * density); canvas.height = Math.round(height * density); }
    const pen = canvas.getContext("2d");
    pen.setTransform(density, 0, 0, density, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const at = eye(view, width, height);
    const x = (c) => (2 * c) / (columns - 1) - 1;
    const y = (r) => (2 * r) / (rows - 1) - 1;
    for (let n = 0; n < places.length; n += 1) screen.set(at(x(n % columns), y(Math.floor(n / columns)), Number.isNaN(places[n]) ? 0 : places[n]), 3 * n);

    const outline = (corners) => { pen.beginPath(); corners.forEach(([px, py], n) => (n ? pen.lineTo(px, py) : pen.moveTo(px, py))); pen.closePath(); };
    const corners = [[-1, -1], [1, -1], [1, 1], [-1, 1]].map(([cx, cy]) => at(cx, cy, 0));
    outline(corners);
    pen.strokeStyle = style.borderTopColor;
    pen.lineWidth = 1;
    pen.stroke();

    const backToFront = (count, descending) => Array.from({ length: count }, (_, n) => (descending ? count - 1 - n : n));
    const a = radians(view.azimuth);
    const inRows = backToFront(rows - 1, Math.cos(a) > 0);
    const inColumns = backToFront(columns - 1, Math.sin(a) > 0);
    const point = (n) => [screen[3 * n], screen[3 * n + 1]];
    pen.lineJoin = "round";
    pen.globalAlpha = 0.35;  // holes leave a shadow on the floor
    pen.fillStyle = style.borderTopColor;
    cells.forEach(({ corners: known }, n) => {
      if (known.length) return;
      const [r, c] = [Math.floor(n / (columns - 1)), n % (columns - 1)];
      outline([[c, r], [c + 1, r], [c + 1, r + 1], [c, r + 1]].map(([cc, cr]) => at(x(cc), y(cr), 0)));
      pen.fill();
    });
    pen.globalAlpha = 1;
    const everyRow = Math.max(1, Math.round((rows - 1) / 10));
    const everyColumn = Math.max(1, Math.round((columns - 1) / 10));
    for (const r of inRows) {
      for (const c of inColumns) {
        const { corners: known, colour } = cells[r * (columns - 1) + c];
        if (!known.length) continue;
        const n = r * columns + c;
        outline(known.map(point));
        pen.fillStyle = pen.strokeStyle = colour;
        pen.lineWidth = 0.7;  // closes the seams between neighbours
        pen.fill();
        pen.stroke();
        if (known.length < 4) continue;
        pen.strokeStyle = "rgba(255,255,255,0.28)";
        if (c % everyColumn === 0) { pen.beginPath(); pen.moveTo(...point(n)); pen.lineTo(...point(n + columns)); pen.stroke(); }
        if (r % everyRow === 0) { pen.beginPath(); pen.moveTo(...point(n)); pen.lineTo(...point(n + 1)); pen.stroke(); }
      }
    }
    scales(surface, view, pen, at, corners, style);
    Object.assign(canvas.dataset, { azimuth: view.azimuth.toFixed(1), elevation: view.elevation.toFixed(1), zoom: view.zoom.toFixed(2) });
  };

  const scales = (surface, view, pen, at, corners, style) => {
    pen.font = `12px ${style.fontFamily}`;
    pen.fillStyle = style.color;
    pen.strokeStyle = style.borderTopColor;
    const left = corners.indexOf(corners.reduce((best, corner) => (corner[0] < best[0] ? corner : best)));
    const [cx, cy] = [[-1, -1], [1, -1], [1, 1], [-1, 1]][left];
    const halo = (text, px, py) => { pen.save(); pen.lineWidth = 3; pen.strokeStyle = style.backgroundColor; pen.strokeText(text, px, py); pen.restore(); pen.fillText(text, px, py); };
    if (view.elevation < 75) {
      pen.beginPath(); pen.moveTo(...at(cx, cy, 0)); pen.lineTo(...at(cx, cy, 1)); pen.stroke();
      pen.textAlign = "right";
      let last = Infinity;
      for (const tick of surface.ticks) {
        const [px, py] = at(cx, cy, surface.place(tick));
        if (last - py < 14) continue;
        pen.beginPath(); pen.moveTo(px, py); pen.lineTo(px - 4, py); pen.stroke();
        halo(written(tick, 3), px - 7, py + 4);
        last = py;
      }
    }
    // Names of the directions under the two edges of the floor that face the reader.
    pen.textAlign = "center";
    const nearX = Math.sin(radians(view.azimuth)) > 0 ? -1 : 1;
    const nearY = Math.cos(radians(view.azimuth)) > 0 ? -1 : 1;
    const [ax, ay] = at(0, nearY * 1.18, 0);
    const [bx, by] = at(nearX * 1.18, 0, 0);
    halo("t₁", ax, ay + 4);
    halo("t₂", bx, by + 4);
  };

  const nearest = (surface, px, py) => {
    let found = -1;
    let best = Infinity;
    for (let n = 0; n < surface.places.length; n += 1) {
      if (Number.isNaN(surface.places[n])) continue;
      const distance = Math.hypot(surface.screen[3 * n] - px, surface.screen[3 * n + 1] - py);
      const worth = distance + 40 * surface.screen[3 * n + 2];  // of points in one spot the nearer one is seen
      if (distance < 14 && worth < best) { best = worth; found = n; }
    }
    return found;
  };

  const say = (surface, n) => {
    const between = ([low, high], share) => low + (high - low) * share;
    const t1 = between(surface.across, (n % surface.columns) / (surface.columns - 1));
    const t2 = between(surface.up, Math.floor(n / surface.columns) / (surface.rows - 1));
    surface.output.textContent = n < 0 ? "" : `t₁ ${written(t1, 3)}, t₂ ${written(t2, 3)}: loss ${written(surface.value(surface.places[n]), 3)}`;
  };

  for (const group of document.querySelectorAll(".planes")) {
    const canvases = [...group.querySelectorAll("canvas")];
    for (const canvas of canvases) canvas.parentElement.hidden = false;
    const surfaces = canvases.map(read);
    const view = { ...START };
    let asked = 0;
    const redraw = () => { if (!asked) asked = requestAnimationFrame(() => { asked = 0; surfaces.forEach((surface) => draw(surface, view)); }); };
    const turn = (azimuth, elevation) => { view.azimuth = ((view.azimuth + azimuth + 540) % 360) - 180; view.elevation = clamp(view.elevation + elevation, 0, 90); redraw(); };
    const zoom = (factor) => { view.zoom = clamp(view.zoom * factor, 0.5, 5); redraw(); };
    const keys = {
      ArrowLeft: () => turn(-5, 0), ArrowRight: () => turn(5, 0), ArrowUp: () => turn(0, 5), ArrowDown: () => turn(0, -5),
      "+": () => zoom(1.15), "=": () => zoom(1.15), "-": () => zoom(1 / 1.15), 0: () => { Object.assign(view, START); redraw(); },
    };

    for (const surface of surfaces) {
      const { canvas } = surface;
      const held = new Map();
      const spread = () => { const [p, q] = [...held.values()]; return Math.hypot(p.x - q.x, p.y - q.y); };
      canvas.addEventListener("pointerdown", (event) => { held.set(event.pointerId, { x: event.clientX, y: event.clientY }); canvas.setPointerCapture(event.pointerId); });
      canvas.addEventListener("pointermove", (event) => {
        const before = held.get(event.pointerId);
        if (!before) { say(surface, nearest(surface, event.offsetX, event.offsetY)); return; }
        const wide = held.size === 2 ? spread() : 0;
        held.set(event.pointerId, { x: event.clientX, y: event.clientY });
        if (held.size === 2) zoom(spread() / Math.max(wide, 1));
        else turn((event.clientX - before.x) * 0.5, (event.clientY - before.y) * 0.5);
      });
      for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => held.delete(event.pointerId));
      canvas.addEventListener("pointerleave", () => { surface.output.textContent = ""; });
      canvas.addEventListener("wheel", (event) => {
        if (document.activeElement !== canvas && !event.ctrlKey) return;  // otherwise the page scrolls, as one expects
        event.preventDefault();
        zoom(Math.exp(-event.deltaY / 400));
      }, { passive: false });
      canvas.addEventListener("keydown", (event) => {
        const act = keys[event.key];
        if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        act();
        surface.output.textContent = `seen from ${written(Math.round(view.azimuth))}°, ${written(Math.round(view.elevation))}° up`;
      });
      new ResizeObserver(redraw).observe(canvas);
    }
    new MutationObserver(redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    for (const moment of ["beforeprint", "afterprint"]) window.addEventListener(moment, () => surfaces.forEach((surface) => draw(surface, view)));
    redraw();
  }
  for (const hint of document.querySelectorAll(".turn")) hint.hidden = false;
})();
