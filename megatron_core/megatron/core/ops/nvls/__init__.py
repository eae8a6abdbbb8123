# SPDX-License-Identifier: Apache-2.0
"""Kernels of low-latency collectives over symmetric memory; `megatron.core.comm` calls them.

The "v" collectives, for ranks with different numbers of rows, are defined in plain PyTorch by the
collectives for equal shards. Each of w ranks has a shard of n rows; the first `rows[rank]` rows
are real. The gathered tensor has the real rows of all ranks first, then zeros:

    all-gather-v       [n, h] of every rank -> [w n, h]   pack_rows(all-gathered, rows)
    reduce-scatter-v   [w n, h] of every rank -> [n, h]   reduce-scattered unpack_rows(x, rows)

The row counts stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Kernels move whole packs of this many bytes, aligned to a pack.
PACK_BYTES = 16


@dataclass(frozen=True, eq=False)
class PeerGroup:
    """The ranks that a kernel synchronizes with, and their signal pads.

    Args:
        pads: int64 [world], addresses of the ranks' signal pads, on the device.
        status: int32 [1], written by the device: 1 + rank of a peer that timed out.
        rank, world: of this rank's group.
        programs: upper bound on the programs of a kernel; a signal pad has slots for each program.
        tries: number of polls of a slot before a peer times out; 0 waits for ever.
        traps: whether a time-out stops the device by PTX `trap`; otherwise the kernel continues
            and its output is invalid.
    """

    pads: torch.Tensor
    status: torch.Tensor
    rank: int
    world: int
    programs: int
    tries: int = 0
    traps: bool = False

    def kernel_args(self) -> dict[str, object]:
        """Return the keyword arguments that every kernel takes."""
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
        epsilon: added to the mean square.
        offset: 1 if the stored weight is the scale minus one, else 0.
    """

    weight: torch.Tensor
    epsilon: float
    offset: float = 0.0
