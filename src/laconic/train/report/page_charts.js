function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) values.push(i * step || 0);
  return { values, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

// At most `limit` of `values`, evenly spread, with the first and the last.
function spread(values, limit) {
  if (values.length <= limit) return values;
  return Array.from({ length: limit }, (_, i) => values[Math.round(i * (values.length - 1) / (limit - 1))]);
}
const valueAt = (points, step) => points.findLast((point) => point[0] <= step) || points[0];

// A chart that arrow keys walk through: `show(place)` draws the place's tip, places are 0 to `last`.
function walkable(svg, last, show, leave) {
  let place = -1;
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("keydown", (event) => {
    const moved = { ArrowRight: place + 1, ArrowLeft: place < 0 ? last : place - 1, Home: 0, End: last, PageDown: place + 10, PageUp: place - 10 }[event.key];
    if (event.key === "Escape") leave();
    if (moved === undefined) return;
    event.preventDefault();
    place = Math.max(0, Math.min(last, moved));
    show(place);
  });
  svg.addEventListener("blur", leave);
}

// One chart of lines over steps. `layers` are drawn in order: {field, opacity, width, label, markers}; those with a label are named.
function lineChart(parent, { layers, write, what, zero = false, clipEarly = false }) {
  redrawing(make(parent, "figure"), (figure) => {
    const lines = shownRuns().flatMap(({ run, index }) => layers.map((layer) => ({ ...layer, index, name: run.name, points: run[layer.field] })))
      .filter((line) => line.points.length);
    if (!lines.length) { make(figure, "p", { class: "soft" }, "No run that is shown has this."); return; }
    const box = make(figure, "div", { class: "chart" });
    const width = box.clientWidth, height = 270, left = 62, right = 14, top = 12, bottom = 36;
    const last = Math.max(...lines.map((line) => line.points[line.points.length - 1][0]));
    const first = Math.min(0, ...lines.map((line) => line.points[0][0]));
    // The fall of the first steps would flatten everything after it: the axis ends at what is reached after 8 %.
    const scaling = lines.filter((line) => line.scale !== false);
    const inView = (scaling.length ? scaling : lines).flatMap((line) => {
      const late = clipEarly ? line.points.filter(([step]) => step >= first + (last - first) * 0.08) : line.points;
      return (late.length ? late : line.points).map((point) => point[1]);
    });
    let low = inView.reduce((a, b) => Math.min(a, b)), high = inView.reduce((a, b) => Math.max(a, b));
    if (zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
    const flat = high === low, pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.01;
    if (flat || !(zero && low === 0)) low -= pad;
    if (flat || !(zero && high === 0)) high += pad;
    const x = (step) => left + (step - first) / (last - first || 1) * (width - left - right);
    const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
    const named = lines.filter((line) => line.label !== undefined);
    const said = named.map((line) => {
      const ends = [line.points[0], line.points[line.points.length - 1]];
      return `${line.name}${line.label}: ${write(ends[0][1], 4)} at step ${ends[0][0]}, ${write(ends[1][1], 4)} at step ${ends[1][0]}`;
    });
    const svg = make(box, "svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${what} over steps. ${said.join("; ")}. Arrow keys read it step by step.` });
    const clip = `clip${Math.random().toString(36).slice(2)}`;
    make(make(svg, "clipPath", { id: clip }), "rect", { x: left, y: top - 2, width: width - left - right + 6, height: height - top - bottom + 4 });
    const grid = ticks(low, high, 5);
    for (const value of grid.values) {
      make(svg, "line", { class: zero && Math.abs(value) < 1e-12 ? "rule zero" : "rule", x1: left, x2: width - right, y1: y(value), y2: y(value) });
      make(svg, "text", { x: left - 9, y: y(value) + 4, "text-anchor": "end" }, write(value, grid.digits));
    }
    for (const step of ticks(first, last, width / 110).values) make(svg, "text", { x: x(step), y: height - bottom + 19, "text-anchor": "middle" }, count(step));
    make(svg, "text", { x: width - right, y: height - 2, "text-anchor": "end" }, "steps");
    const plot = make(svg, "g", { "clip-path": `url(#${clip})` });
    for (const line of lines) {
      const path = line.points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      const stroke = { stroke: color(line.index), "stroke-width": line.width, "stroke-opacity": line.opacity, "stroke-linejoin": "round" };
      make(plot, "path", { d: path, fill: "none", ...stroke, "stroke-dasharray": line.label === undefined ? "" : dash(line.index) });
      const marked = line.markers && line.points.length < 60 ? line.points : line.label === undefined || line.opacity < 1 ? [] : spread(line.points, 6);
      for (const [step, value] of marked) {
        const at = `translate(${x(step).toFixed(1)} ${y(value).toFixed(1)})`;
        make(plot, "path", { d: marker(line.index), fill: color(line.index), "fill-rule": "evenodd", "fill-opacity": line.opacity, transform: at });
      }
    }
    const steps = [...new Set(named.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    const cross = make(svg, "line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    const dots = make(svg, "g");
    const area = make(svg, "rect", { x: left, y: top, width: width - left - right, height: height - top - bottom, fill: "transparent" });
    const leave = () => { hideTip(); cross.setAttribute("visibility", "hidden"); dots.replaceChildren(); };
    const show = (step, at) => {
      const found = named.map((line) => ({ line, point: valueAt(line.points, step) }));
      dots.replaceChildren();
      for (const { line, point } of found) make(dots, "circle", { cx: x(point[0]), cy: Math.max(top, Math.min(height - bottom, y(point[1]))), r: 4, fill: color(line.index), stroke: "var(--card)", "stroke-width": 1.5 });
      cross.setAttribute("x1", x(step)); cross.setAttribute("x2", x(step)); cross.setAttribute("visibility", "visible");
      showTip(at, `step ${count(step)}`, found.map(({ line, point }) => [color(line.index), line.name + line.label, write(point[1], 4)]));
    };
    area.addEventListener("pointerleave", leave);
    area.addEventListener("pointermove", (event) => {
      const at = first + (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right) * (last - first);
      show(steps.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a)), under(event));
    });
    walkable(svg, steps.length - 1, (place) => {
      const frame = svg.getBoundingClientRect();
      show(steps[place], { x: frame.left + x(steps[place]), y: frame.top + top });
    }, leave);
    numbers(figure, `${what} at some steps`, ["step", ...named.map((line) => line.name + line.label)],
      spread(steps, 10).map((step) => [count(step), ...named.map((line) => write(valueAt(line.points, step)[1], 4))]));
  });
}

// Horizontal bars, one per run and one per distinct unmodified model, stacked by kind of saved tensor.
function kindsChart(parent) {
  const bars = [];
  const seen = new Set();
  for (const [index, run] of data.runs.entries()) {
    const key = JSON.stringify(run.exact);
    if (Object.keys(run.exact).length && !seen.has(key)) {
      seen.add(key);
      bars.push({ name: `unmodified, ${run.exact_dtype}`, kinds: run.exact, of: run.name });
    }
    if (Object.keys(run.kept).length) bars.push({ name: run.name, kinds: run.kept, index, exact: run.exact });
  }
  // Runs of different models: each unmodified one is named after the first run that has it.
  if (seen.size > 1) for (const bar of bars) if (bar.of !== undefined) bar.name += ` (as ${bar.of})`;
  const sum = (kinds) => Object.values(kinds).reduce((a, b) => a + b, 0);
  const totals = {};
  for (const bar of bars) for (const [kind, value] of Object.entries(bar.kinds)) totals[kind] = Math.max(totals[kind] || 0, value);
  const order = Object.keys(totals).filter((kind) => kind !== "other").sort((a, b) => totals[b] - totals[a]);
  if ("other" in totals) order.push("other");
  const fill = (kind) => (kind === "other" ? "var(--other)" : `var(--k${order.indexOf(kind) % 8})`);
  kindsKey(parent, order, fill);
  redrawing(make(parent, "figure"), (figure) => {
    const box = make(figure, "div", { class: "chart" });
    const shown = bars.filter((bar) => bar.index === undefined || !hidden.has(bar.index));
    const width = box.clientWidth, row = 46, right = 132, most = Math.max(...bars.map((bar) => sum(bar.kinds)));
    const said = shown.map((bar) => `${bar.name}: ${nbytes(sum(bar.kinds))}`).join("; ");
    const svg = make(box, "svg", { height: shown.length * row + 4, role: "img", "aria-label": `Bytes kept for backward per token, by kind of layer. ${said}.` });
    for (const [line, bar] of shown.entries()) {
      const top = line * row, total = sum(bar.kinds), scale = (width - right) / most;
      make(svg, "text", { x: 0, y: top + 13, class: "strong" }, bar.name);
      let at = 0;
      for (const kind of order.filter((name) => bar.kinds[name])) {
        const value = bar.kinds[kind], wide = value * scale;
        const part = make(svg, "rect", { x: at, y: top + 19, width: Math.max(0.5, wide - 1.5), height: 20, fill: fill(kind), rx: 2 });
        part.addEventListener("pointermove", (event) => showTip(under(event), bar.name, [[fill(kind), kind, `${nbytes(value)} (${percent(value / total)})`]]));
        part.addEventListener("pointerleave", hideTip);
        if (wide > kind.length * 6.6 + 8) make(svg, "text", { x: at + 5, y: top + 33, class: "inside", "pointer-events": "none" }, kind);
        at += wide;
      }
      const whole = bar.exact ? sum(bar.exact) : 0;
      make(svg, "text", { x: at + 8, y: top + 34, class: "strong" }, nbytes(total) + (whole ? `, ${percent(total / whole)}` : ""));
    }
    numbers(figure, "Bytes kept for backward per token, by kind of layer", ["kind", ...shown.map((bar) => bar.name)],
      order.map((kind) => [kind, ...shown.map((bar) => nbytes(bar.kinds[kind] || 0))]));
  });
}

function kindsKey(parent, order, fill) {
  const key = make(parent, "div", { class: "kinds" });
  for (const kind of order) {
    const entry = make(key, "span");
    make(entry, "i", { class: "dot", style: `background:${fill(kind)}` });
    make(entry, "span", {}, kind);
  }
}
