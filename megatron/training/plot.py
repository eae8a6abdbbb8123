# SPDX-License-Identifier: Apache-2.0
"""Plot and compare runs from their metrics.jsonl: a PNG, a self-contained HTML page, a table.

The load of experts is drawn as a heat map.

    python -m megatron.training.plot --metrics runs/a runs/b --names "lr 1e-3" "lr 3e-3" \
        --html compare.html --output compare.png

Curves are matched by name and smoothed, and their last values compared. The HTML page contains its
style, and a script that draws SVG. Heat maps are SVG in the page, and matplotlib images in the PNG.
White is the mean load of a layer, red is above it, blue below; the colour scale ends at 0 and at
twice the mean.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.cli.errors import run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.standard_streams import run_command
from megatron.core.untrusted_files import replace_file, replacing
from megatron.training.monitoring.metrics import EXPERT_LOAD, read_metrics

_LARGEST_NUMBER = 1e100  # that is drawn


@dataclass(frozen=True)
class Quantity:
    """A quantity to plot.

    Args:
        key: event kind and name in metrics.jsonl: `train/lm_loss`.
        title: title of the panel.
        unit: unit of the plotted values.
        factor: plotted value per recorded value.
        logarithmic: whether the value axis is logarithmic.
    """

    key: str
    title: str
    unit: str
    factor: float = 1.0
    logarithmic: bool = False


QUANTITIES = (
    Quantity("train/lm_loss", "training loss", "nats per token"),
    Quantity("validation/lm_loss", "validation loss", "nats per token"),
    Quantity("train/mtp_1_loss", "loss one token further ahead", "nats per token"),
    Quantity("train/mtp_2_loss", "loss two tokens further ahead", "nats per token"),
    Quantity("train/learning_rate", "learning rate", ""),
    Quantity("train/grad_norm", "gradient norm", "before clipping", logarithmic=True),
    Quantity("train/expert_load_max", "load of the busiest expert", "of the mean"),
    Quantity("train/router_entropy", "entropy of routers", "nats"),
    Quantity("train/tokens_dropped", "dropped by full experts", "%", 100.0),
    Quantity("train/aux_loss", "loss of uneven load", "without its coefficient"),
    Quantity("train/z_loss", "loss of large router logits", "without its coefficient"),
    Quantity("train/tokens_per_second", "speed", "tokens/s"),
    Quantity("train/tflops", "speed per device", "TFLOP/s"),
    Quantity("train/memory_bytes", "memory", "MB", 1e-6),
    Quantity("train/peak_memory_bytes", "peak memory", "MB", 1e-6),
)


@dataclass(frozen=True)
class Curve:
    """Finite values over iterations."""

    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class RecordedRun:
    """A run's name, its curves by `Quantity.key`, and the last expert load per layer."""

    name: str
    curves: dict[str, Curve]
    loads: dict[str, list[float]] = field(default_factory=dict)
    loads_at: int = 0


def metrics_file(path_or_folder: str) -> Path:
    """Return the metrics.jsonl of a path: the file itself, or the one in a run's folder.

    Raises:
        ValueError: there is no such file.
    """
    path = Path(path_or_folder)
    if path.is_dir():
        inside = (path / "metrics.jsonl", path / "checkpoints" / "metrics.jsonl")
        path = next((p for p in inside if p.is_file()), inside[0])
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name a metrics.jsonl or the folder of a run")
    return path


def read_run(path_or_folder: str, name: str) -> RecordedRun:
    """Read the curves of a run.

    Raises:
        ValueError: the file does not exist, or contains no losses.
    """
    path = metrics_file(path_or_folder)
    points: dict[str, dict[int, float]] = {}
    loads, loads_at = {}, 0
    try:
        events = read_metrics(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    for event in events:
        if _is_table(event.get(EXPERT_LOAD)):
            loads, loads_at = event[EXPERT_LOAD], event["iteration"]
        for quantity in QUANTITIES:
            kind, _, key = quantity.key.partition("/")
            value: Any = event.get(key)
            if event.get("kind") == kind and _is_number(value):
                points_of_key = points.setdefault(quantity.key, {})
                points_of_key[event["iteration"]] = value * quantity.factor
    if not {"train/lm_loss", "validation/lm_loss"} & points.keys():
        raise ValueError(f"{path} has no losses: name the metrics.jsonl of a run that trained")
    curves = {key: Curve(tuple(p), tuple(p.values())) for key, p in points.items()}
    return RecordedRun(name, curves, loads, loads_at)


def _is_number(value: object) -> bool:
    """Return whether a value can be plotted: JSON integers may be arbitrarily large."""
    return isinstance(value, (int, float)) and abs(value) < _LARGEST_NUMBER


def _is_table(value: object) -> bool:
    """Return whether a value is a mapping from names to rows of numbers of equal length."""
    if not isinstance(value, dict) or not all(isinstance(row, list) for row in value.values()):
        return False
    numbers = [number for row in value.values() for number in row]
    return (
        bool(numbers) and all(map(_is_number, numbers)) and len(set(map(len, value.values()))) == 1
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest distinct suffixes of the paths."""
    path_segments = [
        [p for p in Path(path).parts if p != "metrics.jsonl"] or [path] for path in paths
    ]
    for length in range(1, max(map(len, path_segments)) + 1):
        names = ["/".join(p[-length:]) for p in path_segments]
        if len(set(names)) == len(names):
            return names
    return [f"{i + 1}: {'/'.join(p)}" for i, p in enumerate(path_segments)]


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average with bias correction; `weight`, in [0, 1), is the
    weight of the past."""
    mean, total, smoothed = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1.0 - weight) * value
        total = weight * total + (1.0 - weight)
        smoothed.append(mean / total)
    return smoothed


def comparison(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return a table of last values: a header, then one row per quantity that compares the other
    runs with the first."""
    table = [["last value", *(run.name for run in runs)]]
    for quantity in QUANTITIES:
        values = [_last_value(run, quantity.key) for run in runs]
        if all(value is None for value in values):
            continue
        unit = f" ({quantity.unit})" if quantity.unit else ""
        row = [f"{quantity.title}{unit}"]
        for column, value in enumerate(values):
            row.append(_cell(value, values[0] if column else None))
        table.append(row)
    last_iterations = [max(c.steps[-1] for c in run.curves.values()) for run in runs]
    table.append(["iteration", *map(str, last_iterations)])
    return table


def _last_value(run: RecordedRun, key: str) -> float | None:
    return run.curves[key].values[-1] if key in run.curves else None


def _cell(value: float | None, baseline: float | None) -> str:
    if value is None:
        return "—"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if baseline is None or baseline == 0:
        return text
    return f"{text} ({(value - baseline) / abs(baseline):+.2%})"


#: A heat map: the load of each expert as a multiple of its layer's mean, by layer.
Loads = Mapping[str, Sequence[float]]

_LOW_LOAD, _HIGH_LOAD = (59, 118, 201), (194, 69, 95)
_LEFT, _TOP, _ROW, _WIDTH = 64, 20, 16, 900


def color(load: float) -> str:
    """Return the colour of a load; 1 is an even load."""
    intensity = min(1.0, abs(load - 1.0))
    end = _HIGH_LOAD if load > 1.0 else _LOW_LOAD
    return "#" + "".join(f"{round(255 + (channel - 255) * intensity):02x}" for channel in end)


def load_svg(loads: Loads) -> str:
    """Return an SVG heat map with one cell per expert; the cell's title names the expert."""
    num_experts = max(map(len, loads.values()))
    cell = (_WIDTH - _LEFT) / num_experts
    height = _TOP + _ROW * len(loads)
    elements = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" data-chart="expert-load">']
    for expert in range(0, num_experts, max(1, num_experts // 16)):
        x = _LEFT + (expert + 0.5) * cell
        elements.append(f'<text x="{x:.1f}" y="12" text-anchor="middle">{expert}</text>')
    for row, (name, values) in enumerate(loads.items()):
        y, label = _TOP + row * _ROW, html.escape(name)
        elements.append(f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{label}</text>')
        elements += [
            f'<rect x="{_LEFT + expert * cell:.1f}" y="{y}" width="{cell:.2f}" height="{_ROW - 1}" '
            f'fill="{color(load)}"><title>{label}, expert {expert}: {load:.2f}</title></rect>'
            for expert, load in enumerate(values)
        ]
    return "".join([*elements, "</svg>"])


def draw_loads(axes: Any, loads: Loads) -> Any:
    """Draw the heat map on matplotlib axes and return the image, for a colour bar."""
    image = axes.imshow(
        [list(values) for values in loads.values()],
        aspect="auto",
        cmap="RdBu_r",
        vmin=0.0,
        vmax=2.0,
        interpolation="nearest",
    )
    axes.set_yticks(range(len(loads)), list(loads))
    axes.set_xlabel("expert")
    return image


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


def page(runs: Sequence[RecordedRun], *, title: str, smoothing: float) -> str:
    """Return the HTML page.

    Args:
        runs: runs to plot; the table compares the others with the first.
        title: title of the page.
        smoothing: initial value of the smoothing slider.
    """
    data = {
        "smoothing": smoothing,
        "runs": [run.name for run in runs],
        "panels": [
            {
                "title": quantity.title,
                "unit": quantity.unit,
                "log": quantity.logarithmic,
                "curves": [_points(run, quantity.key) for run in runs],
            }
            for quantity in QUANTITIES
            if any(quantity.key in run.curves for run in runs)
        ],
    }
    # A name may contain "</", which must not end the script.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        TEMPLATE.replace("{{title}}", html.escape(title))
        .replace("{{table}}", _table(comparison(runs)))
        .replace("{{loads}}", "\n".join(_loads(run) for run in runs if run.loads))
        .replace("{{data}}", text)
    )


def _points(run: RecordedRun, key: str) -> list[list[float]]:
    curve = run.curves.get(key)
    return [] if curve is None else [list(curve.steps), list(curve.values)]


def _loads(run: RecordedRun) -> str:
    title = html.escape(f"load of experts, {run.name}")
    unit = f"of their layer's mean, iteration {run.loads_at}"
    return f'<h2 class="wide">{title} <small>{unit}</small></h2>\n{load_svg(run.loads)}'


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = [f"<tr>{cells}</tr>"]
    for header, *values_of_row in body:
        values = "".join(f"<td>{html.escape(cell)}</td>" for cell in values_of_row)
        lines.append(f"<tr><th>{html.escape(header)}</th>{values}</tr>")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What to plot, and where to write it."""

    metrics: tuple[str, ...]
    """Runs to plot: a metrics.jsonl each, or the folder that contains it; others are compared with
    the first."""
    names: tuple[str, ...] = ()
    """Names of the runs, one each; derived: the distinct suffixes of their paths."""
    output: str | None = None
    """PNG file to write; derived: loss_curve.png without --html, else none."""
    html: str | None = None
    """HTML page to write; self-contained, without network access."""
    title: str = "Loss"
    """Title of the figure and the page."""
    smoothing: float = 0.0
    """Weight of the past in an exponential moving average, in [0, 1); the page has a slider."""

    def __post_init__(self) -> None:
        if self.names and len(self.names) != len(self.metrics):
            raise ValueError(
                f"--names gives {len(self.names)} for {len(self.metrics)} runs of --metrics: name "
                "each or none"
            )
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"--smoothing is {self.smoothing}: it must lie in [0, 1)")


def plot_loss(metrics: str | Path, output: str | Path, *, title: str = "Loss") -> Path:
    """Plot training and validation loss of one run as a PNG and return its path.

    Raises:
        ValueError: the file has no loss, or matplotlib is not installed.
    """
    return draw([read_run(str(metrics), "")], output, title=title, only_loss=True)


def draw(
    runs: Sequence[RecordedRun],
    output: str | Path,
    *,
    title: str,
    smoothing: float = 0.0,
    only_loss: bool = False,
) -> Path:
    """Plot runs as a PNG and return its path.

    Args:
        runs: runs to plot.
        output: path of the PNG.
        title: title of the figure.
        smoothing: weight of the past in the moving average, in [0, 1).
        only_loss: one panel of losses instead of one per quantity.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "drawing a PNG needs matplotlib: pip install matplotlib, or write --html"
        ) from None
    panels = [("loss", "loss (nats per token)", ["train/lm_loss", "validation/lm_loss"], False)]
    if not only_loss:
        panels += [
            (q.title, f"{q.title} ({q.unit})" if q.unit else q.title, [q.key], q.logarithmic)
            for q in QUANTITIES
            if "lm_loss" not in q.key and any(q.key in run.curves for run in runs)
        ]
    loaded = [] if only_loss else [run for run in runs if run.loads]
    rows = 1 if only_loss else -(-(len(panels) + len(loaded)) // 2)
    size = (7.0, 4.2) if only_loss else (12.0, 3.4 * rows)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    for index, (_, label, keys, logarithmic) in enumerate(panels):
        axes = figure.add_subplot(rows, 1 if only_loss else 2, index + 1)
        for number, run in enumerate(runs):
            _draw_run(axes, run, keys, color=f"C{number}", smoothing=smoothing)
        axes.set_xlabel("iteration")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if logarithmic:
            axes.set_yscale("log")
        if index == 0 or len(runs) > 1:
            axes.legend()
    for index, run in enumerate(loaded, start=len(panels) + 1):
        axes = figure.add_subplot(rows, 2, index)
        axes.set_title(f"load of experts, {run.name}, iteration {run.loads_at}", fontsize=10)
        figure.colorbar(draw_loads(axes, run.loads), ax=axes, label="of their layer's mean")
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        FigureCanvasAgg(figure).print_png(str(draft))
    return path


def _draw_run(
    axes: Any, run: RecordedRun, keys: Sequence[str], *, color: str, smoothing: float
) -> None:
    """Plot some curves of one run: validation dashed with dots, others as lines."""
    for key in keys:
        if key not in run.curves:
            continue
        curve = run.curves[key]
        kind = "validation" if key.startswith("validation") else "training"
        values = smooth(curve.values, smoothing)
        label = f"{run.name} {kind if len(keys) > 1 else ''}".strip()
        axes.plot(
            curve.steps,
            values,
            "o--" if kind == "validation" else "-",
            color=color,
            alpha=0.7 if kind == "validation" else 1.0,
            label=f"{label}, last {curve.values[-1]:.4g}",
            linewidth=1.2,
            markersize=4,
        )


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main() -> None:
    """Run the command."""
    line = parse_command_line(
        PlotOptions,
        sys.argv[1:],
        prog="python -m megatron.training.plot",
        description="Draw and compare runs.",
    )
    options = line.config
    names = options.names or short_names(options.metrics)
    runs = [
        read_run(path_or_folder, name)
        for path_or_folder, name in zip(options.metrics, names, strict=True)
    ]
    print(format_table(comparison(runs)))
    if options.html is not None:
        path = Path(options.html)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = page(runs, title=options.title, smoothing=options.smoothing)
        replace_file(path, text)
        print(path)
    output = options.output or (None if options.html else "loss_curve.png")
    if output is not None:
        print(draw(runs, output, title=options.title, smoothing=options.smoothing))


if __name__ == "__main__":
    run_command(lambda: run_entry_point(main, prog="plot"))
