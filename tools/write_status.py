# SPDX-License-Identifier: Apache-2.0
"""Write docs/status.md: what tests that passed have proved, by feature, strategy and grid.

python -m pytest tests -m "covers and not gpu" --status-out build/status.json
python -m tools.write_status build/status.json

Several files may be given, of parts of the tests; of a test in more than one the last counts.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.status_record import covered
from tests.support.status_rows import (
    CLAIMS,
    GRIDS,
    IMPOSSIBLE,
    SETTINGS,
    STRATEGIES,
    Impossible,
    Ran,
    all_settings,
    reason,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "status.md"

Covered = Mapping[str, tuple[bool, Mapping[str, Sequence[Ran]]]]
Cell = tuple[str, str, str]

CHANGES, NIGHTS, NEVER, EMPTY = "✓", "n", "–", ""

_INTRODUCTION = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by tools/write_status.py from the tests that passed: make status. -->
# What is proved, and where

One table for each strategy of data parallelism. A row is a feature, a column a grid. Nobody fills
in the cells: while tests run, every training step that was applied is seen with its grid, its
strategy and what it was made of, and it counts if the test passes that says what it proves.

| | |
|---|---|
| ✓ | a test of every change (`make test`) |
| n | only a test of every night (`make test-all`) |
| | no test: listed below each table |
| – | cannot be: the reasons are [below](#what-cannot-be) |

A step counts in every column that holds of its grid: one on tp 2 x cp 2 in `tp`, `cp` and `tp cp`.
`1` is a single process; `1f1b`, `interl.` and `zb-h1` are pipelines; `ep` and `etp` cut experts;
`3 axes` is three or more of tp, cp, pp and dp. A strategy counts where it had something to cut.
Rows above the first gap are what tests claim ([with the tests](#the-tests)); those below are what
steps were made of in tests that compare the numbers of training. A cell says that feature and grid
met in a test, not that every two features of a column did. Layers, kernels, files and failures that
need no training have tests of their own, which are not here.
"""


def cells_of(tests: Covered) -> dict[Cell, bool]:
    """Return the cells (strategy, row, grid) that a test covers, and whether one of every change
    does.

    Raises:
        ValueError: a setting that has no row.
    """
    found: dict[Cell, bool] = {}
    for slow, claims in tests.values():
        for claim, rans in claims.items():
            for ran in rans:
                if unknown := set(ran.settings) - set(all_settings()):
                    raise ValueError(f"status_rows.SETTINGS lacks {sorted(unknown)}: add them")
                rows = (claim, *(ran.settings if CLAIMS[claim].numbers else ()))
                for grid in (name for name, holds in GRIDS.items() if holds(ran)):
                    for row in rows if ran.strategy else ():
                        cell = (ran.strategy, row, grid)
                        found[cell] = found.get(cell, False) or not slow
    return found


def mark(cells: Mapping[Cell, bool], cell: Cell) -> str:
    """Return what stands in a cell.

    Raises:
        ValueError: a test covers what is said to be impossible.
    """
    why = reason(*cell)
    if cell in cells:
        if why is not None:
            raise ValueError(f"a test covers {cell}, which status_rows calls impossible: {why}")
        return CHANGES if cells[cell] else NIGHTS
    return EMPTY if why is None else NEVER


def _table(strategy: str, cells: Mapping[Cell, bool]) -> Iterator[str]:
    yield f"| | {' | '.join(GRIDS)} |"
    yield "|---" + "|:-:" * len(GRIDS) + "|"
    for group, rows in (("", tuple(CLAIMS)), *SETTINGS.items()):
        if group:
            yield f"| **{group}** |" + " |" * len(GRIDS)
        for row in rows:
            marks = (mark(cells, (strategy, row, grid)) for grid in GRIDS)
            yield f"| {row} | " + " | ".join(marks) + " |"


def _empty(strategy: str, cells: Mapping[Cell, bool]) -> Iterator[str]:
    """List the empty cells of a table, by row."""
    lines, total, possible = [], 0, 0
    for row in (*CLAIMS, *all_settings()):
        marks = {grid: mark(cells, (strategy, row, grid)) for grid in GRIDS}
        empty = [grid for grid, found in marks.items() if found == EMPTY]
        filled = [grid for grid, found in marks.items() if found in (CHANGES, NIGHTS)]
        total, possible = total + len(empty), possible + len(empty) + len(filled)
        if not empty:
            continue
        where = f"all but {_names(filled)}" if len(filled) < len(empty) else _names(empty)
        lines.append(f"- {row}: {where if filled else 'all'}")
    yield f"Empty cells: {total} of {possible}."
    if lines:
        yield from ("", *lines)


def _names(grids: Iterable[str]) -> str:
    return ", ".join(f"`{grid}`" for grid in grids)


def _impossible() -> Iterator[str]:
    yield "| why | strategies | rows | grids |"
    yield "|---|---|---|---|"
    for one in IMPOSSIBLE:
        yield f"| {one.why} | {' | '.join(_restriction(one))} |"


def _restriction(one: Impossible) -> Iterator[str]:
    for names in (one.strategies, one.rows, one.grids):
        yield "all" if names is None else ", ".join(names)


def _tests(tests: Covered) -> Iterator[str]:
    """List the tests of each claim that trained something, those of the night marked."""
    by_claim: dict[str, dict[str, bool]] = defaultdict(dict)
    for nodeid, (slow, claims) in tests.items():
        name = nodeid.split("[")[0]
        for claim, rans in claims.items():
            if rans:
                by_claim[claim][name] = by_claim[claim].get(name, False) or not slow
    for claim, described in CLAIMS.items():
        yield f"### {claim}"
        yield ""
        yield f"{described.says[0].upper()}{described.says[1:]}."
        yield ""
        for name, fast in sorted(by_claim[claim].items()):
            yield f"- `{name}`{'' if fast else ' n'}"
        if not by_claim[claim]:
            yield "No test."
        yield ""


def page(tests: Covered) -> str:
    """Return the page."""
    cells = cells_of(tests)
    lines = [_INTRODUCTION]
    for strategy, says in STRATEGIES.items():
        lines += [f"## {strategy}", "", f"{says[0].upper()}{says[1:]}.", ""]
        lines += [*_table(strategy, cells), "", *_empty(strategy, cells), ""]
    lines += ["## What cannot be", "", *_impossible(), "", "## The tests", "", *_tests(tests)]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/status.md from --status-out files.")
    parser.add_argument("files", nargs="+", type=Path, help="files of pytest --status-out")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page (default: %(default)s)")
    chosen = parser.parse_args(argv)
    tests = covered(chosen.files)
    chosen.output.write_text(page(tests), encoding="utf-8")
    print(f"{chosen.output}: {len(tests)} tests")


if __name__ == "__main__":
    main()
