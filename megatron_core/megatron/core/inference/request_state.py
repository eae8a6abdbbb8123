# SPDX-License-Identifier: Apache-2.0
"""State of the outputs that an engine generates, and `SchedulerOutput`, one step over them.

The scheduler handles the `SequenceState` of an output: tokens, blocks and slots, and nothing of its
request. It returns the scheduled tokens of a step as the arrays of a `SchedulerOutput`. Most steps
resemble the previous step: `SchedulerOutput.advance` then increments its arrays.

`OutputState` adds the request: sampling inputs, masks, forced tokens, prompt log-probabilities, and
the new tokens of each step as an `OutputDelta`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron.core.inference.requests import EngineRequest, OutputDelta, TopLogprobs
from megatron.core.inference.sampling import Chosen, SampleRow

#: Upper bound of the forced tokens of a grammar in one step.
MAX_FORCED_TOKENS = 32

#: A sequence drafts k > 1 tokens only if all k are accepted with at least this probability.
MIN_DRAFT_PROBABILITY = 0.25

#: Below this acceptance rate a sequence stops drafting, for at most this many steps at a time.
MIN_ACCEPTANCE_RATE, MAX_BACKOFF_STEPS = 0.2, 32

#: (source, target) slots of a copy of recurrent states; source None writes zeros.
StateCopies = tuple[tuple[int | None, int], ...]


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


@dataclass(eq=False)
class SequenceState:
    """Scheduler state of one sequence, waiting or running; the `KVCacheManager` writes its blocks,
    its row, and its slots and snapshots of states.

    Args:
        tokens: token ids of the prompt and of the output so far.
        num_prompt_tokens: length of the prompt.
        max_length: largest length of prompt and output together.
        priority: sequences with a lower number are served first and preempted last.
        needs_prompt_logits: the request asks for prompt log-probabilities, so the prompt is
            computed completely and never read from the prefix cache.
        cache_salt: separates the cached prefixes of requests; see `EngineRequest.cache_salt`.
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
        block_ids: per group of attention layers the cache blocks in order; -1 for a block behind
            the window.
        block_hashes: hashes of the full blocks.
        snapshot_positions: numbers of tokens after which the states are copied.
        reserved_snapshots: position of a snapshot that a step in flight reaches -> its state slot.
        latest_snapshot: block hash of the latest snapshot of the output; None without one.
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
    cache_salt: str = ""
    needs_output_tokens: bool = False
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_pending_tokens: int = 0
    num_admissions: int = 0
    num_cached_tokens: int | None = None
    row: int = -1
    state_slot: int = -1
    block_ids: list[list[int]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    snapshot_positions: set[int] = field(default_factory=set)
    cacheable: bool = True
    forced_tokens: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = ()
    draft_length: DraftLength = field(default_factory=DraftLength)
    saved_state_slot: int = -1
    latest_snapshot: bytes | None = None
    reserved_snapshots: dict[int, int] = field(default_factory=dict)

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
        block_tables: int32 [groups, b, w], a block table for each group of attention layers.
            Kernels never read entries beyond a row's context.
        slot_mappings: int32 [groups, t], cache slot of each token (block id * block size + offset);
            -1 for padding.
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
    block_tables: np.ndarray
    slot_mappings: np.ndarray
    state_slots: np.ndarray
    state_copies: StateCopies
    sampled: tuple[int, ...]
    sampled_rows: tuple[int, ...]

    @staticmethod
    def pack(
        scheduled: Sequence[tuple[SequenceState, int]],
        *,
        block_tables: np.ndarray,
        block_size: int,
        token_multiple: int,
        state_copies: StateCopies,
    ) -> SchedulerOutput:
        """Return the step of (sequence, number of new tokens) pairs, decode rows first.

        Args:
            scheduled: the pairs, before any counter of the sequences records the step.
            block_tables: int32 [groups, rows, w], blocks of all running sequences by `row`.
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
        tables = np.zeros((len(block_tables), len(sizes), width), dtype=np.int32)
        tables[:, batch_rows] = block_tables[:, [seq.row for seq in seqs], :width]
        states = np.full(len(sizes), -1, dtype=np.int32)
        states[batch_rows] = [seq.state_slot for seq in seqs]
        row_of_token = np.repeat(np.arange(len(sizes)), sizes)
        positions = np.arange(bounds[-1], dtype=np.int32) + (starts - bounds[:-1])[row_of_token]
        block_ids = tables[:, row_of_token, positions // block_size]
        slots = block_ids * block_size + positions % block_size
        slots[:, decode_rows : decode_rows + padding] = -1
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
            block_tables=tables,
            slot_mappings=slots,
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
        block_tables: np.ndarray,
        block_size: int,
        state_copies: StateCopies,
    ) -> SchedulerOutput:
        """Return the next step of a pure decode step: one more token of each sequence.

        Args:
            starts: computed tokens of each sequence before the next step.
            new_block_rows: indices of the sequences that enter a new block.
            block_tables, block_size, state_copies: see `pack`.
        """
        count = len(self.sequences)
        # `np.array` copies: the thread that computes this step may still read its arrays.
        arrays = np.array((self.positions, self.context_lengths, *self.slot_mappings))
        # Padding rows follow the sequences and must not advance.
        arrays[:, :count] += 1
        positions, contexts, slots = arrays[0], arrays[1], arrays[2:]
        tables = self.block_tables
        if new_block_rows:
            width = -(-(max(starts) + 1) // block_size)
            tables = np.zeros((*tables.shape[:2], width), dtype=np.int32)
            tables[:, :count] = block_tables[:, list(self.sampled_rows), :width]
            blocks = tables[:, new_block_rows, positions[new_block_rows] // block_size]
            slots[:, new_block_rows] = blocks * block_size
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
            block_tables=tables,
            slot_mappings=slots,
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
            self.block_tables,
            self.slot_mappings,
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


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftContext:
    """Input of `Proposer.propose` for one sequence.

    Args:
        seq: scheduler state of the sequence.
        request: request of the sequence.
        generated: output tokens.
        sequence: sequence number in the key of random draws.
        max_drafts: largest number of drafts.
        predicted: drafts that `Proposer.predict` computed in the sequence's last step.
    """

    seq: SequenceState
    request: EngineRequest
    generated: Sequence[int]
    sequence: int
    max_drafts: int
    predicted: Sequence[int]


@dataclass(frozen=True, eq=False, kw_only=True)
class SampledSequence:
    """A sequence for which a step samples a token, as of the launch of the step.

    It is a snapshot: `predict` may run in another thread while the host changes the sequence.

    Args:
        max_drafts: largest number of drafts after the sampled tokens.
        num_remaining_tokens: tokens until the sequence reaches its length limit.
        stop_tokens: token ids that end the sequence.
        sample_row: maps tokens after the sequence's own tokens to the next sampling input.
    """

    max_drafts: int
    num_remaining_tokens: int
    stop_tokens: Collection[int]
    sample_row: Callable[[Sequence[int]], SampleRow]

    def max_drafts_after(self, chosen: Sequence[int]) -> int:
        """Return the largest number of drafts after the sampled tokens; 0 at the sequence's end."""
        if chosen[-1] in self.stop_tokens:
            return 0
        # The last token is sampled but never computed, so a draft there would be wasted.
        return max(0, min(self.max_drafts, self.num_remaining_tokens - len(chosen) - 1))


@dataclass(eq=False)
class PromptScores:
    """Log-probabilities of the prompt of a request; its first output computes them for all.

    Args:
        logprobs: log-probability of each prompt token except the first.
        top_logprobs: alternatives of the same tokens; None unless requested.
        ranks: rank of the same tokens among all tokens, 1 for the most probable.
    """

    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None
    ranks: list[int]

    def fields(self) -> dict[str, Any]:
        """Return the fields of `OutputDelta` with the scores."""
        return {
            "prompt_logprobs": self.logprobs,
            "prompt_top_logprobs": self.top_logprobs,
            "prompt_ranks": self.ranks,
        }

    @staticmethod
    def begin(request: EngineRequest) -> PromptScores | None:
        """Return empty scores; None if the request asks for none."""
        if not request.prompt_logprobs:
            return None
        return PromptScores([], [] if request.sampling.logprobs else None, [])


@dataclass(eq=False)
class OutputState:
    """One output of a request.

    Args:
        seq: scheduler state of the output.
        request: the request, with its id.
        index: index of the output within the request.
        prompt_scores: log-probabilities of the prompt, shared by the outputs of the request; None
            unless requested.
        tokens: output tokens so far.
        num_prompt_logprobs: prompt log-probabilities that finished or running steps compute.
        predicted: drafts from `Proposer.predict` in the sequence's last step.

    Attributes:
        request_id: id of the request.
        sequence: sequence number in the key of random draws.
    """

    seq: SequenceState
    request: EngineRequest
    index: int = 0
    prompt_scores: PromptScores | None = None
    tokens: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    predicted: Sequence[int] = ()
    _masks: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.request.request_id is not None
        self.request_id = self.request.request_id
        self.sequence = self.request.sequence + self.index

    @property
    def position(self) -> int:
        """Position of the next token to sample, pending tokens included."""
        return len(self.seq.tokens) + max(self.seq.num_pending_tokens, 1) - 1

    def sample_row(self, drafts: Sequence[int] = (), position: int | None = None) -> SampleRow:
        """Return the sampling input for the token after `drafts`.

        Args:
            drafts: draft tokens after the output so far.
            position: position of the first draft; None takes `self.position`.
        """
        output_tokens = [*self.tokens, *drafts] if drafts else self.tokens
        return SampleRow(
            params=self.request.sampling,
            sequence=self.sequence,
            position=(self.position if position is None else position) + len(drafts),
            prompt=self.request.prompt,
            output=output_tokens,
            mask=None if self.request.mask is None else self._mask(drafts),
        )

    def context(self, count: int) -> DraftContext:
        """Return the proposer's input for at most `count` drafts."""
        return DraftContext(
            seq=self.seq,
            request=self.request,
            generated=self.tokens,
            sequence=self.sequence,
            max_drafts=count,
            predicted=self.predicted,
        )

    def sampled_sequence(self) -> SampledSequence:
        """Return the limits of the drafts that a step predicts, as of its launch."""
        position = self.position
        return SampledSequence(
            max_drafts=self.seq.draft_length.next_length,
            num_remaining_tokens=self.seq.max_length - position,
            stop_tokens=self.request.stop_tokens,
            sample_row=lambda tokens: self.sample_row(tokens, position),
        )

    def valid_prefix(self, drafts: Sequence[int]) -> Sequence[int]:
        """Return the drafts before the first stop token or masked token.

        A grammar's mask is undefined after such a token, so it is not evaluated there.
        """
        for n, draft in enumerate(drafts):
            mask = self._mask(drafts[:n])
            if draft in self.request.stop_tokens or (mask is not None and not mask[draft]):
                return drafts[:n]
        return drafts

    def append(self, chosen: Chosen, epoch: int) -> OutputDelta:
        """Append the sampled tokens of a step; return them, with the finish reason.

        `Scheduler.commit` has appended the accepted drafts to the sequence.
        """
        request, seq, tokens = self.request, self.seq, chosen.tokens
        begins, count = not self.tokens, request.sampling.logprobs
        # The sampled token was pending; drafts never were.
        seq.tokens += tokens[chosen.accepted :]
        seq.num_pending_tokens -= len(tokens) - chosen.accepted
        self.tokens += tokens
        # Masks are cached relative to the output, which has grown.
        self._masks.clear()
        finish_reason = ""
        if chosen.error:
            finish_reason = "error"
        elif tokens[-1] in request.stop_tokens:
            finish_reason = "stop"
        elif len(request.prompt) + len(self.tokens) == seq.max_length:
            finish_reason = "length"
        # Prompt fields go into the first delta only: by then all steps of the prompt have finished.
        scores = self.prompt_scores if begins else None
        # A request without new tokens: the sampled token ends it and is not part of the output.
        if not request.max_new_tokens:
            tokens = []
            chosen = chosen._replace(logprobs=[], tops=[])
        return OutputDelta(
            request_id=self.request_id,
            index=self.index,
            tokens=tokens,
            logprobs=chosen.logprobs,
            top_logprobs=[top[:count] for top in chosen.tops] if count else (),
            epochs=[epoch] * len(tokens),
            finish_reason=finish_reason,
            cached_tokens=(seq.num_cached_tokens or 0) if begins else 0,
            **({} if scores is None else scores.fields()),
        )

    def aborted(self) -> OutputDelta:
        """Return the last delta of an aborted output."""
        scores = None if self.tokens else self.prompt_scores
        return OutputDelta(
            request_id=self.request_id,
            index=self.index,
            finish_reason="abort",
            **({} if scores is None else scores.fields()),
        )

    def update_forced_tokens(self, forced: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """Update the forced tokens of the sequence with the request's `forced` function."""
        self.seq.forced_tokens = tuple(self.valid_prefix(forced(self.tokens)[:MAX_FORCED_TOKENS]))

    def _mask(self, drafts: Sequence[int]) -> Tensor | None:
        """Return the mask after `drafts`; cached, as evaluating a grammar is expensive."""
        if self.request.mask is None:
            return None
        key = tuple(drafts)
        if key not in self._masks:
            self._masks[key] = self.request.mask([*self.tokens, *drafts])
        return self._masks[key]


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Prompt tokens whose log-probabilities a step computes.

    Args:
        output: output of the prompt.
        start: index into the step's t tokens of the token before the first of `tokens`.
        tokens: prompt tokens.
        num_top: reported alternatives per token.
    """

    output: OutputState
    start: int
    tokens: list[int]
    num_top: int

    @property
    def num_values(self) -> int:
        """Number of values; see `ModelRunner._compute_prompt_logprobs`."""
        return len(self.tokens) * (2 + 2 * self.num_top)

    def append_to_output(self, values: Tensor) -> None:
        """Append the values, fp64 on the host, to the scores of the prompt."""
        scores = self.output.prompt_scores
        assert scores is not None
        logprobs, ranks, *alternatives = values.view(len(self.tokens), -1).tensor_split(
            [1, 2, 2 + self.num_top], dim=1
        )
        scores.logprobs += logprobs[:, 0].tolist()
        scores.ranks += ranks[:, 0].long().tolist()
        if scores.top_logprobs is not None:
            ids, tops = alternatives[0].long().tolist(), alternatives[1].tolist()
            pairs = zip(ids, tops, strict=True)
            scores.top_logprobs += [list(zip(*pair, strict=True)) for pair in pairs]
