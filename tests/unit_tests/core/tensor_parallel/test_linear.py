# SPDX-License-Identifier: Apache-2.0
"""Column- and row-parallel layers against the same layers in a single process."""

from __future__ import annotations

import pytest
import torch

from megatron.core import InitSpec, ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.support.activation import assert_active, assert_silent
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.tensor_parallel.sliced import (
    ModelUnderTest,
    assert_gradients_match,
    build_model,
    local_sequence,
    run_step,
)

S, B, H, A, K, OUT = 8, 3, 6, 20, 10, 7


def build_for(tp: int, *, bias: bool):
    """Return a builder of a fused column layer with replicated "k" shards and of a row layer."""

    def build(store, region):
        shared = {"store": store, "region": region, "init": InitSpec.normal(0.4), "bias": bias}
        outputs = [("a", A, None), ("k", K, min(2, tp))]
        return {
            "column": ColumnParallelLinear("qk", outputs, input_size=H, **shared),
            "row": RowParallelLinear("row", input_size=A, output_size=OUT, **shared),
        }

    return build


def combine_shards(inner: torch.Tensor, tp: int, rank: int | None) -> torch.Tensor:
    """Combine shards of "a" and "k": [s, b, A/tp], or [s, b, A] for all ranks if rank is None."""
    if rank is not None:
        k = K // min(2, tp)
        a, key = inner.split([A // tp, k], dim=-1)
        return torch.tanh(a) * (1.0 + rank + key.sin().sum(-1, keepdim=True))
    a, key = inner.split([A, K], dim=-1)
    a, key = a.chunk(tp, -1), key.chunk(min(2, tp), -1)
    outputs = [
        torch.tanh(a[r]) * (1.0 + r + key[r * min(2, tp) // tp].sin().sum(-1, keepdim=True))
        for r in range(tp)
    ]
    return torch.cat(outputs, -1)


def forward(model: ModelUnderTest, x: torch.Tensor, tp: int) -> torch.Tensor:
    """Run the column layer, `combine_shards` and the row layer."""
    rank = model.tp.rank if model.tp.size > 1 else None
    return model.layers["row"](combine_shards(model.layers["column"](x), tp, rank))


def check_linear(rank: int, world: int, sequence_parallel: bool, bias: bool) -> None:
    """Compare output, input gradient and all weight gradients."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    build = build_for(world, bias=bias)
    parallel = build_model(groups, build, sequence_parallel=sequence_parallel)
    single = build_model(ProcessGroupCollection.single(), build_for(1, bias=bias))
    values = torch.randn(S, B, H, generator=generator(1))
    weight = torch.randn(S, B, OUT, generator=generator(2))
    x_all = values.clone().requires_grad_(True)
    out_all = forward(single, x_all, world)
    run_step(single, (out_all * weight).sum())
    with nan_memory(), trace(groups) as records:
        x = local_sequence(values, parallel).clone().requires_grad_(True)
        out = forward(parallel, x, world)
        assert_close_by_metric("output", out, local_sequence(out_all, parallel), bound=2e-6)
        run_step(parallel, (out * local_sequence(weight, parallel)).sum())
    assert_close_by_metric("dx", x.grad, local_sequence(x_all.grad, parallel), bound=2e-6)
    assert_gradients_match(parallel, single)
    if sequence_parallel:
        # The column layer gathers in forward and again in backward, the row layer in backward.
        assert_active(
            records, kind="all_gather", exactly=3, exactly_bytes=4 * S * B * (2 * H + OUT)
        )
        assert_active(
            records, kind="reduce_scatter", exactly=2, exactly_bytes=4 * S * B * (H + OUT)
        )
    else:
        assert_silent(records, kind="all_gather")
        assert_silent(records, kind="reduce_scatter")
        assert_active(records, kind="all_reduce", group="tp", at_least=2)


def check_all_linears(rank: int, world: int) -> None:
    """Run every combination, and a sequence length that the ranks do not divide."""
    for sequence_parallel in (False, True):
        for bias in (False, True):
            check_linear(rank, world, sequence_parallel, bias)
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    parallel = build_model(groups, build_for(world, bias=False), sequence_parallel=True)
    x = torch.ones(S + 1, B, A // world)
    with pytest.raises(ValueError, match=f"{S + 1} rows do not divide by {world} ranks"):
        parallel.layers["row"](x)


@pytest.mark.parametrize("world", [2, 4])
def test_column_and_row_layers_match_single_process(world: int):
    run_ranks(check_all_linears, world)


def check_frozen_column(rank: int, world: int) -> None:
    """Check that a frozen column layer returns its input gradient and gathers once."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)

    def build(store, region):
        shared = {"store": store, "region": region, "init": InitSpec.normal(0.4)}
        return {"column": ColumnParallelLinear("w", [("w", A, None)], input_size=H, **shared)}

    single = build_model(ProcessGroupCollection.single(), build)
    parallel = build_model(groups, build, sequence_parallel=True)
    handle = parallel.store.handles["w.weight"]
    handle.anchor.requires_grad_(False)
    handle.main_grad = None
    values = torch.randn(S, B, H, generator=generator(1))
    x_all = values.clone().requires_grad_(True)
    single.engine.begin_step()
    single.layers["column"](x_all).sum().backward()
    x = local_sequence(values, parallel).clone().requires_grad_(True)
    with trace(groups) as records:
        parallel.layers["column"](x).sum().backward()
    assert_close_by_metric("dx", x.grad, local_sequence(x_all.grad, parallel), bound=2e-6)
    assert_active(records, kind="all_gather", exactly=1)


def test_frozen_column_layer_still_has_input_gradient():
    run_ranks(check_frozen_column, 2)
