# SPDX-License-Identifier: Apache-2.0
"""Projection to the vocabulary and cross entropy, one chunk of fp32 logits at a time."""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import (
    accumulation_dtype,
    add_product_,
    apply_function,
    choose,
    matmul_dtype,
)
from megatron.core.ops.linear_cross_entropy import cpu

__all__ = [
    "chunk_gradient_",
    "chunk_statistics",
    "fused_gradient_",
    "linear_cross_entropy",
    "tokens_per_chunk",
]


def chunk_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_start: int,
    valid_columns: int,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the softmax statistics of one vocabulary slice for a chunk of tokens.

    The statistics of all slices combine to M = max of maxima, lse = M + log(sum of sum_exp *
    exp(maximum - M)), target = sum of target_logit.

    Args:
        logits: [t, v/tp].
        targets: int64 [t], global token ids.
        vocab_start: global id of column 0.
        valid_columns: columns from here on are padding and are excluded.

    Returns:
        fp32 (maximum [t], sum_exp [t] = sum of exp(logit - maximum), target_logit [t], 0 if the
        target is in another slice).

    Raises:
        ValueError: shapes or `valid_columns` that do not fit.
    """
    _check_chunk("chunk_statistics", logits, targets, valid_columns)
    if choose(implementation, logits, "chunk_statistics") == "triton":
        from megatron.core.ops.linear_cross_entropy import triton as kernels

        return kernels.chunk_statistics(logits, targets, vocab_start, valid_columns)
    return cpu.chunk_statistics(logits, targets, vocab_start, valid_columns)


def chunk_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor,
    *,
    vocab_start: int,
    valid_columns: int,
    implementation: str | None = None,
) -> torch.Tensor:
    """Overwrite logits with the gradient of sum(weights * nll): (softmax - onehot) * weight.

    Args:
        logits: [t, v/tp], overwritten.
        targets: int64 [t], global token ids.
        lse: fp32 [t], log-sum-exp over the whole vocabulary.
        weights: fp32 [t].
        vocab_start: global id of column 0.
        valid_columns: columns from here on are padding: their gradient is exactly 0.

    Returns:
        `logits`, in its dtype; the arithmetic is fp32.

    Raises:
        ValueError: shapes or `valid_columns` that do not fit.
    """
    _check_chunk("chunk_gradient_", logits, targets, valid_columns)
    if lse.shape != targets.shape or weights.shape != targets.shape:
        raise ValueError(
            f"chunk_gradient_: lse {tuple(lse.shape)} and weights {tuple(weights.shape)} must be"
            f" [t] = {tuple(targets.shape)}"
        )
    if choose(implementation, logits, "chunk_gradient_") == "triton":
        from megatron.core.ops.linear_cross_entropy import triton as kernels

        return kernels.chunk_gradient_(logits, targets, lse, weights, vocab_start, valid_columns)
    return cpu.chunk_gradient_(logits, targets, lse, weights, vocab_start, valid_columns)


def fused_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    valid_columns: int,
    gradient: bool,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the loss over a whole vocabulary and overwrite logits with its gradient, in one pass.

    The gradient (softmax - onehot) may lack a factor per row, which the caller applies to a smaller
    tensor.

    Args:
        logits: [t, v], overwritten.
        targets: int64 [t].
        valid_columns: columns from here on are padding: their gradient is exactly 0.
        gradient: whether to compute the gradient; without it `logits` are undefined afterwards.

    Returns:
        (nll fp32 [t], the factor fp32 [t] or None without `gradient`).

    Raises:
        ValueError: shapes or `valid_columns` that do not fit.
    """
    _check_chunk("fused_gradient_", logits, targets, valid_columns)
    by_device = implementation or not logits.is_cpu
    if by_device and choose(implementation, logits, "fused_gradient_") == "triton":
        from megatron.core.ops.linear_cross_entropy import triton as kernels

        return kernels.fused_gradient_(logits, targets, valid_columns, gradient=gradient)
    return cpu.fused_gradient_(logits, targets, valid_columns, gradient=gradient)


def tokens_per_chunk(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens in a chunk of fp32 logits, a multiple of 64."""
    chunk_bytes = GPU_CHUNK_BYTES if device.type == "cuda" else CHUNK_BYTES
    tokens = chunk_bytes // (4 * max(vocabulary, 1))
    return max(64, tokens // 64 * 64)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    chunk_tokens: int | None = None,
    valid_columns: int | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute sum(weights * cross entropy of hidden W^T), a chunk of tokens at a time.

    Forward also computes both gradients while a chunk of logits exists, unless gradients are
    disabled; backward multiplies them by the incoming gradient.

    Args:
        hidden: [t, h].
        weight: [v, h].
        targets: int64 [t], in [0, valid_columns).
        weights: fp32 [t], factor of each token's loss; no gradient.
        chunk_tokens: tokens per chunk; None calls `tokens_per_chunk`.
        valid_columns: rows of `weight` from here on are padding and are excluded; None is v.
        implementation: of the per-chunk softmax: "reference", "triton" or None (by device).

    Returns:
        (loss fp32 scalar, nll fp32 [t], which has no gradient).

    Raises:
        ValueError: shapes, `chunk_tokens` or `valid_columns` that do not fit.
    """
    valid_columns = weight.shape[0] if valid_columns is None else valid_columns
    if chunk_tokens is None:
        chunk_tokens = tokens_per_chunk(weight.shape[0], weight.device)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
            " must be [t, h] and [v, h]"
        )
    if targets.shape != hidden.shape[:1] or weights.shape != hidden.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: targets {tuple(targets.shape)} and weights"
            f" {tuple(weights.shape)} must be [t] = [{hidden.shape[0]}]"
        )
    if not 1 <= valid_columns <= weight.shape[0] or chunk_tokens < 1:
        raise ValueError(
            f"linear_cross_entropy: valid_columns={valid_columns} must be in"
            f" [1, {weight.shape[0]}] and chunk_tokens={chunk_tokens} at least 1"
        )
    gradient_ = cpu.fused_gradient_
    if choose(implementation, hidden, "linear_cross_entropy") == "triton":
        from megatron.core.ops.linear_cross_entropy import triton as kernels

        gradient_ = kernels.fused_gradient_
    return apply_function(
        LinearCrossEntropy,
        hidden,
        weight,
        targets,
        weights,
        chunk_tokens,
        valid_columns,
        gradient_,
    )


def _check_chunk(op: str, logits: torch.Tensor, targets: torch.Tensor, valid_columns: int) -> None:
    """Raise ValueError unless the arguments of a chunk fit together."""
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"{op}: logits {tuple(logits.shape)} must be [t, v] with targets [t], not"
            f" {tuple(targets.shape)}"
        )
    if not 0 <= valid_columns <= logits.shape[1]:
        raise ValueError(f"{op}: valid_columns={valid_columns} must be in [0, {logits.shape[1]}]")


# Bytes of one chunk of fp32 logits: small relative to the model, large enough for the matmul and
# for the weight gradient, which is read and written once per chunk. A GPU needs thousands of rows:
# with t rows, reading and writing an fp32 gradient takes 210 / t of the time of the three matmuls
# at an H200's bandwidth and 750 TFLOP/s in bf16: a quarter at 800 rows, and 6 % at 3,500, which is
# the chunk for a vocabulary of 152,000 (bf16 logits take half of these bytes).
CHUNK_BYTES, GPU_CHUNK_BYTES = 16 << 20, 2 << 30


class LinearCrossEntropy(torch.autograd.Function):
    """loss = sum over tokens of weight * (lse(hidden W^T) - logit of the target).

    Forward: as above; while a chunk of logits exists, also dgrad: dlogits W, and wgrad: dlogits^T
    hidden. Saves both gradients; backward multiplies them by the incoming gradient in place, so it
    can run only once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, weights, chunk_tokens, valid_columns, gradient_):
        acc_dtype = accumulation_dtype(hidden.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dtype = matmul_dtype(hidden)
        matrix = weight.to(dtype)
        nll = torch.empty(hidden.shape[0], dtype=acc_dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        if needs_weight:
            allocate = torch.empty if len(hidden) else torch.zeros
            grad_weight = allocate(weight.shape, dtype=acc_dtype, device=weight.device)
        size = min(chunk_tokens, hidden.shape[0])
        buffer = torch.empty((size, weight.shape[0]), dtype=dtype, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            rows = hidden[chunk].to(dtype)
            logits = torch.mm(rows, matrix.t(), out=buffer[: rows.shape[0]])  # [c, v]
            needs_grad = needs_hidden or needs_weight
            nll[chunk], factor = gradient_(
                logits, targets[chunk], valid_columns, gradient=needs_grad
            )
            if not needs_grad:
                continue
            factor = factor.mul_(weights[chunk])[:, None]
            if grad_hidden is not None:
                grad_hidden[chunk] = torch.mm(logits, matrix).mul_(factor)
            scaled = (rows * factor).to(dtype)
            if grad_weight is not None:
                add_product_(grad_weight, logits.t(), scaled, overwrite=start == 0)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.hidden_dtype, ctx.weight_dtype = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(nll)
        return torch.dot(nll, weights.to(acc_dtype)), nll

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        # On a CPU reading the value saves two passes; on a GPU it would wait for the device.
        if grad_loss.device.type != "cpu" or grad_loss.item() != 1:
            for grad in (grad_hidden, grad_weight):
                if grad is not None:
                    grad.mul_(grad_loss)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(ctx.hidden_dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None
