# SPDX-License-Identifier: Apache-2.0
"""Kernels of low-latency collectives over symmetric memory; `megatron.core.comm` calls them."""

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
