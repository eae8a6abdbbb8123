# SPDX-License-Identifier: Apache-2.0
"""Softmax attention that returns its log-sum-exp: causal, window, documents, sinks, dropout."""

from __future__ import annotations

import math

import torch

from megatron.core.ops.attention import reference
from megatron.core.ops.attention.masking import Mask
from megatron.core.ops.dispatch import choose
from megatron.core.ops.dropout import AttentionDropout

__all__ = ["Mask", "attention"]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale q k^T + mask) v and the log of each row's softmax denominator.

    Query heads share key heads in groups of n / g (Ainslie et al., 2023). With fewer queries than
    keys, the queries are the last positions. A sink is one more logit per head that takes
    probability and carries no value; it is part of the log-sum-exp. Backward saves q, k, v, out
    and lse; `reference.attention_backward` and `triton.attention_backward` take any lse, such as
    the one over all shards of a sequence.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d], g dividing n.
        value: [s_k, b, g, d].
        causal: a query sees no later key.
        scale: factor on the logits; None is 1 / sqrt(d).
        window: a query at position q sees only keys k with q - k < window.
        sinks: [n], learned logits.
        document_ids: int [s_k, b]; tokens see only their own document.
        dropout: drops probabilities (the log-sum-exp is of the softmax before dropping).
        implementation: "reference", "triton" or None (by device).

    Returns:
        (out [s_q, b, n, d] in query's dtype, lse fp32 [b, n, s_q], which has no gradient).

    Raises:
        ValueError: shapes, dtypes or a window that do not fit.
    """
    _check(query, key, value, causal, window)
    _check_options(query, key, sinks, document_ids, dropout)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    mask = Mask(causal=causal, window=window, document_ids=document_ids)
    if choose(implementation, query, "attention", has_triton=dropout is None) == "triton":
        from megatron.core.ops.attention import triton as kernels

        return kernels.Attention.apply(query, key, value, sinks, scale, mask)
    return reference.Attention.apply(query, key, value, sinks, scale, mask, dropout)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    window: int | None,
) -> None:
    """Raise ValueError unless query, key and value fit together."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError(f"attention: {shapes} must be [s_q, b, n, d] and twice [s_k, b, g, d]")
    if query.shape[1] != key.shape[1] or query.shape[3] != key.shape[3]:
        raise ValueError(f"attention: {shapes} must agree in batch and head dimension")
    if key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"attention: {query.shape[2]} query heads must be a multiple of the {key.shape[2]}"
            " key heads"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"attention: query {query.dtype}, key {key.dtype} and value {value.dtype} must have"
            " one dtype"
        )
    if causal and query.shape[0] > key.shape[0]:
        raise ValueError(
            f"attention: causal with {query.shape[0]} queries and only {key.shape[0]} keys; the"
            " queries are the last positions of the keys"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window={window} must be at least 1, or None for no window")


def _check_options(
    query: torch.Tensor,
    key: torch.Tensor,
    sinks: torch.Tensor | None,
    document_ids: torch.Tensor | None,
    dropout: AttentionDropout | None,
) -> None:
    """Raise ValueError unless sinks, documents and dropout fit query and key."""
    if sinks is not None and sinks.shape != query.shape[2:3]:
        raise ValueError(
            f"attention: sinks {tuple(sinks.shape)} must hold one logit for each of the"
            f" {query.shape[2]} heads"
        )
    if document_ids is not None:
        if document_ids.shape != key.shape[:2] or document_ids.is_floating_point():
            raise ValueError(
                f"attention: document_ids {tuple(document_ids.shape)} {document_ids.dtype} must be"
                f" integers of shape [s_k, b] = {tuple(key.shape[:2])}"
            )
        if query.shape[0] > key.shape[0]:
            raise ValueError(
                f"attention: document_ids need no more queries ({query.shape[0]}) than keys"
                f" ({key.shape[0]})"
            )
    if dropout is not None and dropout.sample_ids.shape != query.shape[1:2]:
        raise ValueError(
            f"attention: dropout.sample_ids {tuple(dropout.sample_ids.shape)} must be [b] ="
            f" [{query.shape[1]}]"
        )
