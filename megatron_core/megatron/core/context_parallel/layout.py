# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout: how the tokens of a microbatch are distributed over context-parallel ranks.

`make` computes everything on the host, once per microbatch: index maps between whole rows and each
rank's tokens, in both directions; the documents of each row; on first use the blocks of attention.
Tensors for layers are copied to the device asynchronously, and nothing is read back. The maps use
NumPy: torch's multithreaded versions take far longer if threads share a core.

`ContextParallel` names the ranks that share the tokens of a row, and their attention engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from megatron.core.context_parallel.blockwise import Blocks, attention_blocks
from megatron.core.context_parallel.packed_tokens import LocalSequences, PackedTokens, whole_rows
from megatron.core.context_parallel.sequence_sharding import (
    PADDING,
    SequenceSharding,
    TokenRange,
    documents_of,
    ids_of,
)
from megatron.core.cpu_graph import CpuGraph
from megatron.core.device import pin
from megatron.core.ops.paged_attention import PagedBatch
from megatron.core.ops.sequences import Sequences
from megatron.core.process_groups import Group

#: The choice of the variant with the least communication.
AUTO = "auto"


def take_columns(x: torch.Tensor, columns: torch.Tensor, fill: float) -> torch.Tensor:
    """Return a rank's columns of rows.

    Args:
        x: [b, s, ...] on the host.
        columns: int64 [s/cp], from `SequenceSharding.row_indices`.
        fill: value of padding.

    Returns:
        [b, s/cp, ...].
    """
    is_padding = columns.numpy() == PADDING
    if not is_padding.any():
        return x.index_select(1, columns)
    local_tokens = x.index_select(1, columns.clamp(min=0))
    local_tokens[:, torch.from_numpy(is_padding)] = fill
    return local_tokens


_Map = TypeVar("_Map")


@dataclass(eq=False)
class _Plans:
    """Caches of a layout, shared by its copies: blocks of attention, index maps of tokens, and the
    communication types that layers chose."""

    num_plans: int = 0
    maps: dict[tuple, object] = field(default_factory=dict)
    _blocks: dict[tuple, Blocks] = field(default_factory=dict)
    _choices: dict[tuple, str] = field(default_factory=dict)

    def get(self, key: tuple, make: Callable[[], Blocks]) -> Blocks:
        """Return the blocks of `key`; compute them the first time."""
        if key not in self._blocks:
            self._blocks[key] = make()
            self.num_plans += 1
        return self._blocks[key]

    def map(self, key: tuple, make: Callable[[], _Map]) -> _Map:
        """Return the map of `key`; compute it the first time."""
        if key not in self.maps:
            self.maps[key] = make()
        return self.maps[key]  # type: ignore[return-value]

    def choice(self, key: tuple, choose: Callable[[], str]) -> str:
        """Return the choice for `key`; choose the first time."""
        if key not in self._choices:
            self._choices[key] = choose()
        return self._choices[key]

    @property
    def num_tile_lists(self) -> int:
        return sum(blocks.num_tile_lists for blocks in self._blocks.values())


@dataclass(frozen=True, eq=False, kw_only=True)
class PagedRows:
    """The rows of one step of generation, with cached tokens: the new tokens are packed.

    Decode rows, with one new token, come first; recurrent mixers update their states in place.

    Args:
        batch: block tables of the keys and values of each row, for attention.
        slot_mapping: int64 [t], the cache slot of each new token.
        state_slots: int64 [b], the slot of each row's recurrent states.
        decode_rows: number of decode rows.
        prefill: the new tokens of the other rows, one sequence per row; None without prefill.
        most_tokens: maximum number of new tokens over the data-parallel ranks that share experts;
            None on a single rank.
        graph: the graph that records the step, if any: each replay then calls attention with its
            `batch` and `slot_mapping`.
        windowed: the same rows with the block table and the slots of the layers with a window; None
            if all layers share one block table.
    """

    batch: PagedBatch
    slot_mapping: torch.Tensor
    state_slots: torch.Tensor
    decode_rows: int
    prefill: Sequences | None
    most_tokens: int | None = None
    graph: CpuGraph | None = None
    windowed: PagedRows | None = None


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The metadata of a microbatch's tokens for all layers.

    Without context parallelism a rank has whole rows, and s/cp is s. In generation, where a cache
    has earlier keys and values or states, the new tokens of all rows are packed: b is 1, s their
    number, and `paged` describes the rows.

    Args:
        positions: int64 [s/cp] or [s/cp, b], each token's position in its sequence; 0 for padding.
        document_ids: int [s, b]; None without a document mask: every token sees all earlier ones,
            or `blocks` contain the documents.
        sample_ids: int64 [samples], the global number of each sample; None outside training.
            Dropout is a function of this number and of the position in the sample. Each row is a
            sample, unless `sample_length` is given.
        row_indices: int64 [s/cp], each token's index in its row, -1 for padding; None if it equals
            the position.
        sharding: the split of rows over the context-parallel ranks; None for whole rows.
        rank: this context-parallel rank.
        rows: b; None if unknown.
        documents: cumulative lengths of the documents of each row, [0, ..., s]; None is one
            document per row.
        columns: int64 [s/cp] on the host: the row index of each local token.
        inverse: int64 [s], the index of each token of the row among the tokens gathered from all
            ranks; None if these are in the order of the row.
        padding: bool [s/cp, b], True for padding tokens: the end of a packed row, padding of the
            split, or a padding microbatch. Routers exclude them from counts, losses and capacity,
            and they are not routed to experts. None is no padding.
        sample_length: tokens of each sample, if the only row is a concatenation of samples; None if
            each row is a sample.
        paged: the rows of a step of generation; None in training.
    """

    positions: torch.Tensor
    document_ids: torch.Tensor | None = None
    sample_ids: torch.Tensor | None = None
    row_indices: torch.Tensor | None = None
    sharding: SequenceSharding | None = None
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
        """Return the layout of whole rows; several documents are masked by ids.

        Args:
            length: s.
            positions: int64 [b, s], each token's position in its document; None is 0 … s-1.
            document_ids: int [b, s]; None lets every token see all earlier ones.
            sample_ids: int64 [b]; None turns dropout off.
            device: device of new tensors.
        """
        row_indices = torch.arange(length, device=device)
        return SequenceLayout(
            positions=row_indices if positions is None else positions.t().contiguous(),
            document_ids=None if document_ids is None else document_ids.t().contiguous(),
            sample_ids=sample_ids,
            row_indices=row_indices,
        )

    @staticmethod
    def make(
        sharding: SequenceSharding,
        rank: int,
        *,
        rows: int,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        sample_ids: torch.Tensor | None = None,
        masks_by_ids: bool = False,
        device: torch.device | None = None,
    ) -> SequenceLayout:
        """Return the layout of this rank's tokens of rows that are split over ranks.

        Args:
            sharding: the split of every row. Sequences that it splits separately are documents.
            rank: the context-parallel rank.
            rows: b.
            positions: int64 [b, s] on the host, each token's position in its document; None is its
                row index.
            document_ids: int [b, s] on the host, not decreasing along a row; None is one document
                for each separately split sequence.
            sample_ids: int64 [b] on the host; None turns dropout off.
            masks_by_ids: include the document ids of this rank's tokens, for an op that masks by
                them; -1 for padding. Blocks do not need them.
            device: device of the tensors for layers.

        Raises:
            ValueError: a rank that does not exist, tensors of another shape or not on the host,
                ids that decrease, or a document in two separately split sequences.
        """
        inputs = {"positions": positions, "document_ids": document_ids}
        for name, tensor in inputs.items():
            _check(name, tensor, (rows, sharding.length))
        _check("sample_ids", sample_ids, (rows,))
        documents = None
        if document_ids is not None:
            documents = documents_of(document_ids.numpy())
            _check_sequences(documents, sharding)
        elif len(sharding.bounds) > 2:
            documents = (sharding.bounds,) * rows
        device = torch.device("cpu") if device is None else device
        columns = torch.from_numpy(sharding.row_indices(rank))  # [s/cp]
        row_indices = _to_device(columns, device)
        local_positions = row_indices
        if positions is not None:
            local_positions = _to_device(
                take_columns(positions, columns, 0).t(), device
            )  # [s/cp, b]
        elif sharding.is_padded:
            local_positions = _to_device(columns.clamp(min=0), device)
        ids = None
        if masks_by_ids and documents is not None:
            if document_ids is None:
                document_ids = torch.from_numpy(ids_of(sharding.bounds)).expand(rows, -1)
            ids = _to_device(take_columns(document_ids, columns, PADDING).t(), device)  # [s/cp, b]
        padding = None
        if sharding.is_padded:
            padding = _to_device((columns == PADDING).unsqueeze(1).expand(-1, rows), device)
        inverse = sharding.inverse()
        in_row_order = not sharding.is_padded and np.array_equal(inverse, np.arange(len(inverse)))
        return SequenceLayout(
            positions=local_positions,
            document_ids=ids,
            sample_ids=None if sample_ids is None else _to_device(sample_ids, device),
            row_indices=row_indices,
            sharding=sharding,
            rank=rank,
            rows=rows,
            documents=documents,
            columns=columns,
            inverse=None if in_row_order else _to_device(torch.from_numpy(inverse), device),
            padding=padding,
        )

    def with_samples(self, sample_ids: torch.Tensor | None) -> SequenceLayout:
        """Return the layout for other samples; it shares the caches of this layout.

        Args:
            sample_ids: int64 [samples] on the device of layers; None turns dropout off.
        """
        return self._with(sample_ids=sample_ids)

    def holding_samples(self, length: int) -> SequenceLayout:
        """Return the layout of the same row as a concatenation of samples.

        Args:
            length: tokens of each sample.

        Raises:
            ValueError: several rows, or a row whose length is no multiple of `length`.
        """
        sharding = self._require_sharding()
        if self.rows != 1 or length < 1 or sharding.length % length:
            raise ValueError(
                f"{self.rows} rows of {sharding.length} tokens do not split into samples of "
                f"{length}: give one row of whole samples"
            )
        return self._with(sample_length=length)

    def with_padding(self, padding: torch.Tensor) -> SequenceLayout:
        """Return the layout of the same tokens with additional padding tokens; it shares the caches
        of this layout.

        Args:
            padding: bool [s/cp, b] on the device of layers. Padding of the split stays padding.

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
        """Return the layout with other `positions`, `document_ids`, `sample_ids` or `padding`, but
        the same documents; it shares the caches of this layout."""
        return self._with(**tensors)

    def _with(self, **changes: object) -> SequenceLayout:
        layout = replace(self, **changes)
        object.__setattr__(layout, "_plans", self._plans)
        return layout

    @property
    def rows_with_past(self) -> PagedRows:
        """Return `paged`. Raises ValueError if it is None."""
        if self.paged is None:
            raise ValueError(
                "a cache needs a layout with the cache slot of each row: pass `paged`, see "
                "`inference.engine`"
            )
        return self.paged

    @property
    def sample_numbers(self) -> torch.Tensor | None:
        """Return the number of each token's sample in the row, int64 [s/cp], any number for
        padding; None if each row is a sample."""
        length = self.sample_length
        if length is None or self.row_indices is None:
            return None
        row_indices = self.row_indices
        return self._plans.map(
            ("sample numbers", length), lambda: row_indices.clamp(min=0) // length
        )

    @property
    def sample_positions(self) -> torch.Tensor:
        """Return each token's index in its sample, int64 [s/cp] or [s/cp, b], below 0 for
        padding."""
        row_indices, length = self.row_indices, self.sample_length
        if row_indices is None:
            return self.positions
        if length is None:
            return row_indices
        return self._plans.map(
            ("sample positions", length),
            lambda: torch.where(row_indices < 0, row_indices, row_indices % length),
        )

    @property
    def num_plans(self) -> int:
        """Return the number of computed block lists: one for each kind, not for each layer."""
        return self._plans.num_plans

    @property
    def num_tile_lists(self) -> int:
        """Return the number of computed tile lists: at most one of queries and one of keys for each
        kind of blocks."""
        return self._plans.num_tile_lists

    @property
    def num_maps(self) -> int:
        """Return the number of computed index maps: one for each kind, not for each layer."""
        return len(self._plans.maps)

    def once(self, key: tuple, choose: Callable[[], str]) -> str:
        """Return the communication type for `key`, chosen once for this layout."""
        return self._plans.choice(key, choose)

    def cu_seqlens(self, batch: int) -> tuple[torch.Tensor, int]:
        """Return the cumulative lengths of all documents in the concatenation of whole rows, int32
        [documents + 1], and the length of the longest document; computed once.

        Args:
            batch: b.

        Raises:
            ValueError: another number of rows, or documents known only by ids.
        """
        return self._plans.map(("cu_seqlens", batch), lambda: self._cu_seqlens(batch))

    def _cu_seqlens(self, batch: int) -> tuple[torch.Tensor, int]:
        bounds = [0]
        for row in self._require_documents(batch):
            start = bounds[-1]
            bounds += [start + end for end in row[1:]]
        longest = max(end - begin for begin, end in pairwise(bounds))
        return _to_device(torch.tensor(bounds, dtype=torch.int32), self.positions.device), longest

    def whole_rows(self, batch: int) -> PackedTokens:
        """Return the packing of whole rows from tokens gathered from all ranks, [cp · s/cp, b], for
        a recurrence; computed once.

        Args:
            batch: b.

        Raises:
            ValueError: another number of rows, or documents known only by ids.
        """
        return self._plans.map(("whole rows", batch), lambda: self._whole_rows(batch))

    def _whole_rows(self, batch: int) -> PackedTokens:
        documents, sharding = self._require_documents(batch), self.sharding
        length, device = self.positions.shape[0], self.positions.device
        if sharding is None:
            return whole_rows(np.arange(length), documents, length=length, device=device)
        columns, length = sharding.inverse(), sharding.padded[-1]
        return whole_rows(columns, documents, length=length, device=device)

    def local_sequences(self, batch: int) -> LocalSequences:
        """Return this rank's local sub-sequences, which are documents for whole rows; computed
        once.

        Args:
            batch: b.

        Raises:
            ValueError: another number of rows, or documents known only by ids.
        """
        return self._plans.map(("local sequences", batch), lambda: self._local_sequences(batch))

    def _local_sequences(self, batch: int) -> LocalSequences:
        documents, sharding = self._require_documents(batch), self.sharding
        if sharding is None:
            sharding = SequenceSharding.of(self.positions.shape[0], 1)
        device = self.positions.device
        return LocalSequences(sharding, self.rank, documents=documents, device=device)

    def local(self, x: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Return this rank's columns of whole rows, on the host.

        Args:
            x: [b, s] or [b, s, ...] on the host; one sample per row, also if the layout's row is a
                concatenation of samples.
            fill: value of padding.

        Returns:
            [b, s/cp] or [b, s/cp, ...], with b = 1 for a concatenation of samples; `x` itself if
            rows are not split.

        Raises:
            ValueError: rows of another length, or not on the host.
        """
        if self.sharding is None or self.columns is None:
            return x
        if x.ndim < 2:
            raise ValueError(f"rows of shape {tuple(x.shape)}: give [b, {self.sharding.length}]")
        if self.sample_length is not None:
            samples = self.sharding.length // self.sample_length
            _check("samples", x, (samples, self.sample_length, *x.shape[2:]))
            x = x.flatten(0, 1).unsqueeze(0)  # [1, s, ...]
        _check("rows", x, (x.shape[0], self.sharding.length, *x.shape[2:]))
        if self.sharding.size == 1 and not self.sharding.is_padded:
            return x
        return take_columns(x, self.columns, fill)

    def blocks(
        self, key_rank: int | None, window: int | None = None, *, joined: bool = False
    ) -> Blocks:
        """Return the blocks of this rank's queries and one rank's keys, computed once.

        Args:
            key_rank: the rank of the keys; None is the keys of whole rows in the order of the row,
                as `to_rows` returns them.
            window: a query at row index q sees only keys k with q - k < window.
            joined: see `attention_blocks`.

        Raises:
            ValueError: a layout without a sharding, a rank that does not exist, or a window below
                1.
        """
        sharding = self._require_sharding()
        return self._plan(
            ("rank", key_rank, window, joined),
            lambda: sharding.runs(self.rank),
            lambda: _whole(sharding) if key_rank is None else sharding.runs(key_rank),
        )

    def row_blocks(self, window: int | None = None) -> Blocks:
        """Return the blocks of all queries and all keys of whole rows, in the order of the row.

        Args:
            window: a query at row index q sees only keys k with q - k < window.

        Raises:
            ValueError: a layout without a sharding, or a window below 1.
        """
        sharding = self._require_sharding()
        return self._plan(
            ("rows", window, False), lambda: _whole(sharding), lambda: _whole(sharding)
        )

    def to_rows(self, gathered: torch.Tensor) -> torch.Tensor:
        """Bring tokens gathered from all ranks into the order of the row, without padding.

        Args:
            gathered: [cp · s/cp, ...], the tokens of rank 0, then of rank 1, ...

        Returns:
            [s, ...]; `gathered` itself if it has this order.
        """
        self._check_length(gathered, self._require_sharding().padded[-1])
        return gathered if self.inverse is None else gathered.index_select(0, self.inverse)

    def to_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring whole rows into the order of the ranks, to scatter them: undo `to_rows`.

        Args:
            rows: [s, ...] in the order of the row.

        Returns:
            [cp · s/cp, ...], zero for padding; `rows` itself if it has this order.
        """
        sharding = self._require_sharding()
        self._check_length(rows, sharding.length)
        if self.inverse is None:
            return rows
        shape = (sharding.padded[-1], *rows.shape[1:])
        gathered = rows.new_zeros(shape) if sharding.is_padded else rows.new_empty(shape)
        return gathered.index_copy_(0, self.inverse, rows)

    def _require_sharding(self) -> SequenceSharding:
        if self.sharding is not None:
            return self.sharding
        problem = "this layout is not sharded"
        if self.document_ids is not None:
            problem += (
                ", and it knows documents only by their ids: blocks need their "
                "boundaries (cu_seqlens)"
            )
        raise ValueError(f"{problem}; make it with SequenceLayout.make, on the host")

    def _require_documents(self, batch: int) -> Sequence[Sequence[int]]:
        """Return the cumulative lengths of the documents of each row, [0, ..., s].

        Raises:
            ValueError: a layout of another number of rows, or with documents known only by ids.
        """
        if self.rows not in (None, batch):
            raise ValueError(
                f"{batch} rows of tokens, but the layout has {self.rows}: make the "
                "layout for all rows"
            )
        if self.documents is None and self.document_ids is not None:
            raise ValueError(
                "this layout knows documents only by their ids: a recurrence needs their "
                "boundaries (cu_seqlens), or its state would carry over into the next document; "
                "make it with SequenceLayout.make, on the host"
            )
        if self.documents is not None:
            return self.documents
        length = self.positions.shape[0] if self.sharding is None else self.sharding.length
        return ((0, length),) * batch

    def _plan(
        self,
        key: tuple,
        queries: Callable[[], Sequence[TokenRange]],
        keys: Callable[[], Sequence[TokenRange]],
    ) -> Blocks:
        """Return cached blocks; `key` is (name, ..., window, joined)."""
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
            raise ValueError(
                f"{x.shape[0]} tokens in {tuple(x.shape)}, but the layout has {length}"
            )


def _whole(sharding: SequenceSharding) -> tuple[TokenRange, ...]:
    """Return a whole row as one token range."""
    return (TokenRange(0, sharding.length, 0),)


def _check(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor is on the host and of this shape."""
    if tensor is None:
        return
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} {tuple(tensor.shape)} must be {shape}: all columns of each row")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} are on {tensor.device}: pass them on the host, because reading them back "
            "would block"
        )


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device` from pinned memory, without synchronising the host."""
    return pin(tensor.contiguous(), device).to(device, non_blocking=True)


def _check_sequences(documents: Sequence[Sequence[int]], sharding: SequenceSharding) -> None:
    """Raise ValueError if a document is in two separately split sequences."""
    for row, bounds in enumerate(documents):
        crossed = sorted(set(sharding.bounds) - set(bounds))
        if crossed:
            raise ValueError(
                f"a document of row {row} continues across position {crossed[0]}, where "
                "cu_seqlens separates sequences: pass the row as one sequence, or end the "
                "document there"
            )


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """Context parallelism of a model.

    Args:
        group: cp.
        engine: attention engine: "p2p", "all_gather", "a2a", or "auto" for the least communication.
        linear_mode: mode of recurrent mixers: "headwise", "segments", or "auto" for the least
            communication.
        cpu_dtype: dtype of matrix products of 16-bit operands on a CPU, see `ops.backend_choice`.
    """

    group: Group = field(default_factory=lambda: Group.single("cp"))
    engine: str = AUTO
    linear_mode: str = AUTO
    cpu_dtype: torch.dtype | None = None
