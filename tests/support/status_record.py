# SPDX-License-Identifier: Apache-2.0
"""pytest --status-out FILE: record the claims of passed tests, and the layouts that they trained.

`tools/write_status.py` reads the file. A test counts if it passed, including set-up and tear-down.
The session fails if a test file claims a feature but trained no layout that fits.
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

from tests.support import coverage_recorder
from tests.support.status_rows import CLAIMS, Ran

_PROPERTY = "covers"


def claims_of(item: pytest.Item) -> list[tuple[str, str]]:
    """Return the claims of a test, each with the condition on its runs.

    Raises:
        pytest.UsageError: there is no such claim.
    """
    claims = []
    for mark in item.iter_markers("covers"):
        for name in mark.args:
            if name not in CLAIMS:
                raise pytest.UsageError(f"{item.nodeid} covers {name!r}: see status_rows.CLAIMS")
            claims.append((name, mark.kwargs.get("runs", "")))
    return claims


class StatusRecord:
    """Collect the coverage of tests and write it to a file.

    Args:
        out: output file of the reporting process; None in an xdist worker.
    """

    def __init__(self, out: Path | None) -> None:
        self.out, self.complaints = out, []
        self.folder, self.count = Path(tempfile.mkdtemp(prefix="coverage-")), 0
        self.passed: dict[str, bool] = defaultdict(lambda: True)
        self.tests: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []
        coverage_recorder.install()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Refuse an unknown claim before anything runs."""
        for item in items:
            claims_of(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Let the processes of a test write to a separate file."""
        self.count += 1
        os.environ[coverage_recorder.VARIABLE] = str(self.folder / f"test{self.count}.jsonl")
        try:
            return (yield)
        finally:
            del os.environ[coverage_recorder.VARIABLE]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        """Attach claims and trained layouts to the tear-down report."""
        if call.when != "teardown":
            return
        path = Path(os.environ[coverage_recorder.VARIABLE])
        claims, seen = claims_of(item), coverage_recorder.read(path)
        path.unlink(missing_ok=True)
        if claims:
            covered: dict[str, list[dict]] = {name: [] for name, _ in claims}
            for name, runs in claims:
                covered[name] += [asdict(ran) for ran in seen if ran.fits(runs)]
            item.user_properties.append((_PROPERTY, json.dumps(covered)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the coverage of a passed test, or the name of a failed test."""
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
        """Return a line for each claim of a test file without a fitting training step.

        Counted by file, because a shared fixture trains only during the first test.
        """
        runs_by_claim: dict[tuple[str, str], int] = defaultdict(int)
        for nodeid, test in self.tests.items():
            for claim, rans in test["claims"].items():
                runs_by_claim[nodeid.split("::")[0], claim] += len(rans)
        return [
            f"{file} covers {claim!r} and no step was seen that fits"
            for (file, claim), count in runs_by_claim.items()
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
    """Merge files of `--status-out`; a later file overrides an earlier one.

    Returns:
        (tests, failed): for each passed test whether it is slow and its coverage; the tests that
        failed or were skipped.
    """
    tests: dict[str, tuple[bool, dict[str, list[Ran]]]] = {}
    failed: set[str] = set()
    for path in paths:
        read = json.loads(path.read_text(encoding="utf-8"))
        for nodeid, test in read["tests"].items():
            claims = {name: [Ran.of(r) for r in rans] for name, rans in test["claims"].items()}
            tests[nodeid] = (test["slow"], claims)
            failed.discard(nodeid)
        for nodeid in read.get("failed", ()):  # files of older versions have none
            tests.pop(nodeid, None)
            failed.add(nodeid)
    return tests, failed
