# SPDX-License-Identifier: Apache-2.0
"""Generate continuations for a batch of prompts: prefill, then one decode step a token.

Prompts of different lengths share a batch (`padded_batch`), padded on the left. The newest token of
every sequence is the last row, so one decode step advances them all:

    pad pad  A   B   C  |  D
     P   Q   R   S   T  |  U

Padding counts for nothing: its document id is -1, which no real token attends to, and every real
token carries its own position, counted from 0 at the first real token. Recurrent mixers never see
padding: the cache specifies which tokens are real.

A sequence's output is a function of its own prompt, seed and identity, up to the rounding of matrix
products of another batch size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.cache import BatchCache, StateCache
from megatron.core.inference.sampling import SamplingParams, sample


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

    def __call__(self, tokens: Tensor, *, layout: SequenceLayout, cache: BatchCache) -> Tensor:
        """Map tokens [b, s], which follow those in the cache, to hidden states [s, b, h].

        `layout` has positions [s, b] and document ids [s_k, b], those of the cached tokens too.
        """
        ...


PADDING_DOCUMENT = -1


class PaddedBatch:
    """The rows of one batch on their way through a model: `prefill` once, then `decode`.

    Args:
        prompts: token ids of each row.
        new_tokens: that will be fed after each prompt at most.
        states: slots for the states of recurrent mixers; None makes one for each row.
        device: where the model is.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        states: StateCache | None,
        device: torch.device,
    ) -> None:
        self._pads = [max(len(p) for p in prompts) - len(p) for p in prompts]
        rows = [[0] * pad + list(p) for pad, p in zip(self._pads, prompts, strict=True)]
        self._tokens = torch.tensor(rows, device=device)  # [b, s]
        length = self._tokens.shape[1]
        pads = torch.tensor(self._pads, device=device)  # [b]
        from_start = torch.arange(length, device=device).unsqueeze(1) - pads  # [s, b]
        self._positions = from_start.clamp(min=0)
        self._documents: Tensor | None = None  # [s, b]
        if any(self._pads):
            self._documents = torch.where(from_start < 0, PADDING_DOCUMENT, 0)
        rows_and_states = {"rows": len(rows), "states": states}
        self.cache = BatchCache(length + new_tokens, **rows_and_states, device=device)

    def prefill(self, model: LanguageModel, *, chunk: int | None = None) -> Tensor:
        """Feed the prompts, at most `chunk` columns at once; return the last hidden states.

        Returns:
            [1, b, h].
        """
        length = self._tokens.shape[1]
        chunk = chunk or length
        for first in range(0, length, chunk):
            last = min(first + chunk, length)
            documents = None if self._documents is None else self._documents[:last]
            self.cache.begin([max(0, last - max(first, pad)) for pad in self._pads])
            hidden = model(
                self._tokens[:, first:last],
                layout=SequenceLayout(self._positions[first:last], documents),
                cache=self.cache,
            )  # [s, b, h]
        self._positions = self._positions[-1:]  # [1, b]
        return hidden[-1:]

    def decode(self, model: LanguageModel, tokens: Tensor, *, ended: Collection[int]) -> Tensor:
        """Feed the next token of each row; return the hidden states.

        Args:
            model: the same.
            tokens: [b].
            ended: rows that want no more. They are carried along, without a state; what they
                compute reaches no other row.

        Returns:
            [1, b, h].
        """
        for row in ended:
            self.cache.end(row)
        self.cache.begin([int(row not in ended) for row in range(len(self._pads))])
        self._positions = self._positions + 1
        if self._documents is not None:
            new = self._documents.new_zeros(1, len(self._pads))
            self._documents = torch.cat((self._documents, new))  # [s_k, b]
        layout = SequenceLayout(self._positions, self._documents)
        return model(tokens.unsqueeze(1), layout=layout, cache=self.cache)


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
        vocab_size: token ids must be below it.

    Raises:
        ValueError: naming the request by its place, the values and the fix.
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
        head = model.head
        for step in range(max_new_tokens):
            with torch.no_grad():
                # Only the last row is projected: a prompt's other logits are not needed, and large.
                logits = head.whole(head(hidden))[0]  # [b, V]
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
