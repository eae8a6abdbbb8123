# SPDX-License-Identifier: Apache-2.0
"""State of one output of a request: `SequenceState` for the scheduler, `OutputState` for sampling.

The scheduler handles tokens, blocks and slots of a sequence, and nothing of its request.
`OutputState` adds the request: sampling inputs, masks, forced tokens, prompt log-probabilities, and
the new tokens of each step as an `OutputDelta`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron.core.inference.requests import EngineRequest, OutputDelta, TopLogprobs
from megatron.core.inference.sampling import Chosen, SampleRow

#: Upper bound of the forced tokens of a grammar in one step.
MAX_FORCED_TOKENS = 32

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
    """

    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None

    @staticmethod
    def begin(request: EngineRequest) -> PromptScores | None:
        """Return empty scores; None if the request asks for none."""
        if not request.prompt_logprobs:
            return None
        return PromptScores([], [] if request.sampling.logprobs else None)


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
        return OutputDelta(
            request_id=self.request_id,
            index=self.index,
            tokens=tokens,
            logprobs=chosen.logprobs,
            top_logprobs=[top[:count] for top in chosen.tops] if count else (),
            epochs=[epoch] * len(tokens),
            finish_reason=finish_reason,
            cached_tokens=(seq.num_cached_tokens or 0) if begins else 0,
            prompt_logprobs=None if scores is None else scores.logprobs,
            prompt_top_logprobs=None if scores is None else scores.top_logprobs,
        )

    def aborted(self) -> OutputDelta:
        """Return the last delta of an aborted output."""
        scores = None if self.tokens else self.prompt_scores
        return OutputDelta(
            request_id=self.request_id,
            index=self.index,
            finish_reason="abort",
            prompt_logprobs=None if scores is None else scores.logprobs,
            prompt_top_logprobs=None if scores is None else scores.top_logprobs,
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
        return len(self.tokens) * (1 + 2 * self.num_top)

    def append_to_output(self, values: Tensor) -> None:
        """Append the values, fp64 on the host, to the scores of the prompt."""
        scores = self.output.prompt_scores
        assert scores is not None
        logprobs, *alternatives = values.view(len(self.tokens), -1).tensor_split(
            [1, 1 + self.num_top], dim=1
        )
        scores.logprobs += logprobs[:, 0].tolist()
        if scores.top_logprobs is not None:
            ids, tops = alternatives[0].long().tolist(), alternatives[1].tolist()
            pairs = zip(ids, tops, strict=True)
            scores.top_logprobs += [list(zip(*pair, strict=True)) for pair in pairs]
