# SPDX-License-Identifier: Apache-2.0
"""Launchers that are killed: their ranks save and stop, and the same command goes on."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint, verify_checkpoint
from tests.functional_tests.small_run import flags, launched_rank, run_on, write_tokens
from tests.functional_tests.torchrun_job import RanksOf, torchrun, wait_for_iteration
from tests.support.launchers import launched

LONG = "--train-iters 3000 --lr-decay-iters 40 --eval-interval 0"
LOST = int(ExitCode.LAUNCHER_LOST)


@pytest.fixture
def prefix(tmp_path):
    return write_tokens(tmp_path / "tokens")


def _stopped_at(text: str) -> int:
    found = re.search(r"stopped at iteration (\d+) as the launcher is gone", text)
    assert found, text
    return int(found[1])


@pytest.mark.covers("stopped with a save", runs="saves")
def test_killed_torchrun_ranks_save_and_the_command_goes_on(prefix, tmp_path):
    save = tmp_path / "save"
    argv = flags(prefix, f"{LONG} --save {save} --load {save}")
    job = torchrun(argv, "--standalone", processes=2)
    wait_for_iteration(save / "metrics.jsonl", 3, job)
    ranks = RanksOf(job)
    assert len(ranks) >= 2
    job.kill()
    output, _ = job.communicate()  # ends when no rank holds its end of the pipe
    ranks.wait()
    at = _stopped_at(output)
    assert "Traceback" not in output
    # One rank speaks for all; two may where the store breaks between their claims.
    assert len({line for line in output.splitlines() if line.startswith("pretrain_gpt: ")}) == 1
    assert latest_checkpoint(save) == save / f"iter_{at:07d}"
    verify_checkpoint(latest_checkpoint(save))
    run_on(2, [*argv, "--exit-interval", str(at + 2)])
    assert latest_checkpoint(save) == save / f"iter_{at + 2:07d}"


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.covers("stopped with a save", runs="saves")
def test_ranks_of_all_machines_stop_when_one_loses_its_launcher(prefix, tmp_path, node):
    """The first one serves the store of the start; the save goes on without it."""
    save = tmp_path / "save"
    argv = flags(prefix, f"{LONG} --tensor-model-parallel-size 2 --save {save}")
    with launched(launched_rank, argv, nodes=2, ranks=1) as job:
        job.wait_for_line(1, "iteration        3/")
        job.kill(node)
        assert job.codes(timeout=60) == [LOST, LOST], job.log(0) + job.log(1)
        at = _stopped_at(job.log(1))
        assert "Traceback" not in job.log(0) + job.log(1)
    verify_checkpoint(save / f"iter_{at:07d}")


@pytest.mark.covers("stopped with a save", runs="saves")
def test_background_saves_go_on_without_a_launcher(prefix, tmp_path):
    save = tmp_path / "save"
    argv = flags(prefix, f"{LONG} --async-save --save-interval 2 --save {save}")
    with launched(launched_rank, argv) as job:
        job.wait_for_line(1, "iteration        3/")
        job.kill(0)
        assert job.codes(timeout=60) == [LOST, LOST], job.log(0) + job.log(1)
        at = _stopped_at(job.log(1))
        assert "WARNING" not in job.log(1)
    verify_checkpoint(save / f"iter_{at:07d}")


def test_a_stopped_rank_does_not_hold_those_without_a_launcher(prefix, tmp_path):
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


def test_ranks_that_wait_for_others_end_with_their_launcher(prefix, tmp_path):
    """Of two machines, one never comes."""
    argv = flags(prefix, f"{LONG} --save {tmp_path / 'save'}")
    with launched(_half_of_a_run, argv, ranks=1) as job:
        job.wait_for_line(0, "starting")
        time.sleep(0.5)
        job.kill(0)
        assert job.codes(timeout=30) == [LOST], job.log(0)
        assert "Traceback" not in job.log(0)


def _half_of_a_run(rank: int, world: int, port: int, argv: list[str]) -> None:
    print("starting", flush=True)
    launched_rank(rank, 2 * world, port, argv)
