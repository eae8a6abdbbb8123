# SPDX-License-Identifier: Apache-2.0
"""A model split into chunks in one process: at any block, in both precisions, with recompute."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.models import GPTModel
from megatron.core.models.gpt import logical_weights
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.transformer import Recompute
from megatron.core.weight_gather import WeightStore
from tests.support.closeness import assert_all_equal, relative_error
from tests.support.inputs import one_thread
from tests.unit_tests.core.models.chunk_steps import (
    LAYERS,
    MODELS,
    TIED,
    UNTIED,
    build_model,
    step_microbatch,
    train_step,
    weight_values,
)

BLOCKS = 2 * LAYERS
UNTIED_LAYER_NORM = dataclasses.replace(TIED, tied=False)
SINGLE = ProcessGroupCollection.single()


def split_at(*cuts: int) -> StageSplit:
    """Split the blocks of one stage before these blocks."""
    return StageSplit(1, tuple(itertools.pairwise((0, *cuts, BLOCKS))))


def assert_equal_bits(actual: tuple[list, dict], expected: tuple[list, dict]) -> None:
    """Compare losses, per-token losses and gradients bit by bit."""
    for (loss, nll), (whole_loss, whole_nll) in zip(actual[0], expected[0], strict=True):
        assert torch.equal(loss, whole_loss)
        assert torch.equal(nll, whole_nll)
    assert actual[1].keys() == expected[1].keys()
    for key, gradient in expected[1].items():
        assert gradient.abs().max() > 0, key
        assert torch.equal(actual[1][key], gradient), key


@pytest.mark.parametrize("config", [UNTIED, UNTIED_LAYER_NORM], ids=["rms", "layer"])
def test_split_at_any_block_is_bit_identical(config):
    with one_thread():
        expected = train_step(build_model(config))
        splits = [split_at(block) for block in range(BLOCKS + 1)]
        splits += [
            split_at(0, 1, 2, 3, 4, 5, 6),
            split_at(3, 3, 3),
            split_at(0, 0),
            split_at(6, 6),
            split_at(1, 5),
        ]
        for split in splits:
            model = build_model(config, split=split)
            assert [len(decoder.blocks) for decoder in model.decoders] == [
                end - start for start, end in split.ranges
            ]
            assert_equal_bits(train_step(model), expected)


def test_bf16_stage_boundary_rounds_gradient_exactly_once():
    with one_thread():
        losses, gradients = train_step(build_model(UNTIED, dtype=torch.bfloat16))
        cut_losses, cut_gradients = train_step(
            build_model(UNTIED, dtype=torch.bfloat16, split=split_at(1, 2, 3, 4, 5))
        )
        exact = train_step(build_model(UNTIED))[1]
    assert all(torch.equal(a, b) for a, b in zip(sum(losses, ()), sum(cut_losses, ()), strict=True))
    different = 0
    for key, gradient in gradients.items():
        different += not torch.equal(cut_gradients[key], gradient)
        error, whole_error = (
            relative_error(g[key], exact[key]) for g in (cut_gradients, gradients)
        )
        assert error < 1.5 * whole_error + 2**-8, key
    assert different, "nothing was rounded"


RECOMPUTE = [
    Recompute(granularity="full", method="uniform", num_layers=2),
    Recompute(granularity="full", method="block", num_layers=2),
    Recompute(granularity="full", method="uniform", num_layers=3),
    Recompute(granularity="selective"),
]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recompute_covers_the_layers_of_each_chunk(recompute: Recompute):
    split = split_at(0, 2, 5)  # no layer, one layer, one and a half, half a layer
    with one_thread():
        model = build_model(UNTIED, split=split)
        expected = train_step(model)
        model.set_recompute(recompute)
        ran = []
        for decoder in model.decoders:
            for block in decoder.blocks:
                block.register_forward_pre_hook(lambda block, _: ran.append(block.name))
        assert_equal_bits(train_step(model), expected)
    full = recompute.granularity == "full"
    assert [decoder.layers for decoder in model.decoders] == [
        [],
        [(0, 2)],
        [(0, 2), (2, 3)],
        [(0, 1)],
    ]
    assert len(ran) == 2 * BLOCKS * (2 if full else 1)
    if not full:
        assert all(block.recomputes for decoder in model.decoders for block in decoder.blocks)


def test_recompute_of_more_layers_than_exist_is_refused():
    model = build_model(UNTIED, split=split_at(2))
    with pytest.raises(ValueError, match="recompute-num-layers 4 exceeds the number of layers, 3"):
        model.set_recompute(Recompute(granularity="full", method="block", num_layers=4))


def test_store_buckets_follow_model_chunks():
    model = build_model(UNTIED, split=split_at(3))
    chunk_of_weight = {
        handle.name: bucket.model_chunk
        for bucket in model.store.buckets
        for handle in bucket.handles
    }
    for name, chunk in chunk_of_weight.items():
        block = int(name.split(".")[2]) if ".blocks." in name else None
        expects_chunk_0 = block < 3 if block is not None else name.startswith("embedding")
        assert chunk == (not expects_chunk_0), name
    with pytest.raises(ValueError, match=r"embedding\.weight"):
        build_model(TIED, split=split_at(3))


def test_store_units_use_global_layer_numbers(monkeypatch):
    opened = []
    plain = WeightStore.unit
    monkeypatch.setattr(WeightStore, "unit", lambda s, name: opened.append(name) or plain(s, name))
    GPTModel(UNTIED, SINGLE, split=split_at(0, 2, 5))
    assert opened == [f"decoder.layers.{layer}" for layer in (0, 1, 2, 2)]


@pytest.mark.parametrize("name", MODELS)
def test_logical_weights_need_no_memory(name: str):
    model = GPTModel(MODELS[name], SINGLE)
    shapes = logical_weights(MODELS[name])
    assert shapes == {
        box.name: box.shape
        for handle in model.store.handles.values()
        for box in model.store.boxes(handle)
    }
    assert model.num_parameters == model.store.num_parameters
    assert model.num_parameters == sum(math.prod(shape) for shape in shapes.values())
    sizes = {"num_layers": 2, "ffn_pattern": "", "hidden_size": 1 << 20, "vocab_size": 1 << 20}
    huge = dataclasses.replace(MODELS[name], **sizes)
    assert logical_weights(huge)["embedding.weight"] == (1 << 20, 1 << 20)


def test_chunk_inputs_and_end_layers_are_checked():
    tokens = step_microbatch(0).tokens
    whole, chunks = build_model(UNTIED), build_model(UNTIED, split=split_at(2))
    assert whole.decoder is whole.decoders[0]
    assert (whole.num_chunks, whole.holds_embedding, whole.holds_head) == (1, True, True)
    with pytest.raises(ValueError, match=r"2.*model\.decoders"):
        _ = chunks.decoder
    with pytest.raises(ValueError, match="chunk 0 of pipeline stage 0 starts with the embedding"):
        chunks(tokens, hidden_states=torch.zeros(chunks.boundary_shape(tokens)))
    with pytest.raises(ValueError, match="chunk 1 of pipeline stage 0 needs those of"):
        chunks(tokens, chunk=1)
    for chunk in (-1, 2):
        with pytest.raises(ValueError, match=f"chunk {chunk} of the 2 on this rank"):
            chunks(tokens, chunk=chunk)
    with pytest.raises(ValueError, match="chunk 0 of pipeline stage 0 has no head"):
        chunks.loss(tokens, tokens, torch.ones(tokens.shape))
    for split in (StageSplit(2, ((0, 2), (2, BLOCKS))), StageSplit(1, ((0, 4),))):
        with pytest.raises(
            ValueError, match=r"the split assigns [46] blocks to [12] pipeline stages"
        ):
            GPTModel(UNTIED, SINGLE, split=split)


def test_split_does_not_change_initial_values():
    expected = weight_values(GPTModel(UNTIED, SINGLE, seed=5))
    actual = weight_values(GPTModel(UNTIED, SINGLE, seed=5, split=split_at(1, 1, 4)))
    assert_all_equal(actual, expected)
