# SPDX-License-Identifier: Apache-2.0
"""pytest -p tests.support.complete: fail a session that leaves out a selected test.

A nightly session may pass without running its tests: a test is skipped, the session stops early, or
a keyword matches no name. With this plugin every collected test has to run, except tests marked gpu
and, with -m "not slow", tests marked slow. A slow test must not be skipped, nor a whole file, nor a
test with an empty list of parameters.

--part K/N runs the Kth of N parts with about equal run time. The `seconds` of a test's mark `slow`
give its run time. Every test is in exactly one part.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterator, Sequence

import pytest

#: Assumed run time in seconds of a test without `seconds`: a quick test, and a slow test.
QUICK, SLOW = 1.0, 20.0

#: pytest's message for a test with an empty list of parameters.
_NO_CASES = "got empty parameter set"


def balanced_parts(seconds: Sequence[float], count: int) -> list[list[int]]:
    """Divide tests into `count` parts with about equal run time (longest processing time first).

    Args:
        seconds: run time of each test.
        count: number of parts.

    Returns:
        The test indices of each part, sorted.
    """
    sums = [(0.0, index) for index in range(count)]
    tests_by_part: list[list[int]] = [[] for _ in range(count)]
    for number in sorted(range(len(seconds)), key=lambda n: (-seconds[n], n)):
        total, index = heapq.heappop(sums)
        tests_by_part[index].append(number)
        heapq.heappush(sums, (total + seconds[number], index))
    return [sorted(numbers) for numbers in tests_by_part]


def seconds_of(item: pytest.Item) -> float:
    """Return the estimated run time of a test."""
    marks = list(item.iter_markers("slow"))
    seconds = [mark.kwargs["seconds"] for mark in marks if "seconds" in mark.kwargs]
    return seconds[0] if seconds else SLOW if marks else QUICK


def _parse_part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(f"--part {text}: K/N with K from 1 to N, such as 2/3")
    return int(match[1]), int(match[2])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --part."""
    parser.addoption("--part", metavar="K/N", help="run the Kth of N parts of the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin object."""
    part = config.getoption("part")
    config.pluginmanager.register(Complete(_parse_part(part) if part else None), "complete")


class Complete:
    """Compare the tests that ran with the collected tests."""

    def __init__(self, part: tuple[int, int] | None) -> None:
        self.part = part
        self.expected_tests: set[str] = set()
        self.chosen = 0
        self.ran: set[str] = set()
        self.skipped: set[str] = set()
        self.complaints: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        """Select the tests of this part, and refuse a test that another plugin deselected."""
        collected = list(items)
        yield
        selected = {item.nodeid for item in items}
        elsewhere = {"gpu", "slow"} if "not slow" in config.option.markexpr else {"gpu"}
        for item in collected:
            if item.nodeid not in selected and not any(map(item.get_closest_marker, elsewhere)):
                raise pytest.UsageError(f"tests.support.complete: {item.nodeid} is left out")
        self.chosen = len(items)
        if self.part is not None:
            number, count = self.part
            indices = set(balanced_parts([seconds_of(item) for item in items], count)[number - 1])
            deselected = [item for n, item in enumerate(items) if n not in indices]
            config.hook.pytest_deselected(items=deselected)
            items[:] = [items[n] for n in sorted(indices)]
        self.expected_tests = {item.nodeid for item in items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Take the expected tests from an xdist worker."""
        self.expected_tests = set(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a skipped file."""
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record tests that ran, and slow tests that were skipped."""
        if report.when == "teardown":
            self.ran.add(report.nodeid)
        elif report.skipped and ("slow" in report.keywords or _NO_CASES in str(report.longrepr)):
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail an incomplete session. Only the reporting process of xdist decides."""
        if "PYTEST_XDIST_WORKER" in os.environ or session.config.option.collectonly:
            return
        self.complaints = [
            f"did not run: {name}" for name in sorted(self.expected_tests - self.ran)
        ]
        self.complaints += [f"skipped: {name}" for name in sorted(self.skipped)]
        if self.complaints and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the number of tests that ran and the complaints."""
        ran = len(self.expected_tests & self.ran - self.skipped)
        terminalreporter.write_line(
            f"complete: {ran} of {len(self.expected_tests)} tests ran{self._where()}"
        )
        for complaint in self.complaints:
            terminalreporter.write_line(f"complete: {complaint}", red=True)

    def _where(self) -> str:
        if self.part is None:
            return ""
        return f", part {self.part[0]} of {self.part[1]} of {self.chosen} tests"
