# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/completions`: the body and the response."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any

from pydantic import Field

from megatron.cli.tokenizers import Tokenizer
from megatron.inference.server.output_processor import Delta, TokenScore, Usage
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.beam_search import BeamSearchBody
from megatron.inference.server.protocol.body import MAX_LOGPROBS, MAX_TOKENS, Prompts, ServedValues
from megatron.inference.server.protocol.generation import UsageChunks
from megatron.inference.server.protocol.token_text import (
    TextOffsets,
    prompt_logprobs,
    token_text,
)

# Size of the cache of token texts of a response.
_CACHED_TEXTS = 4096


STREAM_END = "[DONE]"


class ChoicesFormatter(ABC):
    """Formats the deltas of a request as choices.

    Args:
        usage: token counts of the request, which grow with each delta.
        outputs: number of outputs of the request.
        kind, chunk_kind: `object` of a complete response and of a chunk.
        id_prefix: prefix of the response's id.
        model: name of the model.
        usage_chunks: chunks of a stream that report the usage so far.
        request_id: id of the request, for errors.
    """

    def __init__(
        self,
        usage: Usage,
        *,
        outputs: int,
        kind: str,
        chunk_kind: str,
        id_prefix: str,
        model: str,
        usage_chunks: UsageChunks,
        request_id: str,
    ) -> None:
        self.outputs, self._usage = outputs, usage
        self._kind, self._chunk_kind = kind, chunk_kind
        self._usage_chunks, self._request_id = usage_chunks, request_id
        self._id, self._created = f"{id_prefix}-{secrets.token_hex(12)}", int(time.time())
        self._model = model

    @abstractmethod
    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice of a complete output from all of its deltas."""

    @abstractmethod
    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of a delta; each choice becomes a chunk."""

    def complete(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the complete response from all of its deltas."""
        output_deltas: list[list[Delta]] = [[] for _ in range(self.outputs)]
        for delta in deltas:
            output_deltas[delta.index].append(delta)
        choices = [self.choice(deltas) for deltas in output_deltas]
        return {**self._head(self._kind), "choices": choices, "usage": self._usage.to_json()}

    def events(self, delta: Delta) -> list[str]:
        """Return the chunks of a delta."""
        usage = self._usage.to_json() if self._usage_chunks == "all" else None
        return [self._chunk([choice], usage=usage) for choice in self.chunk_choices(delta)]

    def closing_events(self) -> list[str]:
        """Return the chunk with the usage, if it is requested, and the end of the stream."""
        usage = (
            [self._chunk([], usage=self._usage.to_json())] if self._usage_chunks != "none" else []
        )
        return [*usage, STREAM_END]

    def error(self, error: ApiError) -> str:
        """Return the event of an error, which ends the stream."""
        return json.dumps(error.to_json(self._request_id))

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the fields besides the choices and the usage."""
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, choices: Sequence[dict[str, Any]], *, usage: dict[str, Any] | None) -> str:
        usage_field = {"usage": usage} if self._usage_chunks != "none" else {}
        return json.dumps({**self._head(self._chunk_kind), "choices": choices, **usage_field})


def ending(delta: Delta) -> dict[str, Any]:
    """Return why an output has ended; `stop_reason` is the stop string."""
    return {"finish_reason": delta.finish_reason or None, "stop_reason": delta.stop}


class CompletionBody(BeamSearchBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    """One text or several, or token ids; an empty prompt becomes the end-of-document token."""
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    """Most new tokens, 16 by default. 0 scores the prompt, with `echo` and `logprobs`."""
    add_special_tokens: bool = True
    """false: the tokenizer adds no special tokens to a text."""
    echo: bool | None = None
    """The text begins with the prompt; `logprobs` then covers the prompt."""
    suffix: Annotated[Any, ServedValues(("",))] = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of alternatives that are reported for each token."""


class CompletionFormatter(ChoicesFormatter):
    """Formats the response of `/v1/completions`.

    Args:
        body: body of the request.
        usage: token counts of the request, which grow with each delta.
        prompts: token ids of each prompt.
        model: name of the model.
        tokenizer: tokenizer of the model.
        request_id: id of the request, for errors.
    """

    def __init__(
        self,
        body: CompletionBody,
        usage: Usage,
        *,
        prompts: Sequence[Sequence[int]],
        model: str,
        tokenizer: Tokenizer,
        request_id: str,
    ) -> None:
        super().__init__(
            usage,
            outputs=len(prompts) * (body.n or 1),
            kind="text_completion",
            chunk_kind="text_completion",
            id_prefix="cmpl",
            model=model,
            usage_chunks=body.usage_chunks,
            request_id=request_id,
        )
        self._tokenizer, self._prompts = tokenizer, prompts
        self._logprobs, self._num_top = body.logprobs is not None, body.logprobs or 0
        self._echo, self._prompt_logprobs = bool(body.echo), body.prompt_logprobs
        self._return_token_ids = body.return_token_ids
        self._prefixes = [tokenizer.detokenize(prompt) if body.echo else "" for prompt in prompts]
        self._started: set[int] = set()
        self._offsets: dict[int, TextOffsets] = {}
        # Cached: the same alternatives occur at many positions.
        text_of = partial(token_text, tokenizer, mark="bytes:")
        self._text: Callable[[int], str] = lru_cache(maxsize=_CACHED_TEXTS)(text_of)

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice of a complete output from all of its deltas."""
        choices = [choice for delta in deltas for choice in self.chunk_choices(delta)]
        merged = {**choices[-1], "text": "".join(choice["text"] for choice in choices)}
        merged["weight_epochs"] = [epoch for choice in choices for epoch in choice["weight_epochs"]]
        merged |= {name: value for name, value in choices[0].items() if name not in merged}
        if self._return_token_ids:
            merged["token_ids"] = [token for choice in choices for token in choice["token_ids"]]
        if self._logprobs:
            names = merged["logprobs"]
            merged["logprobs"] = {
                k: [v for choice in choices for v in choice["logprobs"][k]] for k in names
            }
        return merged

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choice of a delta."""
        text = delta.text
        prompt_index = delta.index * len(self._prompts) // self.outputs
        fields: dict[str, Any] = {}
        if self._return_token_ids:
            fields["token_ids"] = [score.id for score in delta.scores]
        if delta.index not in self._started:
            self._started.add(delta.index)
            if self._return_token_ids:
                fields["prompt_token_ids"] = list(self._prompts[prompt_index])
            if self._prompt_logprobs is not None:
                fields["prompt_logprobs"] = prompt_logprobs(
                    self._tokenizer, delta.prompt_scores or (), self._prompt_logprobs
                )
            text = self._prefixes[prompt_index] + text
            if self._logprobs:
                prompt, start = self._prompts[prompt_index], len(self._prefixes[prompt_index])
                offsets = TextOffsets(self._tokenizer, prompt, start=start)
                self._offsets[delta.index] = offsets
        logprobs = None
        if self._logprobs:
            logprobs = self._scores(delta.scores, self._offsets[delta.index])
        if logprobs is not None and self._echo and delta.prompt_scores is not None:
            offsets = TextOffsets(self._tokenizer, (), start=0)
            prompt_columns = self._scores(delta.prompt_scores, offsets)
            logprobs = {name: prompt_columns[name] + logprobs[name] for name in logprobs}
        choice = {"index": delta.index, "text": text, "logprobs": logprobs, **ending(delta)}
        return [{**choice, "weight_epochs": list(delta.epochs), **fields}]

    def _scores(self, scores: Sequence[TokenScore], offsets: TextOffsets) -> dict[str, list[Any]]:
        """Return log-probabilities as columns."""
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [],
            "text_offset": [],
        }
        for score in scores:
            offset, decoded = offsets.add(score.id)
            text = self._text(score.id)
            # Decoding drops a blank at the start of a text.
            text = decoded if decoded and text == f" {decoded}" else text
            columns["tokens"].append(text)
            columns["top_logprobs"].append(self._top(score, text))
            columns["text_offset"].append(offset)
        return columns

    def _top(self, score: TokenScore, text: str) -> dict[str, float] | None:
        """Return alternatives by text; alternatives with a duplicate text by id.

        Args:
            score: score of the token.
            text: text of the token.
        """
        if score.logprob is None:
            return None
        alternatives: dict[str, float] = {}
        for token, logprob in score.top[: self._num_top]:
            name = text if token == score.id else self._text(token)
            if name in alternatives or (name == text and token != score.id):
                name = f"token_id:{token}"
            alternatives[name] = logprob
        return alternatives
