# SPDX-License-Identifier: Apache-2.0
"""RankCapacity: in training, ranks of experts take a fixed number of rows instead of counting them.

The even share of a rank is what it gets where tokens are routed evenly: with t tokens a rank, k
experts of each and ep parts of the experts, t · k / ep rows from each rank. A rank takes the factor
times that, so that the host knows all sizes. What has no room is left out, which only the device
knows. So every step ends with one number more in the sum of its losses, how many rows had no room.
If that is not 0, the step is an error on every rank before a weight changes. An evaluation is
computed again, without a capacity.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron.core.comm import all_reduce
from megatron.core.process_groups import Group

#: Less than any number of rows.
_NO_MICROBATCH = -(1 << 62)


class RankCapacity:
    """What a rank takes of one layer's tokens, and what it would have needed.

    Args:
        factor: times the even share.

    Attributes:
        excess: int64 scalar, the most rows of a block in one microbatch since `reset`, less those
            that the block has.
        num_taken, share: rows of a block and the even share; the smallest ones if microbatches
            have several shapes.
        in_evaluation: limit microbatches without samples too; see `CapacityCheck.evaluation`.
    """

    def __init__(self, factor: float, device: torch.device | str = "cpu") -> None:
        self.factor = factor
        self.excess = torch.full((), _NO_MICROBATCH, dtype=torch.int64, device=device)
        self.num_taken, self.share = math.inf, math.inf
        self.in_evaluation = False

    def rows(self, share: float, max_rows: int) -> int:
        """Return how many rows are taken.

        Args:
            share: the even one, in rows.
            max_rows: rows that there can be.
        """
        return min(math.ceil(self.factor * share), max_rows)

    @torch.no_grad()
    def record(self, rows: torch.Tensor, num_taken: int, share: float) -> None:
        """Remember what does not fit; nothing waits for the device.

        Args:
            rows: int64 [blocks], that are to be taken in each block.
            num_taken: rows that each block has.
            share: the even one, in rows.
        """
        self.num_taken, self.share = min(num_taken, self.num_taken), min(share, self.share)
        torch.maximum(self.excess, rows.amax() - num_taken, out=self.excess)

    def reset(self) -> None:
        """Forget what there was."""
        self.excess.fill_(_NO_MICROBATCH)

    def needed(self) -> float:
        """Return the factor with which every microbatch had fitted; waits for the device."""
        return (self.num_taken + int(self.excess)) / self.share


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

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Begin an evaluation that is within the capacities too. Who evaluates looks whether all
        tokens had room, and else evaluates without: no token may be left out of a loss."""
        sizes = [(capacity.num_taken, capacity.share) for _, capacity in self._layers]
        self.begin()
        for _, capacity in self._layers:
            capacity.in_evaluation = True
        try:
            yield
        finally:
            for (_, capacity), (num_taken, share) in zip(self._layers, sizes, strict=True):
                capacity.in_evaluation = False
                # Of training alone: a replayed step does not set them again.
                capacity.num_taken, capacity.share = num_taken, share

    def has_room(self) -> bool:
        """Whether all rows since `begin` had room, on all ranks; waits for the device."""
        return not float(all_reduce(self.count(), self.world))

    def count(self) -> torch.Tensor:
        """Return how many rows have no room in blocks of this rank's layers, fp64 [1]."""
        if not self._layers:
            return torch.zeros(1, dtype=torch.float64, device=self.device)
        excess = torch.stack([capacity.excess for _, capacity in self._layers])
        return excess.clamp(min=0).sum(0, keepdim=True).double()

    def fail(self) -> None:
        """Say where there was no room; every rank calls it.

        Raises:
            ValueError: always; it names the layer that needs most.
        """
        table = torch.zeros(len(self.names), 3, dtype=torch.float64, device=self.device)
        for index, capacity in self._layers:
            numbers = max(0, int(capacity.excess)), capacity.needed(), capacity.factor
            table[index] = table.new_tensor(numbers)
        rows = all_reduce(table, self.world, op="max").tolist()
        full = [(needed, excess, i) for i, (excess, needed, _) in enumerate(rows) if excess]
        needed, excess, worst = max(full)
        others_text = f" (and {len(full) - 1} more layers)" if len(full) > 1 else ""
        raise ValueError(
            f"{self.names[worst]}{others_text}: {excess:,.0f} tokens of a microbatch had no room "
            "on a rank of experts, which takes --moe-expert-rank-capacity-factor "
            f"{rows[worst][2]:g} x its even share, and {needed:.2f} x were routed to it; no weight "
            f"has changed: resume with {math.ceil(needed * 10 + 1) / 10:g} or more, or without it"
        )
