# SPDX-License-Identifier: Apache-2.0
"""The load of every expert of every layer as a heat map: SVG for a page, and on matplotlib's axes.

White is the mean of a layer, red more, blue less; the strongest colours are 0 and twice the mean.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

#: Rows of a picture: the load of each expert as a multiple of its layer's mean, by layer.
Loads = Mapping[str, Sequence[float]]

_LESS, _MORE = (59, 118, 201), (194, 69, 95)
_LEFT, _TOP, _ROW, _WIDTH = 64, 20, 16, 900


def color(load: float) -> str:
    """Return the colour of a load, 1 being even."""
    far = min(1.0, abs(load - 1.0))
    end = _MORE if load > 1.0 else _LESS
    return "#" + "".join(f"{round(255 + (channel - 255) * far):02x}" for channel in end)


def load_svg(loads: Loads) -> str:
    """Return an SVG with a cell for each expert, whose title names it."""
    most = max(map(len, loads.values()))
    cell = (_WIDTH - _LEFT) / most
    height = _TOP + _ROW * len(loads)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" data-chart="expert-load">']
    for expert in range(0, most, max(1, most // 16)):
        x = _LEFT + (expert + 0.5) * cell
        parts.append(f'<text x="{x:.1f}" y="12" text-anchor="middle">{expert}</text>')
    for row, (name, values) in enumerate(loads.items()):
        y, label = _TOP + row * _ROW, html.escape(name)
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{label}</text>')
        parts += [
            f'<rect x="{_LEFT + expert * cell:.1f}" y="{y}" width="{cell:.2f}" height="{_ROW - 1}" '
            f'fill="{color(load)}"><title>{label}, expert {expert}: {load:.2f}</title></rect>'
            for expert, load in enumerate(values)
        ]
    return "".join([*parts, "</svg>"])


def draw_loads(axes: Any, loads: Loads) -> Any:
    """Draw the heat map on axes of matplotlib and return the image, for a colour bar."""
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
