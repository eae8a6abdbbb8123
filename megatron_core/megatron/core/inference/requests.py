# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked for, and what comes of it: `Request` and `Completion`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron.core.inference.sampling import SamplingParams


class RequestError(ValueError):
    """A request that cannot be served.

    Args:
        message: the value and the fix, one line.
        field: of `Request` or `SamplingParams`, which holds the value.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, kw_only=True)
class Request:
    """Ask to continue `prompt`.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: tokens to generate at most.
        sampling: how tokens are chosen.
        stop_tokens: ids that end the text; each is the last token of what it ends.
        sequence: identity in every random draw; output i of several has identity sequence + i.
        n: how many outputs.
        prompt_logprobs: report the log-probability of each token of the prompt.
        mask: returns which tokens may come next, bool [V], from the tokens generated so far; None
            allows all. For grammars.
        forced: returns tokens that have to follow those generated so far, as a grammar does that
            leaves no choice. They are drafts of the next step, and need none of their own; `mask`
            decides.
        priority: where memory or rows are short, requests with a lower number come first; those
            of one number in the order in which they were added.
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
        request_id: as `add` returned it.
        index: of the outputs of the request, from 0.
        tokens: generated so far, a stop token included.
        logprobs: the model's own log-probability of each.
        top_logprobs: of each token the most probable alternatives, (id, log-probability), as many
            as the request asks for.
        prompt_logprobs: of each token of the prompt but the first; None if they were not asked for.
        prompt_top_logprobs: of the same tokens the most probable alternatives, as many as the
            request asks for; None if either was not asked for.
        cached_tokens: of the prompt, found in the prefix cache when it first ran.
        epochs: of each token, how often the weights had been replaced when it was chosen.
        finish_reason: "stop" (a stop token), "length" (token limit), "abort", "error" (the logits
            are not finite, or the mask allows nothing) or "" (not finished).
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
        """Return an output of a request that nothing was generated of."""
        completion = Completion(request_id=request_id, index=index)
        if request.prompt_logprobs:
            completion.prompt_logprobs = []
            completion.prompt_top_logprobs = [] if request.sampling.logprobs else None
        return completion

    def cut(self, count: int) -> None:
        """Forget the tokens after the first `count`, and what is known of them."""
        for values in (self.tokens, self.logprobs, self.top_logprobs, self.epochs):
            del values[count:]


def check_request(request: Request, *, max_length: int | None, vocab_size: int) -> None:
    """Reject a request that no engine of a model can serve.

    Args:
        request: what was asked.
        max_length: longest sequence, prompt and new tokens together; None means no limit.
        vocab_size: token ids must be below it.

    Raises:
        RequestError: naming the field, the value and the fix.
    """
    length = len(request.prompt)
    if request.max_new_tokens < 1:
        raise RequestError(
            f"max-new-tokens is {request.max_new_tokens}: use a positive number",
            field="max_new_tokens",
        )
    if request.n < 1:
        raise RequestError(f"n is {request.n}: ask for at least one output", field="n")
    if length == 0:
        raise RequestError("the prompt has no tokens: give at least one", field="prompt")
    if max_length is not None and length + request.max_new_tokens > max_length:
        raise RequestError(
            f"the prompt is too long: {length} tokens + {request.max_new_tokens} new ones exceed "
            f"the model's limit of {max_length}: shorten the prompt or ask for fewer new tokens",
            field="prompt",
        )
    wrong = [t for t in request.prompt if not 0 <= t < vocab_size]
    if wrong:
        raise RequestError(
            f"the prompt has token id {wrong[0]}, outside the vocabulary of {vocab_size}: use the "
            "tokenizer that the model was trained with",
            field="prompt",
        )
    try:
        request.sampling.check_vocabulary(vocab_size)
    except ValueError as error:
        raise RequestError(str(error), field="logit_bias") from None
