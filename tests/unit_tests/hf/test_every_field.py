# SPDX-License-Identifier: Apache-2.0
"""Every field of the config.json of a supported family is read, refused, or left out for a reason.

The fields are those that transformers writes. One that is read changes what is read when it
changes, and one that is refused is an error; of all others the list here says why they do not
matter, and where the reason is that the function does not change, transformers is asked.
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
from tests.support.hf_folders import CASES, HYBRID_CASES, make_model

#: One case of each family, of those that have the most fields that count.
FAMILIES = (
    "llama-tied-llama3",
    "mistral-window-yarn",
    "qwen2-window",
    "qwen3-window",
    "seedoss-biases",
    "mixtral",
    "qwen2moe-mixed-unbiased",
    "qwen3moe-mixed-biases",
    "deepseek-direct-yarn",
    "qwen3next-mixed-biases",
    "mamba2",
    "nemotronh",
)

#: Of every model: what a program is to return, and who wrote the file.
_OF_ANY = "of the library's programs, not of the model"
_TOKENS = "ids of the tokenizer"
_TRAINING = "dropout and losses of training, which are options of a run"
_LIBRARY = "how transformers computes, not what"
OMITTED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "transformers_version",
            "_name_or_path",
            "output_hidden_states",
            "output_attentions",
            "return_dict",
            "chunk_size_feed_forward",
            "is_encoder_decoder",
            "id2label",
            "label2id",
            "problem_type",
        ),
        _OF_ANY,
    ),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKENS),
    **dict.fromkeys(
        (
            "attention_dropout",
            "hidden_dropout",
            "residual_dropout",
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
        ),
        _TRAINING,
    ),
    **dict.fromkeys(
        (
            "use_cache",
            "pretraining_tp",
            "use_mamba_kernels",
            "chunk_size",
            "mamba_ssm_cache_dtype",
            "num_logits_to_keep",
            "moe_shared_expert_overlap",
            "residual_in_fp32",
        ),
        _LIBRARY,
    ),
    **dict.fromkeys(
        ("time_step_rank", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
        "initial values of a model that is not loaded",
    ),
}
_TYPED = "layer_types says for each layer whether it has a window, and is there"
_FURTHER = "layers of further prediction are read where the files hold them"
_SHAPE = "no field of this family: the tests' models share a shape"
_FLOOR = "transformers bounds steps by it, the model's own code by time_step_limit alone"
#: The same of single families, by model_type.
LEFT_OUT_OF: Mapping[str, Mapping[str, str]] = {
    "qwen2_moe": dict.fromkeys(
        ("use_sliding_window", "sliding_window", "max_window_layers"), _TYPED
    ),
    "qwen3_moe": dict.fromkeys(("use_sliding_window", "sliding_window"), _TYPED),
    "deepseek_v3": {"num_nextn_predict_layers": _FURTHER},
    "mamba2": {
        "time_step_min": _FLOOR,
        **dict.fromkeys(("rms_norm_eps", "intermediate_size", "num_key_value_heads"), _SHAPE),
    },
    "nemotron_h": {
        "time_step_min": _FLOOR,
        "rms_norm_eps": _SHAPE,
        "expand": "mamba_num_heads and mamba_head_dim give the width",
        "mamba_proj_bias": "use_bias says it",
        "mtp_layers_block_type": _FURTHER,
        "num_nextn_predict_layers": _FURTHER,
    },
}
#: Other names of fields that are left out.
_LEFT_OUT_NAMES = ("num_mtp_layers",)
#: Values of fields that take few.
_OTHERS: Mapping[str, tuple[Any, ...]] = {
    name: (0.25,) for name in ("attention_dropout", "hidden_dropout", "residual_dropout")
}
#: Reasons that transformers is not asked about.
_NOT_ASKED = (_OF_ANY, _TOKENS, _FLOOR)


def others(name: str, value: Any) -> list[Any]:
    """Return further values of the kind of a field's value."""
    if name in _OTHERS:
        return list(_OTHERS[name])
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 + 2, value + 1, value * 0.5]
    if isinstance(value, str):
        return [f"{value}_other"]
    if isinstance(value, list | tuple):
        return [[*value, *value[:1]], [1, *value], list(value[:-1])]
    return [True, 7, 0.5, "other", ["other"], {"other": 1}]


def changed(fields: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each field, those of rope's object too, and the file with another value."""
    for name, value in fields.items():
        if isinstance(value, dict) and name.startswith("rope"):
            for inner, old in value.items():
                for other in others(inner, old):
                    yield f"{name}.{inner}", {**fields, name: {**value, inner: other}}
        else:
            for other in others(name, value):
                yield name, {**fields, name: other}


def left_out_of(fields: Mapping[str, Any]) -> set[str]:
    """Return the fields that change nothing that is read and are not refused either."""

    def read(raw: Mapping[str, Any]) -> tuple[Any, ...]:
        found = read_model(raw, where="config.json")
        return found.kind, found.config, found.max_length, found.dtype

    whole, seen, counts = read(fields), set(), set()
    for name, other in changed(fields):
        seen.add(name)
        try:
            differs = read(other) != whole
        except ValueError:
            differs = True
        if differs:
            counts.add(name)
    return seen - counts


def test_there_is_a_case_of_every_family():
    kinds = {ARCHITECTURES[k].class_name for k in ARCHITECTURES if k != "kimi_k2"}
    tables = {**CASES, **HYBRID_CASES}
    assert {f"{tables[case][0]}ForCausalLM" for case in FAMILIES} == kinds


@pytest.mark.parametrize("case", FAMILIES)
def test_every_field_is_read_refused_or_left_out_for_a_reason(case):
    model = make_model(case)
    fields = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    expected = {**OMITTED, **LEFT_OUT_OF.get(fields["model_type"], {})}
    found = left_out_of(fields)
    assert found <= expected.keys(), f"{sorted(found - expected.keys())}: read, refuse or list them"
    assert LEFT_OUT_OF.get(fields["model_type"], {}).keys() <= found


@pytest.mark.parametrize("case", FAMILIES)
def test_no_field_has_a_name_that_the_other_tests_miss(case):
    """What transformers takes is in what it writes, or is another name of that, read alike."""
    model = make_model(case)
    kind, written = type(model.config), model.config.to_dict()
    taken = set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs"}
    taken |= {field.name for field in dataclasses.fields(kind)}
    names = {**kind.attribute_map}
    assert len(taken) > 20
    assert not {name for name in taken if name not in written and names.get(name) not in written}
    fields = {**written, "architectures": [type(model).__name__]}
    whole = read_model(fields, where="config.json").config
    for name, usual in names.items():
        renamed = {**fields, name: fields[usual]}
        del renamed[usual]
        assert read_model(renamed, where="config.json").config == whole, name
        if type(fields[usual]) is int and name not in _LEFT_OUT_NAMES:
            with pytest.raises(ValueError, match=name):
                read_model({**fields, name: fields[usual] + 1}, where="config.json")


@pytest.mark.parametrize("case", FAMILIES)
def test_what_is_left_out_changes_nothing_in_transformers(case):
    model = make_model(case)
    fields = model.config.to_dict()
    tokens = torch.arange(12)[None] * 5 % 37
    with torch.no_grad():
        whole = model(tokens).logits
    reasons = {**OMITTED, **LEFT_OUT_OF.get(fields["model_type"], {})}
    tried = set()
    for name in sorted(reasons.keys() & fields.keys()):
        if reasons[name] in _NOT_ASKED:
            continue
        for other in others(name, fields[name])[:2]:
            try:
                again = make_model(case, **{name: other})
            except (TypeError, ValueError, StrictDataclassError):
                continue  # transformers refuses the value
            with torch.no_grad():
                logits = again(tokens).logits
            tried.add(name)
            # Chunks of a recurrence sum in another order.
            close = 1e-5 if name == "chunk_size" else 0.0
            torch.testing.assert_close(logits, whole, rtol=0.0, atol=close, msg=f"{name}: {other}")
    assert "use_cache" in tried
