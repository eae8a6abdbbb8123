# SPDX-License-Identifier: Apache-2.0
"""Flash attention in Triton (Dao, 2023) with log-sum-exp: launches of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from megatron.core.ops.attention.forward_kernels import attention_forward_kernel
from megatron.core.ops.attention.gradient_kernels import key_gradient_kernel, query_gradient_kernel
from megatron.core.ops.attention.reference import Mask
from megatron.core.ops.attention.tile_kernels import LOG2_E, document_bounds_kernel
from megatron.core.ops.launches import Launches, cdiv, next_power_of_2

#: Tiles whose documents are compared at once.
TILES_AT_ONCE = 16

#: Rows of the tile that a program holds, rows of the tiles that it walks over, and these where a
#: window or documents hide pairs, which takes registers; by bytes of a number and largest features
#: of a head. In 16 bits a held tile has 64 rows for each of two warpgroups, so that no product is
#: computed twice, and what it sums fits their registers. fp32 is multiplied without tensor cores,
#: by threads that hold whole rows of both operands: only small tiles fit.
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
#: Largest tile of which the sums of dk and dv fit the registers together.
MOST_KEY_SUMS = 128 * 128


def head_parts(features: int) -> tuple[int, int]:
    """Return powers of two that add up to the features of a head or more; the second may be 0.

    The sizes of a tile are powers of two: heads of 192 are multiplied in parts of 128 and 64.
    """
    part = max(16, 1 << (features.bit_length() - 1))
    rest = max(16, next_power_of_2(features - part)) if features > part else 0
    return (part, rest) if rest < part else (2 * part, 0)


def tile_shape(tiles: Tiles, features: int, dtype: torch.dtype, mask: Mask) -> dict[str, int]:
    """Return the constants of a launch that depend on the sizes of a head and on the mask."""
    part, rest = head_parts(features)
    sizes = tiles[min(dtype.itemsize, 4)]
    size = min((x for x in sizes if x >= part + rest), default=max(sizes))
    held, walked, masked = sizes[size]
    if mask.window is not None or mask.document_ids is not None:
        walked = masked
    queries, keys = (walked, held) if tiles is KEY_GRADIENT else (held, walked)
    return {
        "features": features,
        "FEATURES": part,
        "REST": rest,
        "BLOCK_Q": queries,
        "BLOCK_K": keys,
        "num_warps": 8,
        "num_stages": 2,
    }


def key_gradient_parts(tile: Mapping[str, int]) -> list[dict[str, bool]]:
    """Return of which gradients each launch of the key gradient is: dk and dv, or one by one."""
    if tile["BLOCK_K"] * (tile["FEATURES"] + tile["REST"]) <= MOST_KEY_SUMS:
        return [{"OF_KEYS": True, "OF_VALUES": True}]
    return [{"OF_KEYS": keys, "OF_VALUES": not keys} for keys in (True, False)]


# ROWS: rows of gradient and output that a program multiplies at once.
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
    """Sum g out over the features of ROWS rows [s, b, n, d], into [b, n, s]; scale lse to log2."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < tl.cast(queries, tl.int64) * batch * heads
    feature = tl.arange(0, FEATURES)
    places = rows[:, None] * features + feature[None, :]  # [ROWS, FEATURES]
    mask = inside[:, None] & (feature < features)[None, :]
    grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + places, mask=mask, other=0.0).to(tl.float32)
    query, head = rows // (batch * heads), rows % (batch * heads)
    place = head * queries + query
    tl.store(dots_ptr + place, tl.sum(grad * out, axis=1), mask=inside)
    lse = tl.load(lse_ptr + place, mask=inside, other=0.0)
    # A row that saw no key has -inf: any finite number leaves its hidden weights 0.
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2_E)
    tl.store(log2_ptr + place, lse, mask=inside)


def row_dots(
    grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rowsum(g out), fp32 [b, n, s_q], of two [s_q, b, n, d]; each is read once.

    The second result is lse log2(e), fp32 [b, n, s_q], and 0 where a row saw no key.
    """
    queries, batch, heads, features = out.shape
    dots, log2 = torch.empty_like(lse), torch.empty_like(lse)
    constants = {"FEATURES": max(16, next_power_of_2(features)), **ROW_DOTS.pick(out)}
    if dots.numel():
        row_dots_kernel[(cdiv(dots.numel(), constants["ROWS"]),)](
            grad_out, out.contiguous(), lse, dots, log2, queries, batch, heads, features,
            **constants,
        )  # fmt: skip
    return dots, log2


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
        mask: the rule of the forward pass.

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
        for parts in key_gradient_parts(tile):
            key_gradient_kernel[(cdiv(keys, tile["BLOCK_K"]) * batch * groups,)](
                *inputs,
                grad_key,
                grad_value,
                *arguments,
                **parts,
                **constants,
            )
    return grad_query, grad_key, grad_value


def _dense_features(x: torch.Tensor) -> torch.Tensor:
    """Return x with a dense last dimension; slices of a fused projection stay views."""
    return x if x.stride(-1) == 1 else x.contiguous()


Documents = tuple[torch.Tensor, torch.Tensor] | None


def _documents(query: torch.Tensor, key: torch.Tensor, mask: Mask) -> Documents:
    """Return the documents of queries [s_q, b] and of keys [s_k, b], int32, None without any."""
    if mask.document_ids is None:
        return None
    of_queries = mask.documents_of_queries(query.shape[0], key.shape[0])
    return of_queries.int().contiguous(), mask.document_ids.int().contiguous()


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
    """Return the arguments that all three kernels share, and their compile-time constants.

    Args:
        documents: as `_documents` returns them.
        tile: of this kernel, see `tile_shape`.
        of_keys: whether its programs hold keys and walk over queries.
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
            TILES=TILES_AT_ONCE,
            **masks,
        )
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    dense = batch * heads * features  # elements between rows of outputs and their gradients
    constants = {
        **masks,
        "HAS_DOCUMENTS": documents is not None,
        "WIDE": max(*strides, dense) * max(tile["BLOCK_Q"], tile["BLOCK_K"]) >= 1 << 31,
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
    """Return a query and a scale that is not negative, with the same logits.

    The forward kernel scales the largest product of a row, which is its largest logit then.
    """
    return (query, scale) if scale >= 0 else (-query, -scale)
