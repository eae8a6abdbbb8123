# SPDX-License-Identifier: Apache-2.0
"""Padding that a layout marks: experts and routers work as if it were not there, and the host does
not wait to learn how much there is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.moe.dispatch import dispatch
from megatron.core.moe.router import Share, expert_capacity
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
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
    """Return the mark, bool [s, b]."""
    return torch.arange(S).unsqueeze(1) >= torch.tensor(TOKENS)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states, those of padding a hundred times as large, and factors of outputs."""
    hidden, factors = (torch.randn(S, B, H, generator=generator(S, i)) for i in range(2))
    return torch.where(padding().unsqueeze(-1), 100.0 * hidden, hidden), factors


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_padding_is_as_if_it_were_absent(limit: str, score_function: str):
    router = replace(MOE.router, score_function=score_function)
    config = replace(MOE, router=router, **LIMITS[limit])
    real = ~padding().flatten()
    hidden, factors = data()
    without = [x.flatten(0, 1)[real].unsqueeze(1) for x in (hidden, factors)]  # [t, 1, h]
    with one_thread():
        alone, padded = (Layer(config, hidden_size=H) for _ in range(2))
        alone.assert_sure(without[0])
        out, dx = alone.step(*without, aux_factor=AUX)
        layout = SequenceLayout.of_rows(S).with_padding(padding())
        with nan_memory():
            got, back = padded.step(hidden, factors, layout, aux_factor=AUX)
    for name, found, wanted in (("output", got, out), ("input gradient", back, dx)):
        found = found.flatten(0, 1)
        assert not found[~real].any(), name
        assert_close_by_metric(name, found[real], wanted.squeeze(1), bound=5e-6)
    assert_all_close(merged(padded.gradients()), merged(alone.gradients()), bound=5e-6)
    counted, wanted = padded.moe.router.counted, alone.moe.router.counted
    assert_close_by_metric("counted", counted, wanted, bound=1e-6)
    places, dropped = counted[EXPERTS : EXPERTS + 2].tolist()
    assert places == 2 * sum(TOKENS)
    assert (dropped > 5) == (config.capacity_factor is not None)


def test_a_microbatch_of_padding_alone_does_nothing():
    for limit in LIMITS.values():
        layer = Layer(replace(MOE, **limit), hidden_size=H)
        hidden, factors = data()
        layout = SequenceLayout.of_rows(S).with_padding(torch.ones(S, B, dtype=torch.bool))
        with nan_memory():
            out, dx = layer.step(hidden, factors, layout, aux_factor=AUX)
        assert not out.any()
        assert not dx.any()
        assert not any(gradient.any() for gradient in merged(layer.gradients()).values())
        assert not layer.moe.router.counted.any()


def own_room(rank: int, world: int, scattered: bool) -> list[int]:
    """Compare what a rank's experts take with places handed out one after the other."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world, etp=1), rank=rank)
    length = S + 1 if scattered else S  # 69 rows do not divide over two ranks
    mark = torch.nn.functional.pad(padding(), (0, 0, 0, length - S), value=True)
    layout = SequenceLayout.of_rows(length).with_padding(mark)
    each = -(-length * B // world)
    real = torch.zeros(each * world, dtype=torch.bool)
    real[: length * B] = ~mark.flatten()
    real = real[rank * each : (rank + 1) * each]
    hidden = torch.randn(length, B, H, generator=generator(8))
    hidden = hidden.chunk(world)[rank] if scattered else hidden
    rooms = []
    for policy in ("position", "probs"):
        limited = replace(MOE, capacity_factor=0.8, drop_policy=policy)
        layer = Layer(limited, groups, hidden_size=H, sequence_parallel=scattered)
        share = Share(hidden, layout, region=layer.moe.region)
        routing = layer.moe.router(share.rows(hidden), share)
        room = math.ceil(0.8 * int(real.sum()) * 2 / EXPERTS)
        wanted = greedy_capacity_mask(routing.experts, routing.weights, real, room, policy)
        assert torch.equal(share.real, real)
        assert torch.equal(routing.keep_mask, wanted)
        rooms.append(room)
    return rooms


@pytest.mark.parametrize("scattered", [False, True], ids=["divided", "sequence parallel"])
def test_the_room_of_experts_is_by_the_tokens_of_a_rank(scattered: bool):
    # Padding is at the end of rows, so the second rank has fewer tokens.
    (first, _), (second, _) = run_ranks(own_room, 2, scattered)
    assert first > 1.4 * second


def test_capacity_on_the_device_is_rounded_as_on_the_host():
    for tokens in (0, 1, 3, 8, 96, 12345):
        for factor in (0.1, 0.7, 1.0, 1.25, 3.0):
            options = {"factor": factor, "topk": 6, "num_experts": 7}
            found = expert_capacity(torch.tensor(tokens), **options)
            assert found == expert_capacity(tokens, **options)
            assert found == math.ceil(factor * (tokens * 6) / 7)


@pytest.mark.parametrize("limit", LIMITS)
def test_the_host_waits_for_no_padding(limit: str):
    layer = Layer(replace(MOE, **LIMITS[limit]), hidden_size=H)
    hidden, _ = data()
    layout = SequenceLayout.of_rows(S).with_padding(padding())
    seen = []

    def experts(rows, runs):
        seen.append(len(rows))
        return rows * 2.0

    with OpTape() as tape:
        share = Share(hidden, layout, region=TensorParallelRegion(layer.groups["tp"]))
        routing = layer.moe.router(share.rows(hidden), share, aux_factor=AUX)
        dispatch(share.rows(hidden), routing, experts, ranks=layer.moe.ranks, dispatcher="alltoall")
        assert not tape.syncs
        assert int(share.num_tokens) == sum(TOKENS)
        assert tape.syncs, "the tape sees nothing"
    assert seen == [S * B * 2]  # as many as the host knows without asking


def test_padding_of_a_split_stays():
    cut = SequenceSharding.of(5, 1, cu_seqlens=(0, 2, 5), padded_cu_seqlens=(0, 4, 9))
    layout = SequenceLayout.make(cut, 0, rows=2)
    columns = [False, False, True, True, False, False, False, True, True]
    assert layout.padding.tolist() == [[mark] * 2 for mark in columns]
    assert layout.with_padding(torch.zeros(9, 2).bool()).padding.equal(layout.padding)
    rows = torch.tensor([[False] * 4 + [True], [False] * 5])
    found = layout.with_padding(layout.local(rows, fill=True).t())
    assert found.padding.t().tolist() == [[*columns[:6], True, *columns[7:]], columns]
    for wrong in (torch.zeros(9, dtype=torch.bool), torch.zeros(9, 2), torch.zeros(8, 2).bool()):
        with pytest.raises(ValueError, match="padding"):
            layout.with_padding(wrong)
