# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: schedule the tokens, KV-cache blocks and state slots of each step.

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

Prefix caching. Full blocks are shared among sequences with a common prefix (`blocks`). Recurrent
mixers also need their states at the end of the shared prefix, so the scheduler copies states to
separate slots (snapshots) at several block boundaries: evenly spaced over the prompt, at the last
full block of the prompt, where a waiting prompt diverges from the prompt being computed, and at the
latest full block of the output. The least recently used snapshot is evicted first. A request waits
if another request is about to compute its next block.

Steady decode. Most steps resemble the previous step: every running sequence has one new token.
`schedule` then increments the arrays of the previous output; block allocation and snapshots run
only for sequences that enter or fill a block.

Speculative decoding. Draft tokens use the remaining token budget and free blocks; they neither
delay nor preempt a sequence. `commit` receives the number of accepted drafts. Rejected drafts keep
no blocks and no block hashes. If a draft is rejected, recurrent states return to their values
before the step, and the next step recomputes the accepted tokens. Nothing else is scheduled for a
sequence while its drafts are in flight, because its next position is unknown. Tokens that a grammar
forces are scheduled as drafts, with or without speculative decoding.
"""

from __future__ import annotations

import hashlib
import math
from bisect import insort_left, insort_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron.core.inference.blocks import BlockPool, hash_blocks
from megatron.core.inference.cache import StateCache
from megatron.core.inference.requests import RequestError

#: Upper bound of the evenly spaced state snapshots per prompt.
SNAPSHOTS_PER_PROMPT = 10

#: A sequence drafts k > 1 tokens only if all k are accepted with at least this probability.
MIN_DRAFT_PROBABILITY = 0.25

#: Below this acceptance rate a sequence stops drafting, for at most this many steps at a time.
MIN_ACCEPTANCE_RATE, MAX_BACKOFF_STEPS = 0.2, 32


@dataclass(kw_only=True)
class DraftLength:
    """Adaptive number of draft tokens per step, from the acceptance rate of earlier drafts.

    Let c estimate the probability that a draft is accepted if all drafts before it are. The length
    is the largest k with c^k >= `MIN_DRAFT_PROBABILITY`, from 1 to `max_drafts`. If c is below
    `MIN_ACCEPTANCE_RATE`, for example after two steps that accept none, the sequence drafts a
    single token after 4, 8, ..., `MAX_BACKOFF_STEPS` steps to detect a change.

    Args:
        max_drafts: upper bound of the length.
        acceptance_rate: mean over all drafts up to the first rejected draft of each step; an
            exponential moving average after ten drafts.
        num_trials: number of drafts in the mean.
        num_failed_probes: consecutive drafting steps that left the rate below the threshold; the
            first begins the backoff.
        backoff_steps: remaining steps without drafts.
    """

    max_drafts: int = 0
    acceptance_rate: float = 0.5
    num_trials: int = 0
    num_failed_probes: int = 0
    backoff_steps: int = 0

    @property
    def next_length(self) -> int:
        """Largest number of drafts in the next step."""
        if self.backoff_steps:
            return 0
        return min(
            self.max_drafts,
            max(1, int(math.log(MIN_DRAFT_PROBABILITY) / math.log(self.acceptance_rate))),
        )

    def update(self, drafted: int, accepted: int) -> None:
        """Record the drafts of a step and the number of accepted drafts."""
        if not drafted:
            self.backoff_steps = max(0, self.backoff_steps - 1)
            return
        for is_accepted in [1] * accepted + [0] * (accepted < drafted):
            self.num_trials += 1
            self.acceptance_rate += max(0.1, 1 / (self.num_trials + 1)) * (
                is_accepted - self.acceptance_rate
            )
        # The lower clamp lets one accepted draft lift the rate above the backoff threshold.
        self.acceptance_rate = min(max(self.acceptance_rate, 0.15), 0.99)
        if self.acceptance_rate < MIN_ACCEPTANCE_RATE:
            self.num_failed_probes += 1
            self.backoff_steps = min(MAX_BACKOFF_STEPS, 2 ** (1 + self.num_failed_probes))
        else:
            self.num_failed_probes = 0


#: Maps (sequence, largest number of drafts) pairs to the drafts of each sequence. Drafts follow the
#: sequence's tokens and its pending token.
ProposeDrafts = Callable[[Sequence[tuple["SequenceState", int]]], Sequence[Sequence[int]]]


@dataclass(eq=False)
class SequenceState:
    """Scheduler state of one sequence, waiting or running.

    Args:
        tokens: token ids of the prompt and of the output so far.
        num_prompt_tokens: length of the prompt.
        max_length: largest length of prompt and output together.
        priority: sequences with a lower number are served first and preempted last.
        needs_prompt_logits: the request asks for prompt log-probabilities, so the prompt is
            computed completely and never read from the prefix cache.
        needs_output_tokens: sampling depends on the output tokens on the host (penalties, masks),
            so no step is scheduled while another step samples a token of the sequence.

    Attributes:
        num_computed_tokens: tokens with keys, values and states in the cache.
        num_in_flight_tokens: further tokens that steps in flight compute.
        num_pending_tokens: tokens that steps in flight sample; they follow `tokens`.
        num_admissions: how often the sequence has been admitted. A step scheduled under an earlier
            admission does not update the sequence.
        num_cached_tokens: prompt tokens that the first admission found in the prefix cache; None
            before it.
        row: row of the block table while the sequence runs, else -1.
        state_slot: slot of the recurrent states while the sequence runs; -1 without states.
        block_ids: cache blocks in order; -1 for a block behind the sliding window.
        block_hashes: hashes of the full blocks.
        snapshot_positions: numbers of tokens after which the states are copied.
        cacheable: other sequences may reuse the blocks. False once the weights were replaced during
            the sequence: its keys, values and states then mix the old weights and the new weights.
        forced_tokens: tokens that the grammar forces next; drafts of the next step.
        draft_tokens: drafts that a step in flight verifies.
        draft_length: adaptive number of drafts of the next step.
        saved_state_slot: slot of the states before the drafts while a step verifies drafts,
            else -1.
    """

    tokens: list[int]
    num_prompt_tokens: int
    max_length: int
    priority: int = 0
    needs_prompt_logits: bool = False
    needs_output_tokens: bool = False
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_pending_tokens: int = 0
    num_admissions: int = 0
    num_cached_tokens: int | None = None
    row: int = -1
    state_slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    snapshot_positions: set[int] = field(default_factory=set)
    cacheable: bool = True
    forced_tokens: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = ()
    draft_length: DraftLength = field(default_factory=DraftLength)
    saved_state_slot: int = -1
    _latest_snapshot: bytes | None = None
    # Position of a snapshot that a step in flight reaches -> its state slot.
    _reserved_snapshots: dict[int, int] = field(default_factory=dict)

    @property
    def num_planned_tokens(self) -> int:
        """Tokens in the cache once all steps in flight have finished."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are not scheduled yet."""
        return len(self.tokens) + self.num_pending_tokens - self.num_planned_tokens

    @property
    def is_blocked(self) -> bool:
        """Whether the next step must wait for the token that a step in flight samples."""
        is_last = len(self.tokens) + self.num_pending_tokens >= self.max_length
        return self.num_pending_tokens > 0 and (
            self.needs_output_tokens or is_last or bool(self.draft_tokens)
        )

    def append(self, token: int) -> None:
        """Append a sampled token; it is no longer pending."""
        self.tokens.append(token)
        self.num_pending_tokens -= 1


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
    state_copies: tuple[tuple[int | None, int], ...]
    sampled: tuple[int, ...]
    sampled_rows: tuple[int, ...]

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

    def replace(self, **changes: Any) -> SchedulerOutput:
        """Return a copy with changed fields. Unlike `dataclasses.replace` it skips `__init__` and
        keeps the cached `logits_indices`, which the steady path does not change."""
        copy = object.__new__(SchedulerOutput)
        vars(copy).update(vars(self) | changes)
        return copy

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


class Scheduler:
    """Schedule the steps of an engine.

    Args:
        num_blocks: blocks of the KV cache.
        block_size: tokens per block.
        max_num_seqs: largest number of running sequences.
        max_num_batched_tokens: token budget of a step. If it is smaller than the number of running
            sequences, the youngest sequences wait.
        prefix_caching: share full blocks among sequences with a common prefix.
        states: slots of the recurrent mixers; None for a model without recurrent mixers.
        window: largest attention window of any layer, in tokens; None with full attention.
        token_multiple: pad the number of tokens of a step to a multiple of this.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        states: StateCache | None = None,
        window: int | None = None,
        token_multiple: int = 1,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError(
                f"{max_num_seqs} sequences and {max_num_batched_tokens} tokens per step: use "
                "at least one of each"
            )
        self.block_size, self.max_num_seqs, self.max_num_batched_tokens = (
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
        )
        self.prefix_caching, self.window = prefix_caching, window
        self.token_multiple = token_multiple
        self.pool = BlockPool(num_blocks)
        self.stats = SchedulerStats()
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # ordered by priority, then by age
        self._states = states
        # Block hash -> state slot. The order is LRU: the first entry is evicted first.
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        # Copies run before the next step, on its stream, so they see the states that the steps in
        # flight leave. A slot may be a source and then a target, so the order matters.
        self._state_copies: list[tuple[int | None, int]] = []
        # Block hash -> running sequence that will compute the block. Prompts only.
        self._block_owners: dict[bytes, SequenceState] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        # Block table of all rows; it grows in width with the longest sequence. Rows keep stale
        # entries after a sequence has left, which `context_lengths` hides.
        self._block_table = np.zeros((max_num_seqs, 0), dtype=np.int32)
        # The previous step if it was pure decode over all running sequences, and no sequence has
        # been freed since. `_free` must reset it.
        self._steady: SchedulerOutput | None = None

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def check(self, length: int) -> None:
        """Raise RequestError if a sequence of `length` tokens exceeds the empty cache."""
        # The last token is sampled but never computed, so it needs no cache slot.
        num_blocks = self.blocks_for(length - 1)
        if num_blocks > self.pool.num_blocks:
            raise RequestError(
                f"{length} tokens take {num_blocks} blocks of {self.block_size} tokens, but "
                f"the cache has {self.pool.num_blocks}: enlarge it to {num_blocks} or request "
                "fewer tokens",
                field="max_new_tokens",
            )

    def add(self, seq: SequenceState) -> None:
        """Queue a sequence that fits the cache (see `check`)."""
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
        """Empty the prefix cache after the weights have changed.

        Blocks of running sequences are not cached any more, because they mix old and new weights. A
        sequence that is preempted and recomputed from its first token is cacheable again.
        """
        for seq in self.running:
            seq.cacheable, seq.snapshot_positions = False, set()
            if self._states is not None:
                self._states.release(seq._reserved_snapshots.values())
                seq._reserved_snapshots = {}
        self._block_owners.clear()
        self.pool.forget_all()
        if self._states is not None:
            self._states.release(self._snapshots.values())
        self._snapshots.clear()

    # --- planning ---------------------------------------------------------------------------------

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
            count = self._clip_to_snapshot(seq, min(seq.num_new_tokens, budget))
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
        plan = self._build_output(scheduled)
        is_steady = plan.decode_rows == len(plan.sampled) == len(self.running)
        self._steady = plan if is_steady and not any(plan.draft_tokens) else None
        return plan

    def _advance_steady(self) -> SchedulerOutput | None:
        """Return the previous steady decode step advanced by one token.

        Returns None if the full path must run: a sequence may be admitted or was freed, waits for a
        step in flight, has forced tokens, or is preempted by the block allocation here.
        """
        previous = self._steady
        if previous is None or (self.waiting and len(self.running) < self.max_num_seqs):
            return None
        seqs, size, count = previous.sequences, self.block_size, len(previous.sequences)
        if any(seq.num_pending_tokens or seq.forced_tokens for seq in seqs):
            return None
        arrays = np.array((previous.positions, previous.context_lengths, previous.slot_mapping))
        # `np.array` copies: the thread that computes the previous step may still read its arrays.
        # Padding rows follow the sequences and must not advance.
        arrays[:, :count] += 1
        positions, contexts, slots = arrays
        starts = tuple(start + 1 for start in previous.num_computed_tokens)
        new_block_rows = [n for n, start in enumerate(starts) if start % size == 0]
        for n in new_block_rows:
            self._ensure_blocks(seqs[n], starts[n] + 1)
            # `_ensure_blocks` preempted a sequence. The full path keeps the blocks of this loop.
            if self._steady is None:
                return None
        table = previous.block_table
        if new_block_rows:
            table = np.zeros((len(table), self.blocks_for(max(starts) + 1)), dtype=np.int32)
            table[:count] = self._block_table[list(previous.sampled_rows), : table.shape[1]]
            slots[new_block_rows] = table[new_block_rows, positions[new_block_rows] // size] * size
        tokens = np.zeros_like(previous.tokens)
        tokens[:count] = [seq.tokens[-1] for seq in seqs]
        copies, self._state_copies = tuple(self._state_copies), []
        for seq in seqs:
            seq.num_in_flight_tokens += 1
            seq.num_pending_tokens += 1
        if self._states is not None:
            for n, start in enumerate(starts):
                if start % size == size - 1:
                    self._reserve_snapshot(seqs[n], start)
        self.stats.steps += 1
        self.stats.computed += count
        self.stats.sampled += count
        self._steady = previous.replace(
            num_computed_tokens=starts,
            tokens=tokens,
            positions=positions,
            context_lengths=contexts,
            block_table=table,
            slot_mapping=slots,
            state_copies=copies,
        )
        return self._steady

    def commit(
        self, plan: SchedulerOutput, accepted: Mapping[SequenceState, int] | None = None
    ) -> None:
        """Record that the oldest step in flight has been computed.

        Call it before the sampled tokens are appended. A sequence that was preempted since the step
        was scheduled has lost its cache entries and is skipped.

        Args:
            accepted: number of accepted drafts by sequence; `commit` appends the accepted drafts.
        """
        accepted = accepted or {}
        for seq, draft_tokens in zip(plan.sequences, plan.draft_tokens, strict=True):
            # Accepted drafts are output tokens, so a preempted sequence keeps them as well.
            if draft_tokens:
                seq.tokens += draft_tokens[: accepted.get(seq, 0)]
                seq.draft_tokens = ()
                if seq.forced_tokens:
                    self.stats.forced += accepted.get(seq, 0)
                else:
                    self.stats.drafted += len(draft_tokens)
                    self.stats.accepted += accepted.get(seq, 0)
        size = self.block_size
        for n, (seq, count) in enumerate(
            zip(plan.sequences, plan.num_scheduled_tokens, strict=True)
        ):
            # An admission after the step was scheduled starts from other blocks.
            if seq.row < 0 or seq.num_admissions != plan.admissions[n]:
                continue
            num_before = seq.num_computed_tokens
            seq.num_computed_tokens += count
            seq.num_in_flight_tokens -= count
            if plan.draft_tokens[n]:
                num_rejected = len(plan.draft_tokens[n]) - accepted.get(seq, 0)
                self._roll_back(seq, num_before, num_rejected)
            if seq.cacheable and seq.num_computed_tokens // size > num_before // size:
                self._cache_full_blocks(seq, num_before)
            if self.window is not None:
                self._free_out_of_window(seq)
        for n in plan.sampled:
            seq = plan.sequences[n]
            if seq.draft_length.max_drafts and not seq.forced_tokens:
                seq.draft_length.update(len(plan.draft_tokens[n]), accepted.get(seq, 0))

    def _build_output(self, scheduled: Sequence[tuple[SequenceState, int]]) -> SchedulerOutput:
        seqs = tuple(seq for seq, _ in scheduled)
        counts = tuple(count for _, count in scheduled)
        decode_rows = sum(count == 1 for count in counts)
        num_tokens = sum(counts)
        padding = -num_tokens % self.token_multiple
        sizes = np.ones(len(seqs) + padding, dtype=np.int32)
        # Batch row of each sequence. Padding rows lie between decode and prefill, so that decode
        # kernels see one contiguous range.
        batch_rows = np.arange(len(seqs))
        batch_rows[decode_rows:] += padding
        sizes[batch_rows] = counts
        bounds = np.zeros(len(sizes) + 1, dtype=np.int32)
        np.cumsum(sizes, out=bounds[1:])
        starts, contexts = np.zeros_like(sizes), np.zeros_like(sizes)
        num_computed = [seq.num_planned_tokens for seq in seqs]
        starts[batch_rows] = num_computed
        contexts[batch_rows] = starts[batch_rows] + sizes[batch_rows]
        table = np.zeros((len(sizes), self.blocks_for(int(contexts.max()))), dtype=np.int32)
        table[batch_rows] = self._block_table[[seq.row for seq in seqs], : table.shape[1]]
        states = np.full(len(sizes), -1, dtype=np.int32)
        states[batch_rows] = [seq.state_slot for seq in seqs]
        row_of_token = np.repeat(np.arange(len(sizes)), sizes)
        positions = np.arange(bounds[-1], dtype=np.int32) + (starts - bounds[:-1])[row_of_token]
        block_ids = table[row_of_token, positions // self.block_size]
        slots = block_ids * self.block_size + positions % self.block_size
        slots[decode_rows : decode_rows + padding] = -1
        token_ids: list[int] = []
        for (seq, count), start in zip(scheduled, num_computed, strict=True):
            # The host does not have a pending token yet: name the buffer row that will hold it.
            pending = [-1 - seq.row] if seq.num_pending_tokens else None
            token_ids += pending or seq.tokens[start : start + count]
            token_ids += seq.draft_tokens
        tokens = np.zeros_like(positions)
        tokens[:decode_rows] = token_ids[:decode_rows]
        tokens[decode_rows + padding :] = token_ids[decode_rows:]
        copies, self._state_copies = tuple(self._state_copies), []
        sampled = self._record_scheduled(scheduled)
        return SchedulerOutput(
            sequences=seqs,
            num_scheduled_tokens=counts,
            draft_tokens=tuple(seq.draft_tokens for seq in seqs),
            num_computed_tokens=tuple(num_computed),
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
            state_copies=copies,
            sampled=sampled,
            sampled_rows=tuple(seqs[n].row for n in sampled),
        )

    def _ensure_blocks(self, seq: SequenceState, num_tokens: int) -> bool:
        """Allocate blocks so that a running sequence holds `num_tokens` tokens.

        Preempts the youngest running sequences if needed. Returns False if the sequence itself was
        preempted.
        """
        missing = self.blocks_for(num_tokens) - len(seq.block_ids)
        while missing > 0:
            block_ids = self.pool.allocate(missing)
            if block_ids is not None:
                self._append_blocks(seq, block_ids)
                return True
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is seq:
                return False
        return True

    def _record_scheduled(self, scheduled: Sequence[tuple[SequenceState, int]]) -> tuple[int, ...]:
        """Update the sequences of a new step; return the indices of the sampled sequences."""
        new_tokens = [seq.num_new_tokens + len(seq.draft_tokens) for seq, _ in scheduled]
        sampled = tuple(n for n, (_, count) in enumerate(scheduled) if new_tokens[n] == count)
        self.stats.steps += 1
        self.stats.computed += sum(count for _, count in scheduled)
        self.stats.sampled += len(sampled)
        for seq, count in scheduled:
            num_before = seq.num_planned_tokens
            seq.num_in_flight_tokens += count
            # With drafts the end of the step is unknown; `_roll_back` reserves the snapshot.
            if not seq.draft_tokens:
                self._reserve_snapshot(seq, num_before)
        for n in sampled:
            scheduled[n][0].num_pending_tokens += 1
        return sampled

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
                num_blocks = self.blocks_for(seq.num_planned_tokens + count + room)
                block_ids = self.pool.allocate(num_blocks - len(seq.block_ids))
                assert block_ids is not None
                self._append_blocks(seq, block_ids)
        unforced = [
            (scheduled[n][0], room) for n, room in rooms if not scheduled[n][0].forced_tokens
        ]
        proposed = iter(propose(unforced) if propose is not None and unforced else ())
        for n, room in rooms:
            seq, count = scheduled[n]
            drafts = seq.forced_tokens[:room] or next(proposed)
            seq.draft_tokens = tuple(drafts) if drafts and self._save_states(seq) else ()
            scheduled[n] = seq, count + len(seq.draft_tokens)
            self._free_blocks_after(seq, scheduled[n][1] + seq.num_planned_tokens)

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
        num_slots = (len(seq.block_ids) + self.pool.available) * self.block_size
        room = min(room, num_slots - num_planned)
        if self._states is not None:
            # Recomputed drafts of the previous step reduce the number of new drafts, so that the
            # step's size stays bounded. A step must also end at the block boundary, where the
            # prefix cache needs a snapshot of the states.
            room = min(room, max_drafts + 1 - count)
            if seq.cacheable:
                room = min(room, -num_planned % self.block_size)
        return room

    def _save_states(self, seq: SequenceState) -> bool:
        """Save the recurrent states before drafts change them; False if no slot is free."""
        if self._states is None:
            return True
        if not self._ensure_state_slot(keep=None):
            return False
        (seq.saved_state_slot,) = self._states.take(1)
        self._state_copies.append((seq.state_slot, seq.saved_state_slot))
        return True

    def _roll_back(self, seq: SequenceState, num_before: int, num_rejected: int) -> None:
        """Roll a sequence back to its last accepted draft.

        Args:
            num_before: its computed tokens before the step.
            num_rejected: number of rejected drafts.
        """
        seq.num_computed_tokens -= num_rejected
        if self._states is not None:
            # A recurrent state cannot be truncated: it includes all drafts. Swap the saved state
            # in; the next step recomputes the accepted drafts.
            if num_rejected:
                seq.num_computed_tokens = num_before
                seq.state_slot, seq.saved_state_slot = seq.saved_state_slot, seq.state_slot
            self._states.release([seq.saved_state_slot])
            seq.saved_state_slot = -1
            self._reserve_snapshot(seq, num_before)
        self._free_blocks_after(seq, seq.num_computed_tokens)

    def _free_blocks_after(self, seq: SequenceState, num_tokens: int) -> None:
        """Free the blocks of a sequence beyond `num_tokens` tokens."""
        num_blocks = self.blocks_for(num_tokens)
        self.pool.release(seq.block_ids[num_blocks:])
        del seq.block_ids[num_blocks:]

    def _append_blocks(self, seq: SequenceState, block_ids: Sequence[int]) -> None:
        """Append blocks to a running sequence and to its row of the block table."""
        start = len(seq.block_ids)
        seq.block_ids += block_ids
        if len(seq.block_ids) > self._block_table.shape[1]:
            width = max(2 * self._block_table.shape[1], len(seq.block_ids), 8)
            wider_table = np.zeros((self.max_num_seqs, width), dtype=np.int32)
            wider_table[:, : self._block_table.shape[1]] = self._block_table
            self._block_table = wider_table
        self._block_table[seq.row, start : len(seq.block_ids)] = block_ids

    def _preempt(self, seq: SequenceState) -> None:
        """Preempt a running sequence; it waits ahead of all other sequences of its priority."""
        self.stats.preempted += 1
        self.running.remove(seq)
        self._free(seq)
        insort_left(self.waiting, seq, key=lambda waiting_seq: waiting_seq.priority)

    def _free(self, seq: SequenceState) -> None:
        """Free the blocks and slots of a sequence that stops running."""
        # Steps in flight may still write to the blocks. A step that reuses a block runs after them,
        # so its writes win.
        self._steady = None
        self.pool.release([block for block in seq.block_ids if block >= 0])
        seq.block_ids = []
        seq.num_computed_tokens = seq.num_in_flight_tokens = 0
        self._free_rows.append(seq.row)
        seq.row = -1
        if self._states is not None and seq.state_slot >= 0:
            saved_slots = [seq.saved_state_slot] * (seq.saved_state_slot >= 0)
            self._states.release([seq.state_slot, *saved_slots, *seq._reserved_snapshots.values()])
        seq.state_slot = seq.saved_state_slot = -1
        seq.snapshot_positions, seq._reserved_snapshots = set(), {}
        # No waiting sequence may wait for a block that this sequence no longer computes.
        for block_hash in seq.block_hashes:
            if self._block_owners.get(block_hash) is seq:
                del self._block_owners[block_hash]

    # --- admission and the prefix cache -----------------------------------------------------------

    def _admit(self, seq: SequenceState, budget: int) -> int | None:
        """Admit a waiting sequence.

        Returns:
            The number of tokens to schedule; 0 if the sequence must wait for a block that another
            sequence computes; None if there is no room, or a step in flight samples its tokens.
        """
        if seq.num_pending_tokens:
            return None
        cached_blocks: list[int] = []
        snapshot: bytes | None = None
        num_prefix_blocks, size = 0, self.block_size
        if self.prefix_caching:
            seq.block_hashes = hash_blocks(seq.tokens, size, prefix_hashes=seq.block_hashes)
        if self.prefix_caching and not seq.needs_prompt_logits:
            # The newest token is always computed: its logits are sampled.
            max_cached = (len(seq.tokens) - 1) // size
            for block_hash in seq.block_hashes[:max_cached]:
                block = self.pool.find(block_hash)
                if block is None:
                    break
                cached_blocks.append(block)
            num_prefix_blocks = len(cached_blocks)
            if num_prefix_blocks < max_cached and (
                owner := self._block_owners.get(seq.block_hashes[num_prefix_blocks])
            ):
                self._snapshot_divergence(owner, seq)
                self.stats.waits += 1
                return 0
            if self._states is not None:
                # Keys and values alone do not suffice: use the prefix up to the latest snapshot.
                while (
                    cached_blocks
                    and seq.block_hashes[len(cached_blocks) - 1] not in self._snapshots
                ):
                    cached_blocks.pop()
                snapshot = seq.block_hashes[len(cached_blocks) - 1] if cached_blocks else None
        # Take the references first: counting or evicting below must not free these blocks.
        self.pool.share(cached_blocks)
        # Require blocks for all tokens of the sequence, or it would be preempted at once.
        missing = self.blocks_for(len(seq.tokens)) - len(cached_blocks)
        fits = missing <= self.pool.available or not self.running
        # Steps in flight may have reserved the last free state slot for a snapshot.
        if not fits or (self._states is not None and not self._ensure_state_slot(keep=snapshot)):
            self.pool.release(cached_blocks)
            return None
        self.waiting.remove(seq)
        insort_right(self.running, seq, key=lambda running_seq: running_seq.priority)
        seq.cacheable = self.prefix_caching
        seq.num_admissions += 1
        seq.row = self._free_rows.pop()
        seq.num_computed_tokens = len(cached_blocks) * size
        self._append_blocks(seq, cached_blocks)
        if self._states is not None:
            self._init_states(seq, snapshot, num_prefix_blocks)
        self._count_lookup(seq)
        if self.prefix_caching:
            for block_hash in seq.block_hashes[len(cached_blocks) :]:
                self._block_owners.setdefault(block_hash, seq)
        count = self._clip_to_snapshot(seq, min(seq.num_new_tokens, budget))
        num_blocks = self.blocks_for(seq.num_computed_tokens + count)
        block_ids = self.pool.allocate(num_blocks - len(seq.block_ids))
        assert block_ids is not None
        self._append_blocks(seq, block_ids)
        return count

    def _count_lookup(self, seq: SequenceState) -> None:
        """Count the prefix-cache hit of a sequence at its first admission."""
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            if self.prefix_caching and not seq.needs_prompt_logits:
                self.stats.queried += seq.num_prompt_tokens
                self.stats.hit += seq.num_cached_tokens

    def _init_states(
        self, seq: SequenceState, snapshot: bytes | None, num_prefix_blocks: int
    ) -> None:
        """Allocate a state slot, initialised from a snapshot or with zeros.

        Args:
            snapshot: block hash of the snapshot; None starts from zeros.
            num_prefix_blocks: leading blocks in the prefix cache, with or without a snapshot.
        """
        assert self._states is not None
        (seq.state_slot,) = self._states.take(1)
        if snapshot is None:
            self._state_copies.append((None, seq.state_slot))
        else:
            self._snapshots.move_to_end(snapshot)
            self._state_copies.append((self._snapshots[snapshot], seq.state_slot))
            self.stats.restored += 1
        if not self.prefix_caching:
            return
        # Snapshots where the prompt diverges from the cached prefix, after its last full block, and
        # evenly spaced between them.
        size, length = self.block_size, len(seq.tokens) - 1
        step = size * max(1, -(-length // (SNAPSHOTS_PER_PROMPT * size)))
        positions = {num_prefix_blocks * size, length // size * size, *range(step, length, step)}
        seq.snapshot_positions = {p for p in positions if p > seq.num_computed_tokens}

    def _snapshot_divergence(self, owner: SequenceState, seq: SequenceState) -> None:
        """Add a snapshot position where `seq` diverges from `owner`, whose blocks it waits for."""
        if self._states is None:
            return
        num_common_blocks = 0
        for block_hash, owner_hash in zip(seq.block_hashes, owner.block_hashes, strict=False):
            if block_hash != owner_hash:
                break
            num_common_blocks += 1
        num_common_blocks = min(num_common_blocks, (len(seq.tokens) - 1) // self.block_size)
        if num_common_blocks * self.block_size > owner.num_planned_tokens:
            owner.snapshot_positions.add(num_common_blocks * self.block_size)

    def _clip_to_snapshot(self, seq: SequenceState, count: int) -> int:
        """Return `count`, reduced so that the step ends at the next snapshot position."""
        distances = [position - seq.num_planned_tokens for position in seq.snapshot_positions]
        return min([count, *(distance for distance in distances if distance > 0)])

    def _cache_full_blocks(self, seq: SequenceState, num_before: int) -> None:
        """Add the blocks that a step has filled to the prefix cache.

        Args:
            num_before: computed tokens before the step, which has filled at least one block.
        """
        size = self.block_size
        start, end = num_before // size, seq.num_computed_tokens // size
        seq.block_hashes = hash_blocks(
            seq.tokens[: end * size], size, prefix_hashes=seq.block_hashes
        )
        for block in range(start, end):
            block_hash = seq.block_hashes[block]
            # -1: the block has left the attention window and was released before it was cached.
            if seq.block_ids[block] >= 0:
                self.pool.publish(seq.block_ids[block], block_hash)
            if self._block_owners.get(block_hash) is seq:
                del self._block_owners[block_hash]
        slot = seq._reserved_snapshots.pop(seq.num_computed_tokens, None)
        if slot is not None:
            self._cache_snapshot(seq, slot, seq.block_hashes[end - 1])

    def _reserve_snapshot(self, seq: SequenceState, num_before: int) -> None:
        """Copy the states after a step that ends at a snapshot position.

        The copy runs before the next step. `_cache_snapshot` adds it to the prefix cache once all
        tokens of the block are on the host.

        Args:
            num_before: scheduled tokens of the sequence before the step.
        """
        size, end = self.block_size, seq.num_planned_tokens
        if self._states is None or not seq.cacheable or end % size or end == num_before:
            return
        is_output = end > seq.num_prompt_tokens
        if not is_output and end not in seq.snapshot_positions:
            return
        # The hash is missing while the host does not have all tokens of the block.
        has_hash = len(seq.block_hashes) >= end // size
        block_hash = seq.block_hashes[end // size - 1] if has_hash else None
        if block_hash in self._snapshots:
            self._snapshots.move_to_end(block_hash)
            return
        # Only the latest snapshot of the output is kept: overwrite the previous one in its slot.
        previous, seq._latest_snapshot = seq._latest_snapshot, None
        if is_output and previous is not None and previous in self._snapshots:
            slot = self._snapshots.pop(previous)
        else:
            if not self._ensure_state_slot(keep=None):
                return
            (slot,) = self._states.take(1)
        self._state_copies.append((seq.state_slot, slot))
        seq._reserved_snapshots[end] = slot

    def _cache_snapshot(self, seq: SequenceState, slot: int, block_hash: bytes) -> None:
        """Add a state snapshot to the prefix cache."""
        assert self._states is not None
        if seq.num_computed_tokens > seq.num_prompt_tokens:
            seq._latest_snapshot = block_hash
        if block_hash in self._snapshots:
            self._states.release([slot])
            self._snapshots.move_to_end(block_hash)
            return
        self._snapshots[block_hash] = slot
        self.stats.snapshots += 1

    def _ensure_state_slot(self, *, keep: bytes | None) -> bool:
        """Return whether a state slot is free, after evicting the least recently used snapshot if
        needed. `keep` names a snapshot that must not be evicted."""
        assert self._states is not None
        if not self._states.free_slots:
            for block_hash in self._snapshots:
                if block_hash != keep:
                    self._states.release([self._snapshots.pop(block_hash)])
                    break
        return self._states.free_slots > 0

    def _free_out_of_window(self, seq: SequenceState) -> None:
        """Release the blocks behind the largest attention window."""
        assert self.window is not None
        num_unseen = max(0, seq.num_computed_tokens + 1 - self.window) // self.block_size
        indices = [n for n in range(min(num_unseen, len(seq.block_ids))) if seq.block_ids[n] >= 0]
        if indices:
            self.pool.release([seq.block_ids[n] for n in indices])
            for n in indices:
                seq.block_ids[n] = -1
