# SPDX-License-Identifier: Apache-2.0
"""A run prints the seconds of its test folders and never fails because of slow folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SLEEPER = """
import time
import pytest
def test_sleeps(): time.sleep(0.3)
@pytest.mark.slow
def test_sleeps_long(): time.sleep(0.6)
"""


def test_seconds_of_folders_are_printed_without_failing(tmp_path: Path) -> None:
    """A folder's seconds are the sum over its tests; slow tests are not counted."""
    for folder in ("one", "two"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(SLEEPER)
    shutil.copy(TESTS / "conftest.py", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: x\n")
    # Without plugins pytest starts in half the time; it must not act as a worker of this run.
    outside = {k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, env={**outside, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    lines = re.findall(r"^seconds: +([\d.]+) (\S+)", process.stdout, re.MULTILINE)
    seconds = {name: float(number) for number, name in lines}
    assert set(seconds) == {"tests/one", "tests/two", "in"}
    assert all(seconds[f"tests/{folder}"] >= 0.3 for folder in ("one", "two"))
    assert seconds["in"] >= seconds["tests/one"] + seconds["tests/two"] - 0.2
    assert "4 passed" in process.stdout.splitlines()[-1]
