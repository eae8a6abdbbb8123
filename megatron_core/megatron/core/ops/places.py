# SPDX-License-Identifier: Apache-2.0
"""Places: which row of memory each packed token lies in, and the way back.

Both maps are known, so that either way is a gather, and so is its gradient: nothing is added up,
and nothing is scattered. Kernels that take `Places` fold the gather into their loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.ops.dispatch import apply_function


@dataclass(frozen=True, eq=False)
class Places:
    """The rows of t tokens among n, no row twice.

    Args:
        rows: int64 [t], the row of each token.
        tokens: int64 [n], the token of each row, -1 where it has none.
        padding: int64, the rows without a token; None where each has one.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    padding: torch.Tensor | None

    @staticmethod
    def of(
        rows: np.ndarray, count: int, moved: Callable[[np.ndarray], torch.Tensor]
    ) -> Places | None:
        """Return places on the device; None where each row is the token of its number.

        Args:
            rows: int64 [t] on the host, none twice.
            count: n.
            moved: copies int64 values to the device, such as `Sequences.moved`.
        """
        if len(rows) == count and bool((rows == np.arange(count)).all()):
            return None
        tokens = np.full(count, -1, dtype=np.int64)
        tokens[rows] = np.arange(len(rows))
        empty = np.flatnonzero(tokens < 0)
        return Places(moved(rows), moved(tokens), moved(empty) if len(empty) else None)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens [t, ...] of rows [n, ...]."""
        return apply_function(_Pack, x, self)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows [n, ...] of tokens [t, ...], zero where a row has none."""
        return apply_function(_Unpack, x, self)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `pack` does, for ops that have a backward of their own."""
        return x.index_select(0, self.rows)

    def put_back(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `unpack` does, for ops that have a backward of their own."""
        if self.padding is None:
            return x.index_select(0, self.tokens)
        if len(self.rows) == 0:
            return x.new_zeros(len(self.tokens), *x.shape[1:])
        return self.zero_padding(x.index_select(0, self.tokens.clamp(min=0)))

    def zero_padding(self, rows: torch.Tensor) -> torch.Tensor:
        """Write zeros to the rows [n, ...] that have no token, and return them."""
        return rows if self.padding is None else rows.index_fill_(0, self.padding, 0)


class _Pack(torch.autograd.Function):
    """forward gathers tokens; dgrad gathers them back, zero for padding. Saves nothing."""

    @staticmethod
    def forward(ctx, x, places: Places):
        ctx.places = places
        return places.take(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.places.put_back(grad), None


class _Unpack(torch.autograd.Function):
    """forward gathers tokens back, zero for padding; dgrad gathers them. Saves nothing."""

    @staticmethod
    def forward(ctx, x, places: Places):
        ctx.places = places
        return places.put_back(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.places.take(grad), None
