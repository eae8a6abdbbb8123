# SPDX-License-Identifier: Apache-2.0
"""Models whose MLP has no gate: Arcee, Nemotron, Jais 2, StarCoder 2 and Persimmon."""

from __future__ import annotations

from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import ATTENTION, DENSE
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    EMBEDDING,
    ENDS,
    FINAL_NORM,
    HEAD,
    LAYER,
    MIXER_NORM,
    Entry,
    FusedWeight,
    fused_weights,
    plain_mlp,
    query_key_norms,
)
from megatron.hf.layer_types import (
    FULL,
    SLIDING,
    check_layer_types,
    layers,
    refuse_windows,
    uniform_layers,
)

ARCEE = Architecture(
    model_type="arcee",
    class_name="ArceeForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: plain_mlp()},
    ends=ENDS,
    rows=(
        *rows.DECODER,
        *rows.RMS_NORM,
        *rows.plain_mlp(),
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        Row("mlp_bias", "mlp.bias", read.flag(False)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType({"hidden_act": "relu2", "rms_norm_eps": 1e-5}),
)
NEMOTRON = Architecture(
    model_type="nemotron",
    class_name="NemotronForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: plain_mlp()},
    ends=ENDS,
    rows=(
        *rows.DECODER,
        *rows.layer_norm("norm_eps"),
        Row("", "norm.zero_centered", constant(True)),
        *rows.plain_mlp(),
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(0.5)),
        *rows.SELF_ATTENTION,
        *rows.BIAS,
        Row("mlp_bias", "mlp.bias", read.flag(False)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType(
        {"hidden_act": "relu2", "norm_eps": 1e-5, "initializer_range": 0.0134}
    ),
)
JAIS2 = Architecture(
    model_type="jais2",
    class_name="Jais2ForCausalLM",
    has_classifier=False,
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: plain_mlp()},
    ends=ENDS,
    rows=(
        *rows.DECODER,
        *rows.layer_norm("layer_norm_eps"),
        *rows.plain_mlp(),
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", read.flag(True)),
        Row("attention_bias", "attention.output_bias", read.flag(True), read.unwritten),
        Row("mlp_bias", "mlp.bias", read.flag(True)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType({"hidden_act": "relu2", "layer_norm_eps": 1e-5}),
)
STARCODER2 = Architecture(
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: plain_mlp("c_fc", "c_proj")},
    ends=ENDS,
    rows=(
        *rows.DECODER,
        *rows.layer_norm("norm_epsilon"),
        *rows.plain_mlp(),
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        Row("sliding_window", "attention.window", read.optional_window),
        Row("residual_dropout", "", read.unread, constant(0.0)),
        Row("embedding_dropout", "", read.unread, constant(0.0)),
        Row("use_bias", "attention.qkv_bias", read.flag(True)),
        Row("use_bias", "attention.output_bias", read.flag(True), read.unwritten),
        Row("use_bias", "mlp.bias", read.flag(True), read.unwritten),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=check_layer_types(FULL, SLIDING),
    defaults=MappingProxyType(
        {
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
            "initializer_range": 0.018042,
        }
    ),
)
_PERSIMMON_ATTENTION = (
    MIXER_NORM,
    FusedWeight(
        f"{LAYER}.self_attn.query_key_value.weight",
        fused_weights("attention", ("query", "d"), ("key", "d"), ("value", "d")),
        groups="a",
        inner="h",
        biased="attention_bias",
    ),
    Entry(
        f"{LAYER}.self_attn.dense.weight",
        "{block}.attention.output.weight",
        "hn",
        "attention_out_bias",
    ),
    *query_key_norms("q_layernorm", "k_layernorm"),
)
PERSIMMON = Architecture(
    model_type="persimmon",
    class_name="PersimmonForCausalLM",
    blocks={ATTENTION: _PERSIMMON_ATTENTION, DENSE: plain_mlp("dense_h_to_4h", "dense_4h_to_h")},
    ends=(EMBEDDING, FINAL_NORM._replace(hf_name="model.final_layernorm.weight"), HEAD),
    rows=(
        *rows.DECODER,
        *rows.layer_norm("layer_norm_eps"),
        *rows.plain_mlp(),
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(0.5)),
        *rows.WHOLE_WIDTH_ATTENTION,
        Row(
            "num_key_value_heads",
            "attention.num_query_groups",
            read.equal_to("num_attention_heads"),
            read.unwritten,
        ),
        Row("qk_layernorm", "attention.qk_norm", read.flag(True)),
        Row("hidden_dropout", "", read.unread, constant(0.0)),
        Row("", "attention.qkv_bias", constant(True)),
        Row("", "attention.output_bias", constant(True)),
        Row("", "mlp.bias", constant(True)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType({"hidden_act": "relu2", "layer_norm_eps": 1e-5}),
)
