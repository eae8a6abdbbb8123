# SPDX-License-Identifier: Apache-2.0
"""One mapping table per architecture, from Hugging Face's weight names to ours.

Hugging Face's gated delta net orders the rows of its two input projections by key head: the query
and the key of a key head come before the values and gates of its value heads. Its convolution
contains all queries, then all keys, then all values. In its Mamba-2, each sub-weight is contiguous.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from megatron.core.models.layer_pattern import ATTENTION, DELTA_NET, DENSE, EXPERTS, LATENT, MAMBA
from megatron.hf.entries import (
    EMBEDDING,
    ENDS,
    EXPERT,
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
    ExpertTensors,
    FusedWeight,
    attention_entries,
    experts,
    fused_experts,
    gated_shared_expert,
    shared_expert,
)


def _fused_weights(inside: str, *weights: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (name, letter of the number of rows) of each of our weights in a fused tensor."""
    return tuple((f"{{block}}.{inside}.{name}.weight", letter) for name, letter in weights)


_GATED_ATTENTION: tuple[AnyEntry, ...] = (
    MIXER_NORM,
    FusedWeight(
        f"{LAYER}.self_attn.q_proj.weight",
        _fused_weights("attention", ("query", "d"), ("gate", "d")),
        groups="a",
        inner="h",
        biased="attention_bias",
    ),
    *attention_entries(f"{LAYER}.self_attn", names=("k_proj", "v_proj", "o_proj")),
    *QUERY_KEY_NORMS,
)
_DELTA_NET: tuple[AnyEntry, ...] = (
    MIXER_NORM,
    FusedWeight(
        f"{LAYER}.linear_attn.in_proj_qkvz.weight",
        _fused_weights("delta_net", ("query", "c"), ("key", "c"), ("value", "R"), ("gate", "R")),
        groups="K",
        inner="h",
    ),
    FusedWeight(
        f"{LAYER}.linear_attn.in_proj_ba.weight",
        _fused_weights("delta_net", ("beta", "x"), ("alpha", "x")),
        groups="K",
        inner="h",
    ),
    FusedWeight(
        f"{LAYER}.linear_attn.conv1d.weight",
        _fused_weights("delta_net.conv", ("query", "Q"), ("key", "Q"), ("value", "O")),
        groups="1",
        inner="1w",
    ),
    Entry(f"{LAYER}.linear_attn.A_log", "{block}.delta_net.A_log", "U", keep_dtype=True),
    Entry(f"{LAYER}.linear_attn.dt_bias", "{block}.delta_net.dt_bias", "U", keep_dtype=True),
    Entry(f"{LAYER}.linear_attn.norm.weight", "{block}.delta_net.output_norm.weight", "u"),
    Entry(f"{LAYER}.linear_attn.out_proj.weight", "{block}.delta_net.output.weight", "hO"),
)
_GATED_SHARED_EXPERT = gated_shared_expert(f"{LAYER}.mlp.shared_expert")
QWEN3_NEXT = Architecture(
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    blocks={
        ATTENTION: _GATED_ATTENTION,
        DELTA_NET: _DELTA_NET,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, *_GATED_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*_GATED_SHARED_EXPERT)},
    ends=ENDS,
    has_query_key_norms=True,
    fields=frozenset(
        {
            "attention_bias",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "layer_types",
        }
    ),
    defaults=MappingProxyType(
        {
            "head_dim": 256,
            "num_key_value_heads": 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "norm_topk_prob": True,
            "full_attention_interval": 4,
        }
    ),
    skipped_prefix="mtp.",
)

# --- Mamba-2 and Nemotron-H -----------------------------------------------------------------------

_BACKBONE = "backbone.layers.{layer}"
_MIXER = f"{_BACKBONE}.mixer"
_NORM = Entry(f"{_BACKBONE}.norm.weight", "{block}.norm.weight", "h")
_ENDS = (
    Entry("backbone.embeddings.weight", "embedding.weight", "Vh"),
    Entry("backbone.norm_f.weight", "decoder.final_norm.weight", "h"),
    HEAD,
)
_MAMBA: tuple[AnyEntry, ...] = (
    _NORM,
    FusedWeight(
        f"{_MIXER}.in_proj.weight",
        _fused_weights("mamba", ("gate", "I"), ("x", "I"), ("B", "G"), ("C", "G"), ("dt", "N")),
        groups="1",
        inner="h",
        biased="use_bias",
    ),
    FusedWeight(
        f"{_MIXER}.conv1d.weight",
        _fused_weights("mamba.conv", ("x", "I"), ("B", "G"), ("C", "G")),
        groups="1",
        inner="1w",
        biased="use_conv_bias",
    ),
    Entry(f"{_MIXER}.A_log", "{block}.mamba.A_log", "N", keep_dtype=True),
    Entry(f"{_MIXER}.dt_bias", "{block}.mamba.dt_bias", "N", keep_dtype=True),
    Entry(f"{_MIXER}.D", "{block}.mamba.D", "N", keep_dtype=True),
    Entry(f"{_MIXER}.norm.weight", "{block}.mamba.output_norm.weight", "I"),
    Entry(f"{_MIXER}.out_proj.weight", "{block}.mamba.output.weight", "hI", "use_bias"),
)
MAMBA2 = Architecture(
    model_type="mamba2",
    class_name="Mamba2ForCausalLM",
    blocks={MAMBA: _MAMBA},
    ends=_ENDS,
    blocks_per_layer=1,
    fields=frozenset({"use_bias", "use_conv_bias"}),
    defaults=MappingProxyType(
        {"layer_norm_epsilon": 1e-5, "conv_kernel": 4, "expand": 2, "initializer_range": 0.1}
    ),
)
_PLAIN_MLP = (
    _NORM,
    Entry(f"{_MIXER}.up_proj.weight", "{block}.mlp.up.weight", "fh", "mlp_bias"),
    Entry(f"{_MIXER}.down_proj.weight", "{block}.mlp.down.weight", "hf", "mlp_bias"),
)
_ROUTED = (
    _NORM,
    Entry(f"{_MIXER}.gate.weight", "{block}.moe.router.weight", "Eh"),
    Entry(
        f"{_MIXER}.gate.e_score_correction_bias", "{block}.moe.router.expert_bias", "E", fp32=True
    ),
    *shared_expert(f"{_MIXER}.shared_experts", PROJECTIONS[1:]),
)
_PLAIN_EXPERTS = (
    ExpertTensors(f"{_MIXER}.{EXPERT}.up_proj.weight", "{block}.moe.experts.up.weight", "eh"),
    ExpertTensors(f"{_MIXER}.{EXPERT}.down_proj.weight", "{block}.moe.experts.down.weight", "he"),
)
_FUSED_PLAIN_EXPERTS = tuple(
    FusedWeight(
        f"{_MIXER}.experts.{hf_name}",
        ((f"{{block}}.moe.experts.{mcore_name}.weight", rows),),
        groups="E",
        inner=inner,
        stacked=True,
    )
    for hf_name, mcore_name, rows, inner in (
        ("up_proj", "up", "e", "h"),
        ("down_proj", "down", "h", "e"),
    )
)
NEMOTRON_H = Architecture(
    model_type="nemotron_h",
    class_name="NemotronHForCausalLM",
    blocks={
        ATTENTION: (_NORM, *attention_entries(_MIXER)),
        DENSE: _PLAIN_MLP,
        EXPERTS: (*_ROUTED, *_PLAIN_EXPERTS),
        MAMBA: _MAMBA,
    },
    fused={EXPERTS: (*_ROUTED, *_FUSED_PLAIN_EXPERTS)},
    ends=_ENDS,
    blocks_per_layer=1,
    fields=frozenset(
        {
            "mlp_bias",
            "n_routed_experts",
            "num_local_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_overlap",
        }
    ),
    defaults=MappingProxyType(
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        }
    ),
    other_prefix=("backbone.", "model."),
    skipped_prefix="mtp.",
)


_ATTENTION = (MIXER_NORM, *attention_entries(f"{LAYER}.self_attn"))
_NORMED_ATTENTION = (*_ATTENTION, *QUERY_KEY_NORMS)
_LATENT: tuple[AnyEntry, ...] = (
    MIXER_NORM,
    *(
        Entry(
            f"{LAYER}.self_attn.{hf_name}.weight",
            f"{{block}}.attention.{mcore_name}.weight",
            shape,
            when=when,
        )
        for hf_name, mcore_name, shape, when in (
            ("q_proj", "query", "nh", "direct_query"),
            ("q_a_proj", "query_down", "qh", "low_rank_query"),
            ("q_a_layernorm", "query_norm", "q", "low_rank_query"),
            ("q_b_proj", "query_up", "nq", "low_rank_query"),
            ("kv_a_layernorm", "kv_norm", "k", None),
            ("o_proj", "output", "ho", None),
        )
    ),
    FusedWeight(
        f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight",
        (("{block}.attention.kv_down.weight", "k"), ("{block}.attention.key_rope.weight", "r")),
        groups="1",
        inner="h",
    ),
    FusedWeight(
        f"{LAYER}.self_attn.kv_b_proj.weight",
        (("{block}.attention.key_up.weight", "p"), ("{block}.attention.value_up.weight", "v")),
        groups="a",
        inner="k",
    ),
)
_BIAS_AND_SHARED_EXPERT = (EXPERT_BIAS, *shared_expert(f"{LAYER}.mlp.shared_experts"))

#: An MTP layer's copies of the embedding and of the head, which MTP layers share here.
MTP_COPIES = (
    (f"{LAYER}.embed_tokens.weight", EMBEDDING),
    (f"{LAYER}.shared_head.head.weight", HEAD),
)
_MTP_ENTRIES = tuple(
    Entry(f"{LAYER}.{hf_name}.weight", f"mtp.{{depth}}.{mcore_name}.weight", shape)
    for hf_name, mcore_name, shape in (
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
        EXPERTS: experts("mlp", PROJECTIONS, *_BIAS_AND_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*_BIAS_AND_SHARED_EXPERT)},
    ends=ENDS,
    mtp_entries=_MTP_ENTRIES,
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
#: DeepSeek-V3 under another model_type, which transformers does not support.
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
