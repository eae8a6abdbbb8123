# SPDX-License-Identifier: Apache-2.0
"""The mapping tables: one per architecture, from Hugging Face's weight names to this project's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from megatron.core.models.layer_pattern import ATTENTION, DENSE, EXPERTS, LATENT
from megatron.hf.entries import (
    EMBEDDING,
    ENDS,
    EXPERT_BIAS,
    HEAD,
    LAYER,
    MIXER_NORM,
    MLP,
    PROJECTIONS,
    QUERY_KEY_NORMS,
    AnyEntry,
    Architecture,
    Entry,
    Rows,
    attention_entries,
    experts,
    fused_experts,
    gated_shared_expert,
    shared_expert,
)
from megatron.hf.hybrid_architectures import MAMBA2, NEMOTRON_H, QWEN3_NEXT

_ATTENTION = (MIXER_NORM, *attention_entries(f"{LAYER}.self_attn"))
_NORMED_ATTENTION = (*_ATTENTION, *QUERY_KEY_NORMS)
_LATENT: tuple[AnyEntry, ...] = (
    MIXER_NORM,
    *(
        Entry(
            f"{LAYER}.self_attn.{theirs}.weight",
            f"{{block}}.attention.{ours}.weight",
            shape,
            when=when,
        )
        for theirs, ours, shape, when in (
            ("q_proj", "query", "nh", "direct_query"),
            ("q_a_proj", "query_down", "qh", "low_rank_query"),
            ("q_a_layernorm", "query_norm", "q", "low_rank_query"),
            ("q_b_proj", "query_up", "nq", "low_rank_query"),
            ("kv_a_layernorm", "kv_norm", "k", None),
            ("o_proj", "output", "ho", None),
        )
    ),
    Rows(
        f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight",
        (("{block}.attention.kv_down.weight", "k"), ("{block}.attention.key_rope.weight", "r")),
        groups="1",
        inner="h",
    ),
    Rows(
        f"{LAYER}.self_attn.kv_b_proj.weight",
        (("{block}.attention.key_up.weight", "p"), ("{block}.attention.value_up.weight", "v")),
        groups="a",
        inner="k",
    ),
)
_GATED_SHARED_EXPERT = gated_shared_expert(f"{LAYER}.mlp.shared_expert")
_MORE_EXPERTS = (EXPERT_BIAS, *shared_expert(f"{LAYER}.mlp.shared_experts"))

#: Copies of the embedding and the head, which is one weight of all layers here.
FURTHER_COPIES = (
    (f"{LAYER}.embed_tokens.weight", EMBEDDING),
    (f"{LAYER}.shared_head.head.weight", HEAD),
)
_FURTHER = tuple(
    Entry(f"{LAYER}.{theirs}.weight", f"mtp.{{depth}}.{ours}.weight", shape)
    for theirs, ours, shape in (
        ("enorm", "embedding_norm", "h"),
        ("hnorm", "hidden_norm", "h"),
        ("eh_proj", "projection", "hH"),
        ("shared_head.norm", "decoder.final_norm", "h"),
    )
)

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    blocks={ATTENTION: _ATTENTION, DENSE: MLP},
    ends=ENDS,
    fields=frozenset({"attention_bias", "mlp_bias"}),
)
MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    blocks={ATTENTION: _ATTENTION, DENSE: MLP},
    ends=ENDS,
    fields=frozenset({"sliding_window"}),
    defaults=MappingProxyType({"num_key_value_heads": 8}),
)
QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    blocks={ATTENTION: _ATTENTION, DENSE: MLP},
    ends=ENDS,
    fields=frozenset({"sliding_window"}),
    defaults=MappingProxyType({"num_key_value_heads": 32}),
)
SEED_OSS = Architecture(
    model_type="seed_oss",
    class_name="SeedOssForCausalLM",
    blocks={ATTENTION: _ATTENTION, DENSE: MLP},
    ends=ENDS,
    fields=frozenset({"attention_bias", "mlp_bias"}),
    defaults=MappingProxyType({"head_dim": 128, "num_key_value_heads": 8}),
)
QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    blocks={ATTENTION: _NORMED_ATTENTION, DENSE: MLP},
    ends=ENDS,
    has_query_key_norms=True,
    fields=frozenset({"attention_bias", "sliding_window"}),
    defaults=MappingProxyType({"head_dim": 128}),
)
MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    blocks={ATTENTION: _ATTENTION, EXPERTS: experts("block_sparse_moe", ("w1", "w3", "w2"))},
    fused={EXPERTS: fused_experts()},
    ends=ENDS,
    fields=frozenset({"num_local_experts", "num_experts", "num_experts_per_tok"}),
    defaults=MappingProxyType({"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}),
)
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    blocks={
        ATTENTION: _ATTENTION,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, *_GATED_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*_GATED_SHARED_EXPERT)},
    ends=ENDS,
    fields=frozenset(
        {
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        }
    ),
    defaults=MappingProxyType({"num_key_value_heads": 16}),
)
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    blocks={ATTENTION: _NORMED_ATTENTION, DENSE: MLP, EXPERTS: experts("mlp", PROJECTIONS)},
    fused={EXPERTS: fused_experts()},
    ends=ENDS,
    has_query_key_norms=True,
    fields=frozenset(
        {
            "attention_bias",
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
        }
    ),
    defaults=MappingProxyType({"num_key_value_heads": 4}),
)
DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    blocks={
        LATENT: _LATENT,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, *_MORE_EXPERTS),
    },
    fused={EXPERTS: fused_experts(*_MORE_EXPERTS)},
    ends=ENDS,
    further=_FURTHER,
    fields=frozenset(
        {
            "n_routed_experts",
            "num_local_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "moe_layer_freq",
            "q_lora_rank",
            "kv_lora_rank",
        }
    ),
)
#: DeepSeek-V3 by another name, which transformers does not have.
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        kind.model_type: kind
        for kind in (
            LLAMA,
            MISTRAL,
            QWEN2,
            SEED_OSS,
            QWEN3,
            MIXTRAL,
            QWEN2_MOE,
            QWEN3_MOE,
            DEEPSEEK_V3,
            KIMI_K2,
            QWEN3_NEXT,
            MAMBA2,
            NEMOTRON_H,
        )
    }
)
