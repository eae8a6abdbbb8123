# SPDX-License-Identifier: Apache-2.0
"""Translate the layers that config.json describes to symbols of layer patterns and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import (
    ATTENTION,
    DELTA_NET,
    DENSE,
    EXPERTS,
    ffn_of,
    symbols_of,
)
from megatron.hf.fields import Fields

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"

_MIXER_TYPES: Mapping[str, str] = MappingProxyType({LINEAR: DELTA_NET, FULL: ATTENTION})

_MLP_TYPES: Mapping[str, str] = MappingProxyType({"dense": DENSE, "sparse": EXPERTS})

#: Upper bounds on layers, and on heads or experts of all layers together. Each slice of a tensor
#: takes about 1 KB of memory while a folder is read.
MAX_LAYERS, MAX_HEADS_OR_EXPERTS = 10_000, 1 << 18
_COUNTS = (
    "num_attention_heads",
    "n_head",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "linear_num_key_heads",
)

#: Returns the symbol of each layer's mixer, or of each layer's MLP or experts, from the fields of
#: config.json and the number of layers.
LayerReader = Callable[[Fields, int], str]


def blocks_fields(blocks: str) -> dict[str, Any]:
    """Return the fields of `GPTConfig` that specify a model's blocks."""
    ffn = ffn_of(blocks)
    if ffn is not None:
        return {"num_layers": len(ffn), "ffn_pattern": ffn}
    return {"num_layers": len(symbols_of(blocks)), "pattern": blocks}


def uniform_layers(symbol: str) -> LayerReader:
    """Return a reader for models whose layers all have the same kind of block."""
    return lambda _, num_layers: symbol * num_layers


_ATTENTION_LAYERS = uniform_layers(ATTENTION)


def layers(
    ffn: LayerReader,
    mixers: LayerReader = _ATTENTION_LAYERS,
    *,
    names: tuple[str, ...] = ("num_hidden_layers",),
) -> Callable[[Fields], str]:
    """Return a reader of the blocks of a model with layers of a mixer and an MLP or experts.

    Args:
        ffn: reads the kind of each layer's MLP or experts.
        mixers: reads the kind of each layer's mixer.
        names: names of the field of the number of layers.
    """

    def read_blocks(fields: Fields) -> str:
        num_layers = fields.count_of(*names)
        check_size(fields, num_layers, names[0])
        pairs = zip(mixers(fields, num_layers), ffn(fields, num_layers), strict=True)
        return "".join(mixer + symbol for mixer, symbol in pairs)

    return read_blocks


def leading_mlps(fields: Fields, num_layers: int) -> str:
    """Return MLPs in the first layers and experts in all others, as in DeepSeek-V3."""
    dense = min(num_layers, fields.count("first_k_dense_replace", minimum=0))
    return DENSE * dense + EXPERTS * (num_layers - dense)


def typed_mlps(fields: Fields, num_layers: int) -> str:
    """Return the kinds of `mlp_layer_types`; without it, one MLP and experts in all others."""
    if fields.find("mlp_layer_types") is None:
        return (DENSE + EXPERTS * num_layers)[:num_layers]
    return symbols(fields, "mlp_layer_types", _MLP_TYPES, num_layers=num_layers)


def mlp_types(config: GPTConfig, _: GPTConfig) -> list[str]:
    """Return `mlp_layer_types`."""
    names = {symbol: name for name, symbol in _MLP_TYPES.items()}
    return [names.get(symbol, symbol) for symbol in config.blocks[1::2]]


def sparse_steps(fields: Fields, num_layers: int) -> str:
    """Return experts in every `decoder_sparse_step`-th layer, as in Qwen's models."""
    step = fields.count("decoder_sparse_step", 1)
    mlp_only = fields.find("mlp_only_layers") or []
    if not isinstance(mlp_only, list) or not all(type(layer) is int for layer in mlp_only):
        fields.refuse("mlp_only_layers", "expected numbers of layers")
    return "".join(
        DENSE if layer in mlp_only or (layer + 1) % step else EXPERTS for layer in range(num_layers)
    )


def delta_net_mixers(fields: Fields, num_layers: int) -> str:
    """Return the mixers of Qwen3-Next: gated delta nets, and attention in every few layers."""
    if fields.find("layer_types") is not None:
        return symbols(fields, "layer_types", _MIXER_TYPES, num_layers=num_layers)
    interval = fields.count("full_attention_interval")
    return "".join(
        DELTA_NET if layer % interval else ATTENTION for layer in range(1, num_layers + 1)
    )


def mixer_types(config: GPTConfig, _: GPTConfig) -> list[str]:
    """Return Qwen3-Next's names of the mixers. A symbol without a name is returned unchanged."""
    names = {symbol: name for name, symbol in _MIXER_TYPES.items()}
    return [names.get(symbol, symbol) for symbol in config.blocks[::2]]


def dense_layers(config: GPTConfig, _: GPTConfig) -> list[int]:
    """Return the indices of layers with an MLP."""
    return [layer for layer, ffn in enumerate(config.blocks[1::2]) if ffn == DENSE]


def num_leading_mlps(config: GPTConfig, _: GPTConfig) -> int:
    """Return the number of layers before the first layer with experts."""
    first_layer = config.ffn_pattern.find(EXPERTS)
    return config.num_layers if first_layer < 0 else first_layer


def check_size(fields: Fields, num_layers: int, name: str) -> None:
    """Reject too many layers, given by the field `name`, or too many heads or experts in total."""
    if num_layers > MAX_LAYERS:
        fields.refuse(name, f"more than {MAX_LAYERS}")
    for field in _COUNTS:
        if (
            fields.find(field) is not None
            and fields.count(field, minimum=0) * num_layers > MAX_HEADS_OR_EXPERTS
        ):
            fields.refuse(
                field,
                f"with {num_layers} layers that is more than {MAX_HEADS_OR_EXPERTS} in total",
            )


def symbols(
    fields: Fields, name: str, symbols: Mapping[str, str], *, num_layers: int | None = None
) -> str:
    """Return the symbols of a list of layer types. Raises ValueError."""
    types = fields.find(name)
    if not isinstance(types, list) or not types or set(map(str, types)) - symbols.keys():
        fields.refuse(name, f"supported are {', '.join(symbols)}")
    if num_layers not in (None, len(types)):
        fields.refuse(name, "one is needed for each of num_hidden_layers")
    return "".join(symbols[kind] for kind in types)


def check_layer_types(*supported: str) -> Callable[[Fields], None]:
    """Return a check that the layer types, if present, are among those supported."""

    def check(fields: Fields) -> None:
        types = fields.raw.get("layer_types")
        if types is None:
            return
        if not isinstance(types, list) or set(map(str, types)) - set(supported):
            fields.refuse("layer_types", f"supported is {supported[0]!r} in every layer")
        if len(types) != fields.raw.get("num_hidden_layers"):
            fields.refuse("layer_types", "one is needed for each of num_hidden_layers")

    return check


def refuse_windows(
    fields: Fields, *, types_decide: bool = True, switchable: bool = True, typed: bool = True
) -> None:
    """Raise ValueError if layers of a class without window support have a window.

    Args:
        fields: the fields of config.json.
        types_decide: whether `layer_types`, if present, override `use_sliding_window`.
        switchable: whether `use_sliding_window` can switch a window off.
        typed: whether `layer_types` names kinds of attention.
    """
    if typed:
        check_layer_types(FULL)(fields)
    layer_types, window = fields.raw.get("layer_types"), fields.raw.get("sliding_window")
    used = layer_types is None and fields.flag("use_sliding_window", True)
    if window is not None and (used or not switchable):
        fields.refuse("sliding_window", "a window is not supported")
    # An absent window has the default size of its class.
    has_size = "sliding_window" not in fields.raw or window is not None
    untyped = layer_types is None or not types_decide
    if untyped and has_size and fields.flag("use_sliding_window", False):
        fields.refuse("use_sliding_window", "a window is not supported")
