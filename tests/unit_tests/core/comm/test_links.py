# SPDX-License-Identifier: Apache-2.0
"""Simulated links: correct code gets correct results, each misuse of a buffer in flight fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import all_gather, all_reduce, all_to_all, reduce_scatter
from megatron.core.comm.collectives import (
    Transfer,
    all_gather_async,
    all_reduce_async,
    all_to_all_async,
    reduce_scatter_async,
    reduce_scatter_fp32_async,
)
from megatron.core.weight_gather import BufferPool
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, Latency, Link, simulated


def content(rank: int, *shape: int) -> torch.Tensor:
    """Return small integers that differ between ranks; their sums are exact."""
    return torch.randint(-50, 50, shape, generator=generator(5, rank, *shape)).float()


def make_groups(rank: int, world: int) -> ProcessGroupCollection:
    return ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)


def check_results(group: Group, world: int) -> None:
    """Check every form of every collective against equations, with several in flight."""
    rank = group.rank
    inputs = [content(r, 2 * world, 3) for r in range(world)]
    x, total, gathered = inputs[rank].clone(), sum(inputs), torch.cat(inputs)
    shard = slice(2 * rank, 2 * rank + 2)
    exchanged = torch.cat([i[shard] for i in inputs])
    buffers = [x.clone() for _ in range(3)]
    buffers[1] = torch.zeros_like(gathered)
    buffers[1][2 * world * rank : 2 * world * (rank + 1)] = x
    pending = [
        all_reduce_async(x, group),
        all_gather_async(x, group),
        reduce_scatter_async(x, group),
        reduce_scatter_fp32_async(x.bfloat16(), group),
        all_to_all_async(x, group),
        all_reduce_async(buffers[0], group, out=buffers[0]),
        all_gather_async(
            buffers[1][2 * world * rank : 2 * world * (rank + 1)], group, out=buffers[1]
        ),
        reduce_scatter_async(buffers[2], group, out=buffers[2][shard]),
    ]
    reduced = total[shard]
    expected = [total, gathered, reduced, reduced, exchanged, total, gathered, reduced]
    for transfer, expected_output in zip(pending, expected, strict=True):
        assert torch.equal(transfer.wait(), expected_output)
        assert torch.equal(transfer.wait(), expected_output)
    assert torch.equal(x, inputs[rank])
    assert torch.equal(all_reduce(x, group, op="max"), torch.stack(inputs).amax(0))
    assert torch.equal(all_gather(x, group), gathered)
    assert torch.equal(reduce_scatter(x, group), total[shard])
    assert torch.equal(all_to_all(x, group), exchanged)
    ranks = torch.full((3,), rank, dtype=torch.int64)  # a dtype without NaN
    assert all_reduce(ranks, group).tolist() == [sum(range(world))] * 3


def check_links(rank: int, world: int) -> None:
    groups = make_groups(rank, world)
    links: list[Link] = [Late(), Early(), Latency(0.002), Latency(0.0, shared=False)]
    for link in links:
        with simulated(groups, link) as active:
            assert active is link
            check_results(groups["tp"], world)
        assert link.count == 13
    check_results(groups["tp"], world)  # without a link
    assert [link.count for link in links] == [13] * 4
    check_nested_links(groups, world)


def check_nested_links(groups: ProcessGroupCollection, world: int) -> None:
    """Check that the innermost link is used, and that `wait` works after the context closes."""
    outer, inner = Early(), Late()
    x = content(groups.rank, 4)
    with simulated(groups, outer), simulated(groups, inner):
        pending = all_reduce_async(x, groups["tp"])
    assert (outer.count, inner.count) == (0, 1)
    assert pending.output.isnan().all()
    assert torch.equal(pending.wait(), sum(content(r, 4) for r in range(world)))


@pytest.mark.parametrize("world", [2, 4])
def test_correct_code_gets_correct_results_on_every_link(world: int):
    run_ranks(check_links, world)


def check_poison(rank: int, world: int) -> None:
    """Check what Late poisons at the start: outputs, and inputs where the output overlaps them."""
    group = (groups := make_groups(rank, world))["tp"]
    x = content(rank, world)
    with simulated(groups, Late()):
        gathered = all_gather_async(x, group)
        assert gathered.output.isnan().all()
        assert torch.equal(x, content(rank, world))
        reduced = all_reduce_async(x, group, out=x)
        assert x.isnan().all()
        buffer = torch.zeros(world)
        buffer[rank] = 7.0
        in_place = all_gather_async(buffer[rank : rank + 1], group, out=buffer)
        assert buffer[rank] == 7.0
        assert int(buffer.isnan().sum()) == world - 1
        fp32_sum = reduce_scatter_fp32_async(content(rank, 2 * world).bfloat16(), group)
        assert fp32_sum.output.isnan().all()
        codes = all_gather_async(torch.tensor([rank], dtype=torch.uint8), group)
        assert codes.output.tolist() == [255] * world
        with pytest.raises(RuntimeError, match="all_gather"):
            gathered.wait()  # its input x is the output of the all-reduce above
        for pending in (reduced, in_place, fp32_sum, codes):
            pending.wait()
    assert codes.output.tolist() == list(range(world))
    assert buffer.tolist() == [7.0] * world


def test_late_poisons_outputs_and_overlapping_inputs():
    run_ranks(check_poison, 2)


# --- seeded bugs ----------------------------------------------------------------------------------


def weight_used_without_wait(group: Group, *, bug: bool) -> torch.Tensor:
    pending = all_gather_async(content(group.rank, 3, 4), group)
    weight = pending.output if bug else pending.wait()
    y = torch.ones(4) @ weight.t()
    pending.wait()
    return y


def prefetch_into_buffer_in_use(group: Group, *, bug: bool) -> torch.Tensor:
    used, spare = torch.empty(6, 4), torch.empty(6, 4)
    all_gather(content(group.rank, 3, 4), group, out=used)
    pending = all_gather_async(content(group.rank + 9, 3, 4), group, out=used if bug else spare)
    y = torch.ones(4) @ used.t()
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
    """Write a gradient into a bucket whose all-reduce is in flight."""
    gradients = content(group.rank, 6)
    pending = all_reduce_async(gradients, group, out=gradients)
    if bug:
        gradients[2] = 1.0
    return pending.wait().clone()


def buffer_released_before_wait(group: Group, *, bug: bool) -> torch.Tensor:
    pool = BufferPool("cpu", poison=True)
    buffer = pool.acquire(6, torch.float32)
    buffer.copy_(content(group.rank, 6))
    pending = reduce_scatter_async(buffer, group)
    if bug:
        pool.release(buffer)
    out = pending.wait()
    if not bug:
        pool.release(buffer)
    return out


def gathered_view_used_after_release(group: Group, *, bug: bool) -> torch.Tensor:
    pool = BufferPool("cpu", poison=True)
    buffer = pool.acquire(12, torch.float32)
    all_gather(content(group.rank, 6), group, out=buffer)
    if bug:
        pool.release(buffer)
    return buffer * 2.0


def in_place_input_written_before_wait(group: Group, *, bug: bool) -> torch.Tensor:
    """Write other ranks' rows of the input of an in-place reduce-scatter in flight."""
    gradients = content(group.rank, 6)
    shard = gradients[3 * group.rank : 3 * group.rank + 3]
    pending = reduce_scatter_async(gradients, group, out=shard)
    if bug:
        gradients[3 * (1 - group.rank)] += 1.0
    return pending.wait().clone()


Case = Callable[..., torch.Tensor]
#: How Late and Early reveal each bug: an error, NaN or wrong numbers; "" if the link cannot.
EXPECTED_OUTCOMES: dict[Case, tuple[str, str]] = {
    weight_used_without_wait: ("nan", ""),
    prefetch_into_buffer_in_use: ("nan", "wrong"),
    input_recycled_before_wait: ("its input [6] was written", "its input [6] was written"),
    output_added_before_wait: ("nan", ""),
    output_written_before_wait: ("its output [6] was written", "its output [6] was written"),
    buffer_released_before_wait: ("its input [6] was written", "its input [6] was written"),
    gathered_view_used_after_release: ("nan", "nan"),
    in_place_input_written_before_wait: ("its input [6] was written", "its input [6] was written"),
}


def outcome(case: Case, group: Group, expected: torch.Tensor) -> str:
    try:
        actual = case(group, bug=True)
    except RuntimeError as error:
        return str(error)
    if actual.isnan().any():
        return "nan"
    return "" if torch.equal(actual, expected) else "wrong"


def outcomes_of_all_bugs(rank: int, world: int) -> dict[str, list[str]]:
    groups = make_groups(rank, world)
    outcomes = {}
    for case in EXPECTED_OUTCOMES:
        expected = case(groups["tp"], bug=False)
        outcomes[case.__name__] = []
        for link in (Late(), Early(), Late()):
            with simulated(groups, link):
                assert torch.equal(case(groups["tp"], bug=False), expected), case.__name__
                outcomes[case.__name__].append(outcome(case, groups["tp"], expected))
            assert link.count >= 2
    return outcomes


def test_every_seeded_bug_is_caught_each_time():
    for outcomes in run_ranks(outcomes_of_all_bugs, 2):
        for case, (late, early) in EXPECTED_OUTCOMES.items():
            name = case.__name__
            for expected, actual in zip((late, early, late), outcomes[name], strict=True):
                assert (expected in actual) if expected else (actual == ""), (name, outcomes)


# --- latency --------------------------------------------------------------------------------------


class Clock:
    """A clock that advances only by `sleep` and by the test."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += seconds


class CompletedWork:
    """Work that is already complete."""

    def wait(self) -> None:
        """Wait for nothing."""


def transfer(handle: str) -> Transfer:
    group = Group(handle, (0, 1), 0, handle)  # type: ignore[arg-type]
    return Transfer("all_gather", group, torch.zeros(1), torch.zeros(2), CompletedWork)


def test_latency_queues_transfers_of_a_shared_link():
    clock = Clock()
    link = Latency(5.0, now=clock.now, sleep=clock.sleep)
    pending_a, pending_b = link(transfer("a")), link(transfer("b"))  # complete at 5 and at 10
    clock.seconds = 2.0
    pending_a.wait()
    assert clock.seconds == 5.0
    clock.seconds = 9.0
    pending_b.wait()
    assert clock.seconds == 10.0
    clock.seconds = 30.0
    pending_c = link(transfer("a"))  # the link is idle: complete at 35
    clock.seconds = 36.0
    pending_c.wait()
    assert clock.slept == [3.0, 1.0]
    assert link.count == 3


def test_unshared_latency_queues_by_communicator():
    clock = Clock()
    link = Latency(5.0, shared=False, now=clock.now, sleep=clock.sleep)
    pending = [link(transfer(name)) for name in ("a", "b", "a")]
    end_times = []
    for work in pending:
        work.wait()
        end_times.append(clock.seconds)
    assert end_times == [5.0, 5.0, 10.0]


def test_negative_latency_is_refused():
    with pytest.raises(ValueError, match="use 0 or more"):
        Latency(-1.0)
