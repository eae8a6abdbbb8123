# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: where drafts come from, tokens that may follow those of a row.

A step of the engine computes a row's newest token and k drafts after it, chooses a token after each
of these k + 1 as it would without drafts, and keeps what agrees (`sampling.accepted_drafts`;
Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). So a row gets 1 to
k + 1 tokens of one forward pass of the model, and they are those that it gets without.

| proposer | drafts | costs |
|---|---|---|
| `NGramLookup` | what followed the row's newest tokens before, in its own text | nothing |
| `DraftModel` | what a smaller model generates | its weights, its cache, k + 1 of its steps |
| `MultiTokenHeads` | what the model's own depths of multi-token prediction predict | these |

A draft of a model is chosen as the row's own tokens are: by its temperature, filters, penalties and
mask, and by the draw of its position. Whatever is proposed changes no token.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel import SequenceLayout
from megatron.core.device import pin
from megatron.core.inference.cache import PagedCache
from megatron.core.inference.requests import Completion, Request
from megatron.core.inference.sampling import SampleRow, sample
from megatron.core.inference.scheduler import BatchPlan, Row, Scheduler
from megatron.core.inference.sizes import EngineConfig

#: The pipeline stage that finds drafts.
DraftStage = Literal["every", "first", "last"]


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftContext:
    """A row that drafts are wanted for.

    Args:
        row: its tokens are known.
        request: what it is for.
        generated: tokens after the prompt.
        sequence: identity in random draws.
        count: drafts at most.
        predicted: drafts that `Proposer.predict` found after the row's tokens.
    """

    row: Row
    request: Request
    generated: Sequence[int]
    sequence: int
    count: int
    predicted: Sequence[int]


@dataclass(frozen=True, eq=False, kw_only=True)
class SampledRow:
    """A row that a step chooses a token for, as it is when the step is launched.

    Args:
        count: drafts at most after what is chosen.
        left: tokens that it may still get.
        stop_tokens: that end it.
        sample_row: returns how a token is chosen after some that follow the row's own.
    """

    count: int
    left: int
    stop_tokens: Collection[int]
    sample_row: Callable[[Sequence[int]], SampleRow]

    def drafts_after(self, chosen: Sequence[int]) -> int:
        """Return how many drafts may follow these tokens, at least one; 0 if they end the row."""
        if chosen[-1] in self.stop_tokens:
            return 0
        # The last token is chosen and never computed.
        return max(0, min(self.count, self.left - len(chosen) - 1))


@dataclass(frozen=True, eq=False, kw_only=True)
class ComputedStep:
    """A step whose tokens are chosen, before it is committed.

    Args:
        plan: of the step.
        layout: of its tokens.
        hidden: [t, 1, h] of all tokens, whole on every rank.
        cache: that the step has written to.
        logits: returns fp32 logits [n, V] of hidden states [n, 1, h].
        following: of each row the known tokens after those of the step.
        rows: the sampled ones.
        chosen: of each of these what is appended to it, accepted drafts included.
        accepted: how many of these are drafts.
        counts: drafts at most after `chosen`; none of a row that ends.
    """

    plan: BatchPlan
    layout: SequenceLayout
    hidden: Tensor
    cache: PagedCache
    logits: Callable[[Tensor], Tensor]
    following: Sequence[Sequence[int]]
    rows: Sequence[SampledRow]
    chosen: Sequence[Sequence[int]]
    accepted: Sequence[int]
    counts: Sequence[int]

    def takes_more(self, at: int, drafts: Sequence[int]) -> bool:
        """Return whether a sampled row may have another draft after some."""
        stopped = bool(drafts) and drafts[-1] in self.rows[at].stop_tokens
        return len(drafts) < self.counts[at] and not stopped


class Proposer(Protocol):
    """Where drafts come from; `megatron.core.inference.speculation` has several.

    Attributes:
        stage: of a pipeline, where drafts are found: on "every" one, each of which finds the same;
            on the "first", by `propose`; or on the "last", by `predict`, which is called there
            alone. `propose` is called on all, those of others do not count.
    """

    stage: DraftStage

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Sequence[int]]:
        """Return tokens that may follow those of each row, no more than it may have."""
        ...

    def predict(self, step: ComputedStep) -> Sequence[Sequence[int]]:
        """Return drafts after what a step has chosen, of each sampled row no more than it may have.

        It is a part of every step, on the last pipeline stage, whose drafts the others are told; it
        may run in another thread than the host's loop.
        """
        ...

    def sleep(self, *, weights: bool) -> None:
        """Give back the proposer's own memory on the device until `wake`, with `weights` that of
        its weights too."""
        ...

    def wake(self) -> None:
        """Take the memory again."""
        ...


@dataclass
class _NGrams:
    """Where the n-grams of a row's tokens were last, by what followed them.

    Args:
        indexed: tokens whose n-grams are known.
        places: place after the last occurrence of each n-gram.
    """

    indexed: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict)


class NGramLookup:
    """Prompt lookup decoding (Saxena 2023): draft what followed the newest tokens of a row where
    they were in it before.

    Args:
        longest, shortest: newest tokens that are looked for; the longest match counts, and of its
            occurrences the last.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"n-grams of {shortest} to {longest} tokens: use at least 1, and no less at most"
            )
        self.lengths = range(longest, shortest - 1, -1)
        self.stage: DraftStage = "every"
        self._known: weakref.WeakKeyDictionary[Row, _NGrams] = weakref.WeakKeyDictionary()

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Proposer`."""
        return [self._lookup(context.row, context.count) for context in contexts]

    def predict(self, step: ComputedStep) -> list[list[int]]:
        """See `Proposer`: it predicts nothing."""
        return []

    def sleep(self, *, weights: bool) -> None:
        """See `Proposer`: it has no memory on the device."""

    def wake(self) -> None:
        """See `Proposer`."""

    def _lookup(self, row: Row, count: int) -> list[int]:
        tokens, known = row.tokens, self._known.setdefault(row, _NGrams())
        end = len(tokens)
        for place in range(known.indexed, end):  # the n-grams in front of each token
            for length in self.lengths:
                if place >= length:
                    known.places[tuple(tokens[place - length : place])] = place
        known.indexed = end
        for length in self.lengths:
            place = known.places.get(tuple(tokens[max(0, end - length) : end]))
            if place is not None:
                # What repeats itself goes on beyond the end of the tokens.
                period = end - place
                return [tokens[place + n % period] for n in range(count)]
        return []


class DraftEngine(Protocol):
    """What `DraftModel` asks of the smaller model's engine; `Engine` is one."""

    config: EngineConfig
    scheduler: Scheduler
    max_length: int | None

    @property
    def unfinished(self) -> int:
        """Outputs that have not ended."""
        ...

    def add(self, request: Request) -> int:
        """Take a request in and return its id."""
        ...

    def step(self) -> list[Completion]:
        """Compute one step; return the outputs that have a new token."""
        ...

    def sleep(self, weights: Iterable[Tensor]) -> None:
        """Give the memory of the cache and of these weights back until `wake`."""
        ...

    def wake(self) -> None:
        """Take the memory again."""
        ...


class DraftModel:
    """Drafts are what a smaller model of the same vocabulary generates, in an engine of its own.

    That engine's prefix cache keeps what it computed of a row, up to a block. In a pipeline the
    first stage has all of the smaller model: it drafts for one step while later stages compute the
    step before.

    Args:
        engine: of the smaller model; None on a later pipeline stage.
        weights: returns what holds the smaller model's weights, which `sleep` may give back.
    """

    def __init__(self, engine: DraftEngine | None, weights: Callable[[], Iterable[Tensor]]) -> None:
        self.engine, self._weights = engine, weights
        self.stage: DraftStage = "first"

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `Proposer`."""
        found: list[list[int]] = [[] for _ in contexts]
        if self.engine is None:
            return found
        places: dict[int, int] = {}
        for place, context in enumerate(contexts):
            count = min(context.count, self._room(self.engine) - len(context.row.tokens))
            if count > 0:
                places[self.engine.add(_draft_request(context, count))] = place
        while self.engine.unfinished:
            for completion in self.engine.step():
                found[places[completion.request_id]] = completion.tokens
        return found

    def predict(self, step: ComputedStep) -> list[list[int]]:
        """See `Proposer`: tokens are all that is needed."""
        return []

    def sleep(self, *, weights: bool) -> None:
        """See `Proposer`; the smaller model's engine sleeps."""
        if self.engine is not None:
            self.engine.sleep(self._weights() if weights else ())

    def wake(self) -> None:
        """See `Proposer`."""
        if self.engine is not None:
            self.engine.wake()

    @staticmethod
    def _room(engine: DraftEngine) -> int:
        """Return the longest row that the engine has room for, in tokens."""
        longest = engine.scheduler.pool.num_blocks * engine.config.block_size
        return longest if engine.max_length is None else min(longest, engine.max_length)


def _draft_request(context: DraftContext, count: int) -> Request:
    """Return a request for tokens after those of a row, chosen as its own are."""
    request, generated, mask = context.request, context.generated, context.request.mask
    return Request(
        prompt=tuple(context.row.tokens),
        max_new_tokens=count,
        sampling=dataclasses.replace(request.sampling, logprobs=None),
        stop_tokens=request.stop_tokens,
        sequence=context.sequence,
        mask=None if mask is None else lambda tokens: mask([*generated, *tokens]),
    )


@runtime_checkable
class MultiTokenModel(Protocol):
    """What `MultiTokenHeads` asks of a model; `megatron.core.models.gpt.GPTModel` is one."""

    def predict_ahead(
        self,
        depth: int,
        hidden_states: Tensor,
        tokens: Tensor,
        *,
        layout: SequenceLayout,
        cache: PagedCache,
    ) -> Tensor:
        """Return the hidden states [t, 1, h] of a depth from those of the depth before and the
        tokens [1, t] that follow."""
        ...


class MultiTokenHeads:
    """Drafts are what the model's own depths of multi-token prediction predict (DeepSeek-AI 2024,
    arXiv 2412.19437, section 2.2).

    In each step the depths compute the same tokens as the model did, and keep keys, values and
    states in its cache. Depth k reads tokens k + 1 places ahead; at the end of a row these are
    drafts, and what was kept of them stays if they are not accepted: it changes drafts only.

    Args:
        model: of the engine; with pipeline stages, the last.
        depths: how many it has.
    """

    def __init__(self, model: MultiTokenModel, depths: int) -> None:
        self.model, self.depths = model, depths
        self.stage: DraftStage = "last"

    def propose(self, contexts: Sequence[DraftContext]) -> list[Sequence[int]]:
        """See `Proposer`."""
        return [context.predicted[: context.count] for context in contexts]

    def predict(self, step: ComputedStep) -> list[list[int]]:
        """See `Proposer`; compute the depths."""
        plan, hidden = step.plan, step.hidden
        rows = dict(zip(plan.sampled, range(len(plan.sampled)), strict=True))
        drafts: list[list[int]] = [[] for _ in rows]
        firsts = [int(plan.query_bounds[plan.place(n)]) for n in range(len(plan.rows))]
        known: list[list[int]] = []  # of each row its new tokens that stay, and those after them
        for n, (first, count) in enumerate(zip(firsts, plan.counts, strict=True)):
            kept = plan.tokens[first : first + count - len(plan.drafts[n])].tolist()
            known.append([*kept, *(step.chosen[rows[n]] if n in rows else step.following[n])])
        # Of each sampled row, where in the step its last token is that stays.
        last = [
            firsts[n] + plan.counts[n] - 1 - len(plan.drafts[n]) + step.accepted[at]
            for n, at in rows.items()
        ]
        for depth in range(self.depths):
            tokens = np.zeros(hidden.shape[0], dtype=np.int64)
            for n, (first, count) in enumerate(zip(firsts, plan.counts, strict=True)):
                following = [*known[n], *(drafts[rows[n]] if n in rows else ())]
                ahead = following[depth + 1 : depth + 1 + count]
                tokens[first : first + len(ahead)] = ahead
            there = pin(torch.from_numpy(tokens), hidden.device).to(
                hidden.device, non_blocking=True
            )
            hidden = self.model.predict_ahead(
                depth, hidden, there[None], layout=step.layout, cache=step.cache
            )
            wanted = [
                at for at, d in enumerate(drafts) if len(d) == depth and step.takes_more(at, d)
            ]
            if wanted:
                rows_after = [(step.rows[at], [*step.chosen[at], *drafts[at]]) for at in wanted]
                asked = [row.sample_row(after) for row, after in rows_after]
                index = torch.tensor([last[at] for at in wanted])
                index = pin(index, hidden.device).to(hidden.device, non_blocking=True)
                found = sample(step.logits(hidden.index_select(0, index)), asked)
                tokens_found = zip(found.tokens.tolist(), found.finite.tolist(), strict=True)
                for at, (token, finite) in zip(wanted, tokens_found, strict=True):
                    drafts[at] += [token] * finite
        return drafts

    def sleep(self, *, weights: bool) -> None:
        """See `Proposer`: the depths' cache and weights are those of
        the engine."""

    def wake(self) -> None:
        """See `Proposer`."""
