# SPDX-License-Identifier: Apache-2.0
"""config.json of models with experts: read, written and read back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from megatron.core.models import GPTConfig
from megatron.core.models.gpt_config import MTPConfig
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ops.rope import RopeScaling
from megatron.core.transformer import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
)
from megatron.hf.config_json import differences, function_of, read_model, write_config
from megatron.training.config.model_table import model_options, options_problem, yarn_magnitude

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "num_experts_per_tok": 2,
}
MIXTRAL = {**SHAPE, "model_type": "mixtral", "num_local_experts": 8}
QWEN2_MOE = {
    **SHAPE,
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 30,
}
QWEN3_MOE = {**SHAPE, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 24}
DEEPSEEK: dict[str, Any] = {
    **SHAPE, "model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 10,
}  # fmt: skip

KIMI_K2 = {**DEEPSEEK, "model_type": "kimi_k2"}


def test_q_lora_rank_is_null_or_a_number_but_not_absent() -> None:
    attention = read_model({**DEEPSEEK, "q_lora_rank": None}, where="x").config.attention
    assert isinstance(attention, LatentAttentionConfig)
    assert attention.q_lora_rank is None
    absent = {key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"}
    with pytest.raises(ValueError, match="q_lora_rank"):
        read_model(absent, where="x")


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for fields, name in (
        (MIXTRAL, "Mixtral"),
        (QWEN2_MOE, "Qwen2Moe"),
        (QWEN3_MOE, "Qwen3Moe"),
        (DEEPSEEK, "DeepseekV3"),
    ):
        hf = getattr(transformers, f"{name}Config")(**fields)
        config = read_model(fields, where="x").config
        assert config.norm.epsilon == hf.rms_norm_eps
        assert config.rope is not None
        assert config.rope.base == hf.rope_parameters["rope_theta"]
        assert config.tied == hf.tie_word_embeddings
        assert config.moe is not None
        normalized = True if name == "Mixtral" else hf.norm_topk_prob
        assert config.moe.router.normalize == normalized
        assert config.moe.num_experts == 8
        if name == "Qwen2Moe":
            assert config.attention is not None
            assert config.attention.qkv_bias == hf.qkv_bias
            assert read_model({**fields, "qkv_bias": False}, where="x").config != config
        elif name != "Mixtral":
            assert hf.num_local_experts == 8
            aliases = {"num_local_experts": 8, "num_experts": None, "n_routed_experts": None}
            assert read_model({**fields, **aliases}, where="x").config == config
        if name == "DeepseekV3":
            assert config.rope.interleaved == hf.rope_interleave
    absent = {k: v for k, v in MIXTRAL.items() if k != "num_key_value_heads"}
    assert transformers.MixtralConfig(**absent).num_key_value_heads == 8
    with pytest.raises(ValueError, match="num-query-groups 8"):
        read_model(absent, where="x")


def test_expert_layers_match_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for base, name, changes in (
        (QWEN3_MOE, "Qwen3Moe", {"decoder_sparse_step": 2}),
        (QWEN3_MOE, "Qwen3Moe", {"mlp_only_layers": [0, 3]}),
        (QWEN3_MOE, "Qwen3Moe", {"decoder_sparse_step": 3, "mlp_only_layers": [2]}),
        (QWEN2_MOE, "Qwen2Moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ):
        fields = {**base, "num_hidden_layers": 7, **changes}
        with torch.device("meta"):
            hf_config = getattr(transformers, f"{name}Config")(**fields)
            model = getattr(transformers, f"{name}ForCausalLM")(hf_config)
        pattern = "".join(
            "E" if "experts" in dict(x.mlp.named_children()) else "-" for x in model.model.layers
        )
        assert read_model(fields, where="x").config.ffn_pattern == pattern
        assert set(pattern) == {"E", "-"}


def test_yarn_softmax_scale_matches_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for changes, softmax in (
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, True),
        ({"mscale": 0.707, "mscale_all_dim": 0.9}, True),
        ({"mscale": 0.707}, False),
        ({}, False),
        ({"mscale_all_dim": 1.3, "attention_factor": 0.8}, True),
    ):
        yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
        fields = {**DEEPSEEK, "rope_parameters": {**yarn, **changes, "rope_theta": 1e4}}
        with torch.device("meta"):
            model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields))
        config = read_model(fields, where="x").config
        assert isinstance(config.attention, LatentAttentionConfig)
        assert (config.attention.scale_factor != 1.0) == softmax
        scale = config.attention.scale_factor * 12**-0.5
        assert scale == pytest.approx(model.model.layers[0].self_attn.scaling)
        assert config.rope is not None
        assert config.rope.scaling is not None
        assert config.rope.scaling.magnitude == pytest.approx(
            model.model.rotary_emb.attention_scaling
        )


def test_norms_of_low_rank_vectors_have_their_own_epsilon() -> None:
    config = read_model({**DEEPSEEK, "rms_norm_eps": 1e-5}, where="x").config
    assert isinstance(config.attention, LatentAttentionConfig)
    assert (config.norm.epsilon, config.attention.norm_epsilon) == (1e-5, 1e-6)
    fields = write_config(config, max_length=9, dtype=torch.float32, end_tokens=())
    assert read_model(fields, where="x").config == config
    same_epsilon = replace(config, attention=replace(config.attention, norm_epsilon=None))
    with pytest.raises(ValueError, match=r"attention.norm_epsilon.*1e-05.*1e-06"):
        write_config(same_epsilon, max_length=9, dtype=torch.float32, end_tokens=())


def test_mtp_layers_are_read_only_with_mtp() -> None:
    fields = {**DEEPSEEK, "num_nextn_predict_layers": 2}
    assert read_model(fields, where="x").config.mtp_num_layers == 0
    model = read_model(fields, where="x", with_mtp=True).config
    assert model.mtp_num_layers == 2
    written = write_config(model, max_length=9, dtype=torch.float32, end_tokens=(), base=fields)
    assert written == {**fields, "dtype": "float32"}
    many = {**fields, "num_nextn_predict_layers": 65}
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers.*65.*64"):
        read_model(many, where="x", with_mtp=True)
    fewer = replace(model, mtp=MTPConfig(num_layers=1))
    written = write_config(fewer, max_length=9, dtype=torch.float32, end_tokens=(), base=fields)
    assert written["num_nextn_predict_layers"] == 1
    mixtral = replace(read_model(MIXTRAL, where="x").config, mtp=MTPConfig(num_layers=1))
    with pytest.raises(ValueError, match=r"mtp.num_layers.*1.*None"):
        write_config(mixtral, max_length=9, dtype=torch.float32, end_tokens=())


def test_training_only_settings_are_no_difference() -> None:
    fields = {**DEEPSEEK, "num_nextn_predict_layers": 2}
    model = read_model(fields, where="x", with_mtp=True).config
    assert model.moe is not None
    assert model.mtp is not None
    router = replace(
        model.moe.router,
        bias_update_rate=0.5,
        balance="seq_aux_loss",
        aux_loss_coeff=0.1,
        z_loss_coeff=0.1,
        jitter=0.1,
    )
    moe = replace(model.moe, router=router, capacity_factor=1.5, drop_policy="position")
    trained = replace(model, moe=moe, mtp=replace(model.mtp, loss_factor=0.7), hidden_dropout=0.1)
    assert differences(model, trained) == []
    assert function_of(trained) == function_of(model)


@pytest.mark.parametrize(
    ("topk", "topk_groups", "num_groups"),
    [(4, 2, 4), (2, 1, 4), (5, 2, 4), (2, 2, 4), (6, 2, 4), (6, 4, 4), (6, 1, 1)],
)
def test_options_describe_any_group_limited_routing(topk, topk_groups, num_groups) -> None:
    """Megatron-LM ranks groups by floor(topk / group-topk) scores, transformers by 2 scores."""
    limits = {"num_experts_per_tok": topk, "topk_group": topk_groups, "n_group": num_groups}
    model = read_model({**DEEPSEEK, "n_routed_experts": 16, **limits}, where="x").config
    options = model_options(model)
    named = options.get("moe-router-group-candidates")
    ranks = num_groups != topk_groups and topk // topk_groups != 2
    assert named == (2 if ranks else None)
    assert options_problem(model) is None


def test_config_differences_are_named_unless_not_exportable() -> None:
    model = read_model(DEEPSEEK, where="x").config
    moe = model.moe
    assert moe is not None

    def with_router(**changes: Any) -> GPTConfig:
        return replace(model, moe=replace(moe, router=replace(moe.router, **changes)))

    def with_moe(**changes: Any) -> GPTConfig:
        return replace(model, moe=replace(moe, **changes))

    for name, changed, exported in (
        ("moe.router.topk", with_router(topk=3), True),
        ("moe.router.scaling_factor", with_router(scaling_factor=1.0), True),
        ("moe.router.group_topk", with_router(group_topk=3), True),
        ("moe.router.group_candidates", with_router(group_candidates=1), False),
        ("moe.router.expert_bias", with_router(expert_bias=False), False),
        ("moe.router.score_function", with_router(score_function="softmax"), False),
        ("moe.router.bias", with_router(bias=True), False),
        ("moe.bias", with_moe(bias=True), False),
        ("moe.clamp", with_moe(clamp=7.0), False),
        ("moe.shared_ffn_hidden_size", with_moe(shared_ffn_hidden_size=30), False),
        ("moe.shared_gate", with_moe(shared_gate=True), False),
        ("moe.gated", with_moe(gated=False, activation="gelu"), False),
        ("ffn_pattern", replace(model, ffn_pattern="E-E"), True),
    ):
        assert any(text.startswith(name) for text in differences(model, changed)), name
        if exported:
            fields = write_config(changed, max_length=9, dtype=torch.float32, end_tokens=())
            assert not differences(read_model(fields, where="x").config, changed)
            continue
        with pytest.raises(ValueError, match=rf"cannot be exported as .*{name}"):
            write_config(changed, max_length=9, dtype=torch.float32, end_tokens=())


@st.composite
def latent_attention(draw: st.DrawFn, *, scale: float, epsilon: float) -> LatentAttentionConfig:
    """Draw latent attention for a model whose norms use `epsilon`."""
    return LatentAttentionConfig(
        num_attention_heads=6,
        q_lora_rank=draw(st.sampled_from([None, 7])),
        kv_lora_rank=draw(st.integers(1, 99)),
        nope_channels=draw(st.integers(1, 99)),
        rope_channels=2 * draw(st.integers(1, 99)),
        value_channels=draw(st.integers(1, 99)),
        scale_factor=scale,
        norm_epsilon=None if epsilon == 1e-6 else 1e-6,
    )


@st.composite
def deepseek_models(draw: st.DrawFn) -> GPTConfig:
    """Draw a DeepSeek-V3 model."""
    layers, inner = draw(st.integers(1, 9)), draw(st.integers(1, 999))
    dense, epsilon = draw(st.integers(0, layers - 1)), draw(st.sampled_from([1e-5, 1e-6]))
    limited = draw(st.booleans())
    router = RouterConfig(
        topk=draw(st.integers(2, 4)),
        score_function="sigmoid",
        normalize=draw(st.booleans()),
        scaling_factor=draw(st.floats(0.1, 9.0)),
        num_groups=4 if limited else None,
        group_topk=draw(st.integers(2, 3)) if limited else None,
        expert_bias=True,
    )
    factor, weight = draw(st.floats(1.5, 64.0)), draw(st.sampled_from([None, 0.707, 1.0, 1.3]))
    scaling, scale = draw(st.sampled_from([None, RopeScaling(kind="linear", factor=factor)])), 1.0
    if weight is not None:
        scaling = RopeScaling(kind="yarn", factor=factor, original_max_position=64)
        scale = yarn_magnitude(factor, weight) ** 2
    shared = inner * draw(st.integers(1, 3))
    return GPTConfig(
        num_layers=layers,
        hidden_size=draw(st.integers(1, 9999)),
        vocab_size=draw(st.integers(1, 999_999)),
        attention=draw(latent_attention(scale=scale, epsilon=epsilon)),
        mlp=MLPConfig(ffn_hidden_size=draw(st.integers(1, 999))),
        norm=NormConfig(epsilon=epsilon),
        rope=RopeConfig(scaling=scaling, interleaved=draw(st.booleans())),
        tied=draw(st.booleans()),
        moe=MoEConfig(
            num_experts=8, ffn_hidden_size=inner, router=router, shared_ffn_hidden_size=shared
        ),
        ffn_pattern="-" * dense + "E" * (layers - dense),
        mtp=draw(st.none() | st.builds(MTPConfig, num_layers=st.integers(1, 2))),
    )


@st.composite
def plain_models(draw: st.DrawFn) -> GPTConfig:
    """Draw a Mixtral, Qwen2-MoE or Qwen3-MoE model."""
    layers, inner = draw(st.integers(1, 9)), draw(st.integers(1, 999))
    kind = draw(st.sampled_from(["mixtral", "qwen2_moe", "qwen3_moe"]))
    qwen, gated = kind != "mixtral", kind == "qwen2_moe"
    biased = qwen and draw(st.booleans())
    pattern = draw(st.text("-E", min_size=layers - 1, max_size=layers - 1)) + "E"
    router = RouterConfig(topk=draw(st.integers(2, 8)), normalize=not qwen or draw(st.booleans()))
    return GPTConfig(
        num_layers=layers,
        hidden_size=draw(st.integers(1, 9999)),
        vocab_size=draw(st.integers(1, 999_999)),
        attention=AttentionConfig(
            num_attention_heads=6,
            num_query_groups=draw(st.sampled_from([1, 2, 3, 6])),
            kv_channels=2 * draw(st.integers(1, 99)),
            qkv_bias=biased,
            output_bias=biased and not gated,
            qk_norm=kind == "qwen3_moe",
        ),
        mlp=MLPConfig(ffn_hidden_size=draw(st.integers(1, 999)) if qwen else inner),
        norm=NormConfig(epsilon=draw(st.floats(1e-9, 1e-2))),
        tied=draw(st.booleans()),
        moe=MoEConfig(
            num_experts=8,
            ffn_hidden_size=inner,
            router=router,
            shared_ffn_hidden_size=draw(st.integers(1, 999)) if gated else None,
            shared_gate=gated,
        ),
        ffn_pattern=pattern if qwen else "E" * layers,
    )
