# SPDX-License-Identifier: Apache-2.0
"""Killed launchers: the ranks save and stop, and the same command resumes the run."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint, verify_checkpoint
from tests.functional_tests.small_run import flags, launched_rank, run_on
from tests.functional_tests.torchrun_job import RanksOf, torchrun, wait_for_iteration
from tests.support.launchers import launched

LONG = "--train-iters 3000 --lr-decay-iters 40 --eval-interval 0"
LOST = int(ExitCode.LAUNCHER_LOST)


def _stopped_at(text: str) -> int:
    match = re.search(r"stopped at iteration (\d+) because the launcher is gone", text)
    assert match, text
    return int(match[1])


@pytest.mark.covers("graceful stop with a save")
def test_ranks_of_killed_torchrun_save_and_can_resume(prefix, tmp_path):
    save = tmp_path / "save"
    argv = flags(prefix, f"{LONG} --save {save} --load {save}")
    job = torchrun(argv, "--standalone", processes=2)
    wait_for_iteration(save / "metrics.jsonl", 3, job)
    ranks = RanksOf(job)
    assert len(ranks) >= 2
    job.kill()
    output, _ = job.communicate()  # ends when no rank holds its end of the pipe
    ranks.wait()
    iteration = _stopped_at(output)
    assert "Traceback" not in output
    # One rank reports for all; two may report if the store breaks between their claims.
    assert len({line for line in output.splitlines() if line.startswith("pretrain_gpt: ")}) == 1
    assert latest_checkpoint(save) == save / f"iter_{iteration:07d}"
    verify_checkpoint(latest_checkpoint(save))
    run_on(2, [*argv, "--exit-interval", str(iteration + 2)])
    assert latest_checkpoint(save) == save / f"iter_{iteration + 2:07d}"


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.covers("graceful stop with a save")
def test_all_nodes_stop_when_one_loses_its_launcher(prefix, tmp_path, node):
    """Node 0 serves the rendezvous store; the save completes without the store."""
    save = tmp_path / "save"
    argv = flags(prefix, f"{LONG} --tensor-model-parallel-size 2 --save {save}")
    with launched(launched_rank, argv, nodes=2, ranks=1) as job:
        job.wait_for_line(1, "iteration        3/")
        job.kill(node)
        assert job.codes(timeout=60) == [LOST, LOST], job.log(0) + job.log(1)
        iteration = _stopped_at(job.log(1))
        assert "Traceback" not in job.log(0) + job.log(1)
    verify_checkpoint(save / f"iter_{iteration:07d}")


@pytest.mark.slow
@pytest.mark.covers("graceful stop with a save")
def test_async_save_completes_after_launcher_loss(prefix, tmp_path):
    save = tmp_path / "save"
    argv = flags(prefix, f"{LONG} --async-save --save-interval 2 --save {save}")
    with launched(launched_rank, argv) as job:
        job.wait_for_line(1, "iteration        3/")
        job.kill(0)
        assert job.codes(timeout=60) == [LOST, LOST], job.log(0) + job.log(1)
        iteration = _stopped_at(job.log(1))
        assert "WARNING" not in job.log(1)
    verify_checkpoint(save / f"iter_{iteration:07d}")


def test_stopped_rank_does_not_block_orphaned_ranks(prefix, tmp_path):
    save = tmp_path / "save"
    argv = flags(prefix, f"{LONG} --save {save} --save-interval 2")
    with launched(launched_rank, argv) as job:
        job.wait_for_line(1, "iteration        3/")
        os.kill(job.pid(1), signal.SIGSTOP)
        job.kill(0)
        deadline = time.monotonic() + 60.0
        while (code := job.code(0)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert code in (LOST, ExitCode.PEER_LOST), job.log(0)
        assert re.search(r"rank 1 \(process \d+ on .*\) is stopped", job.log(0))
    verify_checkpoint(latest_checkpoint(save))


def test_ranks_waiting_to_start_end_with_their_launcher(prefix, tmp_path):
    """One of two nodes never starts."""
    argv = flags(prefix, f"{LONG} --save {tmp_path / 'save'}")
    with launched(_rank_of_incomplete_run, argv, ranks=1) as job:
        job.wait_for_line(0, "starting")
        time.sleep(0.5)
        job.kill(0)
        assert job.codes(timeout=30) == [LOST], job.log(0)
        assert "Traceback" not in job.log(0)


def _rank_of_incomplete_run(rank: int, world: int, port: int, argv: list[str]) -> None:
    print("starting", flush=True)
    launched_rank(rank, 2 * world, port, argv)
