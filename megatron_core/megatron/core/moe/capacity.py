# SPDX-License-Identifier: Apache-2.0
"""RankCapacity: in training, ranks of experts take a fixed number of rows instead of counting them.

The even share of a rank is what it gets where tokens are routed evenly: with t tokens a rank, k
experts of each and ep parts of the experts, t · k / ep rows from each rank. A rank takes the factor
times that, so that the host knows all sizes. What has no room is left out, which only the device
knows. So every step ends with one number more in the sum of its losses, how many tokens had no room
anywhere. If that is not 0, the step is an error on every rank before a weight changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from megatron.core.comm import all_reduce
from megatron.core.process_groups import Group


class RankCapacity:
    """What a rank takes of one layer's tokens, and what it would have needed.

    Args:
        factor: times the even share.

    Attributes:
        overflow: fp64 [2], the most places of tokens that had no room in one microbatch, and the
            factor with which every microbatch had fitted; since `reset`.
    """

    def __init__(self, factor: float, device: torch.device | str = "cpu") -> None:
        self.factor = factor
        self.overflow = torch.zeros(2, dtype=torch.float64, device=device)

    def rows(self, share: float, most: int) -> int:
        """Return how many rows are taken.

        Args:
            share: the even one, in rows.
            most: rows that there can be.
        """
        return min(math.ceil(self.factor * share), most)

    @torch.no_grad()
    def record(self, rows: torch.Tensor, taken: int, share: float) -> None:
        """Remember what does not fit; nothing waits for the device.

        Args:
            rows: int64 [blocks], that are to be taken in each block.
            taken: rows that each block has.
            share: the even one, in rows.
        """
        missing = (rows - taken).clamp(min=0).sum()
        needed = rows.max() / max(share, 1e-9)
        found = torch.stack([missing.double(), needed.double()])
        torch.maximum(self.overflow, found, out=self.overflow)

    def reset(self) -> None:
        """Forget what there was."""
        self.overflow.zero_()


class CapacityCheck:
    """Find out after a step whether all tokens had room.

    Args:
        capacities: of this rank's layers, by name.
        names: of all layers with experts, in order, as an error names them; the same on every rank.
        world: all ranks.
        device: where this rank computes.
    """

    def __init__(
        self,
        capacities: Iterable[tuple[str, RankCapacity]],
        names: Sequence[str],
        *,
        world: Group,
        device: torch.device | str = "cpu",
    ) -> None:
        self.names, self.world, self.device = tuple(names), world, device
        self._layers = [(self.names.index(name), capacity) for name, capacity in capacities]

    def begin(self) -> None:
        """Begin a step."""
        for _, capacity in self._layers:
            capacity.reset()

    def count(self) -> torch.Tensor:
        """Return the places without room of this rank's layers, fp64 [1]."""
        counts = [capacity.overflow[:1] for _, capacity in self._layers]
        return torch.stack(counts).sum(0) if counts else torch.zeros(1, device=self.device).double()

    def fail(self) -> None:
        """Say where there was no room; every rank calls it.

        Raises:
            ValueError: always; it names the layer that needs most.
        """
        table = torch.zeros(len(self.names), 3, dtype=torch.float64, device=self.device)
        for index, capacity in self._layers:
            table[index, :2] = capacity.overflow
            table[index, 2] = capacity.factor
        rows = all_reduce(table, self.world, op="max").tolist()
        full = [(needed, missing, i) for i, (missing, needed, _) in enumerate(rows) if missing]
        needed, missing, worst = max(full)
        more = f" (and in {len(full) - 1} other layers)" if len(full) > 1 else ""
        raise ValueError(
            f"{self.names[worst]}{more}: {missing:,.0f} tokens of a microbatch had no room on the "
            f"ranks of their experts, which take --moe-expert-rank-capacity-factor "
            f"{rows[worst][2]:g} x the even share, and {needed:.2f} x were routed to one; no "
            f"weight has changed: resume with {math.ceil(needed * 10 + 1) / 10:g} or more, or "
            "without it"
        )
