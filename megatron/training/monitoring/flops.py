# SPDX-License-Identifier: Apache-2.0
"""Floating point operations of a training step, and the peak of known devices.

Operations of the model, not of the machine: forward + backward = 3 x forward, a matrix product
counts 2 per multiply-add, recomputation and elementwise work count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from megatron.training.config import ModelConfig

Lengths = TypeVar("Lengths", int, np.ndarray)

#: Dense bf16 peak in FLOP/s by a part of the device's name, the most telling first (vendors' data
#: sheets).
PEAK_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "GB200": 2500e12,
        "B200": 2250e12,
        "H200": 989.5e12,
        "GH200": 989.5e12,
        "H100 PCIe": 756e12,
        "H100 NVL": 835e12,
        "H100": 989.5e12,
        "H20": 148e12,
        "A100": 312e12,
        "A800": 312e12,
        "L40S": 362e12,
    }
)


def training_flops(
    model: ModelConfig,
    *,
    vocab_size: int,
    seq_length: int,
    samples: int,
    window: int | None = None,
) -> float:
    """Return the operations of forward and backward over `samples` sequences.

    Per token and layer: 6 h (2 q + k + v) for the projections with q = heads x channels and k = v
    = groups x channels, and 6 h f g for the MLP, g = 3 gated or 2; per token 6 h V for the head;
    per sequence and layer 6 q s^2 for the two products of causal attention.

    Args:
        model: resolved shape.
        vocab_size: vocabulary with padding.
        seq_length: tokens per sample.
        samples: number of sequences.
        window: tokens that a token attends to; None is all before it.
    """
    assert model.kv_channels is not None, "the model config must be resolved"
    assert model.num_query_groups is not None
    assert model.ffn_hidden_size is not None
    query = model.num_attention_heads * model.kv_channels
    attention = flops_per_square(model) * int(visible_square(seq_length, window)) * samples
    key_value = 2 * model.num_query_groups * model.kv_channels
    projections = 6 * model.hidden_size * (2 * query + key_value)
    mlp = 6 * model.hidden_size * model.ffn_hidden_size * (3 if model.swiglu else 2)
    head = 6 * model.hidden_size * vocab_size
    tokens = samples * seq_length
    return float(tokens * (model.num_layers * (projections + mlp) + head) + attention)


def flops_per_square(model: ModelConfig) -> float:
    """Return the operations of attention, forward and backward, for a document of one token.

    Those of a document of n tokens are n^2 times as many: with documents masked from each other
    the squares of their lengths take the place of that of the sequence.
    """
    assert model.kv_channels is not None, "the model config must be resolved"
    return 6.0 * model.num_attention_heads * model.kv_channels * model.num_layers


def visible_square(length: Lengths, window: int | None) -> Lengths:
    """Return n^2 for documents of n tokens, or what takes its place with a window of w: 2 w n -
    w^2, since twice the area of a causal band is that of the square less the part out of sight."""
    if window is None:
        return length * length
    seen = np.minimum(length, window)
    return seen * (2 * length - seen)


def peak_flops(device_name: str | None) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s, or None where it is not known (any CPU)."""
    if device_name is None:
        return None
    for part, peak in PEAK_FLOPS.items():
        if part in device_name:
            return peak
    return None
