# SPDX-License-Identifier: Apache-2.0
"""Which experts tokens go to, and which of them an expert of limited capacity takes."""

from __future__ import annotations

import torch

from megatron.core.moe.config import RouterConfig


def chosen_experts(
    scores: torch.Tensor, config: RouterConfig, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the k experts of each token with the highest score + bias, int64 [t, k].

    Args:
        scores: fp32 [t, E].
        bias: fp32 [E].
    """
    if bias is not None:
        scores = scores + bias
    if config.num_groups is not None:
        assert config.group_topk is not None
        grouped = scores.view(len(scores), config.num_groups, -1)  # [t, groups, E/groups]
        best = grouped.topk(config.group_candidates, dim=-1).values.sum(-1)  # [t, groups]
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, best.topk(config.group_topk, dim=-1).indices, True)
        scores = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
    return scores.topk(config.topk, dim=-1).indices


def within_capacity(
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    capacity: int,
    policy: str,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which places their experts take, at most `capacity` each, bool [t, k].

    Args:
        experts: int64 [t, k].
        weights: fp32 [t, k].
        policy: "probs" takes the places of the highest weight, "position" the first ones; among
            equal ones the first.
        real: bool [t]; padding takes no room and is taken by none. None is all True.
    """
    order = torch.arange(experts.numel(), device=experts.device)
    if policy == "probs":
        order = weights.flatten().argsort(descending=True, stable=True)
    wanted = experts.flatten()
    if real is not None:  # behind all others
        wanted = wanted.where(real.repeat_interleave(experts.shape[1]), experts.numel())
    order = order[wanted[order].argsort(stable=True)]  # by expert
    sorted_experts = wanted[order]
    first = torch.searchsorted(sorted_experts, sorted_experts)  # where each one's expert begins
    ranks = torch.arange(len(order), device=order.device) - first
    kept = torch.empty_like(ranks, dtype=torch.bool)
    kept[order] = ranks < capacity
    kept = kept.view(experts.shape)
    return kept if real is None else kept & real.unsqueeze(1)
