# SPDX-License-Identifier: Apache-2.0
"""Exceeded seconds are reported, and fail only where enforced; the budgets fit into the whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SLEEPER = """
import time
import pytest
def test_sleeps(): time.sleep(0.3)
@pytest.mark.slow
def test_sleeps_long(): time.sleep(0.6)
"""


def run_with(tmp_path: Path, entries: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run one sleeping test under a budget file with the given lines."""
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "budget.toml").write_text(f"slack = 1.0\n[seconds]\n{entries}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: x\n")
    (folder / "test_sleep.py").write_text(SLEEPER)
    command = [sys.executable, "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider", *flags]
    # Without plugins it starts in half the time; it is not a worker of the run it is tested in.
    outside = {k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"}
    environment = {**outside, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("entries", "status", "line"),
    [
        ('"tests" = 0.1', 1, "tests took"),
        ('"tests" = 9\n"tests/unit" = 0.1', 1, "tests/unit took"),
        ('"tests" = 0.55', 0, ""),
    ],
    ids=["exceeded", "longest entry", "slow not counted"],
)
def test_an_enforced_budget_fails_a_slow_folder(
    tmp_path: Path, entries: str, status: int, line: str
) -> None:
    done = run_with(tmp_path, entries, "--enforce-time-budget")
    assert done.returncode == status, done.stdout + done.stderr
    assert ("time budget" in done.stdout) == bool(line)
    assert line in done.stdout
    assert "2 passed" in done.stdout.splitlines()[-1]


def test_a_slow_machine_is_reported_and_fails_no_change(tmp_path: Path) -> None:
    done = run_with(tmp_path, '"tests" = 0.1')
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests took" in done.stdout


def test_a_folder_without_an_entry_fails(tmp_path: Path) -> None:
    done = run_with(tmp_path, '"elsewhere" = 9')
    assert done.returncode == 1
    assert "tests/unit has no seconds" in done.stdout


def test_slack_can_be_given(tmp_path: Path) -> None:
    done = run_with(tmp_path, '"tests" = 0.1', "--enforce-time-budget", "--budget-slack", "9")
    assert done.returncode == 0


def test_the_budgets_fit_into_the_whole() -> None:
    budget = tomllib.loads((TESTS / "budget.toml").read_text())
    assert sum(budget["seconds"].values()) <= budget["total_seconds"]
