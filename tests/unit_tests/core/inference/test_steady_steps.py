# SPDX-License-Identifier: Apache-2.0
"""A step planned by moving the last one on is the step that is planned from the rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import pytest

from megatron.core.inference.cache import StateCache
from megatron.core.inference.scheduler import Scheduler, SchedulerOutput, SequenceState


class Counted(Scheduler):
    """Counts the steps that are planned from the rows."""

    planned = 0

    def _build_output(self, planned: Sequence[tuple[SequenceState, int]]) -> SchedulerOutput:
        self.planned += 1
        return super()._build_output(planned)


class PlannedFromRows(Counted):
    """Plans every step from the rows."""

    def _advance_steady(self) -> SchedulerOutput | None:
        return None


#: What schedulers are made of, and how many slots for states there are.
CASES: dict[str, tuple[Mapping[str, object], int]] = {
    "plain": ({}, 0),
    "blocks run out": ({"num_blocks": 14, "max_num_seqs": 2}, 0),
    "padded": ({"token_multiple": 4}, 0),
    "window": ({"window": 9}, 0),
    "states": ({}, 12),
    "no prefix cache": ({"prefix_caching": False}, 0),
}


def drive(kind: type[Counted], case: str) -> tuple[list[object], Counted]:
    """Serve random rows that come and go; return every step's digest and rows, and statistics."""
    options, slots = CASES[case]
    states = {"states": StateCache(slots)} if slots else {}
    given = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 24}
    scheduler = kind(**given | options | states)
    draw, rows, found = random.Random(5), [], []
    for step in range(160):
        if step % 9 == 0 and len(scheduler.waiting) < 3:
            begin = draw.choice(([1] * 8, [2] * 8, [])) + [draw.randrange(50) for _ in range(5)]
            length = len(begin) + draw.randrange(1, 36)
            rows.append(
                SequenceState(tokens=begin, num_prompt_tokens=len(begin), max_length=length)
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
        numbers = [rows.index(row) for row in plan.sequences]
        found.append(
            (
                plan.digest(),
                numbers,
                plan.num_computed_tokens,
                plan.num_scheduled_tokens,
                plan.logits_indices.tolist(),
            )
        )
        scheduler.commit(plan)
        for n in plan.sampled:
            row = plan.sequences[n]
            row.append(draw.randrange(50))
            if len(row.tokens) == row.max_length:
                scheduler.remove(row)
    return [*found, asdict(scheduler.stats), scheduler.pool.available], scheduler


@pytest.mark.parametrize("case", CASES)
def test_a_step_that_is_moved_on_is_the_step_that_is_planned(case: str) -> None:
    wanted, whole = drive(PlannedFromRows, case)
    found, moved = drive(Counted, case)
    assert found == wanted
    assert moved.planned < 0.7 * whole.planned  # the others were moved on
    assert (moved.stats.preempted > 0) == (case == "blocks run out")
    assert (moved.stats.snapshots > 0) == (case == "states")
