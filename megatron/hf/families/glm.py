# SPDX-License-Identifier: Apache-2.0
"""GLM-4 and GLM-4.5, of whose channels half rotate, Solar Open and Dots 1."""

from __future__ import annotations

from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import ATTENTION, DENSE, EXPERTS
from megatron.hf import attention_kinds, layer_types
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    ENDS,
    GATE_UP_MLP,
    MLP,
    NORMED_ATTENTION,
    PROJECTIONS,
    experts,
    fused_experts,
)
from megatron.hf.families.deepseek import BIAS_AND_SHARED_EXPERT, MTP_COPIES, MTP_ENTRIES
from megatron.hf.layer_types import (
    layers,
    refuse_windows,
    uniform_layers,
)

GLM = Architecture(
    model_type="glm",
    class_name="GlmForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: GATE_UP_MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(0.5)),
        Row("", "rope.interleaved", constant(True)),
        *rows.SELF_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", read.flag(True)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType(
        {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
    ),
)
GLM4_MOE = Architecture(
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: NORMED_ATTENTION,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, *BIAS_AND_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*BIAS_AND_SHARED_EXPERT)},
    ends=ENDS,
    mtp_entries=MTP_ENTRIES,
    mtp_copies=MTP_COPIES,
    rows=(
        *rows.LAYERS,
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(0.5)),
        *rows.SELF_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", read.flag(False)),
        Row("use_qk_norm", "attention.qk_norm", read.flag(False)),
        Row("first_k_dense_replace", "", read.unread, layer_types.num_leading_mlps),
        *rows.MTP,
        *rows.SIGMOID_EXPERTS,
        *rows.SHARED_EXPERTS,
    ),
    read_blocks=layers(layer_types.leading_mlps),
    check=refuse_windows,
    aliases=frozenset({"num_local_experts"}),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
        }
    ),
)
SOLAR_OPEN = Architecture(
    model_type="solar_open",
    class_name="SolarOpenForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: ATTENTION_ENTRIES,
        EXPERTS: experts("mlp", PROJECTIONS, *BIAS_AND_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*BIAS_AND_SHARED_EXPERT)},
    ends=ENDS,
    rows=(
        *rows.DEPTH,
        *rows.SILU,
        *rows.RMS_NORM,
        Row("moe_intermediate_size", "mlp.ffn_hidden_size", read.count, read.unwritten),
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", read.flag(False)),
        Row("first_k_dense_replace", "", read.must_be(0), read.unwritten),
        *rows.SIGMOID_EXPERTS,
        *rows.SHARED_EXPERTS,
    ),
    read_blocks=layers(uniform_layers(EXPERTS)),
    check=refuse_windows,
    aliases=frozenset({"num_local_experts"}),
    defaults=MappingProxyType(
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
        }
    ),
)
_DOTS1_WINDOWS = attention_kinds.window_kinds(attention_kinds.trailing_windows)
DOTS1 = Architecture(
    model_type="dots1",
    class_name="Dots1ForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: NORMED_ATTENTION,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, *BIAS_AND_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*BIAS_AND_SHARED_EXPERT)},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        *rows.QUERY_KEY_NORMS,
        *attention_kinds.rows(_DOTS1_WINDOWS),
        *attention_kinds.MAX_WINDOW_LAYERS,
        Row("first_k_dense_replace", "", read.unread, layer_types.num_leading_mlps),
        *rows.SIGMOID_EXPERTS,
        Row("norm_topk_prob", "router.normalize", read.flag(False)),
        *rows.SHARED_EXPERTS,
    ),
    read_blocks=layers(layer_types.leading_mlps, attention_kinds.mixers(_DOTS1_WINDOWS)),
    aliases=frozenset({"num_local_experts"}),
    defaults=MappingProxyType(
        {
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "sliding_window": 4096,
            "max_window_layers": 62,
        }
    ),
)
