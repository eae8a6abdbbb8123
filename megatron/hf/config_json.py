# SPDX-License-Identifier: Apache-2.0
"""config.json to the configuration of a GPT and back: every field that decides the function.

What is read is known or an error. What is written is read back, and only then believed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron.cli.two_way_table import build, describe
from megatron.core.dist_checkpointing.manifest import flatten
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.layer_pattern import ATTENTIONS, DELTA_NET, DENSE, EXPERTS, MAMBA
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ssm.config import Mamba2Config
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig
from megatron.hf.architectures import (
    ARCHITECTURES,
    DEEPSEEK_V3,
    LLAMA,
    MAMBA2,
    MISTRAL,
    MIXTRAL,
    NEMOTRON_H,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    SEED_OSS,
)
from megatron.hf.block_types import FULL, SLIDING, blocks_fields
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


#: Returns the flags of training that describe a model, by name.
FlagsOf = Callable[[GPTConfig], Mapping[str, Any]]

#: Fields of somebody's config.json that have no effect on the function and may be kept.
_KEPT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_dropout",
    "use_cache",
    "transformers_version",
)


def architecture_of(config: GPTConfig, base: Mapping[str, Any] | None = None) -> Architecture:
    """Return the architecture that a model could be exported as.

    Args:
        config: the model.
        base: config.json that the model came from: its architecture, if that still is the model.
    """
    named = None if base is None else base.get("model_type")
    if isinstance(named, str) and named in ARCHITECTURES:
        kind = ARCHITECTURES[named]
        if _says(_described(kind, config), config):
            return kind
    attention, kinds = config.attention, set(config.blocks)
    if kinds == {MAMBA} and _expands(config):
        return MAMBA2
    if isinstance(attention, LatentAttentionConfig):
        return DEEPSEEK_V3
    if DELTA_NET in kinds or (attention is not None and attention.output_gate):
        return QWEN3_NEXT
    if MAMBA in kinds or config.pattern or (config.rope is None and not _is_gated(config)):
        return NEMOTRON_H
    assert attention is not None, "a GPT has attention"
    if config.moe is not None:
        plain = QWEN2_MOE if config.moe.shared_gate else MIXTRAL
        return QWEN3_MOE if attention.qk_norm else plain
    return QWEN3 if attention.qk_norm else _dense_architecture(config, attention)


def _dense_architecture(config: GPTConfig, attention: AttentionConfig) -> Architecture:
    """Return the architecture of Llama's form that has a model's biases and window."""
    biased_mlp = config.mlp is not None and config.mlp.bias
    if attention.qkv_bias == attention.output_bias:
        return LLAMA if attention.window is None else MISTRAL
    return QWEN2 if attention.qkv_bias and not biased_mlp else SEED_OSS


def _described(kind: Architecture, config: GPTConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe a model as an architecture."""
    return {"model_type": kind.model_type, **_nested(describe(TABLES[kind.model_type], config))}


def _expands(config: GPTConfig) -> bool:
    """Return whether the mixer's inner features are a multiple of hidden_size, as in Mamba-2."""
    return config.mamba is not None and config.mamba.inner_channels % config.hidden_size == 0


def _is_gated(config: GPTConfig) -> bool:
    """Return whether its MLPs or experts multiply two projections."""
    return any(shape.gated for shape in (config.mlp, config.moe) if shape is not None)


def function_of(config: GPTConfig) -> GPTConfig:
    """Return what decides a model's function at inference, each in one way only: without dropout,
    initial values, and how experts are balanced in training."""
    rope, kinds = config.rope, set(config.blocks + config.depth_blocks)
    if rope is not None and rope.scaling is not None and rope.scaling.kind == "yarn":
        magnitude = float(f"{rope.scaling.magnitude:.8g}")
        scaling = dataclasses.replace(rope.scaling, attention_factor=magnitude)
        rope = dataclasses.replace(rope, scaling=scaling)
    blocks = {"pattern": "", "ffn_pattern": "", **blocks_fields(config.blocks)}
    return dataclasses.replace(
        config,
        **blocks,
        attention=_attention_of(config) if kinds & set(ATTENTIONS) else None,
        mlp=config.mlp if DENSE in kinds else None,
        moe=_experts_of(config) if EXPERTS in kinds else None,
        delta_net=config.delta_net if DELTA_NET in kinds else None,
        mamba=_mamba_of(config) if MAMBA in kinds else None,
        mtp_pattern=config.depth_blocks,
        rope=rope,
        hidden_dropout=0.0,
        init_std=0.02,
        mtp_loss_factor=0.1,
    )


def _attention_of(config: GPTConfig) -> AttentionConfig | LatentAttentionConfig | None:
    """Return what decides the function of attention at inference."""
    if config.attention is None:
        return None
    attention = dataclasses.replace(config.attention, dropout=0.0)
    if isinstance(attention, LatentAttentionConfig):
        return dataclasses.replace(
            attention,
            scale_factor=float(f"{attention.scale_factor:.8g}"),
            norm_epsilon=attention.norm_epsilon or config.norm.epsilon,
        )
    return attention


def _mamba_of(config: GPTConfig) -> Mamba2Config | None:
    """Return a Mamba-2 with its groups of norms specified."""
    mamba = config.mamba
    return None if mamba is None else dataclasses.replace(mamba, norm_groups=mamba.normed_groups)


def _experts_of(config: GPTConfig) -> MoEConfig | None:
    """Return what decides the function of a mixture of experts at inference."""
    moe = config.moe
    if moe is None:
        return None
    router = moe.router
    limited = router.num_groups is not None and router.num_groups != router.group_topk
    return dataclasses.replace(
        moe,
        capacity_factor=None,
        drop_policy="probs",
        router=RouterConfig(
            topk=router.topk,
            score_function=router.score_function,
            normalize=router.normalize,
            scaling_factor=router.scaling_factor,
            num_groups=router.num_groups if limited else None,
            group_topk=router.group_topk if limited else None,
            group_candidates=router.group_candidates if limited else 1,
            expert_bias=router.expert_bias,
        ),
    )


def check_exportable(config: GPTConfig, *, flags_of: FlagsOf | None = None) -> None:
    """Raise ValueError, naming the fields, if no architecture of the tables is this model.

    Args:
        config: the model.
        flags_of: as for `write_config`.
    """
    write_config(config, max_length=None, dtype=torch.float32, end_tokens=(), flags_of=flags_of)


def write_config(
    config: GPTConfig,
    *,
    max_length: int | None,
    dtype: torch.dtype,
    end_tokens: Sequence[int],
    base: Mapping[str, Any] | None = None,
    flags_of: FlagsOf | None = None,
) -> dict[str, Any]:
    """Return the fields of config.json for a model.

    Args:
        config: the model.
        max_length: longest sequence it is meant for, in tokens.
        dtype: of the weights.
        end_tokens: ids that end a text, if `base` does not say.
        base: config.json that the model came from; kept as it is where it still holds.
        flags_of: returns the flags of training that describe a model; the error then names those
            to change.

    Raises:
        ValueError: no architecture of the tables computes what this model does; names the fields.
    """
    name = next(name for name, known in DTYPES.items() if known == dtype)
    if base is not None and _says(base, config):
        key = "torch_dtype" if "dtype" not in base and "torch_dtype" in base else "dtype"
        kept = {field: value for field, value in base.items() if field != "quantization_config"}
        return {**kept, key: name}
    kind = architecture_of(config, base)
    fields: dict[str, Any] = {
        "architectures": [kind.class_name],
        "max_position_embeddings": max_length,
        "torch_dtype": name,
        "bos_token_id": None,
        "eos_token_id": _one_or_all(end_tokens),
        **_described(kind, config),
    }
    fields.update({key: base[key] for key in _KEPT if base is not None and key in base})
    if max_length is None:
        del fields["max_position_embeddings"]
    try:
        theirs = read_model(fields, where="config.json", further=config.mtp_num_layers > 0)
        found, fix = differences(theirs.config, config), ""
        if flags_of is not None:
            fix = _flags_of_other(theirs, config, flags_of)
    except ValueError as error:
        found, fix = [str(error)], ""
    if found:
        raise ValueError(
            f"the model cannot be exported as {kind.class_name}: {'; '.join(found)}{fix}"
        )
    return fields


def _flags_of_other(theirs: HuggingFaceModel, config: GPTConfig, flags_of: FlagsOf) -> str:
    """Return which flags of training make the model that an architecture is, for an error."""
    wanted, ours = (flags_of(function_of(model)) for model in (theirs.config, config))
    flags = []
    for name in dict.fromkeys([*wanted, *ours]):
        if name == "max-position-embeddings":  # is left out with --position-embedding-type
            continue
        value = wanted.get(name)
        if value == ours.get(name):
            continue
        if name not in wanted or value in (None, False):
            flags.append(f"no --{name}")
        else:
            flags.append(f"--{name}" if value is True else f"--{name} {value}")
    return f": train it with {', '.join(flags)}" if flags else ""


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with those of objects, which have a dot in their names, inside these."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        outer, _, inner = name.rpartition(".")
        found[outer or name] = {**(found.get(outer) or {}), inner: value} if outer else value
    return found


def _one_or_all(tokens: Sequence[int]) -> int | list[int] | None:
    return None if not tokens else tokens[0] if len(tokens) == 1 else list(tokens)


def _says(base: Mapping[str, Any], config: GPTConfig) -> bool:
    """Tell whether a config.json describes just this model."""
    try:
        return not differences(_read_back(base, config), config)
    except ValueError:
        return False


def _read_back(fields: Mapping[str, Any], config: GPTConfig) -> GPTConfig:
    """Return what a config.json says beside files with as many layers as a model has."""
    return read_model(fields, where="config.json", further=config.mtp_num_layers > 0).config


def differences(theirs: GPTConfig, ours: GPTConfig) -> list[str]:
    """Return one text per field in which two models compute different things."""
    before, after = flatten(function_of(theirs).to_json()), flatten(function_of(ours).to_json())
    return [
        f"{name} is {after.get(name)!r}, there {before.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
