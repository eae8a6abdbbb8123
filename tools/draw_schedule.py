# SPDX-License-Identifier: Apache-2.0
"""Draw the computations of all ranks over time for pipeline schedules, as one SVG picture.

python tools/draw_schedule.py --stages 4 --microbatches 8 --chunks 2 \\
    --schedule 1f1b interleaved zb-h1 --output docs/images/pipeline-schedules.svg

All schedules have one scale. The times are the times of one rank for one microbatch, so each of v
chunks takes 1/v of the time. Only "interleaved" and "forward" take --chunks and --group-size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megatron.core.pipeline_parallel import (
    COMPUTES,
    ActionKind,
    Event,
    Timeline,
    Times,
    make_schedule,
    simulate,
)

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "docs/images/pipeline-schedules.svg"

#: Pixels.
_WIDTH, _RANK_HEIGHT, _MARGIN, _LABEL, _TITLE = 960, 24, 16, 56, 40
_INK, _PAPER, _IDLE = "#24292f", "#ffffff", "#eceff2"


class _Paint(NamedTuple):
    """How a kind of compute is drawn.

    Args:
        colours: of even and odd chunks.
    """

    word: str
    colours: tuple[str, str]


_PAINTS = MappingProxyType(
    {
        ActionKind.FORWARD: _Paint("F forward", ("#8ab8f0", "#bcd7f8")),
        ActionKind.BACKWARD: _Paint("B backward", ("#7fc98f", "#b4e0bd")),
        ActionKind.INPUT_GRADIENT: _Paint("I input gradient", ("#5cc4bd", "#a5dfdb")),
        ActionKind.WEIGHT_GRADIENT: _Paint("W weight gradient", ("#f2b45c", "#f8d7a5")),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Draw pipeline schedules as one SVG picture.")
    parser.add_argument("--schedule", nargs="+", default=["1f1b", "interleaved", "zb-h1"])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--forward", type=float, default=1.0, help="time of F")
    parser.add_argument("--input-gradient", type=float, default=1.0, help="time of I")
    parser.add_argument("--weight-gradient", type=float, default=1.0, help="time of W; B = I + W")
    parser.add_argument("--transfer", type=float, default=0.0, help="time between two ranks")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    options = parser.parse_args(argv)
    try:
        text = picture([timeline(name, options) for name in options.schedule])
    except ValueError as error:
        print(f"draw_schedule: {error}", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(f"wrote {options.output}")
    return 0


def timeline(name: str, options: argparse.Namespace) -> Timeline:
    """Return the simulated schedule of that name.

    Raises:
        ValueError: its sizes do not fit.
    """
    many = name in ("interleaved", "forward")
    chunks = options.chunks if many else 1
    schedule = make_schedule(
        name,
        stages=options.stages,
        microbatches=options.microbatches,
        chunks=chunks,
        group_size=options.group_size if many else None,
    )
    times = Times(
        forward=options.forward / chunks,
        input_gradient=options.input_gradient / chunks,
        weight_gradient=options.weight_gradient / chunks,
        transfer=options.transfer,
    )
    return simulate(schedule, times)


def picture(timelines: Sequence[Timeline]) -> str:
    """Return an SVG picture of timelines, one below the other."""
    scale = (_WIDTH - 2 * _MARGIN - _LABEL) / max(line.makespan for line in timelines)
    top = _MARGIN
    body = []
    for line in timelines:
        body += _panel(line, top, scale)
        top += _TITLE + _RANK_HEIGHT * len(line.ranks)
    kinds = {event.action.kind for line in timelines for events in line.ranks for event in events}
    body += _legend([_PAINTS[kind] for kind in _PAINTS if kind in kinds], top + _MARGIN)
    height = top + _MARGIN + _RANK_HEIGHT + _MARGIN // 2
    names = ", ".join(line.schedule.name for line in timelines)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" fill="{_INK}" role="img">',
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Written by tools/draw_schedule.py. -->",
        f"<title>Pipeline schedules: {names}</title>",
        # A ground of its own, so that the ink is seen on dark pages as well.
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="{_PAPER}"/>',
    ]
    return "\n".join([*head, *body, "</svg>\n"])


def _panel(line: Timeline, top: int, scale: float) -> Iterator[str]:
    """Yield one schedule: its title and a row for each rank."""
    schedule = line.schedule
    sizes = f"p = {schedule.stages}, m = {schedule.microbatches}"
    if schedule.chunks > 1:
        sizes += f", v = {schedule.chunks}"
    yield (
        f'<text x="{_MARGIN}" y="{top + 24}" font-size="15">'
        f'<tspan font-weight="bold">{schedule.name}</tspan> ({sizes}): bubble '
        f"{100 * line.bubble_fraction:.1f} %, at most "
        f"{max(line.peak_activations()) / schedule.chunks:g} microbatches alive on a rank</text>"
    )
    for rank, events in enumerate(line.ranks):
        y = top + _TITLE - 6 + rank * _RANK_HEIGHT
        yield f'<text x="{_MARGIN}" y="{y + 15}" font-size="12">rank {rank}</text>'
        left, width = _MARGIN + _LABEL, line.makespan * scale
        yield _box(left, y, width, _IDLE)
        for event in events:
            if event.action.kind in COMPUTES:
                yield from _cell(event, left, y, scale)


def _cell(event: Event, left: float, y: float, scale: float) -> Iterator[str]:
    """Yield one compute: a box with its microbatch."""
    action, x = event.action, left + event.start * scale
    width = (event.end - event.start) * scale
    paint = _PAINTS[action.kind]
    yield _box(x, y, width, paint.colours[action.chunk % 2], stroke=True)
    text = str(action.microbatch)
    size = min(11.0, 1.5 * width / len(text))
    yield (
        f'<text x="{x + width / 2:.2f}" y="{y + 14:g}" font-size="{size:.1f}" '
        f'text-anchor="middle">{text}</text>'
    )


def _legend(paints: Sequence[_Paint], y: float) -> Iterator[str]:
    """Yield the legend of the colours."""
    x = float(_MARGIN + _LABEL)
    for paint in paints:
        for colour in paint.colours:
            yield _box(x, y, 14, colour, stroke=True)
            x += 14
        yield f'<text x="{x + 6:g}" y="{y + 14:g}" font-size="12">{paint.word}</text>'
        x += 7 * len(paint.word) + 30
    yield f'<text x="{x:g}" y="{y + 14:g}" font-size="12">pale: odd chunks</text>'


def _box(x: float, y: float, width: float, colour: str, *, stroke: bool = False) -> str:
    line = f' stroke="{_PAPER}" stroke-width="0.8"' if stroke else ""
    return (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_RANK_HEIGHT - 4}" '
        f'fill="{colour}"{line}/>'
    )


if __name__ == "__main__":
    sys.exit(main())
