# SPDX-License-Identifier: Apache-2.0
"""Generate continuations for a batch of prompts: one prefill pass, then one decode pass per token.

Prompts of different lengths are padded on the left, so that the newest token of every sequence is
the last row and one decode step advances them all:

    pad pad  A   B   C  |  D
     P   Q   R   S   T  |  U

Padding counts for nothing: its document id is -1, which no real token attends to, and every real
token carries its own position, counted from 0 at the first real token. A sequence's output is
therefore a function of its own prompt, seed and identity, up to the rounding of matrix products of
another batch size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.kv_cache import KVCache
from megatron.core.inference.sampling import SamplingParams, sample

PADDING_DOCUMENT = -1


class Head(Protocol):
    """Hidden states to logits; `megatron.core.tensor_parallel.VocabParallelHead` is one."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden states [s, b, h] to this rank's logits [s, b, V/tp]."""
        ...

    def whole(self, logits: Tensor) -> Tensor:
        """Gather them to fp32 [s, b, V], the same on every rank, without padding columns."""
        ...


class LanguageModel(Protocol):
    """What the engine asks of a model; `megatron.core.models.gpt.GPTModel` is one."""

    head: Head

    def __call__(self, tokens: Tensor, *, layout: SequenceLayout, cache: KVCache) -> Tensor:
        """Map tokens [b, s], which follow those in the cache, to hidden states [s, b, h].

        `layout` has positions [s, b] and document ids [s_k, b], those of the cached tokens too.
        """
        ...


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


@dataclass(frozen=True)
class _PaddedBatch:
    """Left-padded prompts: tokens [b, s], positions [s, b], document ids [s, b] or None."""

    tokens: Tensor
    positions: Tensor
    document_ids: Tensor | None


def _left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> _PaddedBatch:
    """Arrange prompts of different lengths so that all end in the last column."""
    longest = max(len(p) for p in prompts)
    rows = [[0] * (longest - len(p)) + list(p) for p in prompts]
    pads = torch.tensor([longest - len(p) for p in prompts], device=device)  # [b]
    from_start = torch.arange(longest, device=device).unsqueeze(1) - pads  # [s, b]
    documents = None
    if any(len(p) < longest for p in prompts):
        documents = torch.where(from_start < 0, PADDING_DOCUMENT, 0)  # [s, b]
    return _PaddedBatch(torch.tensor(rows, device=device), from_start.clamp(min=0), documents)


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
        device: where the model is.

    Yields:
        The same list of completions, in request order, one or no token longer each time; the last
        time all have a `finish_reason`.
    """
    lengths = [len(r.prompt) for r in requests]
    sequences = [r.sequence for r in requests]
    completions = [Completion() for _ in requests]
    batch = _left_pad([r.prompt for r in requests], torch.device(device))
    tokens, positions, documents = batch.tokens, batch.positions, batch.document_ids
    # The last token's keys are never needed: it is chosen, not fed.
    cache = KVCache(tokens.shape[1] + max_new_tokens - 1)
    for step in range(max_new_tokens):
        with torch.no_grad():
            layout = SequenceLayout(positions, documents)
            hidden = model(tokens, layout=layout, cache=cache)[-1:]  # [1, b, h]
            # Only the last row is projected: a prompt's other logits are not needed, and large.
            logits = model.head.whole(model.head(hidden))[0]  # [b, V]
            chosen, logprobs = sample(
                logits, sampling, sequences=sequences, positions=[n + step for n in lengths]
            )
        last = step == max_new_tokens - 1
        _record(completions, chosen.tolist(), logprobs.tolist(), stop_tokens=stop_tokens, last=last)
        yield completions
        if all(c.finish_reason for c in completions):
            return
        # Finished sequences are carried along; what they compute reaches no other sequence.
        tokens = chosen.unsqueeze(1)  # [b, 1]
        positions = positions[-1:] + 1  # [1, b]
        if documents is not None:
            documents = torch.cat((documents, documents.new_zeros(1, len(requests))))  # [s_k, b]


def generate(
    model: LanguageModel,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_tokens: Collection[int] = (),
    device: torch.device | str = "cpu",
) -> list[Completion]:
    """Generate for one batch and return the finished completions; arguments as for `stream`."""
    *_, completions = stream(
        model,
        requests,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=stop_tokens,
        device=device,
    )
    return completions
