# SPDX-License-Identifier: Apache-2.0
"""A GPT's configuration to config.json: written, read back, and only then believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import RopeConfig
from megatron.hf.architectures import LLAMA, QWEN3, Architecture
from megatron.hf.model_config import DTYPES, read_model

#: Fields of somebody's config.json that say nothing about the function and may be kept.
_KEPT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_dropout",
    "use_cache",
    "transformers_version",
)


def architecture_of(config: GPTConfig) -> Architecture:
    """Return the architecture that a model could be exported as."""
    return QWEN3 if config.attention.qk_norm else LLAMA


def function_of(config: GPTConfig) -> GPTConfig:
    """Return what decides a model's function at inference: without dropout and initial values."""
    attention = dataclasses.replace(config.attention, dropout=0.0)
    return dataclasses.replace(config, attention=attention, hidden_dropout=0.0, init_std=0.02)


def check_exportable(config: GPTConfig) -> None:
    """Raise ValueError, naming the fields, if no architecture of the tables is this model."""
    write_config(config, max_length=None, dtype=torch.float32, end_tokens=())


def write_config(
    config: GPTConfig,
    *,
    max_length: int | None,
    dtype: torch.dtype,
    end_tokens: Sequence[int],
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of config.json for a model.

    Args:
        config: the model.
        max_length: longest sequence it is meant for, in tokens.
        dtype: of the weights.
        end_tokens: ids that end a text, if `base` does not say.
        base: config.json that the model came from; kept as it is where it still holds.

    Raises:
        ValueError: no architecture of the tables computes what this model does; names the fields.
    """
    name = next(name for name, known in DTYPES.items() if known == dtype)
    if base is not None and _says(base, config):
        key = "torch_dtype" if "dtype" not in base and "torch_dtype" in base else "dtype"
        return {**base, key: name}
    kind = architecture_of(config)
    attention = config.attention
    fields: dict[str, Any] = {
        "architectures": [kind.class_name],
        "model_type": kind.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_query_groups,
        "head_dim": attention.kv_channels,
        "hidden_act": "silu",
        "attention_bias": attention.qkv_bias,
        "rms_norm_eps": config.norm.epsilon,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "max_position_embeddings": max_length,
        "torch_dtype": name,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": _one_or_all(end_tokens),
        **_rope_fields(config.rope),
    }
    if kind.has_mlp_bias:
        fields["mlp_bias"] = config.mlp.bias
    fields.update({key: base[key] for key in _KEPT if base is not None and key in base})
    if max_length is None:
        del fields["max_position_embeddings"]
    found = differences(read_model(fields, where="config.json").config, config)
    if found:
        raise ValueError(f"the model cannot be exported as {kind.class_name}: {'; '.join(found)}")
    return fields


def _one_or_all(tokens: Sequence[int]) -> int | list[int] | None:
    return None if not tokens else tokens[0] if len(tokens) == 1 else list(tokens)


def _says(base: Mapping[str, Any], config: GPTConfig) -> bool:
    """Tell whether a config.json describes just this model."""
    try:
        return not differences(read_model(base, where="config.json").config, config)
    except ValueError:
        return False


def differences(theirs: GPTConfig, ours: GPTConfig) -> list[str]:
    """Return one text per field in which two models compute different things."""
    before, after = _flat(function_of(theirs).to_json()), _flat(function_of(ours).to_json())
    return [
        f"{name} is {after.get(name)!r}, there {before.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _rope_fields(rope: RopeConfig | None) -> dict[str, Any]:
    """Return rope_theta and rope_scaling, which every version of transformers reads."""
    if rope is None:
        return {}
    scaling = rope.scaling
    found: dict[str, Any] = {"rope_theta": rope.base, "rope_scaling": None}
    if scaling is None:
        return found
    described: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        described["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        described["low_freq_factor"] = scaling.low_freq_factor
        described["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        described["beta_fast"], described["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        if scaling.attention_factor is not None:
            described["attention_factor"] = scaling.attention_factor
    return {**found, "rope_scaling": described}
