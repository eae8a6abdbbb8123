# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: proposers of draft tokens.

A step computes the newest token of a sequence and k drafts after it, samples a token after each of
the k + 1 positions as it would without drafts, and accepts the drafts up to the first mismatch
(`sampling.accepted_drafts`; Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318). One forward pass therefore yields 1 to k + 1 tokens, equal to those without
drafts.

| proposer | drafts | cost |
|---|---|---|
| `NGramLookup` | the continuation of an earlier occurrence of the newest tokens | none |
| `DraftModel` | tokens of a smaller model | its weights, its cache, k + 1 of its steps |
| `MultiTokenHeads` | predictions of the model's MTP layers | the MTP layers |

Model-based proposers sample drafts like the sequence itself: with its temperature, filters,
penalties and mask, and with the random draw of the draft's position. No proposer changes the
generated tokens.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel import SequenceLayout
from megatron.core.device import pin
from megatron.core.inference.cache import PagedCache
from megatron.core.inference.request_state import (
    DraftContext,
    SampledSequence,
    SchedulerOutput,
    SequenceState,
)
from megatron.core.inference.requests import EngineRequest, OutputDelta
from megatron.core.inference.sampling import sample

#: The pipeline stages that compute drafts.
DraftStage = Literal["every", "first", "last"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ComputedStep:
    """A step after sampling and before `Scheduler.commit`.

    Args:
        scheduler_output: schedule of the step.
        layout: layout of its tokens.
        hidden: hidden states [t, 1, h] of all tokens, gathered on every rank.
        cache: cache that the step has written to.
        logits: maps hidden states [n, 1, h] to fp32 logits [n, V].
        next_tokens: for each scheduled sequence its tokens after the scheduled tokens.
        seqs: the sampled sequences.
        chosen: new tokens of each sampled sequence, accepted drafts included.
        accepted: number of accepted drafts of each sampled sequence.
        max_drafts: largest number of drafts after `chosen`; 0 for a sequence that ends.
    """

    scheduler_output: SchedulerOutput
    layout: SequenceLayout
    hidden: Tensor
    cache: PagedCache
    logits: Callable[[Tensor], Tensor]
    next_tokens: Sequence[Sequence[int]]
    seqs: Sequence[SampledSequence]
    chosen: Sequence[Sequence[int]]
    accepted: Sequence[int]
    max_drafts: Sequence[int]

    def can_extend(self, index: int, drafts: Sequence[int]) -> bool:
        """Return whether `seqs[index]` may have another draft after `drafts`."""
        stopped = bool(drafts) and drafts[-1] in self.seqs[index].stop_tokens
        return len(drafts) < self.max_drafts[index] and not stopped


class Proposer(Protocol):
    """Source of draft tokens; this module has several, which derive from it.

    Attributes:
        stage: pipeline stages that compute drafts. "every": `propose` returns the same drafts on
            all stages. "first": only the first stage's `propose` counts. "last": `predict` runs on
            the last stage. `propose` is called on all stages in each case.
    """

    stage: DraftStage = "every"

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Sequence[int]]:
        """Return at most `max_drafts` drafts for each sequence."""
        ...

    def predict(self, step: ComputedStep) -> Sequence[Sequence[int]]:
        """Return at most `max_drafts` drafts for each sampled sequence of a step.

        It runs at the end of each step on the last pipeline stage, which sends the drafts to the
        other stages. It may run in another thread than `propose`.
        """
        return []

    def sleep(self, *, weights: bool) -> None:
        """Free the proposer's device memory until `wake`; with `weights` also its weights."""
        return

    def wake(self) -> None:
        """Allocate the memory again."""
        return


@dataclass
class _NGramIndex:
    """Index of the n-grams of a sequence.

    Args:
        num_indexed: number of indexed tokens.
        positions: position after the last occurrence of each n-gram.
    """

    num_indexed: int = 0
    positions: dict[tuple[int, ...], int] = field(default_factory=dict)


class NGramLookup(Proposer):
    """Prompt lookup decoding (Saxena 2023): draft the continuation of an earlier occurrence of the
    newest tokens.

    Args:
        longest, shortest: range of n-gram lengths. The longest match wins, then the latest.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"n-grams of {shortest} to {longest} tokens: the shortest must be at least 1 "
                "and at most the longest"
            )
        self.lengths = range(longest, shortest - 1, -1)
        # Weak keys: an index disappears with its sequence.
        self._indexes: weakref.WeakKeyDictionary[SequenceState, _NGramIndex]
        self._indexes = weakref.WeakKeyDictionary()

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Proposer`."""
        return [self._lookup(context.seq, context.max_drafts) for context in contexts]

    def _lookup(self, seq: SequenceState, count: int) -> list[int]:
        tokens, index = seq.tokens, self._indexes.setdefault(seq, _NGramIndex())
        end = len(tokens)
        # Index the n-grams before each new token. The n-gram at the end is not indexed yet, so it
        # cannot match itself below.
        for position in range(index.num_indexed, end):
            for length in self.lengths:
                if position >= length:
                    index.positions[tuple(tokens[position - length : position])] = position
        index.num_indexed = end
        for length in self.lengths:
            position = index.positions.get(tuple(tokens[max(0, end - length) : end]))
            if position is not None:
                # Continue past the end of the tokens as if they repeated with this period.
                period = end - position
                return [tokens[position + n % period] for n in range(count)]
        return []


class DraftEngine(Protocol):
    """Engine interface of `DraftModel`, for example `Engine`."""

    @property
    def capacity(self) -> int:
        """Longest sequence in tokens that the cache and the model hold."""
        ...

    @property
    def unfinished(self) -> int:
        """Number of unfinished outputs."""
        ...

    def add(self, request: EngineRequest) -> int:
        """Queue a request and return its id."""
        ...

    def step(self) -> list[OutputDelta]:
        """Compute one step; return the new tokens of each output."""
        ...

    def sleep(self, weights: Iterable[Tensor]) -> None:
        """Free the device memory of the cache and of `weights` until `wake`."""
        ...

    def wake(self) -> None:
        """Allocate the memory again."""
        ...


class DraftModel(Proposer):
    """Drafts of a smaller model with the same vocabulary, generated in a second engine.

    The prefix cache of the draft engine keeps the full blocks of a sequence between steps. With
    pipeline parallelism the first stage holds the whole draft model. It drafts for one step while
    later stages compute the previous step.

    Args:
        engine: engine of the draft model; None on later pipeline stages.
        weights: returns the tensors of the draft model that `sleep` may free.
    """

    stage: DraftStage = "first"

    def __init__(self, engine: DraftEngine | None, weights: Callable[[], Iterable[Tensor]]) -> None:
        self.engine, self._weights = engine, weights

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Proposer`."""
        drafts: list[list[int]] = [[] for _ in contexts]
        if self.engine is None:
            return drafts
        index_of_request: dict[int, int] = {}
        for index, context in enumerate(contexts):
            room = self.engine.capacity - len(context.seq.tokens)
            count = min(context.max_drafts, room)
            if count > 0:
                index_of_request[self.engine.add(_draft_request(context, count))] = index
        while self.engine.unfinished:
            for delta in self.engine.step():
                drafts[index_of_request[delta.request_id]] += delta.tokens
        return drafts

    def sleep(self, *, weights: bool) -> None:
        """See `Proposer`; the draft engine sleeps."""
        if self.engine is not None:
            self.engine.sleep(self._weights() if weights else ())

    def wake(self) -> None:
        """See `Proposer`."""
        if self.engine is not None:
            self.engine.wake()


def _draft_request(context: DraftContext, count: int) -> EngineRequest:
    """Return the request for `count` drafts, with the sampling parameters of the sequence."""
    request, generated, mask = context.request, context.generated, context.request.mask
    return EngineRequest(
        prompt=tuple(context.seq.tokens),
        max_new_tokens=count,
        sampling=dataclasses.replace(request.sampling, logprobs=None),
        stop_tokens=request.stop_tokens,
        # The same sequence number repeats the random draws of the model, which makes drafts agree
        # more often.
        sequence=context.sequence,
        # The draft engine's prompt includes output tokens, but a mask expects all output tokens.
        mask=None if mask is None else lambda tokens: mask([*generated, *tokens]),
    )


@runtime_checkable
class MultiTokenModel(Protocol):
    """Model interface of `MultiTokenHeads`, for example `megatron.core.models.gpt.GPTModel`."""

    def predict_ahead(
        self,
        depth: int,
        hidden_states: Tensor,
        tokens: Tensor,
        *,
        layout: SequenceLayout,
        cache: PagedCache,
    ) -> Tensor:
        """Return the hidden states [t, 1, h] of an MTP layer.

        Args:
            depth: index of the MTP layer.
            hidden_states: hidden states [t, 1, h] of the previous MTP layer or the model.
            tokens: token ids [1, t], shifted by `depth` + 1.
            layout: layout of the step.
            cache: cache of the engine.
        """
        ...


class MultiTokenHeads(Proposer):
    """Drafts of the model's multi-token prediction (MTP) layers (DeepSeek-AI 2024, arXiv
    2412.19437, section 2.2).

    In each step the MTP layers compute the same tokens as the model and write keys, values and
    states to its cache. MTP layer k reads the tokens shifted by k + 1. At the end of a sequence the
    shifted tokens are drafts. Cache entries of rejected drafts stay, which affects only later
    drafts, never the output.

    Args:
        model: model of the engine; with pipeline parallelism its last stage.
        num_layers: number of MTP layers.
    """

    stage: DraftStage = "last"

    def __init__(self, model: MultiTokenModel, num_layers: int) -> None:
        self.model, self.num_layers = model, num_layers

    def propose(self, contexts: Sequence[DraftContext]) -> list[Sequence[int]]:
        """See `Proposer`."""
        return [context.predicted[: context.max_drafts] for context in contexts]

    def predict(self, step: ComputedStep) -> list[list[int]]:
        """See `Proposer`; run the MTP layers."""
        scheduler_output, hidden = step.scheduler_output, step.hidden
        # Index into `scheduler_output.sequences` -> index into the sampled sequences.
        sampled = {n: index for index, n in enumerate(scheduler_output.sampled)}
        drafts: list[list[int]] = [[] for _ in sampled]
        counts = scheduler_output.num_scheduled_tokens
        batch_rows = [scheduler_output.batch_row(n) for n in range(len(counts))]
        starts = [int(scheduler_output.query_bounds[row]) for row in batch_rows]
        num_drafts = [len(draft_tokens) for draft_tokens in scheduler_output.draft_tokens]
        # For each sequence its scheduled tokens without drafts, then the tokens after them.
        token_ids: list[list[int]] = []
        for n, (start, count) in enumerate(zip(starts, counts, strict=True)):
            computed = scheduler_output.tokens[start : start + count - num_drafts[n]].tolist()
            after = step.chosen[sampled[n]] if n in sampled else step.next_tokens[n]
            token_ids.append([*computed, *after])
        # Index into the t tokens of the last accepted token of each sampled sequence.
        last_accepted = [
            starts[n] + counts[n] - 1 - num_drafts[n] + step.accepted[index]
            for n, index in sampled.items()
        ]
        for layer in range(self.num_layers):
            tokens = np.zeros(hidden.shape[0], dtype=np.int64)
            for n, (start, count) in enumerate(zip(starts, counts, strict=True)):
                extended = [*token_ids[n], *(drafts[sampled[n]] if n in sampled else ())]
                shifted = extended[layer + 1 : layer + 1 + count]
                tokens[start : start + len(shifted)] = shifted
            device_tokens = _to_device(torch.from_numpy(tokens), hidden.device)
            hidden = self.model.predict_ahead(
                layer, hidden, device_tokens[None], layout=step.layout, cache=step.cache
            )
            # A sequence without a draft from the previous layer cannot be extended any more.
            active = [
                index
                for index, tokens_so_far in enumerate(drafts)
                if len(tokens_so_far) == layer and step.can_extend(index, tokens_so_far)
            ]
            if active:
                sample_rows = [
                    step.seqs[index].sample_row([*step.chosen[index], *drafts[index]])
                    for index in active
                ]
                rows = _to_device(torch.tensor([last_accepted[i] for i in active]), hidden.device)
                choice = sample(step.logits(hidden.index_select(0, rows)), sample_rows)
                tokens_and_finite = zip(choice.tokens.tolist(), choice.finite.tolist(), strict=True)
                for index, (token, finite) in zip(active, tokens_and_finite, strict=True):
                    drafts[index] += [token] * finite
        return drafts


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting for the copy."""
    return pin(tensor, device).to(device, non_blocking=True)
