# SPDX-License-Identifier: Apache-2.0
"""Curves of runs as one HTML page that needs nothing else: SVG drawn by a script inside it."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from megatron.training.monitoring.curves import QUANTITIES, RecordedRun, comparison
from megatron.training.monitoring.load_plot import load_svg
from megatron.training.monitoring.plot_template import TEMPLATE


def page(runs: Sequence[RecordedRun], *, title: str, smoothing: float) -> str:
    """Return the page.

    Args:
        runs: to draw; the first is what the table compares the others with.
        title: of the page.
        smoothing: weight of the past, where the slider starts.
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
    # A name may hold anything: "</" must not end the script.
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
    for first, *rest in body:
        values = "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        lines.append(f"<tr><th>{html.escape(first)}</th>{values}</tr>")
    return "\n".join(lines)
