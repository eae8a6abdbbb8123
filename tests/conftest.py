# SPDX-License-Identifier: Apache-2.0
"""Hold every test folder to its seconds in `budget.toml`: a run that exceeds them fails.

Counted is the wall time of set-up, call and tear-down of every test that is not marked slow or gpu.
"""

from __future__ import annotations

import os
import tomllib
from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest

BUDGETS = Path(__file__).with_name("budget.toml")


def entry_of(folder: str, entries: dict[str, float]) -> str | None:
    """Return the longest entry that is `folder` or above it, or None."""
    path = PurePosixPath(folder)
    return next((str(p) for p in (path, *path.parents) if str(p) in entries), None)


class TimeBudget:
    """Sum the tests' seconds per entry of `budget.toml` and fail the session that exceeds one."""

    def __init__(self, entries: dict[str, float], slack: float) -> None:
        self.entries = entries
        self.slack = slack
        self.spent: dict[str, float] = defaultdict(float)
        self.complaints: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Charge one phase of one test to its folder."""
        if not {"slow", "gpu"} & set(report.keywords):
            self.spent[str(PurePosixPath(report.nodeid.split("::")[0]).parent)] += report.duration

    def judge(self) -> list[str]:
        """Return one line for every entry exceeded and every folder that has none."""
        totals: dict[str, float] = defaultdict(float)
        complaints = []
        for folder, seconds in sorted(self.spent.items()):
            entry = entry_of(folder, self.entries)
            if entry is None:
                complaints.append(f"{folder} has no seconds in {BUDGETS.name}: add an entry")
            else:
                totals[entry] += seconds
        for entry, seconds in totals.items():
            allowed = self.entries[entry]
            if seconds > allowed * self.slack:
                complaints.append(
                    f"{entry} took {seconds:.1f} s of {allowed:g} s (slack {self.slack:g}): make "
                    "its tests quicker, mark the long ones slow, or shift seconds between folders"
                )
        return complaints

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail an otherwise good session that was too slow."""
        self.complaints = self.judge()
        if self.complaints and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the complaints above pytest's closing line."""
        for complaint in self.complaints:
            terminalreporter.write_line(f"time budget: {complaint}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --budget-slack, for machines on which the budgets' own slack is too little."""
    parser.addoption(
        "--budget-slack",
        type=float,
        default=None,
        help="factor on the seconds of tests/budget.toml (default: its own slack)",
    )
    parser.addoption(
        "--status-out",
        metavar="FILE",
        default=None,
        help="write what the tests that passed have covered, for tools/write_status.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch what is covered if asked to, and the time in the process that reports, not in xdist's
    workers."""
    works = "PYTEST_XDIST_WORKER" in os.environ
    if (out := config.getoption("--status-out")) is not None:
        from tests.support.status_record import StatusRecord  # imports what is trained

        record = StatusRecord(None if works else Path(out).absolute())
        config.pluginmanager.register(record, "status-record")
    if works:
        return
    read = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    slack = config.getoption("--budget-slack") or read["slack"]
    config.pluginmanager.register(TimeBudget(read["seconds"], slack), "time-budget")
