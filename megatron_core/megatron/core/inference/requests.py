# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine and their outputs: `Request` and `Completion`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron.core.inference.sampling import SamplingParams


class RequestError(ValueError):
    """The engine cannot serve a request.

    Args:
        message: one line with the value and the fix.
        field: field of `Request` or `SamplingParams` with the value.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to continue `prompt`.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: largest number of new tokens.
        sampling: sampling parameters.
        stop_tokens: token ids that end an output; the output includes the stop token.
        sequence: sequence number in the key of random draws; output i uses `sequence` + i.
        n: number of outputs.
        prompt_logprobs: report the log-probability of each prompt token.
        mask: maps the output tokens so far to the allowed next tokens, bool [V]; None allows all
            tokens. For grammars.
        forced: maps the output tokens so far to tokens that a grammar forces next. They become
            drafts of the next step and save their own steps; `mask` still verifies them.
        priority: requests with a lower number are served first when memory or batch slots are
            short; equal numbers in the order of arrival.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_tokens: Collection[int] = ()
    sequence: int = 0
    n: int = 1
    prompt_logprobs: bool = False
    mask: Callable[[Sequence[int]], Tensor | None] | None = None
    forced: Callable[[Sequence[int]], Sequence[int]] | None = None
    priority: int = 0


@dataclass(kw_only=True)
class Completion:
    """One output of a request.

    Args:
        request_id: return value of `add`.
        index: index of the output within the request.
        tokens: output tokens so far, including a stop token.
        logprobs: log-probability of each token before adjustments of the logits.
        top_logprobs: alternatives of each token as (id, log-probability), as many as requested.
        prompt_logprobs: log-probability of each prompt token except the first; None unless
            requested.
        prompt_top_logprobs: alternatives of the same prompt tokens, as many as requested; None
            unless the request asks for alternatives and for prompt log-probabilities.
        cached_tokens: prompt tokens that the first admission found in the prefix cache.
        epochs: `Engine.epoch` at the sampling of each token.
        finish_reason: "stop" (stop token), "length" (token limit), "abort", "error" (logits are not
            finite, or the mask allows no token) or "" (unfinished).
    """

    request_id: int = 0
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0
    epochs: list[int] = field(default_factory=list)
    finish_reason: str = ""

    @staticmethod
    def begin(request: Request, request_id: int, index: int) -> Completion:
        """Return an empty output of a request."""
        completion = Completion(request_id=request_id, index=index)
        if request.prompt_logprobs:
            completion.prompt_logprobs = []
            completion.prompt_top_logprobs = [] if request.sampling.logprobs else None
        return completion

    def cut(self, count: int) -> None:
        """Remove the tokens after the first `count`, with their log-probabilities and epochs."""
        for values in (self.tokens, self.logprobs, self.top_logprobs, self.epochs):
            del values[count:]


def check_request(request: Request, *, max_length: int | None, vocab_size: int) -> None:
    """Reject a request that no engine of the model can serve.

    Args:
        request: the request.
        max_length: longest sequence of prompt and new tokens together; None means no limit.
        vocab_size: vocabulary size; token ids must be smaller.

    Raises:
        RequestError: names the field, the value and the fix.
    """
    length = len(request.prompt)
    if request.max_new_tokens < 1:
        raise RequestError(
            f"max-new-tokens is {request.max_new_tokens}: use a positive number",
            field="max_new_tokens",
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
    try:
        request.sampling.check_vocabulary(vocab_size)
    except ValueError as error:
        raise RequestError(str(error), field="logit_bias") from None
