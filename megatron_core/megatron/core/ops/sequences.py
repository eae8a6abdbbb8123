# SPDX-License-Identifier: Apache-2.0
"""Sequences: where those of packed tokens begin and end, and the chunks that sweeps cut them in.

Bounds are known on the host. What ops need of them on the device is made once, at first use, and
copied there without waiting; all layers of a microbatch share one object.

`Places` says which row of memory each packed token lies in, and the way back. Both maps are known,
so that either way is a gather, and so is its gradient: nothing is added up, and nothing is
scattered. Kernels that take `Places` fold the gather into their loads.
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
from megatron.core.ops.dispatch import apply_function

_Made = TypeVar("_Made")


class Sequences:
    """N sequences of packed tokens, one after another.

    Args:
        bounds: cumulative lengths [0, ..., t], on the host; a sequence may be empty.
        device: where ops work.

    Raises:
        ValueError: bounds that are not integers, do not start at 0, or fall.
    """

    def __init__(self, bounds: Sequence[int], *, device: torch.device | str = "cpu") -> None:
        try:
            self.bounds = tuple(operator.index(bound) for bound in bounds)
        except TypeError as error:
            raise ValueError(f"cu_seqlens {list(bounds)}: give integers") from error
        self.device = torch.device(device)
        if len(self.bounds) < 2 or self.bounds[0] != 0:
            raise ValueError(f"cu_seqlens {list(self.bounds)}: give 0 and the end of each sequence")
        for number, (first, end) in enumerate(pairwise(self.bounds)):
            if end < first:
                raise ValueError(
                    f"cu_seqlens falls from {first} to {end} at sequence {number}: lengths are "
                    "not negative"
                )
        self._made: dict[object, object] = {}

    @property
    def tokens(self) -> int:
        """t, of all sequences."""
        return self.bounds[-1]

    @property
    def count(self) -> int:
        """N."""
        return len(self.bounds) - 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of each sequence, in tokens."""
        return tuple(end - first for first, end in pairwise(self.bounds))

    def check(self, op: str, **tensors: torch.Tensor) -> None:
        """Raise ValueError unless tensors [t, ...] have as many tokens as the sequences."""
        for name, tensor in tensors.items():
            tokens = tensor.shape[0] if tensor.ndim else "no"
            if tokens != self.tokens:
                raise ValueError(
                    f"{op}: {name} {tuple(tensor.shape)} has {tokens} tokens, the "
                    f"sequences {self.tokens}"
                )

    def made(self, key: object, make: Callable[[], _Made]) -> _Made:
        """Return what was made for `key`; make it the first time."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def chunks(self, size: int) -> Chunks:
        """Return the chunks of `size` tokens, made once."""
        return self.made(("chunks", size), lambda: Chunks(self, size))

    def moved(self, values: np.ndarray) -> torch.Tensor:
        """Return int64 values on the device; the host does not wait.

        Raises:
            RuntimeError: in the capture of a CUDA graph, whose replays would read memory of the
                host that is gone.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "tables of sequences would be copied to the GPU in the capture of a CUDA graph: "
                "run the step once before, with the same sequences"
            )
        tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
        return pin(tensor, self.device).to(self.device, non_blocking=True)


def require_sequences(op: str, sequences: object) -> None:
    """Raise ValueError unless `sequences` are `Sequences`."""
    if not isinstance(sequences, Sequences):
        raise ValueError(
            f"{op}: sequences is a {type(sequences).__name__}: give Sequences(cumulative lengths)"
        )


class Chunks:
    """Chunks of C tokens that never cross from one sequence to the next, in the order of a sweep.

    Step i of a sweep over states works on chunk i of every sequence that has so many. So chunks are
    numbered step by step, within a step from the longest sequence to the shortest: those of a step
    are next to each other, and the states that a step needs are the first ones of the step before.

    Attributes:
        size: C.
        steps: chunks of each step, never rising; their sum is n, the number of chunks.
        order: host ints [N], the sequence whose state is the j-th of a sweep.
    """

    def __init__(self, sequences: Sequences, size: int) -> None:
        if size < 1:
            raise ValueError(f"chunks of {size} tokens: use at least 1")
        self.size, self._sequences = size, sequences
        lengths = np.asarray(sequences.lengths)
        order = np.argsort(-lengths, kind="stable")
        counts = -(-lengths[order] // size)  # chunks of each sequence, falling
        most = int(counts[0]) if len(counts) else 0
        self.steps = tuple(int((counts > step).sum()) for step in range(most))
        self.order = tuple(int(number) for number in order)
        starts = np.asarray(sequences.bounds[:-1])[order]
        ends = np.asarray(sequences.bounds[1:])[order]
        firsts = [starts[:n] + step * size for step, n in enumerate(self.steps)]
        first = np.concatenate(firsts) if firsts else np.zeros(0, dtype=np.int64)
        limits = [ends[:n] for n in self.steps]
        limit = np.concatenate(limits) if limits else first
        index = first[:, None] + np.arange(size)  # [n, C]
        self._index = np.where(index < limit[:, None], index, sequences.tokens)
        self.count = len(first)
        self.is_whole = bool((self._index < sequences.tokens).all())
        # Of one sequence, chunks are in the order of its tokens: views do.
        self._plain = sequences.count == 1
        self._is_sorted = self.order == tuple(range(sequences.count))

    @property
    def sequence_count(self) -> int:
        """N."""
        return self._sequences.count

    @property
    def index(self) -> torch.Tensor:
        """int64 [n · C], the token at each place of the grid, t where a sequence has ended."""
        return self._sequences.made(
            ("index", self.size), lambda: self._sequences.moved(self._index.reshape(-1))
        )

    @property
    def inverse(self) -> torch.Tensor:
        """int64 [t], the place in the grid of each token."""

        def make() -> torch.Tensor:
            places = np.zeros(self._sequences.tokens + 1, dtype=np.int64)
            places[self._index.reshape(-1)] = np.arange(self._index.size)
            return self._sequences.moved(places[:-1])

        return self._sequences.made(("inverse", self.size), make)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, C, ...] from x [t, ...], zero where a sequence has ended. May be a view."""
        shape = (self.count, self.size, *x.shape[1:])
        if self._plain and self.is_whole:
            return x.reshape(shape)
        if self.is_whole:
            return x.index_select(0, self.index).view(shape)
        padded = x.new_zeros((self.count * self.size, *x.shape[1:]))
        if self._plain:
            padded[: x.shape[0]] = x
        else:
            padded.index_copy_(0, self.inverse, x)
        return padded.view(shape)

    def sorted(self, states: torch.Tensor) -> torch.Tensor:
        """Return [N, ...] in the order of a sweep, the longest sequence first. May be a view."""
        if self._is_sorted:
            return states

        def make() -> torch.Tensor:
            return self._sequences.moved(np.asarray(self.order))

        return states.index_select(0, self._sequences.made(("order", self.size), make))

    def unsorted(self, states: torch.Tensor) -> torch.Tensor:
        """Return [N, ...] by sequence from the order of a sweep: undo `sorted`."""
        if self._is_sorted:
            return states

        def make() -> torch.Tensor:
            return self._sequences.moved(np.argsort(np.asarray(self.order)))

        return states.index_select(0, self._sequences.made(("places", self.size), make))

    def put_back(self, grid: torch.Tensor) -> torch.Tensor:
        """Return [t, ...] from [n, C, ...]: undo `take`. May be a view."""
        flat = grid.reshape(-1, *grid.shape[2:])
        if self._plain:
            return flat[: self._sequences.tokens]
        return flat.index_select(0, self.inverse)


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
