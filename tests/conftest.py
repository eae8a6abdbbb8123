# SPDX-License-Identifier: Apache-2.0
"""Report every test folder that exceeds its seconds in `budget.toml`.

Counted is the wall time of set-up, call and tear-down of every test that is not marked slow or gpu.
Seconds depend on the machine, so they fail a run only with --enforce-time-budget (nightly). A
folder without an entry always fails.
"""

from __future__ import annotations

import os
import tomllib
from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest

BUDGETS = Path(__file__).with_name("budget.toml")

# For every connection of a TCPStore, both ends look up the name of ::ffff:127.0.0.1. Where the name
# server drops queries, each dropped one takes the resolver's time-out, by default 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# Before torch is imported: threads of several workers of xdist would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def entry_of(folder: str, entries: dict[str, float]) -> str | None:
    """Return the longest entry that is `folder` or above it, or None."""
    path = PurePosixPath(folder)
    return next((str(p) for p in (path, *path.parents) if str(p) in entries), None)


class TimeBudget:
    """Sum the tests' seconds per entry of `budget.toml`; report those exceeded, or fail on them."""

    def __init__(self, entries: dict[str, float], slack: float, *, enforce: bool) -> None:
        self.entries = entries
        self.slack = slack
        self.enforce = enforce
        self.spent: dict[str, float] = defaultdict(float)
        self.exceeded: list[str] = []
        self.without_entry: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Charge one phase of one test to its folder."""
        if not {"slow", "gpu"} & set(report.keywords):
            self.spent[str(PurePosixPath(report.nodeid.split("::")[0]).parent)] += report.duration

    def compare(self) -> None:
        """Collect one line for every entry exceeded and every folder that has none."""
        totals: dict[str, float] = defaultdict(float)
        for folder, seconds in sorted(self.spent.items()):
            entry = entry_of(folder, self.entries)
            if entry is None:
                self.without_entry.append(
                    f"{folder} has no seconds in {BUDGETS.name}: add an entry"
                )
            else:
                totals[entry] += seconds
        for entry, seconds in totals.items():
            allowed = self.entries[entry]
            if seconds > allowed * self.slack:
                self.exceeded.append(
                    f"{entry} took {seconds:.1f} s of {allowed:g} s (slack {self.slack:g}): make "
                    "its tests quicker, mark the long ones slow, or shift seconds between folders"
                )

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail an otherwise good session for a missing entry and, if enforced, for its seconds."""
        self.compare()
        fails = self.without_entry or (self.enforce and self.exceeded)
        if fails and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the report above pytest's closing line."""
        for line in self.without_entry:
            terminalreporter.write_line(f"time budget: {line}", red=True)
        for line in self.exceeded:
            terminalreporter.write_line(f"time budget: {line}", red=self.enforce, yellow=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the time budget and of docs/status.md."""
    parser.addoption(
        "--budget-slack",
        type=float,
        default=None,
        help="factor on the seconds of tests/budget.toml (default: its own slack)",
    )
    parser.addoption(
        "--enforce-time-budget",
        action="store_true",
        help="fail when a folder exceeds its seconds in tests/budget.toml (default: report it)",
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
    enforce = config.getoption("--enforce-time-budget")
    budget = TimeBudget(read["seconds"], slack, enforce=enforce)
    config.pluginmanager.register(budget, "time-budget")
