# SPDX-License-Identifier: Apache-2.0
"""The table of model flags in both directions: the options of a model rebuild the same model."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.cli.schema import build, options
from megatron.core.models import GPTConfig
from megatron.core.models.gpt_config import MTPConfig, Multipliers
from megatron.core.models.layer_pattern import (
    ATTENTION,
    ATTENTIONS,
    DELTA_NET,
    DENSE,
    EXPERTS,
    LATENT,
    MAMBA,
    SHORT_CONV,
    WINDOW,
    ffn_of,
    symbols_of,
)
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ops.rope import RopeScaling
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig
from megatron.core.transformer import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
    WindowAttentionConfig,
)
from megatron.training.config import Config
from megatron.training.config.check import check
from megatron.training.config.model_table import MODEL, gpt_config, model_options, yarn_magnitude
from megatron.training.config.resolve import resolve

RUN = {
    "seq-length": 16,
    "max-position-embeddings": 16,
    "micro-batch-size": 1,
    "train-iters": 1,
    "lr": 1e-3,
    "mock-data": True,
}

#: Clamp and offset of a gate.
GATE_LIMITS = st.sampled_from([{}, {"clamp": 7.0, "linear_offset": 1.0}])
RATES = st.sampled_from([0.0, 0.1, 0.25])
SIZES = st.integers(1, 99)

DELTA_NETS = st.builds(
    GatedDeltaNetConfig,
    num_key_heads=st.sampled_from([1, 2]),
    num_value_heads=st.sampled_from([2, 4]),
    key_channels=SIZES,
    value_channels=SIZES,
    conv_width=st.integers(1, 4),
)
MULTIPLIERS = st.sampled_from(
    [
        Multipliers(),
        Multipliers(embedding=12.0, residual=0.22, logits=0.125),
        Multipliers(embedding=5.5, rounds_embedding=True, logits_softcap=30.0),
        Multipliers(attention=0.5, mamba=2.0, mlp=0.25),
    ]
)
MAMBAS = st.builds(
    Mamba2Config,
    num_heads=st.just(12),
    head_channels=SIZES,
    state_channels=SIZES,
    num_groups=st.sampled_from([1, 2, 3]),
    conv_width=st.integers(1, 4),
    conv_bias=st.booleans(),
    bias=st.booleans(),
    norm_groups=st.sampled_from([1, 4, 6]),
    dt_limit=st.sampled_from([(0.0, math.inf), (0.1, math.inf), (0.0, 0.5)]),
    norm=st.booleans(),
    multipliers=st.sampled_from([None, (0.5, 1.0, 2.0, 1.0, 3.0)]),
)
SHORT_CONVS = st.builds(ShortConvConfig, conv_width=st.integers(1, 4), bias=st.booleans())


@st.composite
def ropes(draw: st.DrawFn, *, latent: bool) -> RopeConfig:
    """Draw rotary positions."""
    kind, factor, scaling = draw(st.sampled_from(["", "linear", "llama3", "yarn"])), 0.0, None
    if kind:
        factor = draw(st.floats(1.5, 64.0))
        scaling = RopeScaling(kind=kind, factor=factor, original_max_position=draw(SIZES))
    if kind == "linear":
        scaling = RopeScaling(kind=kind, factor=factor)
    if kind == "llama3":
        high = draw(st.sampled_from([8.0, 16.0]))
        scaling = dataclasses.replace(scaling, low_freq_factor=0.5, high_freq_factor=high)
    if kind == "yarn":
        grows = st.floats(0.5, 2.0) if latent else st.none() | st.floats(0.5, 2.0)
        scaling = dataclasses.replace(
            scaling,
            beta_fast=16.5,
            beta_slow=1.25,
            attention_factor=draw(grows),
            truncate=draw(st.booleans()),
        )
    beta = draw(st.sampled_from([0.0, 0.3]))
    return RopeConfig(
        base=draw(st.floats(1.5, 1e7)),
        percent=draw(st.sampled_from([0.5, 1.0])),
        interleaved=draw(st.booleans()),
        scaling=scaling,
        query_scale_beta=beta,
        query_scale_length=draw(SIZES) if beta else 8192,
    )


@st.composite
def experts(draw: st.DrawFn, **activation: Any) -> MoEConfig:
    """Draw a mixture of experts, including options that only training uses."""
    limited, shared, capacity = draw(st.booleans()), draw(st.none() | SIZES), draw(st.booleans())
    topk, biased = draw(st.integers(2, 4)), draw(st.booleans())
    groups = draw(st.integers(2, 4)) if limited else None
    coefficient, has_biases = draw(RATES), draw(st.booleans())
    normalizes = draw(st.booleans())
    router = RouterConfig(
        topk=topk,
        score_function=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalize=normalizes,
        norm_min=draw(st.sampled_from([0.0, 0.5])) if normalizes else 0.0,
        scaling_factor=draw(st.floats(0.1, 9.0)),
        num_groups=None if groups is None else 4,
        group_topk=groups,
        group_candidates=topk if groups is None else draw(st.integers(1, 4)),
        expert_bias=biased,
        bias_update_rate=draw(st.sampled_from([1e-3, 1e-2])) if biased else 1e-3,
        balance=draw(st.sampled_from(["aux_loss", "seq_aux_loss"])) if coefficient else "none",
        aux_loss_coeff=coefficient,
        z_loss_coeff=draw(RATES),
        jitter=draw(RATES),
        bias=has_biases,
    )
    return MoEConfig(
        num_experts=16,
        ffn_hidden_size=draw(SIZES),
        router=router,
        **activation,
        bias=has_biases,
        capacity_factor=1.5 if capacity else None,
        drop_policy=draw(st.sampled_from(["probs", "position"])) if capacity else "probs",
        shared_ffn_hidden_size=shared,
        shared_gate=shared is not None and draw(st.booleans()),
    )


@st.composite
def activations(draw: st.DrawFn, *, has_ffn: bool) -> dict[str, Any]:
    """Draw the activation of MLPs and experts."""
    if not has_ffn:
        return {"gated": False, "activation": "gelu"}
    kinds = {True: ["silu", "quick_gelu", "gelu"], False: ["gelu", "gelu_tanh", "squared_relu"]}
    is_gated = draw(st.booleans())
    limits = draw(GATE_LIMITS) if is_gated else {}
    return {"gated": is_gated, "activation": draw(st.sampled_from(kinds[is_gated])), **limits}


def of_blocks(multipliers: Multipliers, symbols: set[str]) -> Multipliers:
    """Return factors, 1 on the outputs of blocks that a model does not have."""
    return dataclasses.replace(
        multipliers,
        attention=multipliers.attention if symbols & set(ATTENTIONS) else 1.0,
        mamba=multipliers.mamba if MAMBA in symbols else 1.0,
        mlp=multipliers.mlp if DENSE in symbols else 1.0,
    )


@st.composite
def patterns(draw: st.DrawFn, *, latent: bool, may_have_experts: bool) -> tuple[str, str, int]:
    """Draw the pattern of a model and of its MTP layers, and the number of MTP layers."""
    attention = LATENT if latent else ATTENTION
    mixers = st.sampled_from([attention] if latent else [attention, WINDOW])
    ffn_blocks = st.sampled_from([DENSE, EXPERTS] if may_have_experts else [DENSE])
    gpt = st.lists(st.tuples(mixers, ffn_blocks).map("".join), min_size=1, max_size=4).map("".join)
    any_block = mixers | ffn_blocks | st.sampled_from([DELTA_NET, MAMBA, SHORT_CONV])
    hybrid = st.lists(any_block, min_size=1, max_size=5).map("".join)
    blocks, depths = draw(gpt | hybrid), draw(st.integers(0, 2))
    depth = "" if not depths else draw(gpt.map(lambda text: text[:2]))
    if WINDOW not in blocks or ATTENTION not in blocks:  # one kind of attention is `*`
        blocks, depth = blocks.replace(WINDOW, ATTENTION), depth.replace(WINDOW, ATTENTION)
    if not depths and len(blocks) > 1 and draw(st.booleans()):  # parallel blocks
        blocks = f"({blocks[:2]}){blocks[2:]}"
    return blocks, depth, depths


@st.composite
def models(draw: st.DrawFn) -> GPTConfig:
    """Draw a model that flags can describe, with any blocks and block options."""
    latent, may_have_experts = draw(st.booleans()), draw(st.booleans())
    attention = LATENT if latent else ATTENTION
    blocks, depth, depths = draw(patterns(latent=latent, may_have_experts=may_have_experts))
    ffn = ffn_of(blocks)
    if ffn is not None and depth == blocks[-2:]:
        depth = ""  # the default pattern of MTP layers
    block_types = set(blocks + depth)
    attends = attention in block_types
    activation = draw(activations(has_ffn=bool(block_types & {DENSE, EXPERTS})))
    has_experts = EXPERTS in block_types
    biased = not (latent or has_experts) and draw(st.booleans())
    rope = draw(ropes(latent=latent)) if attends and (latent or draw(st.booleans())) else None
    shape = draw(attentions(latent=latent, rope=rope)) if attends else None
    if WINDOW in block_types:
        pattern = "" if ffn is None else blocks[::2]
        in_pattern = ffn is None or bool(depth)
        shape = draw(two_kinds(shape, rope=rope, pattern=pattern, in_pattern=in_pattern))
    return GPTConfig(
        num_layers=len(symbols_of(blocks) if ffn is None else ffn),
        hidden_size=96,
        vocab_size=draw(st.integers(1, 999_999)),
        attention=shape,
        mlp=MLPConfig(ffn_hidden_size=draw(SIZES), bias=biased, **activation)
        if ffn is not None or DENSE in block_types
        else None,
        norm=draw(norms(of_projection=getattr(shape, "qk_norm_scope", "") == "projection")),
        rope=rope,
        tied=draw(st.booleans()),
        hidden_dropout=draw(RATES),
        init_std=draw(st.floats(1e-4, 1.0)),
        moe=draw(experts(**activation)) if has_experts else None,
        ffn_pattern=ffn or "",
        mtp=MTPConfig(
            num_layers=depths, loss_factor=draw(st.sampled_from([0.1, 0.3])), pattern=depth
        )
        if depths
        else None,
        pattern=blocks if ffn is None else "",
        multipliers=of_blocks(draw(MULTIPLIERS), block_types),
        max_position_embeddings=draw(st.none() | st.integers(16, 64))
        if rope is None and not (latent or depths)
        else None,
        delta_net=draw(DELTA_NETS) if DELTA_NET in block_types else None,
        mamba=draw(MAMBAS) if MAMBA in block_types else None,
        short_conv=draw(SHORT_CONVS) if SHORT_CONV in block_types else None,
    )


@st.composite
def norms(draw: st.DrawFn, *, of_projection: bool) -> NormConfig:
    """Draw norms; whole query and key projections have RMSNorm."""
    kind = "RMSNorm" if of_projection else draw(st.sampled_from(["RMSNorm", "LayerNorm"]))
    return NormConfig(
        kind=kind,
        bias=kind == "RMSNorm" or draw(st.booleans()),
        epsilon=draw(st.floats(1e-9, 1e-2)),
        zero_centered=draw(st.booleans()),
        placement=draw(st.sampled_from(["pre", "post", "both"])),
    )


@st.composite
def two_kinds(
    draw: st.DrawFn,
    attention: AttentionConfig,
    *,
    rope: RopeConfig | None,
    pattern: str,
    in_pattern: bool,
) -> AttentionConfig:
    """Draw two kinds of attention: they differ in their window or in their positions."""
    rotary = rope is None or draw(st.booleans())
    differs_in_window = in_pattern or rotary or draw(st.booleans())
    window, second_rope = draw(st.none() | SIZES), None
    if differs_in_window:
        attention, window = dataclasses.replace(attention, window=None), draw(SIZES)
    else:
        attention = dataclasses.replace(attention, window=window)
    if rope is not None and rotary and draw(st.booleans()):
        second_rope = dataclasses.replace(rope, base=rope.base + 1.0)
    if rope is not None and rotary and rope.scaling is not None and draw(st.booleans()):
        second_rope = dataclasses.replace(second_rope or rope, scaling=None)
    second = WindowAttentionConfig(
        window=window, sinks=draw(st.booleans()), rotary=rotary, rope=second_rope, pattern=pattern
    )
    return dataclasses.replace(attention, second=second)


@st.composite
def attentions(
    draw: st.DrawFn, *, latent: bool, rope: RopeConfig | None
) -> AttentionConfig | LatentAttentionConfig:
    """Draw attention that fits the positions."""
    if not latent:
        qk_norm = draw(st.booleans())
        return AttentionConfig(
            num_attention_heads=12,
            num_query_groups=draw(st.sampled_from([1, 3, 12])),
            kv_channels=4 * draw(SIZES),
            qkv_bias=draw(st.booleans()),
            output_bias=draw(st.booleans()),
            qk_norm=qk_norm,
            qk_norm_scope=draw(st.sampled_from(["head", "projection"])) if qk_norm else "head",
            dropout=draw(RATES),
            window=draw(st.none() | SIZES),
            sinks=draw(st.booleans()),
            output_gate=draw(st.booleans()),
            softmax_scale=draw(st.sampled_from([None, 0.0625])),
            softcap=draw(st.sampled_from([None, 50.0])),
        )
    scaling, scale = None if rope is None else rope.scaling, 1.0
    if scaling is not None and scaling.kind == "yarn":
        scale = yarn_magnitude(scaling.factor, draw(st.sampled_from([0.0, 0.7, 1.0]))) ** 2
    return LatentAttentionConfig(
        num_attention_heads=12,
        q_lora_rank=draw(st.none() | SIZES),
        kv_lora_rank=draw(SIZES),
        nope_channels=draw(SIZES),
        rope_channels=4 * draw(SIZES),
        value_channels=draw(SIZES),
        dropout=draw(RATES),
        scale_factor=scale,
    )


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(model=models())
def test_model_options_rebuild_the_model(model: GPTConfig) -> None:
    assert model.problems() == []
    config = build(Config, {**RUN, **model_options(model)})
    assert check(config, 1) == []
    resolved = resolve(config, 1).config
    assert resolved.tokenizer.vocab_size is not None
    assert gpt_config(resolved, resolved.tokenizer.vocab_size) == model
    # Derived values change nothing when they are passed explicitly.
    assert gpt_config(resolve(resolved, 1).config, model.vocab_size) == model


def test_every_model_option_has_a_row() -> None:
    """`mscale` has no row: it is a single option together with `mscale-all-dim`."""
    sections = ("model", "attention", "position", "experts", "hybrid")
    names = {option.name for option in options(Config) if option.section in sections}
    assert names - {row.name for row in MODEL.rows} == {"mscale"}


#: Fields of the core without a row: fields that a kind of RoPE scaling does not use, and a
#: classification head, which only Hugging Face folders have.
WITHOUT_ROW = {
    "": {"num_labels"},
    "linear": {
        *("original_max_position", "beta_fast", "beta_slow"),
        *("low_freq_factor", "high_freq_factor", "attention_factor", "truncate"),
    },
    "llama3": {"beta_fast", "beta_slow", "attention_factor", "truncate"},
    "yarn": {"low_freq_factor", "high_freq_factor"},
}


@pytest.mark.parametrize("name", MODEL.sections)
def test_every_core_config_field_has_a_row(name: str) -> None:
    """A field without a row would keep its default, whatever the options are."""
    section = MODEL.sections[name]
    module, _, kind = section.kind.partition(":")
    config_class = getattr(importlib.import_module(f"megatron.core.{module}"), kind)
    row_paths = [row.path.rpartition(".") for row in MODEL.rows]
    covered = {target for prefix, _, target in row_paths if prefix == name} | section.fixed.keys()
    row_paths = [subsection.at.rpartition(".") for subsection in MODEL.sections.values()]
    covered |= {target for prefix, _, target in row_paths if prefix == section.at}
    assert {f.name for f in dataclasses.fields(config_class)} - covered == WITHOUT_ROW.get(
        name, set()
    )
