# SPDX-License-Identifier: Apache-2.0
"""The text of the page that `plot_page.py` fills: style, and a script that draws SVG."""

TEMPLATE = r"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>
:root {
  color-scheme: light dark;
  --ink: #1c2330; --paper: #ffffff; --faint: #d7dce4; --soft: #5c6675;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ef; --paper: #14181f; --faint: #333b47; --soft: #9aa5b5; }
}
body {
  font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 24px;
}
h1 { font-size: 20px; }
h2 { font-size: 14px; margin: 0 0 4px; }
h2.wide { margin: 24px 0 4px; }
h2 small { color: var(--soft); font-weight: normal; }
#controls {
  display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; margin: 12px 0;
}
#controls button {
  font: inherit; color: inherit; background: none; border: 0; cursor: pointer; padding: 2px 0;
}
#controls button[aria-pressed="false"] { opacity: .4; text-decoration: line-through; }
.swatch {
  display: inline-block; width: 18px; height: 3px; margin-right: 6px; vertical-align: middle;
}
#panels {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(430px, 1fr)); gap: 24px;
}
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--faint); stroke-width: 1; }
.raw { fill: none; stroke-width: 1; opacity: .25; }
.line { fill: none; stroke-width: 1.6; }
.cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
.tip { min-height: 20px; color: var(--soft); font-variant-numeric: tabular-nums; }
.tip b { font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-top: 24px; font-variant-numeric: tabular-nums; }
th, td {
  border-bottom: 1px solid var(--faint); padding: 4px 14px 4px 0; text-align: right;
  white-space: nowrap;
}
th:first-child { text-align: left; font-weight: normal; color: var(--soft); }
</style>
</head>
<body>
<h1>{{title}}</h1>
<div id="controls"><label>smoothing
<input id="smoothing" type="range" min="0" max="0.99" step="0.01">
<output id="weight"></output></label></div>
<div id="panels"></div>
{{loads}}
<div class="scroll"><table>
{{table}}
</table></div>
<script type="application/json" id="data">{{data}}</script>
<script>
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLORS = [
  "#3b76c9", "#d9772b", "#2f9e6b", "#c2455f", "#8a63c7", "#a08a1f", "#2b9fb3", "#7d8794",
];
const W = 460, H = 240, LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 26;
const shown = DATA.runs.map(() => true);
const color = (run) => COLORS[run % COLORS.length];

function element(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(made);
  return made;
}
function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}
function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  return size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}
function panel(info) {
  const box = document.createElement("div");
  const head = document.createElement("h2");
  head.append(info.title + " ");
  const unit = document.createElement("small");
  unit.textContent = info.unit;
  head.append(unit);
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
  const tip = document.createElement("div");
  tip.className = "tip";
  box.append(head, svg, tip);
  let scale = null, lines = [];

  function draw(weight) {
    svg.replaceChildren();
    const usable = (v) => !info.log || v > 0;
    lines = info.curves.map((c, run) => {
      if (!c.length || !shown[run]) return null;
      const keep = c[0].map((_, i) => i).filter((i) => usable(c[1][i]));
      const steps = keep.map((i) => c[0][i]), raw = keep.map((i) => c[1][i]);
      return { run, steps, raw, values: smoothed(raw, weight) };
    }).filter((l) => l && l.steps.length);
    if (!lines.length) { scale = null; return; }
    const f = info.log ? Math.log10 : (v) => v;
    const xs = lines.flatMap((l) => [l.steps[0], l.steps[l.steps.length - 1]]);
    let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = Infinity, y1 = -Infinity;
    for (const l of lines) for (const v of l.values) {
      y0 = Math.min(y0, f(v));
      y1 = Math.max(y1, f(v));
    }
    if (x0 === x1) { x0 -= 1; x1 += 1; }
    const pad = (y1 - y0) * 0.05 || Math.abs(y1) * 0.05 || 1;
    y0 -= pad; y1 += pad;
    const X = (s) => LEFT + (s - x0) / (x1 - x0) * (W - LEFT - RIGHT);
    const Y = (v) => TOP + (y1 - f(v)) / (y1 - y0) * (H - TOP - BOTTOM);
    scale = { X, Y, x0, x1 };
    for (const t of ticks(y0, y1, 4)) {
      const v = info.log ? Math.pow(10, t) : t, y = Y(v);
      element("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y, y2: y }, svg);
      element("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, svg).textContent = short(v);
    }
    for (const t of ticks(x0, x1, 5)) {
      element("text", { x: X(t), y: H - 8, "text-anchor": "middle" }, svg).textContent = short(t);
    }
    const path = (l, values) => l.steps.map((s, i) => {
      const y = Math.max(TOP, Math.min(H - BOTTOM, Y(values[i])));
      return `${i ? "L" : "M"}${X(s).toFixed(1)} ${y.toFixed(1)}`;
    }).join("");
    for (const l of lines) {
      const stroke = color(l.run);
      if (weight > 0) element("path", { class: "raw", stroke, d: path(l, l.raw) }, svg);
      element("path", { class: "line", stroke, d: path(l, l.values) }, svg);
      if (l.steps.length < 40) for (let i = 0; i < l.steps.length; i++) {
        const spot = { cx: X(l.steps[i]), cy: Y(l.values[i]), r: 2.2, fill: stroke };
        element("circle", spot, svg);
      }
    }
  }
  function nearest(steps, at) {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const mid = (low + high) >> 1;
      if (steps[mid] < at) low = mid; else high = mid;
    }
    return at - steps[low] < steps[high] - at ? low : high;
  }
  svg.addEventListener("pointermove", (event) => {
    if (!scale) return;
    const rect = svg.getBoundingClientRect();
    const x = (event.clientX - rect.left) / rect.width * W;
    const at = scale.x0 + (x - LEFT) / (W - LEFT - RIGHT) * (scale.x1 - scale.x0);
    svg.querySelectorAll(".cursor").forEach((e) => e.remove());
    tip.replaceChildren();
    for (const l of lines) {
      const i = nearest(l.steps, at), px = scale.X(l.steps[i]);
      element("line", { class: "cursor", x1: px, x2: px, y1: TOP, y2: H - BOTTOM }, svg);
      const part = document.createElement("span"), name = document.createElement("b");
      name.style.color = color(l.run);
      name.textContent = DATA.runs[l.run] + " ";
      part.append(name, `${l.steps[i]}: ${l.raw[i].toPrecision(6)}   `);
      tip.append(part);
    }
  });
  svg.addEventListener("pointerleave", () => {
    svg.querySelectorAll(".cursor").forEach((e) => e.remove());
    tip.replaceChildren();
  });
  document.getElementById("panels").append(box);
  return draw;
}
const draws = DATA.panels.map(panel);
const slider = document.getElementById("smoothing");
function drawAll() {
  document.getElementById("weight").textContent = Number(slider.value).toFixed(2);
  draws.forEach((draw) => draw(Number(slider.value)));
}
DATA.runs.forEach((name, run) => {
  const button = document.createElement("button"), swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = color(run);
  button.append(swatch, name);
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    shown[run] = !shown[run];
    button.setAttribute("aria-pressed", String(shown[run]));
    drawAll();
  });
  document.getElementById("controls").append(button);
});
slider.value = DATA.smoothing;
slider.addEventListener("input", drawAll);
drawAll();
</script>
</body>
</html>
"""
