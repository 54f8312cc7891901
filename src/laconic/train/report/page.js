const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
const redraws = [];
const tip = document.getElementById("tip");
const color = (index) => `var(--c${index % 8})`;
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "14 4", "5 2 1 2", "1 2", "8 2 2 2 2 2"];
const dash = (index) => DASHES[index % 8];
// Shapes around a point, by run: disc, square, triangle, diamond, ring, cross, triangle down, bar.
const MARKERS = ["M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-3.5-3.5h7v7h-7z", "M0-4.6L4.4 3.6H-4.4z", "M0-5L5 0L0 5L-5 0z",
  "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0zM-2 0a2 2 0 1 1 4 0a2 2 0 1 1-4 0z",
  "M-4-2.6L-2.6-4L0-1.4L2.6-4L4-2.6L1.4 0L4 2.6L2.6 4L0 1.4L-2.6 4L-4 2.6L-1.4 0z", "M0 4.6L4.4-3.6H-4.4z", "M-2-5h4V5h-4z"];
const marker = (index) => MARKERS[index % 8];

// Elements, by tag and attributes; text always goes through textContent, so names of runs are never read as markup.
function make(parent, tag, attributes = {}, text = null) {
  const space = parent.namespaceURI === "http://www.w3.org/2000/svg" || tag === "svg";
  const element = space ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

let numCards = 0;
function card(title, note, wide = false) {
  const id = `card${numCards++}`;
  const box = make(document.getElementById("grid"), "section", { class: wide ? "card wide" : "card", "aria-labelledby": id });
  make(box, "h2", { id }, title);
  if (note) make(box, "p", { class: "soft" }, note);
  return box;
}

function nbytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < 4) { value /= 1000; unit += 1; }
  return `${unit && Math.abs(value) < 99.95 ? value.toPrecision(3) : value.toFixed(0)} ${units[unit]}`;
}
const count = (value) => Math.round(value).toLocaleString("en");
const fixed = (value, digits) => value.toFixed(Math.min(6, digits)).replace("-", "\u2212");
const signed = (value, digits) => (value > 0 ? "+" : "") + fixed(value, digits);
const percent = (share) => `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)} %`;
function duration(seconds) {
  const [scale, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "\u00b5s"];
  return `${Number((seconds * scale).toPrecision(3))} ${unit}`;
}

// What is under the pointer or the keyboard's place in a chart: `lines` of color, name and value.
function showTip(at, title, lines) {
  tip.replaceChildren();
  make(tip, "span", { class: "soft" }, title);
  for (const [fill, name, value] of lines) {
    const line = make(tip, "div");
    if (fill) make(line, "span", { class: "dot", style: `background:${fill}` });
    make(line, "span", {}, name);
    make(line, "b", {}, value);
  }
  tip.style.display = "block";
  const left = at.x + 16 + tip.offsetWidth > innerWidth ? at.x - 16 - tip.offsetWidth : at.x + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(at.y + 14, innerHeight - tip.offsetHeight - 4))}px`;
}
const hideTip = () => { tip.style.display = "none"; };
const under = (event) => ({ x: event.clientX, y: event.clientY });

// Charts are drawn to the pixel width of their box, so text keeps its size; again when that or the choice of runs changes.
function redrawing(box, draw) {
  redraws.push(() => { box.replaceChildren(); draw(box); });
}
const redraw = () => redraws.forEach((run) => run());
const shownRuns = () => data.runs.map((run, index) => ({ run, index })).filter(({ index }) => !hidden.has(index));

// A table that can be reached and scrolled with the keyboard. `rows` start with their heading.
function table(parent, caption, head, rows, fill = null) {
  const box = make(parent, "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption });
  const sheet = make(box, "table");
  make(sheet, "caption", {}, caption);
  const top = make(make(sheet, "thead"), "tr");
  for (const name of head) make(top, "th", { scope: "col" }, name);
  const body = make(sheet, "tbody");
  for (const [label, ...cells] of rows) {
    const line = make(body, "tr");
    make(line, "th", { scope: "row" }, label);
    for (const [index, cell] of cells.entries()) (fill || ((box, text) => { box.textContent = text; }))(make(line, "td"), cell, index);
  }
}

// The numbers of a chart as a table, closed at first: the same for those who do not see it.
function numbers(parent, caption, head, rows) {
  const box = make(parent, "details");
  make(box, "summary", {}, "Numbers");
  table(box, caption, head, rows);
}

function comparison(parent, caption, what, rows) {
  const cells = rows.map((row) => [row.label, ...row.cells.map((cell) => ({ ...cell, compared: row.cells.some((one) => one.difference) }))]);
  table(parent, caption, [what, ...data.runs.map((run) => run.name)], cells, (box, cell, index) => {
    box.textContent = cell.text;
    const [tone, word] = cell.better === true ? [" good", "better"] : cell.better === false ? [" bad", "worse"] : ["", ""];
    if (cell.compared && index) make(box, "span", { class: `diff${tone}`, title: word }, cell.difference);
  });
}

function runKey(parent, index) {
  const sample = make(parent, "svg", { class: "key", viewBox: "0 0 34 12", "aria-hidden": "true" });
  make(sample, "path", { d: "M0 6H34", stroke: color(index), "stroke-width": 2, "stroke-dasharray": dash(index) });
  make(sample, "path", { d: marker(index), fill: color(index), "fill-rule": "evenodd", transform: "translate(17 6)" });
}

const legend = document.getElementById("legend");
for (const [index, run] of data.runs.entries()) {
  const button = make(legend, "button", { type: "button", "aria-pressed": "true", title: `${run.path}: show or hide` });
  runKey(button, index);
  make(button, "span", {}, run.setting ? `${run.name} (${run.setting})` : run.name);
  button.addEventListener("click", () => {
    if (!hidden.delete(index)) hidden.add(index);
    button.setAttribute("aria-pressed", String(!hidden.has(index)));
    redraw();
  });
}
for (const verdict of data.verdicts) make(document.getElementById("verdicts"), "li", {}, verdict);
document.getElementById("footer").textContent = `Written by laconic ${data.version}. Everything on this page is in this one file.`;
