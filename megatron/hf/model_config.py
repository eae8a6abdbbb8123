# SPDX-License-Identifier: Apache-2.0
"""config.json to the configuration of a GPT: every field that decides the function, or an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron.cli.two_way_table import build
from megatron.core.models.gpt import GPTConfig
from megatron.hf.architectures import ARCHITECTURES, MIXTRAL, NEMOTRON_H, QWEN3_MOE
from megatron.hf.block_types import FULL, SLIDING
from megatron.hf.config_table import TABLES, ModelFields
from megatron.hf.entries import Architecture
from megatron.hf.fields import Fields
from megatron.hf.folder import CONFIG, HuggingFaceFolder
from megatron.hf.quantized import quantization_of
from megatron.hf.tensor_map import holds_further

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
        dtype: of its weights, if it specifies it.
    """

    kind: Architecture
    config: GPTConfig
    max_length: int | None
    dtype: torch.dtype | None


def read_folder(folder: HuggingFaceFolder) -> HuggingFaceModel:
    """Translate a folder's config.json, as far as its files hold what that speaks of.

    Raises:
        ValueError: an architecture or a value that is not supported; it names the field.
    """
    where = str(folder.path / CONFIG)
    plain = read_model(folder.config, where=where)
    if not holds_further(folder.files, plain.config):
        return plain
    return read_model(folder.config, where=where, further=True)


def read_model(raw: Mapping[str, Any], *, where: str, further: bool = False) -> HuggingFaceModel:
    """Translate config.json.

    Args:
        raw: its fields.
        where: its path, for errors.
        further: whether the files hold the layers of further prediction that it speaks of;
            transformers writes the field but not the layers.

    Raises:
        ValueError: an architecture or a value that is not supported; it names the field.
    """
    kind = _kind(Fields(raw, where))
    _check_neutral(Fields(raw, where, defaults=kind.defaults), kind)
    fields = ModelFields(raw, where, kind=kind, further=further)
    try:
        config = build(TABLES[kind.model_type], fields)
    except ValueError as error:
        told = str(error)  # what the core's configs refuse is of no file
        raise ValueError(told if told.startswith(where) else f"{where}: {told}") from None
    if problems := config.problems():
        raise ValueError(f"{where}: {'; '.join(problems)}")
    return HuggingFaceModel(
        kind=kind, config=config, max_length=fields.max_length, dtype=_dtype(fields)
    )


_FOREIGN = re.compile(r"expert|_multiplier$|_scale$|softcap|^n_shared|^moe_|_lora_")


def _kind(fields: Fields) -> Architecture:
    model_type = fields.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        fields.refuse("model_type", f"supported are {', '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[model_type]
    classes = fields.raw.get("architectures")
    if classes is not None and classes != [kind.class_name]:
        fields.refuse("architectures", f"supported is [{kind.class_name!r}]")
    return kind


def _check_neutral(fields: Fields, kind: Architecture) -> None:
    """Refuse what would change the function and is not supported."""
    raw = fields.raw
    if kind is NEMOTRON_H:
        fields.must_be("mlp_hidden_act", "relu2")
    elif raw.get("hidden_act", "silu") not in ("silu", "swish"):
        fields.refuse("hidden_act", "supported is 'silu'")
    quantization_of(raw, where=fields.where)
    if "mlp_bias" not in kind.fields and fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", f"{kind.class_name} has none")
    if "attention_bias" not in kind.fields and fields.flag("attention_bias", False):
        fields.refuse("attention_bias", f"with {kind.class_name} it is not supported")
    for name, value in raw.items():
        # Mixtures of experts that other models have, and scales.
        foreign = name not in kind.fields and _FOREIGN.search(name)
        if foreign and value not in (None, False, 0, 1, [], {}):
            fields.refuse(name, "this changes the model and is not supported")
    layer_types = raw.get("layer_types")
    windows = "sliding_window" in kind.fields
    if layer_types is not None and not kind.is_hybrid:
        known = {FULL, SLIDING} if windows else {FULL}
        if not isinstance(layer_types, list) or set(map(str, layer_types)) - known:
            fields.refuse("layer_types", f"supported is {FULL!r} in every layer")
        if len(layer_types) != raw.get("num_hidden_layers"):
            fields.refuse("layer_types", "one is needed for each of num_hidden_layers")
    # Mixtral has a window without a switch, and no types of layers.
    always = kind is MIXTRAL
    windowed = always or (layer_types is None and fields.flag("use_sliding_window", True))
    if raw.get("sliding_window") is not None and windowed and not windows:
        fields.refuse("sliding_window", "a window is not supported")
    # Without a size it is that of the class, and Qwen3-MoE reads no types of layers.
    untyped = layer_types is None or kind is QWEN3_MOE
    sized = "sliding_window" not in raw or raw["sliding_window"] is not None
    if not windows and untyped and sized and fields.flag("use_sliding_window", False):
        fields.refuse("use_sliding_window", "a window is not supported")


def _dtype(fields: Fields) -> torch.dtype | None:
    name = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    value = fields.raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in DTYPES:
        fields.refuse(name, f"supported are {', '.join(DTYPES)}")
    return DTYPES[value]
