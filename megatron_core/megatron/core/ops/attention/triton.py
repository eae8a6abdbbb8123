# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-2 in Triton (Dao, 2023) with log-sum-exp: launches of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from megatron.core.ops.attention.cpu import Mask
from megatron.core.ops.attention.gradient_kernels import key_gradient_kernel, query_gradient_kernel
from megatron.core.ops.attention.kernels import (
    LOG2_E,
    attention_forward_kernel,
    document_bounds_kernel,
)
from megatron.core.ops.launches import Launches, cdiv, next_power_of_2

#: Tiles whose documents one iteration of `document_bounds_kernel` compares.
TILES_PER_STEP = 16

#: Rows of a program's own tile, rows of the tiles in its loop, and the latter with a window or
#: documents, whose mask needs registers; by bytes of an element and largest head dimension.
#: In 16 bits a program's own tile has 64 rows for each of two warpgroups, so that no product is
#: computed twice and the accumulators fit the registers. fp32 is multiplied without tensor cores,
#: by threads that hold whole rows of both operands, so only small tiles fit.
Tiles = Mapping[int, Mapping[int, tuple[int, int, int]]]
FORWARD: Tiles = MappingProxyType(
    {
        2: {64: (128, 128, 64), 128: (128, 128, 64), 256: (128, 64, 64), 512: (16, 16, 16)},
        4: {64: (32, 32, 32), 128: (32, 16, 16), 512: (16, 16, 16)},
    }
)
QUERY_GRADIENT: Tiles = MappingProxyType(
    {
        2: {64: (128, 128, 64), 128: (128, 64, 64), 256: (128, 32, 32), 512: (16, 16, 16)},
        4: {64: (32, 32, 32), 128: (32, 16, 16), 512: (16, 16, 16)},
    }
)
KEY_GRADIENT: Tiles = MappingProxyType(
    {
        2: {128: (128, 64, 32), 256: (128, 32, 32), 512: (16, 16, 16)},
        4: {128: (32, 32, 32), 512: (16, 16, 16)},
    }
)
#: Most elements of a key tile whose accumulators of dk and dv fit the registers together.
MAX_KEY_ACCUMULATORS = 128 * 128


def split_head_dim(features: int) -> tuple[int, int]:
    """Split a head dimension into two powers of two that cover it; the second may be 0.

    Triton's tile sizes are powers of two: heads of 192 are multiplied in blocks of 128 and 64.
    """
    block = max(16, 1 << (features.bit_length() - 1))
    tail = max(16, next_power_of_2(features - block)) if features > block else 0
    return (block, tail) if tail < block else (2 * block, 0)


def tile_shape(tiles: Tiles, features: int, dtype: torch.dtype, mask: Mask) -> dict[str, int]:
    """Return the constants of a launch that depend on the head dimension and on the mask."""
    block, tail = split_head_dim(features)
    sizes = tiles[min(dtype.itemsize, 4)]
    size = min((x for x in sizes if x >= block + tail), default=max(sizes))
    outer, inner, masked_inner = sizes[size]
    if mask.window is not None or mask.document_ids is not None:
        inner = masked_inner
    queries, keys = (inner, outer) if tiles is KEY_GRADIENT else (outer, inner)
    return {
        "features": features,
        "FEATURES": block,
        "TAIL": tail,
        "BLOCK_Q": queries,
        "BLOCK_K": keys,
        "num_warps": 8,
        "num_stages": 2,
    }


def key_gradient_launches(tile: Mapping[str, int]) -> list[dict[str, bool]]:
    """Return which gradients each launch computes: dk and dv together, or in separate launches."""
    if tile["BLOCK_K"] * (tile["FEATURES"] + tile["TAIL"]) <= MAX_KEY_ACCUMULATORS:
        return [{"OF_KEYS": True, "OF_VALUES": True}]
    return [{"OF_KEYS": keys, "OF_VALUES": not keys} for keys in (True, False)]


# ROWS: rows of gradient and output per program.
ROW_DOTS = Launches("attention_row_dots", {"ROWS": 32, "num_warps": 4})


@triton.jit
def row_dots_kernel(
    grad_ptr,
    out_ptr,
    lse_ptr,
    dots_ptr,
    log2_ptr,
    queries,
    batch,
    heads,
    features,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write rowsum(g out) [b, n, s] of ROWS rows [s, b, n, d], and lse in base 2."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < tl.cast(queries, tl.int64) * batch * heads
    feature = tl.arange(0, FEATURES)
    offsets = rows[:, None] * features + feature[None, :]  # [ROWS, FEATURES]
    mask = inside[:, None] & (feature < features)[None, :]
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    query, head = rows // (batch * heads), rows % (batch * heads)
    offset = head * queries + query
    tl.store(dots_ptr + offset, tl.sum(grad * out, axis=1), mask=inside)
    lse = tl.load(lse_ptr + offset, mask=inside, other=0.0)
    # A row without a visible key has lse -inf: any finite number leaves its masked weights 0.
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2_E)
    tl.store(log2_ptr + offset, lse, mask=inside)


def row_dots(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rowsum(g out) and lse log2(e), both fp32 [b, n, s_q].

    lse log2(e) is 0 for a row without a visible key.

    Args:
        grad_out, out: [s_q, b, n, d], each read once.
        lse: fp32 [b, n, s_q].
    """
    queries, batch, heads, features = out.shape
    dots, lse_log2 = torch.empty_like(lse), torch.empty_like(lse)
    constants = {"FEATURES": max(16, next_power_of_2(features)), **ROW_DOTS.pick(out)}
    if dots.numel():
        row_dots_kernel[(cdiv(dots.numel(), constants["ROWS"]),)](
            grad_out, out.contiguous(), lse, dots, lse_log2, queries, batch, heads, features,
            **constants,
        )  # fmt: skip
    return dots, lse_log2


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

    Args:
        dtype: of `out`; None is the query's dtype.
    """
    query, scale = _positive_scale(query, scale)
    query, key, value = (_dense_features(x) for x in (query, key, value))
    queries, batch, heads, features = query.shape
    out = torch.empty(query.shape, dtype=dtype or query.dtype, device=query.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=query.device)
    tile = tile_shape(FORWARD, features, query.dtype, mask)
    if out.numel():
        documents = _documents(query, key, mask)
        arguments, constants = _arguments(query, key, value, scale, mask, documents, tile)
        attention_forward_kernel[(cdiv(queries, tile["BLOCK_Q"]) * batch * heads,)](
            query,
            key,
            value,
            lse if sinks is None else sinks.contiguous(),
            out,
            lse,
            *arguments,
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
        mask: of the forward pass.

    Returns:
        (dq, dk, dv), shaped and typed like query, key and value.
    """
    query, key, value = (_dense_features(x) for x in (query, key, value))
    grad_out, lse = grad_out.contiguous(), lse.contiguous()
    delta, lse_log2 = row_dots(grad_out, out, lse)  # [b, n, s_q]
    grad_query, grad_key, grad_value = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)
    )
    queries, batch, heads, features = query.shape
    keys, _, groups, _ = key.shape
    documents = _documents(query, key, mask)
    inputs = (query, key, value, grad_out, lse_log2, delta)
    if grad_query.numel():
        tile = tile_shape(QUERY_GRADIENT, features, query.dtype, mask)
        arguments, constants = _arguments(query, key, value, scale, mask, documents, tile)
        query_gradient_kernel[(cdiv(queries, tile["BLOCK_Q"]) * batch * heads,)](
            *inputs, grad_query, *arguments, **constants
        )
    if grad_key.numel():
        tile = tile_shape(KEY_GRADIENT, features, query.dtype, mask)
        arguments, constants = _arguments(
            query, key, value, scale, mask, documents, tile, of_keys=True
        )
        for gradients in key_gradient_launches(tile):
            key_gradient_kernel[(cdiv(keys, tile["BLOCK_K"]) * batch * groups,)](
                *inputs,
                grad_key,
                grad_value,
                *arguments,
                **gradients,
                **constants,
            )
    return grad_query, grad_key, grad_value


def _dense_features(x: torch.Tensor) -> torch.Tensor:
    """Return x with a dense last dimension; slices of a fused projection stay views."""
    return x if x.stride(-1) == 1 else x.contiguous()


Documents = tuple[torch.Tensor, torch.Tensor] | None


def _documents(query: torch.Tensor, key: torch.Tensor, mask: Mask) -> Documents:
    """Return the documents of queries [s_q, b] and keys [s_k, b], int32; None without documents."""
    if mask.document_ids is None:
        return None
    query_documents = mask.documents_of_queries(query.shape[0], key.shape[0])
    return query_documents.int().contiguous(), mask.document_ids.int().contiguous()


def _arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: Mask,
    documents: Documents,
    tile: Mapping[str, int],
    *,
    of_keys: bool = False,
) -> tuple[tuple, dict[str, object]]:
    """Return the arguments and compile-time constants that all three kernels share.

    Args:
        documents: as `_documents` returns them.
        tile: of this kernel, see `tile_shape`.
        of_keys: whether a program owns a tile of keys and loops over queries.
    """
    (queries, batch, heads, features), (keys, _, groups, _) = query.shape, key.shape
    shift, window = mask.shift(queries, keys), mask.window or 0
    masks = {"CAUSAL": mask.causal, "HAS_WINDOW": mask.window is not None}
    bounds = query  # not read without documents
    if documents is not None:
        length, block = (keys, "BLOCK_K") if of_keys else (queries, "BLOCK_Q")
        programs = batch * cdiv(length, tile[block])
        bounds = torch.empty((programs, 4), dtype=torch.int32, device=query.device)
        document_bounds_kernel[(programs,)](
            *(reversed(documents) if of_keys else documents),
            bounds,
            shift,
            queries,
            keys,
            batch,
            window,
            OF_KEYS=of_keys,
            BLOCK_Q=tile["BLOCK_Q"],
            BLOCK_K=tile["BLOCK_K"],
            TILES=TILES_PER_STEP,
            **masks,
        )
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    dense = batch * heads * features  # elements between rows of outputs and their gradients
    constants = {
        **masks,
        "HAS_DOCUMENTS": documents is not None,
        "SOFTCAP": mask.softcap or 0.0,
        "I64": max(*strides, dense) * max(tile["BLOCK_Q"], tile["BLOCK_K"]) >= 1 << 31,
        **tile,
    }
    arguments = (
        *(documents or (query, key)),
        bounds,
        scale,
        shift,
        queries,
        keys,
        batch,
        heads,
        groups,
        *strides,
        dense,
        window,
    )
    return arguments, constants


def _positive_scale(query: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """Return a query and a non-negative scale with the same logits.

    The forward kernel scales the maximum of the unscaled products of a row, which is the largest
    logit only if the scale is not negative.
    """
    return (query, scale) if scale >= 0 else (-query, -scale)
