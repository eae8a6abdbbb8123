# SPDX-License-Identifier: Apache-2.0
"""Ranks killed with SIGKILL in any step or at any moment of a save lose only unsaved steps."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import latest_checkpoint
from megatron.core.dist_checkpointing.shard_format import ShardWriter
from megatron.training import save_hooks, train_steps
from tests.functional_tests.planted_faults import run_with, running_with
from tests.functional_tests.small_run import digests, flags, run_on, running, timeless

STEPS = 6
SIX_STEPS = (
    "--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather --bf16 "
    f"--train-iters {STEPS} --save-interval 2 --eval-interval 0"
)
#: Length of the pauses within a save.
PAUSE_SECONDS = 0.002


@pytest.fixture(scope="module")
def whole(prefix, tmp_path_factory):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    run_on(2, flags(prefix, f"{SIX_STEPS} --save {folder}"))
    return folder


def plant_kill(step: int, rank: int) -> None:
    """Kill rank `step % 2` between the two microbatches of a step."""
    if rank != step % 2:
        return
    whole_microbatch, count = train_steps.microbatch, [0]

    def killing(*args, **options):
        count[0] += 1
        if count[0] == 2 * step:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole_microbatch(*args, **options)

    train_steps.microbatch = killing


def resume(argv: list[str], save: Path, whole: Path) -> str:
    """Resume without a fault, compare the final checkpoint and metrics with the whole run's, and
    return the logs."""
    with running(2, argv) as ranks:
        outcomes = ranks.outcomes(timeout=100)
        text = ranks.log(0) + ranks.log(1)
    assert [o.exit_code for o in outcomes] == [0, 0], text
    final_name = f"iter_{STEPS:07d}"
    assert digests(save / final_name) == digests(whole / final_name)
    assert timeless(save / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
    assert not list(save.glob("*.tmp-*"))
    return text


@pytest.mark.covers("bit-identical resume after SIGKILL")
@pytest.mark.parametrize(
    "step",
    [step if step == 2 else pytest.param(step, marks=pytest.mark.slow) for step in range(1, 7)],
)
def test_rank_killed_in_any_step_loses_only_unsaved_steps(prefix, tmp_path, whole, step):
    save = tmp_path / "cut"
    argv = flags(prefix, f"{SIX_STEPS} --save {save} --load {save}")
    outcomes, logs = run_with(partial(plant_kill, step), argv)
    assert outcomes[step % 2].exit_code == -signal.SIGKILL, logs
    good = (step - 1) // 2 * 2
    expected = save / f"iter_{good:07d}" if good else None
    assert latest_checkpoint(save, digests=True) == expected
    resume(argv, save, whole)


class Pauses:
    """Adds equal pauses to a rank's saves, counts the pauses, and kills the rank in a pause.

    The pauses take most of a save's time, so a uniform pause is a uniform moment of the save.

    Args:
        moment: when to kill in the second save, as a fraction of the first save's pauses.
    """

    def __init__(self, moment: float) -> None:
        self.moment, self.save = moment, 0
        self.counts = [0, 0]
        self.inside = False

    def pause(self, where: str) -> None:
        """Pause, or kill this process."""
        if not self.inside or self.save > 2:
            return
        self.counts[self.save - 1] += 1
        if self.save == 2 and self.counts[1] > self.moment * self.counts[0]:
            print(f"killed in pause {self.counts[1]} of {self.counts[0]}, {where}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)


def plant_kill_in_save(moment: float, rank: int) -> None:
    if rank:
        return
    pauses = Pauses(moment)
    whole_save, whole_write = save_hooks.save_checkpoint, ShardWriter.write

    def save(*args, **options):
        pauses.save, pauses.inside = pauses.save + 1, True
        try:
            return whole_save(*args, **options)
        finally:
            pauses.inside = False

    def write(self, content):
        for half in (content[: len(content) // 2], content[len(content) // 2 :]):
            pauses.pause("while it writes a shard")
            whole_write(self, half)

    save_hooks.save_checkpoint, ShardWriter.write = save, write
    for function in (os.fsync, os.rename, os.replace, os.mkdir):

        def paused(*args, function=function, **options):
            pauses.pause(f"before {function.__name__}")
            value = function(*args, **options)
            pauses.pause(f"after {function.__name__}")
            return value

        setattr(os, function.__name__, paused)


def moments() -> list[object]:
    """Return twenty moments, uniform in each twentieth; two are fast tests."""
    rng = random.Random(8)
    moments_of_save = [(i + rng.random()) / 20 for i in range(20)]
    fast = (3, 19)
    return [
        pytest.param(moment, marks=() if i in fast else pytest.mark.slow, id=f"{moment:.3f}")
        for i, moment in enumerate(moments_of_save)
    ]


@pytest.mark.covers("bit-identical resume after SIGKILL")
@pytest.mark.parametrize("moment", moments())
def test_kill_at_any_moment_of_a_save_loses_only_that_save(prefix, tmp_path, whole, moment):
    save = tmp_path / "cut"
    argv = flags(prefix, f"{SIX_STEPS} --save {save} --load {save}")
    with running_with(partial(plant_kill_in_save, moment), argv) as ranks:
        ranks.processes[0].join(60)
        ranks.kill(1)  # as a launcher does once a rank has died
        outcomes, log = ranks.outcomes(timeout=20), ranks.log(0)
    assert outcomes[0].exit_code == -signal.SIGKILL, log
    assert "killed in pause" in log, "the kill must be within the second save"
    assert (save / "iter_0000002").is_dir()
    unfinished = [path.name for path in save.glob("*.tmp-*")]
    renamed = (save / "iter_0000004").is_dir()
    assert latest_checkpoint(save, digests=True) == save / f"iter_{4 if renamed else 2:07d}"
    has_partial_folder = any(name.startswith("iter_0000004.tmp-") for name in unfinished)
    if "mkdir" not in log:  # the other rank may have made the folder, or not yet
        assert has_partial_folder != renamed, "a partial folder, unless the kill is outside"
    text = resume(argv, save, whole)
    removal_lines = [line for line in text.splitlines() if "removed unfinished files" in line]
    assert len(removal_lines) == bool(unfinished)
    assert all(name in removal_lines[0] for name in unfinished)
    assert f"loaded {save}/iter_{4 if renamed else 2:07d}; resuming" in text
