# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in Triton: all heads of as many tokens as make a tile, read and written once;
gradients of a projection's heads joined in the same pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv, next_power_of_2

# TILE: elements that a program holds, a few tokens' where there are few heads.
ROTATE = Launches(
    "rope",
    {"TILE": 4096, "num_warps": 4},
    alternatives=(
        {"TILE": 2048, "num_warps": 4},
        {"TILE": 4096, "num_warps": 8},
        {"TILE": 8192, "num_warps": 8},
    ),
)


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    tokens,
    batch,
    heads,
    features,
    pairs,
    x_stride_s,
    x_stride_b,
    x_stride_n,
    sign,
    PER_SAMPLE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate the pairs of every head of TOKENS tokens and copy the features behind them."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.arange(0, HEADS)[None, :, None]
    position, sample = token // batch, token % batch
    table_row = (token if PER_SAMPLE else position).to(tl.int64) * pairs
    pair = tl.arange(0, PAIRS)[None, None, :]
    in_table = (token < tokens) & (pair < pairs)
    cos = tl.load(cos_ptr + table_row + pair, mask=in_table, other=0.0)
    sin = tl.load(sin_ptr + table_row + pair, mask=in_table, other=0.0) * sign
    exists = (token < tokens) & (head < heads)
    source = x_ptr + position.to(tl.int64) * x_stride_s + sample.to(tl.int64) * x_stride_b
    source += head.to(tl.int64) * x_stride_n
    target = out_ptr + (token.to(tl.int64) * heads + head) * features
    rotate_tile(
        source, target, cos, sin, exists, pairs, features, INTERLEAVED, TOKENS, HEADS, PAIRS, REST
    )


@triton.jit
def rotate_tile(
    source,
    target,
    cos,
    sin,
    exists,
    pairs,
    features,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate the pairs of heads that begin at `source`, [TOKENS, HEADS, 1], into `target`, and copy
    the features behind them."""
    pair = tl.arange(0, PAIRS)[None, None, :]
    dtype = target.dtype.element_ty
    if INTERLEAVED:  # neighbours are loaded together and parted in registers
        feature = tl.arange(0, 2 * PAIRS)[None, None, :]
        inside = exists & (feature < 2 * pairs)
        x = tl.load(source + feature, mask=inside, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, [TOKENS, HEADS, PAIRS, 2]))
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        y = tl.reshape(y, [TOKENS, HEADS, 2 * PAIRS]).to(dtype)
        tl.store(target + feature, y, mask=inside)
    else:
        inside = exists & (pair < pairs)
        x1 = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(source + pair + pairs, mask=inside, other=0.0).to(tl.float32)
        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin
        tl.store(target + pair, y1.to(dtype), mask=inside)
        tl.store(target + pair + pairs, y2.to(dtype), mask=inside)
    if REST > 0:
        rest = 2 * pairs + tl.arange(0, REST)[None, None, :]
        behind = exists & (rest < features)
        tl.store(target + rest, tl.load(source + rest, mask=behind, other=0.0), mask=behind)


@triton.jit
def join_tile(
    x_ptr,
    out_ptr,
    cos,
    sin,
    token,
    tokens,
    batch,
    heads,
    features,
    pairs,
    row,
    stride_s,
    stride_b,
    stride_n,
    ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Write the heads of one part of tokens to rows of `row` features that begin at `out_ptr`."""
    head = tl.arange(0, HEADS)[None, :, None]
    exists = (token < tokens) & (head < heads)
    source = x_ptr + (token // batch).to(tl.int64) * stride_s
    source += (token % batch).to(tl.int64) * stride_b + head.to(tl.int64) * stride_n
    target = out_ptr + token.to(tl.int64) * row + head * features
    if ROTATES:
        rotate_tile(
            source,
            target,
            cos,
            sin,
            exists,
            pairs,
            features,
            INTERLEAVED,
            TOKENS,
            HEADS,
            PAIRS,
            REST,
        )
    else:
        feature = tl.arange(0, FEATURES)[None, None, :]
        inside = exists & (feature < features)
        tl.store(target + feature, tl.load(source + feature, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def join_heads_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    gate_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    tokens,
    batch,
    heads,
    groups,
    row,
    features,
    pairs,
    query_stride_s,
    query_stride_b,
    query_stride_n,
    key_stride_s,
    key_stride_b,
    key_stride_n,
    value_stride_s,
    value_stride_b,
    value_stride_n,
    gate_stride_s,
    gate_stride_b,
    gate_stride_n,
    ROTATES: tl.constexpr,
    PER_SAMPLE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Write query, key, value and gate heads of TOKENS tokens side by side, each part a program;
    query and key rotated by the negative angle."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    cos = 1.0
    sin = 0.0
    if ROTATES:
        table_row = (token if PER_SAMPLE else token // batch).to(tl.int64) * pairs
        in_table = (token < tokens) & (pair < pairs)
        cos = tl.load(cos_ptr + table_row + pair, mask=in_table, other=0.0)
        sin = -tl.load(sin_ptr + table_row + pair, mask=in_table, other=0.0)
    part = tl.program_id(1)
    if part == 0:
        join_tile(
            query_ptr, out_ptr, cos, sin, token, tokens, batch, heads, features, pairs, row,
            query_stride_s, query_stride_b, query_stride_n,
            ROTATES, INTERLEAVED, TOKENS, HEADS, PAIRS, REST, FEATURES,
        )  # fmt: skip
    elif part == 1:
        join_tile(
            key_ptr, out_ptr + heads * features, cos, sin, token, tokens, batch, groups, features,
            pairs, row, key_stride_s, key_stride_b, key_stride_n,
            ROTATES, INTERLEAVED, TOKENS, HEADS, PAIRS, REST, FEATURES,
        )  # fmt: skip
    elif part == 2:
        join_tile(
            value_ptr, out_ptr + (heads + groups) * features, cos, sin, token, tokens, batch,
            groups, features, pairs, row, value_stride_s, value_stride_b, value_stride_n,
            False, INTERLEAVED, TOKENS, HEADS, PAIRS, REST, FEATURES,
        )  # fmt: skip
    else:
        join_tile(
            gate_ptr, out_ptr + (heads + 2 * groups) * features, cos, sin, token, tokens, batch,
            heads, features, pairs, row, gate_stride_s, gate_stride_b, gate_stride_n,
            False, INTERLEAVED, TOKENS, HEADS, PAIRS, REST, FEATURES,
        )  # fmt: skip


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    *,
    sign: int = 1,
) -> torch.Tensor:
    """Rotate x [s, b, n, d], last dimension dense, by `sign` times the table's angles."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    sequence, batch, heads, features = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    pairs = cos.shape[-1]
    launch = ROTATE.pick(x, launch_key(x, pairs))
    tile = head_tile(launch["TILE"], heads, features, pairs)
    tokens = sequence * batch
    rope_kernel[(cdiv(tokens, tile["TOKENS"]),)](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        tokens,
        batch,
        heads,
        features,
        pairs,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        float(sign),
        PER_SAMPLE=cos.ndim == 3,
        INTERLEAVED=interleaved,
        **tile,
        num_warps=launch["num_warps"],
    )
    return out


def join_heads(
    grads: Sequence[torch.Tensor],
    joint: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """Write the gradients of a projection's parts into its own; see the package.

    Args:
        grads: [s, b, n, d] of query, [s, b, g, d] of key and value, [s, b, n, d] of gate if any.
        joint: dense [s, b, n + 2g (+ n), d], not empty.
        cos, sin: the table by which query and key were rotated; None: they were not.
        interleaved: see `rotate`.
    """
    grads = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
    sequence, batch, row, features = joint.shape
    heads, groups = grads[0].shape[2], grads[1].shape[2]
    pairs = 0 if cos is None else cos.shape[-1]
    launch = ROTATE.pick(joint, launch_key(grads[0], pairs))
    tile = head_tile(launch["TILE"], max(heads, groups), features, pairs)
    parts = (*grads, grads[0])[:4]
    join_heads_kernel[(cdiv(sequence * batch, tile["TOKENS"]), len(grads))](
        *parts,
        *(joint if table is None else table.contiguous() for table in (cos, sin)),
        joint,
        sequence * batch,
        batch,
        heads,
        groups,
        row * features,
        features,
        pairs,
        *(stride for part in parts for stride in part.stride()[:3]),
        ROTATES=cos is not None,
        PER_SAMPLE=cos is not None and cos.ndim == 3,
        INTERLEAVED=interleaved,
        FEATURES=next_power_of_2(features),
        **tile,
        num_warps=launch["num_warps"],
    )


@functools.cache
def head_tile(elements: int, heads: int, features: int, pairs: int) -> Mapping[str, int]:
    """Return the tokens, heads, pairs and further features of a tile, powers of two.

    Args:
        elements: of the tile.
        heads: of a token.
        features: of a head.
        pairs: of features that are rotated.
    """
    rest = features - 2 * pairs
    shape = {
        "HEADS": next_power_of_2(heads),
        "PAIRS": next_power_of_2(max(pairs, 1)),
        "REST": next_power_of_2(rest) if rest else 0,
    }
    token = shape["HEADS"] * (2 * shape["PAIRS"] + shape["REST"])
    return {"TOKENS": 1 << (max(1, elements // token).bit_length() - 1), **shape}


def launch_key(x: torch.Tensor, pairs: int) -> str:
    """Name what decides how the kernel is best started."""
    heads, features = (next_power_of_2(size) for size in x.shape[2:])
    dtype = str(x.dtype).removeprefix("torch.")
    return f"n{heads} d{features} r{next_power_of_2(pairs)} {dtype}"
