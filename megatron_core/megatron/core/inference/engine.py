# SPDX-License-Identifier: Apache-2.0
"""Generate continuations for a batch of prompts: prefill, then one decode pass per token.

Prompts of different lengths share a batch (`padded_batch`). A sequence's output is a function of
its own prompt, seed and identity, up to the rounding of matrix products of another batch size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron.core.inference.language_model import LanguageModel
from megatron.core.inference.padded_batch import PaddedBatch
from megatron.core.inference.sampling import SamplingParams, sample
from megatron.core.inference.state_cache import StateCache


@dataclass(frozen=True, kw_only=True)
class Request:
    """Ask to continue `prompt` (token ids); `sequence` is its identity in every random draw."""

    prompt: tuple[int, ...]
    sequence: int = 0


@dataclass(kw_only=True)
class Completion:
    """What was generated for one request.

    `tokens` and `logprobs` have one entry per generated token, the end-of-document token included
    when it ended the text. `finish_reason` is "stop" (end of document), "length" (token limit) or
    "" (not finished).
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


def check_requests(
    requests: Sequence[Request], *, max_new_tokens: int, max_length: int | None, vocab_size: int
) -> None:
    """Reject requests that the model cannot serve.

    Args:
        requests: what was asked.
        max_new_tokens: tokens to generate for each.
        max_length: longest sequence, prompt and new tokens together; None means no limit.
        vocab_size: token ids must lie below it.

    Raises:
        ValueError: naming the request by its place, the values and the mend.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max-new-tokens is {max_new_tokens}: use a positive number")
    for place, request in enumerate(requests, 1):
        which = f"prompt {place} of {len(requests)}"
        length = len(request.prompt)
        if length == 0:
            raise ValueError(f"{which} has no tokens: give at least one")
        if max_length is not None and length + max_new_tokens > max_length:
            raise ValueError(
                f"{which} is too long: {length} tokens + {max_new_tokens} new ones exceed the "
                f"model's limit of {max_length}: shorten the prompt or lower max-new-tokens"
            )
        wrong = [t for t in request.prompt if not 0 <= t < vocab_size]
        if wrong:
            raise ValueError(
                f"{which} has token id {wrong[0]}, outside the vocabulary of {vocab_size}: use "
                "the tokenizer that the model was trained with"
            )


def _record(
    completions: Sequence[Completion],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    *,
    stop_tokens: Collection[int],
    last: bool,
) -> None:
    """Append a step's tokens to the unfinished completions and finish those that end with it."""
    for place, completion in enumerate(completions):
        if completion.finish_reason:
            continue
        if not math.isfinite(logprobs[place]):
            raise ValueError(
                f"the model's logits are not finite at token {len(completion.tokens) + 1} of "
                f"sequence {place + 1} of the batch: its weights are damaged or its training has "
                "diverged; take an earlier checkpoint"
            )
        completion.tokens.append(tokens[place])
        completion.logprobs.append(logprobs[place])
        if tokens[place] in stop_tokens:
            completion.finish_reason = "stop"
        elif last:
            completion.finish_reason = "length"


def stream(
    model: LanguageModel,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_tokens: Collection[int] = (),
    prefill_chunk_tokens: int | None = None,
    states: StateCache | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[list[Completion]]:
    """Generate for one batch, yielding the growing completions after every token.

    With tensor parallelism every rank runs this with the same arguments, sees the same logits and
    hence chooses the same tokens; no token is communicated. Call `check_requests` first.

    Args:
        model: built without sequence parallelism.
        requests: the batch; any mix of prompt lengths.
        max_new_tokens: tokens to generate for each at most.
        sampling: how tokens are chosen.
        stop_tokens: ids that end a sequence.
        prefill_chunk_tokens: of a prompt that are fed at once, which bounds the memory of their
            activations; None is all.
        states: slots for the states of recurrent mixers, at least one free for each request; they
            are free again at the end. None makes some for this batch.
        device: where the model is.

    Yields:
        The same list of completions, in request order, one or no token longer each time; the last
        time all have a `finish_reason`.
    """
    lengths = [len(r.prompt) for r in requests]
    sequences = [r.sequence for r in requests]
    completions = [Completion() for _ in requests]
    # The last token is chosen and never fed.
    batch = PaddedBatch(
        [r.prompt for r in requests],
        new_tokens=max_new_tokens - 1,
        states=states,
        device=torch.device(device),
    )
    try:
        with torch.no_grad():
            hidden = batch.prefill(model, chunk=prefill_chunk_tokens)  # [1, b, h]
        for step in range(max_new_tokens):
            with torch.no_grad():
                # Only the last row is projected: a prompt's other logits are not needed, and large.
                logits = model.head.whole(model.head(hidden))[0]  # [b, V]
                chosen, logprobs = sample(
                    logits, sampling, sequences=sequences, positions=[n + step for n in lengths]
                )
            last = step == max_new_tokens - 1
            drawn = (chosen.tolist(), logprobs.tolist())
            _record(completions, *drawn, stop_tokens=stop_tokens, last=last)
            yield completions
            ended = {row for row, done in enumerate(completions) if done.finish_reason}
            if len(ended) == len(completions):
                return
            with torch.no_grad():
                hidden = batch.decode(model, chosen, ended=ended)  # [1, b, h]
    finally:
        batch.cache.close()
