# SPDX-License-Identifier: Apache-2.0
"""Qwen2, Qwen3 and Qwen3-Next, dense and with experts.

Qwen3-Next's gated delta net orders the rows of its two input projections by key head: the query and
the key of a key head come before the values and gates of its value heads. Its convolution contains
all queries, then all keys, then all values.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant, unless
from megatron.core.models.layer_pattern import ATTENTION, DELTA_NET, DENSE, EXPERTS
from megatron.hf import attention_kinds, layer_types
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    ENDS,
    LAYER,
    MIXER_NORM,
    MLP,
    NORMED_ATTENTION,
    PROJECTIONS,
    QUERY_KEY_NORMS,
    AnyEntry,
    Entry,
    FusedWeight,
    attention_entries,
    experts,
    fused_experts,
    fused_weights,
    gated_shared_expert,
)
from megatron.hf.layer_types import FULL, check_layer_types, layers, uniform_layers

_TRAILING_WINDOWS = attention_kinds.window_kinds(attention_kinds.trailing_windows)
_ALTERNATING_WINDOWS = attention_kinds.window_kinds(attention_kinds.alternating_windows)
_WINDOW_ROWS = (
    *attention_kinds.rows(_TRAILING_WINDOWS),
    *attention_kinds.SWITCH,
    *attention_kinds.MAX_WINDOW_LAYERS,
)
#: Defaults of the fields of windows.
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *_WINDOW_ROWS,
        Row("", "attention.qkv_bias", constant(True)),
    ),
    read_blocks=layers(uniform_layers(DENSE), attention_kinds.mixers(_TRAILING_WINDOWS)),
    defaults=MappingProxyType({**_NO_WINDOW, "num_key_value_heads": 32}),
)
QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    blocks={ATTENTION: NORMED_ATTENTION, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        *rows.QUERY_KEY_NORMS,
        *_WINDOW_ROWS,
    ),
    read_blocks=layers(uniform_layers(DENSE), attention_kinds.mixers(_TRAILING_WINDOWS)),
    defaults=MappingProxyType({**_NO_WINDOW, "head_dim": 128}),
)
_GATED_SHARED_EXPERT = gated_shared_expert(f"{LAYER}.mlp.shared_expert")
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    blocks={
        ATTENTION: ATTENTION_ENTRIES,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, *_GATED_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*_GATED_SHARED_EXPERT)},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        Row("qkv_bias", "attention.qkv_bias", read.flag(True)),
        *rows.SPARSE_EXPERTS,
        *rows.GATED_SHARED_EXPERT,
        *attention_kinds.rows(_ALTERNATING_WINDOWS),
        *attention_kinds.SWITCH,
    ),
    read_blocks=layers(layer_types.sparse_steps, attention_kinds.mixers(_ALTERNATING_WINDOWS)),
    defaults=MappingProxyType({**_NO_WINDOW, "num_key_value_heads": 16}),
)
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    blocks={ATTENTION: NORMED_ATTENTION, DENSE: MLP, EXPERTS: experts("mlp", PROJECTIONS)},
    fused={EXPERTS: fused_experts()},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        *rows.QUERY_KEY_NORMS,
        *rows.SPARSE_EXPERTS,
        Row("sliding_window", "attention.window", read.switched_window, unless(None)),
        *attention_kinds.SWITCH,
    ),
    read_blocks=layers(layer_types.sparse_steps),
    check=check_layer_types(FULL),
    aliases=frozenset({"num_local_experts"}),
    defaults=MappingProxyType({"num_key_value_heads": 4}),
)

_GATED_ATTENTION: tuple[AnyEntry, ...] = (
    MIXER_NORM,
    FusedWeight(
        f"{LAYER}.self_attn.q_proj.weight",
        fused_weights("attention", ("query", "d"), ("gate", "d")),
        groups="a",
        inner="h",
        biased="attention_bias",
    ),
    *attention_entries(f"{LAYER}.self_attn", names=("k_proj", "v_proj", "o_proj")),
    *QUERY_KEY_NORMS,
)
_DELTA_NET_CONVOLUTION = FusedWeight(
    f"{LAYER}.linear_attn.conv1d.weight",
    fused_weights("delta_net.conv", ("query", "Q"), ("key", "Q"), ("value", "O")),
    groups="1",
    inner="1w",
)
_DELTA_NET_OUTPUT = (
    Entry(f"{LAYER}.linear_attn.A_log", "{block}.delta_net.A_log", "U", keep_dtype=True),
    Entry(f"{LAYER}.linear_attn.dt_bias", "{block}.delta_net.dt_bias", "U", keep_dtype=True),
    Entry(f"{LAYER}.linear_attn.norm.weight", "{block}.delta_net.output_norm.weight", "u"),
    Entry(f"{LAYER}.linear_attn.out_proj.weight", "{block}.delta_net.output.weight", "hO"),
)
_DELTA_NET: tuple[AnyEntry, ...] = (
    MIXER_NORM,
    FusedWeight(
        f"{LAYER}.linear_attn.in_proj_qkvz.weight",
        fused_weights("delta_net", ("query", "c"), ("key", "c"), ("value", "R"), ("gate", "R")),
        groups="K",
        inner="h",
    ),
    FusedWeight(
        f"{LAYER}.linear_attn.in_proj_ba.weight",
        fused_weights("delta_net", ("beta", "x"), ("alpha", "x")),
        groups="K",
        inner="h",
    ),
    _DELTA_NET_CONVOLUTION,
    *_DELTA_NET_OUTPUT,
)
_DELTA_NET_ROWS = (
    *rows.LAYERS,
    *rows.ROPE,
    *rows.SELF_ATTENTION,
    *rows.BIAS,
    *rows.QUERY_KEY_NORMS,
    Row("", "norm.zero_centered", constant(True)),
    Row("", "attention.output_gate", constant(True)),
    Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(0.25)),
    Row("num_hidden_layers", "", read.unread, lambda config, _: len(config.blocks) // 2),
    Row("layer_types", "", read.unread, layer_types.mixer_types),
    Row("linear_num_key_heads", "delta_net.num_key_heads", read.count),
    Row("linear_num_value_heads", "delta_net.num_value_heads", read.count),
    Row("linear_key_head_dim", "delta_net.key_channels", read.count),
    Row("linear_value_head_dim", "delta_net.value_channels", read.count),
    Row("linear_conv_kernel_dim", "delta_net.conv_width", read.count),
)
_DELTA_NET_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
QWEN3_NEXT = Architecture(
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    blocks={
        ATTENTION: _GATED_ATTENTION,
        DELTA_NET: _DELTA_NET,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, *_GATED_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*_GATED_SHARED_EXPERT)},
    ends=ENDS,
    rows=(*_DELTA_NET_ROWS, *rows.SPARSE_EXPERTS, *rows.GATED_SHARED_EXPERT),
    read_blocks=layers(layer_types.sparse_steps, layer_types.delta_net_mixers),
    check=partial(layer_types.refuse_windows, typed=False),
    defaults=MappingProxyType({**_DELTA_NET_DEFAULTS, "norm_topk_prob": True}),
    skipped_prefix="mtp.",
)

#: A gated delta net whose projections are separate.
_SPLIT_DELTA_NET: tuple[AnyEntry, ...] = (
    MIXER_NORM,
    FusedWeight(
        f"{LAYER}.linear_attn.in_proj_qkv.weight",
        fused_weights("delta_net", ("query", "Q"), ("key", "Q"), ("value", "O")),
        groups="1",
        inner="h",
    ),
    Entry(f"{LAYER}.linear_attn.in_proj_z.weight", "{block}.delta_net.gate.weight", "Oh"),
    Entry(f"{LAYER}.linear_attn.in_proj_b.weight", "{block}.delta_net.beta.weight", "Uh"),
    Entry(f"{LAYER}.linear_attn.in_proj_a.weight", "{block}.delta_net.alpha.weight", "Uh"),
    _DELTA_NET_CONVOLUTION,
    *_DELTA_NET_OUTPUT,
)
QWEN3_5 = Architecture(
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    blocks={ATTENTION: _GATED_ATTENTION, DELTA_NET: _SPLIT_DELTA_NET, DENSE: MLP},
    ends=ENDS,
    rows=_DELTA_NET_ROWS,
    read_blocks=layers(uniform_layers(DENSE), layer_types.delta_net_mixers),
    check=partial(layer_types.refuse_windows, typed=False),
    defaults=MappingProxyType({**_DELTA_NET_DEFAULTS, "num_key_value_heads": 4}),
    skipped_prefix="mtp.",
)
QWEN3_5_MOE = Architecture(
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: _GATED_ATTENTION,
        DELTA_NET: _SPLIT_DELTA_NET,
        EXPERTS: experts("mlp", PROJECTIONS, *_GATED_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*_GATED_SHARED_EXPERT)},
    ends=ENDS,
    rows=(*_DELTA_NET_ROWS, *rows.QWEN_EXPERTS, *rows.GATED_SHARED_EXPERT),
    read_blocks=layers(uniform_layers(EXPERTS), layer_types.delta_net_mixers),
    check=partial(layer_types.refuse_windows, typed=False),
    defaults=MappingProxyType(_DELTA_NET_DEFAULTS),
    skipped_prefix="mtp.",
)
