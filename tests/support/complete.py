# SPDX-License-Identifier: Apache-2.0
"""pytest -p tests.support.complete: a session that leaves out a test that it should run fails.

What passes every night may have run nothing: a test that is skipped, a session that stops early, a
keyword that fits no name. With this plugin every test that was collected has to run, but for those
marked gpu and, with -m "not slow", those marked slow. A slow one may not be skipped, nor a whole
file, nor one whose list of cases is empty.

--part K/N runs the Kth of N parts of about as many seconds each; what a test takes, say the
`seconds` of its mark `slow`. Every test is in one part.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterator, Sequence

import pytest

#: What a test counts that says nothing of its seconds: one of every change, and a slow one.
QUICK, SLOW = 1.0, 20.0

#: What pytest says of a test whose list of parameters is empty.
_NO_CASES = "got empty parameter set"


def parts(seconds: Sequence[float], count: int) -> list[list[int]]:
    """Divide numbers of tests into parts of about the same sum: the longest first, each to the
    part that has least."""
    sums = [(0.0, part) for part in range(count)]
    found: list[list[int]] = [[] for _ in range(count)]
    for number in sorted(range(len(seconds)), key=lambda n: (-seconds[n], n)):
        total, part = heapq.heappop(sums)
        found[part].append(number)
        heapq.heappush(sums, (total + seconds[number], part))
    return [sorted(numbers) for numbers in found]


def seconds_of(item: pytest.Item) -> float:
    """Return about how long a test takes."""
    marks = list(item.iter_markers("slow"))
    told = [mark.kwargs["seconds"] for mark in marks if "seconds" in mark.kwargs]
    return told[0] if told else SLOW if marks else QUICK


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--part {text}: K/N with K from 1 to N, such as 2/3")
    return int(found[1]), int(found[2])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --part."""
    parser.addoption("--part", metavar="K/N", help="run the Kth of N parts of the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Watch what is collected and what runs."""
    part = config.getoption("part")
    config.pluginmanager.register(Complete(_part(part) if part else None), "complete")


class Complete:
    """Keep which tests should run, and what became of them."""

    def __init__(self, part: tuple[int, int] | None) -> None:
        self.part = part
        self.wanted: set[str] = set()
        self.chosen = 0
        self.ran: set[str] = set()
        self.skipped: set[str] = set()
        self.complaints: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        """Choose the part of what others have left, and refuse what they should have left."""
        collected = list(items)
        yield
        kept = {item.nodeid for item in items}
        elsewhere = {"gpu", "slow"} if "not slow" in config.option.markexpr else {"gpu"}
        for item in collected:
            if item.nodeid not in kept and not any(map(item.get_closest_marker, elsewhere)):
                raise pytest.UsageError(f"tests.support.complete: {item.nodeid} is left out")
        self.chosen = len(items)
        if self.part is not None:
            number, count = self.part
            own = set(parts([seconds_of(item) for item in items], count)[number - 1])
            others = [item for n, item in enumerate(items) if n not in own]
            config.hook.pytest_deselected(items=others)
            items[:] = [items[n] for n in sorted(own)]
        self.wanted = {item.nodeid for item in items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Learn from a worker of xdist what should run."""
        self.wanted = set(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that skipped itself."""
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what ran, and which slow one skipped itself."""
        if report.when == "teardown":
            self.ran.add(report.nodeid)
        elif report.skipped and ("slow" in report.keywords or _NO_CASES in str(report.longrepr)):
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session that left something out; of workers, the process that reports knows."""
        if "PYTEST_XDIST_WORKER" in os.environ or session.config.option.collectonly:
            return
        self.complaints = [f"did not run: {name}" for name in sorted(self.wanted - self.ran)]
        self.complaints += [f"skipped: {name}" for name in sorted(self.skipped)]
        if self.complaints and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many ran, of how many, and the complaints."""
        ran = len(self.wanted & self.ran - self.skipped)
        terminalreporter.write_line(
            f"complete: {ran} of {len(self.wanted)} tests ran{self._where()}"
        )
        for complaint in self.complaints:
            terminalreporter.write_line(f"complete: {complaint}", red=True)

    def _where(self) -> str:
        if self.part is None:
            return ""
        return f", part {self.part[0]} of {self.part[1]} of {self.chosen} tests"
