# SPDX-License-Identifier: Apache-2.0
"""From a run's options to the core's configs of a hybrid: its pattern and its recurrent blocks."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.models.pattern import DELTA_NET, MAMBA
from megatron.core.ssm.config import GatedDeltaNetConfig, Mamba2Config
from megatron.training.config import Config
from megatron.training.config.hybrid import mamba_heads
from megatron.training.config.layer_pattern import has, is_hybrid, written


def hybrid_fields(config: Config) -> dict[str, Any]:
    """Return what a layer pattern adds to a `GPTConfig`."""
    pattern = written(config)
    if pattern is None:
        return {}
    further = pattern.further
    if not is_hybrid(config) and further == pattern.blocks[-2:]:
        further = ""  # as it is without a word
    return {
        "pattern": pattern.blocks if is_hybrid(config) else "",
        "mtp_pattern": further,
        "delta_net": delta_net_config(config) if has(config, DELTA_NET) else None,
        "mamba": mamba_config(config) if has(config, MAMBA) else None,
    }


def recurrent_shapes(config: Config) -> dict[str, GatedDeltaNetConfig | Mamba2Config]:
    """Return the shapes of the recurrent blocks that there are, by what they are called."""
    found: dict[str, GatedDeltaNetConfig | Mamba2Config] = {}
    if has(config, DELTA_NET):
        found["gated delta net"] = delta_net_config(config)
    if has(config, MAMBA):
        found["Mamba-2"] = mamba_config(config)
    return found


def delta_net_config(config: Config) -> GatedDeltaNetConfig:
    """Return the shape of gated delta nets."""
    chosen = config.hybrid
    return GatedDeltaNetConfig(
        num_key_heads=chosen.linear_num_key_heads,
        num_value_heads=chosen.linear_num_value_heads,
        key_channels=chosen.linear_key_head_dim,
        value_channels=chosen.linear_value_head_dim,
        conv_width=chosen.linear_conv_kernel_dim,
    )


def mamba_config(config: Config) -> Mamba2Config:
    """Return the shape of Mamba-2 blocks."""
    chosen = config.hybrid
    least, *most = chosen.mamba_dt_limit or (0.0,)
    return Mamba2Config(
        num_heads=mamba_heads(config),
        head_channels=chosen.mamba_head_dim,
        state_channels=chosen.mamba_state_dim,
        num_groups=chosen.mamba_num_groups,
        conv_width=chosen.mamba_conv_kernel_dim,
        conv_bias=chosen.mamba_conv_bias,
        bias=chosen.add_mamba_bias,
        norm_groups=chosen.mamba_norm_groups,
        dt_limit=(least, most[0] if most else math.inf),
    )
