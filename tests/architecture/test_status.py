# SPDX-License-Identifier: Apache-2.0
"""docs/status.md lists exactly the existing tests with claims, and the cells that they covered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import status_record
from tests.support.status_claims import Claimed, claimed_in, declared, files_that_claim
from tests.support.status_rows import CLAIMS, GRIDS, STRATEGIES, Ran, all_settings, reason
from tools import write_status

ROOT = Path(__file__).resolve().parents[2]
RUNS = {"alone", "ranks", "saves", "async", "loads", "replays", "generates"}
ROWS = (*CLAIMS, *all_settings())


@pytest.fixture(scope="module")
def claimed() -> Claimed:
    """Return the (test, claim) pairs of all tests, after checking that the claims exist."""
    for file in files_that_claim(ROOT):
        for name, claims, runs in declared(file):
            assert set(claims) <= set(CLAIMS), f"{file}: {name}"
            assert set(runs.split()) <= RUNS, f"{file}: {name}"
    return claimed_in(ROOT)


def results(tests: dict, *further_claims: tuple[str, str], failed: Iterable[str] = ()) -> Any:
    """Return the results of a tree whose tests have the covered claims and `further_claims`."""
    claims_of_tests = {
        (test.split("[")[0], claim) for test, (_, claims) in tests.items() for claim in claims
    }
    return write_status.Results(
        tests, frozenset(failed), frozenset({*claims_of_tests, *further_claims})
    )


def tables(page: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return the marks in the tables of a page, by strategy, row and grid."""
    cells: dict[str, dict[str, dict[str, str]]] = {}
    for strategy, section in sections(page).items():
        head, _, *lines = [line for line in section.splitlines() if line.startswith("|")]
        grids = [cell.strip() for cell in head.split("|")[2:-1]]
        rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
        cells[strategy] = {
            row: dict(zip(grids, marks, strict=True)) for row, *marks in rows if "**" not in row
        }
    return cells


def sections(page: str) -> dict[str, str]:
    """Return the section of every strategy."""
    sections_by_title = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    return {name: sections_by_title[name] for name in STRATEGIES}


def listed_as_empty(section: str) -> dict[str, set[str]]:
    """Return the empty cells that a section enumerates, by row."""
    empty_cells = {}
    for row, where in re.findall(r"^- (.+): (all(?: but)?.*|`.*)$", section, re.MULTILINE):
        names = set(re.findall("`([^`]+)`", where))
        empty_cells[row] = (set(GRIDS) - names) if where.startswith("all") else names
    return empty_cells


def check_page(page: str) -> None:
    """Assert that a page has known rows and columns and lists its empty cells."""
    for strategy, rows in tables(page).items():
        assert set(rows) <= set(ROWS)
        assert all(set(marks) <= set(GRIDS) for marks in rows.values())
        marks = {
            (row, grid): mark
            for row, marks_of_row in rows.items()
            for grid, mark in marks_of_row.items()
        }
        empty = {cell for cell, mark in marks.items() if not mark}
        never = {cell for cell, mark in marks.items() if mark == "–"}
        section = sections(page)[strategy]
        lists = listed_as_empty(section)
        assert {(row, g) for row, grids in lists.items() for g in grids} - never == empty
        assert f"Empty cells: {len(empty)} of {len(marks) - len(never)}." in section


def statuses_on_page(page: str) -> dict[tuple[str, str], str]:
    """Return what a page says of each test and claim."""
    lists = page.split("\n## Tests by feature\n")[1].split("\n## ")[0].split("\n### ")[1:]
    return {
        (test, claim): status
        for claim, text in (section.split("\n", 1) for section in lists)
        for test, status in re.findall(r"^- `(.+)`(.*)$", text, re.MULTILINE)
    }


def check_not_run(page: str) -> None:
    """Assert that missing tests are listed at a page's end and counted in its head."""
    end = set(re.findall(r"^- `(.+)`$", page.split("\n## Not run\n")[1], re.MULTILINE))
    statuses = statuses_on_page(page)
    missing = {test for (test, _), words in statuses.items() if write_status.MISSING in words}
    assert missing <= end
    assert {test for test in end if "[" not in test} == missing
    passed = {test for (test, _), words in statuses.items() if write_status.MISSING not in words}
    pattern = r"from (\d+) passed tests.*\s(\d+) marked tests.*and (\d+) of them did not run"
    counts = re.search(pattern, page, re.DOTALL)
    assert [int(n) for n in counts.groups()] == [len(passed), len(passed | missing), len(end)]


def test_status_page_lists_exactly_the_tests_with_claims(claimed) -> None:
    page = write_status.PAGE.read_text(encoding="utf-8")
    listed = set(statuses_on_page(page))
    assert len(listed) > 10
    gone, new = sorted(listed - claimed), sorted(claimed - listed)
    assert not gone, f"renamed or gone: make status, or name them anew in docs/status.md: {gone}"
    assert not new, (
        f"make status, or say {write_status.MISSING!r} in docs/status.md, below the claim, in the "
        f"list at the end and in the counts at the head: {new}"
    )
    check_not_run(page)


def test_status_page_has_known_rows_and_lists_empty_cells() -> None:
    check_page(write_status.PAGE.read_text(encoding="utf-8"))


RAN = Ran(
    world=4, tp=2, cp=2, pp=1, dp=1, ep=1, etp=1, sequence_parallel=True, schedule="",
    strategy="optim", settings=("bf16", "AdamW"), did=("saves",),
)  # fmt: skip


def test_cells_reflect_the_trained_steps() -> None:
    proved, stops = "matches a single process", "graceful stop with a save"
    idle = replace(RAN, strategy="", cp=1, world=2)
    tests = {
        "tests/test_a.py::test_slow[1]": (True, {proved: [RAN]}),
        "tests/test_a.py::test_fast": (False, {stops: [replace(RAN, tp=1, world=2)]}),
        "tests/test_a.py::test_nothing_cut": (False, {proved: [idle]}),
        "tests/test_a.py::test_nothing_ran": (False, {proved: []}),
    }
    page = write_status.page(results(tests))
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
    assert marks == {**dict.fromkeys(slow, "n"), ("optim", stops, "cp"): "✓"}
    tests = page.split("\n## Tests by feature\n")[1]
    assert "- `tests/test_a.py::test_slow` n\n" in tests
    assert "- `tests/test_a.py::test_fast`\n" in tests
    assert "- `tests/test_a.py::test_nothing_ran`: passed, but none of its steps fits" in tests
    for is_slow in (True, False):
        mixed_tests = {"a": (is_slow, {proved: [RAN]}), "b": (not is_slow, {proved: [RAN]})}
        assert tables(write_status.page(results(mixed_tests)))["optim"]["bf16"]["cp"] == "✓"


def test_status_page_rejects_impossible_cells_and_new_settings() -> None:
    alone = replace(RAN, world=1, tp=1, cp=1)
    with pytest.raises(ValueError, match="calls impossible: one process shards nothing"):
        write_status.page(results({"a": (False, {"checkpoint retention": [alone]})}))
    new = replace(RAN, settings=("new",))
    with pytest.raises(ValueError, match="SETTINGS lacks"):
        write_status.page(results({"a": (False, {"checkpoint retention": [new]})}))


def test_partial_page_lists_missing_tests() -> None:
    tests = {
        "t.py::half[1]": (False, {"checkpoint retention": [RAN]}),
        "t.py::ok": (True, {"checkpoint retention": []}),
    }
    lacks = [("t.py::gone", "checkpoint retention"), ("t.py::gone", "elastic restart")]
    page = write_status.page(results(tests, *lacks, failed={"t.py::half[2]", "t.py::gone"}))
    check_page(page)
    check_not_run(page)
    head = page[: page.index("\n## ")]
    assert "written from 2 passed tests (1 slow). There are\n3 marked tests" in head
    assert "and 2 of them did not run" in head
    assert "\nMarked tests that were not run or not passed:\n" in page
    assert page.endswith("\n\n- `t.py::gone`\n- `t.py::half[2]`\n")
    statuses = statuses_on_page(page)
    assert [statuses["t.py::gone", c] for _, c in lacks] == [": not run or not passed"] * 2
    assert "- elastic restart: all (1 of 1 tests not run or not passed)\n" in page
    assert "(1 of 3 tests not run or not passed)\n" in page
    lists = page.split("\n## Tests by feature\n")[1]
    assert lists.count("\nNo test.\n") == len(CLAIMS) - 2
    check_not_run(write_status.page(results(tests)))


def _written(path: Path, names: Iterable[str], *, failed: Iterable[str] = ()) -> str:
    claims = {"slow": False, "claims": {"checkpoint retention": [asdict(RAN)], "old": []}}
    path.write_text(json.dumps({"tests": dict.fromkeys(names, claims), "failed": list(failed)}))
    return str(path)


def test_files_are_merged_and_too_few_tests_refused(tmp_path, monkeypatch, capsys) -> None:
    names = [f"t.py::t{n}" for n in range(5)]
    tree = frozenset((name, "checkpoint retention") for name in names)
    monkeypatch.setattr(write_status, "claimed_in", lambda root: tree)
    out = tmp_path / "page.md"
    to = ["--output", str(out)]
    report_a = _written(tmp_path / "a", [*names[:3], "t.py::renamed"])
    report_b = _written(tmp_path / "b", [names[3], f"{names[4]}[x]"], failed=[names[0]])
    write_status.main([report_a, report_b, *to])
    printed = capsys.readouterr().out
    assert "left out: t.py::renamed: the tree has no such test or mark\n" in printed
    assert "left out: t.py::t1: it claims 'old' no more\n" in printed
    assert printed.endswith(f"{out}: 4 tests, 1 not run or not passed\n")
    assert write_status.tests_of(out.read_text(encoding="utf-8")) == set(names[1:])
    write_status.main([_written(tmp_path / "c", names[:2]), *to])  # half: enough
    write_status.main([report_a, report_b, *to])
    written, report_of_one_test = (
        out.read_text(encoding="utf-8"),
        _written(tmp_path / "d", names[:1]),
    )
    with pytest.raises(SystemExit) as stopped:
        write_status.main([report_of_one_test, *to])
    assert stopped.value.code == 2
    assert "is from 4 tests, these files have 1: give" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == written
    write_status.main([report_of_one_test, *to, "--partial"])
    assert "written from 1 passed tests" in out.read_text(encoding="utf-8")


def _report(nodeid: str, when: str, *, passed: bool = True, covered: Any = None) -> SimpleNamespace:
    properties = [] if covered is None else [("covers", json.dumps(covered))]
    return SimpleNamespace(
        nodeid=nodeid, when=when, passed=passed, user_properties=properties, keywords={}
    )


def test_only_passed_tests_count_and_empty_claims_are_reported(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(status_record.coverage_recorder, "install", lambda: None)
    out = tmp_path / "status.json"
    record = status_record.StatusRecord(out)
    claims = {"checkpoint retention": [asdict(RAN)]}
    for name, failing in (("good", None), ("bad", "call"), ("torn", "teardown")):
        for when in ("setup", "call", "teardown"):
            properties = {"covered": claims} if when == "teardown" else {}
            record.pytest_runtest_logreport(
                _report(f"t.py::{name}", when, passed=when != failing, **properties)
            )
    idle = _report("u.py::idle", "teardown", covered={"checkpoint retention": []})
    record.pytest_runtest_logreport(idle)
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    record.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    (complaint,) = record.complaints
    assert complaint == "u.py covers 'checkpoint retention' and no step was seen that fits"
    read, failed = status_record.covered([out])
    assert failed == {"t.py::bad", "t.py::torn"}
    assert read == {
        "t.py::good": (False, {"checkpoint retention": [RAN]}),
        "u.py::idle": (False, {"checkpoint retention": []}),
    }
    assert RAN.fits("ranks saves")
    assert not RAN.fits("ranks loads")
