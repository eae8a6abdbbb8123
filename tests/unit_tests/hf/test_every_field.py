# SPDX-License-Identifier: Apache-2.0
"""Every config.json field of a supported family is read, refused, or ignored for a listed reason.

Transformers writes the fields. Changing a field that is read changes the model that is read, and
changing a refused field is an error. For every other field, a list here says why the field does
not matter; if the reason is that the logits do not change, transformers confirms it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from megatron.hf.architectures import ARCHITECTURES
from megatron.hf.config_json import read_model
from tests.support.hf_family_cases import CLASS_NAMES, FAMILY_CASES
from tests.support.hf_folders import ALL_CASES, make_model

#: For each family, the case with the most fields that matter.
FAMILIES = (
    "llama-tied-llama3", "mistral-window-yarn", "seedoss-biases", "mixtral",
    "deepseek-direct-yarn", "qwen3next-mixed-biases", "mamba2", "nemotronh", *FAMILY_CASES,
)  # fmt: skip

#: Ignored for every model: outputs of the library's programs, and the file's author.
_PROGRAM = "of the library's programs, not of the model"
_TOKENS = "ids of the tokenizer"
_TRAINING = "dropout and losses of training, which are options of a run"
_LIBRARY = "how transformers computes, not what it computes"
IGNORED: Mapping[str, str] = {
    name: reason
    for names, reason in (
        (
            "transformers_version _name_or_path output_hidden_states output_attentions return_dict "
            "chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type",
            _PROGRAM,
        ),
        ("bos_token_id eos_token_id pad_token_id", _TOKENS),
        (
            "attention_dropout hidden_dropout residual_dropout embedding_dropout resid_pdrop "
            "embd_pdrop attn_pdrop z_loss_coefficient output_router_logits "
            "router_aux_loss_coef router_jitter_noise",
            _TRAINING,
        ),
        (
            "use_cache pretraining_tp use_mamba_kernels chunk_size mamba_ssm_cache_dtype "
            "num_logits_to_keep moe_shared_expert_overlap residual_in_fp32 mamba_chunk_size "
            "enable_moe_fp32_combine attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
            _LIBRARY,
        ),
        (
            "time_step_rank time_step_max time_step_floor rescale_prenorm_residual "
            "embedding_initializer_range",
            "initial values, replaced by loaded weights",
        ),
    )
    for name in names.split()
}
_TYPED = "layer_types, which is present, says for each layer whether it has a window"
_MTP = "multi-token prediction layers are read if the files contain them"
_SHAPE = "not a field of this family: the tests' models share a shape"
_FLOOR = "transformers bounds steps by it, the model's own code only by time_step_limit"
#: Ignored fields of single families, by model_type.
IGNORED_BY_FAMILY: Mapping[str, Mapping[str, str]] = {
    **{kind: {"max_window_layers": _TYPED} for kind in ("qwen2", "qwen3", "qwen2_moe", "dots1")},
    "exaone4": {"sliding_window_pattern": _TYPED},
    "gpt2": dict.fromkeys(
        (
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            "summary_first_dropout",
        ),
        "of the class with two heads",
    ),
    "deepseek_v3": {"num_nextn_predict_layers": _MTP},
    "glm4_moe": {"num_nextn_predict_layers": _MTP},
    "gemma3_text": {"_sliding_window_pattern": _TYPED},
    "phi3": {"original_max_position_embeddings": "it is for rope_type longrope only"},
    "falcon_h1": {
        "mamba_expand": "mamba_d_ssm, which is present, gives the width",
        "mamba_norm_before_gate": "mamba_rms_norm is false: there is no norm",
    },
    "mamba2": {
        "time_step_min": _FLOOR,
        **dict.fromkeys(("rms_norm_eps", "intermediate_size", "num_key_value_heads"), _SHAPE),
    },
    "nemotron_h": {
        "time_step_min": _FLOOR,
        "rms_norm_eps": _SHAPE,
        "expand": "mamba_num_heads and mamba_head_dim give the width",
        "mamba_proj_bias": "use_bias is the same setting",
        "mtp_layers_block_type": _MTP,
        "num_nextn_predict_layers": _MTP,
    },
}
#: Aliases of ignored fields.
_IGNORED_ALIASES = ("num_mtp_layers",)
#: Values of fields that accept only a range.
_ALTERNATIVES: Mapping[str, tuple[Any, ...]] = {
    name: (0.25,)
    for name in (
        "attention_dropout",
        "hidden_dropout",
        "residual_dropout",
        "embedding_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
    )
}
#: Reasons that are not checked against transformers.
_UNCHECKED = (_PROGRAM, _TOKENS, _FLOOR)


def alternatives(name: str, value: Any) -> list[Any]:
    """Return other values of the same type as a field's value."""
    if name in _ALTERNATIVES:
        return list(_ALTERNATIVES[name])
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 + 2, value + 1, value * 0.5]
    if isinstance(value, str):
        return [f"{value}_other"]
    if isinstance(value, list | tuple):
        return [[*value, *value[:1]], [1, *value], list(value[:-1])]
    return [True, 7, 0.5, "other", ["other"], {"other": 1}]


def changed_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field's name (fields of rope's object too) and the file with another value."""
    for name, value in fields.items():
        if isinstance(value, dict) and name.startswith("rope"):
            for rope_name, old in value.items():
                for alternative in alternatives(rope_name, old):
                    yield f"{name}.{rope_name}", {**fields, name: {**value, rope_name: alternative}}
        else:
            for alternative in alternatives(name, value):
                yield name, {**fields, name: alternative}


def ignored_fields(fields: Mapping[str, Any]) -> set[str]:
    """Return the fields that neither change the model that is read nor are refused."""

    def read(raw: Mapping[str, Any]) -> tuple[Any, ...]:
        model = read_model(raw, where="config.json")
        return model.kind, model.config, model.max_length, model.dtype

    original, names, effective = read(fields), set(), set()
    for name, changed_file in changed_fields(fields):
        names.add(name)
        try:
            differs = read(changed_file) != original
        except ValueError:
            differs = True
        if differs:
            effective.add(name)
    return names - effective


def test_every_family_has_a_case():
    kinds = {ARCHITECTURES[k].class_name for k in ARCHITECTURES if k != "kimi_k2"}
    names = {ALL_CASES[case][0] for case in FAMILIES}
    assert {CLASS_NAMES.get(name, f"{name}ForCausalLM") for name in names} == kinds


@pytest.mark.parametrize("case", FAMILIES)
def test_every_field_is_read_refused_or_ignored_for_a_reason(case):
    model = make_model(case)
    fields = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    expected = {**IGNORED, **IGNORED_BY_FAMILY.get(fields["model_type"], {})}
    ignored = ignored_fields(fields)
    assert ignored <= expected.keys(), (
        f"{sorted(ignored - expected.keys())}: read, refuse or list them"
    )
    assert IGNORED_BY_FAMILY.get(fields["model_type"], {}).keys() <= ignored


@pytest.mark.parametrize("case", FAMILIES)
def test_every_parameter_is_written_or_an_alias(case):
    """Transformers writes every config parameter, or it is an alias that is read the same way."""
    model = make_model(case)
    kind, written = type(model.config), model.config.to_dict()
    parameters = set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs"}
    parameters |= {field.name for field in dataclasses.fields(kind)}
    aliases = {**kind.attribute_map}
    assert len(parameters) > 20
    assert not {
        alias for alias in parameters if alias not in written and aliases.get(alias) not in written
    }
    fields = {**written, "architectures": [type(model).__name__]}
    config = read_model(fields, where="config.json").config
    for alias, canonical in aliases.items():
        if canonical not in written:  # it is computed from other fields
            continue
        renamed = {**fields, alias: fields[canonical]}
        del renamed[canonical]
        assert read_model(renamed, where="config.json").config == config, alias
        if type(fields[canonical]) is int and alias not in _IGNORED_ALIASES:
            with pytest.raises(ValueError, match=alias):
                read_model({**fields, alias: fields[canonical] + 1}, where="config.json")


@pytest.mark.parametrize("case", FAMILIES)
def test_ignored_fields_do_not_change_transformers_logits(case):
    model = make_model(case)
    fields = model.config.to_dict()
    tokens = torch.arange(12)[None] * 5 % 37
    with torch.no_grad():
        expected = model(tokens).logits
    reasons = {**IGNORED, **IGNORED_BY_FAMILY.get(fields["model_type"], {})}
    tried = set()
    for name in sorted(reasons.keys() & fields.keys()):
        if reasons[name] in _UNCHECKED:
            continue
        for alternative in alternatives(name, fields[name])[:2]:
            try:
                changed_model = make_model(case, **{name: alternative})
            except (TypeError, ValueError, StrictDataclassError):
                continue  # transformers refuses the value
            with torch.no_grad():
                logits = changed_model(tokens).logits
            tried.add(name)
            # A different chunk size changes the summation order of a recurrence.
            atol = 1e-5 if name.endswith("chunk_size") else 0.0
            torch.testing.assert_close(
                logits, expected, rtol=0.0, atol=atol, msg=f"{name}: {alternative}"
            )
    assert "use_cache" in tried
