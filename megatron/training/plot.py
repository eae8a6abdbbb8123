# SPDX-License-Identifier: Apache-2.0
"""Draw the loss curve of a run from its metrics.jsonl."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.training.errors import run_entry_point
from megatron.training.flags import parse_command_line
from megatron.training.metrics import read_metrics


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What to draw."""

    metrics: str
    """metrics.jsonl of the run."""
    output: str = "loss_curve.png"
    """PNG file to write."""
    title: str = "Loss"
    """Title of the figure."""


def loss_curves(metrics: str | Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return iterations and losses of a run, by `training` and `validation`.

    Raises:
        ValueError: the file has no loss.
    """
    kinds = {"train": "training", "validation": "validation"}
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for event in read_metrics(metrics):
        if event.get("kind") in kinds and "lm_loss" in event:
            steps, losses = curves.setdefault(kinds[event["kind"]], ([], []))
            steps.append(event["iteration"])
            losses.append(event["lm_loss"])
    if not curves:
        raise ValueError(f"{metrics} holds no losses: name the metrics.jsonl of a run that trained")
    return curves


def plot_loss(metrics: str | Path, output: str | Path, *, title: str = "Loss") -> Path:
    """Draw training and validation loss over the iterations as a PNG and return its path.

    Raises:
        ValueError: the file has no loss, or matplotlib is absent.
    """
    curves = loss_curves(metrics)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, style in (("training", "-"), ("validation", "o-")):
        if name in curves:
            steps, losses = curves[name]
            label = f"{name}, last {losses[-1]:.3f}"
            axes.plot(steps, losses, style, label=label, linewidth=1.2, markersize=4)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


def main() -> None:
    """Run the command."""
    line = parse_command_line(
        PlotOptions,
        sys.argv[1:],
        prog="python -m megatron.training.plot",
        description="Draw the loss curve of a run.",
    )
    options = line.config
    print(plot_loss(options.metrics, options.output, title=options.title))


if __name__ == "__main__":
    sys.exit(run_entry_point(main, prog="plot"))
