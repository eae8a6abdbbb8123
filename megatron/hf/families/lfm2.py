# SPDX-License-Identifier: Apache-2.0
"""LFM2, dense and with experts: gated short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, DENSE, EXPERTS, SHORT_CONV
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    EMBEDDING,
    FFN_NORM,
    FINAL_NORM,
    HEAD,
    LAYER,
    MIXER_NORM,
    AnyEntry,
    Entry,
    FusedWeight,
    attention_entries,
    experts,
    fused_experts,
    fused_weights,
    query_key_norms,
)
from megatron.hf.fields import Fields
from megatron.hf.layer_types import FULL, layers, symbols, uniform_layers
from megatron.hf.readers import ModelFields

_MIXER_TYPES: Mapping[str, str] = MappingProxyType({"conv": SHORT_CONV, FULL: ATTENTION})
_ATTENTION_LAYERS = "full_attn_idxs"

_NORM = MIXER_NORM._replace(hf_name=f"{LAYER}.operator_norm.weight")
_FFN_NORM = FFN_NORM._replace(hf_name=f"{LAYER}.ffn_norm.weight")
_ATTENTION = (
    _NORM,
    *attention_entries(f"{LAYER}.self_attn", names=("q_proj", "k_proj", "v_proj", "out_proj")),
    *query_key_norms("q_layernorm", "k_layernorm"),
)
_SHORT_CONV: tuple[AnyEntry, ...] = (
    _NORM,
    FusedWeight(
        f"{LAYER}.conv.in_proj.weight",
        fused_weights("short_conv", ("B", "h"), ("C", "h"), ("x", "h")),
        groups="1",
        inner="h",
        biased="conv_bias",
    ),
    Entry(f"{LAYER}.conv.conv.weight", "{block}.short_conv.conv.x.weight", "h1w", "conv_bias"),
    Entry(f"{LAYER}.conv.out_proj.weight", "{block}.short_conv.output.weight", "hh", "conv_bias"),
)
_MLP = (
    _FFN_NORM,
    Entry(f"{LAYER}.feed_forward.w1.weight", "{block}.mlp.gate.weight", "fh"),
    Entry(f"{LAYER}.feed_forward.w3.weight", "{block}.mlp.up.weight", "fh"),
    Entry(f"{LAYER}.feed_forward.w2.weight", "{block}.mlp.down.weight", "hf"),
)
_EXPERT_BIAS = Entry(
    f"{LAYER}.feed_forward.expert_bias",
    "{block}.moe.router.expert_bias",
    "E",
    when="expert_bias",
    fp32=True,
)


def _listed_layers(fields: Fields, num_layers: int) -> str:
    """Return the mixers by `full_attn_idxs`, by default attention in all layers."""
    indices = fields.find(_ATTENTION_LAYERS)
    if indices is None:
        return ATTENTION * num_layers
    if not isinstance(indices, list) or not all(type(layer) is int for layer in indices):
        fields.refuse(_ATTENTION_LAYERS, "expected numbers of layers")
    listed = set(indices)
    return "".join(ATTENTION if layer in listed else SHORT_CONV for layer in range(num_layers))


def _typed_layers(fields: Fields, num_layers: int) -> str:
    return symbols(fields, "layer_types", _MIXER_TYPES, num_layers=num_layers)


def _mixers(fields: Fields, num_layers: int) -> str:
    """Return the mixers by `layer_types` or `full_attn_idxs`, which must agree."""
    mixers = _listed_layers(fields, num_layers)
    if fields.find("layer_types") is None:
        return mixers
    typed = _typed_layers(fields, num_layers)
    if typed != mixers and fields.find(_ATTENTION_LAYERS) is not None:
        fields.refuse(_ATTENTION_LAYERS, "layer_types says otherwise")
    return typed


def _write_mixers(config: GPTConfig, _: GPTConfig) -> list[str]:
    """Return `layer_types`. A symbol without a name is returned unchanged."""
    names = {symbol: name for name, symbol in _MIXER_TYPES.items()}
    return [names.get(symbol, symbol) for symbol in config.blocks[::2]]


def _present_name(fields: ModelFields, name: str, old: str) -> str:
    """Return which of two names of a field is present; both must have the same value."""
    if fields.raw.get(old) is None:
        return name
    if fields.raw.get(name) not in (None, fields.raw[old]):
        fields.refuse(name, f"{old} is {fields.raw[old]!r}, which is the same field")
    return old


def _tied(fields: ModelFields, name: str) -> bool:
    return fields.flag(_present_name(fields, name, "tie_embedding"), True)


def _ffn_hidden_size(fields: ModelFields, name: str) -> int:
    """Return the size of MLPs: two thirds of the field, times a factor, rounded up."""
    size = fields.count(_present_name(fields, name, "block_ff_dim"))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    adjusted = fields.number("block_ffn_dim_multiplier") * size
    multiple = fields.count("block_multiple_of")
    if not 1 <= adjusted < 1 << 31:
        fields.refuse("block_ffn_dim_multiplier", f"times {size} it must be 1 to 2^31")
    return -(-int(adjusted) // multiple) * multiple


_ROWS = (
    *rows.MODEL,
    Row("tie_word_embeddings", "tied", _tied),
    Row("num_hidden_layers", "", read.unread, lambda config, _: len(config.blocks) // 2),
    Row("layer_types", "", read.unread, _write_mixers),
    Row("norm_eps", "norm.epsilon", read.number()),
    *rows.WHOLE_ROPE,
    *rows.SELF_ATTENTION,
    *rows.QUERY_KEY_NORMS,
    Row("conv_L_cache", "short_conv.conv_width", read.count),
    Row("conv_bias", "short_conv.bias", read.flag(False)),
)
_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
}
_ENDS = (EMBEDDING, FINAL_NORM._replace(hf_name="model.embedding_norm.weight"), HEAD)
LFM2 = Architecture(
    model_type="lfm2",
    class_name="Lfm2ForCausalLM",
    has_classifier=False,
    blocks={ATTENTION: _ATTENTION, SHORT_CONV: _SHORT_CONV, DENSE: _MLP},
    ends=_ENDS,
    rows=(
        *_ROWS,
        Row("intermediate_size", "mlp.ffn_hidden_size", _ffn_hidden_size),
        Row("block_auto_adjust_ff_dim", "", read.unread, constant(False)),
    ),
    read_blocks=layers(uniform_layers(DENSE), _mixers),
    aliases=frozenset(
        {
            _ATTENTION_LAYERS,
            "tie_embedding",
            "block_ff_dim",
            "block_ffn_dim_multiplier",
            "block_multiple_of",
        }
    ),
    defaults=MappingProxyType(
        {
            **_DEFAULTS,
            "intermediate_size": 12288,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        }
    ),
)


def _leading_mlps(fields: Fields, num_layers: int) -> str:
    """Return MLPs in the first `num_dense_layers` layers and experts in all others."""
    dense = min(num_layers, fields.count("num_dense_layers", minimum=0))
    return DENSE * dense + EXPERTS * (num_layers - dense)


def _num_dense_layers(config: GPTConfig, _: GPTConfig) -> int:
    symbols = config.blocks[1::2]
    return len(symbols) - len(symbols.lstrip(DENSE))


LFM2_MOE = Architecture(
    model_type="lfm2_moe",
    class_name="Lfm2MoeForCausalLM",
    has_classifier=False,
    blocks={
        ATTENTION: _ATTENTION,
        SHORT_CONV: _SHORT_CONV,
        DENSE: _MLP,
        EXPERTS: (_FFN_NORM, *experts("feed_forward", ("w1", "w3", "w2"), _EXPERT_BIAS)[1:]),
    },
    fused={EXPERTS: (_FFN_NORM, *fused_experts(_EXPERT_BIAS, module="feed_forward")[1:])},
    ends=_ENDS,
    rows=(
        *_ROWS,
        Row("intermediate_size", "mlp.ffn_hidden_size", read.count),
        Row("num_dense_layers", "", read.unread, _num_dense_layers),
        Row("num_experts", "moe.num_experts", read.count),
        Row("moe_intermediate_size", "moe.ffn_hidden_size", read.count),
        Row("num_experts_per_tok", "router.topk", read.count),
        Row("", "router.score_function", constant("sigmoid")),
        Row("use_expert_bias", "router.expert_bias", read.flag(True)),
        Row("norm_topk_prob", "router.normalize", read.flag(True)),
        Row("routed_scaling_factor", "router.scaling_factor", read.number(1.0)),
    ),
    read_blocks=layers(_leading_mlps, _typed_layers),
    aliases=frozenset({"tie_embedding"}),
    defaults=MappingProxyType({**_DEFAULTS, "num_dense_layers": 2}),
)
