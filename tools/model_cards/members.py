# SPDX-License-Identifier: Apache-2.0
"""Published models of each model_type, as the fields of config.json that determine their size.

A model without fields has the defaults of its class in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _shape(
    hidden: int, ffn: int, layers: int, heads: int, groups: int, vocabulary: int, **fields: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        **fields,
    }


_QWEN3 = {"head_dim": 128}
MEMBERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "llama": {
        "Llama-3.2-1B": _shape(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
        "Llama-3.1-8B": _shape(4096, 14336, 32, 32, 8, 128256),
        "Llama-3.1-70B": _shape(8192, 28672, 80, 64, 8, 128256),
        "Llama-3.1-405B": _shape(16384, 53248, 126, 128, 8, 128256),
    },
    "mistral": {
        "Mistral-7B-v0.3": _shape(4096, 14336, 32, 32, 8, 32768, sliding_window=None),
        "Mistral-Small-24B": _shape(
            5120, 32768, 40, 32, 8, 131072, head_dim=128, sliding_window=None
        ),
    },
    "qwen2": {
        "Qwen2.5-0.5B": _shape(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
        "Qwen2.5-7B": _shape(3584, 18944, 28, 28, 4, 152064),
        "Qwen2.5-72B": _shape(8192, 29568, 80, 64, 8, 152064),
    },
    "qwen3": {
        "Qwen3-0.6B": _shape(1024, 3072, 28, 16, 8, 151936, **_QWEN3, tie_word_embeddings=True),
        "Qwen3-8B": _shape(4096, 12288, 36, 32, 8, 151936, **_QWEN3),
        "Qwen3-32B": _shape(5120, 25600, 64, 64, 8, 151936, **_QWEN3),
    },
    "qwen3_moe": {
        "Qwen3-30B-A3B": _shape(
            2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768,
            num_experts=128, num_experts_per_tok=8,
        ),
        "Qwen3-235B-A22B": _shape(
            4096, 12288, 94, 64, 4, 151936, head_dim=128, moe_intermediate_size=1536,
            num_experts=128, num_experts_per_tok=8,
        ),
    },
    "qwen2_moe": {
        "Qwen1.5-MoE-A2.7B": _shape(
            2048, 5632, 24, 16, 16, 151936, moe_intermediate_size=1408, num_experts=60,
            shared_expert_intermediate_size=5632,
        ),
    },
    "deepseek_v2": {
        "DeepSeek-V2-Lite": _shape(
            2048, 10944, 27, 16, 16, 102400, q_lora_rank=None, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64,
            n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
            first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy",
        ),
    },
    "kimi_k2": {
        "Kimi-K2": _shape(
            7168, 18432, 61, 64, 64, 163840, n_routed_experts=384, num_experts_per_tok=8,
            first_k_dense_replace=1, n_group=1, topk_group=1,
        ),
    },
    "dots1": {
        "dots.llm1": _shape(
            4096, 10944, 62, 32, 32, 152064, head_dim=128, n_routed_experts=128,
            n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
            first_k_dense_replace=1, n_group=1, topk_group=1,
        ),
    },
    "glm4_moe": {
        "GLM-4.5-Air": _shape(
            4096, 10944, 46, 96, 8, 151552, head_dim=128, n_routed_experts=128,
            n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1408,
            first_k_dense_replace=1, attention_bias=True,
        ),
    },
    "granitemoeshared": {"defaults, a shared expert of 1,024": {"shared_intermediate_size": 1024}},
    "lfm2_moe": {
        "LFM2-8B-A1B": _shape(
            2048, 7168, 24, 32, 8, 65536, moe_intermediate_size=1792, num_experts=32,
            num_experts_per_tok=4, num_dense_layers=2,
            layer_types=[
                "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv"
                for layer in range(24)
            ],
        ),
    },
    "ministral": {
        "Ministral-8B": _shape(
            4096, 12288, 36, 32, 8, 131072, head_dim=128, sliding_window=32768,
            layer_types=["full_attention", *["sliding_attention"] * 3] * 9,
        ),
    },
    "nemotron": {"Minitron-4B": _shape(3072, 9216, 32, 24, 8, 256000, head_dim=128)},
    "mixtral": {
        "Mixtral-8x7B": _shape(4096, 14336, 32, 32, 8, 32000),
        "Mixtral-8x22B": _shape(6144, 16384, 56, 48, 8, 32768),
    },
    "olmo2": {"OLMo-2-7B": _shape(4096, 11008, 32, 32, 32, 100352)},
    "olmo3": {"Olmo-3-7B": _shape(4096, 11008, 32, 32, 32, 100278)},
    "smollm3": {"SmolLM3-3B": _shape(2048, 11008, 36, 16, 4, 128256)},
}  # fmt: skip

#: Name of a model with the defaults of its class.
DEFAULTS = "defaults of the class"


def members_of(model_type: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the published models of a model type."""
    return MEMBERS.get(model_type, {DEFAULTS: {}})
