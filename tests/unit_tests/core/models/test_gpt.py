# SPDX-License-Identifier: Apache-2.0
"""GPT: configuration, names and initial values of weights, inputs, and dropout."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.context_parallel import SequenceLayout
from megatron.core.models import DecoderConfig, GPTConfig, GPTModel
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.ops.rope import RopeScaling
from megatron.core.transformer import (
    AttentionConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
    RotaryEmbedding,
)
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import microbatch
from tests.support.ranks import run_ranks

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=24,
    vocab_size=37,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=8),
    mlp=MLPConfig(ffn_hidden_size=20),
)
DROPPING = dataclasses.replace(
    CONFIG,
    hidden_dropout=0.2,
    attention=dataclasses.replace(CONFIG.attention, dropout=0.3),
)
SINGLE = ProcessGroupCollection.single()


def make_microbatch(index: int = 0):
    """Return a microbatch of 3 sequences of 8."""
    return microbatch(seed=4, dp_rank=0, index=index, batch=3, sequence=8, vocabulary=37)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(DROPPING, rope=None, tied=True, norm=NormConfig(kind="LayerNorm")),
        dataclasses.replace(
            CONFIG,
            rope=RopeConfig(
                base=5e5,
                percent=0.5,
                scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position=64),
            ),
        ),
    ],
)
def test_config_survives_a_json_round_trip(config: GPTConfig):
    text = json.dumps(config.to_json())
    assert GPTConfig.from_json(json.loads(text)) == config


def test_json_of_another_model_is_refused():
    valid = CONFIG.to_json()
    for corrupt in (
        lambda d: d.pop("mlp"),
        lambda d: d.update(experts=4),
        lambda d: d["norm"].update(kinds=1),
        lambda d: d["rope"].pop("scaling"),
        lambda d: d.update(attention=None),
    ):
        invalid = json.loads(json.dumps(valid))
        corrupt(invalid)
        with pytest.raises(ValueError, match="not the configuration of a GPT of this version"):
            GPTConfig.from_json(invalid)


def test_all_config_problems_are_reported_at_once():
    config = dataclasses.replace(
        CONFIG,
        num_layers=0,
        hidden_size=-1,
        vocab_size=2,
        hidden_dropout=1.0,
        attention=AttentionConfig(
            num_attention_heads=6, num_query_groups=4, kv_channels=8, dropout=-0.1
        ),
        mlp=MLPConfig(ffn_hidden_size=18, activation="tanh"),
        rope=RopeConfig(percent=0.4),
    )
    text = "\n".join(config.problems(tp=4))
    for message in (
        "num_layers is 0",
        "hidden_size is -1",
        "vocab_size 2 is less than tensor-model-parallel-size 4",
        "hidden-dropout 1.0 must be in [0, 1)",
        "num-query-groups 4 must divide num-attention-heads 6",
        "num-attention-heads 6 must be divisible by tensor-model-parallel-size 4",
        "attention-dropout -0.1 must be in [0, 1)",
        "activation 'tanh': use one of silu, gelu",
        "ffn-hidden-size 18 must be a positive multiple of tensor-model-parallel-size 4",
        "0.4 of 8 features per head is 3",
    ):
        assert message in text
    with pytest.raises(ValueError, match=r"num_layers is 0.*hidden_size is -1"):
        GPTModel(config, SINGLE)
    assert CONFIG.problems(tp=4) == []
    assert CONFIG.attention.problems(3) == [
        "num-attention-heads 4 must be divisible by tensor-model-parallel-size 3",
        "num-query-groups 2 must divide tensor-model-parallel-size 3 or be a multiple of it",
    ]


def test_layer_patterns_and_rates_are_checked():
    shared = {"attention": CONFIG.attention, "mlp": CONFIG.mlp, "norm": CONFIG.norm}
    for pattern, message in (
        ("", "must be one or more of"),
        ("*x-", "'x' at 2 is unknown"),
        ("*G", "'G': give the gated delta net configuration"),
        ("+-", "give the latent attention configuration, or write '\\*'"),
    ):
        with pytest.raises(ValueError, match=message):
            DecoderConfig(pattern=pattern, **shared)
    with pytest.raises(ValueError, match=r"1.0.*\[0, 1\)"):
        DecoderConfig(pattern="*", hidden_dropout=1.0, **shared)


def test_initial_values_and_parameter_counts_match_formula():
    config = dataclasses.replace(
        CONFIG, hidden_size=128, mlp=MLPConfig(ffn_hidden_size=256), init_std=0.05
    )
    model = GPTModel(config, SINGLE)
    h, d, f, v = 128, 8, 256, 37
    per_layer = 4 * d * h + 2 * 2 * d * h + 4 * d * h + 3 * f * h + 2 * h
    assert model.store.num_parameters == 2 * v * h + 2 * per_layer + h
    for name, handle in model.store.handles.items():
        weight = handle.get()
        if "norm" in name:
            equal = bool((weight == 1.0).all())
            assert equal
            continue
        scaled = name.endswith(("output.weight", "down.weight"))
        std = 0.05 / math.sqrt(2 * 2) if scaled else 0.05
        assert float(weight.std()) == pytest.approx(std, rel=0.05), name
        assert abs(float(weight.mean())) < 5 * std / math.sqrt(weight.numel())
    tied = GPTModel(dataclasses.replace(config, tied=True), SINGLE)
    assert tied.store.num_parameters == model.store.num_parameters - v * h
    assert tied.store.handles["embedding.weight"].uses == 2


def test_logits_depend_only_on_past_tokens():
    model = GPTModel(CONFIG, SINGLE)
    tokens = make_microbatch().tokens
    with torch.no_grad():
        before = model.full_logits(tokens)
        changed = tokens.clone()
        changed[:, 5] = (changed[:, 5] + 1) % 37
        after = model.full_logits(changed)
    assert torch.equal(before[:5], after[:5])
    above = bool(((before[5:] - after[5:]).abs().amax(-1) > 0).all())
    assert above


def test_documents_do_not_attend_to_each_other():
    model = GPTModel(CONFIG, SINGLE)
    short_tokens, long_tokens = make_microbatch(0).tokens[:, :3], make_microbatch(1).tokens[:, :5]
    packed = torch.cat([short_tokens, long_tokens], 1)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(3, 8)
    documents = torch.tensor([0] * 3 + [1] * 5).expand(3, 8)
    layout = SequenceLayout.of_rows(8, positions=positions, document_ids=documents)
    with torch.no_grad():
        got = model.full_logits(packed, layout=layout)
        expected = torch.cat([model.full_logits(short_tokens), model.full_logits(long_tokens)])
        unmasked = model.full_logits(packed)
    assert_close_by_metric("logits", got, expected, bound=2e-6)
    assert (unmasked - expected).abs().max() > 1e-3


def test_without_rope_positions_have_no_effect():
    model = GPTModel(dataclasses.replace(CONFIG, rope=None), SINGLE)
    tokens = torch.full((1, 6), 3)
    with torch.no_grad():
        logits = model.full_logits(tokens)
    assert_close_by_metric("logits", logits, logits[:1].expand_as(logits), bound=2e-6)


def test_dropout_needs_sample_ids_and_differs_between_samples():
    batch = make_microbatch()
    with torch.no_grad():
        model, plain = GPTModel(DROPPING, SINGLE, seed=5), GPTModel(CONFIG, SINGLE, seed=5)
        shared = (batch.tokens, batch.labels, batch.loss_mask)
        assert torch.equal(model.loss(*shared)[1], plain.loss(*shared)[1])
        layout = SequenceLayout.of_rows(8, sample_ids=torch.arange(3))
        dropped = model.loss(*shared, layout=layout)[1]
        repeated = model.loss(*shared, layout=layout)[1]
        next_samples = model.loss(*shared, layout=layout.with_samples(torch.arange(3) + 3))[1]
        seeded = GPTModel(DROPPING, SINGLE, seed=6)
        assert torch.equal(dropped, repeated)
        all_differ = ((dropped - next_samples).abs() > 0).any(1).all()
        assert all_differ
        assert not torch.equal(seeded.loss(*shared, layout=layout)[1], dropped)


def test_dropout_acts_on_embedding_blocks_and_attention():
    hidden_only = dataclasses.replace(CONFIG, hidden_dropout=0.2)
    model = GPTModel(hidden_only, SINGLE, seed=5)
    tokens = make_microbatch().tokens
    layout = SequenceLayout.of_rows(8, sample_ids=torch.arange(3))
    rope = RotaryEmbedding(RopeConfig(), 8)(layout.positions)
    with torch.no_grad():
        stream = model.embedding_dropout(model.embedding(tokens.t()), layout)
        for block in model.decoder.blocks:
            mixed = block.mixer(block.norm(stream), layout, rope=rope)
            stream = stream + block.drop(mixed, layout)
        expected = model.decoder.final_norm(stream)
        assert_close_by_metric("hidden", model(tokens, layout=layout), expected, bound=2e-6)
        attention_only = dataclasses.replace(CONFIG, attention=DROPPING.attention)
        model = GPTModel(attention_only, SINGLE, seed=5)
        assert not torch.allclose(model(tokens, layout=layout), model(tokens), rtol=1e-3)


def test_hidden_dropout_keeps_the_expectation():
    model = GPTModel(dataclasses.replace(CONFIG, hidden_dropout=0.25), SINGLE)
    samples = 400
    layout = SequenceLayout.of_rows(8, sample_ids=torch.arange(samples))
    x = torch.ones(8, samples, 24)
    for drop in (model.embedding_dropout, model.decoder.blocks[0].drop):
        out = drop(x, layout)
        nonzero = out != 0
        assert float((out[nonzero] - 1 / 0.75).abs().max()) < 1e-6
        share = nonzero.float().mean(1)  # [s, h]: every position and feature has its own draws
        assert float(share.mean()) == pytest.approx(0.75, abs=0.005)
        assert float((share - 0.75).abs().max()) < 5 * math.sqrt(0.75 * 0.25 / samples)
    outputs = [model.embedding_dropout(x, layout), model.decoder.blocks[1].drop(x, layout)]
    assert not torch.equal(*outputs), "two layers drop the same elements"


def check_indivisible_sequence(rank: int, world: int) -> None:
    """Check the error for a sequence that does not divide over tp."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    model = GPTModel(CONFIG, groups, sequence_parallel=True)
    with pytest.raises(ValueError, match="7 rows do not divide by 2 ranks"):
        model(make_microbatch().tokens[:, :7])


def test_indivisible_sequence_is_refused():
    run_ranks(check_indivisible_sequence, 2)


LEARNED = dataclasses.replace(CONFIG, rope=None, max_position_embeddings=8)


def test_positions_beyond_the_learned_ones_are_refused():
    model = GPTModel(LEARNED, SINGLE)
    tokens = make_microbatch().tokens
    model(tokens)
    layout = SequenceLayout.of_rows(8, positions=torch.arange(8).expand(3, 8) + 1)
    with pytest.raises(ValueError, match=r"position 8 exceeds the 8 learned positions"):
        model(tokens, layout=layout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rope": RopeConfig()}, "are mutually exclusive"),
        ({"mtp": MTPConfig(num_layers=1)}, "multi-token prediction"),
    ],
)
def test_invalid_learned_positions_are_refused(changes, message):
    (problem,) = dataclasses.replace(LEARNED, **changes).problems()
    assert message in problem
    assert LEARNED.problems() == []
