# SPDX-License-Identifier: Apache-2.0
"""pytest --status-out FILE: what tests that passed have claimed, and what they trained meanwhile.

The file is for `tools/write_status.py`. A test counts if it has passed, with set-up and tear-down;
a file of tests that claims something and trained nothing that fits fails the session.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support import witness
from tests.support.status_rows import CLAIMS, Ran

_PROPERTY = "covers"


def claims_of(item: pytest.Item) -> list[tuple[str, str]]:
    """Return what a test claims, each with the words that its runs must fit.

    Raises:
        pytest.UsageError: there is no such claim.
    """
    found = []
    for mark in item.iter_markers("covers"):
        for name in mark.args:
            if name not in CLAIMS:
                raise pytest.UsageError(f"{item.nodeid} covers {name!r}: see status_rows.CLAIMS")
            found.append((name, mark.kwargs.get("runs", "")))
    return found


class StatusRecord:
    """Watch tests and write what they covered.

    Args:
        out: the file to write, in the process that reports; None in a worker of xdist.
    """

    def __init__(self, out: Path | None) -> None:
        self.out, self.complaints = out, []
        self.folder, self.count = Path(tempfile.mkdtemp(prefix="witness-")), 0
        self.passed: dict[str, bool] = defaultdict(lambda: True)
        self.tests: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []
        witness.install()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Refuse an unknown claim before anything runs."""
        for item in items:
            claims_of(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Have a test's processes write to a file of its own."""
        self.count += 1
        os.environ[witness.VARIABLE] = str(self.folder / f"test{self.count}.jsonl")
        try:
            return (yield)
        finally:
            del os.environ[witness.VARIABLE]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        """Give the report of a tear-down what the test claimed and trained."""
        if call.when != "teardown":
            return
        path = Path(os.environ[witness.VARIABLE])
        claims, seen = claims_of(item), witness.read(path)
        path.unlink(missing_ok=True)
        if claims:
            covered: dict[str, list[dict]] = {name: [] for name, _ in claims}
            for name, runs in claims:
                covered[name] += [asdict(ran) for ran in seen if ran.fits(runs)]
            item.user_properties.append((_PROPERTY, json.dumps(covered)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a test covered if all of it passed, else its name."""
        self.passed[report.nodeid] &= report.passed
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name != _PROPERTY:
                continue
            if not self.passed[report.nodeid]:
                self.failed.append(report.nodeid)
            else:
                slow = "slow" in report.keywords
                self.tests[report.nodeid] = {"slow": slow, "claims": json.loads(value)}

    def empty_claims(self) -> list[str]:
        """Return a line for each claim of a file whose tests trained nothing that fits it.

        By file, as a fixture that trains for several tests is seen by the first."""
        found: dict[tuple[str, str], int] = defaultdict(int)
        for nodeid, test in self.tests.items():
            for claim, rans in test["claims"].items():
                found[nodeid.split("::")[0], claim] += len(rans)
        return [
            f"{file} covers {claim!r} and no step was seen that fits"
            for (file, claim), count in found.items()
            if not count
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file, and fail an otherwise good session with empty claims."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.out is None:
            return
        self.complaints = self.empty_claims()
        if self.complaints and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({"tests": self.tests, "failed": self.failed}), "utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the complaints."""
        for complaint in self.complaints:
            terminalreporter.write_line(f"status: {complaint}", red=True)


def covered(
    paths: Iterable[Path],
) -> tuple[dict[str, tuple[bool, dict[str, list[Ran]]]], set[str]]:
    """Return from files of `--status-out`, of which later ones win: of each test that passed,
    whether it is slow, and what it covered; the tests that failed or were skipped."""
    found: dict[str, tuple[bool, dict[str, list[Ran]]]] = {}
    failed: set[str] = set()
    for path in paths:
        read = json.loads(path.read_text(encoding="utf-8"))
        for nodeid, test in read["tests"].items():
            claims = {name: [Ran.of(r) for r in rans] for name, rans in test["claims"].items()}
            found[nodeid] = (test["slow"], claims)
            failed.discard(nodeid)
        for nodeid in read.get("failed", ()):  # files of older versions have none
            found.pop(nodeid, None)
            failed.add(nodeid)
    return found, failed
