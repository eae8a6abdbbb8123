# SPDX-License-Identifier: Apache-2.0
"""Layer patterns: symbols, parsing, and refused patterns."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron.core import ProcessGroupCollection
from megatron.core.models import GPTConfig, GPTModel, Pattern
from megatron.core.models.gpt import logical_weights
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.models.layer_pattern import (
    StageSplit,
    even_problems,
    ffn_of,
    layer_blocks,
    layer_pattern_problems,
    pattern_problems,
    symbol_problems,
)
from megatron.core.moe import MoEConfig
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig, MLPConfig

DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_channels=4, value_channels=6)
MAMBA = Mamba2Config(num_heads=4, head_channels=6, state_channels=5, num_groups=2)
HYBRID = GPTConfig(
    num_layers=7,
    hidden_size=24,
    vocab_size=31,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=20),
    moe=MoEConfig(num_experts=4, ffn_hidden_size=10),
    pattern="G-ME*-M",
    delta_net=DELTA,
    mamba=MAMBA,
    mtp=MTPConfig(num_layers=2, pattern="*EG-"),
)


@pytest.mark.parametrize(
    ("text", "main", "further", "depths"),
    [
        ("G-*-", "G-*-", "", 0),
        ("G-|*-", "G-|*-", "", 0),
        ("G-*-/", "G-*-", "", 0),
        ("G-*-/*-", "G-*-", "*-", 1),
        ("||M-|/+E/+E/+E", "||M-|", "+E", 3),
        ("G-*-//*-", "G-*-", "*-", 1),
        ("(M*)-|(*-)", "(M*)-|(*-)", "", 0),
    ],
)
def test_layer_pattern_is_parsed(text, main, further, depths):
    assert layer_pattern_problems(text) == []
    assert Pattern.parse(text) == Pattern(main, further, depths)
    assert Pattern.parse(text).blocks == main.replace("|", "")


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ["'' must be one or more of '*' (attention)"]),
        ("||", ["'||' must be one or more"]),
        ("/*-", ["'' must be one or more"]),
        ("G-x-y", ["'x' at 3 is unknown", "'y' at 5 is unknown"]),
        ("GD", ["'D' at 2 would be sparse attention, which is not supported"]),
        ("g", ["'g' at 1 is unknown: use '*' (attention), 'W' (window attention), '+'"]),
        ("*-+-", ["has both '*' and '+'"]),
        ("*-/+-", ["'*-/+-' has both '*' and '+'"]),
        ("G-/*|-", ["'|' after a '/' in '*|-': multi-token prediction is in the last pipeline"]),
        ("G-/*-/*E", ["the blocks after each '/' differ (*-, *E)"]),
        ("G-/x", ["layer pattern 'x': 'x' at 1 is unknown"]),
        ("(*-", ["parentheses must be balanced"]),
        (")*-(", ["parentheses must be balanced"]),
        ("((*-)-)", ["parentheses must be balanced and not nested"]),
        ("(*)-()", ["'(*)' must have two blocks", "'()' must have two blocks"]),
        ("(*|-)", ["'(*|-)' must have two blocks or more, and no '|'"]),
        ("*-/(*-)", ["parallel blocks in '(*-)': multi-token prediction has none"]),
    ],
)
def test_invalid_patterns_are_reported(text, messages):
    problems = layer_pattern_problems(text)
    assert len(problems) == len(messages), problems
    for message, problem in zip(messages, problems, strict=True):
        assert message in problem


def test_only_attention_ffn_pairs_are_a_gpt_pattern():
    assert ffn_of("*-*E*-") == "-E-"
    assert ffn_of("+-+E") == "-E"
    for pattern in ("", "*", "**", "-*", "(*-)", "*-(*-)", "*-*", "G-*-", "*-+-", "*EE", "M-"):
        assert ffn_of(pattern) is None


def test_layer_is_a_mixer_block_with_its_ffn_block():
    assert layer_blocks("*-**--") == [(0, 2), (2, 3), (3, 5), (5, 6)]
    assert layer_blocks("(M*)-(*-)(*E)-") == [(0, 3), (3, 5), (5, 8)]
    assert layer_blocks("G-MEM+E-E") == [(0, 2), (2, 4), (4, 5), (5, 7), (7, 8), (8, 9)]


def test_stages_of_a_hybrid_are_counted_in_blocks():
    split = StageSplit.from_pattern("G-M|*-|M-|", 4)
    assert (split.ranges, split.describe()) == (((0, 3), (3, 5), (5, 7), (7, 7)), "3|2|2|0 blocks")
    virtual = StageSplit.from_pattern("G-|M*|-M|-", 2)
    assert (virtual.chunks, virtual.describe()) == (2, "2+2|2+1 blocks")
    assert StageSplit.even(6, 2, layer_blocks=1).ranges == ((0, 3), (3, 6))
    assert StageSplit.even(6, 2, layer_blocks=1).describe() == "3|3 blocks"
    assert pattern_problems("G-M|*-|M-|", 3) == [
        "layer pattern 'G-M|*-|M-|' has 4 stages for 3 pipeline ranks: write a multiple of 3, "
        "separated by '|' (a stage may be empty)"
    ]
    (problem,) = even_problems(7, 2, layer_blocks=1)
    assert problem.startswith("7 blocks do not divide over 2 virtual pipeline stages")
    assert "by '|' in the layer pattern" in problem


def test_stages_divide_no_parallel_blocks():
    pattern = "(M*)-(M*)-"
    assert StageSplit.balanced(pattern, 2).ranges == ((0, 3), (3, 6))
    assert StageSplit.from_pattern("(M*)|-(M*)-|", 3).ranges == ((0, 2), (2, 6), (6, 6))
    assert StageSplit.even(6, 2, layer_blocks=1).divided_groups(pattern) == []
    thirds = StageSplit.even(6, 3, layer_blocks=1)
    assert thirds.divided_groups(pattern) == ["(M*)"]
    config = dataclasses.replace(
        HYBRID, num_layers=6, pattern=pattern, mtp=None, moe=None, delta_net=None
    )
    assert config.problems() == []
    assert GPTConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    cut = StageSplit.even(6, 1, chunks=6, layer_blocks=1)
    with pytest.raises(ValueError, match=r"divide the parallel blocks \(M\*\)"):
        GPTModel(config, ProcessGroupCollection.single(), split=cut)


def test_weight_names_use_block_index_and_all_are_counted():
    names = logical_weights(HYBRID)
    mixers = {".".join(name.split(".")[:4]) for name in names if name.startswith("decoder.blocks")}
    kinds = ["delta_net", "mlp", "mamba", "moe", "attention", "mlp", "mamba"]
    assert {f"decoder.blocks.{i}.{kind}" for i, kind in enumerate(kinds)} <= mixers
    for mtp_layer in (0, 1):
        for block in ("0.attention", "1.moe", "2.delta_net", "3.mlp"):
            assert any(n.startswith(f"mtp.{mtp_layer}.decoder.blocks.{block}.") for n in names)
    assert HYBRID.router_names == tuple(n[: -len(".weight")] for n in names if "router.weight" in n)
    assert len(HYBRID.router_names) == 3


def test_output_projection_init_scales_with_block_count():
    config = dataclasses.replace(HYBRID, hidden_size=96, init_std=0.05)
    model = GPTModel(config, ProcessGroupCollection.single())
    inner = model.store.handles["decoder.blocks.1.mlp.down.weight"].get()
    assert inner.std().item() == pytest.approx(0.05 / 7**0.5, rel=0.06)  # from 1,920 normal numbers


def test_json_round_trip_and_json_of_an_older_version():
    text = json.dumps(HYBRID.to_json(), allow_nan=False)
    assert GPTConfig.from_json(json.loads(text)) == HYBRID
    bounded = dataclasses.replace(MAMBA, dt_limit=(0.001, 0.1))
    bounded_config = dataclasses.replace(HYBRID, mamba=bounded)
    assert GPTConfig.from_json(json.loads(json.dumps(bounded_config.to_json()))) == bounded_config
    plain = GPTConfig(
        num_layers=2,
        hidden_size=24,
        vocab_size=31,
        attention=HYBRID.attention,
        mlp=HYBRID.mlp,
    )
    older = plain.to_json()
    for name in ("pattern", "delta_net", "mamba", "mtp"):
        del older[name]
    assert GPTConfig.from_json(older) == plain
    assert GPTConfig.from_json({**older, "mtp_num_layers": 0, "mtp_loss_factor": 0.1}) == plain
    flat = {"mtp_num_layers": 2, "mtp_loss_factor": 0.1, "mtp_pattern": "*EG-"}
    hybrid = {name: value for name, value in HYBRID.to_json().items() if name != "mtp"}
    assert GPTConfig.from_json(hybrid | flat) == HYBRID


def test_removing_mtp_removes_experts_used_only_by_mtp():
    config = dataclasses.replace(HYBRID, pattern="G-M-*-M")
    assert config.problems() == []
    without_mtp = config.without_further_prediction()
    assert (
        without_mtp.moe,
        without_mtp.mtp,
        without_mtp.problems(),
    ) == (
        None,
        None,
        [],
    )
    assert HYBRID.without_further_prediction().moe == HYBRID.moe


LATENT = LatentAttentionConfig(
    num_attention_heads=4,
    q_lora_rank=None,
    kv_lora_rank=8,
    nope_channels=4,
    rope_channels=4,
    value_channels=6,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta_net": None}, "has 'G': give the gated delta net configuration"),
        ({"mamba": None}, "has 'M': give the Mamba-2 configuration"),
        ({"mlp": None}, "has '-': give the MLP configuration"),
        ({"moe": None}, "layers with experts need num-experts"),
        ({"attention": None, "rope": None}, "has '\\*': give the attention configuration"),
        ({"attention": LATENT}, "has '\\*': attention is latent: write '\\+'"),
        ({"pattern": "G-ME+-M", "mtp": MTPConfig(num_layers=1, pattern="+EG-")},
         "give the latent attention configuration"),
        ({"num_layers": 6}, "7.*num_layers.*6"),
        ({"ffn_pattern": "-"}, "ffn_pattern"),
        ({"mtp": MTPConfig(num_layers=2)}, "2 multi-token prediction layers with the blocks ''"),
        ({"pattern": "M", "num_layers": 1, "attention": None, "mtp": None,
          "moe": None}, "rotary positions without attention: leave rope out"),
    ],
)  # fmt: skip
def test_pattern_without_matching_shapes_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTModel(dataclasses.replace(HYBRID, **changes), ProcessGroupCollection.single())
    assert HYBRID.problems() == []


def test_recurrent_shapes_are_checked_against_the_ranks():
    assert HYBRID.problems(tp=2) == []
    problems = HYBRID.problems(tp=1, cp=4, linear_mode="headwise")
    assert len(problems) == 1, problems
    assert (
        "2 key heads of a rank do not divide over 4 context parallel ranks: use seg" in problems[0]
    )
    assert symbol_problems(HYBRID.pattern) == []
