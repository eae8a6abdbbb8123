# SPDX-License-Identifier: Apache-2.0
"""Split collectives: forward and backward values, and computation between start and finish."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import all_to_all, gather_from_group, reduce_scatter_to_group, trace
from megatron.core.comm.conjugates import (
    SplitCollective,
    finish_collective,
    run_collective,
    split_all_gather,
    split_all_to_all,
    split_reduce_scatter,
    start_collective,
)
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.comm.noted_link import RecordingLink, marked


class _AllToAll(torch.autograd.Function):
    """All-to-all whose backward is the all-to-all with swapped counts."""

    @staticmethod
    def forward(ctx, x, group, send, receive):
        ctx.group_and_counts = group, receive, send
        return all_to_all(x, group, send_counts=send, receive_counts=receive)

    @staticmethod
    def backward(ctx, grad):
        group, send, receive = ctx.group_and_counts
        x_grad = all_to_all(grad, group, send_counts=send, receive_counts=receive)
        return x_grad, None, None, None


def count(source: int, target: int) -> int:
    """Return how many rows `source` sends to `target`, from 0 to 3."""
    return (2 * source + 3 * target) % 4


Pair = tuple[int, Callable[[], SplitCollective], Callable[[torch.Tensor], torch.Tensor]]


def pairs(group: Group) -> dict[str, Pair]:
    """Return by name: input rows, a factory of the split collective, the plain collective."""
    send = [count(group.rank, peer) for peer in range(group.size)]
    receive = [count(peer, group.rank) for peer in range(group.size)]
    zeros = [0] * group.size
    return {
        "split_all_to_all": (
            sum(send),
            lambda: split_all_to_all(group, send, receive),
            lambda x: _AllToAll.apply(x, group, send, receive),
        ),
        "split_all_to_all of nothing": (
            0,
            lambda: split_all_to_all(group, zeros, zeros),
            lambda x: _AllToAll.apply(x, group, zeros, zeros),
        ),
        "gather": (
            3,
            lambda: split_all_gather(group),
            lambda x: gather_from_group(x, group, partial_gradient=True),
        ),
        "scatter": (
            5 * group.size,
            lambda: split_reduce_scatter(group),
            lambda x: reduce_scatter_to_group(x, group),
        ),
    }


def compare_with_plain(rank: int, world: int, link: str) -> None:
    """Compare every split collective bitwise with its plain collective, with work in between."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    for number, (name, (rows, make_split, run_plain)) in enumerate(pairs(groups["tp"]).items()):
        values = torch.randn(rows, 7, generator=generator(number, rank))
        with trace(groups) as plain:
            x = values.clone().requires_grad_(True)
            y = run_plain(x)
            factors = torch.randn(y.shape, generator=generator(9, number, rank))
            ((y * factors).sum() + (x * 3.0).square().sum()).backward()
        links = {"late": Late(), "early": Early()}
        context = simulated(groups, links[link]) if link in links else nullcontext()
        with trace(groups) as records, context, nan_memory():
            z = values.clone().requires_grad_(True)
            collective = make_split()
            buffer = start_collective(z, collective)
            if link == "late" and len(y):
                assert buffer.detach().isnan().all(), "the output arrived before the wait"
            work = (z * 3.0).square().sum()
            output = finish_collective(buffer, collective)
            ((output * factors).sum() + work).backward()
            unsplit = run_collective(values, make_split())
        assert torch.equal(output, y), name
        assert torch.equal(unsplit, y), name
        assert torch.equal(z.grad, x.grad), name
        assert records[:2] == plain, name
        assert len(plain) == 2
        if link in links:
            assert links[link].count == 3


@pytest.mark.parametrize("link", ["real", "late", "early"])
def test_split_collectives_match_plain_collectives(link: str):
    run_ranks(compare_with_plain, 3, link)


def check_overlap(rank: int, world: int) -> None:
    """Check which collectives are in flight while other work runs, in forward and backward."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    for rows, make_split, _ in pairs(groups["tp"]).values():
        events: list[str] = []
        with simulated(groups, RecordingLink(events)):
            x = torch.ones(rows, 2).requires_grad_(True)
            collective = make_split()
            buffer = start_collective(x, collective)
            work = marked(x * 2.0, events, "work")
            y = finish_collective(buffer, collective)
            (y.sum() + work.sum()).backward()
        assert events == ["start 0", "work", "wait 0", "start 1", "work back", "wait 1"]


def test_work_in_between_overlaps_in_forward_and_backward():
    run_ranks(check_overlap, 2)


def test_finish_without_start_is_an_error():
    collective = split_all_gather(Group.single())
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match="finished without being started"):
        finish_collective(x, collective)
    buffer = start_collective(x, collective)
    assert torch.equal(finish_collective(buffer, collective), x)
    with pytest.raises(ValueError, match="finished without being started"):
        finish_collective(buffer, collective)


def test_split_collectives_on_one_rank_are_the_identity():
    group = Group.single()
    for collective in (
        split_all_gather(group),
        split_reduce_scatter(group),
        split_all_to_all(group, [4], [4]),
    ):
        x = torch.randn(4, 3, generator=generator(1)).requires_grad_(True)
        y = run_collective(x, collective)
        assert torch.equal(y, x)
        (y * x.detach()).sum().backward()
        assert torch.equal(x.grad, x)
