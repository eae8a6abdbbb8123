# SPDX-License-Identifier: Apache-2.0
"""Sequences of packed tokens: their boundaries, and the chunks that a sweep processes.

The host holds the boundaries (cu_seqlens). Device tables are built from them at first use, and
copied without a synchronisation; all layers of a microbatch share one object.

`PackingIndices` map packed tokens to rows of a padded tensor, and rows to tokens. With both maps
packing, unpacking and their gradients are gathers: no atomic additions, no scatter. Kernels that
take `PackingIndices` gather in their loads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from megatron.core.device import pin
from megatron.core.ops.backend_choice import apply_function

_Value = TypeVar("_Value")


class Sequences:
    """N sequences of packed tokens, one after another.

    Args:
        bounds: cumulative lengths (cu_seqlens) [0, ..., t], on the host; a sequence may be empty.
        device: the device of the tensors.

    Raises:
        ValueError: bounds that are not integers, do not start at 0, or decrease.
    """

    def __init__(self, bounds: Sequence[int], *, device: torch.device | str = "cpu") -> None:
        try:
            self.bounds = tuple(operator.index(bound) for bound in bounds)
        except TypeError as error:
            raise ValueError(f"cu_seqlens {list(bounds)}: give integers") from error
        self.device = torch.device(device)
        if len(self.bounds) < 2 or self.bounds[0] != 0:
            raise ValueError(f"cu_seqlens {list(self.bounds)}: give 0 and the end of each sequence")
        for number, (start, end) in enumerate(pairwise(self.bounds)):
            if end < start:
                raise ValueError(
                    f"cu_seqlens decreases from {start} to {end} at sequence {number}: "
                    "lengths must not be negative"
                )
        self._cache: dict[object, object] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens t of all sequences."""
        return self.bounds[-1]

    @property
    def count(self) -> int:
        """Number of sequences N."""
        return len(self.bounds) - 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each sequence in tokens."""
        return tuple(end - start for start, end in pairwise(self.bounds))

    def check(self, op: str, **tensors: torch.Tensor) -> None:
        """Raise ValueError unless tensors [t, ...] have as many tokens as the sequences."""
        for name, tensor in tensors.items():
            tokens = tensor.shape[0] if tensor.ndim else "no"
            if tokens != self.tokens:
                raise ValueError(
                    f"{op}: {name} {tuple(tensor.shape)} has {tokens} tokens, the "
                    f"sequences {self.tokens}"
                )

    def cached(self, key: object, create: Callable[[], _Value]) -> _Value:
        """Return the value cached under `key`; create it at the first call."""
        if key not in self._cache:
            self._cache[key] = create()
        return self._cache[key]  # type: ignore[return-value]

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        """Copy int64 values to the device; the host does not wait.

        Raises:
            RuntimeError: during CUDA graph capture, since replays would read host memory that has
                been freed.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "tables of sequences would be copied to the GPU while a CUDA graph is "
                "captured: run the step once before, with the same sequences"
            )
        tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
        return pin(tensor, self.device).to(self.device, non_blocking=True)


def require_sequences(op: str, sequences: object) -> None:
    """Raise ValueError unless `sequences` are `Sequences`."""
    if not isinstance(sequences, Sequences):
        raise ValueError(
            f"{op}: sequences is a {type(sequences).__name__}: give Sequences(cumulative lengths)"
        )


@dataclass(frozen=True, eq=False)
class PackingIndices:
    """Gather indices between n rows of a padded tensor and t packed tokens, t <= n.

    Args:
        rows: int64 [t], the row of each token, without duplicates.
        tokens: int64 [n], the token of each row, -1 for a padding row.
        padding: int64, the padding rows; None if there are none.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    padding: torch.Tensor | None

    @staticmethod
    def of(
        rows: np.ndarray, count: int, to_device: Callable[[np.ndarray], torch.Tensor]
    ) -> PackingIndices | None:
        """Return indices on the device; None if they are the identity.

        Args:
            rows: int64 [t] on the host, without duplicates.
            count: n.
            to_device: copies int64 values to the device, such as `Sequences.to_device`.
        """
        if len(rows) == count and bool((rows == np.arange(count)).all()):
            return None
        tokens = np.full(count, -1, dtype=np.int64)
        tokens[rows] = np.arange(len(rows))
        empty = np.flatnonzero(tokens < 0)
        padding = to_device(empty) if len(empty) else None
        return PackingIndices(to_device(rows), to_device(tokens), padding)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return packed tokens [t, ...] from rows [n, ...]."""
        return apply_function(_Pack, x, self)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows [n, ...] from packed tokens [t, ...]; padding rows are zero."""
        return apply_function(_Unpack, x, self)

    def pack_no_grad(self, x: torch.Tensor) -> torch.Tensor:
        """Pack without autograd, for ops with their own backward."""
        return x.index_select(0, self.rows)

    def unpack_no_grad(self, x: torch.Tensor) -> torch.Tensor:
        """Unpack without autograd, for ops with their own backward."""
        if self.padding is None:
            return x.index_select(0, self.tokens)
        if len(self.rows) == 0:
            return x.new_zeros(len(self.tokens), *x.shape[1:])
        return self.zero_padding(x.index_select(0, self.tokens.clamp(min=0)))

    def zero_padding(self, rows: torch.Tensor) -> torch.Tensor:
        """Zero the padding rows of rows [n, ...] in place, and return rows."""
        return rows if self.padding is None else rows.index_fill_(0, self.padding, 0)


class _Pack(torch.autograd.Function):
    """Forward packs; dgrad unpacks, with zeros in padding rows. Saves nothing."""

    @staticmethod
    def forward(ctx, x, packing: PackingIndices):
        ctx.packing = packing
        return packing.pack_no_grad(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.packing.unpack_no_grad(grad), None


class _Unpack(torch.autograd.Function):
    """Forward unpacks, with zeros in padding rows; dgrad packs. Saves nothing."""

    @staticmethod
    def forward(ctx, x, packing: PackingIndices):
        ctx.packing = packing
        return packing.unpack_no_grad(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.packing.pack_no_grad(grad), None
