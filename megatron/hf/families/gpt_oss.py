# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: attention sinks, alternating windows, and experts with biases and clamped gates.

Files contain the experts of a layer as [experts, inputs, outputs], with the outputs of gate and up
interleaved, or in MXFP4 as [experts, outputs, inputs].
"""

from __future__ import annotations

from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import ATTENTION, EXPERTS
from megatron.hf import attention_kinds
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.attention_kinds import periodic_full_attention, window_kinds
from megatron.hf.entries import (
    ATTENTION_ENTRIES,
    ENDS,
    FFN_NORM,
    LAYER,
    Entry,
    FusedWeight,
)
from megatron.hf.layer_types import layers, uniform_layers

_EXPERTS = f"{LAYER}.mlp.experts"
_WINDOWS = window_kinds(periodic_full_attention(2, offset=1))


def _experts(
    hf_name: str, names: tuple[str, ...], rows: str, inner: str, *, kind: str = "weight"
) -> FusedWeight:
    """Return the entry of the weights or biases of all experts of a layer."""
    return FusedWeight(
        f"{_EXPERTS}.{hf_name}",
        tuple((f"{{block}}.moe.experts.{name}.{kind}", rows) for name in names),
        groups="E",
        inner=inner,
        stacked=True,
        transposed=bool(inner),
        interleaved=len(names) > 1,
    )


GPT_OSS = Architecture(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    blocks={
        ATTENTION: (
            *ATTENTION_ENTRIES,
            Entry(f"{LAYER}.self_attn.sinks", "{block}.attention.sinks", "a"),
        ),
        EXPERTS: (
            FFN_NORM,
            Entry(f"{LAYER}.mlp.router.weight", "{block}.moe.router.weight", "Eh", "router_bias"),
            _experts("gate_up_proj", ("gate", "up"), "e", "h"),
            _experts("gate_up_proj_bias", ("gate", "up"), "e", "", kind="bias"),
            _experts("down_proj", ("down",), "h", "e"),
            _experts("down_proj_bias", ("down",), "h", "", kind="bias"),
        ),
    },
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.WHOLE_ROPE,
        *rows.SELF_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", read.flag(True)),
        Row("attention_bias", "attention.output_bias", read.flag(True), read.unwritten),
        *attention_kinds.rows(_WINDOWS),
        *(Row("", f"{kind}.sinks", constant(True)) for kind in ("attention", "window")),
        Row(
            "num_local_experts",
            "moe.num_experts",
            read.count_of("num_local_experts", "num_experts"),
        ),
        Row("intermediate_size", "moe.ffn_hidden_size", read.count),
        Row("num_experts_per_tok", "router.topk", read.count),
        Row("", "router.bias", constant(True)),
        Row("", "moe.bias", constant(True)),
        # A GPT has an MLP config, which flags describe, without MLPs too.
        *(Row("", f"{section}.activation", constant("quick_gelu")) for section in ("moe", "mlp")),
        Row("swiglu_limit", "mlp.clamp", read.number(7.0), read.unwritten),
        Row("", "mlp.linear_offset", constant(1.0)),
        Row("swiglu_alpha", "moe.", read.must_be(1.702), constant(1.702)),
        Row("swiglu_limit", "moe.clamp", read.number(7.0)),
        Row("", "moe.linear_offset", constant(1.0)),
    ),
    read_blocks=layers(uniform_layers(EXPERTS), attention_kinds.mixers(_WINDOWS)),
    aliases=frozenset({"num_experts"}),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        }
    ),
)
