# SPDX-License-Identifier: Apache-2.0
"""RankCapacity: in training, expert ranks receive a fixed number of rows instead of counting them.

The even share of a rank is its number of rows under uniform routing: with t tokens per rank, k
experts per token and ep expert shards, t · k / ep rows from each rank. A rank receives a factor
times its even share, so the host knows all sizes without waiting for the device. Rows that exceed
the capacity are dropped, which only the device knows. Every step therefore adds
`CapacityCheck.count`, which is 0 if no row was dropped, to the sums that it reduces anyway. If the
sum is not 0, the step raises on every rank before a weight changes. An evaluation is recomputed
without a capacity.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron.core.comm import all_reduce
from megatron.core.process_groups import Group

#: `excess` before the first microbatch: less than any number of rows.
_NO_MICROBATCH = -(1 << 62)


class RankCapacity:
    """Capacity of a rank for one layer's rows, and the largest demand so far.

    Args:
        factor: capacity as a multiple of the even share.

    Attributes:
        excess: int64 scalar, the largest number of rows of a block in a microbatch since `reset`,
            minus the rows that the block holds.
        room, share: rows that a block holds, and the even share; the smallest values if
            microbatches have several shapes.
        in_evaluation: also limit microbatches without samples; see `CapacityCheck.evaluation`.
    """

    def __init__(self, factor: float, device: torch.device | str = "cpu") -> None:
        self.factor = factor
        self.excess = torch.full((), _NO_MICROBATCH, dtype=torch.int64, device=device)
        self.room, self.share = math.inf, math.inf
        self.in_evaluation = False

    def rows(self, share: float, max_rows: int) -> int:
        """Return the capacity in rows.

        Args:
            share: the even share, in rows.
            max_rows: largest possible number of rows.
        """
        return min(math.ceil(self.factor * share), max_rows)

    @torch.no_grad()
    def record(self, rows: torch.Tensor, room: int, share: float) -> None:
        """Record the demand of a microbatch without waiting for the device.

        Args:
            rows: int64 [blocks], demand of each block.
            room: rows that each block holds.
            share: the even share, in rows.
        """
        self.room, self.share = min(room, self.room), min(share, self.share)
        torch.maximum(self.excess, rows.amax() - room, out=self.excess)

    def reset(self) -> None:
        """Forget the recorded demand."""
        self.excess.fill_(_NO_MICROBATCH)

    def needed(self) -> float:
        """Return the factor that would fit every microbatch so far; waits for the device."""
        return (self.room + int(self.excess)) / self.share


class CapacityCheck:
    """Check after a step whether any row exceeded a capacity.

    Args:
        capacities: capacities of this rank's layers, by name.
        names: names of all layers with experts, in order, for error messages; the same on every
            rank.
        world: all ranks.
        device: this rank's device.
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
        """Start a step."""
        for _, capacity in self._layers:
            capacity.reset()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Apply the capacities to an evaluation.

        The caller checks `has_room` and otherwise evaluates again without capacities, because a
        loss must not omit a token.
        """
        sizes = [(capacity.room, capacity.share) for _, capacity in self._layers]
        self.begin()
        for _, capacity in self._layers:
            capacity.in_evaluation = True
        try:
            yield
        finally:
            for (_, capacity), (room, share) in zip(self._layers, sizes, strict=True):
                capacity.in_evaluation = False
                # Training's values: a replayed step does not set them again.
                capacity.room, capacity.share = room, share

    def has_room(self) -> bool:
        """Return whether no rank dropped a row since `begin`; waits for the device."""
        return not float(all_reduce(self.count(), self.world))

    def count(self) -> torch.Tensor:
        """Return the sum over this rank's layers of the largest excess of a block, fp64 [1].

        It is 0 exactly if no row was dropped.
        """
        if not self._layers:
            return torch.zeros(1, dtype=torch.float64, device=self.device)
        excess = torch.stack([capacity.excess for _, capacity in self._layers])
        return excess.clamp(min=0).sum(0, keepdim=True).double()

    def fail(self) -> None:
        """Raise an error that names the layer with the largest demand; every rank calls it.

        Raises:
            ValueError: always.
        """
        table = torch.zeros(len(self.names), 3, dtype=torch.float64, device=self.device)
        for index, capacity in self._layers:
            demand = max(0, int(capacity.excess)), capacity.needed(), capacity.factor
            table[index] = table.new_tensor(demand)
        demands = all_reduce(table, self.world, op="max").tolist()
        full = [(needed, excess, i) for i, (excess, needed, _) in enumerate(demands) if excess]
        needed, excess, worst = max(full)
        others_text = f" (and {len(full) - 1} more layers)" if len(full) > 1 else ""
        raise ValueError(
            f"{self.names[worst]}{others_text}: {excess:,.0f} tokens of a microbatch exceeded "
            "the capacity of an expert rank, which is --moe-expert-rank-capacity-factor "
            f"{demands[worst][2]:g} x its even share, but {needed:.2f} x were routed to it; no "
            f"weight has changed: resume with {math.ceil(needed * 10 + 1) / 10:g} or more, or "
            "without the option"
        )
