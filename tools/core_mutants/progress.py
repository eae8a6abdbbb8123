# SPDX-License-Identifier: Apache-2.0
"""pytest -p tools.core_mutants.progress: run the tests of a list in its order, and say how far.

The environment variable `TESTS` names a JSON list of test ids, `PROGRESS` the file to write: lines
of JSON, each an event with its time, a name and, for the first one, the folder of megatron.core.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tools.core_mutants.contexts import core_folder

TESTS, PROGRESS = "CORE_MUTANTS_TESTS", "CORE_MUTANTS_PROGRESS"


class Progress:
    """Choose and order the tests, and write down what happens."""

    def __init__(self, tests: list[str], out: str) -> None:
        self.positions = {test: positions for positions, test in enumerate(tests)}
        self.out = out
        self.tell("core", str(core_folder()))

    def tell(self, event: str, name: str) -> None:
        """Append an event to the file."""
        with open(self.out, "a", encoding="utf-8") as file:
            file.write(json.dumps([event, name, time.time()]) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the tests of the list, in its order."""
        deselected = [item for item in items if item.nodeid not in self.positions]
        config.hook.pytest_deselected(items=deselected)
        selected = [item for item in items if item.nodeid in self.positions]
        items[:] = sorted(selected, key=lambda item: self.positions[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tell of a file that cannot be imported."""
        if report.failed:
            self.tell("broken", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell of a test that begins."""
        self.tell("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell of a test that fails, in its set-up, call or tear-down."""
        if report.failed:
            self.tell("failed", report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Tell of a test that has ended."""
        self.tell("end", nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """Read the list."""
    tests = json.loads(Path(os.environ[TESTS]).read_text(encoding="utf-8"))
    config.pluginmanager.register(Progress(tests, os.environ[PROGRESS]), "core-mutants-progress")
