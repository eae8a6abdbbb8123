# SPDX-License-Identifier: Apache-2.0
"""Draw and compare runs from their metrics.jsonl: a PNG, one self-contained HTML page, a table.

Of runs with experts the load of every expert is a heat map.

    python -m megatron.training.plot --metrics runs/a runs/b --names "lr 1e-3" "lr 3e-3" \\
        --html compare.html --output compare.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.cli.errors import run_entry_point
from megatron.cli.flags import parse_command_line
from megatron.cli.standard_streams import run_command
from megatron.core.untrusted_files import replace_file, replacing
from megatron.training.monitoring.plots import (
    QUANTITIES,
    RecordedRun,
    comparison,
    draw_loads,
    page,
    read_run,
    short_names,
    smooth,
)


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What to draw, and where."""

    metrics: tuple[str, ...]
    """Runs: a metrics.jsonl each, or the folder that holds it; the first is compared with."""
    names: tuple[str, ...] = ()
    """Names of the runs, as many; derived: what tells their paths apart."""
    output: str | None = None
    """PNG file to write; derived: loss_curve.png without --html, else none."""
    html: str | None = None
    """HTML page to write; it needs no other file and no network."""
    title: str = "Loss"
    """Title of the figure and the page."""
    smoothing: float = 0.0
    """Weight of the past in an exponential mean, at least 0 and below 1; the page has a slider."""

    def __post_init__(self) -> None:
        if self.names and len(self.names) != len(self.metrics):
            raise ValueError(
                f"--names gives {len(self.names)} for {len(self.metrics)} runs of --metrics: name "
                "each or none"
            )
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"--smoothing is {self.smoothing}: it must lie in [0, 1)")


def plot_loss(metrics: str | Path, output: str | Path, *, title: str = "Loss") -> Path:
    """Draw training and validation loss of one run as a PNG and return its path.

    Raises:
        ValueError: the file has no loss, or matplotlib is absent.
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
    """Draw runs as a PNG and return its path.

    Args:
        runs: what to draw.
        output: the file.
        title: of the figure.
        smoothing: weight of the past.
        only_loss: one panel of losses instead of one per quantity.

    Raises:
        ValueError: matplotlib is absent.
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
    for place, (_, label, keys, logarithmic) in enumerate(panels):
        axes = figure.add_subplot(rows, 1 if only_loss else 2, place + 1)
        for number, run in enumerate(runs):
            _draw_run(axes, run, keys, color=f"C{number}", smoothing=smoothing)
        axes.set_xlabel("iteration")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if logarithmic:
            axes.set_yscale("log")
        if place == 0 or len(runs) > 1:
            axes.legend()
    for place, run in enumerate(loaded, start=len(panels) + 1):
        axes = figure.add_subplot(rows, 2, place)
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
    """Draw some curves of one run: validation dashed with dots, the rest as lines."""
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
    runs = [read_run(given, name) for given, name in zip(options.metrics, names, strict=True)]
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
