# SPDX-License-Identifier: Apache-2.0
"""State of one output of a request in the engine: tokens, masks, forced tokens, logprobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron.core.inference.requests import EngineRequest, OutputDelta, TopLogprobs
from megatron.core.inference.sampling import Chosen, SampleRow
from megatron.core.inference.scheduler import SequenceState
from megatron.core.inference.speculation import DraftContext, SampledSequence

#: Upper bound of the forced tokens of a grammar in one step.
MAX_FORCED_TOKENS = 32


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
    """

    seq: SequenceState
    request: EngineRequest
    index: int = 0
    prompt_scores: PromptScores | None = None
    tokens: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    predicted: Sequence[int] = ()
    _masks: dict[tuple[int, ...], Tensor | None] = field(default_factory=dict)

    @property
    def sequence(self) -> int:
        """Sequence number in the key of random draws."""
        return self.request.sequence + self.index

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
        count = self.request.sampling.logprobs
        delta = self.delta(self._finish_reason(chosen))._replace(
            tokens=chosen.tokens,
            logprobs=chosen.logprobs,
            top_logprobs=[top[:count] for top in chosen.tops] if count else (),
            epochs=[epoch] * len(chosen.tokens),
        )
        if not self.tokens:
            delta = delta._replace(cached_tokens=self.seq.num_cached_tokens or 0)
        for token in chosen.tokens[chosen.accepted :]:
            self.seq.append(token)
        self.tokens += chosen.tokens
        # Masks are cached relative to the output, which has grown.
        self._masks.clear()
        return delta

    def delta(self, finish_reason: str) -> OutputDelta:
        """Return a delta without new tokens; the first delta has the scores of the prompt."""
        assert self.request.request_id is not None
        delta = OutputDelta(self.request.request_id, self.index, finish_reason=finish_reason)
        if self.tokens or self.prompt_scores is None:
            return delta
        return delta._replace(
            prompt_logprobs=self.prompt_scores.logprobs,
            prompt_top_logprobs=self.prompt_scores.top_logprobs,
        )

    def update_forced_tokens(self, forced: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """Update the forced tokens of the sequence with the request's `forced` function."""
        self.seq.forced_tokens = tuple(self.valid_prefix(forced(self.tokens)[:MAX_FORCED_TOKENS]))

    def _finish_reason(self, chosen: Chosen) -> str:
        """Return the finish reason after the sampled tokens of a step; "" to continue."""
        if chosen.error:
            return "error"
        if chosen.tokens[-1] in self.request.stop_tokens:
            return "stop"
        length = len(self.request.prompt) + len(self.tokens) + len(chosen.tokens)
        return "length" if length == self.seq.max_length else ""

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
        """Number of values; see `Engine._compute_prompt_logprobs`."""
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
