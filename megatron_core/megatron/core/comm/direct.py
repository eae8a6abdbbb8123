# SPDX-License-Identifier: Apache-2.0
"""Collectives between CPUs as sends and receives: every rank to every rank at once.

Gloo's own gather copies through a buffer and its scatter goes round in a ring; a direct exchange
moves the same bytes in about half the time on one machine. Sums are taken in the order of ranks.
Gloo's all-reduce is as fast as both together, and stays.

Several exchanges may be under way on one communicator: messages between two ranks arrive in the
order in which they were sent, and all ranks start exchanges in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.process_groups import Group

#: Below this gloo's ring or tree is as fast; above this many ranks a rank has too many messages.
LEAST_BYTES, MOST_RANKS = 1 << 20, 16
_TAG = 0


def goes_directly(wide: torch.Tensor, group: Group) -> bool:
    """Whether a collective whose wide side is `wide` is better exchanged directly."""
    return (
        wide.device.type == "cpu"
        and group.size <= MOST_RANKS
        and wide.numel() * wide.element_size() >= LEAST_BYTES
    )


@dataclass(slots=True)
class Gather:
    """An all-gather under way: what every rank holds arrives in its part of the output."""

    works: list[dist.Work]

    @staticmethod
    def start(handle: dist.ProcessGroup, group: Group, *, parts: Sequence[torch.Tensor]) -> Gather:
        """Send this rank's part, one of `parts` by rank, and receive the others."""
        works = []
        for step in range(1, group.size):
            after, before = (group.rank + step) % group.size, (group.rank - step) % group.size
            works += _send(handle, parts[group.rank], after)
            works += _receive(handle, parts[before], before)
        return Gather(works)

    def wait(self) -> None:
        """Block until all parts are here and this rank's has left."""
        for work in self.works:
            work.wait()


@dataclass(slots=True)
class Scatter:
    """A reduce-scatter under way: addends of this rank's part arrive, and are summed in `out`.

    Args:
        addends: by rank; this rank's own may overlap `out`, in place.
    """

    works: list[dist.Work]
    addends: list[torch.Tensor]
    rank: int
    out: torch.Tensor

    @staticmethod
    def start(
        handle: dist.ProcessGroup, group: Group, *, parts: Sequence[torch.Tensor], out: torch.Tensor
    ) -> Scatter:
        """Send every rank its part of this rank's tensor, and receive addends of `out`."""
        own = parts[group.rank]
        addends = [own if r == group.rank else torch.empty_like(own) for r in range(group.size)]
        works = []
        for step in range(1, group.size):
            after, before = (group.rank + step) % group.size, (group.rank - step) % group.size
            works += _send(handle, parts[after], after)
            works += _receive(handle, addends[before], before)
        return Scatter(works, addends, group.rank, out)

    def wait(self) -> None:
        """Block until the sum is complete and everything sent has left."""
        for work in self.works:
            work.wait()
        # `out` may be this rank's addend: nothing is written there before that one is added.
        total, last = self.addends[0], len(self.addends) - 1
        for rank in range(1, last + 1):
            target = self.out if rank >= self.rank else self.addends[0]
            total = torch.add(total, self.addends[rank], out=target)


def _send(handle: dist.ProcessGroup, part: torch.Tensor, rank: int) -> list[dist.Work]:
    return [handle.send([part], rank, _TAG)] if part.numel() else []


def _receive(handle: dist.ProcessGroup, part: torch.Tensor, rank: int) -> list[dist.Work]:
    return [handle.recv([part], rank, _TAG)] if part.numel() else []
