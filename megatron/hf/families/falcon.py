# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: parallel Mamba-2 and attention, then an MLP, with factors on many activations.

Factors on the inputs of attention and Mamba-2, and on keys, are combined with the factors on
attention logits, on projections and on outputs: without biases the function is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, DENSE, MAMBA
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER,
    MIXER_NORM,
)
from megatron.hf.families.nemotron import BAMBA_MIXER, BAMBA_MLP, mamba_entries
from megatron.hf.fields import Fields
from megatron.hf.layer_types import check_size, refuse_windows
from megatron.hf.readers import ModelFields

_LAYER_PATTERN = f"({MAMBA}{ATTENTION}){DENSE}"


def _read_blocks(fields: Fields) -> str:
    num_layers = fields.count("num_hidden_layers")
    check_size(fields, num_layers, "num_hidden_layers")
    return _LAYER_PATTERN * num_layers


def _check(fields: Fields) -> None:
    """Raise ValueError for layers of another kind, and for biases that Mamba-2 has not here."""
    for name in ("layer_types", "layers_block_type"):
        fields.must_be(name, ["hybrid"] * fields.count("num_hidden_layers"))
    fields.must_be("projectors_bias", fields.flag("mamba_proj_bias", False))
    refuse_windows(fields, typed=False)


def _head_channels(fields: ModelFields, name: str) -> int:
    """Return the channels of a head of Mamba-2."""
    inner, heads = fields.count("mamba_d_ssm"), fields.count("mamba_n_heads")
    if "mamba_d_ssm" in fields.raw and fields.raw["mamba_d_ssm"] is None:
        inner = fields.count("mamba_expand") * fields.count("hidden_size")
    head_dim = inner // heads if fields.find(name) == "auto" else fields.count(name)
    if head_dim * heads != inner:
        fields.refuse(name, f"times mamba_n_heads it must be mamba_d_ssm ({inner})")
    return head_dim


def _has_norm(fields: ModelFields, name: str) -> bool:
    """Return whether the output of Mamba-2 is normalised, after its gate."""
    has_norm = fields.flag(name, False)
    if has_norm and fields.flag("mamba_norm_before_gate", True):
        fields.refuse("mamba_norm_before_gate", f"with {name} supported is false")
    return has_norm


def _input_factor(fields: Fields, name: str, bias: str) -> float:
    """Return a factor on an input, which a projection with a bias cannot have."""
    factor = fields.number(name, 1.0)
    if factor != 1.0 and fields.flag(bias, False):
        fields.refuse(name, f"with {bias} supported is 1")
    return factor


def _factors(fields: Fields, name: str, count: int) -> list[float]:
    """Return a list of positive factors."""
    values = fields.find(name)
    values = [1.0] * count if values is None else values
    valid = isinstance(values, list) and len(values) == count
    if not valid or any(type(x) not in (int, float) or not 0 < x < math.inf for x in values):
        fields.refuse(name, f"expected {count} positive numbers")
    return [float(x) for x in values]


def _factor(name: str, index: int, count: int) -> Callable[[ModelFields, str], float]:
    return lambda fields, _: _factors(fields, name, count)[index]


def _softmax_scale(fields: ModelFields, name: str) -> float:
    factor = _input_factor(fields, "attention_in_multiplier", "attention_bias")
    scale = fields.number(name, 1.0) * factor * factor
    return scale / math.sqrt(read.head_dim(fields, "head_dim"))


def _key_factor(_: float | None, config: GPTConfig) -> float:
    """Return the factor from which `_softmax_scale` computes the same scale."""
    attention = config.attention
    scale = getattr(attention, "scale", 1.0)
    root = math.sqrt(getattr(attention, "kv_channels", 1))
    factor = scale * root
    neighbours = (factor, math.nextafter(factor, math.inf), math.nextafter(factor, 0.0))
    return next((x for x in neighbours if x / root == scale), factor)


def _attention_output(fields: ModelFields, name: str) -> float:
    return fields.number(name, 1.0) * _input_factor(
        fields, "attention_in_multiplier", "attention_bias"
    )


def _projections(fields: ModelFields, name: str) -> tuple[float, ...] | None:
    """Return the factors on the projected gate, x, B, C and dt."""
    factor = _input_factor(fields, "ssm_in_multiplier", "mamba_proj_bias")
    factors = tuple(x * factor for x in _factors(fields, name, 5))
    return None if set(factors) == {1.0} else factors


def _write_projections(factors: tuple[float, ...] | None, _: GPTConfig) -> list[float]:
    return list(factors or (1.0,) * 5)


def _write_mlp(gate: float, config: GPTConfig) -> list[Any]:
    return [gate, config.multipliers.mlp]


_FACTORS = (
    Row("embedding_multiplier", "multipliers.embedding", read.number(1.0)),
    Row("lm_head_multiplier", "multipliers.logits", read.number(1.0)),
    Row("key_multiplier", "attention.softmax_scale", _softmax_scale, _key_factor),
    Row("attention_in_multiplier", "attention.", read.unread, constant(1.0)),
    Row("attention_out_multiplier", "multipliers.attention", _attention_output),
    Row("ssm_in_multiplier", "mamba.", read.unread, constant(1.0)),
    Row("ssm_multipliers", "mamba.multipliers", _projections, _write_projections),
    Row("ssm_out_multiplier", "multipliers.mamba", read.number(1.0)),
    Row("mlp_multipliers", "mlp.gate_multiplier", _factor("mlp_multipliers", 0, 2), _write_mlp),
    Row("mlp_multipliers", "multipliers.mlp", _factor("mlp_multipliers", 1, 2), read.unwritten),
)
FALCON_H1 = Architecture(
    model_type="falcon_h1",
    class_name="FalconH1ForCausalLM",
    has_classifier=False,
    blocks={
        MAMBA: mamba_entries(f"{LAYER}.mamba", MIXER_NORM),
        ATTENTION: ATTENTION_ENTRIES[1:],
        DENSE: BAMBA_MLP,
    },
    ends=(EMBEDDING, FINAL_NORM._replace(hf_name="model.final_layernorm.weight"), HEAD),
    blocks_per_layer=3,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        Row("mlp_bias", "mlp.bias", read.flag(False)),
        *(row for row in BAMBA_MIXER if row.name not in ("num_hidden_layers", "mamba_d_head")),
        Row("num_hidden_layers", "", read.unread, lambda config, _: len(config.blocks) // 3),
        Row("mamba_d_head", "mamba.head_channels", _head_channels),
        Row("mamba_d_ssm", "mamba.", read.unread, lambda mamba, _: mamba.inner_channels),
        Row("projectors_bias", "mamba.", read.unread, lambda mamba, _: mamba.bias),
        Row("mamba_rms_norm", "mamba.norm", _has_norm),
        Row("mamba_norm_before_gate", "mamba.", read.unread, constant(False)),
        *_FACTORS,
    ),
    read_blocks=_read_blocks,
    check=_check,
    aliases=frozenset({"layer_types", "layers_block_type"}),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        }
    ),
)
