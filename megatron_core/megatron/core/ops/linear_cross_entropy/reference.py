# SPDX-License-Identifier: Apache-2.0
"""Softmax statistics and gradient of one slice of the vocabulary, in plain torch.

The projection to the vocabulary fused with its loss: gradients while a chunk is there.
"""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype, matmul_dtype
from megatron.core.ops.wide_product import add_product_

# Bytes of one chunk of fp32 logits: small against the model, large enough for the matmul and for
# the weight gradient, which is read and written once a chunk. A GPU wants thousands of rows in a
# product: with t of them, going over a fp32 gradient once each way takes 210 / t of what the three
# products take at an H200's bandwidth and 750 TFLOP/s in bf16, a quarter at 800 rows and 6 % at
# 3,500, which is what these bytes give at 152,000 words (half of them where logits are bf16).
CHUNK_BYTES, GPU_CHUNK_BYTES = 16 << 20, 2 << 30


class LinearCrossEntropy(torch.autograd.Function):
    """loss = sum over tokens of weight * (lse(hidden W^T) - logit of the target).

    Forward: as above, and at once, while a chunk of logits is there, dgrad: dlogits W, and wgrad:
    dlogits^T hidden. Saves those two gradients; backward multiplies them by the incoming one.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, weights, chunk_tokens, valid_columns, gradient_):
        wide = accumulation_dtype(hidden.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        fast = matmul_dtype(hidden)
        matrix = weight.to(fast)
        nll = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        if needs_weight:
            make = torch.empty if len(hidden) else torch.zeros
            grad_weight = make(weight.shape, dtype=wide, device=weight.device)
        size = min(chunk_tokens, hidden.shape[0])
        buffer = torch.empty((size, weight.shape[0]), dtype=fast, device=hidden.device)
        for first in range(0, hidden.shape[0], chunk_tokens):
            part = slice(first, first + chunk_tokens)
            rows = hidden[part].to(fast)
            logits = torch.mm(rows, matrix.t(), out=buffer[: rows.shape[0]])  # [c, v]
            needs = needs_hidden or needs_weight
            nll[part], factor = gradient_(logits, targets[part], valid_columns, gradient=needs)
            if not needs:
                continue
            factor = factor.mul_(weights[part])[:, None]
            if needs_hidden:
                grad_hidden[part] = torch.mm(logits, matrix).mul_(factor)
            scaled = (rows * factor).to(fast)
            if needs_weight:
                add_product_(grad_weight, logits.t(), scaled, overwrite=first == 0)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.hidden_dtype, ctx.weight_dtype = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(nll)
        return torch.dot(nll, weights.to(wide)), nll

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        # Reading the value costs a synchronisation on a GPU, and saves two passes on a CPU.
        if grad_loss.device.type != "cpu" or grad_loss.item() != 1:
            grad_hidden = None if grad_hidden is None else grad_hidden * grad_loss
            grad_weight = None if grad_weight is None else grad_weight * grad_loss
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(ctx.hidden_dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


# Logits done at once in `fused_gradient_`, 4 MB in fp32: a quarter of it takes 1.04 to 1.16 times
# as long, four times as much 1.0 to 1.2 times (two threads, vocabularies of 4,096 and 8,192).
ELEMENTS_IN_CACHE = 1 << 20


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


def fused_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, valid_columns: int, *, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the loss of whole rows and overwrite logits by its gradient, up to a row factor.

    The gradient softmax - onehot is left multiplied by the sum of exponentials: its two consumers
    are matrix products whose other operand is far narrower, so they scale that instead. Rows go
    through in groups that stay in the cache.

    Args:
        logits: [t, v], overwritten.
        targets: int64 [t].
        valid_columns: columns from here on are padding.
        gradient: also make the gradient.

    Returns:
        (nll [t] in the accumulation dtype, the factor [t] that `logits` still needs, or None).
    """
    wide = accumulation_dtype(logits.dtype)
    nll = torch.empty(targets.shape, dtype=wide, device=logits.device)
    factor = torch.empty_like(nll)
    rows = max(1, ELEMENTS_IN_CACHE // logits.shape[-1])
    for part, target, out, row_factor in zip(
        *(x.split(rows) for x in (logits, targets, nll, factor)), strict=True
    ):
        valid = part[:, :valid_columns]
        maximum = valid.amax(-1, keepdim=True)
        index = target[:, None]
        picked = valid.gather(-1, index).sub_(maximum)[:, 0].to(wide)
        scores = valid.sub_(maximum) if logits.dtype == wide else valid.to(wide) - maximum
        total = scores.exp_().sum(-1)
        torch.sub(total.log(), picked, out=out)
        if gradient:
            scores.scatter_add_(-1, index, total.neg()[:, None])
            torch.reciprocal(total, out=row_factor)
            if logits.dtype != wide:
                valid.copy_(scores)
            part[:, valid_columns:].zero_()
    return nll, factor if gradient else None
