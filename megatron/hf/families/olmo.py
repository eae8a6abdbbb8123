# SPDX-License-Identifier: Apache-2.0
"""Models with norms of outputs or of whole query and key projections: OLMo 2 and 3, OLMoE,
EXAONE 4, GLM-4-0414 and MiniMax-M2."""

from __future__ import annotations

from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import ATTENTION, DENSE, EXPERTS
from megatron.hf import attention_kinds
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    ENDS,
    GATE_UP_MLP,
    LAYER,
    MLP_PROJECTIONS,
    PROJECTIONS,
    QUERY_KEY_NORMS,
    SELF_ATTENTION,
    Entry,
    experts,
    fused_experts,
    output_norm,
    query_key_norms,
)
from megatron.hf.layer_types import layers, refuse_windows, uniform_layers

_PROJECTION_NORMS = query_key_norms(sizes=("n", "g"))
_QK_NORM_ROWS = (
    *rows.QUERY_KEY_NORMS,
    Row("", "attention.qk_norm_scope", constant("projection")),
)
_OUTPUT_NORMS = (Row("", "norm.placement", constant("post")),)
_MIXER_OUTPUT_NORM = output_norm("post_attention_layernorm")
_OUTPUT_NORMED_MLP = (*MLP_PROJECTIONS, output_norm("post_feedforward_layernorm"))
_OLMO_BLOCKS = {
    ATTENTION: (*SELF_ATTENTION, *_PROJECTION_NORMS, _MIXER_OUTPUT_NORM),
    DENSE: _OUTPUT_NORMED_MLP,
}
OLMO2 = Architecture(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    blocks=_OLMO_BLOCKS,
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        *_QK_NORM_ROWS,
        *_OUTPUT_NORMS,
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType({"rms_norm_eps": 1e-5}),
)
OLMO3 = Architecture(
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    blocks=_OLMO_BLOCKS,
    ends=ENDS,
    has_ropes_of_types=True,
    rows=(
        *rows.LAYERS,
        *rows.ROPES_OF_TYPES,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(None), read.unwritten),
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        *_QK_NORM_ROWS,
        *_OUTPUT_NORMS,
        *attention_kinds.rows(attention_kinds.olmo3_kinds),
    ),
    read_blocks=layers(uniform_layers(DENSE), attention_kinds.mixers(attention_kinds.olmo3_kinds)),
    defaults=MappingProxyType({"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096}),
)
OLMOE = Architecture(
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: (*ATTENTION_ENTRIES, *_PROJECTION_NORMS),
        EXPERTS: experts("mlp", PROJECTIONS),
    },
    fused={EXPERTS: fused_experts()},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.WHOLE_WIDTH_ATTENTION,
        *rows.BIAS,
        *_QK_NORM_ROWS,
        Row("clip_qkv", "", read.must_be(None), constant(None)),
        Row("num_experts", "moe.num_experts", read.count_of("num_experts", "num_local_experts")),
        Row("intermediate_size", "moe.ffn_hidden_size", read.count),
        Row("num_experts_per_tok", "router.topk", read.count),
        Row("norm_topk_prob", "router.normalize", read.flag(False)),
    ),
    read_blocks=layers(uniform_layers(EXPERTS)),
    check=refuse_windows,
    aliases=frozenset({"num_local_experts"}),
    defaults=MappingProxyType({"rms_norm_eps": 1e-5, "num_experts_per_tok": 8}),
)
EXAONE4 = Architecture(
    model_type="exaone4",
    class_name="Exaone4ForCausalLM",
    blocks={
        ATTENTION: (*SELF_ATTENTION, *QUERY_KEY_NORMS, _MIXER_OUTPUT_NORM),
        DENSE: _OUTPUT_NORMED_MLP,
    },
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.QUERY_KEY_NORMS,
        *_OUTPUT_NORMS,
        Row("sliding_window", "", read.unread, constant(None)),  # its absence is a window
        *attention_kinds.rows(attention_kinds.rotary_windows),
    ),
    read_blocks=layers(
        uniform_layers(DENSE), attention_kinds.mixers(attention_kinds.rotary_windows)
    ),
    aliases=frozenset({"sliding_window_pattern"}),
    defaults=MappingProxyType(
        {
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        }
    ),
)
GLM4 = Architecture(
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    blocks={
        ATTENTION: (*ATTENTION_ENTRIES, output_norm("post_self_attn_layernorm")),
        DENSE: (*GATE_UP_MLP, output_norm("post_mlp_layernorm")),
    },
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(0.5)),
        Row("", "rope.interleaved", constant(True)),
        *rows.SELF_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", read.flag(True)),
        Row("", "norm.placement", constant("both")),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType(
        {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
    ),
)
_ROUTER_BIAS = "e_score_correction_bias", "{block}.moe.router.expert_bias", "E"
MINIMAX_M2 = Architecture(
    model_type="minimax_m2",
    class_name="MiniMaxM2ForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: (*ATTENTION_ENTRIES, *_PROJECTION_NORMS),
        EXPERTS: experts(
            "block_sparse_moe",
            ("w1", "w3", "w2"),
            Entry(f"{LAYER}.block_sparse_moe.{_ROUTER_BIAS[0]}", *_ROUTER_BIAS[1:], fp32=True),
        ),
    },
    fused={
        EXPERTS: fused_experts(
            Entry(f"{LAYER}.mlp.{_ROUTER_BIAS[0]}", *_ROUTER_BIAS[1:], fp32=True)
        )
    },
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.minimax_rotary_fraction),
        *rows.SELF_ATTENTION,
        *_QK_NORM_ROWS,
        Row(
            "num_local_experts",
            "moe.num_experts",
            read.count_of("num_local_experts", "num_experts"),
        ),
        Row("intermediate_size", "moe.ffn_hidden_size", read.count),
        Row("num_experts_per_tok", "router.topk", read.count),
        *rows.SIGMOID_ROUTING,
        Row("", "router.normalize", constant(True)),
    ),
    read_blocks=layers(uniform_layers(EXPERTS)),
    check=refuse_windows,
    aliases=frozenset({"num_experts", "rotary_dim"}),
    defaults=MappingProxyType(
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rope_theta": 5e6,
            "num_experts_per_tok": 8,
        }
    ),
)
