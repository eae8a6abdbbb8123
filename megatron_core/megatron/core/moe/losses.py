# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of a router, and how they get into the gradient.

    balance   E / (k · T²) · sum over experts of (its tokens) · (sum of its shares of scores)
    z         mean over tokens of logsumexp(logits)²

Each is over a set of T tokens that several ranks hold: the numbers of tokens are summed over them,
and what a rank computes is its tokens' part, so that the parts of all ranks add up to the loss.
"""

from __future__ import annotations

import torch


def tokens_of_experts(
    experts: torch.Tensor,
    num_experts: int,
    *,
    sets: torch.Tensor | None = None,
    num_sets: int = 1,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count the tokens of each set that go to each expert, fp32 [sets, E].

    Args:
        experts: int64 [t, k].
        sets: int64 [t], the number of each token's set; None is one set.
        real: bool [t]; padding does not count. None is all True.
    """
    places = experts if sets is None else experts + num_experts * sets.unsqueeze(1)
    ones = torch.ones(experts.numel(), device=experts.device)
    if real is not None:
        ones = real.float().repeat_interleave(experts.shape[1])
    counts = torch.zeros(num_sets * num_experts, device=experts.device)
    return counts.index_add_(0, places.flatten(), ones).view(num_sets, num_experts)


def balance_loss(
    shares: torch.Tensor, counts: torch.Tensor, *, topk: int, sets: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's part of the mean over sets of the balance loss, a scalar.

    Args:
        shares: fp32 [t, E], each token's scores, adding up to 1; zeros for padding.
        counts: fp32 [sets, E], of all ranks.
        sets: as in `tokens_of_experts`.
    """
    num_sets, num_experts = counts.shape
    if sets is None:
        sums = shares.sum(0, keepdim=True)
    else:
        sums = shares.new_zeros(num_sets, num_experts).index_add(0, sets, shares)
    tokens = (counts.sum(-1, keepdim=True) / topk).clamp(min=1.0)  # [sets, 1]
    return (counts * sums / tokens.square()).sum() * (num_experts / (topk * num_sets))


def z_loss(
    logits: torch.Tensor, tokens: torch.Tensor, *, real: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's part of the mean of the squared log-sum-exp of logits [t, E], a scalar.

    Args:
        tokens: of all ranks, a scalar.
        real: bool [t]; padding does not count. None is all True.
    """
    squares = logits.logsumexp(-1).square()
    if real is not None:
        squares = squares * real
    return squares.sum() / tokens.clamp(min=1.0)


def carry(x: torch.Tensor, loss: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return x, through which factor · loss takes part in whatever is differentiated."""
    return _Carry.apply(x, loss, factor)


class _Carry(torch.autograd.Function):
    """forward x; dgrad of x as it comes, of the loss the factor. Saves the factor."""

    @staticmethod
    def forward(ctx, x, loss, factor):
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad, factor, None
