# SPDX-License-Identifier: Apache-2.0
"""Softmax attention that returns its log-sum-exp: causal, window, documents, sinks, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from megatron.core.ops.attention import cpu, fused
from megatron.core.ops.attention.cpu import Mask
from megatron.core.ops.backend_choice import choose, direct_apply, triton_is_installed
from megatron.core.ops.dropout import AttentionDropout

__all__ = ["Mask", "attention", "explain", "functions_of"]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
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

    With a soft cap c, the logits before the mask are c tanh(scale q k^T / c) (Gemma 2, 2024).
    Query heads share key heads in groups of n / g (GQA; Ainslie et al., 2023). Queries and keys
    have contiguous positions; with fewer queries than keys, the queries are the last positions
    unless `query_start` is given. On a GPU, 16-bit attention uses cuDNN or FlashAttention-2
    (`fused`) if they support it. All other attention uses our Triton kernel, which also supports
    sinks, fp32 and documents without cu_seqlens, and is deterministic. A query without a visible
    key gets out 0 and lse -inf. A sink is an extra logit per head with no value; it is part of the
    log-sum-exp. Backward saves q, k, v, out and lse, and accepts any lse, such as the lse over all
    context-parallel shards of a sequence.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d], g dividing n.
        value: [s_k, b, g, d].
        causal: whether later keys are masked.
        scale: factor on the logits; None is 1 / sqrt(d).
        softcap: bound of the logits' magnitude; None for none.
        window: a query at position q attends only to keys k with q - k < window.
        sinks: [n], learned logits.
        document_ids: int [s_k, b], the keys' documents; tokens attend only to their own document.
        query_document_ids: int [s_q, b]; None reads the keys' documents at the queries' positions.
        query_start: position of the first query; None if the queries are the last of the keys.
        key_start: position of the first key.
        cu_seqlens: int32 [documents + 1], starts of the documents of `document_ids` in the
            concatenated rows, [0, ..., b s]; FlashAttention-2 needs it to support documents.
        max_seqlen: upper bound on the tokens of a document; None is s.
        dropout: of probabilities (the log-sum-exp is of the softmax before dropout).
        implementation: "reference", "triton", "fused" or None (by device and options).
        cpu_dtype: dtype in which a CPU multiplies 16-bit operands, see
            `ops.backend_choice.matmul_dtype`.

    Returns:
        (out [s_q, b, n, d] in query's dtype, lse fp32 [b, n, s_q], which has no gradient).

    Raises:
        ValueError: shapes, dtypes or a window that do not fit, or an implementation that does not
            support the options.
    """
    mask = Mask(
        causal=causal,
        window=window,
        softcap=softcap,
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
    if implementation is None and query.is_cpu:
        forward, backward = cpu.attention_forward, cpu.attention_backward
    else:
        forward, backward = functions_of(
            query, key, mask, sinks=sinks, dropout=dropout, implementation=implementation
        )
    if forward is cpu.attention_forward:
        options |= {"dropout": dropout, "cpu_dtype": cpu_dtype}
    if torch.is_grad_enabled():
        return _apply_attention(query, key, value, sinks, forward, backward, options)
    return forward(query, key, value, sinks, **options)


class Attention(torch.autograd.Function):
    """out = softmax(scale q k^T + mask) v, and lse, the log of the softmax denominator.

    Forward: as above. dgrad: p = exp(scale q k^T - lse); dv = p^T g; ds = p (g v^T - rowsum(g
    out)); dq = scale ds k; dk = scale ds^T q. wgrad (sinks): -sum of exp(sink - lse) rowsum(g
    out). Saves q, k, v, out and lse. `forward_fn` and `backward_fn` are `attention_forward` and
    `attention_backward` of this module, of `fused` or of `triton`.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, forward_fn, backward_fn, options):
        out, lse = forward_fn(query, key, value, sinks, **options)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.backward_fn, ctx.options = backward_fn, options
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # autograd would allocate zeros for lse's gradient
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grads = ctx.backward_fn(grad_out, query, key, value, out, lse, **ctx.options)
        grad_sinks = cpu.sink_gradient(grad_out, out, lse, sinks) if sinks is not None else None
        return *grads, grad_sinks, None, None, None


_apply_attention = direct_apply(Attention)


def functions_of(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Mask,
    *,
    sinks: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
    implementation: str | None = None,
) -> tuple[Callable, Callable]:
    """Return the `attention_forward` and `attention_backward` of the chosen implementation.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        mask: of the call.
        sinks, dropout, implementation: of `attention`.

    Raises:
        ValueError: an implementation that does not support the options.
    """
    if implementation in (None, "fused"):
        options = fused.options_of(query, key, mask, sinks=sinks, dropout=dropout)
        reasons = fused.refusals(query.device, query.dtype, query.shape[-1], options=options)
        if fused.kernel_name(reasons) is not None:
            return fused.attention_forward, fused.attention_backward
        if implementation == "fused":
            raise ValueError(
                "attention: implementation='fused': torch's fused kernels do not apply: "
                f"{_joined(reasons)}"
            )
    if choose(implementation, query, "attention", has_triton=dropout is None) == "triton":
        from megatron.core.ops.attention import triton as kernels

        return kernels.attention_forward, kernels.attention_backward
    return cpu.attention_forward, cpu.attention_backward


def explain(
    device: torch.device, dtype: torch.dtype, features: int, *, options: Sequence[str] = ()
) -> str:
    """Return the name of the kernel for an attention on a device, and why no faster one is used.

    Args:
        device: of the tensors.
        dtype: of query, key and value.
        features: d.
        options: features of the attention in addition to a causal mask: "a window", "documents",
            "documents known by ids alone", "queries among more keys", "rows without keys",
            "sinks", "a soft cap", "attention dropout".

    Raises:
        ValueError: an unknown option.
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
        fallback = "Megatron's Triton kernel" if has_kernel else "plain torch"
        return f"{fallback} (not torch's fused kernels: {_joined(reasons)})"
    skipped = next(f"; not {name}: {why}" if why else "" for name, why in reasons.items())
    return f"torch's fused kernels ({kernel}{skipped})"


def _joined(reasons: Mapping[str, str]) -> str:
    """Return why no fused kernel applies; a reason that both kernels share is stated once."""
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
    if mask.softcap is not None and not mask.softcap > 0:
        raise ValueError(
            f"attention: softcap={mask.softcap} must be positive, or None for no bound"
        )


def _check_documents(query: torch.Tensor, key: torch.Tensor, mask: Mask) -> None:
    """Raise ValueError unless there is a document id for every query and every key."""
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
        raise ValueError(f"attention: {name} need document_ids, the documents of the keys")
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
            f"attention: the {queries} queries from position {mask.key_start + shift} on are "
            f"not all among the {keys} keys from position {mask.key_start} on: give "
            "query_document_ids"
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
