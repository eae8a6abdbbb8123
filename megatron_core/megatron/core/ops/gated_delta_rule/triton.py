# SPDX-License-Identifier: Apache-2.0
"""What the gated delta rule prepares in Triton: T ∘ D and the sums of decays of every chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.chunked_recurrence.kernels import Tiles, decays_between, within
from megatron.core.ops.launches import Launches, next_power_of_2
from megatron.core.ops.recurrence import LOWEST_DECAY, RecurrenceInputs

SOLVE = Launches(
    "delta_rule_solve",
    {"num_warps": 4, "num_stages": 1},
    alternatives=({"num_warps": 8, "num_stages": 1}, {"num_warps": 2, "num_stages": 1}),
)
# Rows that are solved one after another; more come by products of blocks of so many.
BLOCK = tl.constexpr(16)


@triton.jit
def unit_lower_inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + lower)⁻¹ of fp32 [SIZE, SIZE] that is zero on and above the diagonal.

    The blocks on the diagonal are solved row by row, all at once. With their inverse B, and N = B ·
    what is left of them, the whole is (I + N)⁻¹ B; and since N moves down a block, its powers end:
    (I + N)⁻¹ = (I - N)(I + N²) of four blocks, or fewer. The numbers stay as small as those of the
    result, which a series over single rows does not: its terms grow with binomials.
    """
    BLOCKS: tl.constexpr = SIZE // BLOCK
    grid = tl.reshape(lower, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    block = tl.arange(0, BLOCKS)
    row = tl.arange(0, BLOCK)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    within = tl.sum(tl.where(diagonal, grid, 0.0), 2)  # [BLOCKS, BLOCK, BLOCK]
    down = row[None, :, None]
    across = row[None, None, :]
    inverse = tl.where(down == across, 1.0, 0.0) + within * 0.0
    for done in range(BLOCK - 1):  # row `done` is ready: take it from those below
        factors = tl.sum(tl.where(across == done, within, 0.0), 2, keep_dims=True)
        ready = tl.sum(tl.where(down == done, inverse, 0.0), 1, keep_dims=True)
        inverse -= factors * ready
    whole = tl.where(diagonal, inverse[:, :, None, :], 0.0)
    whole = tl.reshape(whole, [SIZE, SIZE])
    if BLOCKS > 1:
        rows = tl.arange(0, SIZE)
        below = (rows[:, None] // BLOCK) > (rows[None, :] // BLOCK)
        identity = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
        moved = tl.dot(whole, tl.where(below, lower, 0.0), input_precision=PRECISION)
        chained = identity - moved
        if BLOCKS > 2:
            twice = tl.dot(moved, moved, input_precision=PRECISION)
            chained += twice - tl.dot(moved, twice, input_precision=PRECISION)
        whole = tl.dot(chained, whole, input_precision=PRECISION)
    return whole


@triton.jit(do_not_specialize=["chunks"])
def solve_kernel(
    query_ptr,
    key_ptr,
    decay_ptr,
    strength_ptr,
    solved_ptr,
    seen_ptr,
    sums_ptr,
    first_ptr,
    end_ptr,
    lowest,
    scale,
    chunks,
    heads: tl.constexpr,
    shared: tl.constexpr,
    keys: tl.constexpr,
    query_stride_t: tl.constexpr,
    query_stride_h: tl.constexpr,
    key_stride_t: tl.constexpr,
    key_stride_h: tl.constexpr,
    decay_stride_t: tl.constexpr,
    decay_stride_h: tl.constexpr,
    strength_stride_t: tl.constexpr,
    strength_stride_h: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Make T ∘ D, scale (Q Kᵀ) ∘ D and the sums of decays of one chunk and head.

    The heads of a group could share the products, but these are the smaller part, and kept from
    head to head they fill registers. Rows behind the end of a sequence are those of the identity.
    """
    chunk = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    group = head // shared
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    start = tl.load(first_ptr + chunk)
    inside = rows < (tl.load(end_ptr + chunk) - start).to(tl.int32)
    decay = tl.load(
        decay_ptr + start * decay_stride_t + head * decay_stride_h + rows * decay_stride_t,
        mask=inside,
        other=0.0,
    )
    strength = tl.load(
        strength_ptr
        + start * strength_stride_t
        + head * strength_stride_h
        + rows * strength_stride_t,
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    tile = inside[:, None] & within(feature, keys, KEYS)[None, :]
    key_ptr += start * key_stride_t + group * key_stride_h
    key = tl.load(key_ptr + rows[:, None] * key_stride_t + feature[None, :], mask=tile, other=0.0)
    query_ptr += start * query_stride_t + group * query_stride_h
    query = tl.load(
        query_ptr + rows[:, None] * query_stride_t + feature[None, :], mask=tile, other=0.0
    )
    # Not the maximum, in which one that is no number would be lost.
    decay = tl.where(decay < lowest, lowest, decay.to(tl.float64))
    sums = tl.cumsum(decay, 0)
    large = sums.to(tl.float32)
    rest = (sums - large.to(tl.float64)).to(tl.float32)
    number = chunk * heads + head
    tl.store(sums_ptr + number * CHUNK + rows, large)
    tl.store(sums_ptr + (chunks.to(tl.int64) * heads + number) * CHUNK + rows, rest)
    across = rows[None, :]
    down = rows[:, None]
    falls = decays_between(
        large[:, None], large[None, :], rest[:, None], rest[None, :], down >= across
    )
    square = number * CHUNK * CHUNK + down * CHUNK + across
    seen = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale * falls
    tl.store(seen_ptr + square, seen.to(seen_ptr.dtype.element_ty))
    # Decays of a path from token to token multiply to that between them: D, put on what is
    # inverted, is on the inverse.
    lower = tl.dot(key, tl.trans(key), input_precision=PRECISION) * falls * strength[:, None]
    solved = unit_lower_inverse(tl.where(down > across, lower, 0.0), CHUNK, PRECISION)
    tl.store(solved_ptr + square, solved.to(solved_ptr.dtype.element_ty))


def solve(
    inputs: RecurrenceInputs, tiles: Tiles, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what no state is needed for.

    Args:
        inputs: of all tokens; the last dimension of queries and keys is contiguous.
        tiles: their chunks of C tokens.
        scale: of queries.

    Returns:
        (fp32 [2, n, H, C], the decays summed up within each chunk: rounded, and the rest;
        T ∘ D [n, H, C, C] in the dtype of values; scale (Q Kᵀ) ∘ D, likewise.)
    """
    query, key, value, decay, strength = inputs
    heads, (_, groups, keys) = value.shape[1], key.shape
    shape = (tiles.count, heads, tiles.size)
    sums = value.new_empty((2, *shape), dtype=torch.float32)
    solved, seen = (value.new_empty((*shape, tiles.size)) for _ in range(2))
    if tiles.count:
        features = max(16, next_power_of_2(keys))
        is_wide = value.dtype == torch.float32
        strides = (stride for x in (query, key, decay, strength) for stride in x.stride()[:2])
        solve_kernel[(tiles.count * heads,)](
            *(query, key, decay, strength, solved, seen, sums, tiles.first, tiles.end),
            *(LOWEST_DECAY, scale, tiles.count, heads, heads // groups, keys, *strides),
            CHUNK=tiles.size,
            KEYS=features,
            PRECISION="tf32x3" if is_wide else "tf32",
            **SOLVE.pick(value, f"{str(value.dtype)[6:]} C{tiles.size} K{features}"),
        )
    return sums, solved, seen
