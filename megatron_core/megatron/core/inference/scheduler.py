# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: schedule the tokens of each step.

The scheduler handles neither tensors nor the model. `add` queues a `SequenceState`, `schedule`
returns a `SchedulerOutput`, and `commit` records the result of the step. Ranks that add the same
sequences in the same order therefore schedule the same steps without communication.

A step is in flight from `schedule` to `commit`. Several steps may be in flight: a sequence then has
tokens that the device is computing (`num_in_flight_tokens`) and may have tokens that the device is
sampling (`num_pending_tokens`).

Policy. A step serves the running sequences, the oldest first, then admits waiting sequences.
Sequences are ordered by `priority` (lower first), then by arrival: oldest and youngest refer to
this order. Each sequence computes its tokens that are not in the cache
yet, within the step's token budget (chunked prefill, Agrawal et al. 2023, arXiv 2308.16369). A
sequence in decode computes its newest token and samples the next. Blocks are allocated on demand.
When none is free, the youngest sequence is preempted: it frees all of its blocks and waits for
recomputation (Kwon et al. 2023, section 4.5). The oldest sequence therefore always makes progress,
and every request that fits in the cache on its own finishes, unless requests with a lower
`priority` number keep arriving.

Prefix caching. A request waits if another request is about to compute its next block; see
`kv_cache_manager`.

Steady decode. Most steps resemble the previous step: every running sequence has one new token.
`schedule` then advances the previous output; block allocation and snapshots run only for sequences
that enter or fill a block.

Speculative decoding. Draft tokens use the remaining token budget and free blocks; they neither
delay nor preempt a sequence. `commit` receives the number of accepted drafts. Rejected drafts keep
no blocks and no block hashes. If a draft is rejected, recurrent states return to their values
before the step, and the next step recomputes the accepted tokens. Nothing else is scheduled for a
sequence while its drafts are in flight, because its next position is unknown. Tokens that a grammar
forces are scheduled as drafts, with or without speculative decoding.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from megatron.core.inference.block_pool import BlockGroup
from megatron.core.inference.cache import CacheSizes, StateCache
from megatron.core.inference.kv_cache_manager import KVCacheManager
from megatron.core.inference.request_state import (
    SchedulerOutput,
    SchedulerStats,
    SequenceState,
)

#: Maps (sequence, largest number of drafts) pairs to the drafts of each sequence. Drafts follow the
#: sequence's tokens and its pending token.
ProposeDrafts = Callable[[Sequence[tuple[SequenceState, int]]], Sequence[Sequence[int]]]


def _block_groups(sizes: CacheSizes, block_size: int, step_tokens: int) -> list[BlockGroup]:
    """Return the groups of attention layers of a cache, for steps of at most `step_tokens`."""
    if sizes.num_window_blocks is None:
        return [BlockGroup(sizes.num_blocks, block_size, window=sizes.window)]
    assert sizes.window is not None, "some layers have a window"
    # A sequence needs blocks for its window and for the tokens of a step.
    windowed = BlockGroup(
        sizes.num_window_blocks,
        block_size,
        window=sizes.window,
        max_per_sequence=-(-(sizes.window + step_tokens) // block_size) + 1,
    )
    return [BlockGroup(sizes.num_blocks, block_size), windowed]


class Scheduler:
    """Schedule the steps of an engine.

    Args:
        sizes: sizes of the cache.
        block_size: tokens per block.
        max_num_seqs: largest number of running sequences.
        max_num_batched_tokens: token budget of a step. If it is smaller than the number of running
            sequences, the youngest sequences wait.
        prefix_caching: share full blocks among sequences with a common prefix.
        states: slots of the recurrent mixers; None for a model without recurrent mixers.
        token_multiple: pad the number of tokens of a step to a multiple of this.
    """

    def __init__(
        self,
        *,
        sizes: CacheSizes,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        states: StateCache | None = None,
        token_multiple: int = 1,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError(
                f"{max_num_seqs} sequences and {max_num_batched_tokens} tokens per step: use "
                "at least one of each"
            )
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.token_multiple, self.stats = token_multiple, SchedulerStats()
        self.kv_cache = KVCacheManager(
            groups=_block_groups(sizes, block_size, max_num_batched_tokens),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            prefix_caching=prefix_caching,
            states=states,
            stats=self.stats,
        )
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # ordered by priority, then by age
        # The previous step if it was pure decode over all running sequences, and no sequence has
        # been freed since. `_free` must reset it.
        self._steady: SchedulerOutput | None = None

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence that fits the cache (see `KVCacheManager.check`)."""
        insort_right(self.waiting, seq, key=lambda waiting_seq: waiting_seq.priority)

    def remove(self, seq: SequenceState) -> None:
        """Remove a finished or aborted sequence and free its blocks and slots."""
        if seq.row >= 0:
            self.running.remove(seq)
            self._free(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def preempt_all(self) -> None:
        """Preempt all running sequences; they wait for recomputation."""
        # Youngest first: each preempted sequence is inserted at the head of its priority in the
        # waiting queue, so the queue ends up in the original order.
        for seq in reversed(self.running.copy()):
            self._preempt(seq)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache after the weights have changed."""
        self.kv_cache.reset_prefix_cache(self.running)

    # --- one step ---------------------------------------------------------------------------------

    def schedule(
        self, propose: ProposeDrafts | None = None, *, stages: int = 1
    ) -> SchedulerOutput | None:
        """Schedule a step; None if no sequence has a token to compute.

        Args:
            propose: returns draft tokens; None disables speculative decoding.
            stages: number of pipeline stages, which is the number of steps in flight. With several
                stages each step takes at most 1 / `stages` of the sequences, and no sequence whose
                next token another step samples.
        """
        steady = self._advance_steady() if propose is None and stages == 1 else None
        if steady is not None:
            return steady
        budget = self.max_num_batched_tokens
        max_scheduled = -(-min(len(self.running) + len(self.waiting), self.max_num_seqs) // stages)
        scheduled: list[tuple[SequenceState, int]] = []
        for seq in self.running.copy():
            if len(scheduled) == max_scheduled:
                break
            # The loop runs over a copy: `_ensure_blocks` may have preempted this sequence for an
            # older one.
            if seq.row < 0 or seq.is_blocked:
                continue
            if stages > 1 and seq.num_pending_tokens:
                continue
            count = self.kv_cache.clip_to_snapshot(seq, min(seq.num_new_tokens, budget))
            if count and self._ensure_blocks(seq, seq.num_planned_tokens + count):
                scheduled.append((seq, count))
                budget -= count
        for seq in list(self.waiting):
            if (
                len(scheduled) == max_scheduled
                or len(self.running) == self.max_num_seqs
                or not budget
            ):
                break
            admitted = self._admit(seq, budget)
            # Stop here instead of trying later sequences: small ones must not starve a large one.
            if admitted is None:
                break
            if admitted:
                scheduled.append((seq, admitted))
                budget -= admitted
        if not scheduled:
            return None
        if propose is not None or any(seq.forced_tokens for seq, _ in scheduled):
            self._add_drafts(scheduled, budget, propose)
        # Kernels need decode rows first. The sort is stable, so ties keep their priority order.
        scheduled.sort(key=lambda entry: entry[1] > 1)
        scheduler_output = SchedulerOutput.pack(
            scheduled,
            block_tables=self.kv_cache.block_tables,
            block_size=self.kv_cache.block_size,
            token_multiple=self.token_multiple,
            state_copies=self.kv_cache.take_state_copies(),
        )
        self._record(scheduler_output)
        return scheduler_output

    def _advance_steady(self) -> SchedulerOutput | None:
        """Return the previous steady decode step advanced by one token.

        Returns None if the full path must run: a sequence may be admitted or was freed, waits for a
        step in flight, has forced tokens, or is preempted by the block allocation here.
        """
        previous = self._steady
        if previous is None or (self.waiting and len(self.running) < self.max_num_seqs):
            return None
        seqs, size = previous.sequences, self.kv_cache.block_size
        if any(seq.num_pending_tokens or seq.forced_tokens for seq in seqs):
            return None
        starts = tuple(start + 1 for start in previous.num_computed_tokens)
        new_block_rows = [n for n, start in enumerate(starts) if start % size == 0]
        for n in new_block_rows:
            self._ensure_blocks(seqs[n], starts[n] + 1)
            # `_ensure_blocks` preempted a sequence. The full path keeps the blocks of this loop.
            if self._steady is None:
                return None
        has_states = self.kv_cache.has_states
        self._steady = previous.advance(
            starts,
            new_block_rows,
            block_tables=self.kv_cache.block_tables,
            block_size=size,
            state_copies=self.kv_cache.take_state_copies() if has_states else (),
        )
        for seq in seqs:
            seq.num_in_flight_tokens += 1
            seq.num_pending_tokens += 1
        if has_states:
            for n, start in enumerate(starts):
                if start % size == size - 1:
                    self.kv_cache.reserve_snapshot(seqs[n], start)
        self.stats.steps += 1
        self.stats.computed += len(seqs)
        self.stats.sampled += len(seqs)
        return self._steady

    def commit(
        self, scheduler_output: SchedulerOutput, accepted: Mapping[SequenceState, int] | None = None
    ) -> None:
        """Record that the oldest step in flight has been computed.

        Call it before the sampled tokens are appended. A sequence that was preempted since the step
        was scheduled has lost its cache entries and is skipped.

        Args:
            accepted: number of accepted drafts by sequence; `commit` appends the accepted drafts.
        """
        accepted = accepted or {}
        seqs, drafts = scheduler_output.sequences, scheduler_output.draft_tokens
        for seq, draft_tokens in zip(seqs, drafts, strict=True):
            # Accepted drafts are output tokens, so a preempted sequence keeps them as well.
            if draft_tokens:
                seq.tokens += draft_tokens[: accepted.get(seq, 0)]
                seq.draft_tokens = ()
                if seq.forced_tokens:
                    self.stats.forced += accepted.get(seq, 0)
                else:
                    self.stats.drafted += len(draft_tokens)
                    self.stats.accepted += accepted.get(seq, 0)
        size, counts = self.kv_cache.block_size, scheduler_output.num_scheduled_tokens
        for n, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
            # An admission after the step was scheduled starts from other blocks.
            if seq.row < 0 or seq.num_admissions != scheduler_output.admissions[n]:
                continue
            num_before = seq.num_computed_tokens
            seq.num_computed_tokens += count
            seq.num_in_flight_tokens -= count
            if drafts[n]:
                num_rejected = len(drafts[n]) - accepted.get(seq, 0)
                self.kv_cache.roll_back(seq, num_before, num_rejected)
            if seq.cacheable and seq.num_computed_tokens // size > num_before // size:
                self.kv_cache.cache_full_blocks(seq, num_before)
            if self.kv_cache.has_windows:
                self.kv_cache.free_out_of_window(seq)
        for n in scheduler_output.sampled:
            seq = seqs[n]
            if seq.draft_length.max_drafts and not seq.forced_tokens:
                seq.draft_length.update(len(drafts[n]), accepted.get(seq, 0))

    def _ensure_blocks(self, seq: SequenceState, num_tokens: int) -> bool:
        """Allocate blocks so that a running sequence holds `num_tokens` tokens.

        Preempts the youngest running sequences if needed. Returns False if the sequence itself was
        preempted.
        """
        while not self.kv_cache.allocate(seq, num_tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is seq:
                return False
        return True

    def _record(self, scheduler_output: SchedulerOutput) -> None:
        """Update the counters and the sequences of a new step."""
        counts, sampled = scheduler_output.num_scheduled_tokens, scheduler_output.sampled
        self.stats.steps += 1
        self.stats.computed += sum(counts)
        self.stats.sampled += len(sampled)
        for seq, count in zip(scheduler_output.sequences, counts, strict=True):
            num_before = seq.num_planned_tokens
            seq.num_in_flight_tokens += count
            # With drafts the end of the step is unknown; `roll_back` reserves the snapshot.
            if not seq.draft_tokens:
                self.kv_cache.reserve_snapshot(seq, num_before)
        for n in sampled:
            scheduler_output.sequences[n].num_pending_tokens += 1
        is_steady = scheduler_output.decode_rows == len(sampled) == len(self.running)
        has_drafts = any(scheduler_output.draft_tokens)
        self._steady = scheduler_output if is_steady and not has_drafts else None

    def _add_drafts(
        self, scheduled: list[tuple[SequenceState, int]], budget: int, propose: ProposeDrafts | None
    ) -> None:
        """Add drafts to sampled sequences within the remaining token budget and free blocks."""
        rooms: list[tuple[int, int]] = []  # (index into `scheduled`, largest number of drafts)
        for n, (seq, count) in enumerate(scheduled):
            room = self._max_draft_tokens(seq, count, budget)
            if room > 0:
                rooms.append((n, room))
                budget -= room
                # Reserve blocks for all drafts before any is proposed: the pool must not be
                # promised twice. Unused blocks are freed below.
                allocated = self.kv_cache.allocate(seq, seq.num_planned_tokens + count + room)
                assert allocated
        unforced = [
            (scheduled[n][0], room) for n, room in rooms if not scheduled[n][0].forced_tokens
        ]
        proposed = iter(propose(unforced) if propose is not None and unforced else ())
        for n, room in rooms:
            seq, count = scheduled[n]
            drafts = seq.forced_tokens[:room] or next(proposed)
            seq.draft_tokens = tuple(drafts) if drafts and self.kv_cache.save_states(seq) else ()
            scheduled[n] = seq, count + len(seq.draft_tokens)
            self.kv_cache.free_after(seq, scheduled[n][1] + seq.num_planned_tokens)

    def _max_draft_tokens(self, seq: SequenceState, count: int, budget: int) -> int:
        """Return the largest number of drafts for a scheduled sequence."""
        if count != seq.num_new_tokens:
            return 0
        num_planned = seq.num_planned_tokens + count
        # The last token is sampled but never computed, so a draft there would be wasted.
        num_tokens = len(seq.tokens) + seq.num_pending_tokens
        num_forced, length = len(seq.forced_tokens), seq.draft_length
        max_drafts = num_forced or length.max_drafts
        room = min(num_forced or length.next_length, budget, seq.max_length - num_tokens - 1)
        room = min(room, self.kv_cache.num_free_tokens(seq) - num_planned)
        if self.kv_cache.has_states:
            # Recomputed drafts of the previous step reduce the number of new drafts, so that the
            # step's size stays bounded. A step must also end at the block boundary, where the
            # prefix cache needs a snapshot of the states.
            room = min(room, max_drafts + 1 - count)
            if seq.cacheable:
                room = min(room, -num_planned % self.kv_cache.block_size)
        return room

    def _preempt(self, seq: SequenceState) -> None:
        """Preempt a running sequence; it waits ahead of all other sequences of its priority."""
        self.stats.preempted += 1
        self.running.remove(seq)
        self._free(seq)
        insort_left(self.waiting, seq, key=lambda waiting_seq: waiting_seq.priority)

    def _free(self, seq: SequenceState) -> None:
        """Free the memory of a sequence that stops running."""
        self._steady = None
        self.kv_cache.free(seq)

    def _admit(self, seq: SequenceState, budget: int) -> int | None:
        """Admit a waiting sequence.

        Returns:
            The number of tokens to schedule; 0 if the sequence must wait for a block that another
            sequence computes; None if there is no room, or a step in flight samples its tokens.
        """
        # A preempted sequence may wait for a token of a step that was in flight.
        if seq.num_pending_tokens:
            return None
        prefix = self.kv_cache.find_prefix(seq)
        if prefix is None:
            self.stats.waits += 1
            return 0
        if not self.kv_cache.admit(seq, prefix, is_alone=not self.running):
            return None
        self.waiting.remove(seq)
        insort_right(self.running, seq, key=lambda running_seq: running_seq.priority)
        seq.num_admissions += 1
        if seq.num_cached_tokens is None:
            # Only the first admission counts as a lookup of the prompt.
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            if self.kv_cache.prefix_caching and not seq.needs_prompt_logits:
                self.stats.queried += seq.num_prompt_tokens
                self.stats.hit += seq.num_cached_tokens
        count = self.kv_cache.clip_to_snapshot(seq, min(seq.num_new_tokens, budget))
        allocated = self.kv_cache.allocate(seq, seq.num_computed_tokens + count)
        assert allocated
        return count
