# SPDX-License-Identifier: Apache-2.0
"""GLM: half of the channels of a head rotate, in adjacent pairs."""

from __future__ import annotations

from types import MappingProxyType

from megatron.cli.two_way_table import Row, constant
from megatron.core.models.layer_pattern import ATTENTION, DENSE
from megatron.hf import config_rows as rows
from megatron.hf import readers as read
from megatron.hf.architecture import Architecture
from megatron.hf.entries import ATTENTION_ENTRIES, ENDS, GATE_UP_MLP
from megatron.hf.layer_types import (
    layers,
    refuse_windows,
    uniform_layers,
)

GLM = Architecture(
    model_type="glm",
    class_name="GlmForCausalLM",
    blocks={ATTENTION: ATTENTION_ENTRIES, DENSE: GATE_UP_MLP},
    ends=ENDS,
    rows=(
        *rows.LAYERS,
        *rows.ROPE,
        Row("partial_rotary_factor", "rope.percent", read.rotary_fraction(0.5)),
        Row("", "rope.interleaved", constant(True)),
        *rows.SELF_ATTENTION,
        Row("attention_bias", "attention.qkv_bias", read.flag(True)),
    ),
    read_blocks=layers(uniform_layers(DENSE)),
    check=refuse_windows,
    defaults=MappingProxyType(
        {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
    ),
)
