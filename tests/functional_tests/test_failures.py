# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop, fail or compute NaN: the others end in time, name them, and lose
nothing."""

from __future__ import annotations

import signal
import time

import pytest
import torch.distributed as dist

from megatron.core.dist_checkpointing import latest_checkpoint, verify_checkpoint
from megatron.training import pretraining
from megatron.training.exit_codes import ExitCode
from megatron.training.metrics import read_metrics
from tests.functional_tests import small_run
from tests.functional_tests.small_run import flags, run_here, running, write_tokens
from tests.support.ranks import start_ranks


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


LONG = "--eval-interval 0 --train-iters 100000 --lr-decay-iters 100000 --save-interval 2"


@pytest.mark.parametrize(
    ("number", "minutes", "limit", "state"),
    [(signal.SIGKILL, 10.0, 20.0, "is dead"), (signal.SIGSTOP, 0.05, 25.0, "is stopped")],
)
def test_the_others_name_the_rank_that_is_gone(prefix, tmp_path, number, minutes, limit, state):
    more = f"{LONG} --save {tmp_path / 'save'} --distributed-timeout-minutes {minutes}"
    with running(2, flags(prefix, more)) as ranks:
        ranks.wait_for_line(1, "iteration        3/", timeout=60)
        pid = ranks.processes[0].pid
        ranks.kill(0, number)
        start = time.monotonic()
        while ranks.processes[1].is_alive() and "rank 0" not in ranks.log(1):
            assert time.monotonic() - start < limit, ranks.log(1)
            time.sleep(0.05)
        if number == signal.SIGSTOP:
            ranks.kill(0, signal.SIGKILL)
        found = ranks.outcomes(timeout=limit)
        text = ranks.log(1)
    assert found[1].exit_code == ExitCode.PEER_LOST, text
    assert f"rank 0 (process {pid} on " in text
    assert state in text
    assert "Traceback" not in text
    verify_checkpoint(latest_checkpoint(tmp_path / "save"))


def _rank_with_fault(rank: int, world: int, port: int, argv: list[str], fault: str):
    """Run as `small_run` does, with a fault on rank 1 in its sixth microbatch."""
    count = [0]
    whole = pretraining.microbatch

    def faulty(batch, device):
        made = whole(batch, device)
        count[0] += 1
        if rank == 1 and count[0] == 6:
            if fault == "raise":
                raise ValueError("the sixth microbatch is bad:\n mend it")
            made.loss_mask.mul_(float("nan"))
        return made

    pretraining.microbatch = faulty
    small_run.rank_process(rank, world, port, argv)


def _run_with_fault(fault: str, argv: list[str]):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with start_ranks(_rank_with_fault, 2, server.port, argv, fault, init=False) as ranks:
        found = ranks.outcomes(timeout=60)
        return found, [ranks.log(rank) for rank in range(2)]


def test_an_error_on_one_rank_is_told_once_by_that_rank(prefix):
    found, logs = _run_with_fault("raise", flags(prefix, LONG.replace("--save-interval 2", "")))
    assert [o.exit_code for o in found] == [ExitCode.PEER_LOST, ExitCode.USER_ERROR], logs
    said = [line for log in logs for line in log.splitlines() if "sixth microbatch" in line]
    assert said == ["pretrain_gpt: error: the sixth microbatch is bad: mend it"]
    assert "Traceback" not in "".join(logs)
    assert abs(found[0].at - found[1].at) < 10.0


def test_nan_on_one_rank_is_skipped_on_all_alike(prefix, tmp_path):
    more = (
        f"--eval-interval 0 --train-iters 6 --save {tmp_path / 'save'} --use-distributed-optimizer"
    )
    found, logs = _run_with_fault("nan", flags(prefix, more))
    assert [o.exit_code for o in found] == [0, 0], logs
    events = [e for e in read_metrics(tmp_path / "save" / "metrics.jsonl") if e["kind"] == "train"]
    # Two microbatches a step: the sixth one is in step 3.
    assert [e["num_skipped"] for e in events] == [0, 0, 1, 0, 0, 0]
    assert [e["num_nan"] for e in events] == [0, 0, 1, 0, 0, 0]
    assert "lm_loss" not in events[2]
    rates = [e["learning_rate"] for e in events]
    assert rates[3] == rates[2], "a skipped step does not move the schedule"
    assert events[-1]["consumed_samples"] == 48
    verify_checkpoint(latest_checkpoint(tmp_path / "save"))


def test_nothing_but_nan_stops_the_run_and_keeps_the_last_good_checkpoint(prefix, tmp_path, capsys):
    save = tmp_path / "save"
    more = "--eval-interval 0 --save-interval 1 --lr 1e30 --clip-grad 0 --lr-warmup-iters 2"
    code = run_here(flags(prefix, f"{more} --max-consecutive-bad-steps 3 --save {save}"))
    printed = capsys.readouterr()
    assert code == ExitCode.BAD_STEPS, printed
    assert "3 steps in a row had a NaN or Inf loss or gradient norm" in printed.err
    assert printed.err.count("\n") == 1
    assert "number of skipped iterations:   1 |" in printed.out
    verify_checkpoint(latest_checkpoint(save))
