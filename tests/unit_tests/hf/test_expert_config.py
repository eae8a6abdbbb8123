# SPDX-License-Identifier: Apache-2.0
"""config.json of models with experts: read, written and read back, or refused by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from megatron.core.models import GPTConfig
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
from megatron.training.config.model_table import options_problem, yarn_magnitude

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
    **SHAPE,
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}

KIMI_K2 = {**DEEPSEEK, "model_type": "kimi_k2"}

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (MIXTRAL, {"num_local_experts": None}, "num_local_experts is None"),
    (MIXTRAL, {"num_experts": 9}, "num_experts is 9: num_local_experts is 8"),
    (MIXTRAL, {"num_experts_per_tok": 9}, "moe-router-topk 9 must be in 1"),
    (MIXTRAL, {"sliding_window": 4096}, "sliding_window is 4096"),
    (MIXTRAL, {"sliding_window": 64, "use_sliding_window": False}, "sliding_window is 64"),
    (MIXTRAL, {"attention_bias": True}, "attention_bias is True"),
    (MIXTRAL, {"n_shared_experts": 3}, "n_shared_experts is 3: this changes the model"),
    (MIXTRAL, {"moe_intermediate_size": 64}, "moe_intermediate_size is 64: this changes"),
    (MIXTRAL, {"kv_lora_rank": 64}, "kv_lora_rank is 64: this changes"),
    (MIXTRAL, {"num_hidden_layers": 1 << 30}, "num_hidden_layers is 1073741824: more than 10000"),
    (MIXTRAL, {"num_local_experts": 1 << 30}, "with 3 layers that is more than 262144 in total"),
    (DEEPSEEK, {"num_attention_heads": 1 << 30}, "with 3 layers that is more than 262144 in total"),
    (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    (QWEN2_MOE, {"num_experts": None}, "num_experts is None"),
    (QWEN2_MOE, {"qkv_bias": 1}, "qkv_bias is 1: expected true or false"),
    (QWEN2_MOE, {"attention_bias": True}, "attention_bias is True"),
    (QWEN2_MOE, {"norm_topk_prob": 1}, "norm_topk_prob is 1: expected true or false"),
    (QWEN2_MOE, {"mlp_only_layers": 3}, "mlp_only_layers is 3: expected numbers of layers"),
    (QWEN2_MOE, {"layer_types": ["sliding_attention"] * 3}, "layer_types is"),
    (QWEN2_MOE, {"use_sliding_window": True, "sliding_window": 9}, "sliding_window is 9"),
    (QWEN2_MOE, {"n_shared_experts": 3}, "n_shared_experts is 3: this changes the model"),
    (KIMI_K2, {"scoring_func": "softmax"}, "scoring_func is 'softmax': supported is 'sigmoid'"),
    (KIMI_K2, {"attention_bias": True}, "attention_bias is True"),
    (QWEN2_MOE, {"use_sliding_window": True}, "use_sliding_window is True"),
    (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window is True"),
    (
        QWEN3_MOE,
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention"] * 3,
        },
        "use_sliding_window is True",
    ),
    (QWEN3_MOE, {"num_experts": "8"}, "num_experts is '8'"),
    (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers is 3: expected numbers of layers"),
    (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob is 1: expected true or false"),
    (QWEN3_MOE, {"shared_expert_intermediate_size": 9}, "shared_expert_intermediate_size is 9"),
    (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func is 'softmax': supported is 'sigmoid'"),
    (DEEPSEEK, {"topk_method": "greedy"}, "topk_method is 'greedy': supported is 'noaux_tc'"),
    (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq is 2: supported is 1"),
    (DEEPSEEK, {"attention_bias": True}, "attention_bias is True"),
    (DEEPSEEK, {"n_shared_experts": 0}, "n_shared_experts is 0"),
    (DEEPSEEK, {"n_group": 3}, "moe-router-num-groups 3 must divide"),
    (DEEPSEEK, {"n_group": 8}, "2 candidates of a group of 1"),
    (DEEPSEEK, {"topk_group": 5}, "moe-router-group-topk 5 of 4"),
    (DEEPSEEK, {"first_k_dense_replace": -1}, "an integer that is not negative"),
    (DEEPSEEK, {"num_key_value_heads": 3}, "num_key_value_heads is 3: supported is 6"),
    (DEEPSEEK, {"head_dim": 12}, "head_dim is 12: supported is 4"),
    (DEEPSEEK, {"qk_head_dim": 10}, "qk_head_dim is 10: supported is 12"),
    (DEEPSEEK, {"qk_rope_head_dim": 5}, "is 5: rotary position embedding needs an even"),
    (DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank is None"),
    (DEEPSEEK, {"rope_interleave": 1}, "rope_interleave is 1"),
    (DEEPSEEK, {"num_experts": 16}, "num_experts is 16: this changes"),
    (
        DEEPSEEK,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        "mscale_all_dim is 1.0",
    ),
]


@pytest.mark.parametrize(("base", "changes", "text"), WRONG)
def test_unsupported_value_is_named(
    base: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    assert read_model(base, where="x").config.moe is not None
    with pytest.raises(ValueError, match=text) as error:
        read_model({**base, **changes}, where="dir/config.json")
    assert "dir/config.json" in str(error.value)
    assert "\n" not in str(error.value)


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
    fewer = replace(model, mtp_num_layers=1)
    written = write_config(fewer, max_length=9, dtype=torch.float32, end_tokens=(), base=fields)
    assert written["num_nextn_predict_layers"] == 1
    mixtral = replace(read_model(MIXTRAL, where="x").config, mtp_num_layers=1)
    with pytest.raises(ValueError, match=r"mtp_num_layers.*1.*0"):
        write_config(mixtral, max_length=9, dtype=torch.float32, end_tokens=())


def test_training_only_settings_are_no_difference() -> None:
    model = read_model(DEEPSEEK, where="x").config
    assert model.moe is not None
    router = replace(
        model.moe.router,
        bias_update_rate=0.5,
        balance="seq_aux_loss",
        aux_loss_coeff=0.1,
        z_loss_coeff=0.1,
        jitter=0.1,
    )
    moe = replace(model.moe, router=router, capacity_factor=1.5, drop_policy="position")
    trained = replace(model, moe=moe, mtp_loss_factor=0.7, hidden_dropout=0.1)
    assert differences(model, trained) == []
    assert function_of(trained) == function_of(model)


@pytest.mark.parametrize(
    ("topk", "topk_groups", "num_groups", "trainable"),
    [(4, 2, 4, True), (2, 1, 4, True), (5, 2, 4, True), (2, 2, 4, False), (6, 2, 4, False)]
    + [(6, 4, 4, True), (6, 1, 1, True)],  # all groups: nothing is ranked
)
def test_models_that_options_cannot_describe_are_named(
    topk, topk_groups, num_groups, trainable
) -> None:
    """Training ranks groups by floor(topk / group-topk) scores, transformers by 2 scores."""
    limits = {"num_experts_per_tok": topk, "topk_group": topk_groups, "n_group": num_groups}
    fields = {**DEEPSEEK, "n_routed_experts": 16, **limits}
    problem = options_problem(read_model(fields, where="x").config)
    assert (problem is None) == trainable
    if problem is not None:
        assert f"num_experts_per_tok {topk} / topk_group {topk_groups}" in problem
        assert "--moe-router-topk / --moe-router-group-topk" in problem


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
        ("moe.shared_ffn_hidden_size", with_moe(shared_ffn_hidden_size=30), False),
        ("moe.shared_gate", with_moe(shared_gate=True), False),
        ("moe.gated", with_moe(gated=False, activation="gelu"), False),
        ("ffn_pattern", replace(model, ffn_pattern="E-E"), False),
    ):
        assert any(text.startswith(name) for text in differences(model, changed)), name
        if exported:
            fields = write_config(changed, max_length=9, dtype=torch.float32, end_tokens=())
            assert not differences(read_model(fields, where="x").config, changed)
            continue
        with pytest.raises(ValueError, match=rf"cannot be exported as DeepseekV3.*{name}"):
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
        mtp_num_layers=draw(st.integers(0, 2)),
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
