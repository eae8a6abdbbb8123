# SPDX-License-Identifier: Apache-2.0
"""Simulated links: right results for right code, and a sure failure for each way to misuse a
buffer under way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core.comm import all_gather, all_reduce, all_to_all, reduce_scatter
from megatron.core.comm.collectives import (
    Transfer,
    all_gather_async,
    all_reduce_async,
    all_to_all_async,
    reduce_scatter_async,
    reduce_scatter_fp32_async,
)
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.weight_gather.gatherer import BufferPool
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, Latency, Link, simulated


def content(rank: int, *shape: int) -> torch.Tensor:
    """Small whole numbers, other ones on every rank: their sums are exact."""
    return torch.randint(-50, 50, shape, generator=generator(5, rank, *shape)).float()


def make_groups(rank: int, world: int) -> ProcessGroupCollection:
    return ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)


def check_results(group: Group, world: int) -> None:
    """Every collective in every form, several under way at a time, against equations."""
    rank = group.rank
    inputs = [content(r, 2 * world, 3) for r in range(world)]
    x, total, gathered = inputs[rank].clone(), sum(inputs), torch.cat(inputs)
    own = slice(2 * rank, 2 * rank + 2)
    parts = torch.cat([i[own] for i in inputs])
    in_place = [x.clone() for _ in range(3)]
    in_place[1] = torch.zeros_like(gathered)
    in_place[1][2 * world * rank : 2 * world * (rank + 1)] = x
    pending = [
        all_reduce_async(x, group),
        all_gather_async(x, group),
        reduce_scatter_async(x, group),
        reduce_scatter_fp32_async(x.bfloat16(), group),
        all_to_all_async(x, group),
        all_reduce_async(in_place[0], group, out=in_place[0]),
        all_gather_async(
            in_place[1][2 * world * rank : 2 * world * (rank + 1)], group, out=in_place[1]
        ),
        reduce_scatter_async(in_place[2], group, out=in_place[2][own]),
    ]
    wanted = [total, gathered, total[own], total[own], parts, total, gathered, total[own]]
    for transfer, value in zip(pending, wanted, strict=True):
        assert torch.equal(transfer.wait(), value)
        assert torch.equal(transfer.wait(), value)
    assert torch.equal(x, inputs[rank])
    assert torch.equal(all_reduce(x, group, op="max"), torch.stack(inputs).amax(0))
    assert torch.equal(all_gather(x, group), gathered)
    assert torch.equal(reduce_scatter(x, group), total[own])
    assert torch.equal(all_to_all(x, group), parts)
    whole = torch.full((3,), rank, dtype=torch.int64)  # a dtype without NaN
    assert all_reduce(whole, group).tolist() == [sum(range(world))] * 3


def right_code(rank: int, world: int) -> None:
    groups = make_groups(rank, world)
    links: list[Link] = [Late(), Early(), Latency(0.002), Latency(0.0, shared=False)]
    for link in links:
        with simulated(groups, link) as used:
            assert used is link
            check_results(groups["tp"], world)
        assert link.count == 13
    check_results(groups["tp"], world)  # no link any more
    assert [link.count for link in links] == [13] * 4
    _nested(groups, world)


def _nested(groups: ProcessGroupCollection, world: int) -> None:
    """Check that the innermost link is used, and that a wait may come after the context."""
    outer, inner = Early(), Late()
    x = content(groups.rank, 4)
    with simulated(groups, outer), simulated(groups, inner):
        pending = all_reduce_async(x, groups["tp"])
    assert (outer.count, inner.count) == (0, 1)
    assert pending.output.isnan().all()
    assert torch.equal(pending.wait(), sum(content(r, 4) for r in range(world)))


@pytest.mark.parametrize("world", [2, 4])
def test_right_code_gets_right_results_on_every_link(world: int):
    run_ranks(right_code, world)


def poisoned(rank: int, world: int) -> None:
    """Check what Late overwrites at the start: outputs, and of an input only what will be lost."""
    group = (groups := make_groups(rank, world))["tp"]
    x = content(rank, world)
    with simulated(groups, Late()):
        gathered = all_gather_async(x, group)
        assert gathered.output.isnan().all()
        assert torch.equal(x, content(rank, world))
        reduced = all_reduce_async(x, group, out=x)
        assert x.isnan().all()
        whole = torch.zeros(world)
        whole[rank] = 7.0
        in_place = all_gather_async(whole[rank : rank + 1], group, out=whole)
        assert whole[rank] == 7.0
        assert int(whole.isnan().sum()) == world - 1
        wide = reduce_scatter_fp32_async(content(rank, 2 * world).bfloat16(), group)
        assert wide.output.isnan().all()
        codes = all_gather_async(torch.tensor([rank], dtype=torch.uint8), group)
        assert codes.output.tolist() == [255] * world
        with pytest.raises(RuntimeError, match=r"all_gather over tp: its input .* was written"):
            gathered.wait()  # its input x is the output of the all-reduce above
        for pending in (reduced, in_place, wide, codes):
            pending.wait()
    assert codes.output.tolist() == list(range(world))
    assert whole.tolist() == [7.0] * world


def test_late_poisons_what_a_collective_may_overwrite():
    run_ranks(poisoned, 2)


# --- seeded bugs ----------------------------------------------------------------------------------


def weight_used_without_wait(group: Group, *, bug: bool) -> torch.Tensor:
    pending = all_gather_async(content(group.rank, 3, 4), group)
    whole = pending.output if bug else pending.wait()
    y = torch.ones(4) @ whole.t()
    pending.wait()
    return y


def prefetch_into_the_buffer_in_use(group: Group, *, bug: bool) -> torch.Tensor:
    first, second = torch.empty(6, 4), torch.empty(6, 4)
    all_gather(content(group.rank, 3, 4), group, out=first)
    pending = all_gather_async(content(group.rank + 9, 3, 4), group, out=first if bug else second)
    y = torch.ones(4) @ first.t()
    return torch.cat([y, torch.ones(4) @ pending.wait().t()])


def input_recycled_before_wait(group: Group, *, bug: bool) -> torch.Tensor:
    gradients = content(group.rank, 6)
    pending = reduce_scatter_async(gradients, group)
    if bug:
        gradients.zero_()
    out = pending.wait()
    gradients.zero_()
    return out


def output_added_before_wait(group: Group, *, bug: bool) -> torch.Tensor:
    main = torch.ones(3)
    pending = reduce_scatter_async(content(group.rank, 6), group)
    if bug:
        main += pending.output
        pending.wait()
    else:
        main += pending.wait()
    return main


def output_written_before_wait(group: Group, *, bug: bool) -> torch.Tensor:
    """A gradient put into a bucket whose all-reduce is under way."""
    gradients = content(group.rank, 6)
    pending = all_reduce_async(gradients, group, out=gradients)
    if bug:
        gradients[2] = 1.0
    return pending.wait().clone()


def buffer_released_before_wait(group: Group, *, bug: bool) -> torch.Tensor:
    pool = BufferPool("cpu", poison=True)
    lease = pool.acquire(6, torch.float32)
    lease.copy_(content(group.rank, 6))
    pending = reduce_scatter_async(lease, group)
    if bug:
        pool.release(lease)
    out = pending.wait()
    if not bug:
        pool.release(lease)
    return out


def gathered_view_used_after_release(group: Group, *, bug: bool) -> torch.Tensor:
    pool = BufferPool("cpu", poison=True)
    lease = pool.acquire(12, torch.float32)
    all_gather(content(group.rank, 6), group, out=lease)
    if bug:
        pool.release(lease)
    return lease * 2.0


def part_written_of_an_input_in_place(group: Group, *, bug: bool) -> torch.Tensor:
    """The rows of other ranks in the input of a reduce-scatter into its own rows."""
    gradients = content(group.rank, 6)
    own = gradients[3 * group.rank : 3 * group.rank + 3]
    pending = reduce_scatter_async(gradients, group, out=own)
    if bug:
        gradients[3 * (1 - group.rank)] += 1.0
    return pending.wait().clone()


Case = Callable[..., torch.Tensor]
#: How each link shows each bug: an error, NaN or wrong numbers in the result; "" if it cannot.
SHOWN: dict[Case, tuple[str, str]] = {
    weight_used_without_wait: ("nan", ""),
    prefetch_into_the_buffer_in_use: ("nan", "wrong"),
    input_recycled_before_wait: ("its input [6] was written", "its input [6] was written"),
    output_added_before_wait: ("nan", ""),
    output_written_before_wait: ("its output [6] was written", "its output [6] was written"),
    buffer_released_before_wait: ("its input [6] was written", "its input [6] was written"),
    gathered_view_used_after_release: ("nan", "nan"),
    part_written_of_an_input_in_place: ("its input [6] was written", "its input [6] was written"),
}


def outcome(case: Case, group: Group, wanted: torch.Tensor) -> str:
    try:
        found = case(group, bug=True)
    except RuntimeError as error:
        return str(error)
    if found.isnan().any():
        return "nan"
    return "" if torch.equal(found, wanted) else "wrong"


def every_bug(rank: int, world: int) -> dict[str, list[str]]:
    groups = make_groups(rank, world)
    found = {}
    for case in SHOWN:
        wanted = case(groups["tp"], bug=False)
        found[case.__name__] = []
        for link in (Late(), Early(), Late()):
            with simulated(groups, link):
                assert torch.equal(case(groups["tp"], bug=False), wanted), case.__name__
                found[case.__name__].append(outcome(case, groups["tp"], wanted))
            assert link.count >= 2
    return found


def test_every_seeded_bug_is_caught_each_time():
    for found in run_ranks(every_bug, 2):
        for case, (late, early) in SHOWN.items():
            for said, seen in zip((late, early, late), found[case.__name__], strict=True):
                assert (said in seen) if said else (seen == ""), (case.__name__, found)


# --- latency --------------------------------------------------------------------------------------


class Clock:
    """A clock that only sleeping and the test move."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += seconds


class Done:
    """A transfer that is over at once."""

    def wait(self) -> None:
        """Wait for nothing."""


def transfer(handle: str) -> Transfer:
    group = Group(handle, (0, 1), 0, handle)  # type: ignore[arg-type]
    return Transfer("all_gather", group, torch.zeros(1), torch.zeros(2), Done)


def test_latency_is_a_queue_of_one():
    clock = Clock()
    link = Latency(5.0, now=clock.now, sleep=clock.sleep)
    first, second = link(transfer("a")), link(transfer("b"))  # done at 5 and, behind it, at 10
    clock.seconds = 2.0
    first.wait()
    assert clock.seconds == 5.0
    clock.seconds = 9.0
    second.wait()
    assert clock.seconds == 10.0
    clock.seconds = 30.0
    third = link(transfer("a"))  # the link was free: done at 35
    clock.seconds = 36.0
    third.wait()
    assert clock.slept == [3.0, 1.0]
    assert link.count == 3


def test_latency_may_give_every_communicator_its_own_link():
    clock = Clock()
    link = Latency(5.0, shared=False, now=clock.now, sleep=clock.sleep)
    pending = [link(transfer(name)) for name in ("a", "b", "a")]
    ends = []
    for one in pending:
        one.wait()
        ends.append(clock.seconds)
    assert ends == [5.0, 5.0, 10.0]


def test_a_negative_latency_is_refused():
    with pytest.raises(ValueError, match="use 0 or more"):
        Latency(-1.0)
