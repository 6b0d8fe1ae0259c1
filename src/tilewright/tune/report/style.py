"""How a report looks, and the little that it does: plots, sorting, copying, printing."""

CSS = """
:root { color-scheme: light; --ink: #27313b; --soft: #5c6873; --line: #dde2e7; --accent: #0b61a4; --bad: #b3400f }
* { box-sizing: border-box }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink); background: #fff;
  max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; overflow-wrap: anywhere; -webkit-text-size-adjust: 100% }
h1 { font-size: 1.1rem; font-weight: 600; margin: 0; color: var(--soft) }
h2 { font-size: 1.25rem; margin: 0 0 .25rem }
h3 { font-size: 1rem; margin: 0 0 .25rem }
section { margin-top: 3rem; padding-top: 1.5rem; border-top: 1px solid var(--line) }
.verdict { display: inline-block; margin: .4rem 0; padding: .15rem .7rem; border-radius: 1rem; font-weight: 600;
  color: var(--accent); background: #e8f1f9; font-size: .95rem }
.verdict.bad { color: var(--bad); background: #fbebe3 }
.sentences { font-size: clamp(1.15rem, 2.4vw, 1.5rem); line-height: 1.4; max-width: 46rem }
.sentences p { margin: .6rem 0 }
.facts { display: flex; flex-wrap: wrap; gap: .6rem 2rem; margin: 1.4rem 0 0; font-size: .9rem }
.facts dt { color: var(--soft); font-size: .8rem }
.facts dd { margin: 0; font-variant-numeric: tabular-nums }
nav { margin-top: 1.6rem; font-size: .9rem }
nav ul { list-style: none; padding: 0; margin: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem }
a { color: var(--accent); text-underline-offset: .15em }
a:not(:hover) { text-decoration-color: #b9d2e6 }
.note { color: var(--soft); margin: 0 0 .8rem; max-width: 46rem; font-size: .95rem }
.none { color: var(--soft); font-style: italic; margin: .5rem 0 }
figure { margin: 0 0 1rem }
.plot { width: 100%; overflow: hidden }
.legend, .plain { list-style: none; padding: 0; margin: .3rem 0 0; font-size: .85rem; color: var(--soft) }
.legend { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem }
i { font-style: normal }
.legend i { margin-right: .4em }
.line { display: inline-block; width: 1.6em; vertical-align: middle }
.side { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem 2rem;
  margin-top: 1rem }
.side > * { min-width: 0 }
.wide { overflow-x: auto; margin-top: .8rem }
table { border-collapse: collapse; font-size: .85rem; line-height: 1.4; overflow-wrap: normal }
th, td { padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { color: var(--soft); font-weight: 600; white-space: nowrap }
th.number, td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.parts tr:last-child td { font-weight: 600; border-bottom: 0 }
tfoot td { color: var(--soft) }
td.name { min-width: 12rem; max-width: 34rem; overflow-wrap: anywhere; font-size: .8rem }
td.swatch { padding-left: 1.1em; text-indent: -1.1em }
.bar { display: block; height: 4px; margin-top: 3px; border-radius: 2px }
.trials td:nth-child(2), .trials td:last-child, .why td:last-child { min-width: 14rem; max-width: 26rem;
  overflow-wrap: anywhere }
th button { all: unset; cursor: pointer }
th button:hover, th button:focus-visible { color: var(--accent); text-decoration: underline }
th[aria-sort=ascending] button::after { content: " ↑" }
th[aria-sort=descending] button::after { content: " ↓" }
details { margin-top: .2rem }
summary { cursor: pointer; color: var(--accent) }
pre { background: #f5f7f9; padding: .8rem; margin: .4rem 0 0; overflow: auto; font: .8rem/1.45 ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30rem; border-radius: 4px }
#copy { font: inherit; font-size: .85rem; padding: .3rem .9rem; border: 1px solid var(--accent); border-radius: 4px;
  color: var(--accent); background: #fff; cursor: pointer }
@media (max-width: 40rem) {
  table { font-size: .8rem }
  th, td { padding-right: .5rem }
  td:not(.number), td.name { min-width: 0; white-space: normal; overflow-wrap: anywhere }
  .cards, .cards tbody, .cards tfoot, .cards tr { display: block }
  .cards thead { display: none }
  .cards tr { padding: .5rem 0; border-bottom: 1px solid var(--line) }
  .cards td, .cards td.name { display: block; overflow: hidden; min-width: 0; max-width: none; padding: .1rem 0;
    border: 0; text-align: right; text-indent: 0; white-space: normal; overflow-wrap: anywhere }
  .cards td:empty { display: none }
  .cards td::before { content: attr(data-label); float: left; padding-right: 1rem; color: var(--soft) }
  .cards td:first-child { font-weight: 600; text-align: left }
  .cards td:first-child::before { content: none }
}
@media print {
  @page { margin: 14mm }
  body { padding: 0; max-width: none; font-size: 11pt }
  body.printing { width: 180mm }
  section { margin-top: 1.2rem; padding-top: .8rem }
  h2, h3, .note { break-after: avoid }
  figure, tr { break-inside: avoid }
  button#copy, details, nav { display: none }
  .wide { overflow: visible }
  table { font-size: 7.5pt; width: 100% }
  td.name, .trials td:nth-child(2), .trials td:last-child, .why td:last-child { min-width: 0 }
  pre { max-height: none; background: none; border: 1px solid var(--line) }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact }
}
"""

JAVASCRIPT = """
"use strict";
const drawn = [];
const config = { displayModeBar: false, displaylogo: false, responsive: true, showTips: false };
for (const [id, figure] of Object.entries(JSON.parse(document.getElementById("figures").textContent))) {
  const place = document.getElementById(id);
  Plotly.newPlot(place, figure.data, figure.layout, config);
  drawn.push(place);
  if (figure.labels.length) {
    let width = 0;
    const again = () => {
      if (place.clientWidth === width) return;
      width = place.clientWidth;
      Plotly.relayout(place, { annotations: labelled(place, figure.labels) });
    };
    place.on("plotly_afterplot", again);
    again();
  }
}

// Each label goes beside its point where it covers no other label, no point and no edge: the first of its texts that
// has room on one of four sides, or none.
function labelled(place, labels) {
  const { xaxis, yaxis } = place._fullLayout, font = "11px system-ui, sans-serif";
  const measure = document.createElement("canvas").getContext("2d");
  measure.font = font;
  const at = ({ x, y }) => [xaxis.d2p(x), yaxis.d2p(y)];
  const taken = labels.map(label => {
    const [x, y] = at(label);
    return { left: x - 6, right: x + 6, top: y - 6, bottom: y + 6 };
  });
  const free = box => box.left >= 0 && box.right <= xaxis._length && box.top >= 0 && box.bottom <= yaxis._length &&
    taken.every(other => box.right < other.left || other.right < box.left || box.bottom < other.top ||
      other.bottom < box.top);
  const find = (label, text) => {
    const [x, y] = at(label);
    const width = measure.measureText(text.replace(/&\\w+;/g, "m")).width + 12, height = 18;
    for (const [side, rise] of [[1, 0], [-1, 0], [0, -1], [0, 1], [1, -1], [-1, -1], [1, 1], [-1, 1]]) {
      const centre = x + side * (width / 2 + 8), middle = y + rise * (side ? 12 : 17);
      const box = { left: centre - width / 2, right: centre + width / 2, top: middle - height / 2,
        bottom: middle + height / 2 };
      if (free(box)) {
        taken.push(box);
        return { x: label.x, y: label.y, text, showarrow: false, xshift: centre - x, yshift: y - middle,
          font: { size: 11, color: "#3d4852" }, bgcolor: "rgba(255, 255, 255, 0.75)", borderpad: 0 };
      }
    }
    return null;
  };
  const shown = [];
  for (const label of labels) {
    for (const text of label.texts) {
      const found = find(label, text);
      if (found) {
        // On a logarithmic axis an annotation lies at the exponent.
        if (xaxis.type === "log") found.x = Math.log10(found.x);
        if (yaxis.type === "log") found.y = Math.log10(found.y);
        shown.push(found);
        break;
      }
    }
  }
  return shown;
}

// A page of paper is narrower than a screen, and knows it only now.
addEventListener("beforeprint", () => {
  document.body.classList.add("printing");
  for (const place of drawn) Plotly.relayout(place, { width: Math.min(place.clientWidth, 660) });
});
addEventListener("afterprint", () => {
  document.body.classList.remove("printing");
  for (const place of drawn) Plotly.relayout(place, { width: null, autosize: true });
});

for (const button of document.querySelectorAll("table.sortable th button")) {
  button.addEventListener("click", () => {
    const heading = button.parentElement, table = heading.closest("table"), body = table.tBodies[0];
    const rising = heading.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const value = row => {
      const cell = row.cells[heading.cellIndex];
      if (cell.classList.contains("number")) return cell.dataset.value === undefined ? null : +cell.dataset.value;
      return cell.textContent;
    };
    const compare = (a, b) => typeof a === "string" ? a.localeCompare(b) : a - b;
    const rows = [...body.rows].map(row => [value(row), row]);
    // What has no value stays at the end, whichever way one sorts.
    rows.sort(([a], [b]) => a === null || b === null ? (a === null) - (b === null) : (rising ? 1 : -1) * compare(a, b));
    body.append(...rows.map(([, row]) => row));
  });
}

const copy = document.getElementById("copy");
if (copy) copy.addEventListener("click", () => {
  getSelection().selectAllChildren(document.getElementById("yaml"));
  copy.textContent = document.execCommand("copy") ? "Copied" : "Selected";
});
"""
