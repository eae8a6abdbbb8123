# SPDX-License-Identifier: Apache-2.0
"""`CacheShapes`: what layers keep in the inference cache, per token and per sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class CacheShapes:
    """Shapes of the cache entries of a layer, or of all layers of a rank.

    Args:
        attention: per attention layer the entry of a token: (g, d) for keys and for values with g
            KV heads of size d, or (c,) for a latent.
        states: per recurrent mixer, by name, shape and dtype of the state of a sequence.
        dtype: dtype of keys, values and latents.
        window: largest attention window of any layer, in tokens; None with full attention.
        cpu_dtype: dtype in which a CPU multiplies 16-bit attention operands.
    """

    attention: tuple[tuple[int, ...], ...] = ()
    states: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    window: int | None = None
    cpu_dtype: torch.dtype | None = None

    @staticmethod
    def of_layers(layers: Iterable[CacheShapes], dtype: torch.dtype) -> CacheShapes:
        """Return the shapes of several layers together, in their order.

        Args:
            layers: shapes of each layer.
            dtype: dtype of activations.
        """
        layers = list(layers)
        attention = [layer for layer in layers if layer.attention]
        # One layer with full attention needs all tokens, so no block may be freed early.
        windows = [layer.window for layer in attention if layer.window is not None]
        return CacheShapes(
            attention=tuple(shape for layer in attention for shape in layer.attention),
            states={name: state for layer in layers for name, state in layer.states.items()},
            dtype=dtype,
            window=max(windows) if windows and len(windows) == len(attention) else None,
            cpu_dtype=attention[-1].cpu_dtype if attention else None,
        )

    @property
    def page_entries(self) -> tuple[tuple[int, ...], ...]:
        """Per attention layer the page entry of a token: (2g, d) for keys and values, (c,) for a
        latent."""
        return tuple((2 * s[0], s[1]) if len(s) == 2 else s for s in self.attention)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the pages of all layers."""
        return sum(math.prod(shape) for shape in self.page_entries) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence in the state slots of all mixers."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.states.values())
