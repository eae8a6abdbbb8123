# SPDX-License-Identifier: Apache-2.0
"""Ernie 4.5 and Hunyuan 3: experts chosen by their scores and a bias."""

from __future__ import annotations

from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, DENSE, EXPERTS
from megatron.hf import config_rows as rows
from megatron.hf import layer_types
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    ENDS,
    EXPERT_BIAS,
    LAYER,
    MLP,
    NORMED_ATTENTION,
    PROJECTIONS,
    AnyEntry,
    experts,
    fused_experts,
    shared_expert,
)
from megatron.hf.fields import Fields
from megatron.hf.readers import ModelFields

#: Lower bound on the sum of the chosen scores that has no effect on fp32 scores.
_LEAST_SUM = 1e-12


def _interval_layers(fields: Fields, num_layers: int) -> str:
    """Return experts in every few layers from a first to a last one."""
    start = fields.count("moe_layer_start_index", minimum=0)
    interval = fields.count("moe_layer_interval")
    end = fields.find("moe_layer_end_index")
    end = num_layers - 1 if end == -1 else fields.count("moe_layer_end_index", minimum=0)
    return "".join(
        EXPERTS if start <= layer <= end and not (layer + 1) % interval else DENSE
        for layer in range(num_layers)
    )


def _start_index(config: GPTConfig, _: GPTConfig) -> int:
    return max(0, config.ffn_pattern.find(EXPERTS))


def _end_index(config: GPTConfig, _: GPTConfig) -> int:
    return max(0, config.ffn_pattern.rfind(EXPERTS))


def _interval(config: GPTConfig, _: GPTConfig) -> int:
    """Return the number of layers from experts to experts."""
    with_experts = [layer for layer, ffn in enumerate(config.ffn_pattern) if ffn == EXPERTS]
    if len(with_experts) > 1:
        return with_experts[1] - with_experts[0]
    return with_experts[0] + 1 if with_experts else 1


def _norm_min(fields: ModelFields, name: str) -> float:
    """Return the lower bound of the sum of the chosen scores, 0 if it has no effect."""
    least_sum = fields.number(name, _LEAST_SUM)
    return least_sum if least_sum > _LEAST_SUM else 0.0


def _write_norm_min(norm_min: float, _: GPTConfig) -> float:
    return norm_min or _LEAST_SUM


_STATICS = EXPERT_BIAS._replace(
    hf_name=f"{LAYER}.mlp.moe_statics.e_score_correction_bias", hf_shape="1E"
)
_IN_MEMORY_STATICS = _STATICS._replace(
    hf_name=f"{LAYER}.mlp.gate.moe_statics.e_score_correction_bias"
)
_SHARED = tuple(
    entry._replace(when="shared_expert") for entry in shared_expert(f"{LAYER}.mlp.shared_experts")
)
ERNIE4_5_MOE = Architecture(
    model_type="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: ATTENTION_ENTRIES,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, _STATICS, *_SHARED),
    },
    fused={EXPERTS: fused_experts(_IN_MEMORY_STATICS, *_SHARED)},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        Row("", "rope.interleaved", constant(True)),
        *rows.SELF_ATTENTION,
        Row("use_bias", "", read.must_be(False), constant(False)),
        Row("moe_num_experts", "moe.num_experts", read.count_of("moe_num_experts", "num_experts")),
        Row("moe_intermediate_size", "moe.ffn_hidden_size", read.count),
        Row("moe_k", "router.topk", read.count_of("moe_k", "num_experts_per_tok")),
        Row("", "router.expert_bias", constant(True)),
        *rows.shared_experts("moe_num_shared_experts", minimum=0),
        Row("moe_layer_start_index", "", read.unread, _start_index),
        Row("moe_layer_end_index", "", read.unread, _end_index),
        Row("moe_layer_interval", "", read.unread, _interval),
        Row("moe_norm_min", "router.norm_min", _norm_min, _write_norm_min),
    ),
    read_blocks=layer_types.layers(_interval_layers),
    check=layer_types.refuse_windows,
    aliases=frozenset({"num_experts", "num_experts_per_tok"}),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        }
    ),
    skipped_prefix="model.mtp_",
)


def _hunyuan_experts(bias: str, shared: str) -> tuple[AnyEntry, ...]:
    return (
        EXPERT_BIAS._replace(hf_name=f"{LAYER}.mlp.{bias}"),
        *shared_expert(f"{LAYER}.mlp.{shared}"),
    )


HY_V3 = Architecture(
    model_type="hy_v3",
    class_name="HYV3ForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: NORMED_ATTENTION,
        DENSE: MLP,
        EXPERTS: experts(
            "mlp", PROJECTIONS, *_hunyuan_experts("expert_bias", "shared_mlp"), router="router.gate"
        ),
    },
    fused={EXPERTS: fused_experts(*_hunyuan_experts("e_score_correction_bias", "shared_experts"))},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        *rows.QUERY_KEY_NORMS,
        *rows.SIGMOID_ROUTING,
        Row("num_experts", "moe.num_experts", read.count_of("num_experts", "num_local_experts")),
        Row("moe_intermediate_size", "moe.ffn_hidden_size", read.count),
        Row("num_experts_per_tok", "router.topk", read.count),
        Row("router_scaling_factor", "router.scaling_factor", read.number(2.826)),
        *rows.shared_experts("num_shared_experts"),
        Row("mlp_layer_types", "", read.unread, layer_types.mlp_types),
    ),
    read_blocks=layer_types.layers(layer_types.typed_mlps),
    check=layer_types.refuse_windows,
    aliases=frozenset({"num_local_experts", "enable_moe_fp32_combine"}),
    defaults=MappingProxyType(
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "num_shared_experts": 1,
            "initializer_range": 0.006,
        }
    ),
)
