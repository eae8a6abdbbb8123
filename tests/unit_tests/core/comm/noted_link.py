# SPDX-License-Identifier: Apache-2.0
"""RecordingLink records when each collective starts and when it is waited for.

`marked` records events between the collectives, in forward and in backward.
"""

from __future__ import annotations

import torch

from megatron.core.comm.collectives import CollectiveWork, Transfer


class RecordingLink:
    """Run collectives as usual and record them in `events`: "start 3", "wait 3"."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.kinds = events, list[str]()

    @property
    def count(self) -> int:
        return len(self.kinds)

    def __call__(self, transfer: Transfer) -> CollectiveWork:
        """Start a collective."""
        number = len(self.kinds)
        self.kinds.append(transfer.kind)
        self.events.append(f"start {number}")
        return _RecordingWork(transfer.start(), self.events, number)

    def around(self, mark: str) -> list[str]:
        """Return the kinds of the collectives that are in flight at `mark`."""
        mark_index, kinds_in_flight = self.events.index(mark), []
        for number, kind in enumerate(self.kinds):
            start, wait = self.events.index(f"start {number}"), self.events.index(f"wait {number}")
            if start < mark_index < wait:
                kinds_in_flight.append(kind)
        return kinds_in_flight


class _RecordingWork:
    def __init__(self, work: CollectiveWork, events: list[str], number: int) -> None:
        self._work, self._events, self._number = work, events, number

    def wait(self) -> None:
        self._events.append(f"wait {self._number}")
        self._work.wait()


def marked(x: torch.Tensor, events: list[str], mark: str) -> torch.Tensor:
    """Return x; record "mark" now and "mark back" when the gradient of x arrives."""
    return _Mark.apply(x, events, mark)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, events, mark):
        ctx.events, ctx.mark = events, mark
        events.append(mark)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append(f"{ctx.mark} back")
        return grad, None, None
