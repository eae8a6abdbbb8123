# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel, forward and backward, in Triton's interpreter, one process per file."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Number of cases per file: in every run, and in addition every night. The counts make this test
# fail if a case is silently not collected.
FILES = {
    "interpreted_cases.py": (75, 48),
    "interpreted_decode.py": (23, 0),
    "interpreted_experts.py": (7, 0),
    "interpreted_gated_norm.py": (28, 0),
    "interpreted_mixers.py": (4, 0),
    "interpreted_nvls.py": (35, 2),
    "interpreted_paged_attention.py": (27, 0),
    "interpreted_prologue.py": (15, 0),
    "interpreted_rounding.py": (5, 0),
    "interpreted_sampling.py": (23, 0),
    "tests/gpu/test_recurrence.py": (49, 21),
    "tests/gpu/test_skip_connection.py": (7, 0),
}
ROOT = Path(__file__).parents[4]


def interpret(file: str, markers: str) -> subprocess.CompletedProcess:
    """Run the cases of a file that match the marker expression."""
    cases = Path(__file__).parent / file
    if "/" in file:  # a module that also runs on a GPU
        cases, markers = ROOT / file, f"gpu and {markers}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in [n for n in environment if n.startswith("PYTEST_")]:
        del environment[name]
    return subprocess.run(
        [*command, str(cases)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,  # low priority, while other tests keep all cores busy
        check=False,
    )


def processes(markers: str, index: int) -> list:
    """Return (key, number of cases) of each file with cases that match the marker expression."""
    parameters = []
    for file, counts in FILES.items():
        key = (file, markers)
        if counts[index]:
            mark = pytest.mark.background(key, partial(interpret, *key))
            parameters.append(pytest.param(key, counts[index], marks=mark, id=file))
    return parameters


@pytest.mark.parametrize(("key", "expected"), processes("not slow", 0))
def test_interpreted_kernels_match_the_formulas(key, expected, background):
    assert_passed(background.result(key), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("key", "expected"), processes("slow", 1))
def test_interpreted_kernels_match_in_slow_cases(key, expected, background):
    assert_passed(background.result(key), expected)


def assert_passed(run: subprocess.CompletedProcess, expected: int) -> None:
    """Fail unless exactly `expected` cases have passed."""
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout[-2000:]
    assert int(passed.group(1)) == expected


def test_every_interpreted_file_is_run():
    assert {path.name for path in Path(__file__).parent.glob("interpreted_*.py")} == {
        file for file in FILES if "/" not in file
    }
