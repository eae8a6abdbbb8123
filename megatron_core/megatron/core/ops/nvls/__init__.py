# SPDX-License-Identifier: Apache-2.0
"""Kernels of low-latency collectives over symmetric memory; `megatron.core.comm` calls them.

Those of ranks with unlike numbers of rows are defined in plain torch by those of equal ones. Each
of w ranks has a part of n rows, of which the first `rows[rank]` are real. Gathered, the real rows
of all ranks stand one after the other, then zeros:

    all-gather-v       [n, h] of every rank -> [w n, h]   packed(all-gathered, rows)
    reduce-scatter-v   [w n, h] of every rank -> [n, h]   reduce-scattered unpacked(x, rows)

The numbers stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: What kernels move is whole packs of so many bytes, and begins at one.
PACK_BYTES = 16


@dataclass(frozen=True, eq=False)
class Peers:
    """The ranks of a kernel, as one of them sees them.

    Args:
        pads: int64 [world], addresses of the ranks' signal pads, on the device.
        status: int32 [1] that the device writes; 1 + rank of a peer that did not come within
            `tries`.
        rank, world: of this rank's group.
        programs: of a kernel at most; a pad has slots for each of them.
        tries: how often a slot is tried; 0 waits for ever.
        traps: stop the device then, by PTX `trap`; else a kernel goes on with void results.
    """

    pads: torch.Tensor
    status: torch.Tensor
    rank: int
    world: int
    programs: int
    tries: int = 0
    traps: bool = False

    def arguments(self) -> dict[str, object]:
        """Return what every kernel takes of them."""
        return {
            "pads_ptr": self.pads,
            "status_ptr": self.status,
            "rank": self.rank,
            "WORLD": self.world,
            "LIMIT": self.tries,
            "TRAP": self.traps,
        }


@dataclass(frozen=True, eq=False)
class RowNorm:
    """RMSNorm of rows: x / sqrt(mean(x^2) + epsilon) * (weight + offset).

    Args:
        weight: [h].
        offset: 1 where the weight is stored as its distance from one.
    """

    weight: torch.Tensor
    epsilon: float
    offset: float = 0.0


# --- reference: plain torch


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
