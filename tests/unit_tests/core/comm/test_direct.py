# SPDX-License-Identifier: Apache-2.0
"""Direct exchanges against sums in fp64, in place or not, and several under way at once."""

from __future__ import annotations

import time

import pytest
import torch

from megatron.core.comm import collectives
from megatron.core.comm.collectives import all_gather_async, reduce_scatter_async
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated

ROWS = 90_007  # of 3 elements a rank: above MIN_DIRECT_BYTES in bf16 too, and odd


def content(rank: int, world: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return other values for every rank and exchange: [rows · world, 3]."""
    drawn = torch.randint(-60, 60, (ROWS * world, 3), generator=generator(11, rank, number))
    return drawn.to(dtype)


def exchanges(rank: int, world: int) -> int:
    """Start three exchanges before the first is waited for; return how many went directly."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    lanes, started = groups["dense_dp"], 0
    for dtype in (torch.float32, torch.bfloat16):
        whole = [[content(r, world, n, dtype) for n in range(2)] for r in range(world)]
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        started += 3 * collectives.uses_direct_exchange(whole[0][0], lanes)
        mine = [w.clone() for w in whole[rank]]
        apart = reduce_scatter_async(mine[0], lanes)
        inside = reduce_scatter_async(mine[1], lanes, out=mine[1][own])
        gathered = torch.full((ROWS * world, 3), torch.nan, dtype=dtype)
        gathered[own] = whole[rank][0][own]
        gather = all_gather_async(gathered[own], lanes, out=gathered)
        # whole numbers below 2^8: their sums are exact, in bf16 too
        for n, pending in enumerate((apart, inside)):
            wanted = sum(whole[r][n].double() for r in range(world))[own]
            assert torch.equal(pending.wait().double(), wanted), (dtype, n)
        assert torch.equal(mine[0], whole[rank][0]), "the input has changed"
        wanted = torch.cat([whole[r][0][r * ROWS : (r + 1) * ROWS] for r in range(world)])
        assert torch.equal(gather.wait(), wanted), dtype
    _same_bits_everywhere(lanes, world)
    _waits_for_the_slowest(lanes, world)
    with simulated(groups, Late()):
        late = reduce_scatter_async(torch.ones(ROWS * world, 3), lanes)
        equal = bool((late.wait() == world).all())
        assert equal
    return started


def _waits_for_the_slowest(lanes: Group, world: int) -> None:
    """`wait` returns when all shards have arrived, however late a rank sends its own."""
    if lanes.rank == world - 1:
        time.sleep(0.3)
    shard = torch.full((ROWS, 3), float(lanes.rank))
    out = torch.full((ROWS * world, 3), torch.nan)
    all_gather_async(shard, lanes, out=out).wait()
    assert torch.equal(out[::ROWS, 0], torch.arange(float(world)))
    assert out.isfinite().all()


def _same_bits_everywhere(lanes: Group, world: int) -> None:
    """The order of a sum is that of the ranks, wherever it is taken."""
    drawn = [torch.randn(ROWS, generator=generator(12, r)) for r in range(world)]
    mine = drawn[lanes.rank].repeat(world)
    total = drawn[0].clone()
    for other in drawn[1:]:
        total += other
    assert torch.equal(reduce_scatter_async(mine, lanes).wait(), total)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_exchanges_equal_sums_and_concatenations(world: int):
    assert run_ranks(exchanges, world) == [6] * world


def test_small_large_and_lonely_groups_keep_gloos_own():
    few = torch.zeros(collectives.MIN_DIRECT_BYTES // 4 - 1)
    group = Group("dense_dp", (0,), 0)
    assert not collectives.uses_direct_exchange(few, group)
    assert collectives.uses_direct_exchange(torch.zeros(collectives.MIN_DIRECT_BYTES // 4), group)
    many = tuple(range(collectives.MAX_DIRECT_RANKS + 1))
    crowd = Group("dense_dp", many, 0, handle=object())  # type: ignore[arg-type]
    assert not collectives.uses_direct_exchange(torch.zeros(collectives.MIN_DIRECT_BYTES), crowd)
