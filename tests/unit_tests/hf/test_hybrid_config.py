# SPDX-License-Identifier: Apache-2.0
"""config.json of hybrid models: fields that are read, and models that cannot be written."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from megatron.core.models import GPTConfig
from megatron.core.models.gpt_config import MTPConfig
from megatron.hf.config_json import read_model, write_config

#: The fields of a published config.json of each architecture, at a small size.
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 61,
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4,
    "full_attention_interval": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "hidden_act": "silu", "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 10,
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 14, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_scaling": None,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 128,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2", "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 3,
    "num_heads": 12, "head_dim": 8, "state_size": 9, "n_groups": 3, "expand": 2, "conv_kernel": 4,
    "rms_norm": True, "time_step_limit": [0.0, math.inf],
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "vocab_size": 61,
    "hidden_size": 48, "intermediate_size": 40, "hybrid_override_pattern": "ME*M-",
    "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2,
    "attention_head_dim": 10, "mlp_hidden_act": "relu2", "mamba_num_heads": 12, "mamba_head_dim": 7,
    "ssm_state_size": 9, "n_groups": 3, "layer_norm_epsilon": 1e-5, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 22,
    "moe_shared_expert_intermediate_size": 26, "moe_latent_size": None,
    "routed_scaling_factor": 2.5, "time_step_limit": [0.0, math.inf], "time_step_min": 0.001,
    "num_nextn_predict_layers": 0, "max_position_embeddings": 128,
}  # fmt: skip
FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "vocab_size": 61,
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "mamba_d_ssm": 84, "mamba_n_heads": 12, "mamba_d_head": 7,
    "mamba_n_groups": 3, "mamba_d_state": 9, "ssm_multipliers": [0.5, 1.0, 1.0, 1.0, 2.0],
    "ssm_in_multiplier": 2.0, "key_multiplier": 0.5, "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 3.0, "mlp_multipliers": [0.5, 0.25], "rms_norm_eps": 1e-5,
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": 61,
    "hidden_size": 48, "block_ff_dim": 60, "block_multiple_of": 16, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "conv_L_cache": 3, "conv_bias": False,
    "full_attn_idxs": [1], "norm_eps": 1e-5, "tie_embedding": True, "rope_theta": 1e6,
}  # fmt: skip
LFM2_MOE: dict[str, Any] = {
    **LFM2, "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"],
    "intermediate_size": 40, "moe_intermediate_size": 22, "num_experts": 6,
    "num_experts_per_tok": 3, "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv"],
}  # fmt: skip


def config_of(fields: dict[str, Any], **changes: Any) -> GPTConfig:
    """Return the model described by changed fields; the value `...` removes a field."""
    fields = {name: value for name, value in (fields | changes).items() if value is not ...}
    return read_model(fields, where="config.json").config


def test_hybrid_config_json_is_read():
    model = config_of(QWEN3_NEXT)
    assert model.pattern == "GEGEGE*E"
    assert model.norm.zero_centered
    assert model.attention.output_gate
    assert model.rope.percent == 0.25
    assert model.moe.shared_gate
    assert (model.mlp, model.mamba) == (None, None)
    types = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
    explicit_types = config_of(QWEN3_NEXT, layer_types=types, mlp_only_layers=[2])
    assert explicit_types.pattern == "*EGE*-GE"
    attention_only = config_of(QWEN3_NEXT, full_attention_interval=1)
    assert (attention_only.pattern, attention_only.ffn_pattern, attention_only.delta_net) == (
        "",
        "EEEE",
        None,
    )
    recurrent = config_of(QWEN3_NEXT, layer_types=types[1::2] * 2, partial_rotary_factor=...)
    assert (recurrent.pattern, recurrent.attention, recurrent.rope) == ("GEGEGEGE", None, None)

    model = config_of(MAMBA2)
    assert (model.pattern, model.attention, model.rope) == ("MMM", None, None)
    assert (model.init_std, model.norm.epsilon) == (0.1, 1e-5)
    assert model.mamba.normed_groups == 3

    model = config_of(NEMOTRON_H)
    assert (model.pattern, model.rope) == ("ME*M-", None)
    assert model.attention.kv_channels == 10
    assert (model.mlp.gated, model.mlp.activation) == (False, "squared_relu")
    assert (model.moe.gated, model.moe.shared_ffn_hidden_size) == (False, 26)
    assert model.moe.router.expert_bias
    assert model.mamba.dt_limit == (0.0, math.inf)
    names = ["mamba", "moe", "attention", "linear_attention", "mlp"]
    for name in ("layers_block_type", "layer_types"):
        assert model == config_of(NEMOTRON_H, hybrid_override_pattern=..., **{name: names})
    steps = [0.1, {"__float__": "Infinity"}]
    assert config_of(NEMOTRON_H, time_step_limit=steps).mamba.dt_limit == (0.1, math.inf)

    model = config_of(FALCON_H1)
    assert (model.pattern, model.num_layers, model.blocks) == ("(M*)-(M*)-", 6, "M*-M*-")
    assert (model.mamba.head_channels, model.mamba.norm) == (7, False)
    assert model.mamba.multipliers == (1.0, 2.0, 2.0, 2.0, 4.0)
    assert model.attention.scale == 0.5 * 2.0**2 / math.sqrt(8)
    assert (model.multipliers.attention, model.multipliers.mlp) == (6.0, 0.25)
    assert model.mlp.gate_multiplier == 0.5
    normed = config_of(FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False)
    assert normed.mamba.norm

    model = config_of(LFM2)
    assert (model.pattern, model.tied, model.rope.base) == ("C-*-C-", True, 1e6)
    assert (model.short_conv.conv_width, model.short_conv.bias) == (3, False)
    assert model.mlp.ffn_hidden_size == 48  # two thirds of 60, rounded up to a multiple of 16
    assert config_of(LFM2, block_ffn_dim_multiplier=1.3).mlp.ffn_hidden_size == 64
    assert config_of(LFM2, block_auto_adjust_ff_dim=False).mlp.ffn_hidden_size == 60
    assert not config_of(LFM2, tie_embedding=False).tied
    assert config_of(LFM2, full_attn_idxs=...).blocks == "*-*-*-"
    model = config_of(LFM2_MOE)
    assert (model.pattern, model.moe.router.expert_bias) == ("C-*ECE", True)


def test_hybrids_that_transformers_lacks_are_refused():
    qwen, nemotron = config_of(QWEN3_NEXT), config_of(NEMOTRON_H)
    plain = replace(qwen.norm, zero_centered=False)
    for changed, name in (
        (replace(qwen, norm=plain), "norm.zero_centered"),
        (replace(qwen, attention=replace(qwen.attention, output_gate=False)), "output_gate"),
        (replace(qwen, pattern="GEGGE*EE"), "layer_types"),
        (replace(nemotron, mamba=replace(nemotron.mamba, norm_groups=1)), "mamba.norm_groups is 1"),
        (replace(nemotron, norm=replace(nemotron.norm, kind="LayerNorm")), "norm.kind"),
        (replace(nemotron, mtp=MTPConfig(num_layers=1, pattern="*-")), "mtp.num_layers is 1"),
    ):
        with pytest.raises(ValueError, match=rf"cannot be exported as .*{name}"):
            write_config(changed, max_length=128, dtype=torch.float32, end_tokens=())


@st.composite
def hybrids(draw: st.DrawFn) -> GPTConfig:
    """Draw a variation of a small Qwen3-Next, Mamba-2, Nemotron-H or LFM2 model."""
    fields = [QWEN3_NEXT, MAMBA2, NEMOTRON_H, LFM2, LFM2_MOE, FALCON_H1]
    model = config_of(draw(st.sampled_from(fields)))
    sizes, norm = st.integers(1, 99), replace(model.norm, epsilon=draw(st.floats(1e-9, 1e-2)))
    delta_net, mamba, moe, attention = model.delta_net, model.mamba, model.moe, model.attention
    if delta_net is not None:
        delta_net = replace(delta_net, key_channels=draw(sizes), value_channels=draw(sizes))
        delta_net = replace(delta_net, num_value_heads=2 * draw(sizes), conv_width=draw(sizes))
    if mamba is not None:
        limits = draw(st.sampled_from([(0.0, math.inf), (0.1, math.inf), (0.0, 0.5)]))
        mamba = replace(mamba, state_channels=draw(sizes), conv_width=draw(sizes), dt_limit=limits)
        mamba = replace(mamba, conv_bias=draw(st.booleans()), bias=draw(st.booleans()))
    short_conv = model.short_conv
    if short_conv is not None:
        short_conv = replace(short_conv, conv_width=draw(sizes), bias=draw(st.booleans()))
    if moe is not None:
        router = replace(moe.router, topk=draw(st.integers(1, 6)), normalize=draw(st.booleans()))
        moe = replace(moe, ffn_hidden_size=draw(sizes), router=router)
        if moe.shared_ffn_hidden_size is not None:
            moe = replace(moe, shared_ffn_hidden_size=draw(sizes))
    if attention is not None:
        attention = replace(attention, num_query_groups=draw(st.sampled_from([1, 2, 3, 6])))
    return replace(
        model,
        norm=norm,
        delta_net=delta_net,
        mamba=mamba,
        short_conv=short_conv,
        moe=moe,
        attention=attention,
        tied=draw(st.booleans()),
        vocab_size=draw(st.integers(1, 999_999)),
    )
