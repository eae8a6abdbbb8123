# SPDX-License-Identifier: Apache-2.0
"""Ranks killed with SIGKILL in any step and at any moment of a save: nothing but time is lost."""

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
from megatron.training import saves, session
from tests.functional_tests.planted_faults import run_with, running_with
from tests.functional_tests.small_run import digests, flags, run_on, running, timeless, write_tokens

STEPS = 6
SIX = f"--use-distributed-optimizer --train-iters {STEPS} --save-interval 2 --eval-interval 0"
#: Of the pauses that a save is cut into.
PAUSE_SECONDS = 0.002


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def whole(prefix, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    run_on(2, flags(prefix, f"{SIX} --save {folder}"))
    return folder


def plant_kill(step: int, rank: int) -> None:
    """Kill a rank between the two microbatches of a step: each step another rank."""
    if rank != step % 2:
        return
    whole_microbatch, count = session.microbatch, [0]

    def killing(*arguments, **options):
        count[0] += 1
        if count[0] == 2 * step:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole_microbatch(*arguments, **options)

    session.microbatch = killing


def go_on(argv: list[str], save: Path, whole: Path) -> str:
    """Start again without a fault, compare the end with that of the whole run and return what the
    ranks printed."""
    with running(2, argv) as ranks:
        found = ranks.outcomes(timeout=100)
        text = ranks.log(0) + ranks.log(1)
    assert [o.exit_code for o in found] == [0, 0], text
    last = f"iter_{STEPS:07d}"
    assert digests(save / last) == digests(whole / last)
    assert timeless(save / "metrics.jsonl") == timeless(whole / "metrics.jsonl")
    assert not list(save.glob("*.tmp-*"))
    return text


@pytest.mark.covers("killed and resumed to the same bits", runs="loads ranks")
@pytest.mark.parametrize(
    "step",
    [step if step == 2 else pytest.param(step, marks=pytest.mark.slow) for step in range(1, 7)],
)
def test_a_rank_killed_in_any_step_costs_what_was_not_saved(prefix, tmp_path, whole, step):
    save = tmp_path / "cut"
    argv = flags(prefix, f"{SIX} --save {save} --load {save}")
    found, logs = run_with(partial(plant_kill, step), argv)
    assert found[step % 2].exit_code == -signal.SIGKILL, logs
    good = (step - 1) // 2 * 2
    expected = save / f"iter_{good:07d}" if good else None
    assert latest_checkpoint(save, digests=True) == expected
    go_on(argv, save, whole)


class Pauses:
    """Cuts a rank's saves by pauses of one length, counts them, and kills the rank in one of them.

    The pauses are most of a save's time, so a pause chosen evenly is a moment chosen evenly.

    Args:
        moment: of the second save when to kill, in parts of the first one's time.
    """

    def __init__(self, moment: float) -> None:
        self.moment, self.save = moment, 0
        self.counts = [0, 0]
        self.inside = False

    def pause(self, where: str) -> None:
        """Wait a moment, or to be killed."""
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
    whole_save, whole_write = saves.save_checkpoint, ShardWriter.write

    def save(*arguments, **options):
        pauses.save, pauses.inside = pauses.save + 1, True
        try:
            return whole_save(*arguments, **options)
        finally:
            pauses.inside = False

    def write(self, data):
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            pauses.pause("while it writes a shard")
            whole_write(self, part)

    saves.save_checkpoint, ShardWriter.write = save, write
    for function in (os.fsync, os.rename, os.replace, os.mkdir):

        def around(*arguments, function=function, **options):
            pauses.pause(f"before {function.__name__}")
            found = function(*arguments, **options)
            pauses.pause(f"after {function.__name__}")
            return found

        setattr(os, function.__name__, around)


def moments() -> list[object]:
    """Return twenty moments, each chosen evenly from its twentieth; two are fast tests."""
    chosen = random.Random(8)
    found = [(i + chosen.random()) / 20 for i in range(20)]
    fast = (3, 19)
    return [
        pytest.param(moment, marks=() if i in fast else pytest.mark.slow, id=f"{moment:.3f}")
        for i, moment in enumerate(found)
    ]


@pytest.mark.covers("killed and resumed to the same bits", runs="loads ranks")
@pytest.mark.parametrize("moment", moments())
def test_a_kill_at_any_moment_of_a_save_loses_that_save_alone(prefix, tmp_path, whole, moment):
    save = tmp_path / "cut"
    argv = flags(prefix, f"{SIX} --save {save} --load {save}")
    with running_with(partial(plant_kill_in_save, moment), argv) as ranks:
        ranks.processes[0].join(60)
        ranks.kill(1)  # as a launcher does once a rank has died
        found, log = ranks.outcomes(timeout=20), ranks.log(0)
    assert found[0].exit_code == -signal.SIGKILL, log
    assert "killed in pause" in log, "the kill was inside the second save"
    assert (save / "iter_0000002").is_dir()
    left = [path.name for path in save.glob("*.tmp-*")]
    renamed = (save / "iter_0000004").is_dir()
    assert latest_checkpoint(save, digests=True) == save / f"iter_{4 if renamed else 2:07d}"
    made = any(name.startswith("iter_0000004.tmp-") for name in left)
    if "mkdir" not in log:  # the other rank may have made the folder, or not yet
        assert made != renamed, "a partial folder, unless the kill is outside"
    text = go_on(argv, save, whole)
    swept = [line for line in text.splitlines() if "removed unfinished files" in line]
    assert len(swept) == bool(left)
    assert all(name in swept[0] for name in left)
    assert f"loaded {save}/iter_{4 if renamed else 2:07d}; resuming" in text
