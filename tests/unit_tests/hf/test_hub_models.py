# SPDX-License-Identifier: Apache-2.0
"""Published models by their config.json: every parameter of their files is mapped."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.hf.config_json import read_model
from megatron.hf.tensor_map import tensor_map
from tests.support.hf_folders import KIMI_YARN

#: config.json of published models (fields that affect sizes) and the parameters in their files:
#: DeepSeek-V3 with two copies of embedding and head, without the scales of its fp8 weights.
PUBLISHED: list[tuple[dict[str, Any], int]] = [
    ({
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    }, 46_702_792_704),
    ({
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8,
    }, 30_532_122_624),
    ({
        "model_type": "deepseek_v3", "routed_scaling_factor": 2.5, "vocab_size": 129280,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "num_nextn_predict_layers": 1,
    }, 684_489_845_504),
    ({
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": 4096,
    }, 7_241_732_096),
    ({
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 131072,
        "max_window_layers": 28,
    }, 7_615_616_512),
    ({
        "model_type": "seed_oss", "vocab_size": 155136, "hidden_size": 5120,
        "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
        "attention_out_bias": False,
    }, 36_151_104_512),
    ({
        "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4,
    }, 14_315_784_192),
    ({
        "model_type": "kimi_k2", "routed_scaling_factor": 2.827, "vocab_size": 163840,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "num_nextn_predict_layers": 0,
        "rope_scaling": {**KIMI_YARN, "original_max_position_embeddings": 4096, "factor": 32.0},
    }, 1_026_408_232_448),
    ({
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288,
        "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    }, 1_170_340_608),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "parameters"), PUBLISHED)
def test_published_models_have_all_their_parameters(
    fields: dict[str, Any], parameters: int
) -> None:
    model = read_model(fields, where="x", with_mtp=True)
    mapped = tensor_map(model.kind, model.config)
    hf_parameters = sum(math.prod(tensor.shape) for tensor in mapped.hf_tensors.values())
    copies = sum(math.prod(mapped.hf_tensors[name].shape) for name in mapped.copies)
    assert hf_parameters == parameters
    assert hf_parameters - copies == sum(
        math.prod(tensor.shape) for tensor in mapped.mcore_tensors.values()
    )
    for tensors in (mapped.hf_tensors, mapped.mcore_tensors):
        for tensor in tensors.values():
            assert sum(math.prod(p.sizes) for p in tensor.slices) == math.prod(tensor.shape)
