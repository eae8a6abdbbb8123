# SPDX-License-Identifier: Apache-2.0
"""Caches of generation: keys and values of attention layers, states of recurrent mixers.

The key/value cache holds keys and values of the tokens so far, one buffer pair per attention layer.
The state cache holds the states of recurrent mixers, one slot a sequence. A sequence takes a slot
when it begins and frees it when it ends; the next one that takes the slot starts from zeros. The
size of a slot does not grow with the sequence, so slots, unlike keys and values, are allocated once
and reused by batch after batch. The batch cache is what a model gets while it generates for one
batch: keys, values and states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel.layout import PackedTokens
from megatron.core.device import pin


class StateCache:
    """Hold [slots + 1, ...] buffers by name, for every recurrent mixer those that it asks for.

    A buffer is allocated when first requested, with the shape and dtype that the mixer gives: a
    model without recurrent mixers has none. The last row of each is nobody's: rows that write
    nothing that counts, those of slot -1, write there.

    Args:
        num_slots: how many sequences there may be at a time.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a state cache of {num_slots} slots: use a positive number")
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._buffers: dict[str, Tensor] = {}

    @property
    def free_slots(self) -> int:
        """How many more sequences there may be."""
        return len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers on this rank."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    def take(self, count: int) -> list[int]:
        """Return free slots for new sequences; they hold zeros.

        Raises:
            ValueError: fewer are free.
        """
        if count > len(self._free):
            raise ValueError(
                f"{count} sequences, but {len(self._free)} of {self.num_slots} slots are free: "
                "give fewer at a time, or make the state cache larger"
            )
        taken = [self._free.pop() for _ in range(count)]
        places: dict[torch.device, Tensor] = {}  # copied once, and the host does not wait
        for buffer in self._buffers.values():
            device = buffer.device
            if device not in places:
                index = pin(torch.tensor(taken, dtype=torch.int64), device)
                places[device] = index.to(device, non_blocking=True)
            buffer.index_fill_(0, places[device], 0)
        return taken

    def release(self, slots: Collection[int]) -> None:
        """Free the slots of sequences that have ended.

        Raises:
            ValueError: one that nobody has taken.
        """
        for slot in slots:
            if slot in self._free or not 0 <= slot < self.num_slots:
                raise ValueError(f"slot {slot} of {self.num_slots} is not taken: release it once")
            self._free.append(slot)

    def buffer(
        self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return what is kept by this name, [slots + 1, *shape]; zeros the first time.

        Raises:
            ValueError: it was made with another shape, dtype or device.
        """
        found = self._buffers.get(name)
        if found is None:
            found = torch.zeros((self.num_slots + 1, *shape), dtype=dtype, device=device)
            self._buffers[name] = found
        elif (tuple(found.shape[1:]), found.dtype, found.device) != (
            tuple(shape),
            dtype,
            torch.device(device),
        ):
            raise ValueError(
                f"state {name}: {list(shape)} {dtype} on {device} does not continue "
                f"{list(found.shape[1:])} {found.dtype} on {found.device}: use one cache per model"
            )
        return found


class KVCache:
    """Hold [capacity, b, g/tp, d] keys and values for every attention layer.

    A layer's buffers are made at its first `extend`, for the full capacity, from the shape, dtype
    and device of what arrives: so the cache needs to know nothing of the model's layout, and
    nothing grows or is copied during decoding. Each layer counts its own length.

    Args:
        capacity: how many tokens per sequence the cache can hold.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"cache capacity is {capacity}: use a positive number of tokens")
        self.capacity = capacity
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}

    def length(self, layer: int) -> int:
        """Return how many tokens `layer` holds."""
        return self._lengths.get(layer, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers on this rank."""
        buffers = (*self._keys.values(), *self._values.values())
        return sum(b.numel() * b.element_size() for b in buffers)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return those of all tokens so far.

        Args:
            layer: index of the attention layer, counted from 0 over attention layers.
            key: [s, b, g/tp, d].
            value: [s, b, g/tp, d_v].

        Returns:
            (keys [s_k, b, g/tp, d], values [s_k, b, g/tp, d_v]): views into the cache, s_k counts
            the new tokens in; they stay valid until the cache is dropped.

        Raises:
            ValueError: the new tokens do not fit, or their shape is not that of the layer's earlier
                ones.
        """
        if layer not in self._keys:
            self._keys[layer] = key.new_empty((self.capacity, *key.shape[1:]))
            self._values[layer] = value.new_empty((self.capacity, *value.shape[1:]))
        keys, values = self._keys[layer], self._values[layer]
        start = self.length(layer)
        end = start + key.shape[0]
        if end > self.capacity:
            raise ValueError(
                f"layer {layer}: {start} cached + {key.shape[0]} new tokens exceed the cache's "
                f"capacity of {self.capacity}: make the cache larger"
            )
        if key.shape[1:] != keys.shape[1:] or value.shape[1:] != values.shape[1:]:
            raise ValueError(
                f"layer {layer}: keys {list(key.shape)} and values {list(value.shape)} do not "
                f"continue a cache of {list(keys.shape)} and {list(values.shape)}: use one cache "
                "per batch"
            )
        with torch.no_grad():
            keys[start:end].copy_(key)
            values[start:end].copy_(value)
        self._lengths[layer] = end
        return keys[:end], values[:end]


class BatchCache(KVCache):
    """Keys and values of a batch for attention, and its states for recurrent mixers.

    Attention keeps every token, left padding too, which its document mask hides. Recurrent mixers
    take real tokens only: the last ones of each row, so many as the caller gives before a call.

        cache = BatchCache(capacity, rows=2, device=device)
        cache.begin([5, 3])  # the first row has 5 new tokens, the second 3 after padding
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
        self._new: dict[int, PackedTokens] = {}
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

    def new_tokens(self, length: int) -> PackedTokens:
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


def last_tokens(length: int, counts: Sequence[int], *, device: torch.device) -> PackedTokens:
    """Return the last tokens of each row of [length, b], as many as `counts` gives; host work."""
    batch = len(counts)
    columns = [np.arange(length - count, length) for count in counts]
    places = [column * batch + row for row, column in enumerate(columns)]
    bounds = [0, *np.cumsum(counts).tolist()]
    return PackedTokens(np.concatenate(places), bounds, length=length, batch=batch, device=device)
