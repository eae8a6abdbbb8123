# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout: how the tokens of a microbatch are distributed over context-parallel ranks.

`make` computes everything on the host, once per microbatch: index maps between whole rows and each
rank's tokens, in both directions; where each row's documents begin; on first use the blocks of
attention. What layers need on the device is copied there asynchronously; nothing is read back. The
maps use NumPy: torch's multithreaded versions take far longer where threads share a core.

`PackedTokens` packs the tokens of rows for a recurrence, document after document, and unpacks them.
One gather undoes the split over ranks, drops padding, and turns columns of rows into rows of
columns. The inverse map is known, so backward gathers too: no additions and no scatter.

`OwnPieces` are the sub-sequences that a rank holds, and how those of all ranks continue each other.
A piece is the intersection of a run and a document. Pieces follow each other in the order of the
local tokens, row after row. A piece that begins where its document does starts from zero; another
continues the piece before it, which is on another rank, since a rank joins adjacent runs. So only
the last piece of a run is continued, and only the first continues another. This is computed on the
host for all ranks alike, so a state that no rank needs is not sent.

`ContextParallel` names the ranks that share the tokens of a row, and their attention engine.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import torch

from megatron.core.context_parallel.blockwise import Blocks, attention_blocks
from megatron.core.context_parallel.comm_type import ALL_TO_ALL, AUTO, ENGINES, head_problem
from megatron.core.context_parallel.cut import PADDING, Run, SequenceCut
from megatron.core.cpu_graph import CpuGraph
from megatron.core.device import pin
from megatron.core.ops.paged_attention import PagedBatch
from megatron.core.ops.sequences import PackingIndices, Sequences
from megatron.core.process_groups import Group


def columns_of(cut: SequenceCut, rank: int) -> torch.Tensor:
    """Return the place of each token that a rank holds, int64 [s/cp], `PADDING` where none is.

    Raises:
        ValueError: no such rank.
    """
    index, place = _indices_and_places(
        [(run.start, run.length, run.place) for run in cut.runs(rank)]
    )
    columns = np.full(cut.local_length, PADDING, dtype=np.int64)
    columns[index] = place
    return torch.from_numpy(columns)


def inverse_of(cut: SequenceCut) -> torch.Tensor | None:
    """Return where each place is among the tokens gathered from all ranks, int64 [s].

    None if they are gathered in the order of places, without padding.
    """
    runs = [
        (run.start + rank * cut.local_length, run.length, run.place)
        for rank in range(cut.size)
        for run in cut.runs(rank)
    ]
    if not cut.is_padded and all(start == place for start, _, place in runs):
        return None
    index, place = _indices_and_places(runs)
    inverse = np.empty_like(index)
    inverse[place] = index
    return torch.from_numpy(inverse)


def take_columns(x: torch.Tensor, columns: torch.Tensor, fill: float) -> torch.Tensor:
    """Return the columns of rows that a rank holds.

    Args:
        x: [b, s, ...] on the host.
        columns: int64 [s/cp], from `columns_of`.
        fill: what padding gets.

    Returns:
        [b, s/cp, ...].
    """
    empty = columns.numpy() == PADDING
    if not empty.any():
        return x.index_select(1, columns)
    local_columns = x.index_select(1, columns.clamp(min=0))
    local_columns[:, torch.from_numpy(empty)] = fill
    return local_columns


def documents_of(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return where the documents of each row begin and end by place, [0, ..., s].

    Args:
        ids: int [b, s], not falling along a row.

    Raises:
        ValueError: ids that fall.
    """
    documents = []
    for row, numbers in enumerate(ids):
        borders = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        document_ids = numbers[np.concatenate(([0], borders))].tolist()  # the id of each document
        for at, (before, after) in zip(borders.tolist(), pairwise(document_ids), strict=True):
            if after < before:
                raise ValueError(
                    f"document_ids of row {row} fall from {before} to {after} at column {at}: "
                    "number documents along the row"
                )
        documents.append((0, *borders.tolist(), len(numbers)))
    return tuple(documents)


def ids_of(bounds: Sequence[int], rows: int) -> torch.Tensor:
    """Return the number of each token's document, int32 [b, s], the same in each row.

    Args:
        bounds: where documents begin and end by place, [0, ..., s].
        rows: b.
    """
    ids = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    return torch.from_numpy(ids).expand(rows, -1)


def _indices_and_places(runs: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (index, place) of each token of runs (first index, length, first place), int64."""
    start, length, place = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    before = np.repeat(length.cumsum() - length, length)  # tokens of earlier runs
    within = np.arange(before.size) - before
    return np.repeat(start, length) + within, np.repeat(place, length) + within


_Map = TypeVar("_Map")


@dataclass(eq=False)
class _Plans:
    """Blocks by what they were made for, and how often any were made; likewise maps of tokens, and
    what layers chose by what they send."""

    made: int = 0
    maps: dict[tuple, object] = field(default_factory=dict)
    _blocks: dict[tuple, Blocks] = field(default_factory=dict)
    _choices: dict[tuple, str] = field(default_factory=dict)

    def get(self, key: tuple, make: Callable[[], Blocks]) -> Blocks:
        """Return what was made for `key`; make it the first time."""
        if key not in self._blocks:
            self._blocks[key] = make()
            self.made += 1
        return self._blocks[key]

    def map(self, key: tuple, make: Callable[[], _Map]) -> _Map:
        """Return the map that was made for `key`; make it the first time."""
        if key not in self.maps:
            self.maps[key] = make()
        return self.maps[key]  # type: ignore[return-value]

    def choice(self, key: tuple, choose: Callable[[], str]) -> str:
        """Return what was chosen for `key`; choose the first time."""
        if key not in self._choices:
            self._choices[key] = choose()
        return self._choices[key]

    @property
    def visits_made(self) -> int:
        return sum(blocks.visits_made for blocks in self._blocks.values())


@dataclass(frozen=True, eq=False, kw_only=True)
class PagedRows:
    """Rows with a past, of one step of generation: their new tokens are packed, row after row.

    Rows that have one new token come first; recurrent mixers take these on in place.

    Args:
        batch: where the keys and values of each row lie, for attention.
        slot_mapping: int64 [t], the slot of the cache that each new token takes.
        state_slots: int64 [b], where the states of each row are.
        decode_rows: how many rows have one new token.
        prefill: the new tokens of the others, one sequence a row; None if there are none.
        most_tokens: new tokens of the data-parallel rank that has most, of those that share
            experts; None where there are no others.
        graph: that records the step, if one does: attention is called at each replay then, with
            the `batch` and the `slot_mapping` of that step.
    """

    batch: PagedBatch
    slot_mapping: torch.Tensor
    state_slots: torch.Tensor
    decode_rows: int
    prefill: Sequences | None
    most_tokens: int | None = None
    graph: CpuGraph | None = None


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """What layers need to know of the tokens apart from their values; the one description of rows.

    Without a split a rank has whole rows; s/cp is then s. Of rows with a past, whose keys and
    values or states a cache has, the new tokens are packed: b is 1, s the new tokens of all rows,
    and `paged` says which are whose.

    Args:
        positions: int64 [s/cp] or [s/cp, b], each token's position in its sequence; 0 for padding.
        document_ids: int [s, b], or None if nothing is masked by ids: every token sees all
            earlier ones, or `blocks` know the documents.
        sample_ids: int64 [samples], the global number of each, or None outside training: dropout is
            a function of it and of the place in the sample. Each row is one but for
            `sample_length`.
        places: int64 [s/cp], each token's place in its row, -1 for padding; None where that is its
            position.
        cut: how rows are split over the context-parallel ranks; None if that was never requested.
        rank: this one of them.
        rows: b, known with a split.
        documents: of each row, where its documents begin and end by place, [0, ..., s]; None is
            one document a row.
        columns: int64 [s/cp] on the host: the column of a row that each local token is.
        inverse: int64 [s], where each place is among the tokens gathered from all ranks; None where
            they are gathered in the order of the row.
        padding: bool [s/cp, b], True for tokens that hold no data: the end of a packed row, what a
            split over ranks adds, all of a microbatch that only keeps a rank busy. Routers leave
            them out of every count, loss and capacity, and experts take none of them. None is no
            padding.
        sample_length: tokens of each sample, where the one row holds several, one after another;
            None where each row is a sample.
        paged: the rows of a step of generation; None while training.
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
    padding: torch.Tensor | None = None
    sample_length: int | None = None
    paged: PagedRows | None = None
    _plans: _Plans = field(default_factory=_Plans, init=False, repr=False)

    @staticmethod
    def of_rows(
        length: int,
        *,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        sample_ids: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> SequenceLayout:
        """Return the layout of whole rows, without a split; several documents are masked by ids.

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
        """Return the layout of this rank's part of rows that are split over ranks.

        Args:
            cut: of every row. Sequences that it splits separately are documents.
            rank: the context-parallel rank.
            rows: b.
            positions: int64 [b, s] on the host, each token's position in its document; None is its
                place in the row.
            document_ids: int [b, s] on the host, not falling along a row; None is one document for
                each sequence that is split separately.
            sample_ids: int64 [b] on the host; None turns dropout off.
            masks_by_ids: keep document ids of this rank's tokens, for one call of an op that masks
                by them; -1 for padding. The blocks do without.
            device: where layers work.

        Raises:
            ValueError: no such rank, tensors that do not fit or are not on the host, ids that fall,
                or a document in two sequences that are split separately.
        """
        inputs = {"positions": positions, "document_ids": document_ids}
        for name, tensor in inputs.items():
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
        padding = None
        if cut.is_padded:
            padding = _moved((columns == PADDING).unsqueeze(1).expand(-1, rows), device)
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
            padding=padding,
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

    def with_padding(self, padding: torch.Tensor) -> SequenceLayout:
        """Return the layout of the same tokens, of which more are padding, with all that was worked
        out for this one.

        Args:
            padding: bool [s/cp, b] where layers work. What a split has added stays padding.

        Raises:
            ValueError: another shape or dtype.
        """
        length, rows = self.positions.shape[0], self.rows
        fits = padding.ndim == 2 and padding.shape[0] == length
        if not fits or rows not in (None, padding.shape[1]) or padding.dtype is not torch.bool:
            raise ValueError(
                f"padding {tuple(padding.shape)} {padding.dtype} must be bool "
                f"[{length}, {'b' if rows is None else rows}], one for each token of this rank"
            )
        if self.padding is not None:
            padding = padding | self.padding
        return self._with(padding=padding)

    def with_tensors(self, **tensors: torch.Tensor) -> SequenceLayout:
        """Return the layout of rows with other `positions`, `document_ids`, `sample_ids` or
        `padding`, whose documents begin at the same places, with all that was worked out for this
        one."""
        return self._with(**tensors)

    def _with(self, **changes: object) -> SequenceLayout:
        layout = replace(self, **changes)
        object.__setattr__(layout, "_plans", self._plans)
        return layout

    @property
    def rows_with_past(self) -> PagedRows:
        """Return `paged`. Raises ValueError for a layout without."""
        if self.paged is None:
            raise ValueError(
                "a cache needs a layout that says where it keeps each row: give `paged`, see "
                "`inference.engine`"
            )
        return self.paged

    @property
    def sample_numbers(self) -> torch.Tensor | None:
        """Return the sample of each token among those of the row, int64 [s/cp], some of them for
        padding; None where each row is a sample."""
        length = self.sample_length
        if length is None or self.places is None:
            return None
        places = self.places
        return self._plans.map(("sample numbers", length), lambda: places.clamp(min=0) // length)

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
            ("sample places", length), lambda: torch.where(places < 0, places, places % length)
        )

    @property
    def plans_made(self) -> int:
        """Return how often blocks were worked out; however many layers ask, once for each kind."""
        return self._plans.made

    @property
    def visits_made(self) -> int:
        """Return how often it was worked out where blocks are among queries or keys: at most once
        for each of the two and each kind of blocks."""
        return self._plans.visits_made

    @property
    def maps_made(self) -> int:
        """Return how often maps of tokens were made; however many layers ask, once each kind."""
        return len(self._plans.maps)

    def once(self, key: tuple, choose: Callable[[], str]) -> str:
        """Return what layers chose for `key` by what they send, once for this layout."""
        return self._plans.choice(key, choose)

    def cu_seqlens(self, batch: int) -> tuple[torch.Tensor, int]:
        """Return where documents begin in whole rows that lie one after the other, int32
        [documents + 1], and the tokens of the longest one; made once.

        Args:
            batch: b.

        Raises:
            ValueError: another number of rows, or documents known only by ids.
        """
        return self._plans.map(("cu_seqlens", batch), lambda: cu_seqlens(self, batch))

    def whole_rows(self, batch: int) -> PackedTokens:
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
            nothing is split.

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
            ValueError: a layout without a split, no such rank, or a window below 1.
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
            ValueError: a layout without a split, or a window below 1.
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
        gathered = rows.new_zeros(shape) if cut.is_padded else rows.new_empty(shape)
        return gathered.index_copy_(0, self.inverse, rows)

    def _known_cut(self) -> SequenceCut:
        if self.cut is not None:
            return self.cut
        problem = "this layout has no cut"
        if self.document_ids is not None:
            problem += ", and of its documents only ids: blocks need where they begin (cu_seqlens)"
        raise ValueError(f"{problem}; make it by SequenceLayout.make, on the host")

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
    def _check_length(x: torch.Tensor, length: int) -> None:
        if x.shape[0] != length:
            raise ValueError(f"{x.shape[0]} tokens in {tuple(x.shape)}, the layout has {length}")


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
    """Raise ValueError where a document is in two sequences that are split separately."""
    for row, bounds in enumerate(documents):
        crossed = sorted(set(cut.bounds) - set(bounds))
        if crossed:
            raise ValueError(
                f"a document of row {row} goes on over place {crossed[0]}, where cu_seqlens cuts "
                "sequences apart: cut the row as one, or let the document end there"
            )


class PackedTokens:
    """Which tokens of [n, b, ...] are packed, in which order, and which sequences they make.

    Made on the host, once; the maps are copied to the device without waiting.

    Args:
        places: int64 [t] on the host, where each packed token is: column · b + row. None twice
            the same; what is in none is padding.
        bounds: where sequences of packed tokens begin and end, [0, ..., t].
        length: n.
        batch: b.
        device: where layers work.

    Attributes:
        sequences: the packed tokens, on the device.
        places: of the packed tokens among [n · b, ...]; None where they are all, as stored.

    Raises:
        ValueError: bounds of another number of tokens.
    """

    def __init__(
        self,
        places: np.ndarray,
        bounds: Sequence[int],
        *,
        length: int,
        batch: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.sequences = Sequences(bounds, device=device)
        if self.sequences.tokens != len(places):
            raise ValueError(
                f"bounds end at {self.sequences.tokens}, there are {len(places)} tokens: the last "
                "is their number"
            )
        self.length, self.batch = length, batch
        self.places = PackingIndices.of(places, length * batch, self.sequences.to_device)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [t, ...] from x [n, b, ...]; a view where that is the order in memory."""
        self._check("pack", x, (self.length, self.batch))
        flat = x.flatten(0, 1)
        return flat if self.places is None else self.places.pack(flat)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, b, ...] from x [t, ...], zero where padding is; a view like `pack`'s."""
        self._check("unpack", x, (self.sequences.tokens,))
        return self._rows(x if self.places is None else self.places.unpack(x))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `pack` does, for ops that have a backward of their own."""
        flat = x.flatten(0, 1)
        return flat if self.places is None else self.places.pack_no_grad(flat)

    def put_back(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `unpack` does, for ops that have a backward of their own."""
        return self._rows(x if self.places is None else self.places.unpack_no_grad(x))

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, b, ...], a view of [n · b, ...]."""
        return x.unflatten(0, (self.length, self.batch))

    @staticmethod
    def _check(what: str, x: torch.Tensor, expected: tuple[int, ...]) -> None:
        if tuple(x.shape[: len(expected)]) != expected:
            raise ValueError(f"{what}: {tuple(x.shape)} must begin with {expected}")


def whole_rows(layout: SequenceLayout, batch: int) -> PackedTokens:
    """Return the tokens of whole rows among what is gathered from all ranks, [cp · s/cp, b].

    Row follows row, and in each its tokens in the order of places; padding is left out. Documents
    are sequences.

    Args:
        layout: of this rank; without a split, of whole rows.
        batch: b.

    Raises:
        ValueError: rows of another number than the layout's, or documents known by ids alone.
    """
    documents = known_documents(layout, batch)
    cut, width = layout.cut, layout.positions.shape[0]
    length, gathered = (width, width) if cut is None else (cut.length, cut.padded[-1])
    inverse = None if cut is None else inverse_of(cut)
    columns = np.arange(length) if inverse is None else inverse.numpy()
    places = columns * batch + np.arange(batch)[:, None]  # [b, s]
    bounds = [0]
    for row, ends in enumerate(documents):
        bounds += [row * length + end for end in ends[1:]]
    return PackedTokens(
        places.reshape(-1), bounds, length=gathered, batch=batch, device=layout.positions.device
    )


def cu_seqlens(layout: SequenceLayout, batch: int) -> tuple[torch.Tensor, int]:
    """Return what `SequenceLayout.cu_seqlens` says."""
    bounds = [0]
    for row in known_documents(layout, batch):
        start = bounds[-1]
        bounds += [start + end for end in row[1:]]
    longest = max(end - begin for begin, end in pairwise(bounds))
    return _moved(torch.tensor(bounds, dtype=torch.int32), layout.positions.device), longest


def known_documents(layout: SequenceLayout, batch: int) -> Sequence[Sequence[int]]:
    """Return where the documents of each row begin and end by place, [0, ..., s].

    Raises:
        ValueError: rows of another number than the layout's, or documents known by ids alone.
    """
    if layout.rows not in (None, batch):
        raise ValueError(f"{batch} rows of tokens, the layout is of {layout.rows}: make it for all")
    if layout.documents is None and layout.document_ids is not None:
        raise ValueError(
            "this layout knows documents only by their ids: a recurrence needs where they begin "
            "(cu_seqlens), or its state goes on into the next; make it by SequenceLayout.make, on "
            "the host"
        )
    if layout.documents is not None:
        return layout.documents
    length = layout.positions.shape[0] if layout.cut is None else layout.cut.length
    return ((0, length),) * batch


@dataclass(frozen=True)
class Link:
    """A document that goes on from one rank's piece to another's.

    Args:
        source: the rank that holds the piece before.
        export: number of that piece among those of `source` that are continued.
        target: the rank that holds the piece after.
        entry: number of that piece among those of `target` that continue others.
    """

    source: int
    export: int
    target: int
    entry: int


Chain = tuple[Link, ...]
"""Links one after the other: the piece after each is the one before the next."""


@dataclass(frozen=True)
class PieceHalo:
    """The `width` tokens before each piece, of its own document: who sends which to whom.

    Args:
        send_index: int64 [n], the packed tokens to send, by receiving rank.
        send_counts, receive_counts: how many go to each rank, and come from it.
        take: int64 [N · width], which received token each row of the halo is; the number of those
            received where there is none.
        place: int64 [m], the row of the halo that each received token is.
    """

    send_index: torch.Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    take: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True)
class _Lent:
    """Tokens of one row of the batch that a run borrows: where they are at both ends."""

    source: int
    target: int
    row: int
    run: int
    first: int
    start: int
    length: int

    @property
    def order(self) -> tuple[int, int, int]:
        """Order what one rank sends another, at both of them alike."""
        return self.row, self.run, self.first


class OwnPieces(PackedTokens):
    """The pieces of a rank, made once for a microbatch; they are packed as its sequences.

    Args:
        cut: of every row.
        rank: whose pieces.
        documents: of each row, where its documents begin and end by place, [0, ..., s].
        device: where layers work.

    Attributes:
        exports: own pieces that others continue; `export_slots` of the rank that has most.
        entries: own pieces that continue others; `entry_slots` of the rank that has most.
        chains: the links of all ranks.
    """

    def __init__(
        self,
        cut: SequenceCut,
        rank: int,
        *,
        documents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        self.cut, self.rank = cut, rank
        self._documents, self._runs = documents, cut.runs(rank)
        self._firsts: dict[tuple[int, int], int] = {}  # (row, run): its first piece
        lasts: dict[tuple[int, int], int] = {}
        bounds = [0]
        for row, borders in enumerate(documents):
            for number, run in enumerate(self._runs):
                self._firsts[row, number] = len(bounds) - 1
                for length in _lengths(run, borders):
                    bounds.append(bounds[-1] + length)
                lasts[row, number] = len(bounds) - 2
        batch = len(documents)
        columns = _numbers_of([(run.start, run.length) for run in self._runs])
        places = columns * batch + np.arange(batch)[:, None]  # [b, tokens of a row]
        super().__init__(
            places.reshape(-1),
            bounds if len(bounds) > 1 else (0, 0),
            length=cut.local_length,
            batch=batch,
            device=device,
        )
        ends = _Ends(cut)
        self.chains: tuple[Chain, ...] = tuple(
            chain for row, borders in enumerate(documents) for chain in ends.chains(row, borders)
        )
        self.exports = tuple(lasts[key] for key in ends.exports[rank])
        self.entries = tuple(self._firsts[key] for key in ends.entries[rank])
        self.export_slots = max(map(len, ends.exports))
        self.entry_slots = max(map(len, ends.entries))

    @property
    def crossed(self) -> bool:
        """Return whether any document continues on another rank; all ranks return the same."""
        return bool(self.chains)

    @property
    def chained(self) -> bool:
        """Return whether any piece both continues another and is continued."""
        return any(len(chain) > 1 for chain in self.chains)

    def halo(self, width: int) -> PieceHalo:
        """Return who lends the `width` tokens before each piece, made once.

        Raises:
            ValueError: a negative width.
        """
        return self.sequences.cached(("halo", width), lambda: self._halo(width))

    def _halo(self, width: int) -> PieceHalo:
        lent = list(_lent(self.cut, width, self._documents, rank=self.rank))
        sent = sorted((p for p in lent if p.source == self.rank), key=lambda p: (p.target, p.order))
        got = sorted((p for p in lent if p.target == self.rank), key=lambda p: (p.source, p.order))
        starts = [run.start for run in self._runs]
        before = [0, *accumulate(run.length for run in self._runs)]  # packed tokens of a row
        send = []
        for piece in sent:
            run = bisect_right(starts, piece.start) - 1
            start = piece.row * before[-1] + before[run] + piece.start - starts[run]
            send.append((start, piece.length))
        places = [
            (self._firsts[piece.row, piece.run] * width + piece.first, piece.length)
            for piece in got
        ]
        place = _numbers_of(places)
        take = np.full(self.sequences.count * width, len(place), dtype=np.int64)
        take[place] = np.arange(len(place))
        ranks = range(self.cut.size)
        moved = self.sequences.to_device
        return PieceHalo(
            moved(_numbers_of(send)),
            tuple(sum(p.length for p in sent if p.target == rank) for rank in ranks),
            tuple(sum(p.length for p in got if p.source == rank) for rank in ranks),
            moved(take),
            moved(place),
        )


def own_pieces(layout: SequenceLayout, batch: int) -> OwnPieces:
    """Return the pieces of a layout's rank; without a split, of whole rows.

    Args:
        layout: of this rank.
        batch: b.

    Raises:
        ValueError: rows of another number than the layout's, or documents known by ids alone.
    """
    documents = known_documents(layout, batch)
    device, cut = layout.positions.device, layout.cut
    if cut is None:
        cut = SequenceCut.of(layout.positions.shape[0], 1)
    return OwnPieces(cut, layout.rank, documents=documents, device=device)


class _Ends:
    """The ends of runs over which documents go on, numbered for each rank as they are met: row
    after row, by place. All ranks meet them in this order."""

    def __init__(self, cut: SequenceCut) -> None:
        owned = [
            (run, number, rank)
            for rank in range(cut.size)
            for number, run in enumerate(cut.runs(rank))
        ]
        self._owned = sorted(owned, key=lambda run_owner: run_owner[0].place)
        self.exports: list[list[tuple[int, int]]] = [[] for _ in range(cut.size)]  # (row, run)
        self.entries: list[list[tuple[int, int]]] = [[] for _ in range(cut.size)]

    def chains(self, row: int, borders: Sequence[int]) -> Iterator[Chain]:
        """Yield the chains of a row, whose documents have these borders."""
        links: list[Link] = []
        for (run, number, source), (behind, next_number, target) in pairwise(self._owned):
            following = borders[bisect_right(borders, run.place)]  # the border after its first
            if links and following <= run.end:
                yield tuple(links)
                links = []
            if behind.place == borders[bisect_left(borders, behind.place)]:
                continue
            exports, entries = self.exports[source], self.entries[target]
            links.append(Link(source, len(exports), target, len(entries)))
            exports.append((row, number))
            entries.append((row, next_number))
        if links:
            yield tuple(links)


def _lengths(run: Run, borders: Sequence[int]) -> list[int]:
    """Return the lengths of the pieces that documents make of a run."""
    inner = borders[bisect_right(borders, run.place) : bisect_left(borders, run.end)]
    return [end - start for start, end in pairwise((run.place, *inner, run.end)) if end > start]


def _lent(
    cut: SequenceCut, width: int, documents: Sequence[Sequence[int]], *, rank: int
) -> Iterator[_Lent]:
    """Yield what a rank lends and borrows, of all rows, less what is of earlier documents."""
    places = [[run.place for run in cut.runs(target)] for target in range(cut.size)]
    pieces = [piece for piece in cut.halo(width).pieces if rank in (piece.source, piece.target)]
    for row, borders in enumerate(documents):
        for piece in pieces:
            place = places[piece.target][piece.run]
            top = place - width  # the place of the halo's first row
            # Rows before the document of the run's first token are left out.
            begin = borders[bisect_right(borders, place) - 1]
            less = max(0, begin - (top + piece.row))
            if less < piece.length:
                yield _Lent(
                    source=piece.source,
                    target=piece.target,
                    row=row,
                    run=piece.run,
                    first=piece.row + less,
                    start=piece.start + less,
                    length=piece.length - less,
                )


def _numbers_of(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the numbers of parts (first, length), one after another."""
    if not ranges:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.arange(start, start + length) for start, length in ranges])


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """How the sequences of a model are split over ranks.

    Args:
        group: cp.
        engine: of attention, "p2p", "all_gather", "a2a", or "auto" for the one that moves least.
        linear_mode: of recurrent mixers, "headwise", "segments", or "auto" likewise.
        cpu_dtype: what a CPU multiplies 16-bit queries and keys in, see `ops.backend_choice`.
    """

    group: Group = field(default_factory=lambda: Group.single("cp"))
    engine: str = AUTO
    linear_mode: str = AUTO
    cpu_dtype: torch.dtype | None = None


def context_problems(engine: str, *, heads: int, groups: int, cp: int) -> list[str]:
    """List what keeps an engine from attending over cp ranks, with the fix.

    Args:
        engine: "p2p", "all_gather", "a2a" or "auto".
        heads: query heads of a rank, n/tp.
        groups: key heads of a rank, at least 1.
        cp: ranks.
    """
    if engine not in (AUTO, *ENGINES):
        return [f"context-parallel engine {engine!r}: use {', '.join((AUTO, *ENGINES))}"]
    reason = head_problem(heads, groups, cp) if engine == ALL_TO_ALL else None
    return [] if reason is None else [f"context-parallel engine a2a: {reason}"]
