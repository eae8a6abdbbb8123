# SPDX-License-Identifier: Apache-2.0
"""Noting: a link that says when each collective starts and when it is waited for, and marks between
them in forward and backward."""

from __future__ import annotations

import torch

from megatron.core.comm.collectives import CollectiveWork, Transfer


class Noting:
    """Carry collectives as usual and note them in `events`: "start 3", "wait 3"."""

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
        return _Noted(transfer.start(), self.events, number)

    def around(self, mark: str) -> list[str]:
        """Return the kinds of the collectives that were under way at a mark."""
        at, found = self.events.index(mark), []
        for number, kind in enumerate(self.kinds):
            if self.events.index(f"start {number}") < at < self.events.index(f"wait {number}"):
                found.append(kind)
        return found


class _Noted:
    def __init__(self, work: CollectiveWork, events: list[str], number: int) -> None:
        self._work, self._events, self._number = work, events, number

    def wait(self) -> None:
        self._events.append(f"wait {self._number}")
        self._work.wait()


def marked(x: torch.Tensor, events: list[str], mark: str) -> torch.Tensor:
    """Return x; note "mark" now and "mark back" when its gradient arrives."""
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
