# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel, forward and backward, in Triton's interpreter: one process a file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Files of cases, and how many each has: a case that silently was not collected must fail.
FILES = {
    "interpreted_cases.py": 55,
    "interpreted_convolution.py": 28,
    "interpreted_decode.py": 23,
    "interpreted_gated_norm.py": 33,
    "interpreted_mixers.py": 4,
    "interpreted_paged_attention.py": 20,
    "interpreted_prologue.py": 11,
    "interpreted_recurrence.py": 34,
    "interpreted_recurrence_backward.py": 19,
}


@pytest.mark.parametrize(("file", "expected"), FILES.items(), ids=FILES)
def test_kernels_agree_with_the_formulas_in_the_interpreter(file, expected):
    cases = Path(__file__).with_name(file)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in [n for n in environment if n.startswith("PYTEST_")]:
        del environment[name]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout[-2000:]
    assert int(passed.group(1)) == expected


def test_every_file_of_cases_is_run():
    assert {path.name for path in Path(__file__).parent.glob("interpreted_*.py")} == set(FILES)
