# SPDX-License-Identifier: Apache-2.0
"""Projection to the vocabulary and cross entropy in chunks, never all fp32 logits at once."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import apply_function, choose
from megatron.core.ops.linear_cross_entropy import reference

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
    """Compute what one slice of the vocabulary adds to the softmax of its tokens.

    The whole is M = max of maxima, lse = M + log(sum of sum_exp * exp(maximum - M)), target =
    sum of target_logit.

    Args:
        logits: [t, v/tp].
        targets: int64 [t], global token ids.
        vocab_start: global id of column 0.
        valid_columns: columns from here on are padding and take no part.

    Returns:
        fp32 (maximum [t], sum_exp [t] = sum of exp(logit - maximum), target_logit [t], 0 where
        the target lies in another slice).

    Raises:
        ValueError: shapes or `valid_columns` that do not fit.
    """
    _check_chunk("chunk_statistics", logits, targets, valid_columns)
    if choose(implementation, logits, "chunk_statistics") == "triton":
        from megatron.core.ops.linear_cross_entropy import triton as kernels

        return kernels.chunk_statistics(logits, targets, vocab_start, valid_columns)
    return reference.chunk_statistics(logits, targets, vocab_start, valid_columns)


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
    """Overwrite logits by the gradient of sum(weights * nll): (softmax - onehot) * weight.

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
    return reference.chunk_gradient_(logits, targets, lse, weights, vocab_start, valid_columns)


def fused_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    valid_columns: int,
    gradient: bool,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the loss of a whole vocabulary and overwrite logits by its gradient, in one pass.

    The gradient (softmax - onehot) may be left short of a factor per row, which the caller applies
    where it costs less.

    Args:
        logits: [t, v], overwritten.
        targets: int64 [t].
        valid_columns: columns from here on are padding: their gradient is exactly 0.
        gradient: also make the gradient; else `logits` are meaningless afterwards.

    Returns:
        (nll fp32 [t], the factor fp32 [t] or None without `gradient`).

    Raises:
        ValueError: shapes or `valid_columns` that do not fit.
    """
    _check_chunk("fused_gradient_", logits, targets, valid_columns)
    if choose(implementation, logits, "fused_gradient_") == "triton":
        from megatron.core.ops.linear_cross_entropy import triton as kernels

        return kernels.fused_gradient_(logits, targets, valid_columns, gradient=gradient)
    return reference.fused_gradient_(logits, targets, valid_columns, gradient=gradient)


def tokens_per_chunk(vocabulary: int, device: torch.device) -> int:
    """Give how many tokens' fp32 logits make one chunk, a multiple of 64."""
    size = reference.GPU_CHUNK_BYTES if device.type == "cuda" else reference.CHUNK_BYTES
    tokens = size // (4 * max(vocabulary, 1))
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

    Both gradients are made in forward, while a chunk of logits exists, unless gradients are off;
    backward multiplies them by the incoming gradient.

    Args:
        hidden: [t, h].
        weight: [v, h].
        targets: int64 [t], in [0, valid_columns).
        weights: fp32 [t], factor of each token's loss; no gradient.
        chunk_tokens: tokens per chunk; None is what `tokens_per_chunk` gives.
        valid_columns: rows of `weight` from here on are padding and take no part; None is v.
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
    gradient_ = reference.fused_gradient_
    if choose(implementation, hidden, "linear_cross_entropy") == "triton":
        from megatron.core.ops.linear_cross_entropy import triton as kernels

        gradient_ = kernels.fused_gradient_
    return apply_function(
        reference.LinearCrossEntropy,
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
