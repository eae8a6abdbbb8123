# SPDX-License-Identifier: Apache-2.0
"""Priorities of rows: order of admission and of preemption."""

from __future__ import annotations

from megatron.core.inference.cache import CacheSizes
from megatron.core.inference.request_state import (
    SchedulerOutput,
    SequenceState,
)
from megatron.core.inference.scheduler import Scheduler


def row(name: int, priority: int, *, tokens: int = 4, max_length: int = 6) -> SequenceState:
    return SequenceState(
        tokens=[name] * tokens, num_prompt_tokens=tokens, max_length=max_length, priority=priority
    )


def sample(scheduler: Scheduler, scheduler_output: SchedulerOutput) -> list[SequenceState]:
    """Commit a step; append a token to each sampled row and return these rows."""
    scheduler.commit(scheduler_output)
    sampled = [scheduler_output.sequences[n] for n in scheduler_output.sampled]
    for sequence in sampled:
        sequence.tokens.append(99)
        sequence.num_pending_tokens -= 1
    return sampled


def run(scheduler: Scheduler) -> list[int]:
    """Run all rows to completion; return their names in order of completion."""
    finished = []
    while (scheduler_output := scheduler.schedule()) is not None:
        for sequence in sample(scheduler, scheduler_output):
            if len(sequence.tokens) == sequence.max_length:
                scheduler.remove(sequence)
                finished.append(sequence.tokens[0])
    return finished


def test_lower_priority_numbers_are_admitted_first() -> None:
    scheduler = Scheduler(
        sizes=CacheSizes(num_blocks=8), block_size=4, max_num_seqs=1, max_num_batched_tokens=8
    )
    for name, priority in enumerate((1, 0, 1, -3, 0)):
        scheduler.add(row(name, priority))
    assert run(scheduler) == [3, 1, 4, 0, 2]


def test_latest_row_of_worst_priority_is_preempted() -> None:
    scheduler = Scheduler(
        sizes=CacheSizes(num_blocks=5), block_size=4, max_num_seqs=3, max_num_batched_tokens=64
    )
    early, urgent, late = (
        row(0, 5, max_length=12),
        row(1, 0, max_length=12),
        row(2, 5, max_length=12),
    )
    for state in (early, late):
        scheduler.add(state)
    finished = []
    while (scheduler_output := scheduler.schedule()) is not None:
        if scheduler.stats.steps == 1:  # the urgent row is admitted last
            scheduler.add(urgent)
        for sequence in sample(scheduler, scheduler_output):
            if len(sequence.tokens) == 12:
                scheduler.remove(sequence)
                finished.append(sequence)
        # The row with the best priority is never preempted.
        assert urgent.num_admissions <= 1
    assert finished == [urgent, early, late]
    assert scheduler.stats.preempted > 0
    assert late.num_admissions > 1
