# SPDX-License-Identifier: Apache-2.0
"""A job killed with SIGKILL and restarted equals an uninterrupted job bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import read_extra
from megatron.training.fault_tolerance.stopping import StopRequests
from megatron.training.train_steps import SessionSteps
from tests.functional_tests.small_run import (
    digests,
    flags,
    output_of,
    run_in_process,
    run_on,
    timeless,
    write_tokens,
)
from tests.functional_tests.torchrun_job import torchrun, wait_for_iteration

#: tp2 x dp2, everything sharded, bf16, dropout, two microbatches per step; the first epoch ends in
#: step 6.
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --overlap-grad-reduce "
    "--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather "
    "--bf16 --eval-interval 0 --train-iters 10 --save-interval 3 "
    "--log-params-norm --log-num-zeros-in-grad"
)


def _kill_group(job: subprocess.Popen) -> None:
    """Send SIGKILL to the launcher and every rank; torchrun starts each rank in a new session."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    for pid in [job.pid, *map(int, children)]:
        # A rank that lost a peer or its store to the first kills may have exited already.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    job.communicate()


@pytest.mark.timeout(300)
@pytest.mark.covers("bit-identical resume after SIGKILL")
def test_killed_and_resumed_run_equals_uninterrupted_run(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_on(4, flags(prefix, f"{LAYOUT} --save {whole}"))

    argv = flags(prefix, f"{LAYOUT} --save {cut} --load {cut}")
    # The job pauses in step 6: on a busy machine it could end before the kill.
    job = torchrun(argv, "--standalone", processes=4, module="tests.functional_tests.paused_run")
    wait_for_iteration(cut / "metrics.jsonl", 5, job)
    _kill_group(job)
    assert (cut / "iter_0000003").is_dir()
    assert not (cut / "iter_0000010").exists(), "the kill came too late to prove anything"

    assert "resuming at iteration" in output_of(4, argv)
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
    "options",
    [
        "--fp16 --initial-loss-scale 4e6 --loss-scale-window 2 --dataloader-type cyclic",
        "--optimizer sgd --calculate-per-token-loss --start-weight-decay 0 --end-weight-decay 0.1 "
        "--weight-decay-incr-style cosine --eval-interval 2",
    ],
)
@pytest.mark.covers("bit-identical resume")
@pytest.mark.gpus(1)
def test_all_training_state_survives_a_checkpoint(tmp_path, options):
    """Save within a log window, with all kinds of state, on one process."""
    prefix = write_tokens(tmp_path / "tokens")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    common = f"--train-iters 8 --save-interval 3 --log-interval 4 --eval-interval 0 {options}"
    run_on(1, flags(prefix, f"{common} --save {whole}"))
    run_on(1, flags(prefix, f"{common} --save {cut} --exit-interval 3"))
    assert not (cut / "iter_0000006").exists()
    run_on(1, flags(prefix, f"{common} --save {cut} --load {cut}"))
    assert digests(cut / "iter_0000008") == digests(whole / "iter_0000008")
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
    whole_extra, cut_extra = (read_extra(folder / "iter_0000008") for folder in (whole, cut))
    for section in ("progress", "optimizer", "window", "data", "model"):
        assert whole_extra[section] == cut_extra[section], section


def test_pending_validation_is_logged_once_after_restart(tmp_path, monkeypatch):
    """A signal leaves a due validation to the next start, which crashes after the validation and
    before a save."""
    prefix = write_tokens(tmp_path / "tokens")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    common = "--train-iters 6 --save-interval 6 --eval-interval 3 --eval-iters 1"
    run_on(1, flags(prefix, f"{common} --save {whole}"))
    argv = flags(prefix, f"{common} --save {cut} --load {cut}")
    with monkeypatch.context() as patch:
        stop_reasons = iter([None, None, "a signal asks"])
        patch.setattr(StopRequests, "reason", staticmethod(lambda sums: next(stop_reasons)))
        run_on(1, argv)
    assert read_extra(cut / "iter_0000003")["progress"]["validation_pending"] == 1
    assert [e["iteration"] for e in timeless(cut / "metrics.jsonl")][-1] == 3
    with monkeypatch.context() as patch:

        def failing_step(*args, **kwargs):
            raise KeyError("in step 4")

        patch.setattr(SessionSteps, "take_step", failing_step)
        assert run_in_process(argv) == ExitCode.CRASH
    assert timeless(cut / "metrics.jsonl")[-1]["kind"] == "validation"
    run_on(1, argv)
    assert timeless(cut / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
