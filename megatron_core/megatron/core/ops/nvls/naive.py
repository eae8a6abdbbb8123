# SPDX-License-Identifier: Apache-2.0
"""The rows of the "v" collectives in plain PyTorch: packed, and unpacked again."""

from __future__ import annotations

import torch


def pack_rows(shards: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the real rows of all shards, then zeros.

    Args:
        shards: [w n, h], concatenated in rank order.
        rows: int32 [w], number of real rows of each shard, which are its first ones.
    """
    position, is_real = _packed_positions(len(shards), rows)
    return torch.zeros_like(shards).index_add_(0, position, shards.where(is_real, 0.0))


def unpack_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Undo `pack_rows`: return shards [w n, h] from x [w n, h]; rows that are not real are zero."""
    position, is_real = _packed_positions(len(x), rows)
    return x.index_select(0, position).where(is_real, 0.0)


def _packed_positions(count: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each shard row's packed position, int64 [w n], and whether it is real, bool [w n, 1].

    The position of a row that is not real is arbitrary but in range.
    """
    row = torch.arange(count // len(rows), device=rows.device)
    is_real = row < rows.unsqueeze(1)  # [w, n]
    starts = rows.cumsum(0) - rows
    position = (starts.unsqueeze(1) + row).clamp(max=count - 1)
    return position.flatten(), is_real.flatten().unsqueeze(1)
