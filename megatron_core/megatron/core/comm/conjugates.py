# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives in conjugate pairs: what a forward does, its backward undoes.

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
"""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx

from megatron.core.comm.collectives import all_gather, all_reduce, reduce_scatter
from megatron.core.process_groups import Group


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, whose gradient is the sum of the gradients of all ranks."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of `x` over the group; the gradient passes unchanged."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def scatter_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's share of the rows of `x` [n, ...]: [n/size, ...]."""
    return x if group.size == 1 else _Scatter.apply(x, group)


def gather_from_group(
    x: torch.Tensor, group: Group, *, partial_gradient: bool = False
) -> torch.Tensor:
    """Return the rows of all ranks, [n·size, ...].

    Args:
        partial_gradient: True where each rank's gradient is one addend of the whole (the consumer
            differs by rank): backward is then a reduce-scatter; False where it is already whole on
            every rank.
    """
    return x if group.size == 1 else _Gather.apply(x, group, partial_gradient)


def reduce_scatter_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's rows of the sum of `x` [n, ...] over the group: [n/size, ...]."""
    return x if group.size == 1 else _ReduceScatter.apply(x, group)


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
