# SPDX-License-Identifier: Apache-2.0
"""Beam search above the engine: each step requests one token for each running beam.

The algorithm and the scores are the same as in `generate` of transformers. A hypothesis of length t
has the score

    sum of its log-probabilities / t ** length_penalty

The running beams of a step are the `beam_width` most probable sequences without a stop token. The
prefix cache of the engine makes the tokens of earlier steps cheap.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron.core.inference.requests import EngineRequest, OutputDelta
from megatron.core.inference.sampling import MAX_LOGPROBS, SamplingParams
from megatron.core.inference.text_stream import TextStream
from megatron.inference.server.engine.client import EngineClient
from megatron.inference.server.metrics import ServerMetrics
from megatron.inference.server.output_processor import (
    Delta,
    GenerationRequest,
    NotFinite,
    TokenScore,
    Usage,
    token_scores,
)
from megatron.inference.server.tool_parsers.output_parser import OutputParser
from megatron.inference.server.tool_parsers.tool_calls import OutputSegment

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of beam search.

    Args:
        beam_width: number of running beams.
        length_penalty: exponent of the length in the score; positive values favor long outputs.
        early_stopping: when to stop once `beam_width` hypotheses have ended. True stops at once.
            False stops when the most probable beam, if it ended now, would have a lower score than
            all hypotheses. "never" assumes the length at which its score would be highest.
    """

    beam_width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


class Beam(NamedTuple):
    """A sequence of new tokens; `logprob` is the sum of their log-probabilities."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    scores: tuple[TokenScore, ...] = ()
    epochs: tuple[int, ...] = ()


class Hypothesis(NamedTuple):
    """A beam that has ended, with its score and the reason of its end."""

    score: float
    beam: Beam
    finish_reason: str


@dataclass(kw_only=True)
class BeamState:
    """The beams of one prompt.

    Args:
        params: parameters of the search.
        max_new_tokens: most tokens of an output.
        stop_tokens: tokens that end an output.

    Attributes:
        running: running beams in descending order of their log-probability.
        hypotheses: at most `beam_width` ended beams in descending order of their score.
        is_complete: whether the search has ended.
    """

    params: BeamSearchParams
    max_new_tokens: int
    stop_tokens: frozenset[int]
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    hypotheses: list[Hypothesis] = field(default_factory=list)
    is_complete: bool = False

    def advance(self, deltas: Sequence[OutputDelta]) -> None:
        """Extend each running beam by a token.

        Args:
            deltas: for each running beam its most probable next tokens as `top_logprobs`:
                `beam_width` tokens in addition to the stop tokens.
        """
        candidates = [
            _extend(beam, delta, token, logprob)
            for beam, delta in zip(self.running, deltas, strict=True)
            for token, logprob in delta.top_logprobs[0]
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        length, width = len(candidates[0].tokens), self.params.beam_width
        # Only the most probable candidates may end, so that an improbable stop token does not
        # displace a better hypothesis.
        for rank, beam in enumerate(candidates):
            is_stop = beam.tokens[-1] in self.stop_tokens
            if rank < width and (is_stop or length == self.max_new_tokens):
                self._add_hypothesis(beam, "stop" if is_stop else "length")
        self.running = [b for b in candidates if b.tokens[-1] not in self.stop_tokens][:width]
        self.is_complete = length == self.max_new_tokens or self._cannot_improve(length)

    def end(self, finish_reason: str) -> None:
        """End the search; the running beams and empty beams fill up the hypotheses."""
        width = self.params.beam_width
        for beam in [*self.running, *[Beam()] * width]:
            if len(self.hypotheses) < width:
                self._add_hypothesis(beam, finish_reason)
        self.is_complete = True

    def _score(self, logprob: float, length: int) -> float:
        return logprob / max(length, 1) ** self.params.length_penalty

    def _add_hypothesis(self, beam: Beam, finish_reason: str) -> None:
        score = self._score(beam.logprob, len(beam.tokens))
        self.hypotheses.append(Hypothesis(score, beam, finish_reason))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.params.beam_width :]

    def _cannot_improve(self, length: int) -> bool:
        """Return whether no running beam is expected to replace a hypothesis."""
        if len(self.hypotheses) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_new_tokens
        best_score = self._score(self.running[0].logprob, length)
        return best_score <= self.hypotheses[-1].score


def _extend(beam: Beam, delta: OutputDelta, token: int, logprob: float) -> Beam:
    """Return a beam with one more token."""
    score = token_scores([token], [logprob], delta.top_logprobs)
    return Beam(
        tokens=(*beam.tokens, token),
        logprob=beam.logprob + logprob,
        scores=(*beam.scores, *score),
        epochs=(*beam.epochs, *delta.epochs),
    )


class BeamSearch:
    """The outputs of one request with beam search; the counterpart of `Generation`.

    Args:
        client: client of the engine.
        decode: converts token ids to text.
        metrics: counters of tokens and latencies.
        request: the request, with `n` equal requests for each prompt.
        params: parameters of the search.
        parsers: parser of each output of a chat route; empty for completions.

    Raises:
        QueueFull, Draining, EngineLost: see `EngineClient.reserve`.
    """

    def __init__(
        self,
        client: EngineClient,
        decode: Callable[[Sequence[int]], str],
        metrics: ServerMetrics,
        request: GenerationRequest,
        params: BeamSearchParams,
        *,
        parsers: Sequence[OutputParser] = (),
    ) -> None:
        self.request, self._decode, self._metrics = request, decode, metrics
        self._parsers = parsers
        self._start_time = time.perf_counter()
        self._prompts = request.requests[:: request.n]  # one request for each prompt
        self._states = [
            BeamState(
                params=params,
                max_new_tokens=prompt.max_new_tokens,
                stop_tokens=frozenset(prompt.stop_tokens),
            )
            for prompt in self._prompts
        ]
        num_top = params.beam_width + len(set(self._prompts[0].stop_tokens))
        num_top = max(num_top, self._prompts[0].sampling.logprobs or 0)
        self._sampling = SamplingParams(temperature=0.0, logprobs=num_top)
        self._looks_up_prefixes = bool(client.facts.get("prefix_caching"))
        self._slots = client.reserve(len(self._prompts) * params.beam_width)
        self.usage = Usage(prompt_tokens=sum(len(prompt.prompt) for prompt in self._prompts))
        metrics.note_prompts(self.usage.prompt_tokens)
        self.stalled = asyncio.Event()
        """Never set: outputs are sent when they are complete."""

    def close(self) -> None:
        """Abort the running step, and release the reserved outputs."""
        self._slots.close()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield one delta for each output, at the end of the search.

        Raises:
            NotFinite: the logits are not finite.
            Refused, EngineLost, ReaderStalled: see `Outputs.deltas`.
        """
        try:
            step_time = self._start_time
            while any(not state.is_complete for state in self._states):
                is_prefill = step_time == self._start_time
                await self._step(is_prefill=is_prefill)
                now = time.perf_counter()
                histogram = (
                    self._metrics.time_to_first_token if is_prefill else self._metrics.inter_token
                )
                histogram.observe(now - step_time)
                step_time = now
        finally:
            self.close()
        n = self.request.n
        for index in range(len(self.request.requests)):
            yield self._delta(index, self._states[index // n].hypotheses[index % n])

    async def _step(self, *, is_prefill: bool) -> None:
        """Advance all prompts by a token."""
        states = [index for index, state in enumerate(self._states) if not state.is_complete]
        requests = [
            self._request(self._prompts[index], beam)
            for index in states
            for beam in self._states[index].running
        ]
        deltas = iter(await self._slots.outputs(requests))
        for index in states:
            state = self._states[index]
            step_deltas = [next(deltas) for _ in state.running]
            reasons = {delta.finish_reason for delta in step_deltas}
            if "error" in reasons:
                raise NotFinite
            if is_prefill:
                cached_tokens = step_deltas[0].cached_tokens
                self.usage.cached_tokens += cached_tokens
                if self._looks_up_prefixes:
                    num_tokens = len(self._prompts[index].prompt)
                    self._metrics.note_lookup(num_tokens, cached_tokens)
            if "abort" in reasons:
                state.end("abort")
            else:
                state.advance(step_deltas)

    def _request(self, prompt: EngineRequest, beam: Beam) -> EngineRequest:
        """Return the request for the next token of a beam."""
        return dataclasses.replace(
            prompt,
            prompt=(*prompt.prompt, *beam.tokens),
            max_new_tokens=1,
            stop_tokens=(),
            sampling=self._sampling,
        )

    def _delta(self, index: int, hypothesis: Hypothesis) -> Delta:
        """Return an output."""
        beam, reason = hypothesis.beam, hypothesis.finish_reason
        stream = TextStream(self._decode, context=self.request.requests[index].prompt)
        hides_stop = reason == "stop" and not self.request.include_stop
        text = stream.push(beam.tokens[: len(beam.tokens) - hides_stop], finished=True)
        num_tokens = len(beam.tokens)
        self.usage.completion_tokens += num_tokens
        self._metrics.note_tokens(num_tokens)
        self._metrics.note_end(reason, time.perf_counter() - self._start_time)
        segments: Sequence[OutputSegment] = ()
        if self._parsers:
            parser = self._parsers[index]
            segments = parser.push(text, finished=True, cut_off=reason != "stop")
            if reason == "stop" and parser.has_calls:
                reason = "tool_calls"
        return Delta(
            index=index,
            text=text,
            segments=segments,
            scores=beam.scores,
            epochs=beam.epochs,
            finish_reason=reason,
        )


def check_beam_width(
    params: BeamSearchParams, request: EngineRequest, vocab_size: int
) -> str | None:
    """Return why the engine cannot serve a beam width, as one line; None if it can.

    Args:
        params: parameters of the search.
        request: request for an output.
        vocab_size: size of the vocabulary.
    """
    width, num_stops = params.beam_width, len(set(request.stop_tokens))
    if width > vocab_size - num_stops:
        return f"the beam width is {width}: use at most {vocab_size - num_stops}"
    if width + num_stops > MAX_LOGPROBS:
        return (
            f"the beam width is {width}: with {num_stops} stop tokens, use at most "
            f"{MAX_LOGPROBS - num_stops}"
        )
    return None
