# SPDX-License-Identifier: Apache-2.0
"""One stream of deltas of text for each HTTP request: what all routes are views of."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.inference.text_stream import TextStream
from megatron.inference.server.answer_parser import AnswerParser, Part
from megatron.inference.server.engine_client import Cancelled, EngineClient
from megatron.inference.server.metrics import ServerMetrics
from megatron.inference.server.protocol import News

#: Stands in JSON, which has no infinity, for a log-probability of minus infinity.
LEAST_LOGPROB = -9999.0


class Refused(Exception):
    """The engine cannot serve a request.

    Args:
        message: for the user.
        field: of the request that it is about; None if it is about none.
    """

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class NotFinite(Exception):
    """The model's logits are not finite, or nothing may follow."""


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What the HTTP process knows of the model.

    Args:
        name: that clients call it by.
        vocab_size: token ids are below it.
        max_length: longest sequence; None means no limit.
        stop_tokens: ids that end a text.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    vocab_size: int
    max_length: int | None
    stop_tokens: tuple[int, ...]
    created: int


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a request asks for, whichever route it came by.

    Args:
        prompts: token ids of each.
        n: outputs of each.
        max_new_tokens: of each output at most; None is what the model has room for.
        sampling: fields of `SamplingParams`.
        stop: texts that end an output.
        stop_tokens: ids that end it.
        prompt_logprobs: report those of the prompts.
        grammar: that outputs follow, see `structured`; None for any text.
        priority: requests with a lower number come first.
        reasoning_limit: see `Ask`.
        names: what the route calls fields of the engine's `Request`, where it is another name.
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
        """Return the route's name of a field of the engine's `Request`; None for no field."""
        return self.names.get(engine_field, engine_field) or None


@dataclass(frozen=True, kw_only=True)
class TokenScore:
    """A token, its log-probability, and the most probable tokens in its place."""

    id: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What a step adds to one output.

    Args:
        index: of the output; those of the first prompt come first.
        text: never ends within a character or within what may be a stop string.
        scores: of the new tokens, whether their text is there yet or not.
        prompt_scores: in the first delta of an output, if asked for.
        epochs: of the new tokens, how often the weights had been replaced.
        finish_reason: "stop", "length", "abort", "tool_calls" or "" while it goes on.
        stop: the stop string that ended it.
        parts: that the text of an answer is of; none where it is not read as one.
    """

    index: int
    text: str
    parts: Sequence[Part] = ()
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
        """Return them as OpenAI does."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _scores(
    tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Sequence[Any]]
) -> list[TokenScore]:
    """Return scores of tokens; a log-probability that JSON cannot hold is `LEAST_LOGPROB`."""
    filled = tops or [()] * len(tokens)
    return [
        TokenScore(
            id=token,
            logprob=max(logprob, LEAST_LOGPROB),
            top=[(other, max(value, LEAST_LOGPROB)) for other, value in top],
        )
        for token, logprob, top in zip(tokens, logprobs, filled, strict=True)
    ]


class Generation:
    """The outputs of one request, on their way to text.

    Args:
        client: to the engine.
        decode: from token ids to text.
        metrics: counts tokens and times.
        card: of the model.
        wanted: what was asked for.
        parsers: of each output that is an answer in a conversation.

    Raises:
        QueueFull, Draining, EngineLost: see `EngineClient.ask`.
    """

    def __init__(
        self,
        client: EngineClient,
        decode: Callable[[Sequence[int]], str],
        metrics: ServerMetrics,
        card: ModelCard,
        wanted: Wanted,
        *,
        parsers: Sequence[AnswerParser] = (),
    ) -> None:
        self._wanted, self._metrics, self._parsers = wanted, metrics, parsers
        self._begin = time.perf_counter()
        asks = []
        for number, prompt in enumerate(wanted.prompts):
            for index in range(wanted.n):
                new = wanted.max_new_tokens
                if new is None:
                    assert card.max_length is not None
                    new = card.max_length - len(prompt)
                asks.append(
                    {
                        "prompt": prompt,
                        "max_new_tokens": new,
                        "sampling": wanted.sampling,
                        "stop_tokens": wanted.stop_tokens,
                        "sequence": number * wanted.n + index,
                        "prompt_logprobs": wanted.prompt_logprobs,
                        "grammar": wanted.grammar,
                        "priority": wanted.priority,
                        "reasoning_limit": wanted.reasoning_limit,
                        "counts_prompt": index == 0,
                    }
                )
        ids, self._outputs = client.ask(asks)
        self._places = {number: place for place, number in enumerate(ids)}
        self._streams = [
            TextStream(decode, context=ask["prompt"], stop=wanted.stop) for ask in asks
        ]
        self._newest: dict[int, float] = {}  # when the newest token of an output came
        self._ended: set[int] = set()
        self.usage = Usage(prompt_tokens=sum(map(len, wanted.prompts)))
        metrics.note_prompts(self.usage.prompt_tokens)
        self.stalled = self._outputs.stalled

    def close(self) -> None:
        """Abort what has not ended."""
        self._outputs.close()

    def cancel(self) -> None:
        """Abort what has not ended, and have `deltas` raise Cancelled."""
        self._outputs.close()
        self._outputs.fail(Cancelled())

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield what is added to outputs until all have ended.

        Raises:
            Refused: the engine cannot serve it.
            NotFinite: the model cannot go on.
            Cancelled: by `cancel`.
            EngineLost, ReaderStalled: see `Outputs.news`.
        """
        try:
            async for news in self._outputs.news():
                if self._places[news.id] in self._ended:
                    continue  # it came before the engine knew of a stop string
                if news.refused:
                    raise Refused(news.refused, self._wanted.name(news.refused_field))
                if news.finish_reason == "error":
                    raise NotFinite
                yield self._delta(news)
        finally:
            self.close()

    def _delta(self, news: News) -> Delta:
        place = self._places[news.id]
        stream, reason = self._streams[place], news.finish_reason
        # The token that ends a document is no text.
        count = len(news.tokens) - (reason == "stop")
        text = stream.push(news.tokens[:count], finished=bool(reason))
        if stream.stopped is not None:
            reason = "stop"
            self._outputs.finish(news.id)
        prompt_scores = None
        if place not in self._newest:
            prompt_scores = self._prompt_scores(place, news)
            if place % self._wanted.n == 0:
                self.usage.cached_tokens += news.cached_tokens
        self.usage.completion_tokens += len(news.tokens)
        self._measure(place, len(news.tokens), reason)
        parts: Sequence[Part] = ()
        if self._parsers:
            parser = self._parsers[place]
            cut_off = reason != "stop" or stream.stopped is not None
            parts = parser.push(text, finished=bool(reason), cut_off=cut_off)
            if reason == "stop" and parser.has_calls:
                reason = "tool_calls"
        return Delta(
            index=place,
            text=text,
            parts=parts,
            scores=_scores(news.tokens, news.logprobs, news.top_logprobs),
            prompt_scores=prompt_scores,
            epochs=news.epochs,
            finish_reason=reason,
            stop=stream.stopped,
        )

    def _prompt_scores(self, place: int, news: News) -> Sequence[TokenScore] | None:
        if news.prompt_logprobs is None:
            return None
        prompt = self._wanted.prompts[place // self._wanted.n]
        tops = news.prompt_top_logprobs or ()
        return [
            TokenScore(id=prompt[0], logprob=None),
            *_scores(prompt[1:], news.prompt_logprobs, tops),
        ]

    def _measure(self, place: int, tokens: int, reason: str) -> None:
        now = time.perf_counter()
        self._metrics.note_tokens(tokens)
        if place in self._newest:
            self._metrics.inter_token.observe(now - self._newest[place])
        else:
            self._metrics.time_to_first_token.observe(now - self._begin)
        self._newest[place] = now
        if reason:
            self._ended.add(place)
            self._metrics.note_end(reason, now - self._begin)
