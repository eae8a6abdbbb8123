# SPDX-License-Identifier: Apache-2.0
"""config.json of dense models: read as transformers reads it, written, and read back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.models import GPTConfig
from megatron.core.ops.rope import RopeScaling, inverse_frequencies
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig
from megatron.hf.config_json import read_model, write_config
from megatron.hf.convert import shard_bytes
from tests.unit_tests.hf.test_expert_config import deepseek_models, plain_models
from tests.unit_tests.hf.test_hybrid_config import hybrids

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100,
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
SEED_OSS = {**LLAMA, "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"]}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for fields, name in (
        (LLAMA, "LlamaConfig"),
        (MISTRAL, "MistralConfig"),
        (QWEN2, "Qwen2Config"),
        (SEED_OSS, "SeedOssConfig"),
        (QWEN3, "Qwen3Config"),
    ):
        hf = getattr(transformers, name)(num_key_value_heads=6, **fields)
        model = read_model({**fields, "num_key_value_heads": 6}, where="config.json")
        attention = model.config.attention
        assert attention.kv_channels == getattr(hf, "head_dim", 8)
        assert attention.num_query_groups == 6
        biased = fields is QWEN2 or getattr(hf, "attention_bias", False)
        assert attention.qkv_bias == biased
        assert attention.output_bias == getattr(hf, "attention_out_bias", False)
        assert attention.window == (hf.sliding_window if fields is MISTRAL else None)
        assert model.config.norm.epsilon == hf.rms_norm_eps
        assert model.config.rope.base == hf.rope_parameters["rope_theta"]
        assert model.config.tied == hf.tie_word_embeddings
        assert model.config.init_std == hf.initializer_range
        assert model.dtype is torch.bfloat16
        assert model.max_length == 64


def test_absent_or_null_kv_heads_and_head_dim_match_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for fields, name, nullable in (
        (MISTRAL, "Mistral", ("head_dim",)),
        (QWEN2, "Qwen2", ("num_key_value_heads",)),
        (SEED_OSS, "SeedOss", ("num_key_value_heads", "head_dim")),
    ):
        for null_field in ({}, *({field: None} for field in nullable)):
            all_fields = {**fields, "hidden_size": 64, "num_attention_heads": 32, **null_field}
            hf = getattr(transformers, f"{name}Config")(**all_fields)
            attention = read_model(all_fields, where="x").config.attention
            assert attention.num_query_groups == hf.num_key_value_heads, (name, null_field)
            assert attention.kv_channels == getattr(hf, "head_dim", 2), (name, null_field)


MIX = ["sliding_attention", "full_attention"]
QWEN2_MOE = {
    **LLAMA,
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_hidden_layers": 5,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
MINISTRAL = {**LLAMA, "model_type": "ministral", "architectures": ["MinistralForCausalLM"]}
CWM = {**LLAMA, "model_type": "cwm", "architectures": ["CwmForCausalLM"], "bos_token_id": 0}
MINISTRAL3 = {**LLAMA, "model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_key_value_heads": 6,
}
COHERE = {
    **LLAMA, "model_type": "cohere", "architectures": ["CohereForCausalLM"],
    "layer_norm_eps": 1e-5, "logit_scale": 0.25,
}  # fmt: skip
COHERE2 = {**COHERE, "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"]}
SMOLLM3 = {**LLAMA, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
OLMO3 = {
    **LLAMA,
    "model_type": "olmo3",
    "architectures": ["Olmo3ForCausalLM"],
    "num_hidden_layers": 4,
}
EXAONE4 = {**LLAMA, "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"]}
MINIMAX_M2 = {
    **LLAMA,
    "model_type": "minimax_m2",
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
}
WINDOWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (MINISTRAL, {}),
    (MINISTRAL, {"sliding_window": None}),
    (MINISTRAL, {"sliding_window": 9, "layer_types": MIX}),
    (CWM, {"num_hidden_layers": 6}),
    (OLMO3, {"num_hidden_layers": 6}),
    (EXAONE4, {"num_hidden_layers": 6}),
    (EXAONE4, {"num_hidden_layers": 6, "sliding_window_pattern": 3}),
    (CWM, {"layer_types": MIX, "sliding_window": 9}),
    (COHERE2, {"num_hidden_layers": 9}),
    (COHERE2, {"num_hidden_layers": 6, "sliding_window_pattern": 3, "sliding_window": 9}),
    (COHERE2, {"layer_types": MIX}),
    (SMOLLM3, {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 9}),
    (SMOLLM3, {"num_hidden_layers": 5, "sliding_window": 9}),
    (GPT_OSS, {"num_hidden_layers": 3}),
    (GPT_OSS, {"sliding_window": 9, "layer_types": MIX}),
    (QWEN2_MOE, {"use_sliding_window": True}),
    (QWEN2_MOE, {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 9}),
    (QWEN2_MOE, {"use_sliding_window": False, "max_window_layers": 3}),
    (MISTRAL, {}),
    (MISTRAL, {"sliding_window": None}),
    (MISTRAL, {"sliding_window": 9}),
    *(
        (base, fields)
        for base in (QWEN2, QWEN3)
        for fields in (
            {},
            {"sliding_window": 9},
            {"use_sliding_window": True},
            {"use_sliding_window": True, "max_window_layers": 0},
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9},
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
            {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 9},
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9},
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": MIX},
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention"] * 2,
            },
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention"] * 2,
            },
        )
    ),
]


@pytest.mark.parametrize(("base", "changes"), WINDOWS)
def test_windows_match_transformers(base: dict[str, Any], changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    fields = {**base, "num_key_value_heads": 6, **changes}
    name = base["architectures"][0].removesuffix("ForCausalLM")
    hf = getattr(transformers, f"{name}Config")(**fields)
    types = getattr(hf, "layer_types", ["sliding_attention"] * hf.num_hidden_layers)
    config = read_model(fields, where="x").config
    kinds = {"*": config.attention, "W": config.attention.second}
    windows = [kinds[symbol].window for symbol in config.blocks[::2]]
    assert windows == [hf.sliding_window if kind == "sliding_attention" else None for kind in types]


SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_qwen3_ignores_a_disabled_window() -> None:
    window = {"sliding_window": 0, "use_sliding_window": False, "max_window_layers": 1}
    assert read_model({**QWEN3, **window}, where="x") == read_model(QWEN3, where="x")


def test_yarn_frequencies_match_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    cases: list[dict[str, Any]] = [
        {**SCALED, "attention_factor": 1.7},
        {**SCALED, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**SCALED, "mscale": 0.7},
        {"rope_type": "yarn", "factor": 4.0},
        # Ramps that would end beyond the last feature or begin before the first feature.
        {
            **SCALED,
            "original_max_position_embeddings": 4096,
            "beta_fast": 400.0,
            "rope_theta": 10.0,
        },
        {**SCALED, "beta_fast": 64.0, "beta_slow": 0.001},
        {**SCALED, "original_max_position_embeddings": 64, "truncate": False},
        {**SCALED, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
        {**SCALED, "beta_fast": 1.0, "beta_slow": 1.0},
    ]
    for parameters in cases:
        fields = {**LLAMA, "rope_parameters": {"rope_theta": 500.0, **parameters}}
        hf = transformers.LlamaConfig(**fields)
        frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu")
        rope = read_model(fields, where="x").config.rope
        assert rope.scaling is not None
        assert rope.scaling.magnitude == pytest.approx(magnitude)
        actual = inverse_frequencies(8, base=rope.base, scaling=rope.scaling)
        torch.testing.assert_close(actual, frequencies)


@st.composite
def models(draw: st.DrawFn) -> GPTConfig:
    """Draw a model of one of the architectures without experts."""
    kind = draw(st.sampled_from(["llama", "mistral", "qwen2", "seed_oss", "qwen3"]))
    has_window = kind in ("mistral", "qwen2", "qwen3") and draw(st.booleans())
    groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    biased = kind == "qwen2" or (kind != "mistral" and draw(st.booleans()))
    biased_output = biased and kind != "qwen2"
    biased_mlp = kind in ("llama", "seed_oss") and draw(st.booleans())
    if kind == "seed_oss":
        biased_output = draw(st.booleans())
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
            output_bias=biased_output,
            qk_norm=kind == "qwen3",
            window=draw(st.integers(1, 9999)) if has_window else None,
        ),
        mlp=MLPConfig(ffn_hidden_size=draw(st.integers(1, 9999)), bias=biased_mlp),
        norm=NormConfig(epsilon=draw(st.floats(1e-9, 1e-2))),
        rope=RopeConfig(base=draw(st.floats(1.5, 1e7)), scaling=scaling),
        tied=draw(st.booleans()),
        init_std=draw(st.floats(1e-4, 1.0)),
    )


@given(
    config=models() | plain_models() | deepseek_models() | hybrids(),
    max_length=st.integers(1, 200_000),
)
@settings(deadline=None, max_examples=300)
def test_written_config_is_read_back(config: GPTConfig, max_length: int) -> None:
    fields = write_config(config, max_length=max_length, dtype=torch.float16, end_tokens=(1, 2))
    text = json.loads(json.dumps(fields))
    model = read_model(text, where="x", with_mtp=config.mtp_num_layers > 0)
    assert model.config == config
    assert (model.max_length, model.dtype) == (max_length, torch.float16)
    assert fields["eos_token_id"] == [1, 2]
    # Writing on top of the same fields (`base`) leaves them unchanged.
    rewritten = write_config(
        config, max_length=None, dtype=torch.float16, end_tokens=(), base={**fields, "note": 1}
    )
    assert {**rewritten, "dtype": None} == {**fields, "note": 1, "dtype": None}


QUERY, OUTPUT = {"qkv_bias": True}, {"output_bias": True}
WRITTEN: list[tuple[dict[str, Any], bool, str]] = [
    ({}, False, "llama"),
    ({**QUERY, **OUTPUT}, True, "llama"),
    ({"window": 9}, False, "mistral"),
    (QUERY, False, "qwen2"),
    ({**QUERY, "window": 9}, False, "qwen2"),
    (QUERY, True, "seed_oss"),
    (OUTPUT, False, "seed_oss"),
    ({"qk_norm": True, "window": 9}, False, "qwen3"),
]


@pytest.mark.parametrize(("attention", "biased", "model_type"), WRITTEN)
def test_model_is_written_under_its_own_model_type(
    attention: dict[str, Any], biased: bool, model_type: str
) -> None:
    model = read_model(LLAMA, where="x").config
    changed = dataclasses.replace(
        model,
        attention=dataclasses.replace(model.attention, **attention),
        mlp=dataclasses.replace(model.mlp, bias=biased),
    )
    fields = write_config(changed, max_length=9, dtype=torch.float32, end_tokens=())
    assert fields["model_type"] == model_type
    assert read_model(fields, where="x").config == changed
    dropouts = [value for name, value in fields.items() if name.endswith("_dropout")]
    assert dropouts == [0.0] * (2 if model_type == "seed_oss" else 1)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1 kb", 1000), ("77", 77), ("2MB", 2 * 10**6)]
)
def test_shard_sizes_are_parsed(text: str, size: int) -> None:
    assert shard_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "-1GB", "5GiB", "many", "", "1e9"])
def test_invalid_shard_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--max-shard-size"):
        shard_bytes(text)
