# SPDX-License-Identifier: Apache-2.0
"""docs/status.md shows the features and grids of passed tests, as the recorder observed them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity.pieces import assembled
from tests.parity.rows import row_with, world_of
from tests.parity.training import rank_of_row, single_run
from tests.support import status_record
from tests.support.covering_array import Row
from tests.support.ranks import run_ranks
from tools import write_status

ROOT = Path(__file__).resolve().parents[2]

LAYOUT = {
    "world": 4, "tp": 2, "cp": 2, "pp": 1, "dp": 1, "sp": True, "strategy": "optim", "schedule": "",
}  # fmt: skip
ALONE = {**LAYOUT, "world": 1, "tp": 1, "cp": 1, "sp": False, "strategy": "no_shard"}


def _marks(page: str) -> dict[tuple[str, str], str]:
    """Return the filled cells of a page."""
    head, _, *lines = [line.split("|")[1:-1] for line in page.splitlines() if line[:1] == "|"]
    return {
        (row.strip(), grid.strip()): mark.strip()
        for row, *marks in lines
        for grid, mark in zip(head[1:], marks, strict=True)
        if mark.strip() in ("✓", "n")
    }


def _case(*layouts: Mapping[str, Any], feature: str, **outcome: bool) -> dict[str, Any]:
    outcome = {"passed": True, "slow": False, **outcome}
    return {**outcome, "features": [feature], "layouts": list(layouts)}


def test_features_of_tests_are_the_rows_of_the_page() -> None:
    text = "".join(
        file.read_text(encoding="utf-8")
        for folder in ("tests", "experimental")
        for file in (ROOT / folder).rglob("test_*.py")
    )
    marked = set(re.findall(r'^@pytest\.mark\.covers\("(.*)"\)$', text, re.MULTILINE))
    assert marked == set(write_status.FEATURES)


def test_cells_reflect_the_layouts_of_passed_tests(tmp_path: Path) -> None:
    generation = {**ALONE, "strategy": "generation"}
    files = (
        {
            "t.py::slow[1]": _case(LAYOUT, ALONE, feature=write_status.PARITY, slow=True),
            "t.py::fast": _case({**LAYOUT, "sp": False}, feature="Hugging Face"),
            "t.py::later": _case(LAYOUT, feature="upcycling"),
        },
        {
            "t.py::generates": _case(ALONE, generation, feature="generation", slow=True),
            "t.py::also": _case(generation, feature="generation"),
            "t.py::later": _case(LAYOUT, feature="upcycling", passed=False),
        },
    )
    for number, tests in enumerate(files):
        (tmp_path / f"{number}.json").write_text(json.dumps(tests), encoding="utf-8")
    out = tmp_path / "page.md"
    write_status.main([*map(str, sorted(tmp_path.glob("*.json"))), "--output", str(out)])
    page = out.read_text(encoding="utf-8")
    slow = {(r, g): "n" for r in (write_status.PARITY, "`optim`") for g in ("tp sp", "cp", "tp cp")}
    fast = {("Hugging Face", grid): "✓" for grid in ("tp", "cp", "tp cp")}
    assert _marks(page) == {**slow, **fast, ("generation", "1"): "✓"}
    assert page.endswith("- `t.py::later`\n")
    assert "from 4 passed" in page


ROW = row_with(
    tp=1, dp=2, pp=2, schedule="zb-h1", placement="optim_grads_params", experts="sigmoid", ep=2,
)  # fmt: skip


def _train_twice(rank: int, world: int, row: Row, initial: dict) -> None:
    """Train a row with a finite loss, then another placement of it with weights of NaN."""
    rank_of_row(rank, world, row, initial)
    broken = {name: torch.full_like(w, float("nan")) for name, w in initial.items()}
    rank_of_row(rank, world, {**row, "placement": "optim", "granularity": "unit"}, broken)


def test_recorder_writes_applied_but_not_skipped_steps(tmp_path: Path) -> None:
    initial, path = assembled(single_run(ROW, None).initial), tmp_path / "layouts"
    run_ranks(_train_twice, world_of(ROW), ROW, initial, env={status_record.VARIABLE: str(path)})
    sizes = {"world": 4, "tp": 1, "cp": 1, "pp": 2, "dp": 2, "ep": 2, "etp": 1, "sp": False}
    (layout,) = status_record.read(path)
    assert layout == {**sizes, "strategy": "optim_grads_params", "schedule": "zb-h1"}


def test_only_passed_tests_count_and_idle_features_fail(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(status_record, "install", lambda: None)
    record = status_record.StatusRecord(tmp_path / "status.json")
    for name, layouts, failing in (
        ("good", [LAYOUT], ""),
        ("bad", [LAYOUT], "call"),
        ("i", [], ""),
    ):
        for when in ("setup", "call", "teardown"):
            status = {"features": ["upcycling"], "layouts": layouts}
            record.pytest_runtest_logreport(
                SimpleNamespace(
                    nodeid=f"{name}.py::t", when=when, passed=when != failing, keywords={},
                    user_properties=[("status", status)],
                )
            )  # fmt: skip
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    record.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    (complaint,) = record.complaints
    assert complaint.startswith("i.py")
    tests = json.loads((tmp_path / "status.json").read_text(encoding="utf-8"))
    assert {name: test["passed"] for name, test in tests.items()} == {
        "good.py::t": True, "bad.py::t": False, "i.py::t": True,
    }  # fmt: skip
