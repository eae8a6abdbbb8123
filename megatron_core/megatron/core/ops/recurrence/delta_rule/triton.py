# SPDX-License-Identifier: Apache-2.0
"""`prepare` of the gated delta rule in Triton: T ∘ D, scores and cumulative decays of chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence.interface import LOWEST_DECAY, RecurrenceInputs
from megatron.core.ops.recurrence.sweep.kernels import decays_between, within
from megatron.core.ops.recurrence.sweep.triton import PreparedOnDevice, SweepKernels, padded
from megatron.core.ops.sequences import Sequences

SOLVE = Launches(
    "delta_rule_solve",
    {"num_warps": 4, "num_stages": 1},
    alternatives=({"num_warps": 8, "num_stages": 1}, {"num_warps": 2, "num_stages": 1}),
)
# Rows of a diagonal block, which are solved one after another; products combine the blocks.
BLOCK = tl.constexpr(16)


@triton.jit
def unit_lower_inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + lower)⁻¹ of a strictly lower triangular fp32 matrix [SIZE, SIZE].

    The diagonal blocks are solved row by row, in parallel, which gives the block-diagonal inverse
    B. With N = B · (the blocks of `lower` below the diagonal blocks) the inverse is (I + N)⁻¹ B. N
    is nilpotent: with at most four blocks (I + N)⁻¹ = (I - N)(I + N²). The intermediate values stay
    as small as the result. The same series over single rows is unstable: its terms grow with
    binomial coefficients.
    """
    BLOCKS: tl.constexpr = SIZE // BLOCK
    grid = tl.reshape(lower, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    block = tl.arange(0, BLOCKS)
    local = tl.arange(0, BLOCK)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    diagonal_blocks = tl.sum(tl.where(diagonal, grid, 0.0), 2)  # [BLOCKS, BLOCK, BLOCK]
    row_index = local[None, :, None]
    column_index = local[None, None, :]
    inverse = tl.where(row_index == column_index, 1.0, 0.0) + diagonal_blocks * 0.0
    for row in range(BLOCK - 1):  # row `row` is final: subtract it below
        factors = tl.sum(tl.where(column_index == row, diagonal_blocks, 0.0), 2, keep_dims=True)
        inverse_row = tl.sum(tl.where(row_index == row, inverse, 0.0), 1, keep_dims=True)
        inverse -= factors * inverse_row
    full_inverse = tl.where(diagonal, inverse[:, :, None, :], 0.0)
    full_inverse = tl.reshape(full_inverse, [SIZE, SIZE])
    if BLOCKS > 1:
        indices = tl.arange(0, SIZE)
        below_diagonal = (indices[:, None] // BLOCK) > (indices[None, :] // BLOCK)
        identity = tl.where(indices[:, None] == indices[None, :], 1.0, 0.0)
        nilpotent = tl.dot(
            full_inverse, tl.where(below_diagonal, lower, 0.0), input_precision=PRECISION
        )
        series = identity - nilpotent
        if BLOCKS > 2:
            squared = tl.dot(nilpotent, nilpotent, input_precision=PRECISION)
            series += squared - tl.dot(nilpotent, squared, input_precision=PRECISION)
        full_inverse = tl.dot(series, full_inverse, input_precision=PRECISION)
    return full_inverse


@triton.jit(do_not_specialize=["chunks"])
def solve_kernel(
    query_ptr,
    key_ptr,
    decay_ptr,
    beta_ptr,
    inverse_ptr,
    scores_ptr,
    cumsum_ptr,
    chunk_starts_ptr,
    chunk_ends_ptr,
    lowest,
    scale,
    chunks,
    heads: tl.constexpr,
    group_heads: tl.constexpr,
    keys: tl.constexpr,
    query_stride_t: tl.constexpr,
    query_stride_h: tl.constexpr,
    key_stride_t: tl.constexpr,
    key_stride_h: tl.constexpr,
    decay_stride_t: tl.constexpr,
    decay_stride_h: tl.constexpr,
    beta_stride_t: tl.constexpr,
    beta_stride_h: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute T ∘ D, scale (Q Kᵀ) ∘ D and the cumulative decays of one chunk and head.

    The heads of a group could share the products, but the products take less time than the solve,
    and would occupy registers from head to head. Rows after the end of a sequence are rows of the
    identity.
    """
    chunk = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    group = head // group_heads
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    start = tl.load(chunk_starts_ptr + chunk)
    inside = rows < (tl.load(chunk_ends_ptr + chunk) - start).to(tl.int32)
    decay = tl.load(
        decay_ptr + start * decay_stride_t + head * decay_stride_h + rows * decay_stride_t,
        mask=inside,
        other=0.0,
    )
    beta = tl.load(
        beta_ptr + start * beta_stride_t + head * beta_stride_h + rows * beta_stride_t,
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
    # A comparison, since tl.maximum would turn a NaN decay into `lowest`.
    decay = tl.where(decay < lowest, lowest, decay.to(tl.float64))
    cumsum = tl.cumsum(decay, 0)
    a_high = cumsum.to(tl.float32)
    a_low = (cumsum - a_high.to(tl.float64)).to(tl.float32)
    chunk_head = chunk * heads + head
    tl.store(cumsum_ptr + chunk_head * CHUNK + rows, a_high)
    tl.store(cumsum_ptr + (chunks.to(tl.int64) * heads + chunk_head) * CHUNK + rows, a_low)
    column = rows[None, :]
    row = rows[:, None]
    decay_mask = decays_between(
        a_high[:, None], a_high[None, :], a_low[:, None], a_low[None, :], row >= column
    )
    offsets = chunk_head * CHUNK * CHUNK + row * CHUNK + column
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale * decay_mask
    tl.store(scores_ptr + offsets, scores.to(scores_ptr.dtype.element_ty))
    # The decays along a path of tokens multiply to an entry of D, so inverting with D in the
    # argument yields T ∘ D.
    lower = tl.dot(key, tl.trans(key), input_precision=PRECISION) * decay_mask * beta[:, None]
    inverse = unit_lower_inverse(tl.where(row > column, lower, 0.0), CHUNK, PRECISION)
    tl.store(inverse_ptr + offsets, inverse.to(inverse_ptr.dtype.element_ty))


class DeltaRuleKernels(SweepKernels):
    """The gated delta rule as a `Recurrence` of Triton kernels."""

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> PreparedOnDevice:
        """See `Recurrence`; computes the cumulative decays, T ∘ D and scale (Q Kᵀ) ∘ D."""
        prepared = self._begin(inputs, sequences, delta_rule=True)
        (query, key, value, decay, beta), chunks = prepared.inputs, prepared.chunks
        shape = (chunks.count, prepared.heads, chunks.size, chunks.size)
        prepared.decayed_inverse, prepared.scores = (value.new_empty(shape) for _ in range(2))
        if not chunks.count:
            return prepared
        features = padded(prepared.keys)
        is_fp32 = value.dtype == torch.float32
        strides = (stride for x in (query, key, decay, beta) for stride in x.stride()[:2])
        solve_kernel[(chunks.count * prepared.heads,)](
            *(query, key, decay, beta),
            *(prepared.decayed_inverse, prepared.scores, prepared.decay_cumsum),
            *(chunks.starts, chunks.ends),
            *(LOWEST_DECAY, prepared.scale, chunks.count),
            *(prepared.heads, prepared.heads // key.shape[1], prepared.keys, *strides),
            CHUNK=chunks.size,
            KEYS=features,
            PRECISION="tf32x3" if is_fp32 else "tf32",
            **SOLVE.pick(value, f"{str(value.dtype)[6:]} C{chunks.size} K{features}"),
        )
        return prepared
