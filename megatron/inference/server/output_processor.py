# SPDX-License-Identifier: Apache-2.0
"""The stream of text deltas of one HTTP request, which every route formats in its own way."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.inference.text_stream import TextStream
from megatron.inference.server.engine.client import Cancelled, EngineClient
from megatron.inference.server.engine.link import DeltaMessage
from megatron.inference.server.metrics import ServerMetrics
from megatron.inference.server.tool_parsers.output_parser import OutputParser
from megatron.inference.server.tool_parsers.segments import OutputSegment

#: Smallest log-probability in JSON, which has no minus infinity.
MIN_LOGPROB = -9999.0


class Refused(Exception):
    """The engine cannot serve a request.

    Args:
        message: message for the user.
        field: field of the request that caused the error; None for no single field.
    """

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class NotFinite(Exception):
    """The logits of the model are not finite, or a grammar allows no token."""


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Facts about the model in the HTTP process.

    Args:
        name: name of the model for clients.
        vocab_size: size of the vocabulary; every token id is below it.
        max_length: longest sequence in tokens; None for no limit.
        stop_tokens: ids of the tokens that end a text.
        created: time of loading, in seconds since 1970.
    """

    name: str
    vocab_size: int
    max_length: int | None
    stop_tokens: tuple[int, ...]
    created: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request for outputs, independent of the route.

    Args:
        prompts: token ids of each prompt.
        n: number of outputs per prompt.
        max_new_tokens: most tokens of each output; None for the remaining length of the model.
        sampling: fields of `SamplingParams`.
        stop: strings that end an output.
        stop_tokens: ids of the tokens that end an output.
        prompt_logprobs: report the log-probabilities of the prompts' tokens.
        grammar: grammar of the outputs, see `guided_decoding.grammars`; None for any text.
        priority: requests with a lower value are scheduled first.
        reasoning_limit: see `RequestMessage`.
        names: the route's names of fields of the engine's `EngineRequest`, where they differ.
    """

    prompts: Sequence[Sequence[int]]
    n: int = 1
    max_new_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    prompt_logprobs: bool = False
    grammar: str | None = None
    priority: int = 0
    reasoning_limit: Mapping[str, Any] | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, engine_field: str) -> str | None:
        """Return the route's name for a field of `EngineRequest`; None for no field."""
        return self.names.get(engine_field, engine_field) or None


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """A token, its log-probability, and the most probable tokens at its position."""

    id: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The text and tokens that one step adds to one output.

    Args:
        index: index of the output; the outputs of the first prompt come first.
        text: new text; it never ends within a character or within the start of a stop string.
        segments: the new text as parts of a chat answer; empty for completions.
        scores: scores of the new tokens, even if their text is not complete yet.
        prompt_scores: scores of the prompt, in the first delta of an output, if requested.
        epochs: weight epoch of each new token: how often the weights had been replaced.
        finish_reason: "stop", "length", "abort" or "tool_calls"; "" for an unfinished output.
        stop: the stop string that ended the output.
    """

    index: int
    text: str
    segments: Sequence[OutputSegment] = ()
    scores: Sequence[TokenScore] = ()
    prompt_scores: Sequence[TokenScore] | None = None
    epochs: Sequence[int] = ()
    finish_reason: str = ""
    stop: str | None = None


@dataclass(kw_only=True)
class Usage:
    """Tokens of a request: of all prompts, each counted once, and of all outputs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the counts in the format of OpenAI."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _scores(
    tokens: Sequence[int], logprobs: Sequence[float], top_logprobs: Sequence[Sequence[Any]]
) -> list[TokenScore]:
    """Return the scores of tokens; log-probabilities are clamped to `MIN_LOGPROB`."""
    alternatives = top_logprobs or [()] * len(tokens)
    return [
        TokenScore(
            id=token,
            logprob=max(logprob, MIN_LOGPROB),
            top=[(alternative, max(value, MIN_LOGPROB)) for alternative, value in top],
        )
        for token, logprob, top in zip(tokens, logprobs, alternatives, strict=True)
    ]


class Generation:
    """The outputs of one request, detokenized as they are generated.

    Args:
        client: client of the engine.
        decode: converts token ids to text.
        metrics: counters of tokens and latencies.
        card: facts about the model.
        request: the request.
        parsers: parser of each output of a chat route; empty for completions.

    Raises:
        QueueFull, Draining, EngineLost: see `EngineClient.add_requests`.
    """

    def __init__(
        self,
        client: EngineClient,
        decode: Callable[[Sequence[int]], str],
        metrics: ServerMetrics,
        card: ModelCard,
        request: GenerationRequest,
        *,
        parsers: Sequence[OutputParser] = (),
    ) -> None:
        self._request, self._metrics, self._parsers = request, metrics, parsers
        self._start_time = time.perf_counter()
        engine_requests = []
        for prompt_index, prompt in enumerate(request.prompts):
            for index in range(request.n):
                max_new_tokens = request.max_new_tokens
                if max_new_tokens is None:
                    assert card.max_length is not None
                    max_new_tokens = card.max_length - len(prompt)
                engine_requests.append(
                    {
                        "prompt": prompt,
                        "max_new_tokens": max_new_tokens,
                        "sampling": request.sampling,
                        "stop_tokens": request.stop_tokens,
                        "sequence": prompt_index * request.n + index,
                        "prompt_logprobs": request.prompt_logprobs,
                        "grammar": request.grammar,
                        "priority": request.priority,
                        "reasoning_limit": request.reasoning_limit,
                        "counts_prompt": index == 0,
                    }
                )
        ids, self._outputs = client.add_requests(engine_requests)
        self._output_index = {request_id: index for index, request_id in enumerate(ids)}
        self._streams = [
            TextStream(decode, context=engine_request["prompt"], stop=request.stop)
            for engine_request in engine_requests
        ]
        self._last_token_time: dict[int, float] = {}  # by output index, in seconds
        self._finished: set[int] = set()
        self.usage = Usage(prompt_tokens=sum(map(len, request.prompts)))
        metrics.note_prompts(self.usage.prompt_tokens)
        self.stalled = self._outputs.stalled

    def close(self) -> None:
        """Abort unfinished outputs."""
        self._outputs.close()

    def cancel(self) -> None:
        """Abort unfinished outputs, and make `deltas` raise Cancelled."""
        self._outputs.close()
        self._outputs.fail(Cancelled())

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield deltas until all outputs have finished.

        Raises:
            Refused: the engine cannot serve the request.
            NotFinite: the logits are not finite, or a grammar allows no token.
            Cancelled: `cancel` was called.
            EngineLost, ReaderStalled: see `Outputs.deltas`.
        """
        try:
            async for engine_delta in self._outputs.deltas():
                if self._output_index[engine_delta.id] in self._finished:
                    continue  # sent before the engine received the abort at a stop string
                if engine_delta.refused:
                    raise Refused(
                        engine_delta.refused, self._request.name(engine_delta.refused_field)
                    )
                if engine_delta.finish_reason == "error":
                    raise NotFinite
                yield self._delta(engine_delta)
        finally:
            self.close()

    def _delta(self, engine_delta: DeltaMessage) -> Delta:
        index = self._output_index[engine_delta.id]
        stream, reason = self._streams[index], engine_delta.finish_reason
        # The token that ends a document has no text.
        num_text_tokens = len(engine_delta.tokens) - (reason == "stop")
        text = stream.push(engine_delta.tokens[:num_text_tokens], finished=bool(reason))
        if stream.stopped is not None:
            reason = "stop"
            self._outputs.finish(engine_delta.id)
        prompt_scores = None
        if index not in self._last_token_time:
            prompt_scores = self._prompt_scores(index, engine_delta)
            if index % self._request.n == 0:
                self.usage.cached_tokens += engine_delta.cached_tokens
        self.usage.completion_tokens += len(engine_delta.tokens)
        self._measure(index, len(engine_delta.tokens), reason)
        segments: Sequence[OutputSegment] = ()
        if self._parsers:
            parser = self._parsers[index]
            cut_off = reason != "stop" or stream.stopped is not None
            segments = parser.push(text, finished=bool(reason), cut_off=cut_off)
            if reason == "stop" and parser.has_calls:
                reason = "tool_calls"
        return Delta(
            index=index,
            text=text,
            segments=segments,
            scores=_scores(engine_delta.tokens, engine_delta.logprobs, engine_delta.top_logprobs),
            prompt_scores=prompt_scores,
            epochs=engine_delta.epochs,
            finish_reason=reason,
            stop=stream.stopped,
        )

    def _prompt_scores(self, index: int, engine_delta: DeltaMessage) -> Sequence[TokenScore] | None:
        if engine_delta.prompt_logprobs is None:
            return None
        prompt = self._request.prompts[index // self._request.n]
        top_logprobs = engine_delta.prompt_top_logprobs or ()
        return [
            TokenScore(id=prompt[0], logprob=None),
            *_scores(prompt[1:], engine_delta.prompt_logprobs, top_logprobs),
        ]

    def _measure(self, index: int, num_tokens: int, reason: str) -> None:
        now = time.perf_counter()
        self._metrics.note_tokens(num_tokens)
        if index in self._last_token_time:
            self._metrics.inter_token.observe(now - self._last_token_time[index])
        else:
            self._metrics.time_to_first_token.observe(now - self._start_time)
        self._last_token_time[index] = now
        if reason:
            self._finished.add(index)
            self._metrics.note_end(reason, now - self._start_time)
