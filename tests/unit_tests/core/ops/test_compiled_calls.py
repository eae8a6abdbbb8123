# SPDX-License-Identifier: Apache-2.0
"""Every call of a kernel that tests make in the interpreter, or would on a GPU, also compiles."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[4]
OPS = sorted(Path(__file__).parent.glob("interpreted_*.py"))
#: Those of the GPU's tests that call ops; the tests of what a disagreement is need results.
GPU = sorted((ROOT / "tests/gpu").glob("test_*_gpu.py"))
GPU = [p for p in GPU if "agree(" in p.read_text("utf-8") and "launches" not in p.name]


def compiled(path: Path, folder: Path) -> int:
    """Return how many variants of kernels the tests of a file compile."""
    own = ["-c", "tests/gpu/pytest.ini"] if path.parent.name == "gpu" else []
    command = [sys.executable, "-m", "pytest", "-q", *own, "--rootdir", ".", "-p"]
    command += ["no:cacheprovider", "-p", "tests.support.compile_only", str(path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    found = re.search(r"compiled (\d+) variants", run.stdout)
    assert found, run.stdout[-2000:]
    return int(found.group(1))


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("path", [*OPS, *GPU], ids=lambda path: path.stem)
def test_calls_compile(path, tmp_path):
    assert compiled(path, tmp_path) > 0
