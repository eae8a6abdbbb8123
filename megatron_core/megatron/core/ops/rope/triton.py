# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in Triton: each head is read and written once; backward also joins gradients.

A tile has all heads of as many tokens as fit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv, next_power_of_2

# TILE: elements per program; with few heads it has several tokens.
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
    TAIL: tl.constexpr,
):
    """Rotate the pairs of every head of TOKENS tokens and copy the features after the pairs."""
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
        source, target, cos, sin, exists, pairs, features, INTERLEAVED, TOKENS, HEADS, PAIRS, TAIL
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
    TAIL: tl.constexpr,
):
    """Rotate the pairs of heads at `source` [TOKENS, HEADS, 1] into `target`; copy the tail."""
    pair = tl.arange(0, PAIRS)[None, None, :]
    dtype = target.dtype.element_ty
    if INTERLEAVED:  # adjacent features are loaded together and split in registers
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
    if TAIL > 0:
        tail = 2 * pairs + tl.arange(0, TAIL)[None, None, :]
        tail_mask = exists & (tail < features)
        tl.store(target + tail, tl.load(source + tail, mask=tail_mask, other=0.0), mask=tail_mask)


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
    TAIL: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Write the heads of one tensor to rows of `row` features that begin at `out_ptr`."""
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
            TAIL,
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
    TAIL: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Write query, key, value and gate heads of TOKENS tokens into joint rows.

    Each of the four tensors has its own programs; query and key are rotated by the negative angle.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    cos = 1.0
    sin = 0.0
    if ROTATES:
        table_row = (token if PER_SAMPLE else token // batch).to(tl.int64) * pairs
        in_table = (token < tokens) & (pair < pairs)
        cos = tl.load(cos_ptr + table_row + pair, mask=in_table, other=0.0)
        sin = -tl.load(sin_ptr + table_row + pair, mask=in_table, other=0.0)
    tensor_index = tl.program_id(1)
    if tensor_index == 0:
        join_tile(
            query_ptr, out_ptr, cos, sin, token, tokens, batch, heads, features, pairs, row,
            query_stride_s, query_stride_b, query_stride_n,
            ROTATES, INTERLEAVED, TOKENS, HEADS, PAIRS, TAIL, FEATURES,
        )  # fmt: skip
    elif tensor_index == 1:
        join_tile(
            key_ptr, out_ptr + heads * features, cos, sin, token, tokens, batch, groups, features,
            pairs, row, key_stride_s, key_stride_b, key_stride_n,
            ROTATES, INTERLEAVED, TOKENS, HEADS, PAIRS, TAIL, FEATURES,
        )  # fmt: skip
    elif tensor_index == 2:
        join_tile(
            value_ptr, out_ptr + (heads + groups) * features, cos, sin, token, tokens, batch,
            groups, features, pairs, row, value_stride_s, value_stride_b, value_stride_n,
            False, INTERLEAVED, TOKENS, HEADS, PAIRS, TAIL, FEATURES,
        )  # fmt: skip
    else:
        join_tile(
            gate_ptr, out_ptr + (heads + 2 * groups) * features, cos, sin, token, tokens, batch,
            heads, features, pairs, row, gate_stride_s, gate_stride_b, gate_stride_n,
            False, INTERLEAVED, TOKENS, HEADS, PAIRS, TAIL, FEATURES,
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
    """Write the gradients of query, key, value and gate into the projection's gradient.

    Args:
        grads: [s, b, n, d] of query, [s, b, g, d] of key and value, [s, b, n, d] of gate if any.
        joint: dense [s, b, n + 2g (+ n), d], not empty.
        cos, sin: the table of the rotation of query and key; None without a rotation.
        interleaved: see `rotate`.
    """
    grads = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
    sequence, batch, joint_heads, features = joint.shape
    heads, groups = grads[0].shape[2], grads[1].shape[2]
    pairs = 0 if cos is None else cos.shape[-1]
    launch = ROTATE.pick(joint, launch_key(grads[0], pairs))
    tile = head_tile(launch["TILE"], max(heads, groups), features, pairs)
    tensors = (*grads, grads[0])[:4]
    join_heads_kernel[(cdiv(sequence * batch, tile["TOKENS"]), len(grads))](
        *tensors,
        *(joint if table is None else table.contiguous() for table in (cos, sin)),
        joint,
        sequence * batch,
        batch,
        heads,
        groups,
        joint_heads * features,
        features,
        pairs,
        *(stride for tensor in tensors for stride in tensor.stride()[:3]),
        ROTATES=cos is not None,
        PER_SAMPLE=cos is not None and cos.ndim == 3,
        INTERLEAVED=interleaved,
        FEATURES=next_power_of_2(features),
        **tile,
        num_warps=launch["num_warps"],
    )


@functools.cache
def head_tile(elements: int, heads: int, features: int, pairs: int) -> Mapping[str, int]:
    """Return the tokens, heads, pairs and remaining features of a tile, powers of two.

    Args:
        elements: of the tile.
        heads: of a token.
        features: of a head.
        pairs: rotated pairs of features.
    """
    tail = features - 2 * pairs
    shape = {
        "HEADS": next_power_of_2(heads),
        "PAIRS": next_power_of_2(max(pairs, 1)),
        "TAIL": next_power_of_2(tail) if tail else 0,
    }
    token_elements = shape["HEADS"] * (2 * shape["PAIRS"] + shape["TAIL"])
    return {"TOKENS": 1 << (max(1, elements // token_elements).bit_length() - 1), **shape}


def launch_key(x: torch.Tensor, pairs: int) -> str:
    """Return the key of the launch table: sizes of a token and dtype."""
    heads, features = (next_power_of_2(size) for size in x.shape[2:])
    dtype = str(x.dtype).removeprefix("torch.")
    return f"n{heads} d{features} r{next_power_of_2(pairs)} {dtype}"
