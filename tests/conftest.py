# SPDX-License-Identifier: Apache-2.0
"""Print the seconds of every test folder at the end of a run.

The sum is the wall time of set-up, call and tear-down of every test that is not marked slow or gpu,
over all worker processes. It depends on the machine, the number of workers and the other load, so
no test fails by it: compare two commits on one machine.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest

#: Folders with less than this share of the total time are not listed.
MIN_SHARE = 0.01

# For every connection of a TCPStore, both ends look up the name of ::ffff:127.0.0.1. If the name
# server drops queries, each look-up takes the resolver's time-out, by default 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# Set before torch is imported: the threads of several xdist workers would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


class FolderSeconds:
    """Sum the seconds of the tests of each folder and list them above pytest's closing line."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of one test to its folder."""
        if not {"slow", "gpu"} & set(report.keywords):
            folder = PurePosixPath(report.nodeid.split("::")[0]).parent
            self.seconds[str(folder)] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print one line for each folder, the longest first."""
        total = sum(self.seconds.values())
        for folder, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            if seconds >= MIN_SHARE * total:
                terminalreporter.write_line(f"seconds: {seconds:7.1f} {folder}")
        if total:
            terminalreporter.write_line(f"seconds: {total:7.1f} in all, over all processes")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of docs/status.md and of ranks on GPUs."""
    parser.addoption(
        "--status-out",
        metavar="FILE",
        default=None,
        help="write the layouts of the tests, for tools/write_status.py",
    )
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device of the ranks that tests start; cuda runs tests marked gpus, a GPU per rank",
    )
    parser.addoption(
        "--gpus", metavar="N", type=int, default=1, help="GPUs without which --device cuda fails"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record layouts if `--status-out` is given, select the tests of `--device`, and sum the
    seconds of each folder in the reporting process, not in xdist's workers."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if (out := config.getoption("--status-out")) is not None:
        from tests.support.status_record import StatusRecord  # imports the training packages

        record = StatusRecord(None if is_worker else Path(out).absolute())
        config.pluginmanager.register(record, "status-record")
    if config.getoption("--device") == "cuda":
        from tests.support.gpu_tests import GpuTests  # imports torch

        config.pluginmanager.register(GpuTests(config.getoption("--gpus")), "gpu-tests")
    if not is_worker:
        config.pluginmanager.register(FolderSeconds(), "folder-seconds")
