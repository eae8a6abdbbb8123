# SPDX-License-Identifier: Apache-2.0
"""Write docs/status.md: what tests that passed have proved, by feature, strategy and grid.

python -m pytest tests -m "covers and not gpu" --status-out build/status.json
python -m tools.write_status build/status.json

Several files may be given, of parts of the tests; of a test in more than one the last counts. A
page from fewer than half of the tests that the present one is from needs --partial.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.status_claims import Claimed, claimed_in
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

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "status.md"

Covered = Mapping[str, tuple[bool, Mapping[str, Sequence[Ran]]]]
Cell = tuple[str, str, str]

CHANGES, NIGHTS, NEVER, EMPTY = "✓", "n", "–", ""
MISSING, IDLE = "not run or not passed", "passed, but none of its steps fits"

_INTRODUCTION = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by tools/write_status.py from the tests that passed: make status. -->
# Test coverage of features and layouts

There is one table per data-parallel strategy. A row is a feature and a column is a rank grid. The
cells are recorded, not typed: while a test runs, a recorder observes every training step with its
grid, strategy and options. The step counts if the test passes and is marked with the feature that
it covers.

| | |
|---|---|
| ✓ | covered by a test of every change (`make test`) |
| n | covered by a nightly test only (`make test-all`) |
| | not covered by a passed test: listed below each table |
| – | impossible: the reasons are [below](#impossible-combinations) |

A step counts in every column that matches its grid: a step on tp 2 x cp 2 counts in `tp`, `cp` and
`tp cp`. `1` is a single process. `1f1b`, `interl.` and `zb-h1` are pipeline schedules. `ep` and
`etp` shard experts. `3 axes` combines three or more of tp, cp, pp and dp. A strategy counts only if
it sharded something.

The rows above the first gap are features that tests are [marked with](#tests-by-feature). The rows
below it are options of the steps in tests that compare training results. A cell shows that a test
combined this feature with this grid. It does not show that two features of a column were combined.
Layers, kernels, files and failures that need no training have separate tests, which are not listed
here.
"""


def test_of(nodeid: str) -> str:
    """Return the name of a test without its parameters."""
    return nodeid.split("[")[0]


@dataclass(frozen=True)
class Results:
    """The test results of a page.

    Args:
        tests: the passed tests, with their coverage.
        failed: node ids of tests that failed or were skipped.
        claimed: the claims of the tests in the tree.
    """

    tests: Covered
    failed: frozenset[str]
    claimed: Claimed

    def passed(self) -> dict[str, bool]:
        """Return the tests that passed, and whether all their cases that did are slow."""
        slow_by_test: dict[str, bool] = {}
        for nodeid, (slow, _) in self.tests.items():
            slow_by_test[test_of(nodeid)] = slow_by_test.get(test_of(nodeid), True) and slow
        return slow_by_test

    def missing(self, claim: str | None = None) -> list[str]:
        """Return the tests that are marked (with a claim) and did not run or pass at all."""
        passed = {(test_of(nodeid), c) for nodeid, (_, cs) in self.tests.items() for c in cs}
        return sorted({t for t, c in self.claimed - passed if claim is None or claim == c})

    def note(self, claim: str) -> str:
        """Return a note for the empty cells of a claim: the number of its missing tests."""
        claiming_tests = {test for test, c in self.claimed if c == claim}
        if not (missing := len(self.missing(claim))):
            return ""
        return f" ({missing} of {len(claiming_tests)} tests {MISSING})"


def of_the_tree(tests: Covered, failed: Iterable[str], claimed: Claimed) -> tuple[Results, list]:
    """Return the results of existing tests and claims, and a line for each removed one."""
    names, gone, current_tests = {test for test, _ in claimed}, [], {}
    for nodeid, (slow, claims) in tests.items():
        name = test_of(nodeid)
        gone += [f"{nodeid}: the tree has no such test or mark"] if name not in names else []
        old = sorted(c for c in claims if (name, c) not in claimed) if name in names else []
        gone += [f"{nodeid}: it claims {c!r} no more" for c in old]
        if left := {c: rans for c, rans in claims.items() if (name, c) in claimed}:
            current_tests[nodeid] = (slow, left)
    still = frozenset(nodeid for nodeid in failed if test_of(nodeid) in names)
    return Results(current_tests, still, claimed), gone


def _head(results: Results) -> Iterator[str]:
    passed, missing = results.passed(), len(_not_run(results))
    marked = {test for test, _ in results.claimed}
    slow = sum(passed.values())
    yield f"This page was written from {len(passed)} passed tests ({slow} slow). There are"
    yield f"{len(marked)} marked tests in the repository, and {missing} of them did not run or did"
    yield "not pass ([list](#not-run)). A parametrized test counts once. It counts as passed if one"
    yield "of its cases has passed."


def _not_run(results: Results) -> list[str]:
    """Return the tests that are missing, and the failed cases of others."""
    missing = results.missing()
    return sorted({*missing, *(n for n in results.failed if test_of(n) not in missing)})


def cells_of(tests: Covered) -> dict[Cell, bool]:
    """Return the cells (strategy, row, grid) that a test covers, and whether one of every change
    does.

    Raises:
        ValueError: a setting that has no row.
    """
    cells: dict[Cell, bool] = {}
    for slow, claims in tests.values():
        for claim, rans in claims.items():
            for ran in rans:
                if unknown := set(ran.settings) - set(all_settings()):
                    raise ValueError(f"status_rows.SETTINGS lacks {sorted(unknown)}: add them")
                rows = (claim, *(ran.settings if CLAIMS[claim].numbers else ()))
                for grid in (name for name, holds in GRIDS.items() if holds(ran)):
                    for row in rows if ran.strategy else ():
                        cell = (ran.strategy, row, grid)
                        cells[cell] = cells.get(cell, False) or not slow
    return cells


def mark(cells: Mapping[Cell, bool], cell: Cell) -> str:
    """Return the content of a cell.

    Raises:
        ValueError: a test covers an impossible cell.
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


def _empty(strategy: str, cells: Mapping[Cell, bool], results: Results) -> Iterator[str]:
    """List the empty cells of a table, by row, with the tests that are missing."""
    lines, total, possible = [], 0, 0
    for row in (*CLAIMS, *all_settings()):
        marks = {grid: mark(cells, (strategy, row, grid)) for grid in GRIDS}
        empty = [grid for grid, cell in marks.items() if cell == EMPTY]
        filled = [grid for grid, cell in marks.items() if cell in (CHANGES, NIGHTS)]
        total, possible = total + len(empty), possible + len(empty) + len(filled)
        if not empty:
            continue
        where = f"all but {_names(filled)}" if len(filled) < len(empty) else _names(empty)
        lines.append(f"- {row}: {where if filled else 'all'}{results.note(row)}")
    yield f"Empty cells: {total} of {possible}."
    if lines:
        yield from ("", *lines)


def _names(grids: Iterable[str]) -> str:
    return ", ".join(f"`{grid}`" for grid in grids)


def _impossible() -> Iterator[str]:
    yield "| why | strategies | rows | grids |"
    yield "|---|---|---|---|"
    for impossible in IMPOSSIBLE:
        yield f"| {impossible.why} | {' | '.join(_restriction(impossible))} |"


def _restriction(impossible: Impossible) -> Iterator[str]:
    for names in (impossible.strategies, impossible.rows, impossible.grids):
        yield "all" if names is None else ", ".join(names)


def _tests(results: Results) -> Iterator[str]:
    """List the tests of each claim, with marks for nightly and missing tests."""
    by_claim: dict[str, dict[str, bool]] = defaultdict(dict)
    idle: dict[str, set[str]] = defaultdict(set)
    for nodeid, (slow, claims) in results.tests.items():
        name = test_of(nodeid)
        for claim, rans in claims.items():
            idle[claim].add(name)
            if rans:
                by_claim[claim][name] = by_claim[claim].get(name, False) or not slow
    for claim, described in CLAIMS.items():
        trained, missing = by_claim[claim], results.missing(claim)
        lines = {name: f"- `{name}`{'' if fast else ' n'}" for name, fast in trained.items()}
        lines |= {name: f"- `{name}`: {IDLE}" for name in idle[claim] - set(trained)}
        lines |= {name: f"- `{name}`: {MISSING}" for name in missing}
        yield f"### {claim}"
        yield ""
        yield f"{described.says[0].upper()}{described.says[1:]}."
        yield ""
        yield from [lines[name] for name in sorted(lines)] or ["No test."]
        yield ""


def page(results: Results) -> str:
    """Return the page."""
    cells = cells_of(results.tests)
    lines = [_INTRODUCTION, *_head(results), ""]
    for strategy, says in STRATEGIES.items():
        lines += [f"## {strategy}", "", f"{says[0].upper()}{says[1:]}.", ""]
        lines += [*_table(strategy, cells), "", *_empty(strategy, cells, results), ""]
    lines += [
        "## Impossible combinations",
        "",
        *_impossible(),
        "",
        "## Tests by feature",
        "",
        *_tests(results),
    ]
    missing = [f"- `{name}`" for name in _not_run(results)] or ["None."]
    lines += ["## Not run", "", f"Marked tests that were {MISSING}:", "", *missing]
    return "\n".join(lines).rstrip() + "\n"


def tests_of(text: str) -> set[str]:
    """Return the tests that passed according to a page."""
    lists = text.partition("\n## Tests by feature\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^- `([^`]+)`(.*)$", lists, re.MULTILINE)
    return {name for name, remark in lines if MISSING not in remark}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/status.md from --status-out files.")
    parser.add_argument("files", nargs="+", type=Path, help="files of pytest --status-out")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page (default: %(default)s)")
    parser.add_argument(
        "--partial", action="store_true", help="also from fewer than half of the page's tests"
    )
    chosen = parser.parse_args(argv)
    results, gone = of_the_tree(*covered(chosen.files), claimed_in(ROOT))
    for line in gone:
        print(f"left out: {line}")
    old = tests_of(chosen.output.read_text(encoding="utf-8")) if chosen.output.exists() else ()
    count = len(results.passed())
    if 2 * count < len(old) and not chosen.partial:
        print(
            f"{chosen.output} is from {len(old)} tests, these files have {count}: give the files "
            "of the others too, or --partial",
            file=sys.stderr,
        )
        raise SystemExit(2)
    chosen.output.write_text(page(results), encoding="utf-8")
    print(f"{chosen.output}: {count} tests, {len(_not_run(results))} {MISSING}")


if __name__ == "__main__":
    main()
