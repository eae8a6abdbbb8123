# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves: a killed trainer, a killed writer, a hung writer, a full disk."""

from __future__ import annotations

import os
import resource
import signal
import time

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import latest_checkpoint, read_extra
from megatron.core.dist_checkpointing.async_save import StagingBuffer, WriterProcess
from megatron.core.dist_checkpointing.run_folder import TRACKER_NAME
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.planted_faults import run_with, running_with
from tests.functional_tests.small_run import (
    digests,
    flags,
    losses,
    run_in_process,
    run_on,
    timeless,
)

LAYOUT = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EIGHT_ITERS = f"{LAYOUT} --train-iters 8 --save-interval 2 --eval-interval 0"


@pytest.fixture(scope="module")
def whole(prefix, tmp_path_factory):
    """The folder of an uninterrupted run with synchronous saves."""
    folder = tmp_path_factory.mktemp("whole")
    run_on(2, flags(prefix, f"{EIGHT_ITERS} --save {folder}"))
    return folder


def _on_write(number: int, callback) -> None:
    """Call `callback(process id)` before this rank's writer writes shard `number`, from 1."""
    call, count = WriterProcess.call, [0]

    def call_with_callback(self, command, **arguments):
        count[0] += command == "write"
        if command == "write" and count[0] == number:
            callback(self.pid)
        return call(self, command, **arguments)

    WriterProcess.call = call_with_callback


def plant_stopped_writer(rank: int) -> None:
    """Stop rank 1's writer in the second save, after rank 0 has written its shard."""
    if rank == 1:
        _on_write(2, lambda pid: os.kill(pid, signal.SIGSTOP))


@pytest.mark.covers("asynchronous save")
@pytest.mark.covers("bit-identical resume after SIGKILL")
def test_kill_during_async_save_loses_only_that_save(prefix, tmp_path, whole):
    save = tmp_path / "cut"
    argv = flags(prefix, f"{EIGHT_ITERS} --async-save --save {save} --load {save}")
    with running_with(plant_stopped_writer, argv) as ranks:
        # Iteration 5 computes while the shards of iteration 4 are being written.
        ranks.wait_for_line(1, "iteration        5/", timeout=60)
        shard = "iter_0000004.tmp-*/shard-00000.safetensors"
        deadline = time.monotonic() + 20.0
        while not list(save.glob(shard)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(save.glob(shard)), "the kill must come in the middle of a save"
        for rank in (0, 1):
            ranks.kill(rank, signal.SIGKILL)
        ranks.outcomes(timeout=20)
    assert (save / TRACKER_NAME).read_text().strip() == "2"
    assert latest_checkpoint(save) == save / "iter_0000002"
    run_on(2, argv)
    assert digests(save / "iter_0000008") == digests(whole / "iter_0000008")
    assert digests(save / "iter_0000004") == digests(whole / "iter_0000004")
    assert timeless(save / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
    assert list(save.glob("*.tmp-*")) == []


def plant_killed_writer(rank: int) -> None:
    if rank == 1:
        _on_write(2, lambda pid: os.kill(pid, signal.SIGKILL))


@pytest.mark.covers("asynchronous save")
def test_killed_writer_loses_one_checkpoint_but_no_step(prefix, tmp_path, whole):
    save = tmp_path / "save"
    outcomes, logs = run_with(
        plant_killed_writer, flags(prefix, f"{EIGHT_ITERS} --async-save --save {save}")
    )
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    (line,) = (line for line in logs[1].splitlines() if line.startswith("WARNING: "))
    assert "saving at iteration 4 failed (1 so far): rank 1: the writer process " in line
    assert "was ended by SIGKILL during 'write'; the next save is tried" in line
    assert not (save / "iter_0000004").exists()
    for iteration in (2, 6, 8):
        name = f"iter_{iteration:07d}"
        assert digests(save / name) == digests(whole / name), name
    events = [e for e in read_metrics(save / "metrics.jsonl") if e["kind"] == "save"]
    assert [e["iteration"] for e in events if "failed_saves" in e] == [4]
    assert sorted(e["iteration"] for e in events if "seconds" in e) == [2, 6]
    assert read_extra(save / "iter_0000008")["progress"]["failed_saves"] == 1
    assert losses(save / "metrics.jsonl") == losses(whole / "metrics.jsonl")
    assert list(save.glob("*.tmp-*")) == []


@pytest.mark.slow
def test_hung_writer_is_killed_and_training_continues(prefix, tmp_path, whole):
    save = tmp_path / "save"
    options = f"{EIGHT_ITERS} --async-save --save {save} --distributed-timeout-minutes 0.3"
    outcomes, logs = run_with(plant_stopped_writer, flags(prefix, options))
    assert [o.exit_code for o in outcomes] == [0, 0], logs
    text = "".join(logs)
    assert "the previous save is still in progress when iteration 6 is to be saved" in text
    assert "saving at iteration 4 failed (1 so far): rank 1: the writer process " in text
    assert "did not respond for 9 s in 'write' and was killed" in text
    assert digests(save / "iter_0000006") == digests(whole / "iter_0000006")
    assert digests(save / "iter_0000008") == digests(whole / "iter_0000008")


def plant_file_size_limit(rank: int) -> None:
    """Limit the file size of rank 0's writer from its second shard on."""
    if rank == 0:
        _on_write(2, lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, -1)))


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_full_disk_in_async_save_continues_or_stops_by_option(prefix, tmp_path, policy):
    options = (
        f"{EIGHT_ITERS} --train-iters 7 --async-save --save {tmp_path} --on-failed-save {policy}"
    )
    outcomes, logs = run_with(plant_file_size_limit, flags(prefix, options))
    text = "".join(logs)
    assert "saving at iteration 4 failed (1 so far): rank 0: cannot write" in text
    assert list(tmp_path.glob("*.tmp-*")) == []
    if policy == "stop":
        assert [o.exit_code for o in outcomes] == [ExitCode.SAVE_FAILED] * 2, logs
        assert "--on-failed-save stop ends the run" in text
        assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    else:
        assert [o.exit_code for o in outcomes] == [0, 0], logs
        assert "saving at iteration 6 failed (2 so far)" in text
        # The last save is synchronous: it is on disk when the run ends.
        assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000007"
        assert read_extra(tmp_path / "iter_0000007")["progress"]["failed_saves"] == 2


def test_run_stopped_by_bad_steps_finishes_its_async_save(prefix, tmp_path, monkeypatch):
    from megatron.core.models import GPTModel

    whole, count = GPTModel.loss, [0]

    def nan_from_the_third_step(self, *arguments, **named):
        loss, nll = whole(self, *arguments, **named)
        count[0] += 1
        return loss * (float("nan") if count[0] > 4 else 1.0), nll

    complete_copy = StagingBuffer.complete_copy
    monkeypatch.setattr(
        StagingBuffer, "complete_copy", lambda self: (time.sleep(1), complete_copy(self))
    )
    monkeypatch.setattr(GPTModel, "loss", nan_from_the_third_step)
    options = (
        "--global-batch-size 4 --max-consecutive-bad-steps 1 --save-interval 2 --eval-interval 0"
    )
    assert (
        run_in_process(flags(prefix, f"{options} --async-save --save {tmp_path}"))
        == ExitCode.BAD_STEPS
    )
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000002"
