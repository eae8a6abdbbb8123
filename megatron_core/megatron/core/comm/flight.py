# SPDX-License-Identifier: Apache-2.0
"""Flight: a differentiable collective in two halves, with something else computed in between.

    buffer = depart(x, flight)      starts it
    ...                             whatever does not need it
    y = arrive(buffer, flight)      waits for it

Backward goes the other way round: at `arrive` the conjugate collective starts, and what was
computed in between has its backward before `depart` waits for it.

| flight | forward | backward |
|---|---|---|
| exchange(group, send, receive) | all-to-all of rows | all-to-all back |
| gather(group) | all-gather of rows | reduce-scatter |
| scatter(group) | reduce-scatter of rows | all-gather |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from megatron.core.comm.collectives import (
    all_gather_async,
    all_to_all_async,
    reduce_scatter_async,
)
from megatron.core.comm.transfer import Pending
from megatron.core.process_groups import Group

Start = Callable[[torch.Tensor], Pending]


@dataclass(eq=False)
class Flight:
    """A collective that departs and arrives once in forward, and once in backward.

    Args:
        forward, backward: start it, and its conjugate.
    """

    forward: Start
    backward: Start
    _pending: Pending | None = field(default=None, init=False, repr=False)

    def start(self, x: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Start it with x and return where the result will be."""
        self._pending = (self.backward if back else self.forward)(x)
        return self._pending.output

    def land(self) -> torch.Tensor:
        """Wait for what is under way and return it.

        Raises:
            ValueError: nothing is.
        """
        if self._pending is None:
            raise ValueError("a flight arrives that has not departed: depart once per arrival")
        pending, self._pending = self._pending, None
        return pending.wait()


def exchange(group: Group, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Flight:
    """Return the exchange of so many rows with every rank of a group."""
    there = {"send_counts": send_counts, "receive_counts": receive_counts}
    back = {"send_counts": receive_counts, "receive_counts": send_counts}
    return Flight(
        partial(all_to_all_async, group=group, **there),
        partial(all_to_all_async, group=group, **back),
    )


def gather(group: Group) -> Flight:
    """Return the gathering of all ranks' rows, whose gradients are addends."""
    return Flight(
        partial(all_gather_async, group=group), partial(reduce_scatter_async, group=group)
    )


def scatter(group: Group) -> Flight:
    """Return the summing of rows over a group, each rank's part of which goes to it."""
    return Flight(
        partial(reduce_scatter_async, group=group), partial(all_gather_async, group=group)
    )


def depart(x: torch.Tensor, flight: Flight) -> torch.Tensor:
    """Start a flight with x [n, ...]; what is returned must not be read before `arrive`."""
    return _Depart.apply(x, flight)


def arrive(buffer: torch.Tensor, flight: Flight) -> torch.Tensor:
    """Return the rows of a flight that `depart` has started."""
    return _Arrive.apply(buffer, flight)


def direct(x: torch.Tensor, flight: Flight) -> torch.Tensor:
    """Return the rows of a flight, with nothing in between."""
    return arrive(depart(x, flight), flight)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flight):
        ctx.flight = flight
        return flight.start(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.flight.land(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, flight):
        ctx.flight = flight
        return flight.land().detach()  # on one rank it is what departed, which has its own history

    @staticmethod
    def backward(ctx, grad):
        ctx.flight.start(grad, back=True)
        return grad, None  # a stand-in of the buffer's shape; `depart` returns what arrives
