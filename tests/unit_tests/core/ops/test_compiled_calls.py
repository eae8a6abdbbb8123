# SPDX-License-Identifier: Apache-2.0
"""Every kernel call of the test modules of ops also compiles."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[4]
OPS = sorted(Path(__file__).parent.glob("interpreted_*.py"))
#: The test modules of ops; other GPU tests need real outputs.
GPU = [path for path in sorted((ROOT / "tests/gpu").glob("test_*.py")) if "_gpu" not in path.name]


def num_compiled_variants(path: Path, folder: Path) -> int:
    """Return how many kernel variants the tests of a file compile."""
    options = ["-c", "tests/gpu/pytest.ini", "-m", "gpu"] if path.parent.name == "gpu" else []
    command = [sys.executable, "-m", "pytest", "-q", *options, "--rootdir", ".", "-p"]
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
    match = re.search(r"compiled (\d+) variants", run.stdout)
    assert match, run.stdout[-2000:]
    return int(match.group(1))


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("path", [*OPS, *GPU], ids=lambda path: path.stem)
def test_every_kernel_call_compiles(path, tmp_path):
    assert num_compiled_variants(path, tmp_path) > 0
