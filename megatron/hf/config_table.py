# SPDX-License-Identifier: Apache-2.0
"""One table per architecture between the fields of config.json and of `GPTConfig`, both ways.

A row is (field of config.json, field of `GPTConfig`, reader, writer). A dot in a name stands for a
nested object. A row without a field of `GPTConfig` is only checked or only written. Values that an
architecture does not support are written as well; the error appears when the result is read back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megatron.cli.two_way_table import (
    OMITTED,
    ConfigSection,
    Row,
    Table,
    constant,
    unless,
    yarn_magnitude,
    yarn_weight,
)
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, DELTA_NET, DENSE, EXPERTS, LATENT, MAMBA
from megatron.hf.architectures import (
    DEEPSEEK_V3,
    KIMI_K2,
    LLAMA,
    MAMBA2,
    MISTRAL,
    MIXTRAL,
    NEMOTRON_H,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    SEED_OSS,
)
from megatron.hf.block_types import (
    SLIDING,
    blocks_fields,
    dense_layers,
    first_experts,
    mixer_types,
    read_blocks,
)
from megatron.hf.classifier import default_label, read_labels
from megatron.hf.entries import Architecture
from megatron.hf.fields import Fields

#: Upper bound on the number of MTP layers.
MAX_MTP_LAYERS = 64

#: Epsilon of the norms of low-rank vectors in transformers, which ignores rms_norm_eps there.
LOW_RANK_EPSILON = 1e-6

#: Default fraction of a head's channels with RoPE in Qwen3-Next.
ROTARY_FRACTION = 0.25

#: Defaults in transformers: the window size, and the first layer with a window in Qwen2 and Qwen3.
WINDOW, FIRST_WINDOW = 4096, 28

#: DeepSeek-V3 and Nemotron-H rank a group of experts by the sum of this many best scores.
GROUP_CANDIDATES = 2

#: Written instead of a lower bound of 0 on dt, because transformers takes its logarithm.
_NO_FLOOR = 1e-30


class ModelFields(Fields):
    """The fields of config.json of a known architecture.

    Args:
        kind: the architecture.
        with_mtp: whether the files contain the MTP layers that config.json specifies.
    """

    def __init__(
        self, raw: Mapping[str, Any], where: str, *, kind: Architecture, with_mtp: bool
    ) -> None:
        super().__init__(raw, where, defaults=kind.defaults)
        self.kind, self.has_mtp = kind, with_mtp and bool(kind.mtp_entries)
        self.max_length = self.count("max_position_embeddings", 0) or None
        self.blocks = read_blocks(kind, self)

    @property
    def num_labels(self) -> int | None:
        """Number of labels of a classification head; None without one. Raises ValueError."""
        if self.raw.get("architectures") != [self.kind.classifier_class]:
            return None
        return len(read_labels(self))

    @property
    def scaling(self) -> Fields:
        """The object with the RoPE scaling; it may be empty."""
        scaling = self.inner("rope_scaling") or self.inner("rope_parameters")
        return scaling or Fields({}, self.where, prefix="rope_parameters.")

    @property
    def scaling_kind(self) -> str:
        """The type of RoPE scaling. Raises ValueError."""
        scaling = self.scaling
        name = "rope_type" if "rope_type" in scaling.raw else "type"
        kind = scaling.raw.get(name, "default")
        if kind not in ("default", "linear", "llama3", "yarn"):
            scaling.refuse(name, "supported are default, linear, llama3, yarn")
        return str(kind)


# --- Readers and writers of fields ----------------------------------------------------------------


def _count(fields: ModelFields, name: str) -> int:
    return fields.count(name)


def _number(default: float | None = None) -> Callable[[ModelFields, str], float]:
    return lambda fields, name: fields.number(name, default)


def _flag(default: bool) -> Callable[[ModelFields, str], bool]:
    return lambda fields, name: fields.flag(name, default)


def _count_of(*names: str) -> Callable[[ModelFields, str], int]:
    return lambda fields, _: fields.count_of(*names)


def _must_be(*values: Any) -> Callable[[ModelFields, str], None]:
    return lambda fields, name: fields.must_be(name, *values)


_unread = constant(None)
_unwritten = constant(OMITTED)


def _of_blocks(fields: ModelFields, name: str) -> Any:
    return blocks_fields(fields.blocks).get(name, "")


def _mtp_num_layers(fields: ModelFields, name: str) -> int:
    """Return the number of MTP layers."""
    if not fields.has_mtp:
        return 0
    name = "num_mtp_layers" if "num_mtp_layers" in fields.raw else name
    num_layers = fields.count(name, 0, minimum=0)
    if num_layers > MAX_MTP_LAYERS:
        fields.refuse(name, f"more than {MAX_MTP_LAYERS}")
    return num_layers


def _tied(fields: ModelFields, name: str) -> bool:
    # Classes with a classification head ignore the field.
    return fields.flag(name, False) and fields.num_labels is None


def _label_names(num_labels: int | None, _: GPTConfig) -> Any:
    if num_labels is None:
        return OMITTED
    return {str(label): default_label(label) for label in range(num_labels)}


def _label_ids(config: GPTConfig, _: GPTConfig) -> Any:
    if config.num_labels is None:
        return OMITTED
    return {default_label(label): label for label in range(config.num_labels)}


def _is_null(fields: ModelFields, name: str) -> bool:
    """Return whether a field is null, which differs from an absent field with a default."""
    return name in fields.raw and fields.raw[name] is None


def _groups(fields: ModelFields, name: str) -> int:
    heads = fields.count("num_attention_heads")
    return heads if _is_null(fields, name) else fields.count(name, heads)


def _head_dim(fields: ModelFields, name: str) -> int:
    """Return the channels of a head, by default hidden_size / num_attention_heads."""
    old = "attention_head_dim"
    if fields.kind is NEMOTRON_H and fields.find(old) is not None:
        if fields.raw.get(name) not in (None, fields.count(old)):
            fields.refuse(old, "head_dim is the same field")
        return fields.count(old)
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    head_dim = 0 if _is_null(fields, name) else fields.count(name, 0)
    if not head_dim and hidden % heads:
        fields.refuse(name, "give it, as heads do not divide hidden_size")
    return head_dim or hidden // heads


def _window(fields: ModelFields, name: str) -> int | None:
    """Return the window of Mistral's layers, None without one."""
    size = None if _is_null(fields, name) else fields.count(name, WINDOW)
    types = fields.raw.get("layer_types") or []
    if any((kind == SLIDING) != (size is not None) for kind in types):
        fields.refuse("layer_types", f"with {name} {size} it is not supported")
    return size


def _switched_window(fields: ModelFields, name: str) -> int | None:
    """Return the window of Qwen2's and Qwen3's layers, None without one."""
    used = fields.flag("use_sliding_window", False) and not _is_null(fields, name)
    size = fields.count(name, WINDOW) if used else None
    layers, types = fields.count("num_hidden_layers"), fields.raw.get("layer_types")
    first_windowed_layer = fields.count("max_window_layers", FIRST_WINDOW, minimum=0)
    sliding = max(0, layers - first_windowed_layer) if size else 0
    if types is not None:
        sliding = types.count(SLIDING)
    deciding_field = "max_window_layers" if types is None else "layer_types"
    if sliding not in (0, layers):
        fields.refuse(deciding_field, "supported is one window for all layers, or for none")
    if sliding and size is None:
        fields.refuse(deciding_field, f"there is no window: give {name} and use_sliding_window")
    return size if sliding else None


def _base(fields: ModelFields, name: str) -> float:
    return fields.scaling.number(name, fields.number(name, 10000.0))


def _rotary_fraction(default: float | None) -> Callable[[ModelFields, str], float]:
    """Return a reader of the fraction of channels with RoPE. With default None it must be 1."""

    def read(fields: ModelFields, name: str) -> float:
        sources = [
            source for source in (fields.scaling, fields) if source.raw.get(name) is not None
        ]
        for source in sources:
            if default is None and source.raw[name] != 1:
                source.refuse(name, "supported is 1")
        if default is None or not sources:
            return default or 1.0
        fraction = sources[0].number(name)
        if fraction > 1.0:
            sources[0].refuse(name, "expected at most 1")
        return fraction

    return read


def _scaled(default: float | None = None) -> Callable[[ModelFields, str], float]:
    """Return a reader of a number in the RoPE scaling."""
    return lambda fields, name: fields.scaling.number(name.rpartition(".")[2], default)


def _original(fields: ModelFields, name: str) -> int:
    name = name.rpartition(".")[2]
    return fields.count(name, fields.scaling.count(name, fields.max_length))


def _yarn_factor(fields: ModelFields, name: str) -> float:
    if not fields.scaling.flag("truncate", True):
        fields.scaling.refuse("truncate", "supported is true")
    original = _original(fields, "original_max_position_embeddings")
    return fields.scaling.number("factor", (fields.max_length or original) / original)


def _yarn_attention(fields: ModelFields, name: str) -> float | None:
    scaling = fields.scaling
    if scaling.raw.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    if not (scaling.raw.get("mscale") and scaling.raw.get("mscale_all_dim")):
        return None
    factor = _yarn_factor(fields, name)
    magnitude, all_dim_magnitude = (
        yarn_magnitude(factor, scaling.number(weight)) for weight in ("mscale", "mscale_all_dim")
    )
    return magnitude / all_dim_magnitude


def _scale_factor(fields: ModelFields, name: str) -> float:
    """Return the factor of the softmax scale: the square of YaRN's mscale_all_dim magnitude."""
    scaling, kind = fields.scaling, fields.scaling_kind
    if kind == "default" or not scaling.raw.get("mscale_all_dim"):
        return 1.0
    if kind != "yarn":
        scaling.refuse("mscale_all_dim", "supported is yarn's")
    return yarn_magnitude(scaling.number("factor"), scaling.number("mscale_all_dim")) ** 2


def _scale_weight(scale_factor: float, config: GPTConfig) -> Any:
    scaling = None if config.rope is None else config.rope.scaling
    if scaling is None or scaling.kind != "yarn":
        return OMITTED
    return yarn_weight(scale_factor, scaling.factor) or OMITTED


def _rank(fields: ModelFields, name: str) -> int | None:
    if name not in fields.raw:
        fields.refuse(name, "expected a positive integer, or null")
    return fields.count(name, 0) or None


def _low_rank_epsilon(fields: ModelFields, name: str) -> float | None:
    same = fields.number("rms_norm_eps", LOW_RANK_EPSILON) == LOW_RANK_EPSILON
    return None if same else LOW_RANK_EPSILON


def _limited(fields: ModelFields, name: str) -> int | None:
    """Return a field of group-limited routing, None if every token may use all groups."""
    limits = fields.count("n_group") != fields.count("topk_group")
    return fields.count(name) if limits else None


def _or_one(count: int | None, _: GPTConfig) -> int:
    return count or 1


def _no_bias(fields: ModelFields, name: str) -> None:
    if fields.flag(name, False):
        fields.refuse(name, "with experts it is not supported")


def _expand(fields: ModelFields, name: str) -> None:
    inner = fields.count("num_heads") * fields.count("head_dim")
    if fields.count(name) * fields.count("hidden_size") != inner:
        fields.refuse(name, "times hidden_size it must be num_heads times head_dim")


def _dt_limits(fields: ModelFields, name: str) -> tuple[float, float]:
    """Return the bounds of dt; infinity has two spellings.

    Nemotron-H's own code clamps dt to these bounds. transformers up to 5.23 applies `time_step_min`
    as a lower bound instead, which differs from how the weights were trained.
    """
    value = fields.find(name)
    if value is None:
        return 0.0, math.inf
    bounds = value if isinstance(value, list | tuple) else []
    bounds = [math.inf if bound == {"__float__": "Infinity"} else bound for bound in bounds]
    if len(bounds) != 2 or any(type(bound) not in (int, float) for bound in bounds):
        fields.refuse(name, "expected the smallest and the largest dt")
    minimum, maximum = map(float, bounds)
    if not 0.0 <= minimum < maximum:
        fields.refuse(name, "expected 0 <= smallest < largest")
    return minimum, maximum


def _write_dt_limits(limits: tuple[float, float], _: GPTConfig) -> Any:
    minimum, maximum = limits
    if limits == (0.0, math.inf):
        return OMITTED
    return [minimum, {"__float__": "Infinity"} if maximum == math.inf else maximum]


# --- Sections and rows -------------------------------------------------------------------------


def _has(*symbols: str) -> Callable[[ModelFields], bool]:
    """Return a predicate that is true for models with at least one of these block types."""
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


_SECTIONS = {
    "": ConfigSection("", "models.gpt:GPTConfig"),
    "norm": ConfigSection("norm", "transformer:NormConfig"),
    "mlp": ConfigSection("mlp", "transformer:MLPConfig", _has_mlp),
    "attention": ConfigSection("attention", "transformer:AttentionConfig", _has(ATTENTION)),
    "latent": ConfigSection("attention", "transformer:LatentAttentionConfig", _has(LATENT)),
    "moe": ConfigSection("moe", "moe:MoEConfig", _has(EXPERTS)),
    "router": ConfigSection("moe.router", "moe:RouterConfig"),
    "rope": ConfigSection(
        "rope",
        "transformer:RopeConfig",
        lambda fields: fields.kind.blocks_per_layer == 2 and _has(ATTENTION, LATENT)(fields),
    ),
    "linear": _scales("linear"),
    "llama3": _scales("llama3"),
    "yarn": _scales("yarn"),
    "delta_net": ConfigSection(
        "delta_net", "ssm.mixer_config:GatedDeltaNetConfig", _has(DELTA_NET)
    ),
    "mamba": ConfigSection("mamba", "ssm.mixer_config:Mamba2Config", _has(MAMBA)),
}
_MODEL = (
    Row("hidden_size", "hidden_size", _count),
    Row("vocab_size", "vocab_size", _count),
    Row("tie_word_embeddings", "tied", _tied),
    Row("id2label", "num_labels", lambda fields, _: fields.num_labels, _label_names),
    Row("label2id", "", _unread, _label_ids),
    Row("initializer_range", "init_std", _number(0.02)),
    Row("num_layers", "num_layers", _of_blocks, _unwritten),
    Row("pattern", "pattern", _of_blocks, _unwritten),
    Row("ffn_pattern", "ffn_pattern", _of_blocks, _unwritten),
)
_ATTENTION = (
    Row("num_attention_heads", "attention.num_attention_heads", _count),
    Row("attention_dropout", "attention.", _unread, constant(0.0)),
    Row("num_key_value_heads", "attention.num_query_groups", _groups),
    Row("head_dim", "attention.kv_channels", _head_dim),
)
_BIAS = (
    Row("attention_bias", "attention.qkv_bias", _flag(False)),
    Row("attention_bias", "attention.output_bias", _flag(False), _unwritten),
)
_QUERY_KEY_NORMS = (Row("", "attention.qk_norm", constant(True)),)
_SWITCHED_WINDOW = (
    Row("sliding_window", "attention.window", _switched_window, unless(None)),
    Row(
        "use_sliding_window",
        "attention.",
        _unread,
        lambda attention, _: True if attention.window else OMITTED,
    ),
    Row(
        "max_window_layers",
        "attention.",
        _unread,
        lambda attention, _: 0 if attention.window else OMITTED,
    ),
)
_ROPE = (
    Row("rope_theta", "rope.base", _base),
    Row("rope_scaling", "rope.", _unread, constant(None)),
    Row("rope_scaling.rope_type", "linear.", _unread, constant("linear")),
    Row("rope_scaling.factor", "linear.factor", _scaled()),
    Row("rope_scaling.rope_type", "llama3.", _unread, constant("llama3")),
    Row("rope_scaling.factor", "llama3.factor", _scaled()),
    Row("rope_scaling.low_freq_factor", "llama3.low_freq_factor", _scaled()),
    Row("rope_scaling.high_freq_factor", "llama3.high_freq_factor", _scaled()),
    Row("rope_scaling.original_max_position_embeddings", "llama3.original_max_position", _original),
    Row("rope_scaling.rope_type", "yarn.", _unread, constant("yarn")),
    Row("rope_scaling.original_max_position_embeddings", "yarn.original_max_position", _original),
    Row("rope_scaling.factor", "yarn.factor", _yarn_factor),
    Row("rope_scaling.beta_fast", "yarn.beta_fast", _scaled(32.0)),
    Row("rope_scaling.beta_slow", "yarn.beta_slow", _scaled(1.0)),
    Row("rope_scaling.attention_factor", "yarn.attention_factor", _yarn_attention, unless(None)),
)
_WHOLE_ROPE = (
    *_ROPE,
    Row("partial_rotary_factor", "rope.percent", _rotary_fraction(None), _unwritten),
)
_LAYERS = (
    *_MODEL,
    Row("num_hidden_layers", "", _unread, lambda config, _: config.num_layers),
    Row("hidden_act", "", _unread, constant("silu")),
    Row("rms_norm_eps", "norm.epsilon", _number(1e-6)),
    Row("intermediate_size", "moe.", _unread, lambda moe, _: moe.ffn_hidden_size),
    Row("intermediate_size", "mlp.ffn_hidden_size", _count),
)
_QWEN3_EXPERTS = (
    Row("num_experts", "moe.num_experts", _count_of("num_experts", "num_local_experts")),
    Row("moe_intermediate_size", "moe.ffn_hidden_size", _count),
    Row("num_experts_per_tok", "router.topk", _count),
    Row("norm_topk_prob", "router.normalize", _flag(False)),
    Row("decoder_sparse_step", "", _unread, constant(1)),
    Row("mlp_only_layers", "", _unread, dense_layers),
)
_GATED_SHARED_EXPERT = (
    Row("shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", _count),
    Row("", "moe.shared_gate", constant(True)),
)
_SIGMOID_EXPERTS = (
    Row("n_routed_experts", "moe.num_experts", _count_of("n_routed_experts", "num_local_experts")),
    Row("moe_intermediate_size", "moe.ffn_hidden_size", _count),
    Row("num_experts_per_tok", "router.topk", _count),
    Row("norm_topk_prob", "router.normalize", _flag(True)),
    Row("routed_scaling_factor", "router.scaling_factor", _number()),
    Row("n_group", "router.num_groups", _limited, _or_one),
    Row("topk_group", "router.group_topk", _limited, _or_one),
    Row("", "router.group_candidates", constant(GROUP_CANDIDATES)),
    Row("", "router.score_function", constant("sigmoid")),
    Row("", "router.expert_bias", constant(True)),
)
_BLOCKS = (
    *_MODEL,
    Row("num_hidden_layers", "", _unread, lambda config, _: len(config.blocks)),
    Row("layer_norm_epsilon", "norm.epsilon", _number(1e-6)),
    Row("rms_norm", "mamba.", _must_be(True), _unwritten),
    Row("n_groups", "mamba.num_groups", _count),
    Row("conv_kernel", "mamba.conv_width", _count),
    Row("use_conv_bias", "mamba.conv_bias", _flag(True)),
    Row("use_bias", "mamba.bias", _flag(False)),
    Row("time_step_limit", "mamba.dt_limit", _dt_limits, _write_dt_limits),
)

#: The rows of each architecture, by its model_type.
_ROWS = {
    LLAMA.model_type: (
        *_LAYERS,
        *_WHOLE_ROPE,
        *_ATTENTION,
        *_BIAS,
        Row("mlp_bias", "mlp.bias", _flag(False)),
    ),
    MISTRAL.model_type: (
        *_LAYERS,
        *_WHOLE_ROPE,
        *_ATTENTION,
        Row("sliding_window", "attention.window", _window),
    ),
    QWEN2.model_type: (
        *_LAYERS,
        *_WHOLE_ROPE,
        *_ATTENTION,
        *_SWITCHED_WINDOW,
        Row("", "attention.qkv_bias", constant(True)),
    ),
    SEED_OSS.model_type: (
        *_LAYERS,
        *_WHOLE_ROPE,
        *_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", _flag(True)),
        Row("attention_out_bias", "attention.output_bias", _flag(False)),
        Row("residual_dropout", "attention.", _unread, constant(0.0)),
        Row("mlp_bias", "mlp.bias", _flag(False)),
    ),
    QWEN3.model_type: (
        *_LAYERS,
        *_WHOLE_ROPE,
        *_ATTENTION,
        *_BIAS,
        *_QUERY_KEY_NORMS,
        *_SWITCHED_WINDOW,
    ),
    MIXTRAL.model_type: (
        *_LAYERS,
        *_WHOLE_ROPE,
        *_ATTENTION,
        Row("num_local_experts", "moe.num_experts", _count_of("num_local_experts", "num_experts")),
        Row("intermediate_size", "moe.ffn_hidden_size", _count),
        Row("num_experts_per_tok", "router.topk", _count),
    ),
    QWEN2_MOE.model_type: (
        *_LAYERS,
        *_WHOLE_ROPE,
        *_ATTENTION,
        Row("qkv_bias", "attention.qkv_bias", _flag(True)),
        *_QWEN3_EXPERTS,
        *_GATED_SHARED_EXPERT,
    ),
    QWEN3_MOE.model_type: (
        *_LAYERS,
        *_WHOLE_ROPE,
        *_ATTENTION,
        *_BIAS,
        *_QUERY_KEY_NORMS,
        *_QWEN3_EXPERTS,
    ),
    DEEPSEEK_V3.model_type: (
        *_LAYERS,
        *_WHOLE_ROPE,
        Row("rope_interleave", "rope.interleaved", _flag(True)),
        Row("num_attention_heads", "latent.num_attention_heads", _count),
        Row("attention_dropout", "latent.", _unread, constant(0.0)),
        Row(
            "num_key_value_heads",
            "latent.",
            lambda f, name: f.must_be(name, f.count("num_attention_heads")),
            lambda latent, _: latent.num_attention_heads,
        ),
        Row("q_lora_rank", "latent.q_lora_rank", _rank),
        Row("kv_lora_rank", "latent.kv_lora_rank", _count),
        Row("qk_nope_head_dim", "latent.nope_channels", _count),
        Row("qk_rope_head_dim", "latent.rope_channels", _count),
        Row(
            "head_dim",
            "latent.",
            lambda f, name: f.must_be(name, f.count("qk_rope_head_dim")),
            _unwritten,
        ),
        Row(
            "qk_head_dim",
            "latent.",
            lambda f, name: f.must_be(
                name, f.count("qk_nope_head_dim") + f.count("qk_rope_head_dim")
            ),
            _unwritten,
        ),
        Row("v_head_dim", "latent.value_channels", _count),
        Row("rope_scaling.mscale_all_dim", "latent.scale_factor", _scale_factor, _scale_weight),
        Row("", "latent.norm_epsilon", _low_rank_epsilon),
        Row("first_k_dense_replace", "", _unread, first_experts),
        Row("num_nextn_predict_layers", "mtp_num_layers", _mtp_num_layers),
        *_SIGMOID_EXPERTS,
        Row(
            "n_shared_experts",
            "moe.shared_ffn_hidden_size",
            lambda f, name: f.count("moe_intermediate_size") * f.count(name),
            lambda inner, config: max(1, (inner or 0) // config.moe.ffn_hidden_size),
        ),
        Row("moe_layer_freq", "moe.", _must_be(1), constant(1)),
        Row("scoring_func", "moe.", _must_be("sigmoid"), constant("sigmoid")),
        Row("topk_method", "moe.", _must_be("noaux_tc"), constant("noaux_tc")),
    ),
    QWEN3_NEXT.model_type: (
        *_LAYERS,
        *_ROPE,
        *_ATTENTION,
        *_BIAS,
        *_QUERY_KEY_NORMS,
        *_QWEN3_EXPERTS,
        Row("", "norm.zero_centered", constant(True)),
        Row("", "attention.output_gate", constant(True)),
        Row("partial_rotary_factor", "rope.percent", _rotary_fraction(ROTARY_FRACTION)),
        *_GATED_SHARED_EXPERT,
        Row("num_hidden_layers", "", _unread, lambda config, _: len(config.blocks) // 2),
        Row("layer_types", "", _unread, mixer_types),
        Row("linear_num_key_heads", "delta_net.num_key_heads", _count),
        Row("linear_num_value_heads", "delta_net.num_value_heads", _count),
        Row("linear_key_head_dim", "delta_net.key_channels", _count),
        Row("linear_value_head_dim", "delta_net.value_channels", _count),
        Row("linear_conv_kernel_dim", "delta_net.conv_width", _count),
    ),
    MAMBA2.model_type: (
        *_BLOCKS,
        Row("num_heads", "mamba.num_heads", _count),
        Row("head_dim", "mamba.head_channels", _count),
        Row("state_size", "mamba.state_channels", _count),
        Row("expand", "mamba.", _expand, lambda m, config: m.inner_channels // config.hidden_size),
    ),
    NEMOTRON_H.model_type: (
        *_BLOCKS,
        *_ATTENTION,
        *_SIGMOID_EXPERTS,
        Row("hybrid_override_pattern", "", _unread, lambda config, _: config.blocks),
        Row("intermediate_size", "mlp.ffn_hidden_size", _count),
        Row("mlp_hidden_act", "mlp.", _unread, constant("relu2")),
        Row("mlp_hidden_act", "moe.", _unread, constant("relu2")),
        Row("mlp_bias", "mlp.bias", _flag(False)),
        Row("mlp_bias", "moe.", _no_bias, _unwritten),
        *(Row("", f"{block}.gated", constant(False)) for block in ("mlp", "moe")),
        *(Row("", f"{block}.activation", constant("squared_relu")) for block in ("mlp", "moe")),
        Row("n_shared_experts", "moe.", _must_be(1), constant(1)),
        Row("moe_shared_expert_intermediate_size", "moe.shared_ffn_hidden_size", _count),
        Row("mamba_num_heads", "mamba.num_heads", _count),
        Row("mamba_head_dim", "mamba.head_channels", _count),
        Row("ssm_state_size", "mamba.state_channels", _count),
        Row("mamba_hidden_act", "mamba.", _must_be("silu", "swish"), constant("silu")),
        # See `_dt_limits`.
        Row("time_step_min", "mamba.", _unread, lambda m, _: m.dt_limit[0] or _NO_FLOOR),
    ),
}

_ROWS[KIMI_K2.model_type] = _ROWS[DEEPSEEK_V3.model_type]

TABLES: Mapping[str, Table] = MappingProxyType(
    {model_type: Table(_SECTIONS, rows) for model_type, rows in _ROWS.items()}
)
