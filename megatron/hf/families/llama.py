# SPDX-License-Identifier: Apache-2.0
"""Llama, and models that differ from Llama by biases, norms, positions or fused tensors."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import ATTENTION, DENSE, EXPERTS
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    ENDS,
    GATE_UP_MLP,
    LAYER,
    MIXER_NORM,
    MLP,
    FusedWeight,
    attention_entries,
    experts,
    fused_experts,
    fused_weights,
)
from megatron.hf.layer_types import (
    FULL,
    SLIDING,
    check_layer_types,
    layers,
    refuse_windows,
    uniform_layers,
)

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        Row("mlp_bias", "mlp.bias", read.flag(False)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
)
MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        Row("sliding_window", "attention.window", read.always_window),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=check_layer_types(FULL, SLIDING),
    defaults=MappingProxyType({"num_key_value_heads": 8}),
)
#: Ministral 3, whose queries are scaled by position.
MINISTRAL3 = Architecture(
    model_type="ministral3",
    class_name="Ministral3ForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        Row(
            "rope_scaling.llama_4_scaling_beta",
            "rope.query_scale_beta",
            read.scaling_number(minimum=0.0),
        ),
        Row(
            "rope_scaling.original_max_position_embeddings",
            "rope.query_scale_length",
            read.original_length,
        ),
        *rows.SELF_ATTENTION,
        Row("sliding_window", "attention.window", read.optional_window),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=check_layer_types(FULL),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        }
    ),
)
SEED_OSS = Architecture(
    model_type="seed_oss",
    class_name="SeedOssForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", read.flag(True)),
        Row("attention_out_bias", "attention.output_bias", read.flag(False)),
        Row("residual_dropout", "attention.", read.unread, constant(0.0)),
        Row("mlp_bias", "mlp.bias", read.flag(False)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType({"head_dim": 128, "num_key_value_heads": 8}),
)
MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    blocks={
        ATTENTION: ATTENTION_ENTRIES,
        EXPERTS: experts("block_sparse_moe", ("w1", "w3", "w2")),
    },
    fused={EXPERTS: fused_experts()},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        Row(
            "num_local_experts",
            "moe.num_experts",
            read.count_of("num_local_experts", "num_experts"),
        ),
        Row("intermediate_size", "moe.ffn_hidden_size", read.count),
        Row("num_experts_per_tok", "router.topk", read.count),
    ),
    read_blocks=layers(uniform_layers(EXPERTS)),
    check=partial(refuse_windows, switchable=False),
    aliases=frozenset({"num_experts"}),
    defaults=MappingProxyType({"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}),
)
HELIUM = Architecture(
    model_type="helium",
    class_name="HeliumForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        Row("", "rope.interleaved", constant(True)),
        *rows.SELF_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", read.flag(False)),
        Row("mlp_bias", "mlp.bias", read.flag(False)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType(
        {"head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-8, "rope_theta": 1e5}
    ),
)
ERNIE4_5 = Architecture(
    model_type="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    has_classifier=False,
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        Row("", "rope.interleaved", constant(True)),
        *rows.SELF_ATTENTION,
        Row("use_bias", "attention.qkv_bias", read.flag(False)),
        Row("use_bias", "attention.output_bias", read.flag(False), read.unwritten),
        Row("use_bias", "mlp.bias", read.flag(False), read.unwritten),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType(
        {
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        }
    ),
)
STABLELM = Architecture(
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: MLP},
    ends=ENDS,
    rows=(
        *rows.DECODER,
        *rows.SILU,
        *rows.layer_norm("layer_norm_eps"),
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(0.25)),
        *rows.WHOLE_WIDTH_ATTENTION,
        Row("use_qkv_bias", "attention.qkv_bias", read.flag(False)),
        Row("qk_layernorm", "attention.", read.must_be(False), constant(False)),
        Row("use_parallel_residual", "", read.must_be(False), constant(False)),
        Row("hidden_dropout", "", read.unread, constant(0.0)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType({"layer_norm_eps": 1e-5, "num_key_value_heads": 32}),
)
_PHI3_ATTENTION = (
    MIXER_NORM,
    FusedWeight(
        f"{LAYER}.self_attn.qkv_proj.weight",
        fused_weights("attention", ("query", "n"), ("key", "g"), ("value", "g")),
        groups="1",
        inner="h",
    ),
    *attention_entries(f"{LAYER}.self_attn", names=("o_proj",)),
)
PHI3 = Architecture(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    blocks={ATTENTION: _PHI3_ATTENTION, DENSE: GATE_UP_MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(1.0)),
        *rows.SELF_ATTENTION,
        Row("sliding_window", "attention.window", read.optional_window),
        Row("resid_pdrop", "", read.unread, constant(0.0)),
        Row("embd_pdrop", "", read.unread, constant(0.0)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=check_layer_types(FULL, SLIDING),
    defaults=MappingProxyType({"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
)
