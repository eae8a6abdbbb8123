# SPDX-License-Identifier: Apache-2.0
"""config.json of hybrid models: fields that are read or refused, and the equivalent flags."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from megatron.cli.schema import build
from megatron.core.models import GPTConfig
from megatron.hf.config_json import differences, function_of, read_model, write_config
from megatron.training.checkpointing.hf_import import folder_options
from megatron.training.config import Config
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve

#: The fields of a published config.json of each architecture, at a small size.
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 14,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}
MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_heads": 12,
    "head_dim": 8,
    "state_size": 9,
    "n_groups": 3,
    "expand": 2,
    "conv_kernel": 4,
    "rms_norm": True,
    "time_step_limit": [0.0, math.inf],
}
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "hybrid_override_pattern": "ME*M-",
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "attention_head_dim": 10,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 12,
    "mamba_head_dim": 7,
    "ssm_state_size": 9,
    "n_groups": 3,
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "moe_shared_expert_intermediate_size": 26,
    "moe_latent_size": None,
    "routed_scaling_factor": 2.5,
    "time_step_limit": [0.0, math.inf],
    "time_step_min": 0.001,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 128,
}


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


REFUSED = [
    (QWEN3_NEXT, {"layer_types": ["linear_attention"] * 3}, "layer_types is .* one is needed"),
    (QWEN3_NEXT, {"layer_types": ["sliding_attention"] * 4}, "layer_types is .* supported are"),
    (QWEN3_NEXT, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    (QWEN3_NEXT, {"linear_num_value_heads": 3}, "linear-num-key-heads 2 must divide"),
    (QWEN3_NEXT, {"linear_key_head_dim": 0}, "linear_key_head_dim is 0: expected"),
    (QWEN3_NEXT, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (MAMBA2, {"expand": 3}, "expand is 3: times hidden_size"),
    (MAMBA2, {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    (MAMBA2, {"rms_norm": False}, "rms_norm is False"),
    (MAMBA2, {"time_step_limit": [1.0, 0.5]}, "time_step_limit is .* expected 0 <= smallest"),
    (MAMBA2, {"time_step_limit": [0.0, "Infinity"]}, "time_step_limit is .* expected the smallest"),
    (MAMBA2, {"time_step_limit": [math.nan, 1.0]}, "time_step_limit is .* expected 0 <= smallest"),
    (MAMBA2, {"num_hidden_layers": 10_001}, "num_hidden_layers is 10001: more than"),
    (NEMOTRON_H, {"moe_latent_size": 16}, "moe_latent_size is 16: this changes the model"),
    (NEMOTRON_H, {"hybrid_override_pattern": "ME|*"}, r"hybrid_override_pattern is 'ME\|\*'"),
    (NEMOTRON_H, {"hybrid_override_pattern": ...}, "hybrid_override_pattern is absent"),
    (NEMOTRON_H, {"layers_block_type": ["mamba"]}, "hybrid_override_pattern is .* says M"),
    (NEMOTRON_H, {"num_hidden_layers": 6}, "num_hidden_layers is 6: .* has 5 layers"),
    (NEMOTRON_H, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu': supported is 'relu2'"),
    (NEMOTRON_H, {"mamba_hidden_act": "relu"}, "mamba_hidden_act is 'relu'"),
    (NEMOTRON_H, {"n_shared_experts": 2}, "n_shared_experts is 2: supported is 1"),
    (NEMOTRON_H, {"mlp_bias": True}, "mlp_bias is True: with experts"),
    (NEMOTRON_H, {"attention_bias": True}, "attention_bias is True"),
    (NEMOTRON_H, {"head_dim": 12}, "attention_head_dim is 10: head_dim is the same field"),
    (NEMOTRON_H, {"sliding_window": 64}, "sliding_window is 64"),
]


@pytest.mark.parametrize(("fields", "changes", "error"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_field_is_named(fields: dict[str, Any], changes: dict[str, Any], error: str):
    with pytest.raises(ValueError, match=f"config.json: {error}"):
        config_of(fields, **changes)


@pytest.mark.parametrize("fields", [QWEN3_NEXT, MAMBA2, NEMOTRON_H], ids=lambda f: f["model_type"])
def test_flags_and_written_config_describe_the_same_model(fields: dict[str, Any]):
    model = read_model(fields, where="config.json")
    required = {"seq-length": 16, "micro-batch-size": 1, "train-iters": 1, "lr": 1e-3}
    options = {name: value for name, value in folder_options(model).items() if value is not None}
    run = resolve(build(Config, {**options, **required, "mock-data": True}), 1)
    from_flags = gpt_config(run.config, model.config.vocab_size)
    mismatches = differences(model.config, from_flags)
    assert mismatches == []
    assert function_of(from_flags) == function_of(model.config)
    written = write_config(model.config, max_length=128, dtype=torch.float32, end_tokens=(2,))
    assert differences(read_model(written, where="written").config, model.config) == []


def test_hybrids_that_transformers_lacks_are_refused():
    qwen, nemotron = config_of(QWEN3_NEXT), config_of(NEMOTRON_H)
    plain = replace(qwen.norm, zero_centered=False)
    for changed, name in (
        (replace(qwen, norm=plain), "norm.zero_centered"),
        (replace(qwen, attention=replace(qwen.attention, output_gate=False)), "output_gate"),
        (replace(qwen, pattern="GEGGE*EE"), "layer_types"),
        (replace(nemotron, mamba=replace(nemotron.mamba, norm_groups=1)), "mamba.norm_groups is 1"),
        (replace(nemotron, norm=replace(nemotron.norm, kind="LayerNorm")), "norm.kind"),
        (replace(nemotron, mtp_num_layers=1, mtp_pattern="*-"), "mtp_num_layers is 1"),
    ):
        with pytest.raises(ValueError, match=rf"cannot be exported as .*{name}"):
            write_config(changed, max_length=128, dtype=torch.float32, end_tokens=())


@st.composite
def hybrids(draw: st.DrawFn) -> GPTConfig:
    """Draw a variation of a small Qwen3-Next, Mamba-2 or Nemotron-H model."""
    model = config_of(draw(st.sampled_from([QWEN3_NEXT, MAMBA2, NEMOTRON_H])))
    sizes, norm = st.integers(1, 99), replace(model.norm, epsilon=draw(st.floats(1e-9, 1e-2)))
    delta_net, mamba, moe, attention = model.delta_net, model.mamba, model.moe, model.attention
    if delta_net is not None:
        delta_net = replace(delta_net, key_channels=draw(sizes), value_channels=draw(sizes))
        delta_net = replace(delta_net, num_value_heads=2 * draw(sizes), conv_width=draw(sizes))
    if mamba is not None:
        limits = draw(st.sampled_from([(0.0, math.inf), (0.1, math.inf), (0.0, 0.5)]))
        mamba = replace(mamba, state_channels=draw(sizes), conv_width=draw(sizes), dt_limit=limits)
        mamba = replace(mamba, conv_bias=draw(st.booleans()), bias=draw(st.booleans()))
    if moe is not None:
        router = replace(moe.router, topk=draw(st.integers(1, 6)), normalize=draw(st.booleans()))
        moe = replace(moe, ffn_hidden_size=draw(sizes), router=router)
        moe = replace(moe, shared_ffn_hidden_size=draw(sizes))
    if attention is not None:
        attention = replace(attention, num_query_groups=draw(st.sampled_from([1, 2, 3, 6])))
    return replace(
        model,
        norm=norm,
        delta_net=delta_net,
        mamba=mamba,
        moe=moe,
        attention=attention,
        tied=draw(st.booleans()),
        vocab_size=draw(st.integers(1, 999_999)),
    )
