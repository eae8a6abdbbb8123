# SPDX-License-Identifier: Apache-2.0
"""What an engine takes and returns: `EngineRequest` and `OutputDelta`; whole outputs: `Completion`.

A request keeps its `request_id` on the whole way, from the HTTP body to the scheduler.
`Engine.step` returns one `OutputDelta` per output with new tokens. Deltas travel unchanged to the
reader; between data-parallel replicas and between processes they are JSON arrays. A caller who
needs whole outputs accumulates the deltas in `Completions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from megatron.core.inference.sampling import SamplingParams


class RequestError(ValueError):
    """The engine cannot serve a request.

    Args:
        message: one line with the value and the fix.
        field: field of `EngineRequest` or `SamplingParams` with the value.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """A request to continue `prompt`.

    Args:
        request_id: id, unique among unfinished requests; None lets `Engine.add` choose one.
        prompt: token ids, at least one.
        max_new_tokens: largest number of new tokens; 0 computes the log-probabilities of the prompt
            only.
        sampling: sampling parameters.
        stop_tokens: token ids that end an output; the output includes the stop token.
        sequence: sequence number in the key of random draws; output i uses `sequence` + i.
        n: number of outputs.
        prompt_logprobs: report the log-probability of each prompt token.
        min_new_tokens: no stop token ends an output before this number of new tokens.
        allowed_tokens: the only token ids of an output; () allows all.
        banned_sequences: token sequences that an output must not contain.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        priority: requests with a lower number are served first when memory or batch slots are
            short; equal numbers in the order of arrival.
        grammar: text of the grammar of the output. The engine reads only `mask` and `forced`: a
            server compiles the grammar in the process of the engine and sets them.
        reasoning_limit: limit of a reasoning passage, which a server turns into `mask` and `forced`
            like `grammar`.
        mask: maps the output tokens so far to the allowed next tokens, bool [V]; None allows all
            tokens. For grammars. It never leaves its process.
        forced: maps the output tokens so far to tokens that a grammar forces next. They become
            drafts of the next step and save their own steps; `mask` still verifies them. It never
            leaves its process.
    """

    request_id: int | None = None
    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: Collection[int] = ()
    sequence: int = 0
    n: int = 1
    prompt_logprobs: bool = False
    min_new_tokens: int = 0
    allowed_tokens: Sequence[int] = ()
    banned_sequences: Sequence[Sequence[int]] = ()
    cache_salt: str = ""
    priority: int = 0
    grammar: str | None = None
    reasoning_limit: Mapping[str, Any] | None = None
    mask: Callable[[Sequence[int]], Tensor | None] | None = None
    forced: Callable[[Sequence[int]], Sequence[int]] | None = None

    @property
    def max_length(self) -> int:
        """Most tokens of the prompt and an output; a request without new tokens samples one."""
        # The engine finishes an output when it samples a token, so it samples one in any case. The
        # last token is never computed, which is why a prompt may fill the whole context.
        return len(self.prompt) + max(self.max_new_tokens, 1)

    def with_id(self, next_id: int, used: Container[int]) -> tuple[EngineRequest, int]:
        """Return the request with its id, `next_id` where it has none, and its id.

        Args:
            next_id: an id that no request has had.
            used: ids of the unfinished requests.

        Raises:
            RequestError: the id is in use.
        """
        if self.request_id is None:
            return dataclasses.replace(self, request_id=next_id), next_id
        if self.request_id in used:
            raise RequestError(
                f"request id {self.request_id} is the id of an unfinished request: use another",
                field="request_id",
            )
        return self, self.request_id


#: The most probable tokens at one position as (id, log-probability).
TopLogprobs = Sequence[tuple[int, float]]


class OutputDelta(NamedTuple):
    """The new tokens of one output after a step.

    Args:
        request_id: id of the request.
        index: index of the output within the request.
        tokens: new tokens, including a stop token.
        logprobs: log-probability of each new token before adjustments of the logits.
        top_logprobs: alternatives of each new token, as many as requested; empty if not requested.
        epochs: `Engine.epoch` at the sampling of each new token.
        finish_reason: "stop" (stop token), "length" (token limit), "abort", "error" (logits are not
            finite, or the mask allows no token) or "" (unfinished).
        cached_tokens: prompt tokens that the first admission found in the prefix cache; in the
            first delta of an output, else 0.
        prompt_logprobs: log-probability of each prompt token except the first; in the first delta
            of an output, if requested, else None.
        prompt_top_logprobs: alternatives of the same prompt tokens, as many as requested; None
            unless the request asks for alternatives and for prompt log-probabilities.
        prompt_ranks: rank of the same prompt tokens among all tokens, 1 for the most probable.
    """

    request_id: int
    index: int = 0
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[TopLogprobs] = ()
    epochs: Sequence[int] = ()
    finish_reason: str = ""
    cached_tokens: int = 0
    prompt_logprobs: Sequence[float] | None = None
    prompt_top_logprobs: Sequence[TopLogprobs] | None = None
    prompt_ranks: Sequence[int] | None = None

    @staticmethod
    def from_json(values: Sequence[Any]) -> OutputDelta:
        """Return the delta of a JSON array of the fields, which turns tuples into lists."""
        # Equal to the delta of the rank that has computed it: alternatives are pairs there.
        delta = OutputDelta(*values)
        top, prompt_top = delta.top_logprobs, delta.prompt_top_logprobs
        return delta._replace(
            top_logprobs=[[(token, logprob) for token, logprob in pairs] for pairs in top],
            prompt_top_logprobs=None
            if prompt_top is None
            else [[(token, logprob) for token, logprob in pairs] for pairs in prompt_top],
        )


@dataclass(kw_only=True)
class Completion:
    """One whole output, accumulated from its deltas; see `OutputDelta` for the fields."""

    request_id: int = 0
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[float] | None = None
    prompt_top_logprobs: Sequence[TopLogprobs] | None = None
    prompt_ranks: Sequence[int] | None = None
    cached_tokens: int = 0
    epochs: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, delta: OutputDelta) -> None:
        """Append the next delta of the output."""
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.top_logprobs += delta.top_logprobs
        self.epochs += delta.epochs
        self.cached_tokens += delta.cached_tokens
        self.finish_reason = delta.finish_reason
        # Only the first delta of an output has the scores of the prompt.
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
            self.prompt_top_logprobs = delta.prompt_top_logprobs
            self.prompt_ranks = delta.prompt_ranks

    def cut(self, count: int) -> None:
        """Remove the tokens after the first `count`, with their log-probabilities and epochs."""
        for values in (self.tokens, self.logprobs, self.top_logprobs, self.epochs):
            del values[count:]


class Completions(dict[tuple[int, int], Completion]):
    """Outputs by request id and index, accumulated from deltas.

    >>> outputs = Completions()
    >>> while engine.unfinished:
    ...     outputs.add(engine.step())
    """

    def add(self, deltas: Iterable[OutputDelta]) -> None:
        """Append deltas to their outputs."""
        for delta in deltas:
            key = delta.request_id, delta.index
            # The first delta of an output; no step announces an output without tokens.
            if key not in self:
                self[key] = Completion(request_id=delta.request_id, index=delta.index)
            self[key].add(delta)


def option_name(field_name: str) -> str:
    """Return the name of a field of `EngineRequest` as an option of a program."""
    return field_name.replace("_", "-")


def check_request(
    request: EngineRequest,
    *,
    max_length: int | None,
    vocab_size: int,
    name_of: Callable[[str], str] = option_name,
) -> None:
    """Reject a request that no engine of the model can serve.

    Args:
        request: the request.
        max_length: longest sequence of prompt and new tokens together; None means no limit.
        vocab_size: vocabulary size; token ids must be smaller.
        name_of: returns the user's name of a field, for errors.

    Raises:
        RequestError: names the field, the value and the fix.
    """
    length = len(request.prompt)
    if request.max_new_tokens < (0 if request.prompt_logprobs else 1):
        raise RequestError(
            f"{name_of('max_new_tokens')} is {request.max_new_tokens}: use a positive number",
            field="max_new_tokens",
        )
    if not 0 <= request.min_new_tokens <= request.max_new_tokens:
        raise RequestError(
            f"{name_of('min_new_tokens')} is {request.min_new_tokens}: use 0 to "
            f"{name_of('max_new_tokens')}, {request.max_new_tokens}",
            field="min_new_tokens",
        )
    if request.n < 1:
        raise RequestError(f"n is {request.n}: request at least one output", field="n")
    if length == 0:
        raise RequestError("the prompt has no tokens: give at least one", field="prompt")
    if max_length is not None and length + request.max_new_tokens > max_length:
        raise RequestError(
            f"the prompt is too long: {length} tokens + {request.max_new_tokens} new ones "
            f"exceed the model's limit of {max_length}: shorten the prompt or request fewer "
            "new tokens",
            field="prompt",
        )
    invalid = [t for t in request.prompt if not 0 <= t < vocab_size]
    if invalid:
        raise RequestError(
            f"the prompt has token id {invalid[0]}, outside the vocabulary of {vocab_size}: use "
            "the tokenizer that the model was trained with",
            field="prompt",
        )
    sequences = {"allowed_tokens": [request.allowed_tokens]}
    sequences["banned_sequences"] = list(request.banned_sequences)
    for field_name, token_lists in sequences.items():
        outside = [t for tokens in token_lists for t in tokens if not 0 <= t < vocab_size]
        if outside:
            raise RequestError(
                f"{name_of(field_name)} has token id {outside[0]}, outside the vocabulary of "
                f"{vocab_size}: use ids of the model's own tokenizer",
                field=field_name,
            )
    if not all(request.banned_sequences):
        raise RequestError(
            f"{name_of('banned_sequences')} has an empty sequence: leave it out",
            field="banned_sequences",
        )
    biased = [token for token in dict(request.sampling.logit_bias) if token >= vocab_size]
    if biased:
        raise RequestError(
            f"{name_of('logit_bias')} names token {biased[0]}, outside the vocabulary of "
            f"{vocab_size}: use ids of the model's own tokenizer",
            field="logit_bias",
        )
