# SPDX-License-Identifier: Apache-2.0
"""Softmax statistics and gradients of a chunk of logits in plain PyTorch, in place."""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import accumulation_dtype

# Logits of a block in `fused_gradient_`, 4 MB in fp32. A quarter of it takes 1.04 to 1.16 times as
# long, four times as much 1.0 to 1.2 times (two threads, vocabularies of 4,096 and 8,192).
BLOCK_ELEMENTS = 1 << 20


def chunk_statistics(
    logits: torch.Tensor, targets: torch.Tensor, vocab_start: int, valid_columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.linear_cross_entropy.chunk_statistics`."""
    dtype = accumulation_dtype(logits.dtype)
    valid = logits[:, :valid_columns]
    if valid_columns == 0:  # all columns are padding
        zeros = torch.zeros(targets.shape, dtype=dtype, device=logits.device)
        return torch.full_like(zeros, -torch.inf), zeros, zeros.clone()
    maximum = valid.amax(-1).to(dtype)  # [t]
    # The exponentials are summed in fp32: bf16 sums would lose the tail of the vocabulary.
    sum_exp = (valid.to(dtype) - maximum[:, None]).exp_().sum(-1)
    local, inside = _local_targets(targets, vocab_start, valid_columns)
    target_logit = valid.gather(-1, local[:, None])[:, 0].to(dtype).mul_(inside)
    return maximum, sum_exp, target_logit


def chunk_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor,
    vocab_start: int,
    valid_columns: int,
) -> torch.Tensor:
    """See `ops.linear_cross_entropy.chunk_gradient_`."""
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
    """Return each target's local column (0 if it is in another slice), and whether it is local."""
    local = targets - vocab_start
    inside = (local >= 0) & (local < columns)
    return local.mul_(inside), inside


def fused_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, valid_columns: int, *, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the loss of whole rows and overwrite logits with its gradient, up to a row factor.

    The gradient is softmax - onehot times the sum of exponentials. Its two consumers are matmuls
    whose other operand is much smaller than the logits, so the caller scales that operand instead.
    Blocks of rows stay in the cache.

    Args:
        logits: [t, v], overwritten.
        targets: int64 [t].
        valid_columns: columns from here on are padding.
        gradient: whether to compute the gradient.

    Returns:
        (nll [t] in the accumulation dtype, the factor [t] that `logits` still lack, or None).
    """
    dtype = accumulation_dtype(logits.dtype)
    nll = torch.empty(targets.shape, dtype=dtype, device=logits.device)
    factor = torch.empty_like(nll)
    rows = max(1, BLOCK_ELEMENTS // logits.shape[-1])
    for block, target, out, row_factor in zip(
        *(x.split(rows) for x in (logits, targets, nll, factor)), strict=True
    ):
        valid = block[:, :valid_columns]
        maximum = valid.amax(-1, keepdim=True)
        index = target[:, None]
        target_logit = valid.gather(-1, index).sub_(maximum)[:, 0].to(dtype)
        scores = valid.sub_(maximum) if logits.dtype == dtype else valid.to(dtype) - maximum
        sum_exp = scores.exp_().sum(-1)
        torch.sub(sum_exp.log(), target_logit, out=out)
        if gradient:
            scores.scatter_add_(-1, index, sum_exp.neg()[:, None])
            torch.reciprocal(sum_exp, out=row_factor)
            if logits.dtype != dtype:
                valid.copy_(scores)
            block[:, valid_columns:].zero_()
    return nll, factor if gradient else None
