# SPDX-License-Identifier: Apache-2.0
"""Chunked linear recurrences in Triton: forward sweep, reverse sweep, gradients of the inputs.

The equations and letters are given in `ops.recurrence.sweep`.

- `sweep_kernel` carries fp32 states through the chunks of a sequence and computes the outputs.
- `reverse_sweep_kernel` carries the gradient of the state from the last chunk to the first. The
  columns of a state are independent in both sweeps, so a program keeps BLOCK_V columns of one state
  (or of its gradient) in registers over all chunks of a sequence.
- `recurrence_gradients_kernel` computes the gradients of the inputs. The state before each chunk
  and the gradient of the state after it are stored by then, so all chunks run in parallel. A
  program takes one chunk and several heads of a group, and sums the gradients of the query and key
  that these heads share.

The gradients kernel stacks queries and keys to one matrix [2C, K], and dO and x to one [2C, V].
Each product then has 128 rows, which fill two warp groups, and Z and N [2C, C] share all later
products. SSD has no delta term: its keys read nothing, and the key rows are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from megatron.core.ops.sequences import Sequences


@dataclass(frozen=True, eq=False)
class ChunkIndices:
    """Chunks of C tokens that never cross a sequence, numbered sequence after sequence.

    An empty sequence has no chunk.

    Args:
        size: tokens C of a chunk.
        count: number of chunks n of all sequences.
        sequence_count: number of sequences N.
        tokens: number of tokens t.
        starts: int64 [n] on the device, the first token of each chunk.
        ends: int64 [n], one past the last token of each chunk.
        offsets: int64 [N + 1], the first chunk of each sequence, then n.
    """

    size: int
    count: int
    sequence_count: int
    tokens: int
    starts: torch.Tensor
    ends: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequences, size: int) -> ChunkIndices:
        """Return the chunks of `size` tokens, built once; the host does not wait.

        Raises:
            ValueError: an empty chunk.
        """
        if size < 1:
            raise ValueError(f"chunks of {size} tokens: use at least 1")
        return sequences.cached(("chunk_indices", size), lambda: cls._build(sequences, size))

    @classmethod
    def _build(cls, sequences: Sequences, size: int) -> ChunkIndices:
        bounds = np.asarray(sequences.bounds, dtype=np.int64)
        counts = -(-np.diff(bounds) // size)  # chunks of each sequence
        offsets = np.concatenate([[0], np.cumsum(counts)])
        index = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)  # within its sequence
        starts = np.repeat(bounds[:-1], counts) + index * size
        ends = np.minimum(starts + size, np.repeat(bounds[1:], counts))
        return cls(
            size=size,
            count=int(offsets[-1]),
            sequence_count=sequences.count,
            tokens=sequences.tokens,
            starts=sequences.to_device(starts),
            ends=sequences.to_device(ends),
            offsets=sequences.to_device(offsets),
        )


@triton.jit
def decays_between(rows_high, columns_high, rows_low, columns_low, causal):
    """Return exp(a_i - a_j) where `causal`, else 0, from the high and low parts of a."""
    # The mask comes before the exponential, which overflows for i < j.
    difference = (rows_high - columns_high) + (rows_low - columns_low)
    return tl.exp(tl.where(causal, difference, float("-inf")))


@triton.jit
def within(index, size: tl.constexpr, BLOCK: tl.constexpr):
    """Return index < size; a constant if BLOCK divides size, so that masks are optimised away."""
    if size % BLOCK == 0:
        return tl.full(index.shape, 1, tl.int1)
    return index < size


@triton.jit
def chunks_of(sequence, chunk_starts_ptr, chunk_ends_ptr, chunk_offsets_ptr):
    """Return a sequence's first chunk, number of chunks, first token and number of tokens."""
    first_chunk = tl.load(chunk_offsets_ptr + sequence)
    count = (tl.load(chunk_offsets_ptr + sequence + 1) - first_chunk).to(tl.int32)
    # An empty sequence has no chunk: its offset may be past the end of the tables.
    start = tl.load(chunk_starts_ptr + first_chunk, mask=count > 0, other=0)
    end = tl.load(chunk_ends_ptr + first_chunk + count - 1, mask=count > 0, other=0)
    return first_chunk, count, start, (end - start).to(tl.int32)


@triton.jit
def causal_scores(query, key, a_high, a_low, rows, scale, PRECISION: tl.constexpr):
    """Return scale (Q Kᵀ) ∘ D [C, C] in the dtype of keys."""
    decay_mask = decays_between(
        a_high[:, None],
        a_high[None, :],
        a_low[:, None],
        a_low[None, :],
        rows[:, None] >= rows[None, :],
    )
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay_mask
    return (scores * scale).to(key.dtype)


@triton.jit(do_not_specialize=["chunks"])
def seen_kernel(
    query_ptr,
    key_ptr,
    cumsum_ptr,
    scores_ptr,
    chunk_starts_ptr,
    chunk_ends_ptr,
    scale,
    chunks,
    heads: tl.constexpr,
    group_heads: tl.constexpr,
    keys: tl.constexpr,
    query_stride_t: tl.constexpr,
    query_stride_h: tl.constexpr,
    key_stride_t: tl.constexpr,
    key_stride_h: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store scale (Q Kᵀ) ∘ D of one chunk and head, outside the sequential sweep."""
    chunk = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    group = head // group_heads
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    start = tl.load(chunk_starts_ptr + chunk)
    inside = rows < (tl.load(chunk_ends_ptr + chunk) - start).to(tl.int32)
    tile = inside[:, None] & within(feature, keys, KEYS)[None, :]
    query_ptr += start * query_stride_t + group * query_stride_h
    key_ptr += start * key_stride_t + group * key_stride_h
    query = tl.load(
        query_ptr + rows[:, None] * query_stride_t + feature[None, :], mask=tile, other=0.0
    )
    key = tl.load(key_ptr + rows[:, None] * key_stride_t + feature[None, :], mask=tile, other=0.0)
    chunk_head = chunk * heads + head
    a_high = tl.load(cumsum_ptr + chunk_head * CHUNK + rows)
    a_low = tl.load(cumsum_ptr + (chunks.to(tl.int64) * heads + chunk_head) * CHUNK + rows)
    offsets = chunk_head * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
    scores = causal_scores(query, key, a_high, a_low, rows, scale, PRECISION)
    tl.store(scores_ptr + offsets, scores)


@triton.jit(do_not_specialize=["chunks"])
def sweep_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    beta_ptr,
    cumsum_ptr,
    inverse_ptr,
    chunk_starts_ptr,
    chunk_ends_ptr,
    chunk_offsets_ptr,
    scale,
    chunks,
    heads: tl.constexpr,
    group_heads: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    query_stride_t: tl.constexpr,
    query_stride_h: tl.constexpr,
    key_stride_t: tl.constexpr,
    key_stride_h: tl.constexpr,
    value_stride_t: tl.constexpr,
    value_stride_h: tl.constexpr,
    beta_stride_t: tl.constexpr,
    beta_stride_h: tl.constexpr,
    scores_ptr,
    initial_state_ptr,
    out_ptr,
    states_ptr,
    final_state_ptr,
    total_decay_ptr,
    DELTA_RULE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_STATES: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sweep BLOCK_V columns of the state of one head through the chunks of one sequence.

    Without values the initial state is the identity, so the final state is M. HAS_TOTAL stores
    exp of the sum of all decays of the sequence, which is M of SSD. HAS_SCORES: `seen_kernel` has
    computed scale (Q Kᵀ) ∘ D already.

    Sizes and strides are compile-time constants: masks vanish and addresses cost no registers.
    """
    blocks = tl.cdiv(values, BLOCK_V)
    state_index = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = (state_index % heads).to(tl.int64)
    sequence = (state_index // heads).to(tl.int64)
    group = head // group_heads
    first_chunk, count, start, remaining = chunks_of(
        sequence, chunk_starts_ptr, chunk_ends_ptr, chunk_offsets_ptr
    )
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    has_feature = within(feature, keys, KEYS)
    has_column = within(column, values, BLOCK_V)
    state_mask = has_feature[:, None] & has_column[None, :]
    state_offsets = feature[:, None] * values + column[None, :]
    state_size: tl.constexpr = keys * values
    if HAS_INITIAL:
        state = tl.load(
            initial_state_ptr + (sequence * heads + head) * state_size + state_offsets,
            mask=state_mask,
            other=0.0,
        )
    elif HAS_VALUE:
        state = tl.zeros([KEYS, BLOCK_V], dtype=tl.float32)
    else:
        state = tl.where(feature[:, None] == column[None, :], 1.0, 0.0)
    # An address is a 64-bit chunk base plus offsets in the chunk, which are the same in all chunks.
    query_offsets = rows[:, None] * query_stride_t + feature[None, :]
    key_offsets = rows[:, None] * key_stride_t + feature[None, :]
    value_offsets = rows[:, None] * value_stride_t + column[None, :]
    out_offsets = rows[:, None] * (heads * values) + column[None, :]
    square_offsets = rows[:, None] * CHUNK + rows[None, :]
    query_ptr += start * query_stride_t + group * query_stride_h
    key_ptr += start * key_stride_t + group * key_stride_h
    value_ptr += start * value_stride_t + head * value_stride_h
    beta_ptr += start * beta_stride_t + head * beta_stride_h
    out_ptr += (start * heads + head) * values
    low_offset = chunks.to(tl.int64) * heads * CHUNK  # from a high part to its low part
    total_decay = (start * 0).to(tl.float64)
    next_beta = tl.load(beta_ptr + rows * beta_stride_t, mask=rows < remaining, other=0.0)
    for step in range(count):
        inside = rows < remaining
        chunk_head = (first_chunk + step) * heads + head
        cumsum = cumsum_ptr + chunk_head * CHUNK
        key = tl.load(key_ptr + key_offsets, mask=inside[:, None] & has_feature[None, :], other=0.0)
        a_high = tl.load(cumsum + rows)
        a_low = tl.load(cumsum + low_offset + rows)
        end_high = tl.load(cumsum + CHUNK - 1)
        end_low = tl.load(cumsum + low_offset + CHUNK - 1)
        beta = next_beta.to(tl.float32)
        # Prefetch the next chunk's beta by hand: the pipeliner would load it only at its use.
        beta_ptr += CHUNK * beta_stride_t
        next_beta = tl.load(
            beta_ptr + rows * beta_stride_t, mask=rows < remaining - CHUNK, other=0.0
        )
        decay_from_start = tl.exp(a_high + a_low)
        decay_to_end = tl.exp((end_high - a_high) + (end_low - a_low))
        chunk_decay = tl.exp(end_high + end_low)
        state_cast = state.to(key.dtype)
        if HAS_STATES:
            tl.store(
                states_ptr + chunk_head * state_size + state_offsets, state_cast, mask=state_mask
            )
        if HAS_VALUE:
            value = tl.load(
                value_ptr + value_offsets, mask=inside[:, None] & has_column[None, :], other=0.0
            ).to(tl.float32)
        if DELTA_RULE:
            inverse = tl.load(inverse_ptr + chunk_head * CHUNK * CHUNK + square_offsets)
            prediction = tl.dot(key, state_cast, input_precision=PRECISION)
            prediction *= decay_from_start[:, None]
            if HAS_VALUE:
                delta = (value - prediction) * beta[:, None]
            else:
                delta = -prediction * beta[:, None]
            v_new = tl.dot(inverse, delta.to(key.dtype), input_precision=PRECISION)
        else:
            v_new = value * beta[:, None]
        v_decayed = (v_new * decay_to_end[:, None]).to(key.dtype)
        v_new = v_new.to(key.dtype)
        state = tl.dot(tl.trans(key), v_decayed, acc=state * chunk_decay, input_precision=PRECISION)
        if HAS_OUT:
            query = tl.load(
                query_ptr + query_offsets, mask=inside[:, None] & has_feature[None, :], other=0.0
            )
            if HAS_SCORES:
                scores = tl.load(scores_ptr + chunk_head * CHUNK * CHUNK + square_offsets)
            else:
                scores = causal_scores(query, key, a_high, a_low, rows, scale, PRECISION)
            out = tl.dot(query, state_cast, input_precision=PRECISION)
            out *= (decay_from_start * scale)[:, None]
            out = tl.dot(scores, v_new, acc=out, input_precision=PRECISION)
            store_as(out_ptr + out_offsets, out, inside[:, None] & has_column[None, :])
        if HAS_TOTAL:
            total_decay += end_high.to(tl.float64) + end_low.to(tl.float64)
        query_ptr += CHUNK * query_stride_t
        key_ptr += CHUNK * key_stride_t
        value_ptr += CHUNK * value_stride_t
        out_ptr += CHUNK * heads * values
        remaining -= CHUNK
    state_index = sequence * heads + head
    if HAS_FINAL:
        tl.store(final_state_ptr + state_index * state_size + state_offsets, state, mask=state_mask)
    if HAS_TOTAL:
        tl.store(total_decay_ptr + state_index, tl.exp(total_decay.to(tl.float32)), mask=block == 0)


@triton.jit(do_not_specialize=["chunks"])
def reverse_sweep_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    beta_ptr,
    cumsum_ptr,
    inverse_ptr,
    chunk_starts_ptr,
    chunk_ends_ptr,
    chunk_offsets_ptr,
    scale,
    chunks,
    heads: tl.constexpr,
    group_heads: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    query_stride_t: tl.constexpr,
    query_stride_h: tl.constexpr,
    key_stride_t: tl.constexpr,
    key_stride_h: tl.constexpr,
    value_stride_t: tl.constexpr,
    value_stride_h: tl.constexpr,
    beta_stride_t: tl.constexpr,
    beta_stride_h: tl.constexpr,
    d_out_ptr,
    d_out_stride_t: tl.constexpr,
    d_out_stride_h: tl.constexpr,
    scores_ptr,
    d_final_ptr,
    d_states_ptr,
    x_ptr,
    d_initial_ptr,
    DELTA_RULE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    HAS_D_FINAL: tl.constexpr,
    STORE_GRADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Carry the gradient of BLOCK_V columns of one head's state from the end of a sequence back.

    STORE_GRADS stores per chunk the gradient dS of the state after the chunk, and x [t, H, V].
    HAS_SCORES: see `sweep_kernel`.
    """
    blocks = tl.cdiv(values, BLOCK_V)
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    sequence = (tl.program_id(0) // blocks // heads).to(tl.int64)
    group = head // group_heads
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key = within(feature, keys, KEYS)
    is_value = within(column, values, BLOCK_V)
    state_mask = is_key[:, None] & is_value[None, :]
    state_offsets = feature.to(tl.int64)[:, None] * values + column[None, :]
    # Base of one head of one sequence: int64 even if Triton specialises a size of 1.
    state_base = (sequence * heads + head) * keys * values
    d_state = tl.zeros([KEYS, BLOCK_V], dtype=tl.float32)
    if HAS_D_FINAL:
        d_state += tl.load(d_final_ptr + state_base + state_offsets, mask=state_mask, other=0.0)
    first_chunk, count, start, tokens = chunks_of(
        sequence, chunk_starts_ptr, chunk_ends_ptr, chunk_offsets_ptr
    )
    # Pointers count down from the last chunk: no load has an address that depends on a load.
    start += (count - 1) * CHUNK
    remaining = tokens - (count - 1) * CHUNK
    query_offsets = rows[:, None] * query_stride_t + feature[None, :]
    key_offsets = rows[:, None] * key_stride_t + feature[None, :]
    d_out_offsets = rows[:, None] * d_out_stride_t + column[None, :]
    x_offsets = rows[:, None] * (heads * values) + column[None, :]
    query_ptr += start * query_stride_t + group * query_stride_h
    key_ptr += start * key_stride_t + group * key_stride_h
    d_out_ptr += start * d_out_stride_t + head * d_out_stride_h
    x_ptr += (start * heads + head) * values
    if DELTA_RULE:
        beta_ptr += start * beta_stride_t + head * beta_stride_h
        has_beta = (rows < remaining) & (count > 0)
        next_beta = tl.load(beta_ptr + rows * beta_stride_t, mask=has_beta, other=0.0)
    for step in range(count):
        chunk = first_chunk + count - 1 - step
        inside = rows < remaining
        value_mask = inside[:, None] & is_value[None, :]
        key_mask = inside[:, None] & is_key[None, :]
        query = tl.load(query_ptr + query_offsets, mask=key_mask, other=0.0)
        key = tl.load(key_ptr + key_offsets, mask=key_mask, other=0.0)
        d_out = tl.load(d_out_ptr + d_out_offsets, mask=value_mask, other=0.0).to(key.dtype)
        if DELTA_RULE:
            beta = next_beta.to(tl.float32)
            # Prefetch the previous chunk's beta by hand: the pipeliner would load it at its use.
            beta_ptr -= CHUNK * beta_stride_t
            has_beta = (rows < CHUNK) & (step + 1 < count)
            next_beta = tl.load(beta_ptr + rows * beta_stride_t, mask=has_beta, other=0.0)
        chunk_head = chunk * heads + head  # index of this head of this chunk
        high_ptr = cumsum_ptr + chunk_head * CHUNK
        low_ptr = high_ptr + chunks.to(tl.int64) * heads * CHUNK
        a_high, a_low = tl.load(high_ptr + rows), tl.load(low_ptr + rows)
        end_high, end_low = tl.load(high_ptr + CHUNK - 1), tl.load(low_ptr + CHUNK - 1)
        decay_from_start = tl.exp(a_high + a_low)
        decay_to_end = tl.exp((end_high - a_high) + (end_low - a_low))
        if STORE_GRADS:
            tl.store(
                d_states_ptr + chunk_head * keys * values + state_offsets,
                d_state.to(d_states_ptr.dtype.element_ty),
                mask=state_mask,
            )
        # Computed here, so that its factors do not stay in registers until the product below.
        d_out_decayed = (d_out * (decay_from_start * scale)[:, None]).to(key.dtype)
        transposed = chunk_head * CHUNK * CHUNK + rows[None, :] * CHUNK + rows[:, None]
        if HAS_SCORES:
            scores_t = tl.load(scores_ptr + transposed)
        else:
            decay_mask_t = decays_between(
                a_high[None, :],
                a_high[:, None],
                a_low[None, :],
                a_low[:, None],
                rows[None, :] >= rows[:, None],
            )
            scores_t = (
                tl.dot(key, tl.trans(query), input_precision=PRECISION) * decay_mask_t * scale
            )
        x = tl.dot(key, d_state.to(key.dtype), input_precision=PRECISION) * decay_to_end[:, None]
        x = tl.dot(scores_t.to(key.dtype), d_out, acc=x, input_precision=PRECISION)
        if DELTA_RULE:
            inverse_t = tl.load(inverse_ptr + transposed)
            x = tl.dot(inverse_t, x.to(key.dtype), input_precision=PRECISION)
        if STORE_GRADS:
            tl.store(x_ptr + x_offsets, x.to(x_ptr.dtype.element_ty), mask=value_mask)
        # Summed separately: Triton up to 3.7.1 reads `d_state` too early on Blackwell if two
        # products of a step accumulate into it (Triton issue 10821).
        d_state_reads = tl.dot(tl.trans(query), d_out_decayed, input_precision=PRECISION)
        if DELTA_RULE:
            neg_x = (x * -(decay_from_start * beta)[:, None]).to(key.dtype)
            d_state_reads = tl.dot(
                tl.trans(key), neg_x, acc=d_state_reads, input_precision=PRECISION
            )
        d_state = d_state * tl.exp(end_high + end_low) + d_state_reads
        query_ptr -= CHUNK * query_stride_t
        key_ptr -= CHUNK * key_stride_t
        d_out_ptr -= CHUNK * d_out_stride_t
        x_ptr -= CHUNK * heads * values
        remaining = CHUNK
    tl.store(d_initial_ptr + state_base + state_offsets, d_state, mask=state_mask)


@triton.jit
def sum_halves(x, WIDTH: tl.constexpr, DELTA_RULE: tl.constexpr, CHUNK: tl.constexpr):
    """Return the query rows plus the key rows [C, WIDTH] of x [2C, WIDTH].

    Eight query rows alternate with eight key rows, so that one thread of a product holds both
    addends. SSD has no key rows.
    """
    if DELTA_RULE:
        return tl.reshape(tl.sum(tl.reshape(x, [CHUNK // 8, 2, 8, WIDTH]), 1), [CHUNK, WIDTH])
    else:
        return x


@triton.jit
def pair_rows(CHUNK: tl.constexpr, DELTA_RULE: tl.constexpr):
    """Return the token in the chunk of each row [2C], and whether it is a key row."""
    if DELTA_RULE:
        rows = tl.arange(0, 2 * CHUNK)
        return rows // 16 * 8 + rows % 8, rows // 8 % 2 == 1
    else:
        return tl.arange(0, CHUNK), tl.full([CHUNK], 0, tl.int1)


@triton.jit
def load_pair(query_ptr, key_ptr, is_key_row, column, mask):
    """Load query and key rows [2C, n] from row pointers [2C]."""
    pointers = tl.where(is_key_row, key_ptr, query_ptr)[:, None] + column[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def pair_factors(beta_ptr, is_key_row, scale, mask):
    """Return the factor of each row [2C]: `scale` of query rows, -beta of key rows."""
    beta = tl.load(beta_ptr, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_key_row, -beta, scale)


@triton.jit
def new_values(
    value_t,
    state,
    key,
    decay_from_start,
    beta,
    inverse_t,
    DELTA_RULE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the new values vᵀ [V, C] that tokens add to the state; `inverse_t` is (T ∘ D)ᵀ."""
    v_new = value_t.to(tl.float32)
    if DELTA_RULE:
        prediction = tl.dot(tl.trans(state), tl.trans(key), input_precision=PRECISION)
        v_new -= prediction * decay_from_start[None, :]
    v_new = (v_new * beta[None, :]).to(key.dtype)
    if DELTA_RULE:
        v_new = tl.dot(v_new, inverse_t, input_precision=PRECISION).to(key.dtype)
    return v_new


@triton.jit
def causal_decay(high_ptr, low_ptr, pair_row, is_key_row, order, CHUNK: tl.constexpr):
    """Return D [2C, C]: with the diagonal in query rows, without it in key rows."""
    row = tl.arange(0, CHUNK)
    return decays_between(
        tl.load(high_ptr + pair_row)[:, None],
        tl.load(high_ptr + row)[None, :],
        tl.load(low_ptr + pair_row)[:, None],
        tl.load(low_ptr + row)[None, :],
        (order + pair_row - is_key_row.to(tl.int32))[:, None] >= (order + row)[None, :],
    )


@triton.jit
def decays_to_end(high_ptr, low_ptr, CHUNK: tl.constexpr):
    """Return exp(a_C - a) [C], the decay of tokens to the chunk's end, and exp(a_C), its own."""
    row = tl.arange(0, CHUNK)
    end_high, end_low = tl.load(high_ptr + CHUNK - 1), tl.load(low_ptr + CHUNK - 1)
    log_decay = (end_high - tl.load(high_ptr + row)) + (end_low - tl.load(low_ptr + row))
    return tl.exp(log_decay), tl.exp(end_high + end_low)


@triton.jit
def store_as(pointer, value, mask):
    """Store `value`, converted to the pointer's dtype."""
    tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def store_pair(
    d_query_ptr,
    d_key_ptr,
    d_reads,
    d_writes,
    chunk_start_ptr,
    chunk_end_ptr,
    unit,
    earlier,
    units: tl.constexpr,
    keys: tl.constexpr,
    DELTA_RULE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store the gradients of query and key [C, K] from d_reads [2C, K] and d_writes [K, C].

    The delta rule adds them to the sums over the `earlier` heads, which this program has stored.
    """
    token = tl.load(chunk_start_ptr) + tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    mask = (token < tl.load(chunk_end_ptr))[:, None] & within(feature, keys, KEYS)[None, :]
    offsets = (token[:, None] * units + unit) * keys + feature[None, :]
    d_key = tl.trans(d_writes)
    if DELTA_RULE:
        is_key_row = pair_rows(CHUNK, DELTA_RULE)[1][:, None]
        key_reads = tl.where(is_key_row, d_reads, 0.0)
        d_key += sum_halves(key_reads, KEYS, DELTA_RULE, CHUNK)
        d_reads = tl.where(is_key_row, 0.0, d_reads)
    d_query = sum_halves(d_reads, KEYS, DELTA_RULE, CHUNK)
    if DELTA_RULE:
        tl.debug_barrier()  # other threads stored the partial sums that are loaded below
        stored = mask & (earlier > 0)
        d_query += tl.load(d_query_ptr + offsets, mask=stored, other=0.0).to(tl.float32)
        d_key += tl.load(d_key_ptr + offsets, mask=stored, other=0.0).to(tl.float32)
    store_as(d_query_ptr + offsets, d_query, mask)
    store_as(d_key_ptr + offsets, d_key, mask)


@triton.jit
def decay_gradient(pairs, to_end, from_start, order):
    """Return the gradient of decays [C], without the term from the initial to the final state.

    Decay t scales the writes of tokens j < t, as read by tokens i >= t or as part of the final
    state, and the initial state as read by tokens i >= t. Each such term is added once. A
    difference of larger sums would be cheaper, but its rounding error exceeds the gradient of a
    strong decay.

    Args:
        pairs: [i, j], term of token i reading the write of token j; zero for i < j.
        to_end: [j], term of the write of token j in the final state.
        from_start: [i], term of token i reading the initial state.
        order: [C], increasing.
    """
    suffix_sums = tl.cumsum(pairs, 0, reverse=True) + to_end[None, :]  # [t, j]
    return tl.sum(tl.where(order[:, None] > order[None, :], suffix_sums, from_start[None, :]), 1)


@triton.jit(do_not_specialize=["chunks"])
def recurrence_gradients_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    beta_ptr,
    cumsum_ptr,
    inverse_ptr,
    chunk_starts_ptr,
    chunk_ends_ptr,
    chunk_offsets_ptr,
    scale,
    chunks,
    heads: tl.constexpr,
    group_heads: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    query_stride_t: tl.constexpr,
    query_stride_h: tl.constexpr,
    key_stride_t: tl.constexpr,
    key_stride_h: tl.constexpr,
    value_stride_t: tl.constexpr,
    value_stride_h: tl.constexpr,
    beta_stride_t: tl.constexpr,
    beta_stride_h: tl.constexpr,
    d_out_ptr,
    d_out_stride_t: tl.constexpr,
    d_out_stride_h: tl.constexpr,
    states_ptr,
    d_states_ptr,
    x_ptr,
    d_query_ptr,
    d_key_ptr,
    d_value_ptr,
    d_decay_ptr,
    d_beta_ptr,
    DELTA_RULE: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of one chunk of a unit: HEADS heads of one group.

    The gradients of query and key are [t, units, K], of value [t, H, V], of decay and beta [t, H].
    ROWS is 2C, or C for SSD. VALUES is V rounded up; a loop processes BLOCK_V columns at a time.
    """
    units: tl.constexpr = heads // HEADS
    unit = (tl.program_id(0) % units).to(tl.int64)
    chunk = (tl.program_id(0) // units).to(tl.int64)
    group = unit * HEADS // group_heads
    feature = tl.arange(0, KEYS)
    is_key = within(feature, keys, KEYS)
    d_reads = tl.zeros([ROWS, KEYS], dtype=tl.float32)  # query rows, key rows
    d_writes = tl.zeros([KEYS, CHUNK], dtype=tl.float32)  # keys of the writes, transposed
    for index in tl.range(0, HEADS, disable_licm=True):
        head = unit * HEADS + index
        if DELTA_RULE:  # carried from head to head they would spill
            d_reads = tl.zeros([ROWS, KEYS], dtype=tl.float32)
            d_writes = tl.zeros([KEYS, CHUNK], dtype=tl.float32)
        chunk_head = chunk * heads + head
        # Loaded again for each head: masks and offsets that live across heads would spill.
        start, end = tl.load(chunk_starts_ptr + chunk), tl.load(chunk_ends_ptr + chunk)
        row = tl.arange(0, CHUNK)
        token = start + row
        order = start.to(tl.int32) + row
        inside = token < end
        pair_row, is_key_row = pair_rows(CHUNK, DELTA_RULE)
        pair_token = start + pair_row
        pair_inside = pair_token < end
        query_row_ptr = query_ptr + group * query_stride_h + pair_token * query_stride_t
        key_row_ptr = key_ptr + group * key_stride_h + pair_token * key_stride_t
        key_tile = key_ptr + group * key_stride_h + token[:, None] * key_stride_t + feature[None, :]
        is_in_pair = pair_inside[:, None] & is_key[None, :]
        is_in_key = inside[:, None] & is_key[None, :]
        key = tl.load(key_tile, mask=is_in_key, other=0.0)
        high_ptr = cumsum_ptr + chunk_head * CHUNK
        low_ptr = high_ptr + chunks.to(tl.int64) * heads * CHUNK
        decay = tl.exp(tl.load(high_ptr + row) + tl.load(low_ptr + row))  # from the chunk's start
        beta_head_ptr = beta_ptr + head * beta_stride_h
        pair_beta_ptr = beta_head_ptr + pair_token * beta_stride_t
        inverse_t = key
        if DELTA_RULE:
            inverse_row_ptr = inverse_ptr + chunk_head * CHUNK * CHUNK + row[None, :] * CHUNK
            inverse_t = tl.load(inverse_row_ptr + row[:, None])
        d_scores = tl.zeros([ROWS, CHUNK], dtype=tl.float32)  # [dO ; x] vᵀ
        from_start = tl.zeros([ROWS], dtype=tl.float32)
        to_end = tl.zeros([CHUNK], dtype=tl.float32)
        d_beta = tl.zeros([CHUNK], dtype=tl.float32)
        state_dot, chunk_decay = 0.0, 0.0
        for block in tl.range(0, VALUES, BLOCK_V, disable_licm=True):
            column = block + tl.arange(0, BLOCK_V)
            is_value = within(column, values, BLOCK_V)
            state_mask = is_key[:, None] & is_value[None, :]
            state_offsets = chunk_head * keys * values + feature[:, None] * values + column[None, :]
            state = tl.load(states_ptr + state_offsets, mask=state_mask, other=0.0)
            d_state = tl.load(d_states_ptr + state_offsets, mask=state_mask, other=0.0)
            state_dot += tl.sum(state.to(tl.float32) * d_state.to(tl.float32))
            d_out_row_ptr = d_out_ptr + head * d_out_stride_h + pair_token * d_out_stride_t
            x_row_ptr = x_ptr + (pair_token * heads + head) * values
            pair_mask = pair_inside[:, None] & is_value[None, :]
            d_out_x = load_pair(d_out_row_ptr, x_row_ptr, is_key_row, column, pair_mask)
            # Loaded transposed: a register transpose would make the product wait for accumulators.
            mask_t = is_value[:, None] & inside[None, :]
            offsets_t = column[:, None] + (token[None, :] * heads + head) * values
            x_t = tl.load(x_ptr + offsets_t, mask=mask_t, other=0.0).to(tl.float32)
            beta = tl.load(beta_head_ptr + token * beta_stride_t, inside, 0.0).to(tl.float32)
            value_row_ptr = value_ptr + head * value_stride_h + token[None, :] * value_stride_t
            value_t = tl.load(value_row_ptr + column[:, None], mask=mask_t, other=0.0)
            d_beta += tl.sum(x_t * value_t.to(tl.float32), 0)
            store_as(d_value_ptr + offsets_t, x_t * beta[None, :], mask_t)
            v_new_t = new_values(value_t, state, key, decay, beta, inverse_t, DELTA_RULE, PRECISION)
            d_scores = tl.dot(d_out_x, v_new_t, acc=d_scores, input_precision=PRECISION)
            decay_to_end, chunk_decay = decays_to_end(high_ptr, low_ptr, CHUNK)
            key_t = tl.trans(tl.load(key_tile, mask=is_in_key, other=0.0)).to(tl.float32)
            d_key_t = tl.dot(d_state, v_new_t, input_precision=PRECISION) * decay_to_end[None, :]
            to_end += tl.sum(d_key_t * key_t, 0)
            d_writes += d_key_t
            pair = load_pair(query_row_ptr, key_row_ptr, is_key_row, feature, is_in_pair)
            d_pair = tl.dot(d_out_x, tl.trans(state), input_precision=PRECISION)
            d_pair *= tl.exp(tl.load(high_ptr + pair_row) + tl.load(low_ptr + pair_row))[:, None]
            from_start += tl.sum(d_pair * pair.to(tl.float32), 1)
            factor = pair_factors(pair_beta_ptr, is_key_row, scale, pair_inside)
            d_reads += d_pair * factor[:, None]
        # Loaded again rather than kept in registers. Then Z and N.
        pair = load_pair(query_row_ptr, key_row_ptr, is_key_row, feature, is_in_pair)
        d_scores *= causal_decay(high_ptr, low_ptr, pair_row, is_key_row, start.to(tl.int32), CHUNK)
        pairs = d_scores * tl.dot(pair, tl.trans(key), input_precision=PRECISION)
        if DELTA_RULE:
            key_sums = tl.where(is_key_row, from_start + tl.sum(pairs, 1), 0.0)
            d_beta -= tl.reshape(sum_halves(key_sums[:, None], 1, DELTA_RULE, CHUNK), [CHUNK])
        factor = pair_factors(pair_beta_ptr, is_key_row, scale, pair_inside)
        state_terms = sum_halves((from_start * factor)[:, None], 1, DELTA_RULE, CHUNK)
        pairs = sum_halves(pairs * factor[:, None], CHUNK, DELTA_RULE, CHUNK)
        d_scores = (d_scores * factor[:, None]).to(key.dtype)
        d_reads = tl.dot(d_scores, key, acc=d_reads, input_precision=PRECISION)
        d_writes = tl.dot(tl.trans(pair), d_scores, acc=d_writes, input_precision=PRECISION)
        d_decay = decay_gradient(pairs, to_end, tl.reshape(state_terms, [CHUNK]), order)
        # A decay that underflows exp has gradient 0: every term has its exponential as a factor.
        store_as(d_decay_ptr + token * heads + head, d_decay + chunk_decay * state_dot, inside)
        store_as(d_beta_ptr + token * heads + head, d_beta, inside)
        if DELTA_RULE:
            store_pair(
                *(d_query_ptr, d_key_ptr, d_reads, d_writes),
                *(chunk_starts_ptr + chunk, chunk_ends_ptr + chunk, unit, index, units, keys),
                *(DELTA_RULE, CHUNK, KEYS),
            )
    if not DELTA_RULE:
        store_pair(
            *(d_query_ptr, d_key_ptr, d_reads, d_writes),
            *(chunk_starts_ptr + chunk, chunk_ends_ptr + chunk, unit, 0, units, keys),
            *(DELTA_RULE, CHUNK, KEYS),
        )


@triton.jit
def sum_units_kernel(partials_ptr, out_ptr, width, units, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum [rows, units, width] over the units of one row in fp32; UNITS is `units` rounded up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    unit = tl.arange(0, UNITS)
    partials = tl.load(
        partials_ptr + (row * units + unit[:, None]) * width + column[None, :],
        mask=(unit < units)[:, None] & (column < width)[None, :],
        other=0.0,
    )
    total = tl.sum(partials.to(tl.float32), 0)
    store_as(out_ptr + row * width + column, total, column < width)
