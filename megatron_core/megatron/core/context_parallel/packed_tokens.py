# SPDX-License-Identifier: Apache-2.0
"""PackedTokens: the tokens of rows, packed for a recurrence document after document.

One gather undoes the split over ranks, drops padding, and turns columns of rows into rows of
columns. The inverse map is known, so backward gathers too: no additions and no scatter.

`LocalSequences` are the local sub-sequences of a rank, and the state transfers between all ranks. A
local sub-sequence is the intersection of a token range with a document; they are in the order of
the local tokens, row by row. A sub-sequence at the start of its document starts from a zero state.
Any other continues a sub-sequence of another rank, because a rank joins contiguous token ranges. So
only the last sub-sequence of a token range exports its state, and only the first receives one. All
ranks compute this on the host, so a state that no rank needs is not sent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from megatron.core.context_parallel.sequence_sharding import SequenceSharding, TokenRange
from megatron.core.ops.sequences import PackingIndices, Sequences


class PackedTokens:
    """A packing of tokens of [n, b, ...] into sequences.

    It is computed on the host, once; index maps are copied to the device asynchronously.

    Args:
        indices: int64 [t] on the host, the index of each packed token, column · b + row, without
            duplicates. Tokens that are not listed are padding.
        bounds: cumulative lengths of the packed sequences, [0, ..., t].
        length: n.
        batch: b.
        device: device of the tensors for layers.

    Attributes:
        sequences: the packed sequences, on the device.
        indices: gather indices of the packed tokens in [n · b, ...]; None if they are all tokens in
            storage order.

    Raises:
        ValueError: bounds of another number of tokens.
    """

    def __init__(
        self,
        indices: np.ndarray,
        bounds: Sequence[int],
        *,
        length: int,
        batch: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.sequences = Sequences(bounds, device=device)
        if self.sequences.tokens != len(indices):
            raise ValueError(
                f"bounds end at {self.sequences.tokens}, but there are {len(indices)} tokens: "
                "the last bound is the number of tokens"
            )
        self.length, self.batch = length, batch
        self.indices = PackingIndices.of(indices, length * batch, self.sequences.to_device)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [t, ...] from x [n, b, ...]; a view if the tokens are in storage order."""
        self._check("pack", x, (self.length, self.batch))
        flat = x.flatten(0, 1)
        return flat if self.indices is None else self.indices.pack(flat)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, b, ...] from x [t, ...], zero for padding; a view if `pack` returns a view."""
        self._check("unpack", x, (self.sequences.tokens,))
        return self._rows(x if self.indices is None else self.indices.unpack(x))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Pack outside of autograd, for ops that have a backward of their own."""
        flat = x.flatten(0, 1)
        return flat if self.indices is None else self.indices.pack_no_grad(flat)

    def put_back(self, x: torch.Tensor) -> torch.Tensor:
        """Unpack outside of autograd, for ops that have a backward of their own."""
        return self._rows(x if self.indices is None else self.indices.unpack_no_grad(x))

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, b, ...], a view of [n · b, ...]."""
        return x.unflatten(0, (self.length, self.batch))

    @staticmethod
    def _check(what: str, x: torch.Tensor, expected: tuple[int, ...]) -> None:
        if tuple(x.shape[: len(expected)]) != expected:
            raise ValueError(f"{what}: {tuple(x.shape)} must begin with {expected}")


def whole_rows(
    columns: np.ndarray,
    documents: Sequence[Sequence[int]],
    *,
    length: int,
    device: torch.device | str = "cpu",
) -> PackedTokens:
    """Return the packing of whole rows: rows are concatenated without padding, and documents are
    sequences.

    Args:
        columns: int64 [s], the index of each token of a row among the tokens that hold it.
        documents: cumulative lengths of the documents of each row, [0, ..., s].
        length: number of tokens that hold a row, with padding.
        device: device of the tensors for layers.
    """
    batch = len(documents)
    indices = columns * batch + np.arange(batch)[:, None]  # [b, s]
    bounds = [0]
    for row, ends in enumerate(documents):
        bounds += [row * len(columns) + end for end in ends[1:]]
    return PackedTokens(indices.reshape(-1), bounds, length=length, batch=batch, device=device)


@dataclass(frozen=True)
class StateTransfer:
    """A document that continues from a local sub-sequence of one rank on another rank: the state at
    its end is passed on.

    Args:
        source: the rank of the earlier sub-sequence.
        export: number of this sub-sequence among the exported ones of `source`.
        target: the rank of the later sub-sequence.
        entry: number of this sub-sequence among the continuing ones of `target`.
    """

    source: int
    export: int
    target: int
    entry: int


TransferChain = tuple[StateTransfer, ...]
"""Consecutive transfers of a document: the target of each is the source of the next."""


@dataclass(frozen=True)
class SequenceHalo:
    """The exchange of the `width` tokens before each local sub-sequence, in the same document.

    Args:
        send_index: int64 [n], the packed tokens to send, sorted by receiving rank.
        send_counts, receive_counts: number of tokens to send to and to receive from each rank.
        take: int64 [N · width], the received token of each halo row; the number of received tokens
            for an empty row.
        halo_rows: int64 [m], the halo row of each received token.
    """

    send_index: torch.Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    take: torch.Tensor
    halo_rows: torch.Tensor


@dataclass(frozen=True)
class _HaloRange:
    """Tokens of one row of the batch for the halo of a token range, on source and target."""

    source: int
    target: int
    row: int
    run: int
    first_row: int
    start: int
    length: int

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of the tokens between two ranks, the same on both."""
        return self.row, self.run, self.first_row


class LocalSequences(PackedTokens):
    """The local sub-sequences of a rank, computed once per microbatch; packed as its sequences.

    Args:
        sharding: the split of every row.
        rank: the context-parallel rank.
        documents: cumulative lengths of the documents of each row, [0, ..., s].
        device: device of the tensors for layers.

    Attributes:
        exports: local sub-sequences that another rank continues.
        entries: local sub-sequences that continue another rank's.
        export_slots, entry_slots: maximum number of exports and of entries over all ranks.
        chains: the state transfers of all ranks.
    """

    def __init__(
        self,
        sharding: SequenceSharding,
        rank: int,
        *,
        documents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        self.sharding, self.rank = sharding, rank
        self._documents, self._runs = documents, sharding.runs(rank)
        self._first_sequences: dict[tuple[int, int], int] = {}  # (row, run): its first sub-sequence
        last_sequences: dict[tuple[int, int], int] = {}
        bounds = [0]
        for row, document_bounds in enumerate(documents):
            for number, run in enumerate(self._runs):
                self._first_sequences[row, number] = len(bounds) - 1
                for length in _lengths(run, document_bounds):
                    bounds.append(bounds[-1] + length)
                last_sequences[row, number] = len(bounds) - 2
        batch = len(documents)
        columns = _concat_ranges([(run.start, run.length) for run in self._runs])
        indices = columns * batch + np.arange(batch)[:, None]  # [b, tokens of a row]
        super().__init__(
            indices.reshape(-1),
            bounds if len(bounds) > 1 else (0, 0),
            length=sharding.local_length,
            batch=batch,
            device=device,
        )
        builder = _ChainBuilder(sharding)
        self.chains: tuple[TransferChain, ...] = tuple(
            chain
            for row, document_bounds in enumerate(documents)
            for chain in builder.chains(row, document_bounds)
        )
        self.exports = tuple(last_sequences[key] for key in builder.exports[rank])
        self.entries = tuple(self._first_sequences[key] for key in builder.entries[rank])
        self.export_slots = max(map(len, builder.exports))
        self.entry_slots = max(map(len, builder.entries))

    @property
    def crossed(self) -> bool:
        """Return whether any document continues on another rank; the same on all ranks."""
        return bool(self.chains)

    @property
    def chained(self) -> bool:
        """Return whether a document is on three or more ranks, so that a state is passed on."""
        return any(len(chain) > 1 for chain in self.chains)

    def halo(self, width: int) -> SequenceHalo:
        """Return the exchange of the `width` tokens before each sub-sequence, computed once.

        Raises:
            ValueError: a negative width.
        """
        return self.sequences.cached(("halo", width), lambda: self._halo(width))

    def _halo(self, width: int) -> SequenceHalo:
        ranges = list(_halo_ranges(self.sharding, width, self._documents, rank=self.rank))
        sent = [x for x in ranges if x.source == self.rank]
        sent.sort(key=lambda x: (x.target, x.order))
        received = [x for x in ranges if x.target == self.rank]
        received.sort(key=lambda x: (x.source, x.order))
        starts = [run.start for run in self._runs]
        before = [0, *accumulate(run.length for run in self._runs)]  # packed tokens of a row
        send = []
        for halo_range in sent:
            run = bisect_right(starts, halo_range.start) - 1
            start = halo_range.row * before[-1] + before[run] + halo_range.start - starts[run]
            send.append((start, halo_range.length))
        halo_ranges = [
            (self._first_sequences[x.row, x.run] * width + x.first_row, x.length) for x in received
        ]
        halo_rows = _concat_ranges(halo_ranges)
        take = np.full(self.sequences.count * width, len(halo_rows), dtype=np.int64)
        take[halo_rows] = np.arange(len(halo_rows))
        ranks = range(self.sharding.size)
        to_device = self.sequences.to_device
        return SequenceHalo(
            to_device(_concat_ranges(send)),
            tuple(sum(p.length for p in sent if p.target == rank) for rank in ranks),
            tuple(sum(p.length for p in received if p.source == rank) for rank in ranks),
            to_device(take),
            to_device(halo_rows),
        )


class _ChainBuilder:
    """Numbers the exports and entries of every rank in the order of rows and row indices, the same
    on all ranks."""

    def __init__(self, sharding: SequenceSharding) -> None:
        owned = [
            (run, number, rank)
            for rank in range(sharding.size)
            for number, run in enumerate(sharding.runs(rank))
        ]
        self._owned = sorted(owned, key=lambda run_owner: run_owner[0].row_start)
        self.exports: list[list[tuple[int, int]]] = [[] for _ in range(sharding.size)]  # (row, run)
        self.entries: list[list[tuple[int, int]]] = [[] for _ in range(sharding.size)]

    def chains(self, row: int, bounds: Sequence[int]) -> Iterator[TransferChain]:
        """Yield the chains of state transfers of a row, from its cumulative document lengths."""
        transfers: list[StateTransfer] = []
        for (run, number, source), (following, next_number, target) in pairwise(self._owned):
            next_bound = bounds[
                bisect_right(bounds, run.row_start)
            ]  # end of its first token's document
            if transfers and next_bound <= run.row_end:
                yield tuple(transfers)
                transfers = []
            if following.row_start == bounds[bisect_left(bounds, following.row_start)]:
                continue
            exports, entries = self.exports[source], self.entries[target]
            transfers.append(StateTransfer(source, len(exports), target, len(entries)))
            exports.append((row, number))
            entries.append((row, next_number))
        if transfers:
            yield tuple(transfers)


def _lengths(run: TokenRange, bounds: Sequence[int]) -> list[int]:
    """Return the lengths of the local sub-sequences of a token range."""
    inner = bounds[bisect_right(bounds, run.row_start) : bisect_left(bounds, run.row_end)]
    return [
        end - start for start, end in pairwise((run.row_start, *inner, run.row_end)) if end > start
    ]


def _halo_ranges(
    sharding: SequenceSharding, width: int, documents: Sequence[Sequence[int]], *, rank: int
) -> Iterator[_HaloRange]:
    """Yield the halo tokens that a rank sends and receives for all rows, without tokens of earlier
    documents."""
    row_starts = [
        [run.row_start for run in sharding.runs(target)] for target in range(sharding.size)
    ]
    transfers = [x for x in sharding.halo(width).transfers if rank in (x.source, x.target)]
    for row, bounds in enumerate(documents):
        for transfer in transfers:
            row_start = row_starts[transfer.target][transfer.run]
            top = row_start - width  # row index of the first halo row
            # Rows before the document of the run's first token are left out.
            begin = bounds[bisect_right(bounds, row_start) - 1]
            skipped = max(0, begin - (top + transfer.row))
            if skipped < transfer.length:
                yield _HaloRange(
                    source=transfer.source,
                    target=transfer.target,
                    row=row,
                    run=transfer.run,
                    first_row=transfer.row + skipped,
                    start=transfer.start + skipped,
                    length=transfer.length - skipped,
                )


def _concat_ranges(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the concatenation of ranges (first, length)."""
    if not ranges:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.arange(start, start + length) for start, length in ranges])
