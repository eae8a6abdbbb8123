# SPDX-License-Identifier: Apache-2.0
"""The printed losses of a small deterministic run equal the recorded text.

The instruction set is pinned: sums in wider registers round differently. A commit that
changes the text must state the cause; `python -m tests.functional_tests.test_golden_loss` rewrites
the text.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.functional_tests.small_run import flags, write_tokens

GOLDEN = Path(__file__).with_name("golden_loss.txt")
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def golden_lines(folder: Path) -> str:
    """Run and return the log without times."""
    prefix = write_tokens(folder / "tokens")
    argv = flags(prefix, "--deterministic-mode --train-iters 8 --eval-interval 4")
    process = subprocess.run(
        [sys.executable, "-m", "megatron.training.pretrain_gpt", *argv],
        env={**os.environ, **PINNED},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    loss_lines = [line for line in process.stdout.splitlines() if "lm loss" in line]
    measured = r"\[.*?\] |elapsed time .*?\| | tokens per second:.*"
    timeless = [re.sub(measured, "", line).strip() for line in loss_lines]
    return "\n".join(timeless) + "\n"


def test_losses_match_the_golden_text(tmp_path):
    assert golden_lines(tmp_path) == GOLDEN.read_text(encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(golden_lines(Path(folder)), encoding="utf-8")
