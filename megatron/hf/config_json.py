# SPDX-License-Identifier: Apache-2.0
"""Translate config.json to `GPTConfig` and back, with every field that affects the function.

A field that could change the function and is not supported is an error. A config.json that is
written is parsed again and compared with the model before it is returned.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch

from megatron.cli.two_way_table import Table, build, describe
from megatron.core.dist_checkpointing.manifest import flatten
from megatron.core.models.gpt import GPTConfig
from megatron.core.models.gpt_config import MTPConfig, Multipliers
from megatron.core.models.layer_pattern import (
    ATTENTIONS,
    DELTA_NET,
    DENSE,
    EXPERTS,
    MAMBA,
    RECURRENT,
    SHORT_CONV,
    WINDOW,
)
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ssm.mixer_config import Mamba2Config
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig, RopeConfig
from megatron.hf.architecture import Architecture
from megatron.hf.architectures import ARCHITECTURES
from megatron.hf.attention_kinds import pattern_of
from megatron.hf.config_rows import SECTIONS
from megatron.hf.fields import Fields
from megatron.hf.folder import CONFIG, HuggingFaceFolder
from megatron.hf.layer_types import blocks_fields
from megatron.hf.quantization_config import quantization_of
from megatron.hf.readers import ModelFields
from megatron.hf.tensor_map import has_mtp_layers

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model that config.json specifies.

    Args:
        kind: the architecture.
        config: the model's configuration, without dropout.
        max_length: maximum sequence length in tokens.
        dtype: dtype of the weights; None if not specified.
    """

    kind: Architecture
    config: GPTConfig
    max_length: int | None
    dtype: torch.dtype | None


def read_folder(folder: HuggingFaceFolder) -> HuggingFaceModel:
    """Translate a folder's config.json, with MTP layers only if the files contain them.

    Raises:
        ValueError: an architecture or a value is not supported; the message names the field.
    """
    where = str(folder.path / CONFIG)
    plain = read_model(folder.config, where=where)
    if not has_mtp_layers(folder.files, plain.config):
        return plain
    return read_model(folder.config, where=where, with_mtp=True)


def read_model(raw: Mapping[str, Any], *, where: str, with_mtp: bool = False) -> HuggingFaceModel:
    """Translate config.json.

    Args:
        raw: the fields of config.json.
        where: its path, for errors.
        with_mtp: whether the files contain the MTP layers that config.json specifies.
            transformers writes the field but not the layers.

    Raises:
        ValueError: an architecture or a value is not supported; the message names the field.
    """
    kind = _kind(Fields(raw, where))
    _check_neutral(Fields(raw, where, defaults=kind.defaults), kind)
    fields = ModelFields(raw, where, kind=kind, with_mtp=with_mtp)
    try:
        config = build(_table(kind), fields)
    except ValueError as error:
        message = str(error)  # errors of the core's configs do not name the file
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from None
    if problems := config.problems():
        raise ValueError(f"{where}: {'; '.join(problems)}")
    return HuggingFaceModel(
        kind=kind, config=config, max_length=fields.max_length, dtype=_dtype(fields)
    )


_FOREIGN = re.compile(r"expert|_multiplier$|_scale$|softcap|^n_shared|^moe_|_lora_")


def _kind(fields: Fields) -> Architecture:
    model_type = fields.raw.get("model_type")
    if isinstance(fields.raw.get("text_config"), dict):
        fields.refuse(
            "model_type",
            "only the language model of a multimodal folder is supported: import it with "
            "python -m megatron.hf.convert import --text-only",
        )
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        fields.refuse("model_type", f"supported are {', '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[model_type]
    classes = fields.raw.get("architectures")
    supported = [kind.class_name, kind.classifier_class]
    if classes is not None and classes not in [[name] for name in supported if name]:
        names = " or ".join(f"[{name!r}]" for name in supported if name)
        fields.refuse("architectures", f"supported is {names}")
    return kind


def _check_neutral(fields: Fields, kind: Architecture) -> None:
    """Reject unsupported fields that would change the function."""
    raw = fields.raw
    quantization_of(raw, where=fields.where)
    if "mlp_bias" not in kind.fields and fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", f"{kind.class_name} has none")
    if "attention_bias" not in kind.fields and fields.flag("attention_bias", False):
        fields.refuse("attention_bias", f"with {kind.class_name} it is not supported")
    for name, value in raw.items():
        # Fields of other mixture-of-experts models, and scale factors.
        foreign = name not in kind.fields and _FOREIGN.search(name)
        if foreign and value not in (None, False, 0, 1, [], {}):
            fields.refuse(name, "this changes the model and is not supported")
    kind.check(fields)


def _table(kind: Architecture) -> Table:
    return Table(SECTIONS, kind.rows)


def _dtype(fields: Fields) -> torch.dtype | None:
    name = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    value = fields.raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in DTYPES:
        fields.refuse(name, f"supported are {', '.join(DTYPES)}")
    return DTYPES[value]


#: Returns the training flags that describe a model, by name.
FlagsOf = Callable[[GPTConfig], Mapping[str, Any]]

#: Fields of the original config.json that do not affect the function and are copied.
_CARRIED_FIELDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_dropout",
    "use_cache",
    "transformers_version",
)


def architecture_of(config: GPTConfig, base: Mapping[str, Any] | None = None) -> Architecture:
    """Return the architecture to export a model as.

    Args:
        config: the model.
        base: config.json that the model was imported from; its architecture is preferred if it
            still describes the model.

    Returns:
        The first architecture that describes the model; without one, the closest (`_distance`).
    """
    model_type = None if base is None else base.get("model_type")
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        kind = ARCHITECTURES[model_type]
        if _describes(_described(kind, config), config):
            return kind
    distances = []
    for kind in ARCHITECTURES.values():
        distance = _distance(kind, config)
        if distance == _DESCRIBES:
            return kind
        distances.append((distance, kind))
    return min(distances, key=itemgetter(0))[1]


#: Distance of an architecture that describes the model.
_DESCRIBES = (0, False, 0)


def _distance(kind: Architecture, config: GPTConfig) -> tuple[int, bool, float]:
    """Return how far a model is from the closest model of an architecture.

    Returns:
        The number of kinds of blocks that the architecture lacks; whether only the architecture has
        recurrent mixers; the number of fields that an export would change, infinity if the exported
        config.json is invalid.
    """
    missing = set(config.blocks) - kind.blocks.keys() - {WINDOW}
    only_hybrid = kind.is_hybrid and not any(symbol in config.blocks for symbol in RECURRENT)
    try:
        count: float = len(differences(_read_back(_described(kind, config), config), config))
    except ValueError:
        count = math.inf
    if not count:
        return _DESCRIBES
    return len(missing), only_hybrid, count


def _described(kind: Architecture, config: GPTConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe a model as a given architecture."""
    class_name = kind.class_name if config.num_labels is None else kind.classifier_class
    return {
        "model_type": kind.model_type,
        "architectures": [class_name],
        **_nested(describe(_table(kind), config)),
    }


def function_of(config: GPTConfig) -> GPTConfig:
    """Return a canonical config of a model's function at inference: without dropout,
    initialization and load balancing."""
    kinds = set(config.blocks + config.mtp_blocks)
    blocks = {"pattern": "", "ffn_pattern": "", **blocks_fields(config.block_pattern)}
    return dataclasses.replace(
        config,
        **blocks,
        attention=_attention_of(config) if kinds & set(ATTENTIONS) else None,
        mlp=config.mlp if DENSE in kinds else None,
        moe=_experts_of(config) if EXPERTS in kinds else None,
        delta_net=config.delta_net if DELTA_NET in kinds else None,
        mamba=_mamba_of(config) if MAMBA in kinds else None,
        short_conv=config.short_conv if SHORT_CONV in kinds else None,
        mtp=_mtp_of(config),
        rope=_rope_of(config.rope),
        multipliers=_multipliers_of(config),
        hidden_dropout=0.0,
        init_std=0.02,
    )


def _rope_of(rope: RopeConfig | None) -> RopeConfig | None:
    """Return a rotary position embedding with an explicit attention factor of YaRN, and without
    the length of a scale of queries that is not used."""
    if rope is not None and not rope.query_scale_beta:
        rope = dataclasses.replace(rope, query_scale_length=RopeConfig.query_scale_length)
    if rope is None or rope.scaling is None or rope.scaling.kind != "yarn":
        return rope
    magnitude = float(f"{rope.scaling.magnitude:.8g}")
    scaling = dataclasses.replace(rope.scaling, attention_factor=magnitude)
    return dataclasses.replace(rope, scaling=scaling)


def _attention_of(config: GPTConfig) -> AttentionConfig | LatentAttentionConfig | None:
    """Return a canonical config of attention at inference."""
    if config.attention is None:
        return None
    attention = dataclasses.replace(config.attention, dropout=0.0)
    if isinstance(attention, LatentAttentionConfig):
        return dataclasses.replace(
            attention,
            scale_factor=float(f"{attention.scale_factor:.8g}"),
            norm_epsilon=attention.norm_epsilon or config.norm.epsilon,
        )
    if attention.second is not None:
        pattern = pattern_of(config.block_pattern)
        second = dataclasses.replace(
            attention.second, pattern=pattern, rope=_rope_of(config.window_rope)
        )
        attention = dataclasses.replace(attention, second=second)
    return dataclasses.replace(attention, softmax_scale=float(f"{attention.scale:.8g}"))


def _multipliers_of(config: GPTConfig) -> Multipliers:
    """Return the factors of a model, rounded: config.json may have the reciprocals."""
    factors = config.multipliers
    return dataclasses.replace(factors, logits=float(f"{factors.logits:.8g}"))


def _mtp_of(config: GPTConfig) -> MTPConfig | None:
    """Return a canonical config of multi-token prediction at inference."""
    if config.mtp is None:
        return None
    return MTPConfig(num_layers=config.mtp.num_layers, pattern=config.mtp_blocks)


def _mamba_of(config: GPTConfig) -> Mamba2Config | None:
    """Return the config of Mamba-2 with an explicit number of norm groups."""
    mamba = config.mamba
    return None if mamba is None else dataclasses.replace(mamba, norm_groups=mamba.normed_groups)


#: Defaults of the settings of a router that only training uses.
_UNTRAINED_ROUTER = {
    name: getattr(RouterConfig(), name)
    for name in ("bias_update_rate", "balance", "aux_loss_coeff", "z_loss_coeff", "jitter")
}


def _experts_of(config: GPTConfig) -> MoEConfig | None:
    """Return a canonical config of a mixture of experts at inference."""
    moe = config.moe
    if moe is None:
        return None
    router = moe.router
    limited = router.num_groups is not None and router.num_groups != router.group_topk
    return dataclasses.replace(
        moe,
        capacity_factor=None,
        drop_policy="probs",
        router=dataclasses.replace(
            router,
            num_groups=router.num_groups if limited else None,
            group_topk=router.group_topk if limited else None,
            group_candidates=router.group_candidates if limited else 1,
            **_UNTRAINED_ROUTER,
        ),
    )


def check_exportable(config: GPTConfig, *, flags_of: FlagsOf | None = None) -> None:
    """Raise ValueError, naming the fields, if no supported architecture can express a model.

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
        max_length: maximum sequence length in tokens.
        dtype: dtype of the weights.
        end_tokens: `eos_token_id`, if `base` does not specify it.
        base: config.json that the model was imported from; returned unchanged, except for the
            dtype, if it still describes the model.
        flags_of: returns the training flags that describe a model; errors then list the flags to
            change.

    Raises:
        ValueError: no supported architecture computes this model; the message names the fields.
    """
    name = next(name for name, torch_dtype in DTYPES.items() if torch_dtype == dtype)
    if base is not None and _describes(base, config):
        key = "torch_dtype" if "dtype" not in base and "torch_dtype" in base else "dtype"
        base_fields = {
            field: value for field, value in base.items() if field != "quantization_config"
        }
        return {**base_fields, key: name}
    kind = architecture_of(config, base)
    fields: dict[str, Any] = {
        "max_position_embeddings": max_length,
        "torch_dtype": name,
        "bos_token_id": None,
        "eos_token_id": _scalar_or_list(end_tokens),
        "pad_token_id": None,
        **_described(kind, config),
    }
    fields.update({key: base[key] for key in _CARRIED_FIELDS if base is not None and key in base})
    if max_length is None:
        del fields["max_position_embeddings"]
    try:
        reread = read_model(fields, where="config.json", with_mtp=config.mtp_num_layers > 0)
        problems, fix = differences(reread.config, config), ""
        if flags_of is not None:
            fix = _flag_changes(reread, config, flags_of)
    except ValueError as error:
        problems, fix = [str(error)], ""
    if problems:
        raise ValueError(
            f"the model cannot be exported as {kind.class_name}: {'; '.join(problems)}{fix}"
        )
    return fields


def _flag_changes(reread: HuggingFaceModel, config: GPTConfig, flags_of: FlagsOf) -> str:
    """Return the end of an error: the flags to change so that training gives the exported model."""
    hf_flags, mcore_flags = (flags_of(function_of(model)) for model in (reread.config, config))
    flags = []
    for name in dict.fromkeys([*hf_flags, *mcore_flags]):
        if name == "max-position-embeddings":  # depends on --position-embedding-type
            continue
        value = hf_flags.get(name)
        if value == mcore_flags.get(name):
            continue
        if name not in hf_flags or value in (None, False):
            flags.append(f"no --{name}")
        else:
            flags.append(f"--{name}" if value is True else f"--{name} {value}")
    return f": train it with {', '.join(flags)}" if flags else ""


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with dotted names as nested objects."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        *outer, inner = name.split(".")
        holder = nested
        for key in outer:
            holder[key] = holder.get(key) or {}  # null stands for an empty object
            holder = holder[key]
        holder[inner] = value
    return nested


def _scalar_or_list(tokens: Sequence[int]) -> int | list[int] | None:
    return None if not tokens else tokens[0] if len(tokens) == 1 else list(tokens)


def _describes(base: Mapping[str, Any], config: GPTConfig) -> bool:
    """Return whether a config.json describes exactly this model."""
    try:
        return not differences(_read_back(base, config), config)
    except ValueError:
        return False


def _read_back(fields: Mapping[str, Any], config: GPTConfig) -> GPTConfig:
    """Return the config that a config.json specifies, with MTP layers if `config` has them."""
    return read_model(fields, where="config.json", with_mtp=config.mtp_num_layers > 0).config


def differences(hf_config: GPTConfig, mcore_config: GPTConfig) -> list[str]:
    """Return one message per field in which the functions of two models differ."""
    hf_fields, mcore_fields = (
        flatten(function_of(model_config).to_json()) for model_config in (hf_config, mcore_config)
    )
    return [
        f"{name} is {mcore_fields.get(name)!r}, there {hf_fields.get(name)!r}"
        for name in sorted(hf_fields.keys() | mcore_fields.keys())
        if hf_fields.get(name) != mcore_fields.get(name)
    ]
