# SPDX-License-Identifier: Apache-2.0
"""Attention windows and positions that differ between the layers of a model.

Models have at most two kinds of attention. `W` blocks are the layers with a window or, if windows
do not distinguish the layers, the layers without rotary positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron.cli.two_way_table import OMITTED, Row, unless
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTION, WINDOW, ffn_of
from megatron.hf import readers as read
from megatron.hf.fields import Fields
from megatron.hf.layer_types import FULL, SLIDING, LayerReader, check_layer_types
from megatron.hf.readers import ModelFields


class AttentionKind(NamedTuple):
    """What distinguishes the attention of the layers of a model."""

    has_window: bool
    is_rotary: bool = True


#: Returns the kind of attention of each layer from the fields of config.json and the number of
#: layers.
KindsReader = Callable[[Fields, int], Sequence[AttentionKind]]

#: Returns whether each layer has a window, as a model does without `layer_types`.
WindowRule = Callable[[Fields, int], Sequence[bool]]


def periodic_full_attention(period: int, *, offset: int) -> WindowRule:
    """Return the rule of full attention in one of `period` layers, from the layer `offset` on."""

    def rule(fields: Fields, num_layers: int) -> Sequence[bool]:
        if not _has_size(fields):
            fields.refuse("sliding_window", "give the size of the windows")
        return [layer % period != offset for layer in range(num_layers)]

    return rule


def all_windows(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Return a window in all layers, or in none if there is no size."""
    return [_has_size(fields)] * num_layers


def trailing_windows(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Return a window in the layers from `max_window_layers` on, as in Qwen2 and Qwen3."""
    start = fields.count("max_window_layers", minimum=0)
    used = _has_size(fields) and _is_switched_on(fields)
    return [used and layer >= start for layer in range(num_layers)]


def alternating_windows(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Return a window in every second layer below `max_window_layers`, as in Qwen2-MoE."""
    end = fields.count("max_window_layers", minimum=0)
    used = _is_switched_on(fields)
    return [used and layer < end and not layer % 2 for layer in range(num_layers)]


def window_kinds(rule: WindowRule) -> KindsReader:
    """Return a reader of the windows of `layer_types` or, without it, of a rule."""

    def read_kinds(fields: Fields, num_layers: int) -> Sequence[AttentionKind]:
        return [AttentionKind(window) for window in _windows(fields, num_layers, rule)]

    return read_kinds


def rotary_windows(fields: Fields, num_layers: int) -> Sequence[AttentionKind]:
    """Return the kinds of EXAONE 4: with windows, only their layers have rotary positions."""

    def rule(fields: Fields, num_layers: int) -> Sequence[bool]:
        period = fields.count("sliding_window_pattern")
        return periodic_full_attention(period, offset=period - 1)(fields, num_layers)

    windows, are_mixed = _windows(fields, num_layers, rule), _has_size(fields)
    if are_mixed and not any(windows):
        fields.refuse("layer_types", "supported is a window in at least one layer")
    return [AttentionKind(window, window or not are_mixed) for window in windows]


def olmo3_kinds(fields: Fields, num_layers: int) -> Sequence[AttentionKind]:
    """Return the kinds of OLMo 3: full attention in every fourth layer, or as in `layer_types`."""
    kinds = window_kinds(periodic_full_attention(4, offset=3))(fields, num_layers)
    if all(kind.has_window for kind in kinds):  # the model's rotary positions are full attention's
        fields.refuse("layer_types", f"supported is {FULL!r} in at least one layer")
    return kinds


def plain_kinds(fields: Fields, num_layers: int) -> Sequence[AttentionKind]:
    """Return the kinds of SmolLM3: `no_rope_layers` has a zero for layers without rotary positions,
    and windows are in these layers unless `layer_types` is present."""
    interval = fields.count("no_rope_layer_interval")
    bits = fields.find("no_rope_layers")
    if bits is None:
        bits = [int(layer % interval != 0) for layer in range(1, num_layers + 1)]
    valid = isinstance(bits, list) and all(type(bit) is int and bit in (0, 1) for bit in bits)
    if not valid or len(bits) < num_layers:
        fields.refuse("no_rope_layers", "expected a 0 or 1 for each of num_hidden_layers")
    rotary = [bit == 1 for bit in bits[:num_layers]]
    if not any(rotary):
        field = "no_rope_layers" if "no_rope_layers" in fields.raw else "no_rope_layer_interval"
        fields.refuse(field, "supported are rotary positions in at least one layer")
    used = _is_switched_on(fields) and _has_size(fields)
    windows = _windows(fields, num_layers, lambda *_: [used and not on for on in rotary])
    return [AttentionKind(*kind) for kind in zip(windows, rotary, strict=True)]


def _windows(fields: Fields, num_layers: int, rule: WindowRule) -> Sequence[bool]:
    if fields.find("layer_types") is None:
        return rule(fields, num_layers)
    check_layer_types(FULL, SLIDING)(fields)
    windows = [kind == SLIDING for kind in fields.raw["layer_types"]]
    if any(windows) and not (_has_size(fields) and _is_switched_on(fields)):
        switch = "" if fields.find("use_sliding_window") is None else " and use_sliding_window"
        fields.refuse("layer_types", f"there is no window: give sliding_window{switch}")
    return windows


def _has_size(fields: Fields) -> bool:
    is_null = "sliding_window" in fields.raw and fields.raw["sliding_window"] is None
    return not is_null and fields.find("sliding_window") is not None


def _is_switched_on(fields: Fields) -> bool:
    """Return `use_sliding_window`, which only some classes have."""
    return fields.flag("use_sliding_window", True)


def mixers(kinds: KindsReader) -> LayerReader:
    """Return a reader of the symbol of each layer's attention."""

    def read_symbols(fields: Fields, num_layers: int) -> str:
        layer_kinds = kinds(fields, num_layers)
        if len(set(layer_kinds)) > 2:
            fields.refuse(
                "layer_types", "windows and positions make more than two kinds of attention"
            )
        if len(set(layer_kinds)) < 2:
            return ATTENTION * num_layers
        by_window = len({kind.has_window for kind in layer_kinds}) == 2
        return "".join(
            WINDOW if (kind.has_window if by_window else not kind.is_rotary) else ATTENTION
            for kind in layer_kinds
        )

    return read_symbols


def rows(kinds: KindsReader) -> tuple[Row, ...]:
    """Return the rows of models whose layers have windows or positions of two kinds."""
    return (
        Row("sliding_window", "attention.window", _window_of(ATTENTION, kinds), unless(None)),
        Row("sliding_window", "window.window", _window_of(WINDOW, kinds), unless(None)),
        Row("", "attention.rotary", _rotary_of(ATTENTION, kinds)),
        Row("", "window.rotary", _rotary_of(WINDOW, kinds)),
        Row("", "window.pattern", lambda fields, _: pattern_of(fields.blocks)),
        Row("layer_types", "", read.unread, _write_types),
    )


#: The fields of Qwen2 and Qwen3 that switch windows on.
SWITCH = (
    Row(
        "use_sliding_window",
        "",
        read.unread,
        lambda config, _: any(_has_windows(config)) or OMITTED,
    ),
)
MAX_WINDOW_LAYERS = (
    Row("max_window_layers", "", read.unread, lambda config, _: _max_window_layers(config)),
)


def pattern_of(blocks: str) -> str:
    """Return the kinds of a GPT's attention; empty for a hybrid and for one kind."""
    return _symbols(blocks) if WINDOW in blocks and ffn_of(blocks) is not None else ""


def write_no_rope_layers(config: GPTConfig, _: GPTConfig) -> list[int]:
    """Return SmolLM3's `no_rope_layers`."""
    return [int(getattr(kind, "rotary", True)) for kind in _attention_of(config)]


def _write_types(config: GPTConfig, _: GPTConfig) -> list[str]:
    return [SLIDING if window else FULL for window in _has_windows(config)]


def _max_window_layers(config: GPTConfig) -> int:
    windows = _has_windows(config)
    return windows.index(True) if any(windows) else len(windows)


def _has_windows(config: GPTConfig) -> list[bool]:
    return [getattr(kind, "window", None) is not None for kind in _attention_of(config)]


def _attention_of(config: GPTConfig) -> list[Any]:
    """Return the config that distinguishes the attention of each layer."""
    kinds = {ATTENTION: config.attention, WINDOW: config.second_attention}
    return [kinds[symbol] for symbol in _symbols(config.blocks)]


def _symbols(blocks: str) -> str:
    return "".join(symbol for symbol in blocks if symbol in ATTENTION + WINDOW)


def _kind_of(symbol: str, kinds: KindsReader, fields: ModelFields) -> AttentionKind:
    symbols = _symbols(fields.blocks)
    return kinds(fields, len(symbols))[symbols.index(symbol)]


def _window_of(symbol: str, kinds: KindsReader) -> Callable[[ModelFields, str], int | None]:
    """Return a reader of the window of a kind of attention."""

    def read_window(fields: ModelFields, name: str) -> int | None:
        return fields.count(name) if _kind_of(symbol, kinds, fields).has_window else None

    return read_window


def _rotary_of(symbol: str, kinds: KindsReader) -> Callable[[ModelFields, str], bool]:
    """Return a reader of whether a kind of attention is rotary."""
    return lambda fields, _: _kind_of(symbol, kinds, fields).is_rotary
