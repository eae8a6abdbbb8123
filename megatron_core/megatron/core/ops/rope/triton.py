# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in Triton: all heads of as many tokens as make a tile, read and written once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches

# TILE: elements that a program holds, a few tokens' where there are few heads.
ROTATE = Launches(
    "rope",
    {"TILE": 4096, "num_warps": 4},
    others=(
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
    if INTERLEAVED:  # neighbours are loaded together and parted in registers
        feature = tl.arange(0, 2 * PAIRS)[None, None, :]
        inside = exists & (feature < 2 * pairs)
        x = tl.load(source + feature, mask=inside, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, [TOKENS, HEADS, PAIRS, 2]))
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        y = tl.reshape(y, [TOKENS, HEADS, 2 * PAIRS]).to(out_ptr.dtype.element_ty)
        tl.store(target + feature, y, mask=inside)
    else:
        inside = exists & (pair < pairs)
        x1 = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(source + pair + pairs, mask=inside, other=0.0).to(tl.float32)
        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin
        tl.store(target + pair, y1.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(target + pair + pairs, y2.to(out_ptr.dtype.element_ty), mask=inside)
    if REST > 0:
        rest = 2 * pairs + tl.arange(0, REST)[None, None, :]
        behind = exists & (rest < features)
        tl.store(target + rest, tl.load(source + rest, mask=behind, other=0.0), mask=behind)


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
    tile = head_tile(launch, heads, features, pairs)
    tokens = sequence * batch
    rope_kernel[(triton.cdiv(tokens, tile["TOKENS"]),)](
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


def head_tile(launch: Mapping[str, int], heads: int, features: int, pairs: int) -> dict[str, int]:
    """Return the tokens, heads, pairs and further features of a tile, powers of two.

    Args:
        launch: TILE elements.
        heads: of a token.
        features: of a head.
        pairs: of features that are rotated.
    """
    rest = features - 2 * pairs
    shape = {
        "HEADS": triton.next_power_of_2(heads),
        "PAIRS": triton.next_power_of_2(pairs),
        "REST": triton.next_power_of_2(rest) if rest else 0,
    }
    token = shape["HEADS"] * (2 * shape["PAIRS"] + shape["REST"])
    return {"TOKENS": 1 << (max(1, launch["TILE"] // token).bit_length() - 1), **shape}


def launch_key(x: torch.Tensor, pairs: int) -> str:
    """Name what decides how the kernel is best started."""
    heads, features = (triton.next_power_of_2(size) for size in x.shape[2:])
    dtype = str(x.dtype).removeprefix("torch.")
    return f"n{heads} d{features} r{triton.next_power_of_2(pairs)} {dtype}"
