# SPDX-License-Identifier: Apache-2.0
"""Key/value cache: keys and values of the tokens so far, one buffer pair per attention layer."""

from __future__ import annotations

import torch
from torch import Tensor


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
