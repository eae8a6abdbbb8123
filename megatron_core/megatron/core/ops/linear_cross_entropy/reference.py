# SPDX-License-Identifier: Apache-2.0
"""Softmax statistics and gradient of one slice of the vocabulary, in plain torch."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype


def chunk_statistics(
    logits: torch.Tensor, targets: torch.Tensor, vocab_start: int, valid_columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute maximum, sum of exponentials and target logit; see the package."""
    wide = accumulation_dtype(logits.dtype)
    valid = logits[:, :valid_columns]
    if valid_columns == 0:  # a slice of nothing but padding
        zeros = torch.zeros(targets.shape, dtype=wide, device=logits.device)
        return torch.full_like(zeros, -torch.inf), zeros, zeros.clone()
    maximum = valid.amax(-1).to(wide)  # [t]
    # The exponentials exist once, in fp32: bf16 sums would lose the tail of the vocabulary.
    sum_exp = (valid.to(wide) - maximum[:, None]).exp_().sum(-1)
    local, inside = _local_targets(targets, vocab_start, valid_columns)
    target_logit = valid.gather(-1, local[:, None])[:, 0].to(wide).mul_(inside)
    return maximum, sum_exp, target_logit


def chunk_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor,
    vocab_start: int,
    valid_columns: int,
) -> torch.Tensor:
    """Overwrite logits with (softmax - onehot) * weight; see the package."""
    if valid_columns == 0:
        return logits.zero_()
    valid = logits[:, :valid_columns]
    if logits.dtype == lse.dtype:
        probability = valid.sub_(lse[:, None]).exp_()
    else:
        probability = (valid.to(lse.dtype) - lse[:, None]).exp_()
    probability.mul_(weights[:, None])
    local, inside = _local_targets(targets, vocab_start, valid_columns)
    probability.scatter_add_(-1, local[:, None], -(weights * inside)[:, None])
    if logits.dtype != lse.dtype:
        valid.copy_(probability)
    logits[:, valid_columns:].zero_()
    return logits


def _local_targets(
    targets: torch.Tensor, vocab_start: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the column of each target, 0 for those elsewhere, and whether it is here."""
    local = targets - vocab_start
    inside = (local >= 0) & (local < columns)
    return local.mul_(inside), inside
