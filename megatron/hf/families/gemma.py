# SPDX-License-Identifier: Apache-2.0
"""Gemma, and Gemma 2 and 3, which normalise inputs and outputs of blocks and alternate windows with
full attention. Embeddings are multiplied by the square root of the hidden size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, DENSE
from megatron.hf import attention_kinds
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.attention_kinds import AttentionKind, periodic_full_attention, window_kinds
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    ENDS,
    LAYER,
    MLP,
    MLP_PROJECTIONS,
    QUERY_KEY_NORMS,
    Entry,
    output_norm,
)
from megatron.hf.fields import Fields
from megatron.hf.layer_types import FULL, SLIDING, layers, refuse_windows, uniform_layers
from megatron.hf.readers import ModelFields


def _scaled_embedding(fields: ModelFields, _: str) -> float:
    return math.sqrt(fields.count("hidden_size"))


def _softmax_scale(fields: ModelFields, name: str) -> float:
    return fields.count(name) ** -0.5


def _write_scalar(_: float | None, config: GPTConfig) -> int:
    return max(1, round(read.write_scale(None, config) ** -2))


def _softcap(fields: ModelFields, name: str) -> float | None:
    """Return a bound, which an explicit null switches off."""
    is_off = read.is_null(fields, name) or fields.find(name) is None
    return None if is_off else fields.number(name)


_ROWS = (
    *rows.DECODER,
    *rows.RMS_NORM,
    Row("", "norm.zero_centered", constant(True)),
    Row("", "mlp.activation", constant("gelu")),
    Row("", "multipliers.embedding", _scaled_embedding),
    Row("", "multipliers.rounds_embedding", constant(True)),
    Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(None), read.unwritten),
    *rows.SELF_ATTENTION,
    *rows.BIAS,
    Row("use_bidirectional_attention", "", read.must_be(False), read.unwritten),
)
_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}
GEMMA = Architecture(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    has_classifier=False,
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *_ROWS,
        *rows.ROPE,
        # transformers reads gelu as its tanh form, because the first files have this name.
        Row(
            "hidden_act",
            "",
            read.must_be("gelu_pytorch_tanh", "gelu"),
            constant("gelu_pytorch_tanh"),
        ),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType({**_DEFAULTS, "num_key_value_heads": 16}),
)

_POST_NORM = output_norm("post_attention_layernorm")
_MLP = (
    Entry(f"{LAYER}.pre_feedforward_layernorm.weight", "{block}.norm.weight", "h"),
    output_norm("post_feedforward_layernorm"),
    *MLP_PROJECTIONS,
)
_INPUT_AND_OUTPUT_NORMS = (
    *_ROWS,
    Row("", "norm.placement", constant("both")),
    Row("hidden_activation", "", read.must_be("gelu_pytorch_tanh"), constant("gelu_pytorch_tanh")),
    Row("query_pre_attn_scalar", "attention.softmax_scale", _softmax_scale, _write_scalar),
    Row("final_logit_softcapping", "multipliers.logits_softcap", _softcap),
)
_WINDOWS2 = window_kinds(periodic_full_attention(2, offset=1))
GEMMA2 = Architecture(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    has_classifier=False,
    blocks={ATTENTION: (*ATTENTION_ENTRIES, _POST_NORM), DENSE: _MLP},
    ends=ENDS,
    rows=(
        *_INPUT_AND_OUTPUT_NORMS,
        *rows.ROPE,
        Row("attn_logit_softcapping", "attention.softcap", _softcap),
        *attention_kinds.rows(_WINDOWS2),
    ),
    read_blocks=layers(uniform_layers(DENSE), attention_kinds.mixers(_WINDOWS2)),
    defaults=MappingProxyType(
        {
            **_DEFAULTS,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        }
    ),
)


def _pattern_windows(fields: Fields, num_layers: int) -> list[bool]:
    """Return full attention in the last of every `sliding_window_pattern` layers."""
    period = fields.count("sliding_window_pattern", 6)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _gemma3_kinds(fields: Fields, num_layers: int) -> Sequence[AttentionKind]:
    kinds = window_kinds(_pattern_windows)(fields, num_layers)
    if all(kind.has_window for kind in kinds):  # the model's rotary positions are full attention's
        fields.refuse("layer_types", f"supported is {FULL!r} in at least one layer")
    return kinds


def _check_ropes(fields: Fields) -> None:
    parameters = fields.inner("rope_parameters")
    if parameters is not None and set(parameters.raw) - {FULL, SLIDING}:
        fields.refuse("rope_parameters", f"expected objects {FULL} and {SLIDING}")


def _local_base(fields: ModelFields, _: str) -> float:
    """Return the rotary base of layers with a window."""
    parameters = fields.inner("rope_parameters")
    base = fields.number("rope_local_base_freq", 10000.0)
    sliding = parameters and parameters.inner(SLIDING)
    if sliding is None:
        return base
    sliding.must_be("rope_type", "default")
    sliding.must_be("partial_rotary_factor", 1)
    return sliding.number("rope_theta", base)


GEMMA3 = dataclasses.replace(
    GEMMA2,
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    blocks={ATTENTION: (*ATTENTION_ENTRIES, _POST_NORM, *QUERY_KEY_NORMS), DENSE: _MLP},
    rows=(
        *_INPUT_AND_OUTPUT_NORMS,
        *rows.ROPES_OF_TYPES[:-1],
        dataclasses.replace(rows.ROPES_OF_TYPES[-1], to=_local_base),
        *rows.QUERY_KEY_NORMS,
        Row("attn_logit_softcapping", "", read.must_be(), read.unwritten),
        *attention_kinds.rows(_gemma3_kinds),
    ),
    read_blocks=layers(uniform_layers(DENSE), attention_kinds.mixers(_gemma3_kinds)),
    check=_check_ropes,
    has_ropes_of_types=True,
    aliases=frozenset({"sliding_window_pattern", "rope_local_base_freq", "rope_theta"}),
    defaults=MappingProxyType(
        {
            **_DEFAULTS,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "rope_theta": 1e6,
        }
    ),
)
