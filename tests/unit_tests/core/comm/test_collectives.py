# SPDX-License-Identifier: Apache-2.0
"""Collectives and their conjugates against sums and slices of all ranks' inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import (
    CollectiveRecord,
    all_gather,
    all_reduce,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter,
    reduce_scatter_to_group,
    scatter_to_group,
    trace,
)
from megatron.core.comm.collectives import (
    all_gather_async,
    all_reduce_async,
    reduce_scatter_async,
)
from megatron.core.comm.conjugates import own_rows
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks


def content(rank: int, *shape: int) -> torch.Tensor:
    """Return small integers that differ between ranks; their sums are exact in fp32."""
    return torch.randint(-50, 50, shape, generator=generator(3, rank, *shape)).float()


def rows_of(x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return the shard of x that `rank` holds."""
    return x.chunk(world)[rank]


def conjugate_cases(world: int) -> list[tuple]:
    """List (function, input rows, forward, backward).

    The reference forward and backward compute from the tensors of all ranks.
    """

    def summed(tensors, rank):
        return sum(tensors)

    def local(tensors, rank):
        return tensors[rank]

    def gathered(tensors, rank):
        return torch.cat(tensors)

    def local_shard(tensors, rank):
        return rows_of(tensors[rank], rank, world)

    def shard_of_sum(tensors, rank):
        return rows_of(sum(tensors), rank, world)

    def gather_partial(x, group):
        return gather_from_group(x, group, partial_gradient=True)

    num_rows, num_rows_all_ranks = 3, 3 * world
    return [
        (copy_to_group, num_rows, local, summed),
        (reduce_from_group, num_rows, summed, local),
        (scatter_to_group, num_rows_all_ranks, local_shard, gathered),
        (gather_from_group, num_rows, gathered, local_shard),
        (gather_partial, num_rows, gathered, shard_of_sum),
        (reduce_scatter_to_group, num_rows_all_ranks, shard_of_sum, gathered),
    ]


def check_conjugates(rank: int, world: int) -> None:
    """Check forward and backward, and that neither inputs nor gradients are modified."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    with nan_memory():
        for function, rows, forward, backward in conjugate_cases(world):
            inputs = [content(r, rows, 5) for r in range(world)]
            x = inputs[rank].clone().requires_grad_(True)
            out = function(x, groups["tp"])
            name = function.__name__
            assert torch.equal(out, forward(inputs, rank)), name
            assert torch.equal(x.detach(), inputs[rank]), "the input was modified"
            gradients = [content(r + 100, *out.shape) for r in range(world)]
            incoming_grads: list[torch.Tensor] = []
            out.register_hook(incoming_grads.append)
            (out * gradients[rank]).sum().backward()  # backward(gradient) would import sympy
            assert torch.equal(x.grad, backward(gradients, rank)), f"gradient of {name}"
            assert torch.equal(incoming_grads[0], gradients[rank]), "the gradient was modified"
        check_strided(groups, rank, world)


def check_strided(groups: ProcessGroupCollection, rank: int, world: int) -> None:
    """Check non-contiguous inputs and gradients, and row counts that the ranks do not divide."""
    inputs = [content(r, 4, 3).t() for r in range(world)]  # [3, 4], columns first
    assert torch.equal(all_reduce(inputs[rank], groups["tp"]), sum(inputs))
    assert torch.equal(all_gather(inputs[rank], groups["tp"]), torch.cat(inputs))
    x = inputs[rank].clone().requires_grad_(True)
    gather_from_group(x, groups["tp"], partial_gradient=True).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, float(world)))  # an expanded gradient
    indivisible = torch.zeros(world + 1, 2)
    for uneven in (own_rows, reduce_scatter):
        with pytest.raises(ValueError, match=f"{world + 1} rows do not divide"):
            uneven(indivisible, groups["tp"])


@pytest.mark.parametrize("world", [2, 4])
def test_conjugates_match_reference_forward_and_backward(world: int):
    run_ranks(check_conjugates, world)


def check_plain_collectives(rank: int, world: int) -> None:
    """Check synchronous and asynchronous outputs, max, explicit outputs and the trace."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    tp, single = groups["tp"], groups["cp"]
    inputs = [content(r, 2 * world, 3) for r in range(world)]
    x, total = inputs[rank].clone(), sum(inputs)
    with nan_memory(), trace(groups) as records:
        maximum = all_reduce(x, tp, op="max")
        assert torch.equal(maximum, torch.stack(inputs).amax(0))
        pending = [all_reduce_async(x, tp), all_gather_async(x, tp), reduce_scatter_async(x, tp)]
        expected = [total, torch.cat(inputs), rows_of(total, rank, world)]
        for work, value in zip(pending, expected, strict=True):
            assert torch.equal(work.wait(), value)
            assert torch.equal(work.wait(), value)  # a second wait transfers nothing
        assert torch.equal(x, inputs[rank])
        assert all_reduce(x, single) is x
    num_bytes = 2 * world * 3 * 4
    assert records == [
        CollectiveRecord("all_reduce", "tp", world, num_bytes),
        CollectiveRecord("all_reduce", "tp", world, num_bytes),
        CollectiveRecord("all_gather", "tp", world, num_bytes * world),
        CollectiveRecord("reduce_scatter", "tp", world, num_bytes),
    ]
    all_reduce(x, tp)
    assert len(records) == 4, "a closed trace still records"
    check_explicit_outputs(tp, rank, world)


def check_explicit_outputs(tp, rank: int, world: int) -> None:
    """Check the in-place forms that flat buffers use."""
    inputs = [content(r, 2 * world, 3) for r in range(world)]
    total = sum(inputs)
    x = inputs[rank].clone()
    assert all_reduce(x, tp, out=x) is x
    assert torch.equal(x, total)
    out = torch.empty_like(total)
    all_reduce(inputs[rank], tp, out=out)
    assert torch.equal(out, total)
    x = inputs[rank].clone()
    shard = x[2 * rank : 2 * rank + 2]
    reduce_scatter(x, tp, out=shard)
    assert torch.equal(shard, rows_of(total, rank, world))
    gathered = torch.zeros(2 * world, 3)
    gathered[2 * rank : 2 * rank + 2] = content(rank, 2, 3)
    all_gather(gathered[2 * rank : 2 * rank + 2], tp, out=gathered)
    assert torch.equal(gathered, torch.cat([content(r, 2, 3) for r in range(world)]))


def test_collectives_match_equations_and_are_traced():
    run_ranks(check_plain_collectives, 2)


@pytest.mark.parametrize(
    "function",
    [
        copy_to_group,
        reduce_from_group,
        scatter_to_group,
        gather_from_group,
        reduce_scatter_to_group,
        all_reduce,
        all_gather,
        reduce_scatter,
    ],
)
def test_collective_on_one_rank_returns_its_input_untraced(function: Callable[..., torch.Tensor]):
    groups = ProcessGroupCollection.single()
    x = content(0, 3, 2)
    with trace(groups) as records:
        assert function(x, groups["tp"]) is x
    assert records == []


@pytest.mark.parametrize("function", [all_reduce, all_gather, reduce_scatter])
def test_explicit_output_is_written_on_one_rank(function: Callable[..., torch.Tensor]):
    group = ProcessGroupCollection.single()["tp"]
    x = content(0, 3, 2)
    out = torch.zeros(3, 2)
    assert function(x, group, out=out) is out
    assert torch.equal(out, x)
