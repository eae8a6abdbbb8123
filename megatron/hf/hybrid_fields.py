# SPDX-License-Identifier: Apache-2.0
"""Hybrid models in config.json: which blocks there are, recurrent mixers; read and written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.core.models.gpt import GPTConfig
from megatron.core.models.pattern import (
    ATTENTION,
    DELTA_NET,
    DENSE,
    EXPERTS,
    MAMBA,
    ffn_of,
)
from megatron.core.ssm.config import GatedDeltaNetConfig, Mamba2Config
from megatron.hf.architectures import MAMBA2, NEMOTRON_H, QWEN3_NEXT
from megatron.hf.entries import Architecture
from megatron.hf.fields import Fields

LINEAR, FULL = "linear_attention", "full_attention"

#: What layers of Nemotron-H are called, by versions of transformers, and what is written.
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
_PATTERN = "hybrid_override_pattern"

#: Stands for a dt without a floor where transformers takes a logarithm of it for initial values.
_NO_FLOOR = 1e-30


def blocks_fields(blocks: str) -> dict[str, Any]:
    """Return the fields of `GPTConfig` that say which blocks a model has."""
    ffn = ffn_of(blocks)
    if ffn is not None:
        return {"num_layers": len(ffn), "ffn_pattern": ffn}
    return {"num_layers": len(blocks), "pattern": blocks}


def read_mixer_types(fields: Fields, num_layers: int) -> str:
    """Return the symbol of each layer's mixer in Qwen3-Next. Raises ValueError."""
    types = fields.find("layer_types")
    if types is None:
        interval = fields.count("full_attention_interval")
        return "".join(
            DELTA_NET if layer % interval else ATTENTION for layer in range(1, num_layers + 1)
        )
    symbols = {LINEAR: DELTA_NET, FULL: ATTENTION}
    return _symbols(fields, "layer_types", symbols, num_layers)


def read_block_types(fields: Fields) -> str:
    """Return the symbol of each layer of Nemotron-H, written in any of three ways.

    Raises:
        ValueError: none of them, two that differ, or a type that is not known.
    """
    found: dict[str, str] = {}
    for name in ("layers_block_type", "layer_types"):
        if fields.find(name) is not None:
            found[name] = _symbols(fields, name, _BLOCK_TYPES)
    pattern = fields.find(_PATTERN)
    if pattern is not None:
        known = set(_BLOCK_TYPES.values())
        if not isinstance(pattern, str) or not pattern or set(pattern) - known:
            fields.refuse(_PATTERN, f"supported are the symbols {', '.join(sorted(known))}")
        found[_PATTERN] = pattern
    if not found:
        fields.refuse(_PATTERN, "it says which layers there are: give it, or layers_block_type")
    name, blocks = next(iter(found.items()))
    for other, symbols in found.items():
        if symbols != blocks:
            fields.refuse(other, f"{name} says {blocks}")
    if fields.find("num_hidden_layers") not in (None, len(blocks)):
        fields.refuse("num_hidden_layers", f"{name} has {len(blocks)} layers")
    return blocks


def _symbols(
    fields: Fields, name: str, symbols: Mapping[str, str], num_layers: int | None = None
) -> str:
    """Return the symbols of a list of types of layers. Raises ValueError."""
    types = fields.find(name)
    if not isinstance(types, list) or not types or set(map(str, types)) - symbols.keys():
        fields.refuse(name, f"supported are {', '.join(symbols)}")
    if num_layers not in (None, len(types)):
        fields.refuse(name, "one is needed for each of num_hidden_layers")
    return "".join(symbols[kind] for kind in types)


def read_delta_net(fields: Fields) -> GatedDeltaNetConfig:
    """Read the shape of a gated delta net. Raises ValueError."""
    return GatedDeltaNetConfig(
        num_key_heads=fields.count("linear_num_key_heads"),
        num_value_heads=fields.count("linear_num_value_heads"),
        key_channels=fields.count("linear_key_head_dim"),
        value_channels=fields.count("linear_value_head_dim"),
        conv_width=fields.count("linear_conv_kernel_dim"),
    )


def read_mamba(kind: Architecture, fields: Fields) -> Mamba2Config:
    """Read the shape of a Mamba-2 mixer.

    Nemotron-H's own code bounds dt by `time_step_limit`; transformers up to 5.23 keeps it above
    `time_step_min` instead, which its weights have not been trained with.

    Raises:
        ValueError: a value that is not supported; it names the field.
    """
    names = {"heads": "num_heads", "channels": "head_dim", "state": "state_size"}
    if kind is NEMOTRON_H:
        names = {"heads": "mamba_num_heads", "channels": "mamba_head_dim"}
        names["state"] = "ssm_state_size"
        fields.must_be("mamba_hidden_act", "silu", "swish")
    fields.must_be("rms_norm", True)
    mamba = Mamba2Config(
        num_heads=fields.count(names["heads"]),
        head_channels=fields.count(names["channels"]),
        state_channels=fields.count(names["state"]),
        num_groups=fields.count("n_groups"),
        conv_width=fields.count("conv_kernel"),
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
        dt_limit=_read_limit(fields),
    )
    if kind is MAMBA2 and fields.count("expand") * fields.count("hidden_size") != (
        mamba.inner_channels
    ):
        fields.refuse("expand", "times hidden_size it must be num_heads times head_dim")
    return mamba


def _read_limit(fields: Fields) -> tuple[float, float]:
    """Return the bounds of dt; infinity is written in two ways."""
    value = fields.find("time_step_limit")
    if value is None:
        return 0.0, math.inf
    ends = value if isinstance(value, list | tuple) else []
    ends = [math.inf if end == {"__float__": "Infinity"} else end for end in ends]
    if len(ends) != 2 or any(type(end) not in (int, float) for end in ends):
        fields.refuse("time_step_limit", "expected the least and the most dt")
    least, most = map(float, ends)
    if not 0.0 <= least < most:
        fields.refuse("time_step_limit", "expected 0 <= least < most")
    return least, most


def write_blocks(kind: Architecture, config: GPTConfig) -> dict[str, Any]:
    """Return the fields that say which blocks there are, and the shapes of recurrent mixers.

    What the architecture cannot be shows when this is read back.
    """
    if kind is QWEN3_NEXT:
        types = {DELTA_NET: LINEAR, ATTENTION: FULL}
        found: dict[str, Any] = {
            "num_hidden_layers": len(config.blocks) // 2,
            "layer_types": [types.get(symbol, symbol) for symbol in config.blocks[::2]],
        }
        return found if config.delta_net is None else found | _write_delta_net(config.delta_net)
    if kind is NEMOTRON_H:
        found = {_PATTERN: config.blocks, "num_hidden_layers": len(config.blocks)}
        return found if config.mamba is None else found | _write_mamba(kind, config, config.mamba)
    if kind is MAMBA2:
        assert config.mamba is not None
        return {"num_hidden_layers": len(config.blocks), **_write_mamba(kind, config, config.mamba)}
    return {}


def _write_delta_net(delta_net: GatedDeltaNetConfig) -> dict[str, Any]:
    return {
        "linear_num_key_heads": delta_net.num_key_heads,
        "linear_num_value_heads": delta_net.num_value_heads,
        "linear_key_head_dim": delta_net.key_channels,
        "linear_value_head_dim": delta_net.value_channels,
        "linear_conv_kernel_dim": delta_net.conv_width,
    }


def _write_mamba(kind: Architecture, config: GPTConfig, mamba: Mamba2Config) -> dict[str, Any]:
    least, most = mamba.dt_limit
    found: dict[str, Any] = {
        "n_groups": mamba.num_groups,
        "conv_kernel": mamba.conv_width,
        "use_conv_bias": mamba.conv_bias,
        "use_bias": mamba.bias,
    }
    if (least, most) != (0.0, math.inf):
        ends = (least, {"__float__": "Infinity"} if most == math.inf else most)
        found["time_step_limit"] = list(ends)
    if kind is NEMOTRON_H:
        return found | {
            "mamba_num_heads": mamba.num_heads,
            "mamba_head_dim": mamba.head_channels,
            "ssm_state_size": mamba.state_channels,
            "mamba_hidden_act": "silu",
            # See `read_mamba`.
            "time_step_min": least or _NO_FLOOR,
        }
    return found | {
        "num_heads": mamba.num_heads,
        "head_dim": mamba.head_channels,
        "state_size": mamba.state_channels,
        "expand": mamba.inner_channels // config.hidden_size,
    }
