# SPDX-License-Identifier: Apache-2.0
"""A step planned by advancing the previous step equals the step planned from the rows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict

import pytest

from megatron.core.inference.cache import CacheSizes, StateCache
from megatron.core.inference.request_state import (
    SchedulerOutput,
    SequenceState,
)
from megatron.core.inference.scheduler import Scheduler


class CountingScheduler(Scheduler):
    """A scheduler that counts the steps planned from the rows."""

    planned = 0

    def _record(self, scheduler_output: SchedulerOutput) -> None:
        self.planned += 1
        super()._record(scheduler_output)


class RowPlanningScheduler(CountingScheduler):
    """A scheduler that plans every step from the rows."""

    def _advance_steady(self) -> SchedulerOutput | None:
        return None


#: name -> (scheduler options, number of state slots)
CASES: dict[str, tuple[Mapping[str, object], int]] = {
    "plain": ({}, 0),
    "blocks run out": ({"sizes": CacheSizes(num_blocks=14), "max_num_seqs": 2}, 0),
    "padded": ({"token_multiple": 4}, 0),
    "window": ({"sizes": CacheSizes(num_blocks=64, window=9)}, 0),
    "two groups": ({"sizes": CacheSizes(num_blocks=64, window=9, num_window_blocks=40)}, 0),
    "states": ({}, 12),
    "no prefix cache": ({"prefix_caching": False}, 0),
}


def drive(kind: type[CountingScheduler], case: str) -> tuple[list[object], CountingScheduler]:
    """Serve random rows; return every step's digest, rows and statistics, and the scheduler."""
    options, slots = CASES[case]
    states = {"states": StateCache(slots)} if slots else {}
    defaults = {"sizes": CacheSizes(num_blocks=64), "block_size": 4}
    defaults |= {"max_num_seqs": 5, "max_num_batched_tokens": 24}
    scheduler = kind(**defaults | options | states)
    draw, rows, steps = random.Random(5), [], []
    for step in range(160):
        if step % 9 == 0 and len(scheduler.waiting) < 3:
            prefix = draw.choice(([1] * 8, [2] * 8, [])) + [draw.randrange(50) for _ in range(5)]
            length = len(prefix) + draw.randrange(1, 36)
            rows.append(
                SequenceState(tokens=prefix, num_prompt_tokens=len(prefix), max_length=length)
            )
            rows[-1].priority = draw.randrange(2)
            scheduler.add(rows[-1])
        if step % 31 == 30 and scheduler.running:
            scheduler.remove(draw.choice(scheduler.running))
        if step % 47 == 46:
            scheduler.reset_prefix_cache()
        plan = scheduler.schedule()
        if plan is None:
            continue
        indices = [rows.index(row) for row in plan.sequences]
        steps.append(
            (
                plan.digest(),
                indices,
                plan.num_computed_tokens,
                plan.num_scheduled_tokens,
                plan.logits_indices.tolist(),
            )
        )
        scheduler.commit(plan)
        for n in plan.sampled:
            row = plan.sequences[n]
            row.tokens.append(draw.randrange(50))
            row.num_pending_tokens -= 1
            if len(row.tokens) == row.max_length:
                scheduler.remove(row)
    available = [group.pool.available for group in scheduler.kv_cache.groups]
    return [*steps, asdict(scheduler.stats), available], scheduler


@pytest.mark.parametrize("case", CASES)
def test_advanced_step_equals_step_planned_from_rows(case: str) -> None:
    expected, from_rows = drive(RowPlanningScheduler, case)
    actual, advanced = drive(CountingScheduler, case)
    assert actual == expected
    assert advanced.planned < 0.7 * from_rows.planned  # the other steps were advanced
    assert (advanced.stats.preempted > 0) == (case == "blocks run out")
    assert (advanced.stats.snapshots > 0) == (case == "states")
