# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives: conjugate pairs, and split collectives that overlap with computation.

The backward of a conjugate pair is the conjugate of its forward's collective:

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

A split collective is a differentiable collective in two halves, with other computation in between:

    buffer = start_collective(x, collective)        starts it
    ...                                             computation that is independent of its output
    y = finish_collective(buffer, collective)       waits for it

In backward `finish_collective` starts the conjugate collective, the computation in between runs its
backward, and `start_collective` waits.

| collective | forward | backward |
|---|---|---|
| split_all_to_all(group, send, receive) | all-to-all of rows | all-to-all back |
| split_all_gather(group) | all-gather of rows | reduce-scatter |
| split_reduce_scatter(group) | reduce-scatter of rows | all-gather |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

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
class SplitCollective:
    """A collective that is started and finished once in forward, and once in backward.

    Args:
        forward, backward: start the collective, and its conjugate.
    """

    forward: Start
    backward: Start
    _pending: Pending | None = field(default=None, init=False, repr=False)

    def start(self, x: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
        """Start the collective with x and return its output buffer."""
        self._pending = (self.backward if backward else self.forward)(x)
        return self._pending.output

    def wait(self) -> torch.Tensor:
        """Wait for the started collective and return its output.

        Raises:
            ValueError: the collective was not started.
        """
        if self._pending is None:
            raise ValueError(
                "a collective was finished without being started: start it "
                "exactly once before each finish"
            )
        # Cleared first: forward and backward share this field, and a second wait is an error.
        pending, self._pending = self._pending, None
        return pending.wait()


def split_all_to_all(
    group: Group, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> SplitCollective:
    """Return the all-to-all of rows with every rank of a group.

    Args:
        send_counts, receive_counts: rows to and from each rank.
    """
    forward_counts = {"send_counts": send_counts, "receive_counts": receive_counts}
    backward_counts = {"send_counts": receive_counts, "receive_counts": send_counts}
    return SplitCollective(
        partial(all_to_all_async, group=group, **forward_counts),
        partial(all_to_all_async, group=group, **backward_counts),
    )


def split_all_gather(group: Group) -> SplitCollective:
    """Return the all-gather of all ranks' rows; the ranks' gradients are summed."""
    return SplitCollective(
        partial(all_gather_async, group=group), partial(reduce_scatter_async, group=group)
    )


def split_reduce_scatter(group: Group) -> SplitCollective:
    """Return the reduce-scatter of rows over a group."""
    return SplitCollective(
        partial(reduce_scatter_async, group=group), partial(all_gather_async, group=group)
    )


def start_collective(x: torch.Tensor, collective: SplitCollective) -> torch.Tensor:
    """Start a collective with x [n, ...]; do not read its output before `finish_collective`."""
    return apply_function(_Start, x, collective)


def finish_collective(buffer: torch.Tensor, collective: SplitCollective) -> torch.Tensor:
    """Wait for a collective that `start_collective` started, and return its output."""
    return apply_function(_Finish, buffer, collective)


def run_collective(x: torch.Tensor, collective: SplitCollective) -> torch.Tensor:
    """Start and finish a collective at once."""
    return finish_collective(start_collective(x, collective), collective)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, collective):
        ctx.collective = collective
        return collective.start(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.collective.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, collective):
        ctx.collective = collective
        # On one rank the output is the input, which has its own autograd history.
        return collective.wait().detach()

    @staticmethod
    def backward(ctx, grad):
        # Starts here and not in `_Start`, so that it overlaps the backward in between.
        ctx.collective.start(grad, backward=True)
        # A placeholder of the buffer's shape: `_Start.backward` returns the actual gradient.
        return grad, None


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, whose gradient is the sum of the gradients of all ranks."""
    return x if group.size == 1 else apply_function(_Copy, x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of `x` over the group; the gradient passes unchanged."""
    return x if group.size == 1 else apply_function(_Reduce, x, group)


def scatter_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's rows of `x` [n, ...]: [n/size, ...]."""
    return x if group.size == 1 else apply_function(_Scatter, x, group)


def gather_from_group(
    x: torch.Tensor, group: Group, *, partial_gradient: bool = False
) -> torch.Tensor:
    """Return the rows of all ranks, [n·size, ...].

    Args:
        partial_gradient: True if each rank's gradient is a partial sum (the consumer differs by
            rank): backward is then a reduce-scatter; False if every rank has the full gradient.
    """
    return x if group.size == 1 else apply_function(_Gather, x, group, partial_gradient)


def reduce_scatter_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's rows of the sum of `x` [n, ...] over the group: [n/size, ...]."""
    return x if group.size == 1 else apply_function(_ReduceScatter, x, group)


def own_rows(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a view of this rank's rows of dimension 0. Raises ValueError if they are uneven."""
    if x.shape[0] % group.size:
        raise ValueError(
            f"{x.shape[0]} rows do not divide over the {group.size} ranks of {group.name}: "
            "choose a sequence length that does"
        )
    rows = x.shape[0] // group.size
    return x[group.rank * rows : (group.rank + 1) * rows]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        # A copy, so that the full tensor is freed.
        return own_rows(x, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return all_gather(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, partial: bool) -> torch.Tensor:
        ctx.group, ctx.partial = group, partial
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        # Each rank has a partial sum of the gradient; else every rank has the full gradient.
        if ctx.partial:
            return reduce_scatter(grad, ctx.group), None, None
        return own_rows(grad, ctx.group).contiguous(), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        return all_gather(grad, ctx.group), None
