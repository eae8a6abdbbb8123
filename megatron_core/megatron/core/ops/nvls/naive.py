# SPDX-License-Identifier: Apache-2.0
"""All-gather and reduce-scatter of ranks with unlike numbers of rows, by those of equal ones.

Each of w ranks has a part of n rows, of which the first `rows[rank]` are real. Gathered, the real
rows of all ranks stand one after the other, then zeros:

    all-gather-v       [n, h] of every rank -> [w n, h]   packed(all-gathered, rows)
    reduce-scatter-v   [w n, h] of every rank -> [n, h]   reduce-scattered unpacked(x, rows)

The numbers stay on the device.
"""

from __future__ import annotations

import torch


def packed(parts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the real rows of parts one after the other, then zeros.

    Args:
        parts: [w n, h], of the ranks in turn.
        rows: int32 [w], real rows of each, the first ones.
    """
    place, real = _places(len(parts), rows)
    return torch.zeros_like(parts).index_add_(0, place, parts.where(real, 0.0))


def unpacked(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Undo `packed`: return parts [w n, h], zeros where a row is not real, from x [w n, h]."""
    place, real = _places(len(x), rows)
    return x.index_select(0, place).where(real, 0.0)


def _places(count: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each row of the parts its place among packed ones, int64 [w n], and whether it is
    real, bool [w n, 1]; the place of others is any."""
    number = torch.arange(count // len(rows), device=rows.device)
    real = number < rows.unsqueeze(1)  # [w, n]
    first = rows.cumsum(0) - rows
    place = (first.unsqueeze(1) + number).clamp(max=count - 1)
    return place.flatten(), real.flatten().unsqueeze(1)
