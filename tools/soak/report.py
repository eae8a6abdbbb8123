# SPDX-License-Identifier: Apache-2.0
"""The output of a soak: a line for each kill, a table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tools.soak.chain import Result

#: Part of all kills that has to come while a save is under way.
INSIDE = 0.30
#: Fewer kills than these are not held to it: chance decides.
FEW = 40


def line(count: int, result: Result) -> str:
    """Return the line of one kill."""
    kill, struck = result.kill, result.struck
    stage = f"in a save: {struck.stage}" if struck.stage else "between saves"
    newest = f"{_named(struck.before.newest)} -> {_named(result.newest)}"
    return (
        f"{count:4d}  chain {result.chain}/{result.number:<3d} {result.flavour.name:12s} "
        f"{kill.victim:8s} {kill.how:9s} timed from {kill.moment:8s} "
        f"step {struck.iteration:3d}  {stage:20s} newest {newest:9s} ok"
    )


def inside(results: Sequence[Result]) -> int:
    """Return how many kills came while a save was under way."""
    return sum(bool(result.struck.stage) for result in results)


def complaint(results: Sequence[Result]) -> str | None:
    """Return why these kills prove too little, None if they prove enough."""
    message = inside(results)
    if len(results) < FEW or message >= INSIDE * len(results):
        return None
    return (
        f"{message} of {len(results)} kills came while a save was under way, {INSIDE:.0%} are due"
    )


def table(results: Sequence[Result]) -> str:
    """Return how many kills met what."""
    counts: dict[str, Counter[str]] = {
        "run": Counter(r.flavour.name for r in results),
        "victim": Counter(r.kill.victim for r in results),
        "signals": Counter(r.kill.how for r in results),
        "stage": Counter(r.struck.stage or "between saves" for r in results),
    }
    lines = []
    for title, counter in counts.items():
        cells = ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))
        lines.append(f"  {title:8s} {cells}")
    return "\n".join(lines)


def _named(iteration: int) -> str:
    return "none" if iteration < 0 else str(iteration)
