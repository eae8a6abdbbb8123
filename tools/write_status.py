# SPDX-License-Identifier: Apache-2.0
"""Write docs/status.md: the features that passed tests have trained, by rank grid.

python -m pytest tests -m "covers and not gpu" --status-out build/status.json
python -m tools.write_status build/status.json

Several files may be given, of parts of the tests; of a test in more than one the last counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "status.md"

PARITY = "matches a single process"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hybrid")
CHANGES, NIGHTS, NEVER = "✓", "n", "–"

#: The columns. A layout counts in each whose condition holds.
GRIDS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "1": lambda r: r["world"] == 1,
    "dp": lambda r: r["dp"] > 1,
    "tp": lambda r: r["tp"] > 1 and not r["sp"],
    "tp sp": lambda r: r["tp"] > 1 and r["sp"],
    "cp": lambda r: r["cp"] > 1,
    "1f1b": lambda r: r.get("schedule") == "1f1b",
    "interl.": lambda r: r.get("schedule") == "interleaved",
    "zb-h1": lambda r: r.get("schedule") == "zb-h1",
    "ep": lambda r: r.get("ep", 1) > 1,
    "etp": lambda r: r.get("etp", 1) > 1,
    **{
        f"{a} {b}": lambda r, a=a, b=b: r[a] > 1 and r.get(b, 1) > 1
        for a, b in (
            ("tp", "dp"), ("cp", "dp"), ("pp", "dp"), ("tp", "cp"), ("tp", "pp"), ("cp", "pp"),
            ("tp", "ep"), ("cp", "ep"), ("pp", "ep"),
        )
    },
    "3 axes": lambda r: sum(r[axis] > 1 for axis in ("tp", "cp", "pp", "dp")) >= 3,
}  # fmt: skip
_SCHEDULES, _PIPELINES = ("1f1b", "interl.", "zb-h1"), ("pp dp", "tp pp", "cp pp", "pp ep")
_CONTEXTS = ("cp", "cp dp", "tp cp", "cp pp", "cp ep")

#: The features that tests are marked with, each with its impossible or refused grids.
FEATURES: Mapping[str, Sequence[str]] = {
    PARITY: ("1",),
    "matches a reference model": tuple(grid for grid in GRIDS if grid != "1"),
    "graph replay matches eager": (*_SCHEDULES, *_PIPELINES),
    "bit-identical resume": (),
    "bit-identical resume after SIGKILL": (),
    "resume on another layout": (),
    "asynchronous save": (),
    "checkpoint retention": (),
    "graceful stop with a save": (),
    "recomputed bad steps": (),
    "replica check": ("1",),
    "hang diagnosis": ("1",),
    "straggler detection": ("1",),
    "elastic restart": ("1",),
    "fine-tuning on chats": (),
    "Hugging Face": (),
    "upcycling": (),
    "generation": (*_CONTEXTS, *_SCHEDULES),
}

_INTRODUCTION = f"""\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by tools/write_status.py from the tests that passed: make status. -->
# Test coverage of features and layouts

A row is a feature that tests are marked with, a column is a rank grid.
{CHANGES}: a test of every change (`make test`) trained the feature on this grid and passed;
{NIGHTS}: only a nightly test did; {NEVER}: impossible or refused; empty: no test.
The layouts are recorded while the tests run. A training step counts in each column that its grid
matches, so tp 2 x cp 2 counts in `tp`, `cp` and `tp cp`. `1` is a single process, `sp` is sequence
parallelism, `1f1b`, `interl.` and `zb-h1` are pipeline schedules, and `3 axes` combines three or
more of tp, cp, pp and dp. Under the first row are its steps by data-parallel strategy; a strategy
counts only if it sharded something. `tests/parity` combines every two options of model,
optimizer and layout.
"""


def rows_of(feature: str, layout: Mapping[str, Any]) -> list[str]:
    """Return the rows in which a layout of a feature's test counts.

    Generated tokens count only for generation, and training steps for the other features.
    """
    if (layout["strategy"] == "generation") != (feature == "generation"):
        return []
    return [feature, f"`{layout['strategy']}`"] if feature == PARITY else [feature]


def cells_of(tests: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """Return the marks of the cells (row, grid) that passed tests fill.

    Raises:
        KeyError: a test is marked with an unknown feature.
    """
    cells: dict[tuple[str, str], str] = {}
    for test in tests:
        mark = NIGHTS if test["slow"] else CHANGES
        for feature in test["features"]:
            possible = [grid for grid in GRIDS if grid not in FEATURES[feature]]
            for layout in test["layouts"]:
                for row in rows_of(feature, layout):
                    for grid in (grid for grid in possible if GRIDS[grid](layout)):
                        cells[row, grid] = CHANGES if cells.get((row, grid)) == CHANGES else mark
    return cells


def page(tests: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        tests: by node id, whether the test `passed` and is `slow`, its `features` and `layouts`.
    """
    passed = [test for test in tests.values() if test["passed"]]
    failed = sorted(nodeid for nodeid, test in tests.items() if not test["passed"])
    cells = cells_of(passed)
    lines = [_INTRODUCTION, f"| | {' | '.join(GRIDS)} |", "|---" + "|:-:" * len(GRIDS) + "|"]
    for feature, never in FEATURES.items():
        impossible = dict.fromkeys(never, NEVER)
        for row in (feature, *(f"`{s}`" for s in STRATEGIES if feature == PARITY)):
            marks = (cells.get((row, grid), impossible.get(grid, "")) for grid in GRIDS)
            lines.append(f"| {row} | {' | '.join(marks)} |")
    slow = sum(test["slow"] for test in passed)
    lines += ["", f"Written from {len(passed)} passed cases of tests ({slow} nightly only)."]
    lines += ["These did not run or did not pass:", ""] if failed else []
    return "\n".join([*lines, *(f"- `{nodeid}`" for nodeid in failed)]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Write docs/status.md from --status-out files.")
    parser.add_argument("files", nargs="+", type=Path, help="files of pytest --status-out")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page (default: %(default)s)")
    chosen = parser.parse_args(argv)
    tests: dict[str, Any] = {}
    for file in chosen.files:
        tests |= json.loads(file.read_text(encoding="utf-8"))
    chosen.output.write_text(page(tests), encoding="utf-8")


if __name__ == "__main__":
    main()
