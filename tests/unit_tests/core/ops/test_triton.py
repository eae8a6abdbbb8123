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

ROOT = Path(__file__).parents[4]
#: The modules of each process, and its number of cases in every run, and in addition every night.
#: The counts make this test fail if a case is silently not collected.
PROCESSES = {
    "pointwise": (
        "tests/gpu/test_norms.py tests/gpu/test_rope.py tests/gpu/test_swiglu.py"
        " tests/gpu/test_dropout.py tests/gpu/test_linear_cross_entropy.py"
        " tests/gpu/test_permutation.py tests/gpu/test_grouped_mm.py",
        97,
        78,
    ),
    "attention": ("tests/gpu/test_attention.py", 51, 104),
    "decoding": ("tests/gpu/test_paged_attention.py tests/gpu/test_sampling.py", 57, 29),
    "mixers": (
        "tests/gpu/test_prologue.py tests/gpu/test_gated_norm.py tests/gpu/test_decode.py"
        " tests/gpu/test_skip_connection.py",
        83,
        54,
    ),
    "recurrence": ("tests/gpu/test_recurrence.py", 49, 21),
    "nvls": ("tests/unit_tests/core/ops/interpreted_nvls.py", 35, 2),
    "interpreted": (
        "tests/unit_tests/core/ops/interpreted_mixers.py"
        " tests/unit_tests/core/ops/interpreted_rounding.py",
        9,
        0,
    ),
}


def interpret(name: str, markers: str) -> subprocess.CompletedProcess:
    """Run the cases of a process that match the marker expression."""
    modules = PROCESSES[name][0].split()
    if modules[0].startswith("tests/gpu"):  # they also run on a GPU
        markers = f"gpu and {markers}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for variable in [n for n in environment if n.startswith("PYTEST_")]:
        del environment[variable]
    return subprocess.run(
        [*command, *modules],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,  # low priority, while other tests keep all cores busy
        check=False,
    )


def processes(markers: str, index: int) -> list:
    """Return (key, number of cases) of each process with cases that match the expression."""
    parameters = []
    for name, (_, *counts) in PROCESSES.items():
        key = (name, markers)
        if counts[index]:
            mark = pytest.mark.background(key, partial(interpret, *key))
            parameters.append(pytest.param(key, counts[index], marks=mark, id=name))
    return parameters


@pytest.mark.parametrize(("key", "expected"), processes("not slow", 0))
def test_interpreted_kernels_match_the_equations(key, expected, background):
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


def test_every_module_with_kernels_is_interpreted():
    """A module of tests/gpu that has a CPU part, or an interpreted module, is in a process."""
    listed = {module for modules, *_ in PROCESSES.values() for module in modules.split()}
    interpreted = Path(__file__).parent.glob("interpreted_*.py")
    ops = (path for path in ROOT.glob("tests/gpu/test_*.py") if "_gpu" not in path.name)
    assert {str(path.relative_to(ROOT)) for path in (*interpreted, *ops)} == listed
