# SPDX-License-Identifier: Apache-2.0
"""The reduce-scatter that sends bf16 and sums in fp32, against sums in fp64 and in bf16."""

from __future__ import annotations

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import CollectiveRecord, Pending, trace
from megatron.core.comm.collectives import reduce_scatter_fp32_async
from tests.support.closeness import relative_error
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated

ROWS, WIDTH = 50, 7


def gradients(rank: int, world: int) -> torch.Tensor:
    """Return bf16 gradients [n·world, width] of many magnitudes that differ between ranks."""
    rng = generator(6, rank, world)
    x = torch.randn(ROWS * world, WIDTH, generator=rng)
    return (x * 10 ** torch.rand(ROWS * world, WIDTH, generator=rng)).bfloat16()


def sum_errors(rank: int, world: int) -> tuple[float, float]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    group = groups["tp"]
    inputs = [gradients(r, world) for r in range(world)]
    addends = [i[ROWS * rank : ROWS * (rank + 1)] for i in inputs]
    fp64_sum = sum(i.double() for i in addends)
    sum_in_order, bf16_sum = addends[0].float(), addends[0].clone()
    for addend in addends[1:]:
        sum_in_order += addend.float()
        bf16_sum += addend
    x = inputs[rank].clone()
    with nan_memory(), trace(groups) as records:
        fp32_sum = reduce_scatter_fp32_async(x, group).wait()
        assert torch.equal(x, inputs[rank])
        out, receive_buffer = torch.empty(ROWS, WIDTH), torch.empty_like(x)
        pending = reduce_scatter_fp32_async(x, group, out=out, receive_buffer=receive_buffer)
        assert pending.wait() is out
        assert pending.wait() is out
        with simulated(groups, Late()) as link:
            late = reduce_scatter_fp32_async(x.t().contiguous().t(), group)  # columns first
            assert late.output.isnan().all()
            assert torch.equal(late.wait(), sum_in_order)
        assert link.count == 1
        with pytest.raises(ValueError, match="rows do not divide"):
            reduce_scatter_fp32_async(x[1:], group)
    assert fp32_sum.dtype is torch.float32
    assert torch.equal(fp32_sum, sum_in_order)  # bitwise: in rank order on every link
    assert torch.equal(out, sum_in_order)
    assert records == [CollectiveRecord("all_to_all", "tp", world, 2 * x.numel())] * 3
    return relative_error(fp32_sum, fp64_sum), relative_error(bf16_sum, fp64_sum)


@pytest.mark.parametrize("world", [2, 4])
def test_bf16_reduce_scatter_sums_in_fp32(world: int):
    for fp32_error, bf16_error in run_ranks(sum_errors, world):
        assert fp32_error < 3e-7
        assert bf16_error > 1e-4  # the error of the same sum in bf16


def test_fp32_reduce_scatter_on_one_rank_only_casts():
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
    # without work to wait for, as on one rank
    assert Pending(torch.zeros(1)).then(add("alone")).wait().tolist() == [1.0]
