# SPDX-License-Identifier: Apache-2.0
"""All-to-all: every row arrives once, in order, with splits of any size."""

from __future__ import annotations

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import CollectiveRecord, all_to_all, trace
from megatron.core.comm.collectives import all_to_all_async
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks


def rows(source: int, target: int, count: int) -> torch.Tensor:
    """Return the rows [count, 2] that `source` sends to `target`.

    Column 0 encodes source, target and row index.
    """
    start = torch.full((count,), 100.0 * source + 10.0 * target)
    return torch.stack([start + torch.arange(count), torch.full((count,), 7.0)], dim=1)


def check_all_to_all(rank: int, world: int) -> None:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    group = groups["tp"]

    def count(source: int, target: int) -> int:
        return (2 * source + 3 * target) % 4  # some counts are 0

    ranks = range(world)
    with nan_memory(), trace(groups) as records:
        x = torch.cat([rows(rank, target, count(rank, target)) for target in ranks])
        expected = torch.cat([rows(source, rank, count(source, rank)) for source in ranks])
        send = [count(rank, target) for target in ranks]
        receive = [count(source, rank) for source in ranks]
        x_before = x.clone()
        assert torch.equal(all_to_all(x, group, send_counts=send, receive_counts=receive), expected)
        assert torch.equal(x, x_before)
        out = torch.empty_like(expected)
        pending = all_to_all_async(x, group, send_counts=send, receive_counts=receive, out=out)
        assert pending.wait() is out
        assert torch.equal(out, expected)

        even = torch.cat([rows(rank, target, 3) for target in ranks])
        assert torch.equal(
            all_to_all(even, group), torch.cat([rows(source, rank, 3) for source in ranks])
        )
        no_rows = all_to_all(x[:0], group, send_counts=[0] * world, receive_counts=[0] * world)
        assert tuple(no_rows.shape) == (0, 2)
        bf16_rows = even.t().bfloat16().t()  # columns first
        assert torch.equal(all_to_all(bf16_rows, group), all_to_all(bf16_rows.contiguous(), group))

    sizes = [8 * sum(send)] * 2 + [8 * 3 * world, 0] + [4 * 3 * world] * 2
    assert records == [CollectiveRecord("all_to_all", "tp", world, size) for size in sizes]
    check_refused_counts(x, group, send)


def check_refused_counts(x: torch.Tensor, group: Group, send: list[int]) -> None:
    """Check that invalid split sizes are refused before anything is sent."""
    for counts, message in (
        ({"send_counts": send}, "both counts or neither"),
        ({"send_counts": send[:-1], "receive_counts": send}, "give one count per rank"),
        (
            {"send_counts": [n + 1 for n in send], "receive_counts": send},
            f"ranks: {x.shape[0]} rows, but counts",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            all_to_all(x, group, **counts)
    with pytest.raises(ValueError, match="do not divide"):
        all_to_all(torch.zeros(group.size + 1), group)


@pytest.mark.parametrize("world", [2, 4])
def test_all_to_all_delivers_rows_in_order(world: int):
    run_ranks(check_all_to_all, world)


def test_all_to_all_on_one_rank_returns_its_input():
    groups = ProcessGroupCollection.single()
    x = torch.arange(6.0).view(3, 2)
    with trace(groups) as records:
        assert all_to_all(x, groups["tp"]) is x
        assert all_to_all(x, groups["tp"], send_counts=[3], receive_counts=[3]) is x
        out = torch.zeros(3, 2)
        assert all_to_all(x, groups["tp"], out=out) is out
    assert torch.equal(out, x)
    assert records == []
