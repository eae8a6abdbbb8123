# SPDX-License-Identifier: Apache-2.0
"""Flash attention in Triton (Dao, 2023) with log-sum-exp: launch and autograd of the kernels."""

from __future__ import annotations

import torch
import triton

from megatron.core.ops.attention.kernels import (
    attention_forward_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from megatron.core.ops.attention.masking import Mask
from megatron.core.ops.attention.reference import sink_gradient

# Square tiles of 64 rows; up to 128 features they fit the registers of four warps forward and (but
# for 136 bytes of the key gradient's) of eight backward: see test_aot_kernels.py. Wider heads have
# fewer rows: at 256 features the key gradient's tiles of 64 take 321 KB of shared memory and do not
# launch, its tiles of 32 take 98 KB.
MAX_BLOCK, MIN_BLOCK = 64, 16
TILE_ELEMENTS = 64 * 128
FORWARD_WARPS = 4
BACKWARD_WARPS = 8


class Attention(torch.autograd.Function):
    """out = softmax(scale q k^T + mask) v and lse; dgrad and wgrad as in `reference.Attention`.

    Saves q, k, v, out and lse.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, scale, mask):
        out, lse = attention_forward(query, key, value, sinks, scale, mask)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.options = (scale, mask)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        scale, mask = ctx.options
        grads = attention_backward(grad_out, query, key, value, out, lse, scale=scale, mask=mask)
        grad_sinks = sink_gradient(grad_out, out, lse, sinks) if sinks is not None else None
        return *grads, grad_sinks, None, None


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    mask: Mask,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [s_q, b, n, d], lse fp32 [b, n, s_q]); see `ops.attention.attention`.

    `dtype` is that of `out`; None is that of `query`.
    """
    query, key, value = (_dense_features(x) for x in (query, key, value))
    queries, batch, heads, _ = query.shape
    out = torch.empty(query.shape, dtype=dtype or query.dtype, device=query.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    constants = _constants(query, mask, FORWARD_WARPS)
    if out.numel():
        attention_forward_kernel[(triton.cdiv(queries, constants["BLOCK"]), batch * heads)](
            query,
            key,
            value,
            lse if sinks is None else sinks.contiguous(),
            out,
            lse,
            *_arguments(query, key, value, scale, mask),
            HAS_SINKS=sinks is not None,
            **constants,
        )
    return out, lse


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate attention given its output and log-sum-exp; see `reference`.

    Args:
        grad_out: [s_q, b, n, d].
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        out: [s_q, b, n, d], the complete output.
        lse: fp32 [b, n, s_q], the complete log-sum-exp.
        scale: factor on the logits.
        mask: the rule of the forward pass.

    Returns:
        (dq, dk, dv), shaped and typed like query, key and value.
    """
    query, key, value = (_dense_features(x) for x in (query, key, value))
    grad_out, lse = grad_out.contiguous(), lse.contiguous()
    delta = (grad_out.float() * out.float()).sum(-1).permute(1, 2, 0).contiguous()  # [b, n, s_q]
    grad_query, grad_key, grad_value = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)
    )
    queries, batch, heads, _ = query.shape
    arguments = _arguments(query, key, value, scale, mask)
    constants = _constants(query, mask, BACKWARD_WARPS)
    block = constants["BLOCK"]
    inputs = (query, key, value, grad_out, lse, delta)
    if grad_query.numel():
        query_gradient_kernel[(triton.cdiv(queries, block), batch * heads)](
            *inputs, grad_query, *arguments, **constants
        )
    if grad_key.numel():
        key_gradient_kernel[(triton.cdiv(key.shape[0], block), batch * key.shape[2])](
            *inputs, grad_key, grad_value, *arguments, **constants
        )
    return grad_query, grad_key, grad_value


def _dense_features(x: torch.Tensor) -> torch.Tensor:
    """Return x with a dense last dimension; slices of a fused projection stay views."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: Mask
) -> tuple:
    """List the arguments that all three kernels share."""
    queries, keys = query.shape[0], key.shape[0]
    mine, others = mask.documents_of_queries(queries, keys), mask.document_ids
    return (
        query if mine is None else mine.int().contiguous(),
        key if others is None else others.int().contiguous(),
        scale,
        mask.shift(queries, keys),
        query.shape[0],
        key.shape[0],
        query.shape[1],
        query.shape[2],
        key.shape[2],
        query.shape[3],
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        mask.window or 0,
    )


def _constants(query: torch.Tensor, mask: Mask, warps: int) -> dict[str, object]:
    """Name the compile-time constants that all three kernels share."""
    return {
        "CAUSAL": mask.causal,
        "HAS_WINDOW": mask.window is not None,
        "HAS_DOCUMENTS": mask.document_ids is not None,
        **tile_shape(query.shape[-1]),
        "num_warps": warps,
        "num_stages": 2,
    }


def tile_shape(features: int) -> dict[str, int]:
    """Return the features and rows of a tile of heads of so many features, as constants."""
    padded = max(16, triton.next_power_of_2(features))
    rows = min(MAX_BLOCK, max(MIN_BLOCK, TILE_ELEMENTS // padded))
    return {"FEATURES": padded, "BLOCK": rows}
