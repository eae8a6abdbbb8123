# SPDX-License-Identifier: Apache-2.0
"""What config.json may say: every value that is not supported is an error that names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.models.gpt import GPTConfig
from megatron.core.ops.rope import RopeScaling
from megatron.core.ops.rope.reference import inverse_frequencies
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig
from megatron.hf.config_json import write_config
from megatron.hf.convert import shard_bytes
from megatron.hf.model_config import read_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def test_what_is_absent_has_the_default_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for fields, name in ((LLAMA, "LlamaConfig"), (QWEN3, "Qwen3Config")):
        theirs = getattr(transformers, name)(num_key_value_heads=6, **fields)
        found = read_model(fields, where="config.json")
        attention = found.config.attention
        assert attention.kv_channels == theirs.head_dim
        assert attention.num_query_groups == 6
        assert attention.qkv_bias == attention.output_bias == theirs.attention_bias
        assert found.config.norm.epsilon == theirs.rms_norm_eps
        assert found.config.rope.base == theirs.rope_parameters["rope_theta"]
        assert found.config.tied == theirs.tie_word_embeddings
        assert found.config.init_std == theirs.initializer_range
        assert found.dtype is torch.bfloat16
        assert found.max_length == 64


SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral"}, "model_type is 'mistral': supported are llama, qwen3, mixtral"),
    ({"model_type": None}, "model_type is None"),
    ({"model_type": ["llama"]}, "model_type is"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu': supported is 'silu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"num_experts": 4}, "num_experts is 4: this changes the model"),
    ({"residual_multiplier": 0.22}, "residual_multiplier is 0.22: this changes the model"),
    ({"foo_scale": 2.0}, "foo_scale is 2.0: this changes the model"),
    ({"sliding_window": 16}, "sliding_window is 16"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    ({"layer_types": ["full_attention"]}, "layer_types is"),
    ({"hidden_size": "48"}, "hidden_size is '48': expected a positive integer"),
    ({"hidden_size": True}, "hidden_size is True"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
    ({"hidden_size": 50}, "head_dim is absent"),
    ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    ({"num_key_value_heads": 4}, "num-query-groups 4 must divide"),
    ({"head_dim": 7}, "7 per head is 7|of 7 features per head"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0: expected a positive number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': expected true or false"),
    ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
    ({"dtype": ["float32"]}, "dtype is"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": 3}, "rope_parameters is 3: expected an object"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope'"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is absent"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is absent"),
    ({"rope_parameters": {**SCALED, "truncate": False}}, "rope_parameters.truncate is False"),
    ({"rope_parameters": {**SCALED, "beta_slow": 99.0}}, "beta_slow=99.0 must be below"),
    ({"rope_parameters": {**SCALED, "factor": 0.5}}, "factor=0.5 must be at least 1"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_a_value_that_is_not_supported_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        read_model({**LLAMA, **changes}, where="dir/config.json")
    assert "dir/config.json" in str(error.value)


def test_what_qwen3_has_not_and_what_is_off_by_default() -> None:
    with pytest.raises(ValueError, match="mlp_bias is True: Qwen3ForCausalLM has none"):
        read_model({**QWEN3, "mlp_bias": True}, where="x")
    window = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1}
    assert read_model({**QWEN3, **window}, where="x") == read_model(QWEN3, where="x")


def test_yarn_is_scaled_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    cases: list[dict[str, Any]] = [
        {**SCALED, "attention_factor": 1.7},
        {**SCALED, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**SCALED, "mscale": 0.7},
        {"rope_type": "yarn", "factor": 4.0},
        # A ramp that would end beyond the last feature, and one that would begin before the first.
        {
            **SCALED,
            "original_max_position_embeddings": 4096,
            "beta_fast": 400.0,
            "rope_theta": 10.0,
        },
        {**SCALED, "beta_fast": 64.0, "beta_slow": 0.001},
    ]
    for parameters in cases:
        fields = {**LLAMA, "rope_parameters": {"rope_theta": 500.0, **parameters}}
        theirs = transformers.LlamaConfig(**fields)
        frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        rope = read_model(fields, where="x").config.rope
        assert rope.scaling is not None
        assert rope.scaling.magnitude == pytest.approx(magnitude)
        found = inverse_frequencies(8, base=rope.base, scaling=rope.scaling)
        torch.testing.assert_close(found, frequencies)


@st.composite
def models(draw: st.DrawFn) -> GPTConfig:
    """Draw a model that Llama or Qwen3 can be."""
    qwen3 = draw(st.booleans())
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    biased = draw(st.booleans())
    original, factor = draw(st.integers(1, 9000)), draw(st.floats(1.0, 64.0))
    scaling = draw(
        st.sampled_from(
            [
                None,
                RopeScaling(kind="linear", factor=factor),
                RopeScaling(kind="llama3", factor=factor, original_max_position=original),
                RopeScaling(kind="yarn", factor=factor, original_max_position=original),
                RopeScaling(
                    kind="yarn",
                    factor=factor,
                    original_max_position=original,
                    beta_fast=16.5,
                    beta_slow=1.25,
                    attention_factor=0.75,
                ),
            ]
        )
    )
    return GPTConfig(
        num_layers=draw(st.integers(1, 99)),
        hidden_size=draw(st.integers(1, 9999)),
        vocab_size=draw(st.integers(1, 999_999)),
        attention=AttentionConfig(
            num_attention_heads=groups * per_group,
            num_query_groups=groups,
            kv_channels=2 * draw(st.integers(1, 99)),
            qkv_bias=biased,
            output_bias=biased,
            qk_norm=qwen3,
        ),
        mlp=MLPConfig(
            ffn_hidden_size=draw(st.integers(1, 9999)), bias=not qwen3 and draw(st.booleans())
        ),
        norm=NormConfig(epsilon=draw(st.floats(1e-9, 1e-2))),
        rope=RopeConfig(base=draw(st.floats(1.5, 1e7)), scaling=scaling),
        tied=draw(st.booleans()),
        init_std=draw(st.floats(1e-4, 1.0)),
    )


@given(config=models(), max_length=st.integers(1, 200_000))
@settings(deadline=None)
def test_what_is_written_is_read_back(config: GPTConfig, max_length: int) -> None:
    fields = write_config(config, max_length=max_length, dtype=torch.float16, end_tokens=(1, 2))
    found = read_model(json.loads(json.dumps(fields)), where="x")
    assert found.config == config
    assert (found.max_length, found.dtype) == (max_length, torch.float16)
    assert fields["eos_token_id"] == [1, 2]
    # And the same fields, given back as what the model came from, stay as they are.
    again = write_config(
        config, max_length=None, dtype=torch.float16, end_tokens=(), base={**fields, "note": 1}
    )
    assert {**again, "dtype": None} == {**fields, "note": 1, "dtype": None}


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1 kb", 1000), ("77", 77), ("2MB", 2 * 10**6)]
)
def test_sizes_of_files(text: str, size: int) -> None:
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "-1GB", "5GiB", "many", "", "1e9"])
def test_impossible_sizes_of_files(text: str) -> None:
    with pytest.raises(ValueError, match="--max-shard-size"):
        shard_bytes(text)
