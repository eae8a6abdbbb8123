# SPDX-License-Identifier: Apache-2.0
"""Training continues after stdout breaks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from megatron.core.dist_checkpointing import latest_checkpoint, verify_checkpoint
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import flags, write_tokens


def _run(module: str, argv: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a shell that redirects its output and returns its exit code."""
    command = f'"$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", command, "-", sys.executable, "-m", module, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirection", "number"),
    [
        ("2>&1 | head -1; exit ${PIPESTATUS[0]}", errno.EPIPE),
        pytest.param("| head -1; exit ${PIPESTATUS[0]}", errno.EPIPE, marks=pytest.mark.slow),
        pytest.param("> /dev/full", errno.ENOSPC, marks=pytest.mark.slow),
        pytest.param(">&-", errno.EBADF, marks=pytest.mark.slow),
        pytest.param(">&- 2>&-", errno.EBADF, marks=pytest.mark.slow),
    ],
)
def test_training_continues_without_stdout(tmp_path, redirection, number):
    save = tmp_path / "save"
    argv = flags(write_tokens(tmp_path / "tokens"), f"--train-iters 8 --save {save}")
    process = _run("megatron.training.pretrain_gpt", argv, redirection)
    assert process.returncode == 0, process
    assert latest_checkpoint(save) == save / "iter_0000008"
    verify_checkpoint(latest_checkpoint(save))
    events = read_metrics(save / "metrics.jsonl")
    (event,) = [e for e in events if e["kind"] == "output" and "stdout_errno" in e]
    assert event["stdout_errno"] == number
    assert [e["iteration"] for e in events if e["kind"] == "train"] == list(range(1, 9))
    assert "Traceback" not in process.stderr
    if "2>" not in redirection:
        (line,) = [line for line in process.stderr.splitlines() if "stdout" in line]
        assert line.startswith("pretrain_gpt: ")
