# SPDX-License-Identifier: Apache-2.0
"""Collectives in two halves: what they bring both ways, and what may happen in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

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
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.comm.noted_link import Noting, marked


class _Exchanged(torch.autograd.Function):
    """The split_all_to_all of rows at once, its gradient the split_all_to_all back."""

    @staticmethod
    def forward(ctx, x, group, send, receive):
        ctx.of = group, receive, send
        return all_to_all(x, group, send_counts=send, receive_counts=receive)

    @staticmethod
    def backward(ctx, grad):
        group, send, receive = ctx.of
        back = all_to_all(grad, group, send_counts=send, receive_counts=receive)
        return back, None, None, None


def count(source: int, target: int) -> int:
    """Return how many rows a rank sends another: none to some, all different."""
    return (2 * source + 3 * target) % 4


Pair = tuple[int, Callable[[], SplitCollective], Callable[[torch.Tensor], torch.Tensor]]


def pairs(group: Group) -> dict[str, Pair]:
    """Return of each collective: rows, how it is made, and the collective that it is."""
    send = [count(group.rank, other) for other in range(group.size)]
    receive = [count(other, group.rank) for other in range(group.size)]
    nothing = [0] * group.size
    return {
        "split_all_to_all": (
            sum(send),
            lambda: split_all_to_all(group, send, receive),
            lambda x: _Exchanged.apply(x, group, send, receive),
        ),
        "split_all_to_all of nothing": (
            0,
            lambda: split_all_to_all(group, nothing, nothing),
            lambda x: _Exchanged.apply(x, group, nothing, nothing),
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


def flown(rank: int, world: int, link: str) -> None:
    """Compare every split collective with its plain collective, bit by bit, with work between."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    for number, (name, (rows, made, wanted)) in enumerate(pairs(groups["tp"]).items()):
        values = torch.randn(rows, 7, generator=generator(number, rank))
        with trace(groups) as plain:
            x = values.clone().requires_grad_(True)
            y = wanted(x)
            factors = torch.randn(y.shape, generator=generator(9, number, rank))
            ((y * factors).sum() + (x * 3.0).square().sum()).backward()
        links = {"late": Late(), "early": Early()}
        context = simulated(groups, links[link]) if link in links else nullcontext()
        with trace(groups) as records, context, nan_memory():
            z = values.clone().requires_grad_(True)
            collective = made()
            buffer = start_collective(z, collective)
            if link == "late" and len(y):
                assert buffer.detach().isnan().all(), "it has arrived too early"
            between = (z * 3.0).square().sum()
            got = finish_collective(buffer, collective)
            ((got * factors).sum() + between).backward()
            again = run_collective(values, made())
        assert torch.equal(got, y), name
        assert torch.equal(again, y), name
        assert torch.equal(z.grad, x.grad), name
        assert records[:2] == plain, name
        assert len(plain) == 2
        if link in links:
            assert links[link].count == 3


@pytest.mark.parametrize("link", ["real", "late", "early"])
def test_flights_bring_what_their_collectives_do(link: str):
    run_ranks(flown, 3, link)


def in_order(rank: int, world: int) -> None:
    """See what is under way while something else is computed."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    for rows, made, _ in pairs(groups["tp"]).values():
        events: list[str] = []
        with simulated(groups, Noting(events)):
            x = torch.ones(rows, 2).requires_grad_(True)
            collective = made()
            under_way = start_collective(x, collective)
            between = marked(x * 2.0, events, "work")
            y = finish_collective(under_way, collective)
            (y.sum() + between.sum()).backward()
        assert events == ["start 0", "work", "wait 0", "start 1", "work back", "wait 1"]


def test_what_is_computed_in_between_is_so_in_backward():
    run_ranks(in_order, 2)


def test_arriving_without_departure_is_an_error():
    collective = split_all_gather(Group.single())
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match="finished without a start"):
        finish_collective(x, collective)
    buffer = start_collective(x, collective)
    assert torch.equal(finish_collective(buffer, collective), x)
    with pytest.raises(ValueError, match="finished without a start"):
        finish_collective(buffer, collective)


def test_alone_rows_stay_where_they_are():
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
