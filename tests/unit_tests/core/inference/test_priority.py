# SPDX-License-Identifier: Apache-2.0
"""Priorities of rows: who is admitted first, and who gives up memory."""

from __future__ import annotations

from megatron.core.inference.scheduler import Scheduler, SequenceState


def row(name: int, priority: int, *, tokens: int = 4, most: int = 6) -> SequenceState:
    return SequenceState(
        tokens=[name] * tokens, num_prompt_tokens=tokens, max_length=most, priority=priority
    )


def run(scheduler: Scheduler) -> list[int]:
    """Run all rows to their ends; return their names in the order of these."""
    ended = []
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(plan)
        for n in plan.sampled:
            done = plan.sequences[n]
            done.append(99)
            if len(done.tokens) == done.max_length:
                scheduler.remove(done)
                ended.append(done.tokens[0])
    return ended


def test_lower_numbers_come_first_and_equal_ones_in_their_order() -> None:
    scheduler = Scheduler(num_blocks=8, block_size=4, max_num_seqs=1, max_num_batched_tokens=8)
    for name, priority in enumerate((1, 0, 1, -3, 0)):
        scheduler.add(row(name, priority))
    assert run(scheduler) == [3, 1, 4, 0, 2]


def test_the_last_of_the_highest_number_gives_up_its_blocks() -> None:
    scheduler = Scheduler(num_blocks=5, block_size=4, max_num_seqs=3, max_num_batched_tokens=64)
    first, urgent, last = row(0, 5, most=12), row(1, 0, most=12), row(2, 5, most=12)
    for one in (first, last):
        scheduler.add(one)
    ended = []
    while (plan := scheduler.schedule()) is not None:
        if scheduler.stats.steps == 1:  # it is admitted last
            scheduler.add(urgent)
        scheduler.commit(plan)
        for n in plan.sampled:
            plan.sequences[n].append(99)
            if len(plan.sequences[n].tokens) == 12:
                scheduler.remove(plan.sequences[n])
                ended.append(plan.sequences[n])
        # The one that is served first never loses what it has.
        assert urgent.num_admissions <= 1
    assert ended == [urgent, first, last]
    assert scheduler.stats.preempted > 0
    assert last.num_admissions > 1
