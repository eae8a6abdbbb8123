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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel import SequenceLayout
from megatron.core.device import pin
from megatron.core.inference.cache import PagedCache
from megatron.core.inference.engine import ComputedStep, DraftContext, Engine, Request
from megatron.core.inference.sampling import sample
from megatron.core.inference.scheduler import Row


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
        self.reads_tokens_only = True
        self._known: weakref.WeakKeyDictionary[Row, _NGrams] = weakref.WeakKeyDictionary()

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `megatron.core.inference.engine.Proposer`."""
        return [self._lookup(context.row, context.count) for context in contexts]

    def observe(self, step: ComputedStep, engine: Engine) -> None:
        """See `megatron.core.inference.engine.Proposer`."""

    def sleep(self, *, weights: bool) -> None:
        """See `megatron.core.inference.engine.Proposer`: it has no memory on the device."""

    def wake(self) -> None:
        """See `megatron.core.inference.engine.Proposer`."""

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


class DraftModel:
    """Drafts are what a smaller model of the same vocabulary generates, in an engine of its own.

    That engine's prefix cache keeps what it computed of a row, up to a block.

    Args:
        engine: of the smaller model.
        weights: returns what holds the smaller model's weights, which `sleep` may give back.
    """

    def __init__(self, engine: Engine, weights: Callable[[], Iterable[Tensor]]) -> None:
        self.engine, self.reads_tokens_only = engine, False
        self._weights = weights

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `megatron.core.inference.engine.Proposer`."""
        found: list[list[int]] = [[] for _ in contexts]
        places: dict[int, int] = {}
        for place, context in enumerate(contexts):
            count = self._room(context)
            if count > 0:
                places[self.engine.add(_draft_request(context, count))] = place
        while self.engine.unfinished:
            for completion in self.engine.step():
                found[places[completion.request_id]] = completion.tokens
        return found

    def observe(self, step: ComputedStep, engine: Engine) -> None:
        """See `megatron.core.inference.engine.Proposer`: tokens are all that is needed."""

    def sleep(self, *, weights: bool) -> None:
        """See `megatron.core.inference.engine.Proposer`; the smaller model's engine sleeps."""
        self.engine.sleep(self._weights() if weights else ())

    def wake(self) -> None:
        """See `megatron.core.inference.engine.Proposer`."""
        self.engine.wake()

    def _room(self, context: DraftContext) -> int:
        """Return the drafts of a row that the engine has room for."""
        longest = self.engine.scheduler.pool.num_blocks * self.engine.config.block_size
        if self.engine.max_length is not None:
            longest = min(longest, self.engine.max_length)
        return min(context.count, longest - len(context.row.tokens))


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

    After each step the depths compute the same tokens as the model did, and keep keys, values and
    states in its cache. Depth k reads tokens k + 1 places ahead; at the end of a row these are
    drafts, and what was kept of them stays if they are not accepted: it changes drafts only.

    Args:
        model: of the engine.
        depths: how many it has.
    """

    def __init__(self, model: MultiTokenModel, depths: int) -> None:
        self.model, self.depths, self.reads_tokens_only = model, depths, False
        self._drafts: dict[Row, list[int]] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `megatron.core.inference.engine.Proposer`."""
        return [self._drafts.get(context.row, [])[: context.count] for context in contexts]

    def observe(self, step: ComputedStep, engine: Engine) -> None:
        """See `megatron.core.inference.engine.Proposer`; compute the depths."""
        plan, hidden = step.plan, step.hidden
        rows = dict(zip(plan.sampled, range(len(plan.sampled)), strict=True))
        drafts: list[list[int]] = [[] for _ in rows]
        # Of each sampled row, where in the step its last token is that stays.
        last = [
            int(plan.query_bounds[plan.place(n) + 1]) - 1 - len(plan.drafts[n]) + step.accepted[at]
            for n, at in rows.items()
        ]
        for depth in range(self.depths):
            tokens = np.zeros(hidden.shape[0], dtype=np.int64)
            for n, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True)):
                begin, length = row.computed + depth + 1, len(row.tokens)
                ahead = row.tokens[begin : begin + count]
                if n in rows:
                    new = [*step.chosen[rows[n]], *drafts[rows[n]]]
                    ahead += new[max(0, begin - length) : max(0, begin + count - length)]
                first = int(plan.query_bounds[plan.place(n)])
                tokens[first : first + len(ahead)] = ahead
            there = pin(torch.from_numpy(tokens), engine.device).to(
                engine.device, non_blocking=True
            )
            hidden = self.model.predict_ahead(
                depth, hidden, there[None], layout=step.layout, cache=engine.cache
            )
            wanted = [at for at, context in enumerate(step.contexts) if context.count > depth]
            if wanted:
                asked = [step.contexts[at].sample_row(drafts[at]) for at in wanted]
                index = torch.tensor([last[at] for at in wanted])
                index = pin(index, engine.device).to(engine.device, non_blocking=True)
                found = sample(engine.logits(hidden.index_select(0, index)), asked).tokens
                for at, token in zip(wanted, found.tolist(), strict=True):
                    drafts[at].append(token)
        self._drafts = {
            plan.rows[n]: drafts[at] for n, at in rows.items() if step.contexts[at].count
        }

    def sleep(self, *, weights: bool) -> None:
        """See `megatron.core.inference.engine.Proposer`: the depths' cache and weights are those of
        the engine."""

    def wake(self) -> None:
        """See `megatron.core.inference.engine.Proposer`."""
