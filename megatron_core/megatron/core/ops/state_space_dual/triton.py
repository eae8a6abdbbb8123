# SPDX-License-Identifier: Apache-2.0
"""What state-space duality prepares in Triton: the sums of decays over its chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.chunked_recurrence.tiles import Tiles
from megatron.core.ops.decay import LOWEST_DECAY
from megatron.core.ops.launches import Launches

SUMS = Launches("recurrence_sums", {"BLOCK_H": 16, "num_warps": 4, "num_stages": 1})


@triton.jit(do_not_specialize=["chunks"])
def decay_sums_kernel(
    decay_ptr,
    sums_ptr,
    first_ptr,
    end_ptr,
    chunks,
    heads,
    decay_stride_t,
    decay_stride_h,
    lowest,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the decays of BLOCK_H heads over one chunk in fp64; store them in two parts."""
    blocks = tl.cdiv(heads, BLOCK_H)
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = tl.arange(0, CHUNK)
    place = tl.load(first_ptr + chunk) + rows
    inside = (place < tl.load(end_ptr + chunk))[:, None] & (head < heads)[None, :]
    decay = tl.load(
        decay_ptr + place[:, None] * decay_stride_t + head[None, :].to(tl.int64) * decay_stride_h,
        mask=inside,
        other=0.0,
    )
    sums = tl.cumsum(tl.maximum(decay.to(tl.float64), lowest), 0)
    large = sums.to(tl.float32)
    target = sums_ptr + (chunk * heads + head[None, :]) * CHUNK + rows[:, None]
    tl.store(target, large, mask=(head < heads)[None, :])
    tl.store(
        target + chunks.to(tl.int64) * heads * CHUNK,
        (sums - large.to(tl.float64)).to(tl.float32),
        mask=(head < heads)[None, :],
    )


def sum_decays(decay: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Return fp32 [2, n, H, C], the decays summed up within each chunk: rounded, and the rest.

    Args:
        decay: [t, H].
        tiles: the chunks of its tokens.
    """
    heads = decay.shape[1]
    sums = decay.new_empty((2, tiles.count, heads, tiles.size), dtype=torch.float32)
    launch = SUMS.pick(decay, f"C{tiles.size}")
    grid = (tiles.count * triton.cdiv(heads, launch["BLOCK_H"]),)
    if sums.numel():
        decay_sums_kernel[grid](
            decay,
            sums,
            tiles.first,
            tiles.end,
            tiles.count,
            heads,
            *decay.stride(),
            LOWEST_DECAY,
            CHUNK=tiles.size,
            **launch,
        )
    return sums
