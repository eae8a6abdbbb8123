# SPDX-License-Identifier: Apache-2.0
"""Attention in plain torch: torch's flash kernel for the plain CPU cases, else by query chunks."""

from __future__ import annotations

import torch

from megatron.core.ops.attention import chunked
from megatron.core.ops.attention.masking import Mask
from megatron.core.ops.dispatch import accumulation_dtype, matmul_dtype
from megatron.core.ops.dropout import AttentionDropout

_QUERIES_WORTH_PACKING = 256

#: From how many queries on torch's backward kernel is faster in bf16, where products are. Against
#: fp32 and its conversions it runs at 0.2 of the speed with 16 tokens, 0.7 with 128, 1.2 with 512
#: and 1.2 to 1.4 with more (AMD EPYC, avx512_bf16); with AMX, too, it is slower below 512.
_QUERIES_WORTH_NARROW = 512


class Attention(torch.autograd.Function):
    """out = softmax(scale q k^T + mask) v, and lse, the log of the softmax denominator.

    Forward: as above. dgrad: p = exp(scale q k^T - lse); dv = p^T g; ds = p (g v^T - rowsum(g
    out)); dq = scale ds k; dk = scale ds^T q. wgrad (sinks): -sum of exp(sink - lse) rowsum(g
    out). Saves q, k, v, out and lse.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, scale, mask, dropout, cpu_dtype=None):
        out, lse = attention_forward(
            query, key, value, sinks, scale, mask, dropout, cpu_dtype=cpu_dtype
        )
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.options = {"scale": scale, "mask": mask, "dropout": dropout, "cpu_dtype": cpu_dtype}
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grads = attention_backward(grad_out, query, key, value, out, lse, **ctx.options)
        grad_sinks = sink_gradient(grad_out, out, lse, sinks) if sinks is not None else None
        return *grads, grad_sinks, None, None, None, None


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    mask: Mask,
    dropout: AttentionDropout | None = None,
    dtype: torch.dtype | None = None,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [s_q, b, n, d], lse [b, n, s_q]); see `ops.attention.attention`.

    `dtype` is that of `out`; None is that of `query`. `cpu_dtype` is that of `matmul_dtype`.
    """
    if dropout is not None and dropout.rate == 0:
        dropout = None
    if _has_flash(query, key, mask, dropout):
        fast = matmul_dtype(query, cpu_dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(query, fast),
            *(_packed(x, fast, query) for x in (key, value)),
            0.0,
            mask.causal,
            scale=scale,
        )
        out = _sequence_first(out)
        lse = lse.to(accumulation_dtype(query.dtype))
    else:
        out, lse = chunked.forward(query, key, value, scale, mask, dropout)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.to(query.dtype if dtype is None else dtype).contiguous(), lse.contiguous()


def add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a part of the probability to one more logit per head, which carries no value.

    Args:
        out: [s_q, b, n, d], of attention to all keys.
        lse: [b, n, s_q].
        sinks: [n].

    Returns:
        (out, lse) with the sinks, new tensors.
    """
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])  # [b, n, s_q]
    share = (lse - with_sink).exp_()
    return out * share.permute(2, 0, 1)[..., None], with_sink  # out times [s_q, b, n, 1]


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    mask: Mask,
    dropout: AttentionDropout | None = None,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate attention given its output and log-sum-exp, over these or over more keys.

    Args:
        grad_out: [s_q, b, n, d].
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        out: [s_q, b, n, d], the complete output (also of keys that are not in `key`).
        lse: [b, n, s_q], the complete log-sum-exp.
        scale: factor on the logits.
        mask: the rule of the forward pass.
        dropout: that of the forward pass.
        cpu_dtype: that of `matmul_dtype`.

    Returns:
        (dq, dk, dv), shaped and typed like query, key and value.
    """
    if dropout is not None and dropout.rate == 0:
        dropout = None
    if not _has_flash(query, key, mask, dropout):
        return chunked.backward(grad_out, query, key, value, out, lse, scale, mask, dropout)
    fast = backward_dtype(query, query.shape[0], cpu_dtype)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_heads_first(x, fast) for x in (grad_out, query)),
        *(_packed(x, fast, query) for x in (key, value)),
        _heads_first(out, fast),
        lse,
        0.0,
        mask.causal,
        scale=scale,
    )
    return tuple(_sequence_first(grad).to(query.dtype) for grad in grads)


def backward_dtype(query: torch.Tensor, queries: int, cpu_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which to differentiate attention of so many queries at a time."""
    dtype = matmul_dtype(query, cpu_dtype)
    narrow = dtype.itemsize == 2 and query.device.type == "cpu"
    return torch.float32 if narrow and queries < _QUERIES_WORTH_NARROW else dtype


def sink_gradient(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Differentiate the sinks [n]: minus the sum of sink probability times rowsum(g out)."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [s_q, b, n]
    probability = (sinks.to(lse.dtype)[:, None] - lse).exp_()  # [b, n, s_q]
    return torch.einsum("bnq,qbn->n", probability, delta).neg_().to(sinks.dtype)


def _has_flash(
    query: torch.Tensor, key: torch.Tensor, mask: Mask, dropout: AttentionDropout | None
) -> bool:
    """Say whether torch's CPU flash kernel computes exactly this attention.

    Its causal mask counts from the first key, so queries that stand behind the first of the keys
    need chunks.
    """
    plain = mask.window is None and mask.document_ids is None and dropout is None
    queries, keys = query.shape[0], key.shape[0]
    aligned = not mask.causal or (queries == keys and mask.shift(queries, keys) == 0)
    filled = query.numel() > 0 and key.numel() > 0
    return plain and aligned and filled and query.device.type == "cpu"


def _heads_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View [s, b, n, d] as [b, n, s, d], or copy it there where the dtype changes anyway.

    torch's kernel takes strided inputs and lays its output out like the query.
    """
    if x.dtype == dtype:
        return x.permute(1, 2, 0, 3)
    sequence, batch, heads, features = x.shape
    copy = torch.empty((batch, heads, sequence, features), dtype=dtype, device=x.device)
    return copy.copy_(x.permute(1, 2, 0, 3))


def _packed(x: torch.Tensor, dtype: torch.dtype, query: torch.Tensor) -> torch.Tensor:
    """Turn keys or values [s, b, g, d] into [b, g, s, d], a head's rows side by side if it pays.

    The kernel reads them again for every block of queries, and rows a power of two apart share few
    cache sets: at 512 positions of 4 sequences the copy makes it 12-15 % faster.
    """
    x = _heads_first(x, dtype)
    return x if query.shape[0] < _QUERIES_WORTH_PACKING else x.contiguous()


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    """View [b, n, s, d] as [s, b, n, d]."""
    return x.permute(2, 0, 1, 3)
