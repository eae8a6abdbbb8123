# SPDX-License-Identifier: Apache-2.0
"""What the gated delta rule prepares in Triton: T ∘ D and the sums of decays of every chunk."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.chunked_recurrence.sweep_kernels import decays_between
from megatron.core.ops.chunked_recurrence.tiles import Tiles
from megatron.core.ops.decay import LOWEST_DECAY
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import RecurrenceInputs

SOLVE = Launches(
    "delta_rule_solve",
    {"num_warps": 4, "num_stages": 1},
    others=({"num_warps": 8, "num_stages": 1}, {"num_warps": 2, "num_stages": 1}),
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
    key_ptr,
    decay_ptr,
    strength_ptr,
    solved_ptr,
    sums_ptr,
    first_ptr,
    end_ptr,
    lowest,
    chunks,
    heads,
    groups,
    keys,
    key_stride_t,
    key_stride_h,
    decay_stride_t,
    decay_stride_h,
    strength_stride_t,
    strength_stride_h,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Make T ∘ D, and the sums of decays, of one chunk and the heads of one group.

    The heads share K Kᵀ. Rows behind the end of a sequence are those of the identity.
    """
    chunk = (tl.program_id(0) // groups).to(tl.int64)
    group = (tl.program_id(0) % groups).to(tl.int64)
    shared = heads // groups
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    place = tl.load(first_ptr + chunk) + rows
    inside = place < tl.load(end_ptr + chunk)
    base = key_ptr + group * key_stride_h
    key = tl.load(
        base + place[:, None] * key_stride_t + feature[None, :],
        mask=inside[:, None] & (feature < keys)[None, :],
        other=0.0,
    )
    raw = tl.dot(key, tl.trans(key), input_precision="ieee")
    raw = tl.where(rows[:, None] > rows[None, :], raw, 0.0)
    for index in range(shared):
        head = group * shared + index
        decay = tl.load(
            decay_ptr + place * decay_stride_t + head * decay_stride_h, mask=inside, other=0.0
        )
        sums = tl.cumsum(tl.maximum(decay.to(tl.float64), lowest), 0)
        large = sums.to(tl.float32)
        target = sums_ptr + (chunk * heads + head) * CHUNK + rows
        tl.store(target, large)
        rest = (sums - large.to(tl.float64)).to(tl.float32)
        tl.store(target + chunks.to(tl.int64) * heads * CHUNK, rest)
        strength = tl.load(
            strength_ptr + place * strength_stride_t + head * strength_stride_h,
            mask=inside,
            other=0.0,
        ).to(tl.float32)
        solved = unit_lower_inverse(raw * strength[:, None], CHUNK, PRECISION)
        solved *= decays_between(
            large[:, None],
            large[None, :],
            rest[:, None],
            rest[None, :],
            rows[:, None] >= rows[None, :],
        )
        target = solved_ptr + (chunk * heads + head) * CHUNK * CHUNK
        target += rows[:, None] * CHUNK + rows[None, :]
        tl.store(target, solved.to(solved_ptr.dtype.element_ty))


def solve(inputs: RecurrenceInputs, tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what no state is needed for.

    Args:
        inputs: of all tokens; the last dimension of keys is contiguous.
        tiles: their chunks of C tokens.

    Returns:
        (fp32 [2, n, H, C], the decays summed up within each chunk: rounded, and the rest;
        T ∘ D [n, H, C, C] in the dtype of values.)
    """
    key, value = inputs.key, inputs.value
    heads, (_, groups, keys) = value.shape[1], key.shape
    shape = (tiles.count, heads, tiles.size)
    sums = value.new_empty((2, *shape), dtype=torch.float32)
    solved = value.new_empty((*shape, tiles.size))
    if tiles.count:
        features = max(16, triton.next_power_of_2(keys))
        is_wide = value.dtype == torch.float32
        solve_kernel[(tiles.count * groups,)](
            *(key, inputs.decay, inputs.strength, solved, sums, tiles.first, tiles.end),
            *(LOWEST_DECAY, tiles.count, heads, groups, keys),
            *(stride for x in (key, inputs.decay, inputs.strength) for stride in x.stride()[:2]),
            CHUNK=tiles.size,
            KEYS=features,
            PRECISION="ieee" if is_wide else "tf32",
            **SOLVE.pick(value, f"{str(value.dtype)[6:]} C{tiles.size} K{features}"),
        )
    return sums, solved
