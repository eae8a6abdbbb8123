# SPDX-License-Identifier: Apache-2.0
"""TensorParallelRegion: the tp group, and whether the sequence is cut over it between blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.process_groups import Group


@dataclass(frozen=True)
class TensorParallelRegion:
    """How activations look outside a tensor-parallel block.

    Args:
        group: the tp group.
        sequence_parallel: outside, each rank holds s/tp of the sequence (Korthikanti et al. 2022)
            instead of all of it. Entering a block gathers the sequence, leaving it reduce-scatters.
    """

    group: Group
    sequence_parallel: bool = False

    @property
    def scatters(self) -> bool:
        """Whether the sequence is really cut (sequence parallelism on more than one rank)."""
        return self.sequence_parallel and self.group.size > 1

    @property
    def replicated_gradient(self) -> Literal["identical", "partial"]:
        """How the gradient of a weight used outside the blocks, whole on every tp rank, arrives."""
        return "partial" if self.scatters else "identical"
