# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout: positions, documents, samples and cut of a microbatch, shared by all layers.

`make` works everything out on the host, once per microbatch: index maps both ways, where each row's
documents begin, and on first use the blocks of attention. What layers need on the device is copied
there without waiting for it; nothing is ever read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from megatron.core.context_parallel.blocks import Blocks, attention_blocks
from megatron.core.context_parallel.cut import PADDING, Run, SequenceCut
from megatron.core.context_parallel.index_maps import (
    columns_of,
    documents_of,
    ids_of,
    inverse_of,
    take_columns,
)
from megatron.core.context_parallel.pieces import OwnPieces, own_pieces
from megatron.core.context_parallel.token_rows import TokenRows, whole_rows
from megatron.core.device import pin

_Map = TypeVar("_Map")


class _Plans:
    """Blocks by what they were made for, and how often any were made; maps of tokens likewise."""

    def __init__(self) -> None:
        self.made = 0
        self.maps: dict[tuple, object] = {}
        self._found: dict[tuple, Blocks] = {}

    def get(self, key: tuple, make: Callable[[], Blocks]) -> Blocks:
        """Return what was made for `key`; make it the first time."""
        if key not in self._found:
            self._found[key] = make()
            self.made += 1
        return self._found[key]

    def map(self, key: tuple, make: Callable[[], _Map]) -> _Map:
        """Return the map that was made for `key`; make it the first time."""
        if key not in self.maps:
            self.maps[key] = make()
        return self.maps[key]  # type: ignore[return-value]

    @property
    def visits_made(self) -> int:
        return sum(blocks.visits_made for blocks in self._found.values())


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """What layers need to know of the tokens beside their values.

    Without a cut a rank has whole rows; s/cp is then s.

    Args:
        positions: int64 [s/cp] or [s/cp, b], each token's position in its sequence; 0 for padding.
        document_ids: int [s_k, b], or None if nothing is masked by ids: every token sees all
            earlier ones, or `blocks` know the documents. With a key-value cache s_k counts the
            cached tokens too.
        sample_ids: int64 [samples], the global number of each, or None outside training: dropout is
            a function of it and of the place in the sample. Each row is one but for
            `sample_length`.
        places: int64 [s/cp], each token's place in its row, -1 for padding; None where that is its
            position.
        cut: how rows lie over the context-parallel ranks; None where that was never asked.
        rank: this one of them.
        rows: b, known with a cut.
        documents: of each row, where its documents begin and end by place, [0, ..., s]; None is
            one document a row.
        columns: int64 [s/cp] on the host: the column of a row that each local token is.
        inverse: int64 [s], where each place is among the tokens gathered from all ranks; None where
            they are gathered in the order of the row.
        filler: whether none of the tokens counts for anything; experts take none of them then.
        sample_length: tokens of each sample, where the one row holds several, one after another;
            None where each row is a sample.
    """

    positions: torch.Tensor
    document_ids: torch.Tensor | None = None
    sample_ids: torch.Tensor | None = None
    places: torch.Tensor | None = None
    cut: SequenceCut | None = None
    rank: int = 0
    rows: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    columns: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    filler: bool = False
    sample_length: int | None = None
    _plans: _Plans = field(default_factory=_Plans, init=False, repr=False)

    @staticmethod
    def dense(
        length: int, *, sample_ids: torch.Tensor | None = None, device: torch.device | None = None
    ) -> SequenceLayout:
        """Return the layout of whole sequences of equal length."""
        return SequenceLayout(torch.arange(length, device=device), None, sample_ids)

    @staticmethod
    def packed(
        length: int,
        *,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        sample_ids: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> SequenceLayout:
        """Return the layout of rows that may hold several documents each.

        Args:
            length: s.
            positions: int64 [b, s], each token's position in its document; None is 0 … s-1.
            document_ids: int [b, s]; None lets every token see all earlier ones.
            sample_ids: int64 [b]; None turns dropout off.
            device: of what is made here.
        """
        places = torch.arange(length, device=device)
        return SequenceLayout(
            positions=places if positions is None else positions.t().contiguous(),
            document_ids=None if document_ids is None else document_ids.t().contiguous(),
            sample_ids=sample_ids,
            places=places,
        )

    @staticmethod
    def make(
        cut: SequenceCut,
        rank: int,
        *,
        rows: int,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        sample_ids: torch.Tensor | None = None,
        masks_by_ids: bool = False,
        device: torch.device | None = None,
    ) -> SequenceLayout:
        """Return the layout of this rank's part of rows that are cut over ranks.

        Args:
            cut: of every row. Sequences that it cuts apart are documents.
            rank: the context-parallel rank.
            rows: b.
            positions: int64 [b, s] on the host, each token's position in its document; None is its
                place in the row.
            document_ids: int [b, s] on the host, not falling along a row; None is one document for
                each sequence that is cut apart.
            sample_ids: int64 [b] on the host; None turns dropout off.
            masks_by_ids: keep document ids of this rank's tokens, for one call of an op that masks
                by them; -1 for padding. The blocks do without.
            device: where layers work.

        Raises:
            ValueError: no such rank, tensors that do not fit or are not on the host, ids that fall,
                or a document in two sequences that are cut apart.
        """
        given = {"positions": positions, "document_ids": document_ids}
        for name, tensor in given.items():
            _check(name, tensor, (rows, cut.length))
        _check("sample_ids", sample_ids, (rows,))
        documents = None
        if document_ids is not None:
            documents = documents_of(document_ids.numpy())
            _check_sequences(documents, cut)
        elif len(cut.bounds) > 2:
            documents = (cut.bounds,) * rows
        device = torch.device("cpu") if device is None else device
        columns = columns_of(cut, rank)  # [s/cp]
        places = _moved(columns, device)
        local = places
        if positions is not None:
            local = _moved(take_columns(positions, columns, 0).t(), device)  # [s/cp, b]
        elif cut.is_padded:
            local = _moved(columns.clamp(min=0), device)
        ids = None
        if masks_by_ids and documents is not None:
            ids = ids_of(cut.bounds, rows) if document_ids is None else document_ids
            ids = _moved(take_columns(ids, columns, PADDING).t(), device)  # [s/cp, b]
        inverse = inverse_of(cut)
        return SequenceLayout(
            positions=local,
            document_ids=ids,
            sample_ids=None if sample_ids is None else _moved(sample_ids, device),
            places=places,
            cut=cut,
            rank=rank,
            rows=rows,
            documents=documents,
            columns=columns,
            inverse=None if inverse is None else _moved(inverse, device),
        )

    def with_samples(self, sample_ids: torch.Tensor | None) -> SequenceLayout:
        """Return the layout for these samples, with all that was worked out for this one.

        Args:
            sample_ids: int64 [samples] where layers work; None turns dropout off.
        """
        return self._with(sample_ids=sample_ids)

    def holding_samples(self, length: int) -> SequenceLayout:
        """Return the layout of the same row, which holds several samples, one after another.

        Args:
            length: tokens of each sample.

        Raises:
            ValueError: several rows, or a row of other tokens than those of whole samples.
        """
        cut = self._known_cut()
        if self.rows != 1 or length < 1 or cut.length % length:
            raise ValueError(
                f"{self.rows} rows of {cut.length} tokens hold no samples of {length}: give one "
                "row of whole samples"
            )
        return self._with(sample_length=length)

    def as_filler(self) -> SequenceLayout:
        """Return the layout of tokens that count for nothing, with all that was worked out."""
        return self._with(filler=True)

    def _with(self, **changes: object) -> SequenceLayout:
        found = replace(self, **changes)
        object.__setattr__(found, "_plans", self._plans)
        return found

    @property
    def sample_numbers(self) -> torch.Tensor | None:
        """Return the sample of each token among those of the row, int64 [s/cp], some of them for
        padding; None where each row is a sample."""
        length = self.sample_length
        if length is None or self.places is None:
            return None
        places = self.places
        return self._plans.map(("sample numbers",), lambda: places.clamp(min=0) // length)

    @property
    def sample_places(self) -> torch.Tensor:
        """Return each token's place in its sample, int64 [s/cp] or [s/cp, b], below 0 for
        padding."""
        places, length = self.places, self.sample_length
        if places is None:
            return self.positions
        if length is None:
            return places
        return self._plans.map(
            ("sample places",), lambda: torch.where(places < 0, places, places % length)
        )

    @property
    def plans_made(self) -> int:
        """Return how often blocks were worked out; however many layers ask, once for each kind."""
        return self._plans.made

    @property
    def visits_made(self) -> int:
        """Return how often it was worked out where blocks lie among queries or keys: at most once
        for each of the two and each kind of blocks."""
        return self._plans.visits_made

    @property
    def maps_made(self) -> int:
        """Return how often maps of tokens were made; however many layers ask, once each kind."""
        return len(self._plans.maps)

    def whole_rows(self, batch: int) -> TokenRows:
        """Return how the tokens of whole rows are packed for a recurrence, made once.

        Args:
            batch: b.

        Raises:
            ValueError: another number of rows, or documents known only by ids: see `whole_rows`.
        """
        return self._plans.map(("whole rows", batch), lambda: whole_rows(self, batch))

    def own_pieces(self, batch: int) -> OwnPieces:
        """Return this rank's parts of documents and how all ranks' go on: likewise, made once."""
        return self._plans.map(("own pieces", batch), lambda: own_pieces(self, batch))

    def local(self, x: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Return this rank's columns of whole rows, on the host.

        Args:
            x: [b, s] or [b, s, ...] on the host; one sample a row also where one row holds several.
            fill: what padding gets.

        Returns:
            [b, s/cp] or [b, s/cp, ...], b = 1 where a row holds all samples; `x` itself where
            nothing is cut.

        Raises:
            ValueError: rows of another length, or not on the host.
        """
        if self.cut is None or self.columns is None:
            return x
        if x.ndim < 2:
            raise ValueError(f"rows of shape {tuple(x.shape)}: give [b, {self.cut.length}]")
        if self.sample_length is not None:
            samples = self.cut.length // self.sample_length
            _check("samples", x, (samples, self.sample_length, *x.shape[2:]))
            x = x.flatten(0, 1).unsqueeze(0)  # [1, s, ...]
        _check("rows", x, (x.shape[0], self.cut.length, *x.shape[2:]))
        if self.cut.size == 1 and not self.cut.is_padded:
            return x
        return take_columns(x, self.columns, fill)

    def blocks(
        self, key_rank: int | None, window: int | None = None, *, joined: bool = False
    ) -> Blocks:
        """Return the blocks of this rank's queries and one rank's keys, made once.

        Args:
            key_rank: who holds the keys; None is the keys of whole rows in the order of places, as
                `to_rows` returns them.
            window: a query at place q sees only keys k with q - k < window.
            joined: see `attention_blocks`.

        Raises:
            ValueError: a layout without a cut, no such rank, or a window below 1.
        """
        cut = self._known_cut()
        return self._plan(
            ("rank", key_rank, window, joined),
            lambda: cut.runs(self.rank),
            lambda: _whole(cut) if key_rank is None else cut.runs(key_rank),
        )

    def row_blocks(self, window: int | None = None) -> Blocks:
        """Return the blocks of all queries and all keys of whole rows, in the order of places.

        Args:
            window: a query at place q sees only keys k with q - k < window.

        Raises:
            ValueError: a layout without a cut, or a window below 1.
        """
        cut = self._known_cut()
        return self._plan(("rows", window, False), lambda: _whole(cut), lambda: _whole(cut))

    def to_rows(self, gathered: torch.Tensor) -> torch.Tensor:
        """Bring what was gathered from all ranks into the order of places; padding goes.

        Args:
            gathered: [cp · s/cp, ...], the tokens of rank 0, then of rank 1, ...

        Returns:
            [s, ...]; `gathered` itself where that is its order.
        """
        self._check_length(gathered, self._known_cut().padded[-1])
        return gathered if self.inverse is None else gathered.index_select(0, self.inverse)

    def to_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring whole rows into the order that all ranks' tokens are gathered in: undo `to_rows`.

        Args:
            rows: [s, ...] in the order of places.

        Returns:
            [cp · s/cp, ...], zero where padding is; `rows` itself where that is its order.
        """
        cut = self._known_cut()
        self._check_length(rows, cut.length)
        if self.inverse is None:
            return rows
        shape = (cut.padded[-1], *rows.shape[1:])
        found = rows.new_zeros(shape) if cut.is_padded else rows.new_empty(shape)
        return found.index_copy_(0, self.inverse, rows)

    def _known_cut(self) -> SequenceCut:
        if self.cut is not None:
            return self.cut
        told = "this layout has no cut"
        if self.document_ids is not None:
            told += ", and of its documents only ids: blocks need where they begin (cu_seqlens)"
        raise ValueError(f"{told}; make it by SequenceLayout.make, on the host")

    def _plan(
        self,
        key: tuple,
        queries: Callable[[], Sequence[Run]],
        keys: Callable[[], Sequence[Run]],
    ) -> Blocks:
        """Return blocks from the plans; `key` is (name, ..., window, joined)."""
        *_, window, joined = key
        return self._plans.get(
            key,
            lambda: attention_blocks(
                queries(),
                keys(),
                rows=self.rows or 1,
                documents=self.documents,
                window=window,
                joined=joined,
            ),
        )

    @staticmethod
    def _check_length(x: torch.Tensor, wanted: int) -> None:
        if x.shape[0] != wanted:
            raise ValueError(f"{x.shape[0]} tokens in {tuple(x.shape)}, the layout has {wanted}")


def _whole(cut: SequenceCut) -> tuple[Run, ...]:
    """Return a whole row in the order of places."""
    return (Run(0, cut.length, 0),)


def _check(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor is on the host and of this shape."""
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} {tuple(tensor.shape)} must be {shape}: all columns of each row")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} are on {tensor.device}: give the host's, reading them back would hold it up"
        )


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on `device`; the host does not wait."""
    return pin(tensor.contiguous(), device).to(device, non_blocking=True)


def _check_sequences(documents: Sequence[Sequence[int]], cut: SequenceCut) -> None:
    """Raise ValueError where a document is in two sequences that are cut apart."""
    for row, bounds in enumerate(documents):
        crossed = sorted(set(cut.bounds) - set(bounds))
        if crossed:
            raise ValueError(
                f"a document of row {row} goes on over place {crossed[0]}, where cu_seqlens cuts "
                "sequences apart: cut the row as one, or let the document end there"
            )
