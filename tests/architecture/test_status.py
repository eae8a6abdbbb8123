# SPDX-License-Identifier: Apache-2.0
"""docs/status.md is about the tests that exist, and holds what they covered and nothing else."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import status_record
from tests.support.status_rows import CLAIMS, GRIDS, STRATEGIES, Ran, all_settings, reason
from tools import write_status

ROOT = Path(__file__).resolve().parents[2]
RUNS = {"alone", "ranks", "saves", "async", "loads", "replays", "generates"}
ROWS = (*CLAIMS, *all_settings())


def declared(file: Path) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the tests of a file that claim something: name, claims, which runs count."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
                named = {k.arg: ast.literal_eval(k.value) for k in mark.keywords}
                claims = tuple(ast.literal_eval(argument) for argument in mark.args)
                yield node.name, claims, named.pop("runs", "")
                assert not named, f"{file}: covers takes claims and runs"


@pytest.fixture(scope="module")
def claimed() -> set[tuple[str, str]]:
    """Return (test, claim) of all tests; each is a claim that there is."""
    found = set()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file.samefile(__file__) or "mark.covers(" not in file.read_text(encoding="utf-8"):
            continue
        for name, claims, runs in declared(file):
            assert set(claims) <= set(CLAIMS), f"{file}: {name}"
            assert set(runs.split()) <= RUNS, f"{file}: {name}"
            found |= {(f"{file.relative_to(ROOT)}::{name}", claim) for claim in claims}
    return found


def tables(page: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return what stands in the tables of a page, by strategy, row and grid."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for strategy, section in sections(page).items():
        head, _, *lines = [line for line in section.splitlines() if line.startswith("|")]
        grids = [cell.strip() for cell in head.split("|")[2:-1]]
        rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
        found[strategy] = {
            row: dict(zip(grids, marks, strict=True)) for row, *marks in rows if "**" not in row
        }
    return found


def sections(page: str) -> dict[str, str]:
    """Return the text of every strategy."""
    parts = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    return {name: parts[name] for name in STRATEGIES}


def listed_as_empty(section: str) -> dict[str, set[str]]:
    """Return the empty cells that a section lists, by row."""
    found = {}
    for row, where in re.findall(r"^- (.+): (all(?: but)?.*|`.*)$", section, re.MULTILINE):
        names = set(re.findall("`([^`]+)`", where))
        found[row] = (set(GRIDS) - names) if where.startswith("all") else names
    return found


def check_page(page: str) -> None:
    """See that a page has rows and columns that there are, and lists its empty cells."""
    for strategy, rows in tables(page).items():
        assert set(rows) <= set(ROWS)
        assert all(set(marks) <= set(GRIDS) for marks in rows.values())
        marks = {(row, grid): mark for row, found in rows.items() for grid, mark in found.items()}
        empty = {cell for cell, mark in marks.items() if not mark}
        never = {cell for cell, mark in marks.items() if mark == "–"}
        section = sections(page)[strategy]
        lists = listed_as_empty(section)
        assert {(row, g) for row, grids in lists.items() for g in grids} - never == empty
        assert f"Empty cells: {len(empty)} of {len(marks) - len(never)}." in section


def test_the_page_is_about_tests_that_exist_and_claim_what_it_says(claimed) -> None:
    page = write_status.PAGE.read_text(encoding="utf-8")
    lists = page.split("\n## The tests\n")[1].split("\n### ")[1:]
    told = set()
    for claim, text in (part.split("\n", 1) for part in lists):
        told |= {(test, claim) for test in re.findall(r"^- `(.+)`", text, re.MULTILINE)}
    assert len(told) > 10
    gone = sorted(told - claimed)
    assert not gone, f"renamed or gone: make status, or name them anew in docs/status.md: {gone}"


def test_the_page_has_rows_that_there_are_and_lists_its_empty_cells() -> None:
    check_page(write_status.PAGE.read_text(encoding="utf-8"))


RAN = Ran(
    world=4, tp=2, cp=2, pp=1, dp=1, ep=1, etp=1, sequence_parallel=True, schedule="",
    strategy="optim", settings=("bf16", "AdamW"), did=("saves",),
)  # fmt: skip


def test_cells_are_those_of_what_was_trained() -> None:
    proved, told = "numbers of one process", "stopped with a save"
    idle = replace(RAN, strategy="", cp=1, world=2)
    page = write_status.page(
        {
            "tests/test_a.py::test_slow[1]": (True, {proved: [RAN]}),
            "tests/test_a.py::test_fast": (False, {told: [replace(RAN, tp=1, world=2)]}),
            "tests/test_a.py::test_nothing_cut": (False, {proved: [idle]}),
            "tests/test_a.py::test_nothing_ran": (False, {proved: []}),
        }
    )
    check_page(page)
    assert all(tuple(rows) == ROWS for rows in tables(page).values())
    for strategy, rows in tables(page).items():
        never = {(row, g) for row, marks in rows.items() for g in marks if marks[g] == "–"}
        assert never == {(r, g) for r in ROWS for g in GRIDS if reason(strategy, r, g) is not None}
    marks = {
        (strategy, row, grid): mark
        for strategy, rows in tables(page).items()
        for row, grids in rows.items()
        for grid, mark in grids.items()
        if mark in ("✓", "n")
    }
    slow = {
        ("optim", row, g) for row in (proved, "bf16", "AdamW") for g in ("tp sp", "cp", "tp cp")
    }
    assert marks == {**dict.fromkeys(slow, "n"), ("optim", told, "cp"): "✓"}
    tests = page.split("\n## The tests\n")[1]
    assert "- `tests/test_a.py::test_slow` n\n" in tests
    assert "- `tests/test_a.py::test_fast`\n" in tests
    assert "test_nothing_ran" not in tests
    for first in (True, False):
        both = {"a": (first, {proved: [RAN]}), "b": (not first, {proved: [RAN]})}
        assert tables(write_status.page(both))["optim"]["bf16"]["cp"] == "✓"


def test_what_cannot_be_is_not_covered_and_every_setting_has_a_row() -> None:
    alone = replace(RAN, world=1, tp=1, cp=1)
    with pytest.raises(ValueError, match="calls impossible: one process has nothing to cut"):
        write_status.page({"a": (False, {"retention": [alone]})})
    with pytest.raises(ValueError, match="SETTINGS lacks"):
        write_status.page({"a": (False, {"retention": [replace(RAN, settings=("new",))]})})


def _report(nodeid: str, when: str, *, passed: bool = True, covered: Any = None) -> SimpleNamespace:
    properties = [] if covered is None else [("covers", json.dumps(covered))]
    return SimpleNamespace(
        nodeid=nodeid, when=when, passed=passed, user_properties=properties, keywords={}
    )


def test_only_tests_that_passed_count_and_empty_claims_are_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(status_record.witness, "install", lambda: None)
    out = tmp_path / "status.json"
    record = status_record.StatusRecord(out)
    found = {"retention": [asdict(RAN)]}
    for name, failing in (("good", None), ("bad", "call"), ("torn", "teardown")):
        for when in ("setup", "call", "teardown"):
            more = {"covered": found} if when == "teardown" else {}
            record.pytest_runtest_logreport(
                _report(f"t.py::{name}", when, passed=when != failing, **more)
            )
    idle = _report("u.py::idle", "teardown", covered={"retention": []})
    record.pytest_runtest_logreport(idle)
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    record.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert record.complaints == ["u.py covers 'retention' and no step was seen that fits"]
    read = status_record.covered([out])
    assert read == {
        "t.py::good": (False, {"retention": [RAN]}),
        "u.py::idle": (False, {"retention": []}),
    }
    assert RAN.fits("ranks saves")
    assert not RAN.fits("ranks loads")
