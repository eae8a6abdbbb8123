# SPDX-License-Identifier: Apache-2.0
"""Softmax attention that returns its log-sum-exp: causal, window, documents, sinks, dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron.core.ops.attention import fused, reference
from megatron.core.ops.attention.reference import Mask
from megatron.core.ops.dispatch import choose
from megatron.core.ops.dropout import AttentionDropout

__all__ = ["Mask", "attention", "explain"]


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
    query_document_ids: torch.Tensor | None = None,
    query_start: int | None = None,
    key_start: int = 0,
    dropout: AttentionDropout | None = None,
    implementation: str | None = None,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale q k^T + mask) v and the log of each row's softmax denominator.

    Query heads share key heads in groups of n / g (Ainslie et al., 2023). Queries and keys stand at
    places of a row one after the other; with fewer queries than keys, the queries are the last
    unless `query_start` says otherwise. On a GPU, 16-bit attention over whole rows goes to cuDNN or
    FlashAttention-2 (`fused`), all other attention to our kernel, which also has windows, sinks and
    documents, and is deterministic. A query that sees no key gets out 0 and lse -inf. A sink
    is one more logit per head that takes probability and carries no value; it is part of the
    log-sum-exp. Backward saves q, k, v, out and lse; `reference.attention_backward` and
    `triton.attention_backward` take any lse, such as the one over all shards of a sequence.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d], g dividing n.
        value: [s_k, b, g, d].
        causal: a query sees no later key.
        scale: factor on the logits; None is 1 / sqrt(d).
        window: a query at place q sees only keys k with q - k < window.
        sinks: [n], learned logits.
        document_ids: int [s_k, b], the keys' documents; tokens see only their own document.
        query_document_ids: int [s_q, b]; None takes them from the keys at the queries' places.
        query_start: place of the first query; None where the queries are the last of the keys.
        key_start: place of the first key.
        dropout: drops probabilities (the log-sum-exp is of the softmax before dropping).
        implementation: "reference", "triton", "fused" or None (by device and call).
        cpu_dtype: what a CPU multiplies 16-bit operands in, see `dispatch.matmul_dtype`.

    Returns:
        (out [s_q, b, n, d] in query's dtype, lse fp32 [b, n, s_q], which has no gradient).

    Raises:
        ValueError: shapes, dtypes or a window that do not fit, or an implementation that does not
            compute this.
    """
    mask = Mask(
        causal=causal,
        window=window,
        document_ids=document_ids,
        query_document_ids=query_document_ids,
        query_start=query_start,
        key_start=key_start,
    )
    _check(query, key, value, mask)
    if document_ids is not None or query_document_ids is not None:
        _check_documents(query, key, mask)
    if sinks is not None or dropout is not None:
        _check_options(query, sinks, dropout)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    options = {"scale": scale, "mask": mask}
    if implementation in (None, "fused"):
        problem = fused.problem(query, key, mask, sinks=sinks, dropout=dropout)
        if implementation == "fused" and problem:
            raise ValueError(
                f"attention: implementation='fused': torch's fused kernels do not apply: {problem}"
            )
        implementation = implementation if problem else "fused"
    if implementation == "fused":
        forward, backward = fused.attention_forward, fused.attention_backward
    elif choose(implementation, query, "attention", has_triton=dropout is None) == "triton":
        from megatron.core.ops.attention import triton as kernels

        forward, backward = kernels.attention_forward, kernels.attention_backward
    else:
        forward, backward = reference.attention_forward, reference.attention_backward
        options |= {"dropout": dropout, "cpu_dtype": cpu_dtype}
    if torch.is_grad_enabled():
        return reference.Attention.apply(query, key, value, sinks, forward, backward, options)
    return forward(query, key, value, sinks, **options)


def explain(
    device: torch.device, dtype: torch.dtype, features: int, *, options: Sequence[str] = ()
) -> str:
    """Return which kernel attention over whole rows takes on a device, and why not a faster one.

    Args:
        device: of the tensors.
        dtype: of query, key and value.
        features: d.
        options: what the attention has besides a causal mask: "a window", "documents", "sinks",
            "attention dropout".
    """
    reason = fused.unsupported(device, dtype, features, options=options)
    if not reason:
        return f"torch's fused kernels ({fused.kernel_name(device, features)})"
    if device.type == "cpu":
        return "plain torch"
    own = "plain torch" if "attention dropout" in options else "Megatron's Triton kernel"
    return f"{own} (not torch's fused kernels: {reason})"


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask) -> None:
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
    if mask.causal and mask.query_start is None and query.shape[0] > key.shape[0]:
        raise ValueError(
            f"attention: causal with {query.shape[0]} queries and only {key.shape[0]} keys; the"
            " queries are the last positions of the keys unless query_start is given"
        )
    if mask.window is not None and mask.window < 1:
        raise ValueError(
            f"attention: window={mask.window} must be at least 1, or None for no window"
        )


def _check_documents(query: torch.Tensor, key: torch.Tensor, mask: Mask) -> None:
    """Raise ValueError unless the documents of queries and keys are those of all of them."""
    for name, ids, x, shape in (
        ("document_ids", mask.document_ids, key, "[s_k, b]"),
        ("query_document_ids", mask.query_document_ids, query, "[s_q, b]"),
    ):
        if ids is not None and (ids.shape != x.shape[:2] or ids.is_floating_point()):
            raise ValueError(
                f"attention: {name} {tuple(ids.shape)} {ids.dtype} must be integers of shape"
                f" {shape} = {tuple(x.shape[:2])}"
            )
    if mask.document_ids is None:
        if mask.query_document_ids is not None:
            raise ValueError("attention: query_document_ids need document_ids, those of the keys")
        return
    queries, keys = query.shape[0], key.shape[0]
    shift = mask.shift(queries, keys)
    if mask.query_document_ids is None and not 0 <= shift <= keys - queries:
        raise ValueError(
            f"attention: the {queries} queries from place {mask.key_start + shift} on are not all"
            f" among the {keys} keys from place {mask.key_start} on: give query_document_ids"
        )


def _check_options(
    query: torch.Tensor, sinks: torch.Tensor | None, dropout: AttentionDropout | None
) -> None:
    """Raise ValueError unless sinks and dropout fit the query."""
    if sinks is not None and sinks.shape != query.shape[2:3]:
        raise ValueError(
            f"attention: sinks {tuple(sinks.shape)} must hold one logit for each of the"
            f" {query.shape[2]} heads"
        )
    if dropout is not None and dropout.sample_ids.shape != query.shape[1:2]:
        raise ValueError(
            f"attention: dropout.sample_ids {tuple(dropout.sample_ids.shape)} must be [b] ="
            f" [{query.shape[1]}]"
        )
