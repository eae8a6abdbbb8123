# SPDX-License-Identifier: Apache-2.0
"""What `make gpu` runs: the tests marked gpu, then the training benchmark, in this very Python.

python -m tools.gpu [--tests] [--bench] [--output DIR]     neither flag: both

No virtual environment and no network: torch, triton, numpy, safetensors, tokenizers, pytest and
transformers are all that is needed. Without a GPU it says so and ends well.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/gpu"


def missing_gpu() -> str | None:
    """Return why nothing can run here, or None."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return None


def environment() -> dict[str, str]:
    """Return the environment in which this checkout's packages are found."""
    places = [str(ROOT), str(ROOT / "megatron_core"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in places if p)}


def test_command(*more: str) -> list[str]:
    """Return the command that runs the tests: by settings of their own, which need no plugin."""
    settings = ["-c", f"{TESTS}/pytest.ini", "--rootdir", ".", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *settings, "-m", "gpu", TESTS, *more]


def main() -> int:
    """Run what was asked for and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", action="store_true", help="the tests only")
    parser.add_argument("--bench", action="store_true", help="the benchmark only")
    parser.add_argument("--output", default="bench_results", help="folder for the report")
    options = parser.parse_args()
    reason = missing_gpu()
    if reason is not None:
        print(f"gpu: {reason}: nothing to run here")
        return 0
    both = options.tests == options.bench
    codes = []
    if options.tests or both:
        codes.append(subprocess.run(test_command("-q"), cwd=ROOT, env=environment()).returncode)
    if options.bench or both:
        bench = ["-m", "tools.bench.gpu_train", "--output", options.output]
        codes.append(
            subprocess.run([sys.executable, *bench], cwd=ROOT, env=environment()).returncode
        )
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
