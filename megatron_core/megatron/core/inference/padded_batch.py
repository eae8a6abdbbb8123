# SPDX-License-Identifier: Apache-2.0
"""Padded batch: prompts of different lengths, padded on the left, and how a model is fed them.

The newest token of every sequence is the last row, so one decode step advances them all:

    pad pad  A   B   C  |  D
     P   Q   R   S   T  |  U

Padding counts for nothing: its document id is -1, which no real token attends to, and every real
token carries its own position, counted from 0 at the first real token. Recurrent mixers never see
padding: the cache says which tokens are real.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.batch_cache import BatchCache
from megatron.core.inference.language_model import LanguageModel
from megatron.core.inference.state_cache import StateCache

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
