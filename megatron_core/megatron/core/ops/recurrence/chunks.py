# SPDX-License-Identifier: Apache-2.0
"""Chunks of packed sequences in plain torch: the sweep of states through them, and their decays.

A sweep carries states from chunk to chunk, forward or backward. Given M and S_ext only one product
per chunk is sequential, and a step processes all sequences and heads at once (see `Chunks`). Other
work on the chunks may run in the same sweep, block by block, while its data is in the cache.

The decay between two tokens is exp(a_i - a_j), with a the cumulative sum of log decays in a chunk.
Its relative error is the absolute error of a_i - a_j, and a sum of large decays has a large
rounding error. So sums stay in fp64 until the subtraction, or are split into a high and a low part.
Subtracting the high parts first is exact where the difference is small; where it is large, the
exponential is 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch

from megatron.core.ops.recurrence.interface import LOWEST_DECAY
from megatron.core.ops.sequences import Sequences


class Chunks:
    """Chunks of C tokens that never cross from one sequence to the next, in the order of a sweep.

    Step i of a sweep processes chunk i of every sequence with more than i chunks. Chunks are
    numbered step by step, and within a step from the longest sequence to the shortest. So the
    chunks of a step are contiguous, and a step reads a prefix of the previous step's states.

    Attributes:
        size: tokens C of a chunk.
        steps: number of chunks of each step, non-increasing; their sum is n, the number of chunks.
        order: host ints [N], sequence numbers sorted from the longest sequence to the shortest.
    """

    def __init__(self, sequences: Sequences, size: int) -> None:
        if size < 1:
            raise ValueError(f"chunks of {size} tokens: use at least 1")
        self.size, self._sequences = size, sequences
        lengths = np.asarray(sequences.lengths)
        order = np.argsort(-lengths, kind="stable")
        counts = -(-lengths[order] // size)  # chunks of each sequence, falling
        num_steps = int(counts[0]) if len(counts) else 0
        self.steps = tuple(int((counts > step).sum()) for step in range(num_steps))
        self.order = tuple(int(number) for number in order)
        sequence_starts = np.asarray(sequences.bounds[:-1])[order]
        sequence_ends = np.asarray(sequences.bounds[1:])[order]
        step_starts = [sequence_starts[:n] + step * size for step, n in enumerate(self.steps)]
        starts = np.concatenate(step_starts) if step_starts else np.zeros(0, dtype=np.int64)
        step_ends = [sequence_ends[:n] for n in self.steps]
        ends = np.concatenate(step_ends) if step_ends else starts
        index = starts[:, None] + np.arange(size)  # [n, C]
        self._index = np.where(index < ends[:, None], index, sequences.tokens)
        self.count = len(starts)
        self.is_whole = bool((self._index < sequences.tokens).all())
        # The chunks of a single sequence are in token order, so views replace gathers.
        self._is_single = sequences.count == 1
        self._is_sorted = self.order == tuple(range(sequences.count))

    @staticmethod
    def of(sequences: Sequences, size: int) -> Chunks:
        """Return the chunks of `size` tokens; they are built once."""
        return sequences.cached(("chunks", size), lambda: Chunks(sequences, size))

    @property
    def sequence_count(self) -> int:
        """Number of sequences N."""
        return self._sequences.count

    @property
    def index(self) -> torch.Tensor:
        """int64 [n · C], the token in each grid cell; t in cells after the end of a sequence."""
        return self._sequences.cached(
            ("index", self.size), lambda: self._sequences.to_device(self._index.reshape(-1))
        )

    @property
    def inverse(self) -> torch.Tensor:
        """int64 [t], the grid cell of each token."""

        def create() -> torch.Tensor:
            grid_index = np.zeros(self._sequences.tokens + 1, dtype=np.int64)
            grid_index[self._index.reshape(-1)] = np.arange(self._index.size)
            return self._sequences.to_device(grid_index[:-1])

        return self._sequences.cached(("inverse", self.size), create)

    def to_chunks(self, x: torch.Tensor) -> torch.Tensor:
        """Return the grid [n, C, ...] of x [t, ...], zero-padded per sequence. May be a view."""
        shape = (self.count, self.size, *x.shape[1:])
        if self._is_single and self.is_whole:
            return x.reshape(shape)
        if self.is_whole:
            return x.index_select(0, self.index).view(shape)
        padded = x.new_zeros((self.count * self.size, *x.shape[1:]))
        if self._is_single:
            padded[: x.shape[0]] = x
        else:
            padded.index_copy_(0, self.inverse, x)
        return padded.view(shape)

    def sorted(self, states: torch.Tensor) -> torch.Tensor:
        """Return states [N, ...] sorted by sequence length, longest first. May be a view."""
        if self._is_sorted:
            return states

        def create() -> torch.Tensor:
            return self._sequences.to_device(np.asarray(self.order))

        return states.index_select(0, self._sequences.cached(("order", self.size), create))

    def unsorted(self, states: torch.Tensor) -> torch.Tensor:
        """Return states [N, ...] in the order of the sequences: the inverse of `sorted`."""
        if self._is_sorted:
            return states

        def create() -> torch.Tensor:
            return self._sequences.to_device(np.argsort(np.asarray(self.order)))

        return states.index_select(0, self._sequences.cached(("rank", self.size), create))

    def from_chunks(self, grid: torch.Tensor) -> torch.Tensor:
        """Return x [t, ...] from [n, C, ...]: the inverse of `to_chunks`. May be a view."""
        flat = grid.reshape(-1, *grid.shape[2:])
        if self._is_single:
            return flat[: self._sequences.tokens]
        return flat.index_select(0, self.inverse)


def decay_cumsum(decay: torch.Tensor) -> torch.Tensor:
    """Return a, the cumulative sum in fp64 of the decays [..., C] of a chunk."""
    decay_fp64 = decay.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return decay_fp64.clamp_(min=LOWEST_DECAY).cumsum(-1)


def difference_factors(sums: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [..., C, 4] and columns [..., 4, C] whose product is a_i - a_j, in `dtype`.

    Args:
        sums: cumulative decays a [..., C], fp64.
        dtype: the dtype of the high part of each sum, and of the low part that it rounds off.
    """
    high = sums.to(dtype)
    low = (sums - high).to(dtype)
    ones = torch.ones_like(high)
    rows = torch.stack([high, ones, low, ones], -1)
    return rows, torch.stack([ones, -high, ones, -low], -2)


def decay_differences(
    rows: torch.Tensor, columns: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a_i - a_j [n, C, C] for i >= j, else -inf.

    Args:
        rows: [n, C, 4], from `difference_factors`.
        columns: [n, 4, C], from `difference_factors`.
        out: the output buffer; None allocates one.
    """
    count, size, _ = rows.shape
    upper_mask = rows.new_full((size, size), -torch.inf).triu_(1)
    return torch.baddbmm(upper_mask.expand(count, -1, -1), rows, columns, out=out)


def zero_clamped_grad(d_decay: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Zero the gradient of decays in place where they were clamped to `LOWEST_DECAY`."""
    return d_decay.masked_fill_(decay <= LOWEST_DECAY, 0.0)


class _Steps:
    """The chunks of each step: step i has `sizes[i]` chunks, from chunk `begins[i]` on."""

    def __init__(self, chunks: Chunks) -> None:
        self.sizes = (*chunks.steps, 0)
        self.begins = (0, *accumulate(chunks.steps))

    def spans(self, block: slice) -> Iterator[tuple[int, slice]]:
        """Yield (step, slice of the step's chunks) for each step that a block overlaps."""
        step = bisect_right(self.begins, block.start) - 1
        while step < len(self.sizes) - 1 and self.begins[step] < block.stop:
            begin = self.begins[step]
            end = min(begin + self.sizes[step], block.stop)
            yield step, slice(max(begin, block.start) - begin, end - begin)
            step += 1


class Sweep:
    """Forward sweep of states through chunks: S_next = M · S + X.

    Attributes:
        states_before: [n, H, K, V], the state before each chunk; filled by `advance`.

    Args:
        chunks: the n chunks of N sequences.
        initial: [N, H, K, V], the initial states; may be expanded zeros.
    """

    def __init__(self, chunks: Chunks, initial: torch.Tensor) -> None:
        self._chunks, self._steps = chunks, _Steps(chunks)
        count, shape = initial.shape[0], initial.shape[1:]
        # A step writes its results where the next step reads its states. The final states of
        # sequences that end are moved out before the next step overwrites them.
        self._states = initial.new_empty((chunks.count + count, *shape))
        self._final = initial.new_empty((count, *shape))
        self._states[:count] = chunks.sorted(initial)
        num_active = self._steps.sizes[0]
        self._final[num_active:] = self._states[num_active:count]  # empty sequences
        self.states_before = self._states[: chunks.count]

    def advance(self, block: slice, transition: torch.Tensor, added: torch.Tensor | None) -> None:
        """Carry the states through the next chunks.

        Args:
            block: the slice of m chunks; blocks are consecutive.
            transition: M [m, H, K, K], or [m, ..., 1] if it is a scalar per head.
            added: X [m, H, K, V]; None adds nothing.
        """
        states, steps = self._states, self._steps
        for step, span in steps.spans(block):
            begin = steps.begins[step]
            end, next_size = begin + steps.sizes[step], steps.sizes[step + 1]
            rows = slice(begin + span.start - block.start, begin + span.stop - block.start)
            out = states[end + span.start : end + span.stop]
            _affine(
                transition[rows],
                states[begin + span.start : begin + span.stop],
                None if added is None else added[rows],
                out,
            )
            if span.stop > next_size:
                ended_begin = max(next_size, span.start)
                self._final[ended_begin : span.stop] = states[end + ended_begin : end + span.stop]

    def final(self) -> torch.Tensor:
        """Return the final states [N, H, K, V] in the order of the sequences."""
        return self._chunks.unsorted(self._final)


class SweepBack:
    """Reverse sweep of gradients of states through chunks: dS_before = Mᵀ · dS + Y.

    Attributes:
        d_states_after: [n, H, K, V], gradient of the state after each chunk; filled by `advance`.

    Args:
        chunks: the n chunks of N sequences.
        d_final: [N, H, K, V], gradient of the final states; may be expanded zeros.
    """

    def __init__(self, chunks: Chunks, d_final: torch.Tensor) -> None:
        self._chunks, self._steps = chunks, _Steps(chunks)
        self._d_final = chunks.sorted(d_final)
        self.d_states_after = d_final.new_empty((chunks.count, *d_final.shape[1:]))
        self._d_initial = d_final.new_empty(d_final.shape)
        num_active = self._steps.sizes[0]
        self._d_initial[num_active:] = self._d_final[num_active:]

    def advance(self, block: slice, transition: torch.Tensor, added: torch.Tensor) -> None:
        """Carry the gradients back through the preceding chunks.

        Args:
            block: the slice of m chunks; each block ends where the previous call's block began.
            transition: M, as in the forward sweep.
            added: Y [m, H, K, V], gradient of each chunk's initial state from the chunk's outputs.
        """
        grads, steps = self.d_states_after, self._steps
        for step, span in reversed(list(steps.spans(block))):
            begin, next_size = steps.begins[step], steps.sizes[step + 1]
            if span.stop > next_size:
                ended_begin = max(next_size, span.start)
                grads[begin + ended_begin : begin + span.stop] = self._d_final[
                    ended_begin : span.stop
                ]
            chunks = slice(begin + span.start, begin + span.stop)
            rows = slice(chunks.start - block.start, chunks.stop - block.start)
            if step:
                previous_begin = steps.begins[step - 1]
                out = grads[previous_begin + span.start : previous_begin + span.stop]
            else:
                out = self._d_initial[span]
            transposed = transition[rows]
            if transposed.shape[-1] > 1:
                transposed = transposed.mT
            _affine(transposed, grads[chunks], added[rows], out)

    def d_initial(self) -> torch.Tensor:
        """Return the gradient of the initial states [N, H, K, V] in the order of the sequences."""
        return self._chunks.unsorted(self._d_initial)


def _affine(
    transition: torch.Tensor,
    state: torch.Tensor,
    added: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write M · S + X [m, H, K, V] to `out`, with M [m, H, K, K] or [m, H, 1, 1]."""
    if transition.shape[-1] == 1:
        if added is None:
            torch.mul(transition, state, out=out)
        else:
            torch.addcmul(added, transition, state, out=out)
        return
    matrix, vectors, flat_out = transition.flatten(0, 1), state.flatten(0, 1), out.flatten(0, 1)
    if added is None:
        torch.bmm(matrix, vectors, out=flat_out)
    else:
        torch.baddbmm(added.flatten(0, 1), matrix, vectors, out=flat_out)
