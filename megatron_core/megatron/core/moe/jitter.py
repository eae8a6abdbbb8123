# SPDX-License-Identifier: Apache-2.0
"""Jitter of what a router reads: a function of sample, place and feature, without state."""

from __future__ import annotations

import torch

from megatron.core.ops.dropout import dropout_key
from megatron.core.ops.dropout.hashing import hash_index, mix_rows_and_columns

_BITS = 24


def jitter_key(seed: int, name: str) -> int:
    """Return the key of a router's jitter."""
    return dropout_key(seed, name, "jitter")


def jittered(
    rows: torch.Tensor, sample_ids: torch.Tensor, places: torch.Tensor, *, rate: float, key: int
) -> torch.Tensor:
    """Return rows [t, h] times uniform numbers in [1 - rate, 1 + rate).

    Args:
        sample_ids, places: int64 [t], each row's sample and its place there.
    """
    line = hash_index(key, hash_index(key, sample_ids) ^ places)  # [t]
    columns = hash_index(key + 1, torch.arange(rows.shape[1], device=rows.device))  # [h]
    bits = mix_rows_and_columns(line.unsqueeze(1), columns) & ((1 << _BITS) - 1)
    uniform = bits.float() * 2.0**-_BITS  # [t, h] in [0, 1)
    return (rows.float() * (1.0 + rate * (2.0 * uniform - 1.0))).to(rows.dtype)
