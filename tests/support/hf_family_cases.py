# SPDX-License-Identifier: Apache-2.0
"""Small models of further families: odd shapes, three query heads for each key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 500.0}
#: 48 features in heads of 8, for classes without their own head_dim.
_WHOLE = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}

#: Latent attention and experts.
_LATENT: dict[str, Any] = {
    "rms_norm_eps": 1e-3, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 10, "v_head_dim": 9,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 22, "n_group": 3,
    "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
_DELTA_NET: dict[str, Any] = {
    "rms_norm_eps": 1e-2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 6, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10,
}  # fmt: skip
#: Windows in some layers.
_MIX: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 5.5,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.35,
    "attention_multiplier": 0.21,
}
_GRANITE_EXPERTS: dict[str, Any] = {
    **_WHOLE,
    **_FACTORS,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "intermediate_size": 22,
}
#: Mamba-2 of Bamba and Granite.
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 12,
    "mamba_d_head": 8,
    "mamba_n_groups": 3,
    "mamba_d_state": 9,
    "mamba_proj_bias": True,
    "rms_norm_eps": 1e-2,
}

#: name: (class in transformers, what its configuration has in addition to the shape)
FAMILY_CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN}),
    "nemotron": (
        "Nemotron",
        {"rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.4}, "attention_bias": True},
    ),
    "jais2": ("Jais2", {"mlp_bias": False, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {**_WHOLE, "sliding_window": 7}),
    "persimmon": ("Persimmon", {"num_attention_heads": 6}),
    "glm": ("Glm", {"head_dim": 12}),
    "helium": ("Helium", {**_WHOLE, "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {"use_bias": True, "rope_parameters": _YARN}),
    "stablelm": ("StableLm", {**_WHOLE, "use_qkv_bias": True}),
    "phi3": (
        "Phi3",
        {
            **_WHOLE,
            "sliding_window": 7,
            "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.75},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_LATENT,
            **_EXPERTS,
            "qk_nope_head_dim": 8,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**_LATENT, **_EXPERTS, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "youtu": ("Youtu", {**_LATENT, "q_lora_rank": None, "rope_interleave": False}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 12,
            "use_qk_norm": True,
            "attention_bias": True,
            "topk_group": 1,
            "num_experts_per_tok": 3,
        },
    ),
    "solar_open": ("SolarOpen", {**_EXPERTS, "norm_topk_prob": False}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_norm_min": 0.8,
            "moe_intermediate_size": 22,
            "moe_layer_interval": 2,
        },
    ),
    "hy_v3": (
        "HYV3",
        {
            "num_hidden_layers": 3,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
        },
    ),
    "qwen3_5": ("Qwen3_5", {**_DELTA_NET, "attention_bias": True}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **_DELTA_NET,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "shared_expert_intermediate_size": 14,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            **_WHOLE,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "ministral": (
        "Ministral",
        {**_MIX, "sliding_window": 7, "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "olmo2": ("Olmo2", {**_WHOLE, "attention_bias": True, "rope_parameters": _YARN}),
    "olmo3": (
        "Olmo3",
        {
            **_WHOLE,
            **_MIX,
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            **_WHOLE,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 22,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    "exaone4": ("Exaone4", {**_WHOLE, **_MIX, "sliding_window": 7}),
    "exaone4_full": (
        "Exaone4",
        {
            **_WHOLE,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 12, "attention_bias": False}),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 12,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 22,
            "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.5},
        },
    ),
    "cwm": (
        "Cwm",
        {
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "head_dim": 12,
            "mlp_bias": True,
            "bos_token_id": 0,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 22,
            "sliding_window": 7,
            "swiglu_limit": 1.5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "gpt2": (
        "GPT2",
        {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_inner": 40, "n_positions": 128},
    ),
    "ministral3": (
        "Ministral3",
        {
            **_WHOLE,
            "head_dim": 12,
            "sliding_window": 29,
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.3},
        },
    ),
    "qwen2_mix": ("Qwen2", {**_MIX, "use_sliding_window": True, "sliding_window": 7}),
    "qwen3_mix": (
        "Qwen3",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen2_moe_mix": (
        "Qwen2Moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "shared_expert_intermediate_size": 14,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "rope_parameters": _YARN,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
        },
    ),
    "qwen3_moe_window": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
    ),
    "dots1": (
        "Dots1",
        {**_EXPERTS, **_MIX, "sliding_window": 7, "head_dim": 10, "first_k_dense_replace": 1},
    ),
    "gpt_bigcode": (
        "GPTBigCode",
        {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_inner": 40, "n_positions": 128},
    ),
    "cohere": (
        "Cohere",
        {
            "num_attention_heads": 6,
            "head_dim": 12,
            "attention_bias": True,
            "layer_norm_eps": 1e-3,
            "logit_scale": 1.7,
            "rope_parameters": _YARN,
        },
    ),
    "cohere2": (
        "Cohere2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_attention_heads": 6,
            "layer_norm_eps": 1e-3,
            "logit_scale": 1.7,
            "sliding_window": 7,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            "num_attention_heads": 6,
            "mamba_d_ssm": 84,
            "mamba_n_heads": 12,
            "mamba_d_head": 7,
            "mamba_n_groups": 3,
            "mamba_d_state": 9,
            "embedding_multiplier": 1.7,
            "lm_head_multiplier": 1.3,
            "mlp_multipliers": [0.7, 1.2],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.4,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 1.4, 0.8, 1.3, 0.6],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.9,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_attention_heads": 6,
            "norm_eps": 1e-3,
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": False,
            "rope_parameters": _YARN,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "conv", "conv"],
            "num_attention_heads": 6,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "routed_scaling_factor": 1.7,
        },
    ),
    "bamba": (
        "Bamba",
        {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "attn_layer_indices": [1],
            "mlp_bias": True,
            **_MAMBA2,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 12, "attention_bias": True, "rope_parameters": _YARN}),
    "gemma2": (
        "Gemma2",
        {
            **_MIX,
            **_WHOLE,
            "head_dim": 12,
            "sliding_window": 7,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **_MIX,
            **_WHOLE,
            "head_dim": 12,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            },
        },
    ),
    "granite": (
        "Granite",
        {**_FACTORS, "head_dim": 12, "mlp_bias": True, "rope_parameters": _YARN},
    ),
    "granitemoe": ("GraniteMoe", {**_GRANITE_EXPERTS, "attention_bias": True}),
    "granitemoeshared": (
        "GraniteMoeShared",
        {**_GRANITE_EXPERTS, "shared_intermediate_size": 14, "tie_word_embeddings": True},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_GRANITE_EXPERTS,
            **_MAMBA2,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "rope",
            "shared_intermediate_size": 14,
        },
    ),
}

#: Classes with a language-model head that are not named `...ForCausalLM`.
CLASS_NAMES: Mapping[str, str] = {"GPT2": "GPT2LMHeadModel"}

#: Models with recurrent layers.
RECURRENT_CASES = ("qwen3_5", "qwen3_5_moe", "bamba", "falcon_h1", "granitemoehybrid")

#: Classes whose norms store the distance of the weight from one.
ZERO_CENTERED = frozenset(
    {"Qwen3Next", "Nemotron", "Qwen3_5", "Qwen3_5Moe", "Gemma", "Gemma2", "Gemma3"}
)
