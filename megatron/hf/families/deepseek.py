# SPDX-License-Identifier: Apache-2.0
"""Models with latent attention: DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash and Youtu."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import DENSE, EXPERTS, LATENT
from megatron.hf import config_rows as rows
from megatron.hf import layer_types
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    EMBEDDING,
    ENDS,
    EXPERT_BIAS,
    HEAD,
    LATENT_ATTENTION,
    LAYER,
    MLP,
    PROJECTIONS,
    Entry,
    experts,
    fused_experts,
    shared_expert,
)
from megatron.hf.readers import ModelFields

#: The expert bias and the shared expert, in addition to the routed experts.
BIAS_AND_SHARED_EXPERT = (EXPERT_BIAS, *shared_expert(f"{LAYER}.mlp.shared_experts"))
#: An MTP layer's copies of the embedding and of the head, which MTP layers share here.
MTP_COPIES = (
    (f"{LAYER}.embed_tokens.weight", EMBEDDING),
    (f"{LAYER}.shared_head.head.weight", HEAD),
)
MTP_ENTRIES = tuple(
    Entry(f"{LAYER}.{hf_name}.weight", f"mtp.{{depth}}.{mcore_name}.weight", shape)
    for hf_name, mcore_name, shape in (
        ("enorm", "embedding_norm", "h"),
        ("hnorm", "hidden_norm", "h"),
        ("eh_proj", "projection", "hH"),
        ("shared_head.norm", "decoder.final_norm", "h"),
    )
)
DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    blocks={
        LATENT: LATENT_ATTENTION,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, *BIAS_AND_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*BIAS_AND_SHARED_EXPERT)},
    ends=ENDS,
    mtp_entries=MTP_ENTRIES,
    mtp_copies=MTP_COPIES,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.LATENT_ATTENTION,
        Row("rope_interleave", "rope.interleaved", read.flag(True)),
        Row("first_k_dense_replace", "", read.unread, layer_types.num_leading_mlps),
        *rows.MTP,
        *rows.SIGMOID_EXPERTS,
        *rows.SHARED_EXPERTS,
        Row("moe_layer_freq", "moe.", read.must_be(1), constant(1)),
        Row("scoring_func", "moe.", read.must_be("sigmoid"), constant("sigmoid")),
        Row("topk_method", "moe.", read.must_be("noaux_tc"), constant("noaux_tc")),
    ),
    read_blocks=layer_types.layers(layer_types.leading_mlps, layer_types.uniform_layers(LATENT)),
    check=layer_types.refuse_windows,
    aliases=frozenset({"num_local_experts"}),
)


def _greedy_limit(fields: ModelFields, name: str) -> int | None:
    """Return a field of group-limited routing, None if the routing has no groups."""
    return read.group_limit(fields, name) if fields.find("topk_method") != "greedy" else None


_SHARED_EXPERT = shared_expert(f"{LAYER}.mlp.shared_experts")
DEEPSEEK_V2 = Architecture(
    model_type="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    blocks={
        LATENT: LATENT_ATTENTION,
        DENSE: MLP,
        EXPERTS: experts("mlp", PROJECTIONS, *_SHARED_EXPERT),
    },
    fused={EXPERTS: fused_experts(*_SHARED_EXPERT)},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.LATENT_ATTENTION,
        Row("", "rope.interleaved", constant(True)),
        Row("first_k_dense_replace", "", read.unread, layer_types.num_leading_mlps),
        *rows.ROUTED_EXPERTS,
        *rows.SHARED_EXPERTS,
        Row("norm_topk_prob", "router.normalize", read.fixed_flag(False), constant(False)),
        Row("n_group", "router.num_groups", _greedy_limit, read.group_count),
        Row("topk_group", "router.group_topk", _greedy_limit, read.group_count),
        Row("", "router.group_candidates", constant(1)),
        Row(
            "topk_method",
            "router.",
            read.must_be("greedy", "group_limited_greedy"),
            lambda router, _: "greedy" if router.num_groups is None else "group_limited_greedy",
        ),
        Row("scoring_func", "moe.", read.must_be("softmax"), constant("softmax")),
        Row("moe_layer_freq", "moe.", read.must_be(1), constant(1)),
    ),
    read_blocks=layer_types.layers(layer_types.leading_mlps, layer_types.uniform_layers(LATENT)),
    check=layer_types.refuse_windows,
    aliases=frozenset({"num_experts"}),
    defaults=MappingProxyType(
        {"topk_method": "greedy", "first_k_dense_replace": 0, "routed_scaling_factor": 1.0}
    ),
)
GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    class_name="Glm4MoeLiteForCausalLM",
    has_classifier=False,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.LATENT_ATTENTION,
        Row("rope_interleave", "rope.interleaved", read.flag(True)),
        Row("mlp_layer_types", "", read.unread, layer_types.mlp_types),
        Row("first_k_dense_replace", "", read.must_be(1), read.unwritten),
        *rows.MTP,
        *rows.SIGMOID_EXPERTS,
        *rows.SHARED_EXPERTS,
    ),
    read_blocks=layer_types.layers(layer_types.typed_mlps, layer_types.uniform_layers(LATENT)),
    defaults=MappingProxyType(
        {"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1}
    ),
)
YOUTU = Architecture(
    model_type="youtu",
    class_name="YoutuForCausalLM",
    has_classifier=False,
    blocks={LATENT: LATENT_ATTENTION, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.LATENT_ATTENTION,
        Row("rope_interleave", "rope.interleaved", read.flag(True)),
    ),
    read_blocks=layer_types.layers(
        layer_types.uniform_layers(DENSE), layer_types.uniform_layers(LATENT)
    ),
    check=layer_types.refuse_windows,
    defaults=MappingProxyType({"tie_word_embeddings": True}),
)
#: DeepSeek-V3 under another model_type, which transformers does not support.
KIMI_K2 = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="kimi_k2",
    reference_fields=lambda fields: {"model_type": DEEPSEEK_V3.model_type},
)
