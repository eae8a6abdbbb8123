# SPDX-License-Identifier: Apache-2.0
"""The equation of the cross entropy of a linear layer's logits."""

import torch


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights · nll, nll [t]), nll[t] = log sum_v exp(logit[t, v]) - logit[t, target[t]].

    The logits are hidden Wᵀ for hidden [t, h] and weight W [v, h].
    """
    logits = hidden @ weight.t()
    nll = logits.exp().sum(-1).log() - logits.gather(-1, targets[:, None])[:, 0]
    return (weights * nll).sum(), nll
