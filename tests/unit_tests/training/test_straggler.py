# SPDX-License-Identifier: Apache-2.0
"""Compute time of ranks without waiting, and the stragglers that are named."""

from __future__ import annotations

import time

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import all_reduce
from megatron.training.failure_hooks import WaitClock, slow_ranks, straggler_text
from tests.support.ranks import run_ranks


def _measure_compute(rank: int, world: int) -> tuple[float, float, float]:
    """Run two steps in which rank 1 sleeps and rank 0 waits for rank 1."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    clock = WaitClock(torch.device("cpu"))
    groups.observers.append(clock)
    all_reduce(torch.ones(3), groups["world"])  # outside of a step: does not count
    if rank == 1:
        time.sleep(0.5)
    all_reduce(torch.ones(3), groups["world"])
    start = time.perf_counter()
    for _ in range(2):
        clock.begin_step()
        if rank == 1:
            time.sleep(0.5)
        all_reduce(torch.ones(3), groups["world"])
        clock.end_step()
    step_seconds = (time.perf_counter() - start) / 2
    return clock.compute_seconds(), step_seconds, clock.compute_seconds()


def test_waiting_in_collectives_is_not_compute_time():
    (fast, fast_took, after), (slow, slow_took, _) = run_ranks(_measure_compute, 2)
    assert min(fast_took, slow_took) > 0.49, "steps take equally long"
    assert slow > 0.49
    assert fast < 0.4  # 0.001 where no other process takes its core
    assert after == 0.0, "compute time counts only once"


@pytest.mark.parametrize(
    ("seconds", "factor", "ranks"),
    [
        ([1.0, 1.0, 1.1, 1.0], 1.5, []),
        ([1.0, 3.0, 1.0, 1.0], 1.5, [1]),
        ([1.0, 3.0], 1.5, [1]),
        ([3.0, 1.0], 1.5, [0]),
        ([1.0, 2.0, 4.0, 1.0, 1.0], 1.5, [2, 1]),
        ([1.0, 3.0], 4.0, []),
        ([0.0, 0.0], 1.5, []),
    ],
)
def test_ranks_above_the_straggler_factor_are_named(seconds, factor, ranks):
    medians = slow_ranks(seconds, factor, [range(len(seconds))])
    assert list(medians) == ranks
    if not ranks:
        return
    text = straggler_text(seconds, medians, lambda rank: f"host{rank}", has_stages=False)
    entries = text.removeprefix("straggler: ").split(", rank ")
    assert [int(entry.removeprefix("rank ").split()[0]) for entry in entries] == ranks
    assert f"rank {ranks[0]} on host{ranks[0]} computes {max(seconds):.1f} times as long" in text


def test_rank_is_compared_within_its_pipeline_stage():
    seconds, stages = [1.0, 1.1, 3.0, 5.0], [[0, 1], [2, 3]]
    text = straggler_text(seconds, slow_ranks(seconds, 1.5, stages), str, has_stages=True)
    assert text == (
        "straggler: rank 3 on 3 computes 1.7 times as long as the median of its stage (5000.0 ms a "
        "step, median 3000.0 ms)"
    )
    assert not slow_ranks(seconds, 2.0, stages)
    assert 2 in slow_ranks(seconds, 2.0, [range(4)]), (
        "without stages, it is compared with all ranks"
    )
