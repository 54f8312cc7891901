// Bars by group of sites: what the unmodified model keeps there, and what each run does.
function sitesChart(parent) {
  const MOST = 12;
  redrawing(make(parent, "figure"), (figure) => {
    const shown = shownRuns().filter(({ run }) => run.sites.length);
    if (!shown.length) { make(figure, "p", { class: "soft" }, "No run that is shown has this."); return; }
    const groups = new Map();
    for (const { run, index } of shown) for (const site of run.sites) {
      if (!groups.has(site.name)) groups.set(site.name, { name: site.name, kind: site.kind, before: 0, of: new Map() });
      const group = groups.get(site.name);
      group.before = Math.max(group.before, site.before);
      group.of.set(index, site);
    }
    const order = [...groups.values()].sort((a, b) => b.before - a.before);
    const box = make(figure, "div", { class: "chart" });
    const width = box.clientWidth, bar = 10, right = 150, drawn = order.slice(0, MOST);
    const most = Math.max(...order.map((group) => Math.max(group.before, ...[...group.of.values()].map((site) => site.after))));
    const scale = Math.max(40, width - right) / (most || 1);
    const said = drawn.slice(0, 3).map((group) => `${group.name}: ${nbytes(group.before)} unmodified, ${[...group.of].map(([index, site]) => `${nbytes(site.after)} in ${data.runs[index].name}`).join(", ")}`);
    const heights = drawn.map((group) => 30 + (group.of.size + 1) * (bar + 3));
    const svg = make(box, "svg", { height: heights.reduce((a, b) => a + b, 0), role: "img", "aria-label": `Bytes kept for backward per token, by site. The largest: ${said.join("; ")}.` });
    let y = 0;
    for (const group of drawn) {
      make(svg, "text", { x: 0, y: y + 14, class: "strong" }, group.name);
      y += 20;
      const bars = [["unmodified", group.before, "var(--bare)"], ...[...group.of].map(([index, site]) => [data.runs[index].name, site.after, color(index), site])];
      for (const [name, value, fill, site] of bars) {
        make(svg, "rect", { x: 0, y, width: Math.max(1, value * scale), height: bar, fill, rx: 1 });
        const text = nbytes(value) + (site ? ` of ${nbytes(site.before)}` : "");
        make(svg, "text", { x: Math.max(1, value * scale) + 6, y: y + bar, style: "font-size: 11px" }, text);
        const area = make(svg, "rect", { x: 0, y, width, height: bar + 3, fill: "transparent" });
        area.addEventListener("pointermove", (event) => showTip(under(event), group.name, [[fill, name, nbytes(value)], ...(site ? [["", "kept as", site.kept_as]] : [])]));
        area.addEventListener("pointerleave", hideTip);
        y += bar + 3;
      }
      y += 10;
    }
    if (order.length > drawn.length) make(figure, "p", { class: "soft" }, `The ${MOST} largest of ${order.length}; the table has all.`);
    const kept = (site) => (site ? `${nbytes(site.after)} (${site.kept_as})` : "\u2013");
    numbers(figure, "Bytes kept for backward per token, by site; * stands for the number of a layer", ["site", "kind", "unmodified", ...shown.map(({ run }) => run.name)],
      order.map((group) => [group.name, group.kind, nbytes(group.before), ...shown.map(({ index }) => kept(group.of.get(index)))]));
  });
}

// Cividis (Nunez, Anderton, Renslow 2018), made to look alike with every kind of color vision. 0 to 1.
const RAMP = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
function ramp(share) {
  const at = Math.max(0, Math.min(1, share)) * (RAMP.length - 1), i = Math.min(RAMP.length - 2, Math.floor(at));
  return `rgb(${RAMP[i].map((value, c) => Math.round(value + (RAMP[i + 1][c] - value) * (at - i))).join(" ")})`;
}

// Tokens of each expert over steps, a map per layer, in shares of an even load: dark is idle, bright is twice as much or more.
function expertsChart(parent, run) {
  const { steps, layers, numbers: shown } = run.experts;
  const ratio = (loads, expert) => { const total = loads.reduce((a, b) => a + b, 0); return total ? loads[expert] * loads.length / total : 1; };
  const scale = make(parent, "div", { class: "kinds", "aria-hidden": "true" });
  for (const [share, text] of [[0, "no tokens"], [0.5, "an even share"], [1, "twice that or more"]]) {
    const entry = make(scale, "span");
    make(entry, "i", { class: "dot", style: `background:${ramp(share)}` });
    make(entry, "span", {}, text);
  }
  redrawing(make(parent, "figure", { class: "maps" }), (figure) => {
    for (const [place, loads] of layers.entries()) {
      const cellBox = make(figure, "div", { class: "chart" });
      make(cellBox, "h3", {}, `layer ${shown[place]}`);
      const experts = loads[0].length, width = cellBox.clientWidth, left = 30, cell = Math.max(2, Math.min(18, Math.floor(220 / experts)));
      const height = cell * experts, wide = (width - left) / steps.length;
      const worst = (at) => Math.max(...loads[at].map((_, expert) => ratio(loads[at], expert)));
      const end = steps.length - 1;
      const svg = make(cellBox, "svg", { height: height + 20, viewBox: `0 0 ${width} ${height + 20}`, role: "img", "shape-rendering": "crispEdges",
        "aria-label": `Load of ${experts} experts in layer ${shown[place]}. The busiest has ${worst(0).toFixed(2)} times an even share at step ${steps[0]} and ${worst(end).toFixed(2)} times at step ${steps[end]}. Arrow keys read it step by step.` });
      for (let at = 0; at < steps.length; at += 1) for (let expert = 0; expert < experts; expert += 1) {
        make(svg, "rect", { x: left + at * wide, y: expert * cell, width: wide + 0.3, height: cell, fill: ramp(ratio(loads[at], expert) / 2) });
      }
      for (const expert of [0, experts - 1]) make(svg, "text", { x: left - 6, y: expert * cell + cell / 2 + 4, "text-anchor": "end" }, expert);
      make(svg, "text", { x: left, y: height + 16 }, `step ${count(steps[0])}`);
      make(svg, "text", { x: width, y: height + 16, "text-anchor": "end" }, count(steps[end]));
      const frame = make(svg, "rect", { fill: "none", stroke: "var(--ink)", "stroke-width": 1.5, visibility: "hidden", height, width: Math.max(3, wide), y: 0 });
      const show = (at, expert, where) => {
        frame.setAttribute("x", left + at * wide); frame.setAttribute("visibility", "visible");
        const listed = expert === null ? loads[at].map((_, i) => i).sort((a, b) => loads[at][b] - loads[at][a]).slice(0, 3) : [expert];
        showTip(where, `step ${count(steps[at])}`, listed.map((i) => [ramp(ratio(loads[at], i) / 2), `expert ${i}`, `${count(loads[at][i])} tokens, ${ratio(loads[at], i).toFixed(2)}x`]));
      };
      const leave = () => { hideTip(); frame.setAttribute("visibility", "hidden"); };
      svg.addEventListener("pointerleave", leave);
      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect(), at = Math.floor((event.clientX - box.left - left) / wide), expert = Math.floor((event.clientY - box.top) / cell);
        if (at >= 0 && at < steps.length && expert < experts) show(at, expert, under(event)); else leave();
      });
      walkable(svg, end, (at) => { const box = svg.getBoundingClientRect(); show(at, null, { x: box.left + left + at * wide, y: box.top }); }, leave);
    }
  });
  const rows = layers.map((loads, place) => {
    const extremes = [loads[0], loads[loads.length - 1]].flatMap((one) => {
      const shares = one.map((_, expert) => ratio(one, expert));
      return [Math.max(...shares), Math.min(...shares)].map((value) => `${value.toFixed(2)}x`);
    });
    return [String(shown[place]), ...extremes];
  });
  const [first, last] = [steps[0], steps[steps.length - 1]].map(count);
  numbers(parent, "Load of the busiest and the idlest expert, in even shares", ["layer", `busiest, step ${first}`, `idlest, step ${first}`, `busiest, step ${last}`, `idlest, step ${last}`], rows);
}

// When tasks ran, a lane per rank or stream.
function scheduleChart(parent, run) {
  const { groups, kinds, step, schedule } = run.timeline;
  make(parent, "p", { class: "soft" }, `Step ${count(step)}, measured: ${schedule}.`);
  const fill = (kind) => `var(--k${kinds.indexOf(kind) % 8})`;
  kindsKey(parent, kinds, fill);
  for (const group of groups) {
    make(parent, "h3", {}, group.title);
    redrawing(make(parent, "figure"), (figure) => {
      const box = make(figure, "div", { class: "chart" });
      const width = box.clientWidth, row = 44, whole = Math.max(...group.lanes.flatMap((lane) => lane.tasks.map((task) => task[2]))) || 1;
      const busy = (lane) => lane.tasks.reduce((sum, task) => sum + task[2] - task[1], 0) / whole;
      const said = group.lanes.map((lane) => `${lane.name} works ${percent(busy(lane))} of it`).join(", ");
      const height = group.lanes.length * row + 22;
      const svg = make(box, "svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${group.title} of step ${step}, ${duration(whole)}: ${said}.` });
      for (const [line, lane] of group.lanes.entries()) {
        const top = line * row;
        make(svg, "text", { x: 0, y: top + 13, class: "strong" }, lane.name);
        make(svg, "text", { x: width, y: top + 13, "text-anchor": "end" }, `${percent(busy(lane))} busy`);
        make(svg, "rect", { x: 0, y: top + 18, width, height: 20, fill: "var(--line)", opacity: 0.6 });
        for (const [name, start, end, kind] of lane.tasks) {
          const x = start / whole * width, wide = Math.max(1, (end - start) / whole * width);
          const part = make(svg, "rect", { x, y: top + 18, width: Math.max(1, wide - 0.8), height: 20, fill: fill(kind), rx: 1.5 });
          part.addEventListener("pointermove", (event) => showTip(under(event), name, [[fill(kind), `${duration(start)} to ${duration(end)}`, duration(end - start)]]));
          part.addEventListener("pointerleave", hideTip);
          if (wide > name.length * 6.8 + 4) make(svg, "text", { x: x + wide / 2, y: top + 32, class: "inside", "text-anchor": "middle", "pointer-events": "none" }, name);
        }
      }
      for (let tick = 0; tick <= 4; tick += 1) make(svg, "text", { x: width * tick / 4, y: height - 4, "text-anchor": tick === 0 ? "start" : tick === 4 ? "end" : "middle" }, duration(whole * tick / 4));
      const tasks = group.lanes.flatMap((lane) => lane.tasks.map((task) => [task[0], lane.name, duration(task[1]), duration(task[2] - task[1])]));
      numbers(figure, `Tasks of ${group.title}`, ["task", "on", "starts", "takes"], tasks);
    });
  }
}

comparison(card("Summary", data.runs.length > 1 ? `Differences are to ${data.runs[0].name}.` : "", true), "Measures of each run", "measure", data.rows);
const has = (field) => data.runs.some((run) => (Array.isArray(run[field]) ? run[field].length : run[field] && Object.keys(run[field]).length));
const one = (field, more = {}) => ({ field, opacity: 1, width: 2, label: "", ...more });
const behind = (field) => ({ field, opacity: 0.35, width: 1.2, scale: false });
if (has("loss")) lineChart(card("Training loss", "Smoothed; raw values behind. The steep first steps are cut off."), {
  layers: [{ ...behind("raw_loss"), opacity: 0.18 }, one("loss")], write: fixed, what: "Training loss", clipEarly: true });
if (has("validation_loss")) lineChart(card("Validation loss", "On the same held-out samples each time."), {
  layers: [one("validation_loss", { markers: true })], write: fixed, what: "Validation loss", clipEarly: true });
if (has("loss_gap") || has("validation_gap")) lineChart(card(`Loss against ${data.runs[0].name}`, "Below zero is better. Faint: smoothed training loss. Strong: validation loss."), {
  layers: [one("loss_gap", { opacity: 0.4, width: 1.5, label: ", training" }), one("validation_gap", { markers: true, label: ", validation" })],
  write: signed, what: "Difference of the loss to the first run", zero: true, clipEarly: true });
if (has("speed")) lineChart(card("Throughput", `${data.units} per second over all processes, smoothed; without the first step.`), { layers: [one("speed")], write: count, what: `${data.units} per second`, zero: true });
if (has("memory")) lineChart(card("Memory of a process", "Held after each step on rank 0: by the CUDA allocator, or resident on CPUs. Faint: the peak so far."), {
  layers: [{ ...behind("peak_memory"), scale: true }, one("memory")], write: nbytes, what: "Memory of a process" });
if (has("wire")) lineChart(card("Sent by a process per step", "Bytes on the wire. Faint: the same before lossless coding, where it is more."), {
  layers: [{ ...behind("wire_raw"), scale: true }, one("wire")], write: nbytes, what: "Bytes sent by a process per step", zero: true });
if (has("kept")) kindsChart(card("Kept for backward", "Bytes per token or image, by kind of layer that saves them.", true));
if (has("sites")) sitesChart(card("Kept for backward, site by site", "Bytes per token or image. Grey: the unmodified model. * stands for the number of a layer; layers are added up.", true));
for (const run of data.runs) if (run.experts) expertsChart(card(`Load of experts, ${run.name}`, "Tokens of each expert (rows) over steps (columns), as a share of an even load.", true), run);
for (const run of data.runs) if (run.timeline) scheduleChart(card(`Schedule, ${run.name}`, "", true), run);
if (data.differences.length) comparison(card("Configuration", "Only what differs.", true), "Settings that differ", "setting", data.differences);
for (const [title, sentences] of [["Not in this report", data.left_out], ["Notes", data.runs.flatMap((run) => run.notes)]]) {
  if (!sentences.length) continue;
  const list = make(card(title, "", true), "ul", { class: "left-out" });
  for (const sentence of sentences) make(list, "li", {}, sentence);
}
redraw();
addEventListener("resize", redraw);
