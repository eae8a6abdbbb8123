# SPDX-License-Identifier: Apache-2.0
"""Llama, and models whose layers differ from Llama's by biases, windows or experts only."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import ATTENTION, DENSE, EXPERTS
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import ATTENTION_ENTRIES, ENDS, MLP, experts, fused_experts
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
