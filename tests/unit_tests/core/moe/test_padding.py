# SPDX-License-Identifier: Apache-2.0
"""Padding marked in a layout: experts and routers ignore it, without a host synchronization."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.moe.dispatch import dispatch
from megatron.core.moe.router import Share, expert_capacity
from megatron.core.tensor_parallel import TensorParallelRegion
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.op_tape import OpTape
from tests.support.ranks import run_ranks
from tests.unit_tests.core.moe.single_layer import Layer, merged
from tests.unit_tests.core.moe.test_choice import greedy_capacity_mask

H, S, B, EXPERTS = 10, 23, 3, 7
MOE = MoEConfig(
    num_experts=EXPERTS,
    ffn_hidden_size=6,
    router=RouterConfig(topk=2, balance="aux_loss", aux_loss_coeff=0.4, z_loss_coeff=0.3),
)
#: Tokens of each row; what follows them is padding.
TOKENS = (23, 9, 16)
LIMITS = {
    "none dropped": {},
    "position": {"capacity_factor": 0.8, "drop_policy": "position"},
    "probs": {"capacity_factor": 0.8, "drop_policy": "probs"},
}
AUX = torch.tensor(3.0)


def padding() -> torch.Tensor:
    """Return the padding mask, bool [s, b]."""
    return torch.arange(S).unsqueeze(1) >= torch.tensor(TOKENS)


def layer_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states, a hundred times as large where padded, and factors of outputs."""
    hidden, factors = (torch.randn(S, B, H, generator=generator(S, i)) for i in range(2))
    return torch.where(padding().unsqueeze(-1), 100.0 * hidden, hidden), factors


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_padded_tokens_do_not_change_the_layer(limit: str, score_function: str):
    router = replace(MOE.router, score_function=score_function)
    config = replace(MOE, router=router, **LIMITS[limit])
    real = ~padding().flatten()
    hidden, factors = layer_inputs()
    compact = [x.flatten(0, 1)[real].unsqueeze(1) for x in (hidden, factors)]  # [t, 1, h]
    with one_thread():
        unpadded, padded = (Layer(config, hidden_size=H) for _ in range(2))
        unpadded.assert_stable_routes(compact[0])
        out, dx = unpadded.step(*compact, aux_factor=AUX)
        layout = SequenceLayout.of_rows(S).with_padding(padding())
        with nan_memory():
            output, input_grad = padded.step(hidden, factors, layout, aux_factor=AUX)
    for name, actual, expected in (("output", output, out), ("input gradient", input_grad, dx)):
        actual = actual.flatten(0, 1)
        assert not actual[~real].any(), name
        assert_close_by_metric(name, actual[real], expected.squeeze(1), bound=5e-6)
    assert_all_close(merged(padded.gradients()), merged(unpadded.gradients()), bound=5e-6)
    counted, expected = padded.moe.router.counted, unpadded.moe.router.counted
    assert_close_by_metric("counted", counted, expected, bound=1e-6)
    places, dropped = counted[EXPERTS : EXPERTS + 2].tolist()
    assert places == 2 * sum(TOKENS)
    assert (dropped > 5) == (config.capacity_factor is not None)


def test_microbatch_of_padding_alone_has_no_effect():
    for limit in LIMITS.values():
        layer = Layer(replace(MOE, **limit), hidden_size=H)
        hidden, factors = layer_inputs()
        layout = SequenceLayout.of_rows(S).with_padding(torch.ones(S, B, dtype=torch.bool))
        with nan_memory():
            out, dx = layer.step(hidden, factors, layout, aux_factor=AUX)
        assert not out.any()
        assert not dx.any()
        assert not any(gradient.any() for gradient in merged(layer.gradients()).values())
        assert not layer.moe.router.counted.any()


def capacities_of_rank(rank: int, world: int, scattered: bool) -> list[int]:
    """Compare the capacity mask of a rank with greedy assignment; return the capacities."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world, etp=1), rank=rank)
    length = S + 1 if scattered else S  # 69 rows do not divide over two ranks
    mark = torch.nn.functional.pad(padding(), (0, 0, 0, length - S), value=True)
    layout = SequenceLayout.of_rows(length).with_padding(mark)
    rows_per_rank = -(-length * B // world)
    real = torch.zeros(rows_per_rank * world, dtype=torch.bool)
    real[: length * B] = ~mark.flatten()
    real = real[rank * rows_per_rank : (rank + 1) * rows_per_rank]
    hidden = torch.randn(length, B, H, generator=generator(8))
    hidden = hidden.chunk(world)[rank] if scattered else hidden
    capacities = []
    for policy in ("position", "probs"):
        limited = replace(MOE, capacity_factor=0.8, drop_policy=policy)
        layer = Layer(limited, groups, hidden_size=H, sequence_parallel=scattered)
        share = Share(hidden, layout, region=layer.moe.region)
        routing = layer.moe.router(share.rows(hidden), share)
        capacity = math.ceil(0.8 * int(real.sum()) * 2 / EXPERTS)
        expected = greedy_capacity_mask(routing.experts, routing.weights, real, capacity, policy)
        assert torch.equal(share.real, real)
        assert torch.equal(routing.keep_mask, expected)
        capacities.append(capacity)
    return capacities


@pytest.mark.parametrize("scattered", [False, True], ids=["divided", "sequence parallel"])
def test_expert_capacity_follows_real_tokens_of_a_rank(scattered: bool):
    # Padding is at the end of rows, so the second rank has fewer real tokens.
    (first_capacity, _), (second_capacity, _) = run_ranks(capacities_of_rank, 2, scattered)
    assert first_capacity > 1.4 * second_capacity


def test_device_capacity_rounds_like_host_capacity():
    for tokens in (0, 1, 3, 8, 96, 12345):
        for factor in (0.1, 0.7, 1.0, 1.25, 3.0):
            options = {"factor": factor, "topk": 6, "num_experts": 7}
            capacity = expert_capacity(torch.tensor(tokens), **options)
            assert capacity == expert_capacity(tokens, **options)
            assert capacity == math.ceil(factor * (tokens * 6) / 7)


@pytest.mark.parametrize("limit", LIMITS)
def test_padding_needs_no_host_synchronization(limit: str):
    layer = Layer(replace(MOE, **LIMITS[limit]), hidden_size=H)
    hidden, _ = layer_inputs()
    layout = SequenceLayout.of_rows(S).with_padding(padding())
    num_rows = []

    def experts(rows, runs):
        num_rows.append(len(rows))
        return rows * 2.0

    with OpTape() as tape:
        share = Share(hidden, layout, region=TensorParallelRegion(layer.groups["tp"]))
        routing = layer.moe.router(share.rows(hidden), share, aux_factor=AUX)
        dispatch(share.rows(hidden), routing, experts, ranks=layer.moe.ranks, dispatcher="alltoall")
        assert not tape.syncs
        assert int(share.num_tokens) == sum(TOKENS)
        assert tape.syncs, "the tape records nothing"
    assert num_rows == [S * B * 2]  # a bound that the host knows without a synchronization


def test_sharded_layout_keeps_document_padding():
    sharding = SequenceSharding.of(5, 1, cu_seqlens=(0, 2, 5), padded_cu_seqlens=(0, 4, 9))
    layout = SequenceLayout.make(sharding, 0, rows=2)
    columns = [False, False, True, True, False, False, False, True, True]
    assert layout.padding.tolist() == [[mark] * 2 for mark in columns]
    assert layout.with_padding(torch.zeros(9, 2).bool()).padding.equal(layout.padding)
    rows = torch.tensor([[False] * 4 + [True], [False] * 5])
    layout_with_mask = layout.with_padding(layout.local(rows, fill=True).t())
    assert layout_with_mask.padding.t().tolist() == [[*columns[:6], True, *columns[7:]], columns]
    for invalid in (torch.zeros(9, dtype=torch.bool), torch.zeros(9, 2), torch.zeros(8, 2).bool()):
        with pytest.raises(ValueError, match="padding"):
            layout.with_padding(invalid)
