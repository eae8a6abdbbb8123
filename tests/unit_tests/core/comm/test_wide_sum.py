# SPDX-License-Identifier: Apache-2.0
"""The reduce-scatter that sends bf16 and sums in fp32, against an fp64 sum and a bf16 one."""

from __future__ import annotations

import pytest
import torch

from megatron.core.comm import CollectiveRecord, trace
from megatron.core.comm.collectives import Pending, reduce_scatter_fp32_async
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.closeness import relative_error
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated

ROWS, WIDTH = 50, 7


def gradients(rank: int, world: int) -> torch.Tensor:
    """bf16 gradients [n·world, width] of many magnitudes, other ones on every rank."""
    rng = generator(6, rank, world)
    x = torch.randn(ROWS * world, WIDTH, generator=rng)
    return (x * 10 ** torch.rand(ROWS * world, WIDTH, generator=rng)).bfloat16()


def wide_sum(rank: int, world: int) -> tuple[float, float]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    group = groups["tp"]
    inputs = [gradients(r, world) for r in range(world)]
    own = [i[ROWS * rank : ROWS * (rank + 1)] for i in inputs]
    exact = sum(i.double() for i in own)
    in_order, narrow = own[0].float(), own[0].clone()
    for addend in own[1:]:
        in_order += addend.float()
        narrow += addend
    x = inputs[rank].clone()
    with nan_memory(), trace(groups) as records:
        found = reduce_scatter_fp32_async(x, group).wait()
        assert torch.equal(x, inputs[rank])
        out, parts = torch.empty(ROWS, WIDTH), torch.empty_like(x)
        pending = reduce_scatter_fp32_async(x, group, out=out, receive_buffer=parts)
        assert pending.wait() is out
        assert pending.wait() is out
        with simulated(groups, Late()) as link:
            late = reduce_scatter_fp32_async(x.t().contiguous().t(), group)  # columns first
            assert late.output.isnan().all()
            assert torch.equal(late.wait(), in_order)
        assert link.count == 1
        with pytest.raises(ValueError, match="rows do not divide"):
            reduce_scatter_fp32_async(x[1:], group)
    assert found.dtype is torch.float32
    assert torch.equal(found, in_order)  # to the bit, whatever the link: in the order of ranks
    assert torch.equal(out, in_order)
    assert records == [CollectiveRecord("all_to_all", "tp", world, 2 * x.numel())] * 3
    return relative_error(found, exact), relative_error(narrow, exact)


@pytest.mark.parametrize("world", [2, 4])
def test_the_sum_is_as_exact_as_fp32(world: int):
    for wide, narrow in run_ranks(wide_sum, world):
        assert wide < 3e-7
        assert narrow > 1e-4  # what the same sum loses in bf16


def test_on_one_rank_it_only_widens():
    group = ProcessGroupCollection.single()["tp"]
    x = gradients(0, 1)
    out = torch.empty(ROWS, WIDTH)
    assert torch.equal(reduce_scatter_fp32_async(x, group).wait(), x.float())
    assert reduce_scatter_fp32_async(x, group, out=out).wait() is out
    assert torch.equal(out, x.float())


def test_continuations_run_once_in_order_after_the_wait():
    steps: list[str] = []

    class Work:
        def wait(self) -> None:
            steps.append("transfer")

    def add(name: str):
        def finish(output: torch.Tensor) -> torch.Tensor:
            steps.append(name)
            return output + 1

        return finish

    pending = Pending(torch.zeros(2), Work()).then(add("first")).then(add("second"))
    assert steps == []
    for _ in range(2):
        assert pending.wait().tolist() == [2.0, 2.0]
    assert steps == ["transfer", "first", "second"]
    # a transfer that was over before: on one rank there is none
    assert Pending(torch.zeros(1)).then(add("alone")).wait().tolist() == [1.0]
