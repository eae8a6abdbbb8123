# SPDX-License-Identifier: Apache-2.0
"""The report of a run that is stuck: where every rank is, and which one is missing where."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron.training.failures.peer_states import RankState, Wait

_HEADINGS = ("rank", "machine", "process", "state", "iteration", "last beat", "where")


def hang_report(reason: str, states: Sequence[RankState], *, writer: int, files: str) -> str:
    """Return the report as text.

    Args:
        reason: what is wrong, in one line.
        states: of all ranks.
        writer: the rank that writes it.
        files: where each rank leaves more.
    """
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    rows = [_HEADINGS, *(_row(state) for state in states)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    missing = _missing(states) or ["No rank is known to be missing in a collective."]
    return "\n".join(
        [
            f"{when}, written by rank {writer}",
            reason,
            "",
            *table,
            "",
            *missing,
            "",
            f"Stacks of all threads and the last collectives of each rank: {files}",
            "",
        ]
    )


def _row(state: RankState) -> tuple[str, ...]:
    beat = state.beat
    return (
        str(state.rank),
        state.host,
        "?" if state.pid is None else str(state.pid),
        state.state,
        "?" if beat is None else str(beat.iteration),
        "none" if state.age is None else f"{state.age:.1f} s ago",
        "?" if beat is None else _where(beat.wait, beat.last, beat.collectives),
    )


def _where(wait: Wait | None, last: str, count: int) -> str:
    if wait is None:
        return f"behind its collective {count}: {last}" if count else last
    return f"{wait.seconds:.1f} s in {wait.text}"


def _missing(states: Sequence[RankState]) -> list[str]:
    """Say who waits in which collective, and who of its group has not come to it."""
    told = {state.rank: state for state in states}
    waits = {
        state.rank: state.beat.wait
        for state in states
        if state.beat is not None and state.beat.wait is not None
    }
    lines = [
        f"Rank {rank} waits in {wait.text}." for rank, wait in waits.items() if not wait.number
    ]
    collectives = {(w.group, w.number, w.ranks): w for w in waits.values() if w.number and w.ranks}
    for (group, number, ranks), wait in collectives.items():
        here = [
            r for r in ranks if r in waits and (waits[r].group, waits[r].number) == (group, number)
        ]
        absent = [r for r in ranks if r not in here and _come(told.get(r), group) < number]
        if absent:
            verb = "waits" if len(here) == 1 else "wait"
            lines.append(
                f"{_ranks(here).capitalize()} {verb} in {wait.text}, number {number} of that "
                f"group, and {_ranks(absent)} had not come to it at the last beat."
            )
    return lines


def _come(state: RankState | None, group: str) -> int:
    """Return how many collectives of a group a rank has come to."""
    return 0 if state is None or state.beat is None else state.beat.in_group.get(group, 0)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
