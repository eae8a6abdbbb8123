# SPDX-License-Identifier: Apache-2.0
"""A job killed with SIGKILL and started again ends with the bits of one that was never
interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import read_extra
from megatron.training.metrics import read_metrics
from tests.functional_tests.small_run import digests, flags, run_on, timeless, write_tokens

#: tp2 x dp2, bf16, dropout, two microbatches per step; the first epoch ends in step 6.
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
    "--overlap-grad-reduce --bf16 --eval-interval 0 --train-iters 10 --save-interval 3 "
    "--log-params-norm --log-num-zeros-in-grad"
)


def _torchrun(argv: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "-m", "megatron.training.pretrain_gpt", *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _wait_for_iteration(metrics: Path, iteration: int, job: subprocess.Popen) -> None:
    deadline = time.monotonic() + 100
    while not metrics.exists() or iteration not in [e["iteration"] for e in read_metrics(metrics)]:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline, "the job never came so far"
        time.sleep(0.01)


def _kill_group(job: subprocess.Popen) -> None:
    """Send SIGKILL to the launcher and every rank; torchrun's ranks have sessions of their own."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for pid in [job.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    job.communicate()


@pytest.mark.timeout(300)
def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_on(4, flags(prefix, f"{LAYOUT} --save {whole}"))

    argv = flags(prefix, f"{LAYOUT} --save {cut} --load {cut}")
    job = _torchrun(argv)
    _wait_for_iteration(cut / "metrics.jsonl", 5, job)
    _kill_group(job)
    assert (cut / "iter_0000003").is_dir()
    assert not (cut / "iter_0000010").exists(), "the kill came too late to prove anything"

    job = _torchrun(argv)
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    assert "going on at iteration" in output
    expected = digests(whole / "iter_0000010")
    assert len(expected) > 60
    assert {name.split("/")[0] for name in expected if name.startswith("optimizer.")} == {
        "optimizer.master",
        "optimizer.exp_avg",
        "optimizer.exp_avg_sq",
    }
    assert digests(cut / "iter_0000010") == expected
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")


@pytest.mark.parametrize(
    "more",
    [
        "--fp16 --initial-loss-scale 4e6 --loss-scale-window 2 --dataloader-type cyclic",
        "--optimizer sgd --calculate-per-token-loss --start-weight-decay 0 --end-weight-decay 0.1 "
        "--weight-decay-incr-style cosine --eval-interval 2",
    ],
)
def test_every_state_goes_through_a_checkpoint(tmp_path, more):
    """Save in the middle of a log window and of everything that has a state; one process."""
    prefix = write_tokens(tmp_path / "tokens")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    common = f"--train-iters 8 --save-interval 3 --log-interval 4 --eval-interval 0 {more}"
    run_on(1, flags(prefix, f"{common} --save {whole}"))
    run_on(1, flags(prefix, f"{common} --save {cut} --exit-interval 3"))
    assert not (cut / "iter_0000006").exists()
    run_on(1, flags(prefix, f"{common} --save {cut} --load {cut}"))
    assert digests(cut / "iter_0000008") == digests(whole / "iter_0000008")
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
    first, second = (read_extra(folder / "iter_0000008") for folder in (whole, cut))
    for part in ("progress", "optimizer", "window", "data", "model"):
        assert first[part] == second[part], part
