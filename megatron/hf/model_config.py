# SPDX-License-Identifier: Apache-2.0
"""config.json to the configuration of a GPT: every field that decides the function, or an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron.core.models.gpt import GPTConfig
from megatron.core.models.pattern import ATTENTION, DELTA_NET, DENSE, EXPERTS, MAMBA
from megatron.core.transformer import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    NormConfig,
)
from megatron.hf.architectures import (
    ARCHITECTURES,
    DEEPSEEK_V3,
    MAMBA2,
    MIXTRAL,
    NEMOTRON_H,
    QWEN3_NEXT,
)
from megatron.hf.entries import Architecture
from megatron.hf.expert_fields import read_experts, read_nemotron_experts
from megatron.hf.fields import Fields
from megatron.hf.folder import CONFIG, HuggingFaceFolder
from megatron.hf.hybrid_fields import (
    blocks_fields,
    read_block_types,
    read_delta_net,
    read_mamba,
    read_mixer_types,
)
from megatron.hf.latent_fields import read_latent
from megatron.hf.rope_fields import read_rope
from megatron.hf.tensor_map import holds_further

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)

#: Layers, heads or experts of all layers together, and layers of further prediction, that no model
#: has as many of. A part of a tensor takes some 1 KB of memory while a folder is read.
MAX_LAYERS, MAX_PARTS, MAX_FURTHER = 10_000, 1 << 18, 64
_COUNTS = (
    "num_attention_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "linear_num_key_heads",
)

#: Of a head's features in Qwen3-Next that rotate, where config.json does not say.
ROTARY_SHARE = 0.25


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
    fields = Fields(raw, where, defaults=kind.defaults)
    _check_neutral(fields, kind)
    max_length = fields.count("max_position_embeddings", 0) or None
    one_block = kind.blocks_per_layer == 1
    read = _read_blocks if one_block else _read_layers
    epsilon = "layer_norm_epsilon" if one_block else "rms_norm_eps"
    config = GPTConfig(
        hidden_size=fields.count("hidden_size"),
        vocab_size=fields.count("vocab_size"),
        norm=NormConfig(
            kind="RMSNorm",
            epsilon=fields.number(epsilon, 1e-6),
            zero_centered=kind is QWEN3_NEXT,
        ),
        tied=fields.flag("tie_word_embeddings", False),
        init_std=fields.number("initializer_range", 0.02),
        mtp_num_layers=_depth(fields) if further and kind.further else 0,
        **read(kind, fields, max_length),
    )
    if problems := config.problems():
        raise ValueError(f"{where}: {'; '.join(problems)}")
    return HuggingFaceModel(kind=kind, config=config, max_length=max_length, dtype=_dtype(fields))


def _read_layers(kind: Architecture, fields: Fields, max_length: int | None) -> dict[str, Any]:
    """Return the fields of `GPTConfig` of a model whose layers are a mixer and what follows it."""
    num_layers = _layers(fields)
    moe, ffn = read_experts(kind, fields, num_layers)
    interleaved = kind is DEEPSEEK_V3 and fields.flag("rope_interleave", True)
    if kind is not QWEN3_NEXT:
        return {
            "num_layers": num_layers,
            "attention": read_latent(fields) if kind is DEEPSEEK_V3 else _attention(fields, kind),
            "mlp": _mlp(fields),
            "rope": read_rope(fields, max_length, interleaved=interleaved),
            "moe": moe,
            "ffn_pattern": ffn,
        }
    mixers = read_mixer_types(fields, num_layers)
    attends = ATTENTION in mixers
    return {
        **blocks_fields("".join(pair for both in zip(mixers, ffn, strict=True) for pair in both)),
        "attention": _attention(fields, kind) if attends else None,
        "delta_net": read_delta_net(fields) if DELTA_NET in mixers else None,
        "mlp": _mlp(fields) if DENSE in ffn else None,
        "moe": moe,
        "rope": read_rope(fields, max_length, percent=ROTARY_SHARE) if attends else None,
    }


def _read_blocks(kind: Architecture, fields: Fields, max_length: int | None) -> dict[str, Any]:
    """Return the fields of `GPTConfig` of a model whose layers are one block; no positions."""
    blocks = read_block_types(fields) if kind is NEMOTRON_H else MAMBA * _layers(fields)
    _check_size(fields, len(blocks), "num_hidden_layers" if kind is MAMBA2 else "layers_block_type")
    return {
        **blocks_fields(blocks),
        "attention": _attention(fields, kind) if ATTENTION in blocks else None,
        "mlp": _mlp(fields, gated=False, activation="squared_relu") if DENSE in blocks else None,
        "moe": read_nemotron_experts(fields) if EXPERTS in blocks else None,
        "mamba": read_mamba(kind, fields) if MAMBA in blocks else None,
        "rope": None,
    }


def _mlp(fields: Fields, **shape: Any) -> MLPConfig:
    inner, bias = fields.count("intermediate_size"), fields.flag("mlp_bias", False)
    return MLPConfig(ffn_hidden_size=inner, bias=bias, **shape)


def _depth(fields: Fields) -> int:
    """Return the layers of further prediction."""
    name = "num_mtp_layers" if "num_mtp_layers" in fields.raw else "num_nextn_predict_layers"
    depth = fields.count(name, 0, least=0)
    if depth > MAX_FURTHER:
        fields.refuse(name, f"more than {MAX_FURTHER}")
    return depth


def _layers(fields: Fields) -> int:
    """Return the number of layers, of a model that can be: what is made of it takes memory."""
    layers = fields.count("num_hidden_layers")
    _check_size(fields, layers, "num_hidden_layers")
    return layers


def _check_size(fields: Fields, layers: int, name: str) -> None:
    """Refuse more layers, which the field `name` says, or more of their parts than can be."""
    if layers > MAX_LAYERS:
        fields.refuse(name, f"more than {MAX_LAYERS}")
    for counted in _COUNTS:
        if fields.find(counted) is not None and fields.count(counted) * layers > MAX_PARTS:
            fields.refuse(counted, f"with {layers} layers that is more than {MAX_PARTS} in all")


def _attention(fields: Fields, kind: Architecture) -> AttentionConfig | LatentAttentionConfig:
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    head_dim = _head_dim(fields, kind)
    if not head_dim:
        if hidden % heads:
            fields.refuse("head_dim", "give it, as heads do not divide hidden_size")
        head_dim = hidden // heads
    biased = fields.flag("attention_bias", False)
    return AttentionConfig(
        num_attention_heads=heads,
        num_query_groups=fields.count("num_key_value_heads", heads),
        kv_channels=head_dim,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=kind.has_query_key_norms,
        output_gate=kind is QWEN3_NEXT,
    )


def _head_dim(fields: Fields, kind: Architecture) -> int:
    """Return the features of a head; 0 where heads share the hidden size."""
    old = "attention_head_dim"
    if kind is not NEMOTRON_H or fields.find(old) is None:
        return fields.count("head_dim", 0)
    if fields.raw.get("head_dim") not in (None, fields.count(old)):
        fields.refuse(old, "head_dim is the same field")
    return fields.count(old)


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
    if raw.get("quantization_config") is not None:
        fields.refuse("quantization_config", "quantised weights are not supported")
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
    if layer_types is not None and not kind.is_hybrid:
        if not isinstance(layer_types, list) or set(map(str, layer_types)) - {"full_attention"}:
            fields.refuse("layer_types", "supported is 'full_attention' in every layer")
        if len(layer_types) != raw.get("num_hidden_layers"):
            fields.refuse("layer_types", "one is needed for each of num_hidden_layers")
    # Mixtral has a window without a switch, and no types of layers.
    always = kind is MIXTRAL
    windowed = always or (layer_types is None and fields.flag("use_sliding_window", True))
    if raw.get("sliding_window") is not None and windowed:
        fields.refuse("sliding_window", "a window is not supported")


def _dtype(fields: Fields) -> torch.dtype | None:
    name = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    value = fields.raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in DTYPES:
        fields.refuse(name, f"supported are {', '.join(DTYPES)}")
    return DTYPES[value]
