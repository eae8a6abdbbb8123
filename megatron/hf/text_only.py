# SPDX-License-Identifier: Apache-2.0
"""The language model of a multimodal folder, as a folder with text only.

Its config.json is `text_config`, and its tensors are the tensors of the language model, under the
names of the text-only class. The tensors of the vision tower and of the projector are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.hf.architectures import ARCHITECTURES
from megatron.hf.fields import Fields
from megatron.hf.folder import CONFIG, HuggingFaceFolder

#: model_type of multimodal models whose language model is one of our architectures, with the
#: model_type of the language model in transformers' defaults.
MULTIMODAL: Mapping[str, str] = MappingProxyType(
    {
        "gemma3": "gemma3_text",
        "mistral3": "mistral",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
    }
)

#: Fields of the language model that the whole model ignores, by its model_type.
_IGNORED_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"gemma3": ("final_logit_softcapping",)}
)

#: Prefixes of the language model's tensors, with the prefixes in the text-only class.
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
#: Prefixes of tensors that only process images.
_VISION_PREFIXES = tuple(
    f"{outer}{module}."
    for outer in ("", "model.")
    for module in ("visual", "vision_tower", "multi_modal_projector")
)


def text_only_folder(folder: HuggingFaceFolder) -> HuggingFaceFolder:
    """Return the folder of the language model of a multimodal folder.

    Raises:
        ValueError: the folder is not multimodal, or its language model is not supported.
    """
    fields = Fields(folder.config, str(folder.path / CONFIG))
    model_type = fields.raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MULTIMODAL:
        fields.refuse(
            "model_type",
            f"--text-only is for {', '.join(MULTIMODAL)}: leave it out for models of text",
        )
    text_names: dict[str, str] = {}
    left_out = 0
    for name in folder.files:
        if name.startswith(_VISION_PREFIXES):
            left_out += 1
            continue
        text_name = _text_name(name)
        if text_name in text_names:
            raise ValueError(
                f"{folder.path}: {name} and {text_names[text_name]} are the same weight: remove one"
            )
        text_names[text_name] = name
    return replace(
        folder,
        config=MappingProxyType(_text_config(fields, MULTIMODAL[model_type])),
        files=MappingProxyType({text: folder.files[name] for text, name in text_names.items()}),
        stored_names=MappingProxyType(text_names),
        num_left_out=left_out,
    )


def _text_name(name: str) -> str:
    for prefix, text_prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return name


def _text_config(fields: Fields, default_type: str) -> dict[str, Any]:
    """Return config.json of the text-only class."""
    text_config = fields.inner("text_config")
    if text_config is None:
        fields.refuse("text_config", "expected the fields of the language model")
    text_type = text_config.raw.get("model_type", default_type)
    if not isinstance(text_type, str) or text_type not in ARCHITECTURES:
        text_config.refuse("model_type", f"supported are {', '.join(ARCHITECTURES)}")
    # The whole model's fields decide where both have them.
    names = ("tie_word_embeddings", "quantization_config", "transformers_version", "auto_map")
    shared = {name: fields.raw[name] for name in names if name in fields.raw}
    dtypes = {
        name: value
        for source in (text_config.raw, fields.raw)
        for name in ("dtype", "torch_dtype")
        if (value := source.get(name)) is not None
    }
    return {
        **text_config.raw,
        **shared,
        **dict(list(dtypes.items())[-1:]),
        **dict.fromkeys(_IGNORED_FIELDS.get(fields.raw["model_type"], ())),
        "model_type": text_type,
        "architectures": [ARCHITECTURES[text_type].class_name],
    }
