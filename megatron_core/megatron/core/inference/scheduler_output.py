# SPDX-License-Identifier: Apache-2.0
"""`SchedulerOutput`: the arrays of one step, from the scheduler to the model runner.

`SchedulerOutput.pack` lays the tokens of the scheduled sequences out as a batch. Most steps
resemble the previous step: `advance` then increments its arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron.core.inference.request_state import SequenceState

#: (source, target) slots of a copy of recurrent states; source None writes zeros.
StateCopies = tuple[tuple[int | None, int], ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class SchedulerOutput:
    """One step: t scheduled tokens of the sequences, packed into a batch of b rows.

    The rows are ordered: sequences with one token, then padding rows, then sequences with several
    tokens. A padding row has one token, no context and no cache slot.

    Args:
        sequences: the scheduled sequences in row order, without padding.
        num_scheduled_tokens: new tokens of each sequence, drafts included.
        draft_tokens: drafts of each sequence, its last scheduled tokens.
        num_computed_tokens: tokens of each sequence in the cache before the step.
        admissions: `num_admissions` of each sequence.
        decode_rows: number of sequences with one token.
        padding: number of padding rows.
        tokens, positions: int32 [t]. A token that a step in flight still samples is encoded as
            -1 - `row`; the device replaces it.
        query_bounds: int32 [b + 1], offset of each row's first token in `tokens`.
        context_lengths: int32 [b], tokens of each row in the cache after the step.
        block_table: int32 [b, w]. Kernels never read entries beyond a row's context.
        slot_mapping: int32 [t], cache slot of each token (block id * block size + offset); -1 for
            padding.
        state_slots: int32 [b]; -1 for padding and for models without states.
        state_copies: (source, target) state slots to copy before the step, in order. Source None
            writes zeros.
        sampled: indices of the sequences whose scheduled tokens reach their end; the step samples a
            token for each.
        sampled_rows: `row` of each sampled sequence, unique among running sequences.
    """

    sequences: tuple[SequenceState, ...]
    num_scheduled_tokens: tuple[int, ...]
    draft_tokens: tuple[tuple[int, ...], ...]
    num_computed_tokens: tuple[int, ...]
    admissions: tuple[int, ...]
    decode_rows: int
    padding: int
    tokens: np.ndarray
    positions: np.ndarray
    query_bounds: np.ndarray
    context_lengths: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    state_slots: np.ndarray
    state_copies: StateCopies
    sampled: tuple[int, ...]
    sampled_rows: tuple[int, ...]

    @staticmethod
    def pack(
        scheduled: Sequence[tuple[SequenceState, int]],
        *,
        block_table: np.ndarray,
        block_size: int,
        token_multiple: int,
        state_copies: StateCopies,
    ) -> SchedulerOutput:
        """Return the step of (sequence, number of new tokens) pairs, decode rows first.

        Args:
            scheduled: the pairs, before any counter of the sequences records the step.
            block_table: int32 [rows, w], blocks of all running sequences by `row`.
            block_size: tokens per block.
            token_multiple: pad the number of tokens to a multiple of this.
            state_copies: copies before the step.
        """
        seqs = tuple(seq for seq, _ in scheduled)
        counts = tuple(count for _, count in scheduled)
        decode_rows = sum(count == 1 for count in counts)
        padding = -sum(counts) % token_multiple
        sizes = np.ones(len(seqs) + padding, dtype=np.int32)
        # Batch row of each sequence. Padding rows lie between decode and prefill, so that decode
        # kernels see one contiguous range.
        batch_rows = np.arange(len(seqs))
        batch_rows[decode_rows:] += padding
        sizes[batch_rows] = counts
        bounds = np.zeros(len(sizes) + 1, dtype=np.int32)
        np.cumsum(sizes, out=bounds[1:])
        starts, contexts = np.zeros_like(sizes), np.zeros_like(sizes)
        num_computed = tuple(seq.num_planned_tokens for seq in seqs)
        starts[batch_rows] = num_computed
        contexts[batch_rows] = starts[batch_rows] + sizes[batch_rows]
        width = -(-int(contexts.max()) // block_size)
        table = np.zeros((len(sizes), width), dtype=np.int32)
        table[batch_rows] = block_table[[seq.row for seq in seqs], :width]
        states = np.full(len(sizes), -1, dtype=np.int32)
        states[batch_rows] = [seq.state_slot for seq in seqs]
        row_of_token = np.repeat(np.arange(len(sizes)), sizes)
        positions = np.arange(bounds[-1], dtype=np.int32) + (starts - bounds[:-1])[row_of_token]
        block_ids = table[row_of_token, positions // block_size]
        slots = block_ids * block_size + positions % block_size
        slots[decode_rows : decode_rows + padding] = -1
        token_ids = _token_ids(scheduled)
        tokens = np.zeros_like(positions)
        tokens[:decode_rows] = token_ids[:decode_rows]
        tokens[decode_rows + padding :] = token_ids[decode_rows:]
        # A step that reaches the end of a sequence, drafts included, samples its next token.
        new_tokens = [seq.num_new_tokens + len(seq.draft_tokens) for seq in seqs]
        sampled = tuple(n for n, count in enumerate(counts) if new_tokens[n] == count)
        return SchedulerOutput(
            sequences=seqs,
            num_scheduled_tokens=counts,
            draft_tokens=tuple(seq.draft_tokens for seq in seqs),
            num_computed_tokens=num_computed,
            admissions=tuple(seq.num_admissions for seq in seqs),
            decode_rows=decode_rows,
            padding=padding,
            tokens=tokens,
            positions=positions,
            query_bounds=bounds,
            context_lengths=contexts,
            block_table=table,
            slot_mapping=slots,
            state_slots=states,
            state_copies=state_copies,
            sampled=sampled,
            sampled_rows=tuple(seqs[n].row for n in sampled),
        )

    def advance(
        self,
        starts: tuple[int, ...],
        new_block_rows: Sequence[int],
        *,
        block_table: np.ndarray,
        block_size: int,
        state_copies: StateCopies,
    ) -> SchedulerOutput:
        """Return the next step of a pure decode step: one more token of each sequence.

        Args:
            starts: computed tokens of each sequence before the next step.
            new_block_rows: indices of the sequences that enter a new block.
            block_table, block_size, state_copies: see `pack`.
        """
        count = len(self.sequences)
        # `np.array` copies: the thread that computes this step may still read its arrays.
        arrays = np.array((self.positions, self.context_lengths, self.slot_mapping))
        # Padding rows follow the sequences and must not advance.
        arrays[:, :count] += 1
        positions, contexts, slots = arrays
        table = self.block_table
        if new_block_rows:
            width = -(-(max(starts) + 1) // block_size)
            table = np.zeros((len(table), width), dtype=np.int32)
            table[:count] = block_table[list(self.sampled_rows), :width]
            blocks = table[new_block_rows, positions[new_block_rows] // block_size]
            slots[new_block_rows] = blocks * block_size
        tokens = np.zeros_like(self.tokens)
        tokens[:count] = [seq.tokens[-1] for seq in self.sequences]
        # Unlike `dataclasses.replace` this skips `__init__` and keeps the cached `logits_indices`.
        step = object.__new__(SchedulerOutput)
        vars(step).update(
            vars(self),
            num_computed_tokens=starts,
            tokens=tokens,
            positions=positions,
            context_lengths=contexts,
            block_table=table,
            slot_mapping=slots,
            state_copies=state_copies,
        )
        return step

    def batch_row(self, index: int) -> int:
        """Return the batch row of `sequences[index]`; padding rows follow the decode rows."""
        return index if index < self.decode_rows else index + self.padding

    def next_tokens(self, max_tokens: int) -> list[list[int]]:
        """Return for each sequence up to `max_tokens` tokens after the scheduled tokens, as far as
        the host has them."""
        starts, counts = self.num_computed_tokens, self.num_scheduled_tokens
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        pairs = zip(self.sequences, ends, strict=True)
        return [seq.tokens[end : end + max_tokens] for seq, end in pairs]

    @cached_property
    def logits_indices(self) -> np.ndarray:
        """Return int64 indices into the t tokens whose logits are sampled: for each sampled
        sequence its last token before the drafts, then its drafts."""
        rows = np.array(self.sampled, dtype=np.int64)
        rows[rows >= self.decode_rows] += self.padding
        ends = self.query_bounds[rows + 1]
        if not any(self.draft_tokens):
            return ends - 1
        num_drafts = [len(self.draft_tokens[n]) for n in self.sampled]
        pairs = zip(ends, num_drafts, strict=True)
        return np.concatenate([np.arange(end - 1 - count, end) for end, count in pairs])

    def digest(self) -> bytes:
        """Return a SHA-256 digest of the step's arrays, to compare the schedules of ranks."""
        hasher = hashlib.sha256(repr((self.sampled_rows, self.state_copies)).encode())
        for array in (
            self.tokens,
            self.positions,
            self.query_bounds,
            self.context_lengths,
            self.block_table,
            self.slot_mapping,
            self.state_slots,
        ):
            hasher.update(array.tobytes())
        return hasher.digest()


def _token_ids(scheduled: Sequence[tuple[SequenceState, int]]) -> list[int]:
    """Return the scheduled token ids of all sequences, drafts included."""
    token_ids: list[int] = []
    for seq, count in scheduled:
        start = seq.num_planned_tokens
        # The host does not have a pending token yet: name the buffer row that will hold it.
        pending = [-1 - seq.row] if seq.num_pending_tokens else None
        token_ids += pending or seq.tokens[start : start + count]
        token_ids += seq.draft_tokens
    return token_ids


class SharedStep(NamedTuple):
    """Step properties that data-parallel ranks agree on if they share experts (expert parallelism).

    Args:
        max_tokens: largest number of scheduled tokens on any rank.
        eager: True if the step of any rank cannot run as a graph.
    """

    max_tokens: int
    eager: bool


@dataclass
class SchedulerStats:
    """Counters of the scheduler and the prefix cache since the start.

    Args:
        steps: scheduled steps.
        computed: scheduled tokens, drafts included.
        queried: prompt tokens that were looked up in the prefix cache.
        hit: prompt tokens that the prefix cache had.
        waits: how often a request waited for blocks that another request was computing.
        preempted: preemptions.
        snapshots: state snapshots that entered the prefix cache.
        restored: sequences that were admitted with a state snapshot.
        wasted: tokens sampled for outputs that had already ended.
        overlapped: steps that were launched before the previous step had finished.
        sampled: sampled sequences, summed over steps.
        drafted: verified draft tokens, without forced tokens.
        accepted: accepted draft tokens, without forced tokens.
        forced: accepted tokens that a grammar forced.
    """

    steps: int = 0
    computed: int = 0
    queried: int = 0
    hit: int = 0
    waits: int = 0
    preempted: int = 0
    snapshots: int = 0
    restored: int = 0
    wasted: int = 0
    overlapped: int = 0
    sampled: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0

    @property
    def tokens_per_forward(self) -> float:
        """Mean number of new tokens per sampled sequence and step; 1 without drafts."""
        num_tokens = self.sampled + self.accepted + self.forced
        return num_tokens / self.sampled if self.sampled else 0.0

    def __add__(self, other: SchedulerStats) -> SchedulerStats:
        """Return the sum of the counters of two engines."""
        return SchedulerStats(
            **{name: count + vars(other)[name] for name, count in vars(self).items()}
        )
