# SPDX-License-Identifier: Apache-2.0
"""A model cut into chunks in one process: everywhere, in both precisions, with recompute."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from megatron.core.models.gpt import GPTModel, logical_weights
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer import Recompute
from megatron.core.weight_gather import WeightStore
from tests.support.closeness import relative_error
from tests.support.inputs import one_thread
from tests.unit_tests.core.models.chunk_steps import (
    LAYERS,
    MODELS,
    TIED,
    UNTIED,
    built,
    data,
    trained,
    values,
)

BLOCKS = 2 * LAYERS
ALONE = dataclasses.replace(TIED, tied=False)
SINGLE = ProcessGroupCollection.single()


def at(*cuts: int) -> StageSplit:
    """Cut one stage's blocks in front of these."""
    return StageSplit(1, tuple(itertools.pairwise((0, *cuts, BLOCKS))))


def assert_equal_bits(got: tuple[list, dict], wanted: tuple[list, dict]) -> None:
    """Compare losses, losses of tokens and gradients."""
    for (loss, nll), (whole_loss, whole_nll) in zip(got[0], wanted[0], strict=True):
        assert torch.equal(loss, whole_loss)
        assert torch.equal(nll, whole_nll)
    assert got[1].keys() == wanted[1].keys()
    for key, gradient in wanted[1].items():
        assert gradient.abs().max() > 0, key
        assert torch.equal(got[1][key], gradient), key


@pytest.mark.parametrize("config", [UNTIED, ALONE], ids=["rms", "layer"])
def test_a_cut_anywhere_keeps_every_bit(config):
    with one_thread():
        wanted = trained(built(config))
        splits = [at(cut) for cut in range(BLOCKS + 1)]
        splits += [at(0, 1, 2, 3, 4, 5, 6), at(3, 3, 3), at(0, 0), at(6, 6), at(1, 5)]
        for split in splits:
            model = built(config, split=split)
            assert [len(decoder.blocks) for decoder in model.decoders] == [
                last - first for first, last in split.ranges
            ]
            assert_equal_bits(trained(model), wanted)


def test_bf16_stage_boundary_rounds_gradient_exactly_once():
    with one_thread():
        losses, gradients = trained(built(UNTIED, dtype=torch.bfloat16))
        cut_losses, cut_gradients = trained(
            built(UNTIED, dtype=torch.bfloat16, split=at(1, 2, 3, 4, 5))
        )
        exact = trained(built(UNTIED))[1]
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
def test_recompute_takes_the_layers_that_a_chunk_has(recompute: Recompute):
    split = at(0, 2, 5)  # nothing, a layer, one and a half, half a layer
    with one_thread():
        model = built(UNTIED, split=split)
        wanted = trained(model)
        model.set_recompute(recompute)
        ran = []
        for decoder in model.decoders:
            for block in decoder.blocks:
                block.register_forward_pre_hook(lambda block, _: ran.append(block.name))
        assert_equal_bits(trained(model), wanted)
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


def test_more_layers_to_recompute_than_the_model_has_are_refused():
    model = built(UNTIED, split=at(2))
    with pytest.raises(ValueError, match="recompute-num-layers 4 exceeds the number of layers, 3"):
        model.set_recompute(Recompute(granularity="full", method="block", num_layers=4))


def test_chunks_are_parts_of_the_store():
    model = built(UNTIED, split=at(3))
    parts = {
        handle.name: bucket.model_chunk
        for bucket in model.store.buckets
        for handle in bucket.handles
    }
    for name, part in parts.items():
        block = int(name.split(".")[2]) if ".blocks." in name else None
        first = block < 3 if block is not None else name.startswith("embedding")
        assert part == (not first), name
    with pytest.raises(ValueError, match=r"embedding\.weight.*in one model chunk"):
        built(TIED, split=at(3))


def test_layers_are_units_of_the_whole_models_number(monkeypatch):
    opened = []
    plain = WeightStore.unit
    monkeypatch.setattr(WeightStore, "unit", lambda s, name: opened.append(name) or plain(s, name))
    GPTModel(UNTIED, SINGLE, split=at(0, 2, 5))
    assert opened == [f"decoder.layers.{layer}" for layer in (0, 1, 2, 2)]


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_a_whole_model_need_no_memory(name: str):
    model = GPTModel(MODELS[name], SINGLE)
    found = logical_weights(MODELS[name])
    assert found == {
        box.name: box.shape
        for handle in model.store.handles.values()
        for box in model.store.boxes(handle)
    }
    assert model.num_parameters == model.store.num_parameters
    assert model.num_parameters == sum(math.prod(shape) for shape in found.values())
    sizes = {"num_layers": 2, "ffn_pattern": "", "hidden_size": 1 << 20, "vocab_size": 1 << 20}
    huge = dataclasses.replace(MODELS[name], **sizes)
    assert logical_weights(huge)["embedding.weight"] == (1 << 20, 1 << 20)


def test_what_a_chunk_needs_and_has():
    tokens = data(0).tokens
    whole, chunks = built(UNTIED), built(UNTIED, split=at(2))
    assert whole.decoder is whole.decoders[0]
    assert (whole.num_chunks, whole.holds_embedding, whole.holds_head) == (1, True, True)
    with pytest.raises(ValueError, match=r"this rank has 2 chunks: use model\.decoders"):
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
            ValueError, match=r"the split cuts [46] blocks for [12] pipeline stages"
        ):
            GPTModel(UNTIED, SINGLE, split=split)


def test_a_cut_changes_no_initial_value():
    wanted = values(GPTModel(UNTIED, SINGLE, seed=5))
    found = values(GPTModel(UNTIED, SINGLE, seed=5, split=at(1, 1, 4)))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
