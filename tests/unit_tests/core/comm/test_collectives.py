# SPDX-License-Identifier: Apache-2.0
"""Collectives and their conjugates against sums and slices made from every rank's input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

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
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks


def content(rank: int, *shape: int) -> torch.Tensor:
    """Return small whole numbers, other ones on every rank: their sums are exact in fp32."""
    return torch.randint(-50, 50, shape, generator=generator(3, rank, *shape)).float()


def rows_of(x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return the rows of `rank`."""
    return x.chunk(world)[rank]


def conjugate_cases(world: int) -> list[tuple]:
    """List (function, input rows, forward, backward): equations over all ranks' tensors."""

    def total(tensors, rank):
        return sum(tensors)

    def own(tensors, rank):
        return tensors[rank]

    def gathered(tensors, rank):
        return torch.cat(tensors)

    def own_part(tensors, rank):
        return rows_of(tensors[rank], rank, world)

    def own_part_of_total(tensors, rank):
        return rows_of(sum(tensors), rank, world)

    def gather_partial(x, group):
        return gather_from_group(x, group, partial_gradient=True)

    few, many = 3, 3 * world
    return [
        (copy_to_group, few, own, total),
        (reduce_from_group, few, total, own),
        (scatter_to_group, many, own_part, gathered),
        (gather_from_group, few, gathered, own_part),
        (gather_partial, few, gathered, own_part_of_total),
        (reduce_scatter_to_group, many, own_part_of_total, gathered),
    ]


def conjugates(rank: int, world: int) -> None:
    """Check forward, backward and that inputs and gradients are left alone."""
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
            arrived: list[torch.Tensor] = []
            out.register_hook(arrived.append)
            (out * gradients[rank]).sum().backward()  # backward(gradient) would import sympy
            assert torch.equal(x.grad, backward(gradients, rank)), f"gradient of {name}"
            assert torch.equal(arrived[0], gradients[rank]), "the gradient was modified"
        _strided(groups, rank, world)


def _strided(groups: ProcessGroupCollection, rank: int, world: int) -> None:
    """Check inputs and gradients that are not contiguous, and rows that do not divide."""
    inputs = [content(r, 4, 3).t() for r in range(world)]  # [3, 4], columns first
    assert torch.equal(all_reduce(inputs[rank], groups["tp"]), sum(inputs))
    assert torch.equal(all_gather(inputs[rank], groups["tp"]), torch.cat(inputs))
    x = inputs[rank].clone().requires_grad_(True)
    gather_from_group(x, groups["tp"], partial_gradient=True).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, float(world)))  # an expanded gradient
    odd = torch.zeros(world + 1, 2)
    for uneven in (own_rows, reduce_scatter):
        with pytest.raises(ValueError, match=f"{world + 1} rows do not divide"):
            uneven(odd, groups["tp"])


@pytest.mark.parametrize("world", [2, 4])
def test_conjugates_do_what_their_table_says(world: int):
    run_ranks(conjugates, world)


def plain_collectives(rank: int, world: int) -> None:
    """Check outputs, explicit outputs, max, asynchrony and the trace."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    tp, single = groups["tp"], groups["cp"]
    inputs = [content(r, 2 * world, 3) for r in range(world)]
    x, total = inputs[rank].clone(), sum(inputs)
    with nan_memory(), trace(groups) as records:
        maximum = all_reduce(x, tp, op="max")
        assert torch.equal(maximum, torch.stack(inputs).amax(0))
        pending = [all_reduce_async(x, tp), all_gather_async(x, tp), reduce_scatter_async(x, tp)]
        wanted = [total, torch.cat(inputs), rows_of(total, rank, world)]
        for one, value in zip(pending, wanted, strict=True):
            assert torch.equal(one.wait(), value)
            assert torch.equal(one.wait(), value)  # again: no second transfer
        assert torch.equal(x, inputs[rank])
        assert all_reduce(x, single) is x
    numbers = 2 * world * 3 * 4
    assert records == [
        CollectiveRecord("all_reduce", "tp", world, numbers),
        CollectiveRecord("all_reduce", "tp", world, numbers),
        CollectiveRecord("all_gather", "tp", world, numbers * world),
        CollectiveRecord("reduce_scatter", "tp", world, numbers),
    ]
    all_reduce(x, tp)
    assert len(records) == 4, "a closed trace still records"
    _explicit_outputs(tp, rank, world)


def _explicit_outputs(tp, rank: int, world: int) -> None:
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
    own = x[2 * rank : 2 * rank + 2]
    reduce_scatter(x, tp, out=own)
    assert torch.equal(own, rows_of(total, rank, world))
    whole = torch.zeros(2 * world, 3)
    whole[2 * rank : 2 * rank + 2] = content(rank, 2, 3)
    all_gather(whole[2 * rank : 2 * rank + 2], tp, out=whole)
    assert torch.equal(whole, torch.cat([content(r, 2, 3) for r in range(world)]))


def test_plain_collectives():
    run_ranks(plain_collectives, 2)


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
def test_identity_on_one_rank_without_a_trace(function: Callable[..., torch.Tensor]):
    groups = ProcessGroupCollection.single()
    x = content(0, 3, 2)
    with trace(groups) as records:
        assert function(x, groups["tp"]) is x
    assert records == []


@pytest.mark.parametrize("function", [all_reduce, all_gather, reduce_scatter])
def test_an_explicit_output_is_written_on_one_rank_too(function: Callable[..., torch.Tensor]):
    group = ProcessGroupCollection.single()["tp"]
    x = content(0, 3, 2)
    out = torch.zeros(3, 2)
    assert function(x, group, out=out) is out
    assert torch.equal(out, x)
