# SPDX-License-Identifier: Apache-2.0
"""Direct exchanges against fp64 sums, in place and out of place, several in flight at once."""

from __future__ import annotations

import time

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import collectives
from megatron.core.comm.collectives import all_gather_async, reduce_scatter_async
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated

ROWS = 90_007  # rows of 3 elements per rank: above MIN_DIRECT_BYTES in bf16 too, and odd


def content(rank: int, world: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values [rows · world, 3] that differ for every rank and exchange."""
    values = torch.randint(-60, 60, (ROWS * world, 3), generator=generator(11, rank, number))
    return values.to(dtype)


def count_direct_exchanges(rank: int, world: int) -> int:
    """Start three exchanges before waiting for the first; return how many were direct."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    dp_group, started = groups["dense_dp"], 0
    for dtype in (torch.float32, torch.bfloat16):
        inputs_by_rank = [[content(r, world, n, dtype) for n in range(2)] for r in range(world)]
        shard = slice(rank * ROWS, (rank + 1) * ROWS)
        started += 3 * collectives.uses_direct_exchange(inputs_by_rank[0][0], dp_group)
        inputs = [w.clone() for w in inputs_by_rank[rank]]
        out_of_place = reduce_scatter_async(inputs[0], dp_group)
        in_place = reduce_scatter_async(inputs[1], dp_group, out=inputs[1][shard])
        gathered = torch.full((ROWS * world, 3), torch.nan, dtype=dtype)
        gathered[shard] = inputs_by_rank[rank][0][shard]
        gather = all_gather_async(gathered[shard], dp_group, out=gathered)
        # integers below 2^8: their sums are exact in bf16 too
        for n, pending in enumerate((out_of_place, in_place)):
            expected = sum(inputs_by_rank[r][n].double() for r in range(world))[shard]
            assert torch.equal(pending.wait().double(), expected), (dtype, n)
        assert torch.equal(inputs[0], inputs_by_rank[rank][0]), "the input has changed"
        expected = torch.cat(
            [inputs_by_rank[r][0][r * ROWS : (r + 1) * ROWS] for r in range(world)]
        )
        assert torch.equal(gather.wait(), expected), dtype
    check_sum_order(dp_group, world)
    check_wait_covers_late_ranks(dp_group, world)
    with simulated(groups, Late()):
        late = reduce_scatter_async(torch.ones(ROWS * world, 3), dp_group)
        equal = bool((late.wait() == world).all())
        assert equal
    return started


def check_wait_covers_late_ranks(group: Group, world: int) -> None:
    """Check that `wait` returns only after all shards have arrived, even from a late rank."""
    if group.rank == world - 1:
        time.sleep(0.3)
    shard = torch.full((ROWS, 3), float(group.rank))
    out = torch.full((ROWS * world, 3), torch.nan)
    all_gather_async(shard, group, out=out).wait()
    assert torch.equal(out[::ROWS, 0], torch.arange(float(world)))
    assert out.isfinite().all()


def check_sum_order(group: Group, world: int) -> None:
    """Check that every rank adds in the order of the ranks."""
    inputs = [torch.randn(ROWS, generator=generator(12, r)) for r in range(world)]
    x = inputs[group.rank].repeat(world)
    total = inputs[0].clone()
    for addend in inputs[1:]:
        total += addend
    assert torch.equal(reduce_scatter_async(x, group).wait(), total)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_direct_exchanges_match_sums_and_concatenations(world: int):
    assert run_ranks(count_direct_exchanges, world) == [6] * world


def test_small_tensors_and_large_groups_use_gloo():
    small_tensor = torch.zeros(collectives.MIN_DIRECT_BYTES // 4 - 1)
    group = Group("dense_dp", (0,), 0)
    assert not collectives.uses_direct_exchange(small_tensor, group)
    assert collectives.uses_direct_exchange(torch.zeros(collectives.MIN_DIRECT_BYTES // 4), group)
    ranks = tuple(range(collectives.MAX_DIRECT_RANKS + 1))
    large_group = Group("dense_dp", ranks, 0, handle=object())  # type: ignore[arg-type]
    large_tensor = torch.zeros(collectives.MIN_DIRECT_BYTES)
    assert not collectives.uses_direct_exchange(large_tensor, large_group)
