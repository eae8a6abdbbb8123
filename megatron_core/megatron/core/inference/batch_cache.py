# SPDX-License-Identifier: Apache-2.0
"""Batch cache: what a model is given while it generates for one batch, keys, values and states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel.token_rows import TokenRows
from megatron.core.device import pin
from megatron.core.inference.kv_cache import KVCache
from megatron.core.inference.state_cache import StateCache


class BatchCache(KVCache):
    """Keys and values of a batch for attention, and its states for recurrent mixers.

    Attention keeps every token, left padding too, which its document mask hides. Recurrent mixers
    take real tokens only: of each row the last ones, and the caller says how many before each call.

        cache = BatchCache(capacity, rows=2, device=device)
        cache.begin([5, 3])  # the first row has 5 new tokens, the second 3 behind padding
        model(tokens, layout=layout, cache=cache)
        cache.end(1)  # the second row takes no more tokens: its slot is free
        cache.begin([1, 0])
        ...
        cache.close()

    Args:
        capacity: how many tokens a row may have, padding included.
        rows: b.
        states: where rows take their slots; None makes as many as there are rows.
        device: where the model is.

    Attributes:
        slots: int64 [b], where each row's state is, -1 for a row without a token in this call; the
            same memory in every call, so that a CUDA graph may hold it.
    """

    def __init__(
        self,
        capacity: int,
        *,
        rows: int,
        states: StateCache | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(capacity)
        self.states = StateCache(rows) if states is None else states
        self._device = torch.device(device)
        self._taken: list[int | None] = list(self.states.take(rows))
        self._counts: tuple[int, ...] = ()
        self._told = (-1,) * rows
        self.slots = torch.full((rows,), -1, dtype=torch.int64, device=self._device)
        self._new: dict[int, TokenRows] = {}
        self.begin([0] * rows)

    def begin(self, counts: Sequence[int]) -> None:
        """Say how many tokens of the next call are real, the last ones of each row.

        Raises:
            ValueError: not one count a row, or tokens of a row that has ended.
        """
        if len(counts) != len(self._taken):
            raise ValueError(f"{len(counts)} counts of tokens for {len(self._taken)} rows")
        told = []
        for row, (count, slot) in enumerate(zip(counts, self._taken, strict=True)):
            if count and slot is None:
                raise ValueError(f"row {row} has ended: it takes no more tokens")
            told.append(-1 if slot is None or count == 0 else slot)
        self._counts, self._new = tuple(counts), {}
        if tuple(told) != self._told:  # or nothing is to be copied: so it is while decoding
            self._told = tuple(told)
            tensor = torch.tensor(told, dtype=torch.int64)
            self.slots.copy_(pin(tensor, self._device), non_blocking=True)

    def end(self, row: int) -> None:
        """Free the slot of a row that takes no more tokens; again does nothing."""
        slot = self._taken[row]
        if slot is not None:
            self._taken[row] = None
            self.states.release([slot])

    def close(self) -> None:
        """Free the slots of all rows."""
        for row in range(len(self._taken)):
            self.end(row)

    def new_tokens(self, length: int) -> TokenRows:
        """Return the real ones of the [length, b] tokens of this call, made once.

        Raises:
            ValueError: a row was to have more.
        """
        if length not in self._new:
            if max(self._counts) > length:
                raise ValueError(
                    f"a row has {max(self._counts)} new tokens, the call {length}: begin the call "
                    "with the counts of its own tokens"
                )
            self._new[length] = last_tokens(length, self._counts, device=self._device)
        return self._new[length]

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return what is kept by this name, [slots + 1, *shape]; see `StateCache.buffer`."""
        return self.states.buffer(name, shape, dtype=dtype, device=device)


def last_tokens(length: int, counts: Sequence[int], *, device: torch.device) -> TokenRows:
    """Return the last tokens of each row of [length, b], so many as `counts` say; host work."""
    batch = len(counts)
    columns = [np.arange(length - count, length) for count in counts]
    places = [column * batch + row for row, column in enumerate(columns)]
    bounds = [0, *np.cumsum(counts).tolist()]
    return TokenRows(np.concatenate(places), bounds, length=length, batch=batch, device=device)
