# SPDX-License-Identifier: Apache-2.0
"""Softmax attention that returns its log-sum-exp: causal, window, documents, sinks, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from megatron.core.ops.attention import fused, reference
from megatron.core.ops.attention.reference import Mask
from megatron.core.ops.backend_choice import choose, record_function, triton_is_installed
from megatron.core.ops.dropout import AttentionDropout

__all__ = ["Mask", "attention", "explain", "functions_of"]


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
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    dropout: AttentionDropout | None = None,
    implementation: str | None = None,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale q k^T + mask) v and the log of each row's softmax denominator.

    Query heads share key heads in groups of n / g (Ainslie et al., 2023). Queries and keys stand at
    places of a row one after the other; with fewer queries than keys, the queries are the last
    unless `query_start` says otherwise. On a GPU, 16-bit attention goes to cuDNN or
    FlashAttention-2 (`fused`) where they apply, all other attention to our kernel, which also has
    sinks, fp32 and documents known by ids alone, and is deterministic. A query that sees no key
    gets out 0 and lse -inf. A sink is one more logit per head that takes probability and carries no
    value; it is part of the log-sum-exp. Backward saves q, k, v, out and lse, and takes any lse,
    such as the one over all shards of a sequence.

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
        cu_seqlens: int32 [documents + 1], where the documents of `document_ids` begin in rows that
            lie one after the other, [0, ..., b s]; with it FlashAttention-2 computes them.
        max_seqlen: a bound on the tokens of a document; None is s.
        dropout: drops probabilities (the log-sum-exp is of the softmax before dropping).
        implementation: "reference", "triton", "fused" or None (by device and call).
        cpu_dtype: what a CPU multiplies 16-bit operands in, see `ops.backend_choice.matmul_dtype`.

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
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )
    _check(query, key, value, mask)
    if not document_ids is query_document_ids is cu_seqlens is None:
        _check_documents(query, key, mask)
    if sinks is not None or dropout is not None:
        _check_options(query, sinks, dropout)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    options = {"scale": scale, "mask": mask}
    forward, backward = functions_of(
        query, key, mask, sinks=sinks, dropout=dropout, implementation=implementation
    )
    if forward is reference.attention_forward:
        options |= {"dropout": dropout, "cpu_dtype": cpu_dtype}
    if torch.is_grad_enabled():
        return record_function(
            reference.Attention, query, key, value, sinks, forward, backward, options
        )
    return forward(query, key, value, sinks, **options)


def functions_of(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Mask,
    *,
    sinks: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
    implementation: str | None = None,
) -> tuple[Callable, Callable]:
    """Return the `attention_forward` and `attention_backward` that compute an attention.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        mask: which keys a query sees.
        sinks, dropout, implementation: of `attention`.

    Raises:
        ValueError: an implementation that does not compute this.
    """
    if implementation in (None, "fused"):
        options = fused.options_of(query, key, mask, sinks=sinks, dropout=dropout)
        reasons = fused.refusals(query.device, query.dtype, query.shape[-1], options=options)
        if fused.kernel_name(reasons) is not None:
            return fused.attention_forward, fused.attention_backward
        if implementation == "fused":
            raise ValueError(
                "attention: implementation='fused': torch's fused kernels do not apply: "
                f"{_told(reasons)}"
            )
    if choose(implementation, query, "attention", has_triton=dropout is None) == "triton":
        from megatron.core.ops.attention import triton as kernels

        return kernels.attention_forward, kernels.attention_backward
    return reference.attention_forward, reference.attention_backward


def explain(
    device: torch.device, dtype: torch.dtype, features: int, *, options: Sequence[str] = ()
) -> str:
    """Return which kernel attention takes on a device, and why not a faster one.

    Args:
        device: of the tensors.
        dtype: of query, key and value.
        features: d.
        options: what the attention has besides a causal mask: "a window", "documents", "documents
            known by ids alone", "queries among more keys", "rows without keys", "sinks",
            "attention dropout".

    Raises:
        ValueError: an option of another name.
    """
    if unknown := [option for option in options if option not in fused.OPTIONS]:
        raise ValueError(
            f"attention: options {unknown} are unknown; use some of {list(fused.OPTIONS)}"
        )
    reasons = fused.refusals(device, dtype, features, options=options)
    kernel = fused.kernel_name(reasons)
    if kernel is None and device.type == "cpu":
        return "plain torch"
    if kernel is None:
        has_kernel = "attention dropout" not in options and dtype != torch.float64
        has_kernel = has_kernel and triton_is_installed()
        own = "Megatron's Triton kernel" if has_kernel else "plain torch"
        return f"{own} (not torch's fused kernels: {_told(reasons)})"
    passed = next(f"; not {name}: {why}" if why else "" for name, why in reasons.items())
    return f"torch's fused kernels ({kernel}{passed})"


def _told(reasons: Mapping[str, str]) -> str:
    """Return why no fused kernel applies, once if it is one reason."""
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
    """Return the shapes of an attention's operands for a message."""
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask) -> None:
    """Raise ValueError unless query, key and value fit together."""
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        raise ValueError(
            f"attention: {_shapes(query, key, value)} must be [s_q, b, n, d] and twice [s_k, b, g, "
            "d]"
        )
    if query.shape[1] != key.shape[1] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"attention: {_shapes(query, key, value)} must agree in batch and head dimension"
        )
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
        name = "cu_seqlens" if mask.query_document_ids is None else "query_document_ids"
        raise ValueError(f"attention: {name} need document_ids, those of the keys")
    bounds = mask.cu_seqlens
    if bounds is not None and (bounds.ndim != 1 or bounds.dtype != torch.int32 or len(bounds) < 2):
        raise ValueError(
            f"attention: cu_seqlens {tuple(bounds.shape)} {bounds.dtype} must be int32 "
            "[documents + 1], from 0 to the tokens of all rows"
        )
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
