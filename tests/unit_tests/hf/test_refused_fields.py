# SPDX-License-Identifier: Apache-2.0
"""config.json: every unsupported value is an error that names its field and the value.

A row of FIELDS is `FAMILIES {CHANGES} {CHANGES}`: the error names the last of the changed fields. A
row of CONFLICTS is `FAMILY {CHANGES} -> WORDS`, a regular expression in the error.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from megatron.hf.config_json import read_model
from tests.unit_tests.hf import test_expert_config, test_hybrid_config, test_model_config

DENSE = (
    "MISTRAL",
    "QWEN2",
    "QWEN3",
    "SEED_OSS",
    "MINISTRAL",
    "CWM",
    "SMOLLM3",
    "MINISTRAL3",
    "EXAONE4",
    "OLMO3",
    "MINIMAX_M2",
)
MODULES = (test_model_config, test_expert_config, test_hybrid_config)
FAMILIES: dict[str, dict[str, Any]] = {
    name: {"num_key_value_heads": 6, **fields} if name in DENSE else fields
    for module in MODULES
    for name, fields in vars(module).items()
    if isinstance(fields, dict) and "model_type" in fields
}

FIELDS = r"""
LLAMA {"model_type": "gemma4"} {"model_type": null} {"model_type": ["llama"]} {"architectures":
    ["LlamaForTokenClassification"]} {"num_experts": 4} {"residual_multiplier": 0.22}
    {"foo_scale": 2.0} {"sliding_window": 16} {"layer_types": ["full_attention",
    "sliding_attention"]} {"layer_types": ["full_attention"]} {"hidden_size": "48"} {"hidden_size":
    true} {"hidden_size": 0} {"hidden_size": 1000000000000} {"num_hidden_layers": null}
    {"rms_norm_eps": 0} {"rms_norm_eps": NaN} {"tie_word_embeddings": "yes"} {"torch_dtype": "int8"}
    {"dtype": ["float32"]} {"rope_parameters": 3}
LLAMA,QWEN2,QWEN3_NEXT {"hidden_act": "gelu"}
LLAMA,SEED_OSS {"partial_rotary_factor": 0.5}
MISTRAL {"sliding_window": 0} {"layer_types": ["full_attention", "full_attention"]}
    {"sliding_window": null, "layer_types": ["sliding_attention", "sliding_attention"]} {"head_dim":
    0}
QWEN2,QWEN3 {"use_sliding_window": true, "max_window_layers": -1} {"use_sliding_window": true,
    "max_window_layers": 1, "sliding_window": "9"} {"use_sliding_window": true,
    "max_window_layers": 1, "sliding_window": 0} {"use_sliding_window": 1}
    {"use_sliding_window": true, "layer_types": ["sliding_attention"]} {"use_sliding_window": true,
    "layer_types": ["chunked_attention", "full_attention"]} {"use_sliding_window": false,
    "layer_types": ["sliding_attention", "full_attention"]} {"use_sliding_window": true,
    "sliding_window": null, "layer_types": ["sliding_attention", "full_attention"]}
MINISTRAL,CWM {"sliding_window": 0} {"layer_types": ["sliding_attention"]} {"layer_types":
    ["full_attention", "linear_attention"]} {"sliding_window": null, "layer_types":
    ["sliding_attention", "full_attention"]}
CWM,OLMO3,EXAONE4 {"sliding_window": null}
OLMO3 {"layer_types": ["sliding_attention", "sliding_attention"]} {"rope_parameters":
    {"full_attention": {"rope_theta": 500.0}}, "rope_scaling": {"rope_type": "linear", "factor": 2}}
EXAONE4 {"layer_types": ["full_attention", "full_attention"]} {"sliding_window_pattern": 0}
    {"sliding_window_pattern": "LLLG"}
MINIMAX_M2 {"rotary_dim": 9} {"rotary_dim": "4"} {"num_experts": 5}
MINISTRAL3 {"sliding_window": 0} {"layer_types": ["sliding_attention", "full_attention"]}
GPT_OSS {"sliding_window": 0} {"layer_types": ["full_attention"]} {"swiglu_alpha": 1.0}
    {"swiglu_limit": 0} {"swiglu_limit": "7"} {"num_local_experts": null} {"attention_bias": 1}
    {"hidden_act": "gelu"} {"num_experts": 3}
SMOLLM3 {"no_rope_layers": [1]} {"no_rope_layers": [1, 2]} {"no_rope_layers": [0, 0]}
    {"no_rope_layer_interval": 0} {"no_rope_layer_interval": 1} {"no_rope_layers": [1, 0],
    "use_sliding_window": true, "sliding_window": 0} {"sliding_window": 9, "layer_types":
    ["full_attention", "sliding_attention"]}
SEED_OSS {"attention_out_bias": 1} {"sliding_window": 9} {"layer_types": ["sliding_attention",
    "sliding_attention"]}
QWEN2,MISTRAL,MIXTRAL,QWEN2_MOE,KIMI_K2,DEEPSEEK,NEMOTRON_H {"attention_bias": true}
QWEN2,QWEN3,NEMOTRON_H {"mlp_bias": true}
MIXTRAL {"num_local_experts": null} {"num_experts": 9} {"sliding_window": 4096}
    {"use_sliding_window": false, "sliding_window": 64} {"moe_intermediate_size": 64}
    {"kv_lora_rank": 64} {"num_hidden_layers": 1073741824}
MIXTRAL,QWEN2_MOE {"n_shared_experts": 3}
QWEN2_MOE {"shared_expert_intermediate_size": 0} {"num_experts": null} {"qkv_bias": 1}
    {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention"]}
    {"use_sliding_window": true, "sliding_window": 0}
QWEN2_MOE,QWEN3_MOE {"norm_topk_prob": 1} {"mlp_only_layers": 3} {"use_sliding_window": 1}
KIMI_K2,DEEPSEEK {"scoring_func": "softmax"}
QWEN3_MOE {"use_sliding_window": true, "sliding_window": 0} {"layer_types": ["sliding_attention",
    "sliding_attention", "sliding_attention"]} {"num_experts": "8"} {"decoder_sparse_step": 0}
    {"shared_expert_intermediate_size": 9} {"moe_intermediate_size": null}
DEEPSEEK {"topk_method": "greedy"} {"moe_layer_freq": 2} {"n_shared_experts": 0}
    {"num_key_value_heads": 3} {"head_dim": 12} {"qk_head_dim": 10} {"kv_lora_rank": null}
    {"rope_interleave": 1} {"num_experts": 16}
QWEN3_NEXT {"layer_types": ["linear_attention", "linear_attention", "linear_attention"]}
    {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
    "sliding_attention"]} {"partial_rotary_factor": 1.5} {"linear_key_head_dim": 0}
MAMBA2 {"expand": 3} {"hidden_act": "relu"} {"rms_norm": false} {"time_step_limit": [1.0, 0.5]}
    {"time_step_limit": [0.0, "Infinity"]} {"time_step_limit": [NaN, 1.0]} {"num_hidden_layers":
    10001}
NEMOTRON_H {"moe_latent_size": 16} {"hybrid_override_pattern": "ME|*"} {"num_hidden_layers": 6}
    {"mlp_hidden_act": "silu"} {"mamba_hidden_act": "relu"} {"n_shared_experts": 2}
    {"sliding_window": 64}
COHERE {"use_qk_norm": true} {"layer_types": ["full_attention", "sliding_attention"]}
    {"logit_scale": 0} {"sliding_window": 9}
COHERE2 {"layer_types": ["full_attention", "full_attention"]} {"sliding_window": null}
    {"sliding_window_pattern": 0} {"head_dim": 9} {"logit_scale": "1"}
FALCON_H1 {"projectors_bias": true} {"layers_block_type": ["mamba"]}
    {"mamba_d_head": 8} {"mamba_d_ssm": 0} {"ssm_multipliers": [1.0]} {"mlp_multipliers": [0, 1]}
    {"mlp_multipliers": "1"} {"attention_bias": true, "attention_in_multiplier": 0.5}
    {"mamba_proj_bias": true, "projectors_bias": true, "ssm_in_multiplier": 0.5}
    {"key_multiplier": -1} {"sliding_window": 4}
LFM2 {"full_attn_idxs": 1} {"full_attn_idxs": ["1"]} {"layer_types": ["conv", "conv", "conv"],
    "full_attn_idxs": [1]} {"layer_types": ["conv"]} {"intermediate_size": 61}
    {"tie_word_embeddings": false} {"block_ffn_dim_multiplier": 1e300} {"block_multiple_of": 0}
    {"conv_L_cache": 0} {"conv_bias": 1} {"num_experts": 4} {"attention_bias": true}
LFM2_MOE {"layer_types": null} {"layer_types": ["conv", "linear_attention", "conv"]}
    {"num_dense_layers": -1} {"use_expert_bias": 1} {"shared_expert_intermediate_size": 9}
"""

CONFLICTS = r"""
LLAMA {"quantization_config": {"bits": 4}} -> quantization_config.quant_method is
LLAMA {"hidden_size": 50} -> head_dim is absent
LLAMA {"num_key_value_heads": 4} -> num-query-groups 4 must divide
LLAMA {"head_dim": 7} -> 7 per head is 7|of 7 features per head
LLAMA {"rope_scaling": {"type": "dynamic", "factor": 2.0}} -> rope_scaling.type is 'dynamic'
LLAMA {"rope_parameters": {"rope_type": "longrope"}} -> rope_parameters.rope_type is 'longrope'
LLAMA {"rope_parameters": {"rope_type": "linear"}} -> rope_parameters.factor is absent
LLAMA {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}} -> low_freq_factor is absent
LLAMA {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings":
    16, "truncate": 0}} -> rope_parameters.truncate is 0
LLAMA {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings":
    16, "beta_slow": 99.0}} -> beta_slow=99.0 must not be above
LLAMA {"rope_parameters": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings":
    16}} -> factor=0.5 must be at least 1
LLAMA {"rope_parameters": {"partial_rotary_factor": 0.5}} -> partial_rotary_factor is 0.5
OLMO3 {"num_hidden_layers": 3} -> layer_types is absent
LLAMA {"rope_parameters": {"full_attention": {"rope_theta": 500.0}}} -> one object for all layers
OLMO3 {"num_hidden_layers": 4, "rope_parameters": {"sliding_attention": {"rope_type":
    "linear", "factor": 2.0}}} -> rope_parameters.sliding_attention.rope_type is 'linear'
QWEN2 {"rope_parameters": {"rope_type": "dynamic"}} -> rope_type is 'dynamic'
MINISTRAL3 {"rope_parameters": {"rope_type": "default"}} -> llama_4_scaling_beta is absent
MINISTRAL3 {"rope_parameters": {"llama_4_scaling_beta": -1.0}} -> llama_4_scaling_beta is -1.0
MINISTRAL3 {"rope_parameters": {"llama_4_scaling_beta": true}} -> llama_4_scaling_beta is True
SMOLLM3 {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 0], "use_sliding_window": true,
    "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    -> layer_types is .* more than two kinds
MIXTRAL {"num_experts_per_tok": 9} -> moe-router-topk 9 must be in 1
MIXTRAL {"num_local_experts": 1073741824} -> with 3 layers that is more than 262144 in total
DEEPSEEK {"num_attention_heads": 1073741824} -> with 3 layers that is more than 262144 in total
FALCON_H1 {"mamba_rms_norm": true} -> mamba_norm_before_gate is absent
DEEPSEEK {"n_group": 3} -> moe-router-num-groups 3 must divide
DEEPSEEK {"n_group": 8} -> 2 candidates of a group of 1
DEEPSEEK {"topk_group": 5} -> moe-router-group-topk 5 of 4
DEEPSEEK {"first_k_dense_replace": -1} -> an integer that is not negative
DEEPSEEK {"qk_rope_head_dim": 5} -> is 5: rotary position embedding needs an even
DEEPSEEK {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}} ->
    mscale_all_dim is 1.0
QWEN3_NEXT {"linear_num_value_heads": 3} -> linear-num-key-heads 2 must divide
NEMOTRON_H {"hybrid_override_pattern": "ABSENT"} -> hybrid_override_pattern is absent
NEMOTRON_H {"layers_block_type": ["mamba"]} -> hybrid_override_pattern is .* says M
NEMOTRON_H {"head_dim": 12} -> attention_head_dim is 10: head_dim is the same field
"""


def rows(table: str) -> list[tuple[str, dict[str, Any], str]]:
    """Return family, changes and words of each row; an indented line continues a row."""
    all_rows, decoder = [], json.JSONDecoder()
    for line in re.sub(r"\n +", " ", table.strip()).splitlines():
        (families, text), changes = line.split(" ", 1), []
        while text.startswith("{"):
            fields, end = decoder.raw_decode(text)
            changes, text = [*changes, fields], text[end:].lstrip()
        for fields in changes:
            name, value = list(fields.items())[-1]
            words = text.removeprefix("-> ") or re.escape(f"{name} is {value!r}")
            all_rows += [(family, fields, words) for family in families.split(",")]
    return all_rows


def read(fields: dict[str, Any]) -> None:
    present = {name: value for name, value in fields.items() if value != "ABSENT"}
    read_model(present, where="dir/config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_every_family_are_valid_otherwise(family: str) -> None:
    read(FAMILIES[family])


@pytest.mark.parametrize(("family", "changes", "words"), rows(FIELDS) + rows(CONFLICTS))
def test_unsupported_field_and_value_are_named(
    family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=rf"^dir/config\.json: .*({words})") as error:
        read({**FAMILIES[family], **changes})
    assert "\n" not in str(error.value)
