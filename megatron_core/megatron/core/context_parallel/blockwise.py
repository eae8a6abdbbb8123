# SPDX-License-Identifier: Apache-2.0
"""Attention block by block, merged by the log-sum-exp, and its backward pass.

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

(online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867). A block is one call of the op.
Given the complete out and lse, backward is a sum over blocks.

A query sees the keys of its own document: with a causal mask no later key, with a window no key
before the window. The visible pairs of two ranks' tokens are divided into causal squares on the
diagonal and full rectangles. So a row that is split over ranks or packed with documents needs only
the masks of the attention op, and no pair across documents is computed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch

from megatron.core.context_parallel.sequence_sharding import TokenRange
from megatron.core.ops.attention import Mask, cpu, functions_of
from megatron.core.ops.backend_choice import accumulation_dtype, matmul_dtype
from megatron.core.ops.dropout import AttentionDropout


@dataclass(frozen=True, order=True)
class AttentionBlock:
    """A block of queries and keys: every pair is visible, except by causality and window.

    Args:
        row0, row1: rows of the batch, [row0, row1).
        q0, q1: local indices of the queries, [q0, q1).
        k0, k1: local indices of the keys, [k0, k1).
        q_row_start, k_row_start: row index of the first query and of the first key; the other
            tokens are contiguous.
        causal: a query sees no later key, and the block is a square on the diagonal. False: every
            pair is visible, except by the window.
    """

    row0: int
    row1: int
    q0: int
    q1: int
    k0: int
    k1: int
    q_row_start: int
    k_row_start: int
    causal: bool


class TileList(NamedTuple):
    """The tiles of a tensor [s, b, ...] that the blocks of one attention read or write, in order.

    Args:
        tiles: (row0, row1, start, stop) of each block, rows [row0, row1), tokens [start, stop).
        is_first: for each block, no earlier tile overlaps its tile: its result is stored, not
            added.
        covers: the first tiles cover the tensor; otherwise it must be initialised with zeros.
    """

    tiles: tuple[tuple[int, int, int, int], ...]
    is_first: tuple[bool, ...]
    covers: bool


class Blocks(tuple[AttentionBlock, ...]):
    """Blocks of one attention with their tile lists, computed once for all layers.

    Args:
        blocks: blocks in the order of computation.
    """

    def __init__(self, blocks: Iterable[AttentionBlock] = ()) -> None:
        del blocks  # the tuple has them already
        #: Number of computed tile lists.
        self.num_tile_lists = 0
        self._tile_lists: dict[tuple[str, int, int], TileList] = {}

    @staticmethod
    def of(blocks: Sequence[AttentionBlock]) -> Blocks:
        """Return `blocks` as Blocks; no copy if they are Blocks already."""
        return blocks if isinstance(blocks, Blocks) else Blocks(blocks)

    def tile_list(self, side: Literal["query", "key"], rows: int, length: int) -> TileList:
        """Return the tiles of the blocks in all queries or all keys, computed once.

        Args:
            side: tensors of queries, or of keys and values.
            rows: b.
            length: s, of the queries or the keys.
        """
        key = (side, rows, length)
        if key not in self._tile_lists:
            is_query = side == "query"
            ranges = [(x.row0, x.row1, *((x.q0, x.q1) if is_query else (x.k0, x.k1))) for x in self]
            self._tile_lists[key] = _tile_list(ranges, rows, length)
            self.num_tile_lists += 1
        return self._tile_lists[key]


def attention_blocks(
    queries: Sequence[TokenRange],
    keys: Sequence[TokenRange],
    *,
    rows: int,
    documents: Sequence[Sequence[int]] | None = None,
    causal: bool = True,
    window: int | None = None,
    joined: bool = False,
) -> Blocks:
    """Return blocks that contain every visible (row, query, key) once, and no empty block.

    Args:
        queries, keys: token ranges of the two ranks.
        rows: b.
        documents: cumulative lengths of the documents of each row, [0, ..., s]; None is one
            document per row. Adjacent rows with equal documents share blocks.
        causal: a query sees no later key.
        window: a query at row index q sees only keys k with q - k < window.
        joined: join adjacent rectangles of several token ranges. `q_row_start` and `k_row_start`
            are then valid for the first query and key only, so neither window nor dropout, which
            depend on row indices, are possible.

    Raises:
        ValueError: documents that do not cover the rows, or options that do not fit.
    """
    _check(rows, documents, window, joined)
    queries, keys = _merged(queries), _merged(keys)
    end = max((run.row_end for run in (*queries, *keys)), default=0)
    blocks: list[AttentionBlock] = []
    row0 = 0
    for bounds, same in groupby(_document_bounds(rows, documents, end)):
        row1 = row0 + len(list(same))
        pairs = _pairs(_split(queries, bounds), _split(keys, bounds))
        for query, key in pairs:
            shapes = _visible(query, key) if causal else [(query, key, False)]
            for q, k, is_square in shapes:
                q, k = (q, k) if window is None or is_square else _reached(q, k, window)
                if min(q.length, k.length) > 0:
                    blocks.append(_block((row0, row1), q, k, is_square))
        row0 = row1
    if rows > 1:
        blocks = _join(blocks, "row0", "row1")
    if joined:
        blocks = _join(_join(blocks, "k0", "k1"), "q0", "q1")
    return Blocks(sorted(blocks))


@dataclass(frozen=True)
class _DocumentRange:
    """Tokens of one document that are contiguous on their rank and in their row."""

    start: int
    length: int
    row_start: int

    @property
    def row_end(self) -> int:
        return self.row_start + self.length

    def between(self, start: int, end: int) -> _DocumentRange:
        """Return the tokens with row indices in [start, end); the length is <= 0 if there are
        none."""
        start, end = max(start, self.row_start), min(end, self.row_end)
        return _DocumentRange(self.start + start - self.row_start, end - start, start)


def _merged(runs: Sequence[TokenRange]) -> list[TokenRange]:
    """Return the token ranges with contiguous ones joined: blocks depend on documents only."""
    merged: list[TokenRange] = []
    for run in runs:
        previous = merged[-1] if merged else None
        if previous is not None and (previous.stop, previous.row_end) == (run.start, run.row_start):
            merged[-1] = replace(previous, length=previous.length + run.length)
        else:
            merged.append(run)
    return merged


def _split(runs: Sequence[TokenRange], bounds: Sequence[int]) -> dict[int, list[_DocumentRange]]:
    """Return the intersections of the token ranges with each document, by its number."""
    ranges: dict[int, list[_DocumentRange]] = {}
    for run in runs:
        run_range = _DocumentRange(run.start, run.length, run.row_start)
        document = bisect_right(bounds, run.row_start) - 1
        for number in range(document, bisect_left(bounds, run.row_end)):
            token_range = run_range.between(bounds[number], bounds[number + 1])
            ranges.setdefault(number, []).append(token_range)
    return ranges


def _pairs(
    queries: dict[int, list[_DocumentRange]], keys: dict[int, list[_DocumentRange]]
) -> Iterator[tuple[_DocumentRange, _DocumentRange]]:
    """Yield every pair of query and key ranges of one document."""
    for number, query_ranges in queries.items():
        for query in query_ranges:
            for key in keys.get(number, ()):
                yield query, key


def _visible(
    query: _DocumentRange, key: _DocumentRange
) -> Iterator[tuple[_DocumentRange, _DocumentRange, bool]]:
    """Yield the causal square of the tokens in both ranges, and the remaining visible rectangles.

    Queries before the first key, and keys after the last query, have no visible pair.
    """
    start, end = max(query.row_start, key.row_start), min(query.row_end, key.row_end)
    if start >= end:  # no token in common: all of the keys are before the queries, or none
        if key.row_end <= query.row_start:
            yield query, key, False
        return
    if end - start == 1:  # one token in common: the keys after it are left out, the rest is whole
        yield query.between(start, query.row_end), key.between(key.row_start, end), False
        return
    yield query.between(start, end), key.between(start, end), True
    yield query.between(start, query.row_end), key.between(key.row_start, start), False
    yield query.between(end, query.row_end), key.between(start, end), False


def _reached(
    query: _DocumentRange, key: _DocumentRange, window: int
) -> tuple[_DocumentRange, _DocumentRange]:
    """Drop the queries whose windows contain no key, and the keys in no window."""
    query = query.between(query.row_start, key.row_end - 1 + window)
    return query, key.between(query.row_start - window + 1, key.row_end)


def _block(
    rows: tuple[int, int], query: _DocumentRange, key: _DocumentRange, causal: bool
) -> AttentionBlock:
    return AttentionBlock(
        *rows,
        query.start,
        query.start + query.length,
        key.start,
        key.start + key.length,
        query.row_start,
        key.row_start,
        causal,
    )


def _join(blocks: list[AttentionBlock], low: str, high: str) -> list[AttentionBlock]:
    """Join blocks that are adjacent in [low, high) and equal in all other fields.

    Squares are joined over rows only, because no two squares share queries or keys. Row indices
    are not compared along the joined range.
    """
    ignored = {"k0": "k_row_start", "q0": "q_row_start"}.get(low)
    names = [n for n in AttentionBlock.__dataclass_fields__ if n not in (low, high, ignored)]
    growing: dict[tuple, AttentionBlock] = {}
    finished: list[AttentionBlock] = []
    for block in sorted(blocks, key=lambda b: vars(b)[low]):
        key = tuple(vars(block)[name] for name in names)
        previous = growing.get(key)
        if previous is not None and vars(previous)[high] == vars(block)[low]:
            growing[key] = replace(previous, **{high: vars(block)[high]})
        else:
            if previous is not None:
                finished.append(previous)
            growing[key] = block
    return finished + list(growing.values())


def _document_bounds(
    rows: int, documents: Sequence[Sequence[int]] | None, end: int
) -> list[tuple[int, ...]]:
    """Return the cumulative lengths of each row's documents, without empty documents."""
    if documents is None:
        return [(0, end)] * rows
    row_bounds = []
    for row, bounds in enumerate(documents):
        document_bounds = tuple(int(x) for x in bounds)
        decreases = any(b < a for a, b in pairwise(document_bounds))
        if not document_bounds or document_bounds[0] != 0 or decreases or document_bounds[-1] < end:
            raise ValueError(
                f"documents of row {row} are {list(document_bounds)}: they must ascend from 0 "
                f"to the end of the row, at least {end}"
            )
        row_bounds.append(tuple(dict.fromkeys(document_bounds)))
    return row_bounds


def _tile_list(ranges: Sequence[tuple[int, int, int, int]], rows: int, length: int) -> TileList:
    """Return the tile list of tiles (row0, row1, start, stop) of a tensor [length, rows, ...]."""
    seen = np.zeros((rows, length), dtype=bool)
    is_first, covered = [], 0
    for row0, row1, start, stop in ranges:
        region = seen[row0:row1, start:stop]
        is_first.append(not region.any())
        covered += region.size if is_first[-1] else 0
        region[:] = True
    return TileList(tuple(ranges), tuple(is_first), covered == seen.size)


def _check(
    rows: int,
    documents: Sequence[Sequence[int]] | None,
    window: int | None,
    joined: bool,
) -> None:
    """Raise ValueError for options that do not fit."""
    if rows < 1:
        raise ValueError(f"attention of {rows} rows: use at least 1")
    if documents is not None and len(documents) != rows:
        raise ValueError(
            f"documents of {len(documents)} rows for {rows} rows: give one entry per row"
        )
    if window is not None and window < 1:
        raise ValueError(f"window {window}: use at least 1, or None for no window")
    if window is not None and joined:
        raise ValueError(
            f"joined blocks do not support a window of {window}: leave one of them out"
        )


#: On a CPU one more block costs what a mask by document ids costs for this many (query, key, head)
#: of causal rows. Measured on one thread, forward and backward: 0.17 ms a block, the two equal at
#: 3,500 to 5,100 (128 to 1024 tokens, 4 and 8 heads of 16 to 64 features: documents of 15 tokens in
#: rows of 128, of 4 in rows of 256 with 8 heads); twice that, as masks gain more from threads.
PAIRS_WORTH_A_BLOCK = 10_000


class _BlockOptions(NamedTuple):
    """Options of all blocks of an attention."""

    scale: float
    softcap: float | None
    window: int | None
    dropout: AttentionDropout | None
    cpu_dtype: torch.dtype | None


def worth_blocks(count: int, *, rows: int, length: int, heads: int) -> bool:
    """Return whether causal attention on a CPU is faster in blocks than with a document mask.

    Documents of 64 tokens in rows of 256 to 1024 are 3 to 9 times faster in blocks.

    Args:
        count: number of blocks, which is the number of documents in whole rows.
        rows: b.
        length: s.
        heads: n/tp.
    """
    return rows * length * (length + 1) // 2 * heads >= PAIRS_WORTH_A_BLOCK * count


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[AttentionBlock],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    dropout: AttentionDropout | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys of all blocks; a query without a block gets out 0 and lse -inf.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        blocks: the visible pairs, each in one block; `Blocks` cache their tile lists for the next
            call.
        scale: factor on the logits.
        softcap: bound of the logits before the mask, see `ops.attention`.
        window: a query at row index q sees only keys k with q - k < window.
        dropout: dropout of probabilities, a function of the row indices.
        into: a result over other keys, into which this result is merged in place.
        cpu_dtype: dtype of matrix products of 16-bit operands on a CPU, see
            `ops.backend_choice.matmul_dtype`.

    Returns:
        (out [s_q, b, n, d], lse [b, n, s_q]), both fp32 (fp64 for fp64): see `finish`.
    """
    sum_dtype = accumulation_dtype(query.dtype)
    # Converted once here, not in every block.
    query, key, value = (x.to(matmul_dtype(x, cpu_dtype)) for x in (query, key, value))
    options = _BlockOptions(scale, softcap, window, dropout, cpu_dtype)
    if into is None and len(blocks) == 1 and _holds_all(blocks[0], query):
        return _block_forward(query, key, value, blocks[0], options)
    if into is None:
        _, is_first, is_full = Blocks.of(blocks).tile_list("query", query.shape[1], query.shape[0])
        out = torch.empty(query.shape, dtype=sum_dtype, device=query.device)
        lse = torch.empty((*query.shape[1:3], query.shape[0]), dtype=sum_dtype, device=query.device)
        if not is_full:
            out.zero_()
            lse.fill_(-math.inf)
    else:
        is_first, (out, lse) = (False,) * len(blocks), into
    for block, is_first_tile in zip(blocks, is_first, strict=True):
        block_out, block_lse = _block_forward(query, key, value, block, options)
        rows, queries = slice(block.row0, block.row1), slice(block.q0, block.q1)
        block_slice, lse_slice = out[queries, rows], lse[rows, :, queries]
        if is_first_tile:
            block_slice.copy_(block_out)
            lse_slice.copy_(block_lse)
        else:
            merge(block_slice, lse_slice, block_out, block_lse)
    return out, lse


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Sequence[AttentionBlock],
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    dropout: AttentionDropout | None = None,
    fp32_sums: bool = False,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate the attention to the keys of `blocks`; sums over blocks are fp32.

    Args:
        grad_out: [s_q, b, n, d].
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        out: [s_q, b, n, d], the complete output: of all blocks of all ranks, and of sinks.
        lse: [b, n, s_q], the complete log-sum-exp.
        blocks: the blocks of the forward pass for the given queries and keys.
        scale, softcap, window, dropout, cpu_dtype: options of the forward pass.
        fp32_sums: return unrounded sums in fp32 (fp64 for fp64), which are added to other sums.

    Returns:
        (dq, dk, dv), shaped like query, key and value, in their dtype or fp32.
    """
    grad_dtype = accumulation_dtype(query.dtype) if fp32_sums else query.dtype
    min_queries = min((block.q1 - block.q0 for block in blocks), default=0)
    if any(option is not None for option in (window, softcap, dropout)):
        min_queries = 0  # by chunks, which compute in fp32
    dtype = cpu.backward_dtype(query, min_queries, cpu_dtype)
    operands = [x.to(dtype) for x in (grad_out, query, key, value, out)]
    options = _BlockOptions(scale, softcap, window, dropout, cpu_dtype)
    if len(blocks) == 1 and _holds_all(blocks[0], query, key):
        dq, dk, dv = _block_backward(operands, lse, blocks[0], options)
        return dq.to(grad_dtype), dk.to(grad_dtype), dv.to(grad_dtype)
    blocks = Blocks.of(blocks)
    sums, tile_lists = [], []
    sides: tuple[Literal["query", "key"], ...] = ("query", "key", "key")
    for x, side in zip((query, key, value), sides, strict=True):
        tile_lists.append(blocks.tile_list(side, x.shape[1], x.shape[0]))
        make = torch.empty if tile_lists[-1].covers else torch.zeros
        sums.append(make(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device))
    for index, block in enumerate(blocks):
        block_grads = _block_backward(operands, lse, block, options)
        for total, block_grad, tile_list in zip(sums, block_grads, tile_lists, strict=True):
            row0, row1, start, stop = tile_list.tiles[index]
            target = total[start:stop, row0:row1]
            target.copy_(block_grad) if tile_list.is_first[index] else target.add_(block_grad)
    return tuple(x.to(grad_dtype) for x in sums)


def merge(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor
) -> None:
    """Merge attention to new keys into (out, lse), in place; exact if either result saw no key.

    Args:
        out: [s_q, b, n, d], fp32 or fp64.
        lse: [b, n, s_q], -inf where nothing was seen; out is 0 there.
        new_out: [s_q, b, n, d], to be merged.
        new_lse: [b, n, s_q].
    """
    # The weight exp(lse - merged lse) is sigmoid(lse - new_lse), which stays accurate if both are
    # large. inf - inf is NaN for queries that saw no key on either side; their outputs are 0.
    lse_difference = (lse - new_lse).nan_to_num_(0.0, math.inf, -math.inf)  # [b, n, s_q]
    torch.logaddexp(lse, new_lse, out=lse)
    weight, new_weight = (
        x.permute(2, 0, 1)[..., None]
        for x in (lse_difference.sigmoid(), lse_difference.neg_().sigmoid_())
    )
    # Not lerp: it is one pass and 15 times slower than these two (torch 2.13, [1024, 4, 8, 64]).
    out.mul_(weight).addcmul_(new_out, new_weight)


def finish(
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add sinks [n] to the softmax, once, after all keys; return out in `dtype`, and lse.

    The gradient of the sinks is `ops.attention.cpu.sink_gradient` of the complete out and
    lse.
    """
    if sinks is not None:
        out, lse = cpu.add_sinks(out, lse, sinks)
    return out.to(dtype), lse


def _block_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: AttentionBlock,
    options: _BlockOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of one block, fp32 or fp64."""
    dropout = options.dropout
    rows, keys = slice(block.row0, block.row1), slice(block.k0, block.k1)
    tensors = (query[block.q0 : block.q1, rows], key[keys, rows], value[keys, rows])
    mask, sum_dtype = _mask(block, options), accumulation_dtype(query.dtype)
    compute, _ = functions_of(*tensors[:2], mask, dropout=dropout)
    if compute is not cpu.attention_forward:
        return compute(*tensors, None, options.scale, mask, dtype=sum_dtype)
    return cpu.attention_forward(
        *tensors,
        None,
        options.scale,
        mask,
        _of_block(dropout, block),
        dtype=sum_dtype,
        cpu_dtype=options.cpu_dtype,
    )


def _block_backward(
    tensors: Sequence[torch.Tensor],
    lse: torch.Tensor,
    block: AttentionBlock,
    options: _BlockOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv) of one block from all of (grad_out, query, key, value, out) and lse."""
    dropout = options.dropout
    rows = slice(block.row0, block.row1)
    queries, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
    spans = (queries, queries, keys, keys, queries)
    block_tensors = [x[span, rows] for x, span in zip(tensors, spans, strict=True)]
    block_tensors.append(lse[rows, :, queries])
    mask = _mask(block, options)
    _, differentiate = functions_of(block_tensors[1], block_tensors[2], mask, dropout=dropout)
    if differentiate is not cpu.attention_backward:
        return differentiate(*block_tensors, scale=options.scale, mask=mask)
    return cpu.attention_backward(
        *block_tensors,
        scale=options.scale,
        mask=mask,
        dropout=_of_block(dropout, block),
        cpu_dtype=options.cpu_dtype,
    )


def _mask(block: AttentionBlock, options: _BlockOptions) -> Mask:
    """Return the mask of one block, without a window if all its pairs are inside the window.

    Row indices count from the start of the sample, as dropout does. A block is in one document, and
    so in one sample.
    """
    window, dropout = options.window, options.dropout
    sample_start = (
        _sample(dropout, block) * (dropout.sample_length or 0) if dropout is not None else 0
    )
    if window is not None:
        farthest = block.q_row_start + block.q1 - block.q0 - 1 - block.k_row_start
        window = window if farthest >= window else None
    return Mask(
        causal=block.causal,
        window=window,
        softcap=options.softcap,
        query_start=block.q_row_start - sample_start,
        key_start=block.k_row_start - sample_start,
    )


def _of_block(dropout: AttentionDropout | None, block: AttentionBlock) -> AttentionDropout | None:
    """Return the dropout of a block's rows of the batch, or of its sample."""
    if dropout is None:
        return None
    samples = slice(block.row0, block.row1)
    if dropout.sample_length is not None:
        samples = slice(_sample(dropout, block), _sample(dropout, block) + 1)
    return replace(dropout, sample_ids=dropout.sample_ids[samples], sample_length=None)


def _sample(dropout: AttentionDropout, block: AttentionBlock) -> int:
    """Return the number of a block's sample in its row."""
    return 0 if dropout.sample_length is None else block.q_row_start // dropout.sample_length


def _holds_all(block: AttentionBlock, query: torch.Tensor, key: torch.Tensor | None = None) -> bool:
    """Return whether a block has all queries [s_q, b, ...] and, if `key` is set, all keys."""
    keys = (block.k0, block.k1) if key is None else (0, key.shape[0])
    whole = AttentionBlock(
        0, query.shape[1], 0, query.shape[0], *keys, block.q_row_start, block.k_row_start, False
    )
    return replace(block, causal=False) == whole
