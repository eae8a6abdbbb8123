# SPDX-License-Identifier: Apache-2.0
"""Models of the hub as their config.json describes them: every parameter of their files has a
place."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.hf.model_config import read_model
from megatron.hf.tensor_map import tensor_map

#: config.json of models on the hub as far as sizes go, and the parameters in their files: of
#: DeepSeek-V3 with two copies of embedding and head, and without the scales of its fp8.
PUBLISHED: list[tuple[dict[str, Any], int]] = [
    (
        {
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        46_702_792_704,
    ),
    (
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        30_532_122_624,
    ),
    (
        {
            "model_type": "deepseek_v3",
            "routed_scaling_factor": 2.5,
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_nextn_predict_layers": 1,
        },
        684_489_845_504,
    ),
]


@pytest.mark.parametrize(("fields", "parameters"), PUBLISHED)
def test_models_of_the_hub_have_their_parameters(fields: dict[str, Any], parameters: int) -> None:
    model = read_model(fields, where="x", further=True)
    found = tensor_map(model.kind, model.config)
    theirs = sum(math.prod(tensor.shape) for tensor in found.theirs.values())
    copies = sum(math.prod(found.theirs[name].shape) for name in found.copies)
    assert theirs == parameters
    assert theirs - copies == sum(math.prod(tensor.shape) for tensor in found.ours.values())
    for side in (found.theirs, found.ours):
        for tensor in side.values():
            assert sum(math.prod(p.sizes) for p in tensor.parts) == math.prod(tensor.shape)
