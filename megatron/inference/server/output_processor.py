# SPDX-License-Identifier: Apache-2.0
"""The stream of text deltas of one HTTP request, which every route formats in its own way."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.inference.requests import EngineRequest, OutputDelta
from megatron.core.inference.text_stream import TextStream
from megatron.inference.server.engine.client import Cancelled, EngineClient
from megatron.inference.server.metrics import ServerMetrics
from megatron.inference.server.tool_parsers.output_parser import OutputParser
from megatron.inference.server.tool_parsers.tool_calls import OutputSegment

#: Smallest log-probability in JSON, which has no minus infinity.
MIN_LOGPROB = -9999.0


class NotFinite(Exception):
    """The logits of the model are not finite, or a grammar allows no token."""


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Facts about the model in the HTTP process.

    Args:
        name: name of the model for clients.
        aliases: other names that requests may use.
        vocab_size: size of the vocabulary; every token id is below it.
        max_length: longest sequence in tokens; None for no limit.
        stop_tokens: ids of the tokens that end a text.
        created: time of loading, in seconds since 1970.
    """

    name: str
    aliases: tuple[str, ...] = ()
    vocab_size: int
    max_length: int | None
    stop_tokens: tuple[int, ...]
    created: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """The engine's requests for the outputs of one HTTP request.

    Args:
        requests: one request per output, in the order of the prompts.
        n: number of outputs per prompt.
        stop: strings that end an output; the engine handles tokens only.
        include_stop: the text of an output includes the stop string or stop token that ended it.
        skip_special_tokens: the text of an output leaves out special tokens.
        names: the API's names of fields of `EngineRequest`, where they differ.
    """

    requests: Sequence[EngineRequest]
    n: int = 1
    stop: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, engine_field: str) -> str:
        """Return the API's name for a field of `EngineRequest`."""
        return self.names.get(engine_field, engine_field)


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """A token, its log-probability, and the most probable tokens at its position.

    The rank of a token of the prompt counts from 1 for the most probable token; None for others.
    """

    id: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()
    rank: int | None = None


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


def token_scores(
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
        request: GenerationRequest,
        *,
        parsers: Sequence[OutputParser] = (),
    ) -> None:
        self.request, self._metrics, self._parsers = request, metrics, parsers
        self._start_time = time.perf_counter()
        ids, self._outputs = client.add_requests(request.requests)
        self._output_index = {request_id: index for index, request_id in enumerate(ids)}
        self._streams = [
            TextStream(
                decode,
                context=engine_request.prompt,
                stop=request.stop,
                include_stop=request.include_stop,
                min_tokens=engine_request.min_new_tokens,
            )
            for engine_request in request.requests
        ]
        # Requests with prompt log-probabilities compute the whole prompt.
        self._looks_up_prefixes = (
            client.facts.get("prefix_caching") and not request.requests[0].prompt_logprobs
        )
        self._last_token_time: dict[int, float] = {}  # by output index, in seconds
        self._finished: set[int] = set()
        self.usage = Usage(prompt_tokens=sum(len(r.prompt) for r in request.requests[:: request.n]))
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
            NotFinite: the logits are not finite, or a grammar allows no token.
            Cancelled: `cancel` was called.
            Refused, EngineLost, ReaderStalled: see `Outputs.deltas`.
        """
        try:
            async for engine_delta in self._outputs.deltas():
                if self._output_index[engine_delta.request_id] in self._finished:
                    continue  # sent before the engine received the abort at a stop string
                if engine_delta.finish_reason == "error":
                    raise NotFinite
                yield self._delta(engine_delta)
        finally:
            self.close()

    def _delta(self, engine_delta: OutputDelta) -> Delta:
        index = self._output_index[engine_delta.request_id]
        stream, reason = self._streams[index], engine_delta.finish_reason
        # The token that ends a document has no text.
        hides_stop = reason == "stop" and not self.request.include_stop
        num_text_tokens = len(engine_delta.tokens) - hides_stop
        text = stream.push(engine_delta.tokens[:num_text_tokens], finished=bool(reason))
        if stream.stopped is not None:
            reason = "stop"
            self._outputs.finish(engine_delta.request_id)
        prompt_scores = None
        if index not in self._last_token_time:
            prompt_scores = self._prompt_scores(index, engine_delta)
            if index % self.request.n == 0:  # each prompt is counted once
                self._count_lookup(index, engine_delta.cached_tokens)
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
            scores=token_scores(
                engine_delta.tokens, engine_delta.logprobs, engine_delta.top_logprobs
            ),
            prompt_scores=prompt_scores,
            epochs=engine_delta.epochs,
            finish_reason=reason,
            stop=stream.stopped,
        )

    def _prompt_scores(self, index: int, engine_delta: OutputDelta) -> Sequence[TokenScore] | None:
        if engine_delta.prompt_logprobs is None:
            return None
        prompt = self.request.requests[index].prompt
        top_logprobs = engine_delta.prompt_top_logprobs or ()
        scores = token_scores(prompt[1:], engine_delta.prompt_logprobs, top_logprobs)
        ranked = [
            replace(score, rank=rank)
            for score, rank in zip(scores, engine_delta.prompt_ranks or (), strict=True)
        ]
        return [TokenScore(id=prompt[0], logprob=None), *ranked]

    def _count_lookup(self, index: int, cached_tokens: int) -> None:
        """Count the prompt tokens that the prefix cache held."""
        self.usage.cached_tokens += cached_tokens
        if self._looks_up_prefixes:
            self._metrics.note_lookup(len(self.request.requests[index].prompt), cached_tokens)

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
