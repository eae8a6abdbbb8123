# SPDX-License-Identifier: Apache-2.0
"""Recurrent mixers on one rank and on several: collectives, fp32 weights, refused layouts.

Their values are compared with fp64 models in tests/parity and with transformers in hf.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.layout import PagedRows
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.ops.paged_attention import PagedBatch
from megatron.core.optimizer import ConstantLossScaler, Optimizer, OptimizerConfig
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig, mixer
from megatron.core.ssm.mixer_config import choose_mode
from megatron.core.weight_gather import WeightStore
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator
from tests.support.layers import make_mixer
from tests.support.ranks import run_ranks

HIDDEN = 20
DELTA = GatedDeltaNetConfig(
    num_key_heads=4, num_value_heads=8, key_channels=6, value_channels=5, conv_width=4
)
MAMBA = Mamba2Config(num_heads=8, head_channels=5, state_channels=6, num_groups=2)
MIXERS = {"delta": DELTA, "mamba": MAMBA}
WITH_SHORT_CONV = {**MIXERS, "short_conv": ShortConvConfig(bias=True)}


def _collectives(rank: int, world: int, kind: str, sequences: int, has_bounds: bool) -> Counter:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    layer, store = make_mixer(MIXERS[kind], HIDDEN, groups, linear_mode="headwise")
    engine = DataParallel(store, groups, config=DataParallelConfig(strategy="no_shard"))
    engine.begin_step()
    length = 64 * 2 * world
    bounds = [length * i // sequences for i in range(sequences + 1)]
    ids = torch.bucketize(torch.arange(length), torch.tensor(bounds[1:-1]), right=True)
    sharding = SequenceSharding.of(length, world, cu_seqlens=bounds if has_bounds else None)
    layout = SequenceLayout.make(sharding, rank, rows=1, document_ids=ids[None])
    hidden = torch.randn(sharding.local_length, 1, HIDDEN, generator=generator(rank))
    hidden.requires_grad_()
    with trace(groups) as records:
        out = layer(hidden, layout)
        out.sum().backward()
    assert hidden.grad is not None
    assert float(hidden.grad.abs().min()) > 0.0
    return Counter(record.kind for record in records if record.group == "cp")


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize(
    ("sequences", "has_bounds"), [(1, False), (4, True), (64, True), (64, False)]
)
def test_headwise_layer_sends_four_all_to_alls(kind: str, sequences: int, has_bounds: bool) -> None:
    for counts in run_ranks(_collectives, 2, kind, sequences, has_bounds):
        assert counts == {"all_to_all": 4}


def _count_mode_choices(rank: int, world: int) -> list[int]:
    """Return the number of mode choices after each forward pass.

    Two layers of one kind and one of another run on a layout, on an equal one, and on a second.
    """
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    layers = [
        make_mixer(MIXERS[kind], HIDDEN, groups, linear_mode="auto")[0]
        for kind in ("delta", "delta", "mamba")
    ]
    layouts = [SequenceLayout.make(SequenceSharding.of(16, world), rank, rows=2) for _ in range(2)]
    counts = []
    with mock.patch.object(mixer, "choose_mode", wraps=choose_mode) as choose:
        for layout in (layouts[0], layouts[0].with_samples(torch.arange(2)), layouts[1]):
            hidden = torch.randn(16 // world, 2, HIDDEN)
            for layer in layers:
                hidden = layer(hidden, layout)
            counts.append(choose.call_count)
    return counts


def test_mode_is_chosen_once_per_layout_and_shape():
    assert run_ranks(_count_mode_choices, 2) == [[2, 2, 4]] * 2


@pytest.mark.parametrize("kind", WITH_SHORT_CONV)
def test_a_document_mask_without_bounds_is_refused(kind: str) -> None:
    layer, _ = make_mixer(WITH_SHORT_CONV[kind], HIDDEN)
    layout = SequenceLayout.of_rows(8, document_ids=torch.tensor([[0] * 3 + [1] * 5]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(torch.zeros(8, 1, HIDDEN), layout)


def _train_a_step(rank: int, world: int, kind: str, strategy: str) -> dict[str, torch.Tensor]:
    """Train a bf16 layer for one tiny step; return its fp32 weights before and after."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    layer, store = make_mixer(MIXERS[kind], HIDDEN, groups, dtype=torch.bfloat16, strategy=strategy)
    engine = DataParallel(store, groups, config=DataParallelConfig(strategy=strategy))
    optimizer = Optimizer(
        engine.owned(),
        groups,
        config=OptimizerConfig(kind="sgd", clip_grad=0.0),
        scaler=ConstantLossScaler(1.0),
    )
    hidden = torch.randn(24, 1, HIDDEN, generator=generator(rank)).bfloat16()
    engine.begin_step()
    before = _fp32_weights(store)
    out = layer(hidden, SequenceLayout.of_rows(24))
    engine.backward(out.float().square().sum() / 100, last=True)
    engine.finish()
    optimizer.step(1e-5, 0.0)
    engine.start_param_sync(force_sync=True)
    return {**before, **{f"{name} after": value for name, value in _fp32_weights(store).items()}}


def _fp32_weights(store: WeightStore) -> dict[str, torch.Tensor]:
    return {
        chunk.name: chunk.tensor.clone()
        for handle in store.handles.values()
        for chunk in store.chunks(handle)
        if chunk.tensor.dtype == torch.float32
    }


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("kind", MIXERS)
def test_decay_rates_stay_fp32_in_bf16_model(kind: str, strategy: str) -> None:
    names = {"m.A_log", "m.dt_bias"} | ({"m.D"} if kind == "mamba" else set())
    changes: Counter = Counter()
    for weights in run_ranks(_train_a_step, 2, kind, strategy):
        for name in names & weights.keys():
            before, after = weights[name], weights[f"{name} after"]
            assert before.dtype == after.dtype == torch.float32
            # Updates that bf16 weights would round away.
            changes[name] += int(
                ((before != after) & (before.bfloat16() == after.bfloat16())).sum()
            )
    assert set(changes) == names
    assert all(count > 0 for count in changes.values()), changes


def _run_two_tokens(rank: int, world: int, kind: str) -> torch.Tensor:
    """Return the output for two tokens that both lie on rank 0, and padding."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    layer, store = make_mixer(WITH_SHORT_CONV[kind], HIDDEN, groups, linear_mode="segments")
    engine = DataParallel(store, groups, config=DataParallelConfig(strategy="no_shard"))
    engine.begin_step()
    sharding = SequenceSharding.of(2, world, cu_seqlens=[0, 2], padded_cu_seqlens=[0, 8])
    layout = SequenceLayout.make(sharding, rank, rows=1)
    hidden = torch.randn(4, 1, HIDDEN, generator=generator(3)).requires_grad_()
    out = layer(hidden, layout)
    out.sum().backward()
    assert bool(hidden.grad.isfinite().all())
    return out.detach()


@pytest.mark.parametrize("kind", WITH_SHORT_CONV)
def test_rank_without_tokens_joins_collectives(kind: str) -> None:
    layer, _ = make_mixer(WITH_SHORT_CONV[kind], HIDDEN)
    hidden = torch.randn(4, 1, HIDDEN, generator=generator(3))
    expected = layer(hidden[:2], SequenceLayout.of_rows(2)).detach()
    with_tokens, without = run_ranks(_run_two_tokens, 2, kind)
    assert_close_by_metric("with tokens", with_tokens[:2], expected)
    assert not without.any()


class _SingleTokenCache:
    """A state cache for two rows: the first has one token, the second is padding."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], **kind: Any) -> torch.Tensor:
        return self._buffers.setdefault(name, torch.zeros(2, *shape, **kind))

    @staticmethod
    def layout() -> SequenceLayout:
        rows = PagedRows(
            batch=PagedBatch(
                block_table=torch.zeros(2, 1).int(),
                query_bounds=torch.tensor([0, 1, 2]).int(),
                context_lengths=torch.tensor([1, 0]).int(),
                max_query=1,
                max_context=1,
            ),
            slot_mapping=torch.tensor([0, -1]),
            state_slots=torch.tensor([0, -1]),
            decode_rows=2,
            prefill=None,
        )
        return SequenceLayout(torch.zeros(2, dtype=torch.int64), paged=rows)


@pytest.mark.parametrize("kind", WITH_SHORT_CONV)
def test_padding_row_outputs_zeros(kind: str) -> None:
    layer, _ = make_mixer(WITH_SHORT_CONV[kind], HIDDEN)
    hidden = torch.randn(2, 1, HIDDEN, generator=generator(5))
    expected = layer(hidden[:1], SequenceLayout.of_rows(1)).detach()
    hidden[1] = torch.nan
    with torch.no_grad():
        out = layer(hidden, _SingleTokenCache.layout(), cache=_SingleTokenCache())
    assert_close_by_metric("the row with a token", out[:1], expected)
    assert not out[1].any()
