# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives: conjugate pairs, and split ones that overlap with computation.

In a conjugate pair backward runs the conjugate of forward's collective:

| function | forward | backward |
|---|---|---|
| copy_to_group | identity | all-reduce (sum) |
| reduce_from_group | all-reduce (sum) | identity |
| scatter_to_group | this rank's rows | all-gather |
| gather_from_group | all-gather rows | this rank's rows |
| gather_from_group(partial_gradient=True) | all-gather rows | reduce-scatter |
| reduce_scatter_to_group | reduce-scatter rows | all-gather |

Rows are dimension 0. Source of the pairs: Shoeybi et al. 2019, section 3 (f, g); Korthikanti et al.
2022, section 4.2 (g, g-bar for sequence parallelism). Each is the identity on a group of one rank.

A flight is a differentiable collective in two halves, with other computation in between:

    buffer = depart(x, flight)      starts it
    ...                             computation that does not need it
    y = arrive(buffer, flight)      waits for it

In backward `arrive` starts the conjugate collective, the computation in between runs its backward,
and `depart` waits.

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
from torch.autograd.function import FunctionCtx

from megatron.core.comm.collectives import (
    Pending,
    all_gather,
    all_gather_async,
    all_reduce,
    all_to_all_async,
    reduce_scatter,
    reduce_scatter_async,
)
from megatron.core.ops.backend_choice import apply_function
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
    forward_counts = {"send_counts": send_counts, "receive_counts": receive_counts}
    back = {"send_counts": receive_counts, "receive_counts": send_counts}
    return Flight(
        partial(all_to_all_async, group=group, **forward_counts),
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
    return apply_function(_Depart, x, flight)


def arrive(buffer: torch.Tensor, flight: Flight) -> torch.Tensor:
    """Return the rows of a flight that `depart` has started."""
    return apply_function(_Arrive, buffer, flight)


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


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, whose gradient is the sum of the gradients of all ranks."""
    return x if group.size == 1 else apply_function(_Copy, x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of `x` over the group; the gradient passes unchanged."""
    return x if group.size == 1 else apply_function(_Reduce, x, group)


def scatter_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's share of the rows of `x` [n, ...]: [n/size, ...]."""
    return x if group.size == 1 else apply_function(_Scatter, x, group)


def gather_from_group(
    x: torch.Tensor, group: Group, *, partial_gradient: bool = False
) -> torch.Tensor:
    """Return the rows of all ranks, [n·size, ...].

    Args:
        partial_gradient: True where each rank's gradient is one addend of the whole (the consumer
            differs by rank): backward is then a reduce-scatter; False where it is already whole on
            every rank.
    """
    return x if group.size == 1 else apply_function(_Gather, x, group, partial_gradient)


def reduce_scatter_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's rows of the sum of `x` [n, ...] over the group: [n/size, ...]."""
    return x if group.size == 1 else apply_function(_ReduceScatter, x, group)


def own_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a view of this rank's share of dimension 0. Raises ValueError if it is uneven."""
    if x.shape[0] % group.size:
        raise ValueError(
            f"{x.shape[0]} rows do not divide over the {group.size} ranks of {group.name}: "
            "choose a sequence length that does"
        )
    rows = x.shape[0] // group.size
    return x[group.rank * rows : (group.rank + 1) * rows]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor):
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor):
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return own_rows(x, group).clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor):
        return all_gather(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: Group, partial: bool) -> torch.Tensor:
        ctx.group, ctx.partial = group, partial
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor):
        if ctx.partial:
            return reduce_scatter(grad, ctx.group), None, None
        return own_rows(grad, ctx.group).contiguous(), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor):
        return all_gather(grad, ctx.group), None
