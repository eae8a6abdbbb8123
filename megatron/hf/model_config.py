# SPDX-License-Identifier: Apache-2.0
"""config.json to the configuration of a GPT: every field that decides the function, or an error."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from megatron.core.models.gpt import GPTConfig
from megatron.core.ops.rope import RopeScaling
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig
from megatron.hf.architectures import ARCHITECTURES, Architecture

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """What config.json says about a model.

    Args:
        kind: its architecture.
        config: our configuration of it, without dropout.
        max_length: longest sequence it is meant for, in tokens.
        dtype: of its weights, if it says.
    """

    kind: Architecture
    config: GPTConfig
    max_length: int | None
    dtype: torch.dtype | None


def read_model(raw: Mapping[str, Any], *, where: str) -> HuggingFaceModel:
    """Translate config.json.

    Args:
        raw: its fields.
        where: its path, for errors.

    Raises:
        ValueError: an architecture or a value that is not supported; it names the field.
    """
    fields = _Fields(raw, where)
    kind = _kind(fields)
    _check_neutral(fields)
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    head_dim = fields.count("head_dim", kind.default_head_dim or 0)
    if not head_dim:
        if hidden % heads:
            fields.refuse("head_dim", "give it, as heads do not divide hidden_size")
        head_dim = hidden // heads
    biased = fields.flag("attention_bias", False)
    if not kind.has_mlp_bias and fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", f"{kind.class_name} has none")
    max_length = fields.count("max_position_embeddings", 0) or None
    config = GPTConfig(
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden,
        vocab_size=fields.count("vocab_size"),
        attention=AttentionConfig(
            num_attention_heads=heads,
            num_query_groups=fields.count("num_key_value_heads", heads),
            kv_channels=head_dim,
            qkv_bias=biased,
            output_bias=biased,
            qk_norm=kind.model_type == "qwen3",
        ),
        mlp=MLPConfig(
            ffn_hidden_size=fields.count("intermediate_size"),
            bias=fields.flag("mlp_bias", False),
        ),
        norm=NormConfig(kind="RMSNorm", epsilon=fields.number("rms_norm_eps", 1e-6)),
        rope=_rope(fields, max_length),
        tied=fields.flag("tie_word_embeddings", False),
        init_std=fields.number("initializer_range", 0.02),
    )
    if problems := config.problems():
        raise ValueError(f"{where}: {'; '.join(problems)}")
    return HuggingFaceModel(kind=kind, config=config, max_length=max_length, dtype=_dtype(fields))


_FOREIGN = re.compile(r"expert|_multiplier$|_scale$|softcap|^n_shared|^moe_|_lora_")


class _Fields:
    """Fields of a JSON object; an error names the field, its value and what is possible."""

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.raw, self.where, self._prefix = raw, where, prefix

    def refuse(self, name: str, why: str) -> NoReturn:
        shown = repr(self.raw[name])[:100] if name in self.raw else "absent"
        raise ValueError(f"{self.where}: {self._prefix}{name} is {shown}: {why}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < 1 << 31:
            self.refuse(name, "expected a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self.refuse(name, "expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "expected true or false")
        return value

    def inner(self, name: str) -> _Fields | None:
        value = self.raw.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "expected an object")
        return _Fields(value, self.where, f"{self._prefix}{name}.")


def _kind(fields: _Fields) -> Architecture:
    model_type = fields.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        fields.refuse("model_type", f"supported are {', '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[model_type]
    classes = fields.raw.get("architectures")
    if classes is not None and classes != [kind.class_name]:
        fields.refuse("architectures", f"supported is [{kind.class_name!r}]")
    return kind


def _check_neutral(fields: _Fields) -> None:
    """Refuse what would change the function and is not supported."""
    raw = fields.raw
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        fields.refuse("hidden_act", "supported is 'silu'")
    if raw.get("quantization_config") is not None:
        fields.refuse("quantization_config", "quantised weights are not supported")
    for name, value in raw.items():
        # Mixtures of experts, and scales that other models of these names have.
        if _FOREIGN.search(name) and value not in (None, False, 0, 1, [], {}):
            fields.refuse(name, "this changes the model and is not supported")
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or set(map(str, layer_types)) - {"full_attention"}:
            fields.refuse("layer_types", "supported is 'full_attention' in every layer")
        if len(layer_types) != raw.get("num_hidden_layers"):
            fields.refuse("layer_types", "one is needed for each of num_hidden_layers")
    elif raw.get("sliding_window") is not None and fields.flag("use_sliding_window", True):
        fields.refuse("sliding_window", "a window is not supported")


def _dtype(fields: _Fields) -> torch.dtype | None:
    name = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    value = fields.raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in DTYPES:
        fields.refuse(name, f"supported are {', '.join(DTYPES)}")
    return DTYPES[value]


def _rope(fields: _Fields, max_length: int | None) -> RopeConfig:
    """Read rope_parameters, or what stood in its place before: rope_theta and rope_scaling."""
    chosen = fields.inner("rope_scaling") or fields.inner("rope_parameters")
    chosen = chosen or _Fields({}, fields.where, "rope_parameters.")
    base = fields.number("rope_theta", 10000.0)
    base = chosen.number("rope_theta", base)
    for holder in (fields, chosen):
        if holder.raw.get("partial_rotary_factor") not in (None, 1, 1.0):
            holder.refuse("partial_rotary_factor", "supported is 1")
    name = "rope_type" if "rope_type" in chosen.raw else "type"
    kind = chosen.raw.get(name, "default")
    if kind == "default":
        return RopeConfig(base=base)
    if kind not in ("linear", "llama3", "yarn"):
        chosen.refuse(name, "supported are default, linear, llama3, yarn")
    if kind == "linear":
        return RopeConfig(
            base=base, scaling=RopeScaling(kind="linear", factor=chosen.number("factor"))
        )
    original = fields.count(
        "original_max_position_embeddings",
        chosen.count("original_max_position_embeddings", max_length),
    )
    try:
        if kind == "llama3":
            scaling = RopeScaling(
                kind="llama3",
                factor=chosen.number("factor"),
                low_freq_factor=chosen.number("low_freq_factor"),
                high_freq_factor=chosen.number("high_freq_factor"),
                original_max_position=original,
            )
        else:
            scaling = _yarn(chosen, original, max_length)
    except ValueError as error:
        raise ValueError(f"{fields.where}: {error}") from None
    return RopeConfig(base=base, scaling=scaling)


def _yarn(chosen: _Fields, original: int, max_length: int | None) -> RopeScaling:
    if not chosen.flag("truncate", True):
        chosen.refuse("truncate", "supported is true")
    factor = chosen.number("factor", (max_length or original) / original)
    attention_factor = chosen.raw.get("attention_factor")
    if attention_factor is not None:
        attention_factor = chosen.number("attention_factor")
    elif chosen.raw.get("mscale") and chosen.raw.get("mscale_all_dim"):
        log = 0.1 * math.log(max(factor, 1.0))
        above, below = chosen.number("mscale"), chosen.number("mscale_all_dim")
        attention_factor = (above * log + 1.0) / (below * log + 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=chosen.number("beta_fast", 32.0),
        beta_slow=chosen.number("beta_slow", 1.0),
        attention_factor=attention_factor,
    )
