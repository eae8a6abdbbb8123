# SPDX-License-Identifier: Apache-2.0
"""Rows of config.json that several architectures share, and the sections of `GPTConfig`.

A row is (field of config.json, field of `GPTConfig`, reader, writer). A dot in a name stands for a
nested object. A row without a field of `GPTConfig` is only checked or only written. Values that an
architecture does not support are written as well; the error appears when the result is read back.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.cli.two_way_table import ConfigSection, Row, constant, unless
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
)
from megatron.hf import layer_types
from megatron.hf import readers as read
from megatron.hf.readers import ModelFields


def _has(*symbols: str) -> Callable[[ModelFields], bool]:
    """Return a predicate that is true for models with at least one of the block types."""
    return lambda fields: any(symbol in fields.blocks for symbol in symbols)


def _has_mlp(fields: ModelFields) -> bool:
    """Return whether to create an MLP config; a GPT has one even if all its layers have experts."""
    return DENSE in fields.blocks or not fields.kind.is_hybrid


def _scales(kind: str) -> ConfigSection:
    return ConfigSection(
        "rope.scaling",
        "ops.rope:RopeScaling",
        lambda fields: fields.scaling_kind == kind,
        {"kind": kind},
    )


SECTIONS = {
    "": ConfigSection("", "models.gpt:GPTConfig"),
    "norm": ConfigSection("norm", "transformer:NormConfig"),
    "multipliers": ConfigSection("multipliers", "models.gpt_config:Multipliers"),
    "mtp": ConfigSection(
        "mtp", "models.gpt_config:MTPConfig", lambda fields: read.mtp_num_layers(fields, "") > 0
    ),
    "mlp": ConfigSection("mlp", "transformer:MLPConfig", _has_mlp),
    "attention": ConfigSection("attention", "transformer:AttentionConfig", _has(ATTENTION)),
    "window": ConfigSection("attention.second", "transformer:WindowAttentionConfig", _has(WINDOW)),
    "latent": ConfigSection("attention", "transformer:LatentAttentionConfig", _has(LATENT)),
    "moe": ConfigSection("moe", "moe:MoEConfig", _has(EXPERTS)),
    "router": ConfigSection("moe.router", "moe:RouterConfig"),
    "rope": ConfigSection(
        "rope",
        "transformer:RopeConfig",
        lambda fields: (
            fields.kind.is_rotary and fields.kind.is_rotary_in(fields) and _has(*ATTENTIONS)(fields)
        ),
    ),
    "window_rope": ConfigSection(
        "attention.second.rope",
        "transformer:RopeConfig",
        lambda fields: fields.kind.has_ropes_of_types,
    ),
    "linear": _scales("linear"),
    "llama3": _scales("llama3"),
    "yarn": _scales("yarn"),
    "delta_net": ConfigSection(
        "delta_net", "ssm.mixer_config:GatedDeltaNetConfig", _has(DELTA_NET)
    ),
    "mamba": ConfigSection("mamba", "ssm.mixer_config:Mamba2Config", _has(MAMBA)),
    "short_conv": ConfigSection("short_conv", "ssm.mixer_config:ShortConvConfig", _has(SHORT_CONV)),
}
MODEL = (
    Row("hidden_size", "hidden_size", read.count),
    Row("vocab_size", "vocab_size", read.count),
    Row("tie_word_embeddings", "tied", read.tied_head),
    Row("id2label", "num_labels", lambda fields, _: fields.num_labels, read.label_names),
    Row("label2id", "", read.unread, read.label_ids),
    Row("initializer_range", "init_std", read.number(0.02)),
    Row("num_layers", "num_layers", read.of_blocks, read.unwritten),
    Row("pattern", "pattern", read.of_blocks, read.unwritten),
    Row("ffn_pattern", "ffn_pattern", read.of_blocks, read.unwritten),
)
SELF_ATTENTION = (
    Row("num_attention_heads", "attention.num_attention_heads", read.count),
    Row("attention_dropout", "attention.", read.unread, constant(0.0)),
    Row("num_key_value_heads", "attention.num_query_groups", read.query_groups),
    Row("head_dim", "attention.kv_channels", read.head_dim),
)
BIAS = (
    Row("attention_bias", "attention.qkv_bias", read.flag(False)),
    Row("attention_bias", "attention.output_bias", read.flag(False), read.unwritten),
)
#: Attention without its own head_dim.
WHOLE_WIDTH_ATTENTION = (
    *SELF_ATTENTION[:-1],
    Row("head_dim", "attention.kv_channels", read.quotient_head_dim, read.unwritten),
)
MTP = (
    Row("num_nextn_predict_layers", "", read.unread, lambda config, _: config.mtp_num_layers),
    Row("", "mtp.num_layers", read.mtp_num_layers),
)
#: Factors of Granite.
MULTIPLIERS = (
    Row("embedding_multiplier", "multipliers.embedding", read.number(1.0)),
    Row("residual_multiplier", "multipliers.residual", read.number(1.0)),
    Row("logits_scaling", "multipliers.logits", read.reciprocal, read.write_reciprocal),
    Row("attention_multiplier", "attention.softmax_scale", read.number(1.0), read.write_scale),
)
QUERY_KEY_NORMS = (Row("", "attention.qk_norm", constant(True)),)


def _rope_rows(scaling: str, base: str) -> tuple[Row, ...]:
    """Return the rows of rotary positions.

    Args:
        scaling: name of the object with the scaling.
        base: name of the field of the base.
    """
    length = f"{scaling}.original_max_position_embeddings"
    return (
        Row(base, "rope.base", read.rope_base),
        *(
            Row(f"{scaling}.rope_type", f"{kind}.", read.unread, constant(kind))
            for kind in ("linear", "llama3", "yarn")
        ),
        Row(f"{scaling}.factor", "linear.factor", read.scaling_number()),
        Row(f"{scaling}.factor", "llama3.factor", read.scaling_number()),
        Row(f"{scaling}.low_freq_factor", "llama3.low_freq_factor", read.scaling_number()),
        Row(f"{scaling}.high_freq_factor", "llama3.high_freq_factor", read.scaling_number()),
        Row(length, "llama3.original_max_position", read.original_length),
        Row(length, "yarn.original_max_position", read.original_length),
        Row(f"{scaling}.factor", "yarn.factor", read.yarn_factor),
        Row(f"{scaling}.beta_fast", "yarn.beta_fast", read.scaling_number(32.0)),
        Row(f"{scaling}.beta_slow", "yarn.beta_slow", read.scaling_number(1.0)),
        Row(
            f"{scaling}.truncate",
            "yarn.truncate",
            lambda fields, _: fields.scaling.flag("truncate", True),
            unless(True),
        ),
        Row(
            f"{scaling}.attention_factor",
            "yarn.attention_factor",
            read.yarn_attention,
            unless(None),
        ),
    )


ROPE = (
    Row("rope_scaling", "rope.", read.unread, constant(None)),
    *_rope_rows("rope_scaling", "rope_theta"),
)
#: An object for layers with full attention, and another for layers with a window.
_FULL, _SLIDING = "rope_parameters.full_attention", "rope_parameters.sliding_attention"
ROPES_OF_TYPES = (
    Row(f"{_FULL}.rope_type", "rope.", read.unread, constant("default")),
    *_rope_rows(_FULL, f"{_FULL}.rope_theta"),
    Row(f"{_SLIDING}.rope_type", "window_rope.", read.unread, constant("default")),
    Row(f"{_SLIDING}.rope_theta", "window_rope.base", read.window_rope_base),
)
WHOLE_ROPE = (
    *ROPE,
    Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(None), read.unwritten),
)
#: Layers without the rows of norms and activations, the first ones without the size of MLPs.
DEPTH = (
    *MODEL,
    Row("num_hidden_layers", "", read.unread, lambda config, _: config.num_layers),
)
DECODER = (
    *DEPTH,
    Row("intermediate_size", "moe.", read.unread, lambda moe, _: moe.ffn_hidden_size),
    Row("intermediate_size", "mlp.ffn_hidden_size", read.count),
)
SILU = (Row("hidden_act", "", read.must_be("silu", "swish"), constant("silu")),)
RMS_NORM = (Row("rms_norm_eps", "norm.epsilon", read.number(1e-6)),)
LAYERS = (*DECODER, *SILU, *RMS_NORM)


def layer_norm(name: str) -> tuple[Row, ...]:
    """Return the rows of LayerNorm with a bias; `name` is the field of its epsilon."""
    return (
        Row(name, "norm.epsilon", read.number()),
        Row("", "norm.kind", constant("LayerNorm")),
    )


def plain_mlp(name: str = "hidden_act") -> tuple[Row, ...]:
    """Return the rows of an MLP without a gate; `name` is the field of its activation."""
    return (
        Row("", "mlp.gated", constant(False)),
        Row(name, "mlp.activation", read.activation, read.write_activation),
    )


QWEN_EXPERTS = (
    Row("num_experts", "moe.num_experts", read.count_of("num_experts", "num_local_experts")),
    Row("moe_intermediate_size", "moe.ffn_hidden_size", read.count),
    Row("num_experts_per_tok", "router.topk", read.count),
)
SPARSE_EXPERTS = (
    *QWEN_EXPERTS,
    Row("norm_topk_prob", "router.normalize", read.flag(False)),
    Row("decoder_sparse_step", "", read.unread, constant(1)),
    Row("mlp_only_layers", "", read.unread, layer_types.dense_layers),
)
GATED_SHARED_EXPERT = (
    Row("shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", read.count),
    Row("", "moe.shared_gate", constant(True)),
)
#: Experts of DeepSeek's models.
ROUTED_EXPERTS = (
    Row(
        "n_routed_experts",
        "moe.num_experts",
        read.count_of("n_routed_experts", "num_local_experts", "num_experts"),
    ),
    Row("moe_intermediate_size", "moe.ffn_hidden_size", read.count),
    Row("num_experts_per_tok", "router.topk", read.count),
    Row("routed_scaling_factor", "router.scaling_factor", read.number()),
)
#: Routing by a sigmoid and a bias, within the best groups.
SIGMOID_ROUTING = (
    Row("", "router.score_function", constant("sigmoid")),
    Row("", "router.expert_bias", constant(True)),
)
SIGMOID_EXPERTS = (
    *ROUTED_EXPERTS,
    *SIGMOID_ROUTING,
    Row("norm_topk_prob", "router.normalize", read.flag(True)),
    Row("n_group", "router.num_groups", read.group_limit, read.group_count),
    Row("topk_group", "router.group_topk", read.group_limit, read.group_count),
    Row("", "router.group_candidates", constant(read.GROUP_CANDIDATES)),
)


def shared_experts(name: str, *, minimum: int = 1) -> tuple[Row, ...]:
    """Return the row of the shared expert, as large as a number of experts."""
    return (
        Row(
            name,
            "moe.shared_ffn_hidden_size",
            lambda f, name: (
                f.count("moe_intermediate_size") * f.count(name, minimum=minimum) or None
            ),
            lambda inner, config: max(minimum, (inner or 0) // config.moe.ffn_hidden_size),
        ),
    )


SHARED_EXPERTS = shared_experts("n_shared_experts")
LATENT_ATTENTION = (
    Row("num_attention_heads", "latent.num_attention_heads", read.count),
    Row("attention_dropout", "latent.", read.unread, constant(0.0)),
    Row(
        "num_key_value_heads",
        "latent.",
        lambda f, name: f.must_be(name, f.count("num_attention_heads")),
        lambda latent, _: latent.num_attention_heads,
    ),
    Row("q_lora_rank", "latent.q_lora_rank", read.optional_rank),
    Row("kv_lora_rank", "latent.kv_lora_rank", read.count),
    Row("qk_nope_head_dim", "latent.nope_channels", read.count),
    Row("qk_rope_head_dim", "latent.rope_channels", read.rope_channels),
    Row(
        "head_dim",
        "latent.",
        lambda f, name: f.must_be(name, read.rope_channels(f, name)),
        read.unwritten,
    ),
    Row(
        "qk_head_dim",
        "latent.",
        lambda f, name: f.must_be(name, f.count("qk_nope_head_dim") + read.rope_channels(f, name)),
        read.unwritten,
    ),
    Row("v_head_dim", "latent.value_channels", read.count),
    Row("rope_scaling.mscale_all_dim", "latent.scale_factor", read.scale_factor, read.scale_weight),
    Row("", "latent.norm_epsilon", read.low_rank_epsilon),
)
