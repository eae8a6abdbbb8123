# SPDX-License-Identifier: Apache-2.0
"""Translate the layer types of config.json to symbols of layer patterns and back."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import (
    ATTENTION,
    DELTA_NET,
    DENSE,
    EXPERTS,
    LATENT,
    MAMBA,
    ffn_of,
)
from megatron.hf.architectures import (
    MAMBA2,
    MIXTRAL,
    NEMOTRON_H,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from megatron.hf.entries import Architecture
from megatron.hf.fields import Fields

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"

#: Names of Nemotron-H's layer types in all versions of transformers. The last name is written.
_BLOCK_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "mamba": MAMBA,
        LINEAR: MAMBA,
        "attention": ATTENTION,
        FULL: ATTENTION,
        "mlp": DENSE,
        "moe": EXPERTS,
    }
)
_MIXER_TYPES: Mapping[str, str] = MappingProxyType({LINEAR: DELTA_NET, FULL: ATTENTION})
_PATTERN = "hybrid_override_pattern"

#: Upper bounds on layers, and on heads or experts of all layers together. Each slice of a tensor
#: takes about 1 KB of memory while a folder is read.
MAX_LAYERS, MAX_HEADS_OR_EXPERTS = 10_000, 1 << 18
_COUNTS = (
    "num_attention_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "linear_num_key_heads",
)


def blocks_fields(blocks: str) -> dict[str, Any]:
    """Return the fields of `GPTConfig` that specify a model's blocks."""
    ffn = ffn_of(blocks)
    if ffn is not None:
        return {"num_layers": len(ffn), "ffn_pattern": ffn}
    return {"num_layers": len(blocks), "pattern": blocks}


def read_blocks(kind: Architecture, fields: Fields) -> str:
    """Return the symbol of each block.

    Raises:
        ValueError: a value is not supported or too large; the message names the field.
    """
    if kind is NEMOTRON_H:
        blocks = _nemotron(fields)
        _check_size(fields, len(blocks), "layers_block_type")
        return blocks
    num_layers = fields.count("num_hidden_layers")
    _check_size(fields, num_layers, "num_hidden_layers")
    if kind is MAMBA2:
        return MAMBA * num_layers
    ffn = _ffn(kind, fields, num_layers)
    mixers = (LATENT if LATENT in kind.blocks else ATTENTION) * num_layers
    if kind is QWEN3_NEXT:
        mixers = _mixers(fields, num_layers)
    return "".join(mixer + ffn_symbol for mixer, ffn_symbol in zip(mixers, ffn, strict=True))


def mixer_types(config: GPTConfig, _: GPTConfig) -> list[str]:
    """Return Qwen3-Next's names of the mixers. A symbol without a name is returned unchanged."""
    names = {symbol: name for name, symbol in _MIXER_TYPES.items()}
    return [names.get(symbol, symbol) for symbol in config.blocks[::2]]


def dense_layers(config: GPTConfig, _: GPTConfig) -> list[int]:
    """Return the indices of layers with an MLP."""
    return [layer for layer, ffn in enumerate(config.blocks[1::2]) if ffn == DENSE]


def first_experts(config: GPTConfig, _: GPTConfig) -> int:
    """Return the number of layers before the first layer with experts."""
    first_layer = config.ffn_pattern.find(EXPERTS)
    return config.num_layers if first_layer < 0 else first_layer


def _check_size(fields: Fields, num_layers: int, name: str) -> None:
    """Reject too many layers, given by the field `name`, or too many heads or experts in total."""
    if num_layers > MAX_LAYERS:
        fields.refuse(name, f"more than {MAX_LAYERS}")
    for field in _COUNTS:
        if (
            fields.find(field) is not None
            and fields.count(field) * num_layers > MAX_HEADS_OR_EXPERTS
        ):
            fields.refuse(
                field,
                f"with {num_layers} layers that is more than {MAX_HEADS_OR_EXPERTS} in total",
            )


def _ffn(kind: Architecture, fields: Fields, num_layers: int) -> str:
    """Return the symbol of each layer's MLP or experts."""
    if kind is MIXTRAL:
        return EXPERTS * num_layers
    if LATENT in kind.blocks:
        dense = min(num_layers, fields.count("first_k_dense_replace", minimum=0))
        return DENSE * dense + EXPERTS * (num_layers - dense)
    if kind not in (QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT):
        return DENSE * num_layers
    step = fields.count("decoder_sparse_step", 1)
    mlp_only = fields.find("mlp_only_layers") or []
    if not isinstance(mlp_only, list) or not all(type(layer) is int for layer in mlp_only):
        fields.refuse("mlp_only_layers", "expected numbers of layers")
    return "".join(
        DENSE if layer in mlp_only or (layer + 1) % step else EXPERTS for layer in range(num_layers)
    )


def _mixers(fields: Fields, num_layers: int) -> str:
    """Return the symbol of each layer's mixer in Qwen3-Next."""
    if fields.find("layer_types") is not None:
        return _symbols(fields, "layer_types", _MIXER_TYPES, num_layers)
    interval = fields.count("full_attention_interval")
    return "".join(
        DELTA_NET if layer % interval else ATTENTION for layer in range(1, num_layers + 1)
    )


def _nemotron(fields: Fields) -> str:
    """Return the layers of Nemotron-H, from any of three fields, which must agree."""
    patterns: dict[str, str] = {}
    for name in ("layers_block_type", "layer_types"):
        if fields.find(name) is not None:
            patterns[name] = _symbols(fields, name, _BLOCK_TYPES)
    pattern = fields.find(_PATTERN)
    if pattern is not None:
        supported_symbols = set(_BLOCK_TYPES.values())
        if not isinstance(pattern, str) or not pattern or set(pattern) - supported_symbols:
            fields.refuse(
                _PATTERN, f"supported are the symbols {', '.join(sorted(supported_symbols))}"
            )
        patterns[_PATTERN] = pattern
    if not patterns:
        fields.refuse(_PATTERN, "it specifies the layers: give it, or layers_block_type")
    name, blocks = next(iter(patterns.items()))
    for field, symbols in patterns.items():
        if symbols != blocks:
            fields.refuse(field, f"{name} says {blocks}")
    if fields.find("num_hidden_layers") not in (None, len(blocks)):
        fields.refuse("num_hidden_layers", f"{name} has {len(blocks)} layers")
    return blocks


def _symbols(
    fields: Fields, name: str, symbols: Mapping[str, str], num_layers: int | None = None
) -> str:
    """Return the symbols of a list of layer types. Raises ValueError."""
    types = fields.find(name)
    if not isinstance(types, list) or not types or set(map(str, types)) - symbols.keys():
        fields.refuse(name, f"supported are {', '.join(symbols)}")
    if num_layers not in (None, len(types)):
        fields.refuse(name, "one is needed for each of num_hidden_layers")
    return "".join(symbols[kind] for kind in types)
