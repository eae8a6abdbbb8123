# SPDX-License-Identifier: Apache-2.0
"""Attention block by block, merged by the log-sum-exp, and its backward pass.

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

(online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867). A block is one call of the op.
Given the complete out and lse, backward is a sum over blocks.

A query sees the keys of its own document, under a causal mask none after itself, in a window none
too far before itself. The visible pairs of two ranks' tokens are divided into squares on the
diagonal, where the order within the block matters, and rectangles, where it does not. So a row that
is split over ranks or packed with documents needs no mask but the op's own, and no pair of two
documents is ever computed.
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

from megatron.core.context_parallel.cut import Run
from megatron.core.ops.attention import Mask, functions_of, reference
from megatron.core.ops.backend_choice import accumulation_dtype, matmul_dtype
from megatron.core.ops.dropout import AttentionDropout


@dataclass(frozen=True, order=True)
class AttentionBlock:
    """Rows, queries and keys of which every pair is visible, but for order and window.

    Args:
        row0, row1: rows of the batch, [row0, row1).
        q0, q1: local indices of the queries, [q0, q1).
        k0, k1: local indices of the keys, [k0, k1).
        q_place, k_place: place of the first query and of the first key; the others follow.
        causal: whether a query sees no key after itself; the block is then a square on the
            diagonal. False: every pair is visible but for the window.
    """

    row0: int
    row1: int
    q0: int
    q1: int
    k0: int
    k1: int
    q_place: int
    k_place: int
    causal: bool


class Visits(NamedTuple):
    """Where the blocks of one attention are in a tensor [s, b, ...], in their order.

    Args:
        places: (row0, row1, first, last) of each block.
        is_first: of each block, whether none before overlaps it: its result is stored, not added.
        covers: whether those cover the tensor; where they do not, it must start from zeros.
    """

    places: tuple[tuple[int, int, int, int], ...]
    is_first: tuple[bool, ...]
    covers: bool


class Blocks(tuple[AttentionBlock, ...]):
    """Blocks of one attention, and what all layers need to know of them, found once.

    Args:
        blocks: in the order in which they are attended.
    """

    def __init__(self, blocks: Iterable[AttentionBlock] = ()) -> None:
        del blocks  # the tuple has them already
        #: How often visits were worked out.
        self.visits_made = 0
        self._visits: dict[tuple[str, int, int], Visits] = {}

    @staticmethod
    def of(blocks: Sequence[AttentionBlock]) -> Blocks:
        """Return the blocks themselves where they are Blocks already."""
        return blocks if isinstance(blocks, Blocks) else Blocks(blocks)

    def visits(self, side: Literal["query", "key"], rows: int, length: int) -> Visits:
        """Return where the blocks are in all queries or all keys; work it out the first time.

        Args:
            side: whose tensors, values being keys.
            rows: b.
            length: s, of the queries or the keys.
        """
        key = (side, rows, length)
        if key not in self._visits:
            is_query = side == "query"
            ranges = [(x.row0, x.row1, *((x.q0, x.q1) if is_query else (x.k0, x.k1))) for x in self]
            self._visits[key] = _visits(ranges, rows, length)
            self.visits_made += 1
        return self._visits[key]


def attention_blocks(
    queries: Sequence[Run],
    keys: Sequence[Run],
    *,
    rows: int,
    documents: Sequence[Sequence[int]] | None = None,
    causal: bool = True,
    window: int | None = None,
    joined: bool = False,
) -> Blocks:
    """Return blocks that hold every visible (row, query, key) once; none without a visible pair.

    Args:
        queries, keys: what the two ranks hold.
        rows: b.
        documents: of each row, where its documents begin and end by place, [0, ..., s]; None is
            one document a row. Rows next to each other that agree share blocks.
        causal: a query sees no key after itself.
        window: a query at place q sees only keys k with q - k < window.
        joined: let rectangles of several runs grow together. `q_place` and `k_place` then hold for
            the first query and key only: for an op that does not count in places, so without
            window and without dropout.

    Raises:
        ValueError: documents that do not cover the rows, or options that do not fit.
    """
    _check(rows, documents, window, joined)
    queries, keys = _merged(queries), _merged(keys)
    end = max((run.end for run in (*queries, *keys)), default=0)
    blocks: list[AttentionBlock] = []
    row0 = 0
    for bounds, same in groupby(_borders(rows, documents, end)):
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
class _TokenRange:
    """Tokens of one document that follow each other on their rank and in their row."""

    start: int
    length: int
    place: int

    @property
    def end(self) -> int:
        return self.place + self.length

    def between(self, start: int, end: int) -> _TokenRange:
        """Return the tokens of it at places [first, end); its length is not positive if none."""
        start, end = max(start, self.place), min(end, self.end)
        return _TokenRange(self.start + start - self.place, end - start, start)


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with those in one that follow each other: documents decide, not sequences."""
    merged: list[Run] = []
    for run in runs:
        previous = merged[-1] if merged else None
        if previous is not None and (previous.stop, previous.end) == (run.start, run.place):
            merged[-1] = replace(previous, length=previous.length + run.length)
        else:
            merged.append(run)
    return merged


def _split(runs: Sequence[Run], bounds: Sequence[int]) -> dict[int, list[_TokenRange]]:
    """Return the parts of the runs in each document, by its number."""
    ranges: dict[int, list[_TokenRange]] = {}
    for run in runs:
        run_range = _TokenRange(run.start, run.length, run.place)
        document = bisect_right(bounds, run.place) - 1
        for number in range(document, bisect_left(bounds, run.end)):
            token_range = run_range.between(bounds[number], bounds[number + 1])
            ranges.setdefault(number, []).append(token_range)
    return ranges


def _pairs(
    queries: dict[int, list[_TokenRange]], keys: dict[int, list[_TokenRange]]
) -> Iterator[tuple[_TokenRange, _TokenRange]]:
    """Yield every pair of parts of one document."""
    for number, query_ranges in queries.items():
        for query in query_ranges:
            for key in keys.get(number, ()):
                yield query, key


def _visible(
    query: _TokenRange, key: _TokenRange
) -> Iterator[tuple[_TokenRange, _TokenRange, bool]]:
    """Yield a causal square where queries and keys are the same tokens, and the rectangles left.

    With queries that begin before the keys, or keys that end after the queries, those see nothing.
    """
    start, end = max(query.place, key.place), min(query.end, key.end)
    if start >= end:  # no token in common: all of the keys are before the queries, or none
        if key.end <= query.place:
            yield query, key, False
        return
    if end - start == 1:  # one token in common: the keys after it are left out, the rest is whole
        yield query.between(start, query.end), key.between(key.place, end), False
        return
    yield query.between(start, end), key.between(start, end), True
    yield query.between(start, query.end), key.between(key.place, start), False
    yield query.between(end, query.end), key.between(start, end), False


def _reached(query: _TokenRange, key: _TokenRange, window: int) -> tuple[_TokenRange, _TokenRange]:
    """Leave out the queries that are too far after all keys, and the keys none of them reaches."""
    query = query.between(query.place, key.end - 1 + window)
    return query, key.between(query.place - window + 1, key.end)


def _block(
    rows: tuple[int, int], query: _TokenRange, key: _TokenRange, causal: bool
) -> AttentionBlock:
    return AttentionBlock(
        *rows,
        query.start,
        query.start + query.length,
        key.start,
        key.start + key.length,
        query.place,
        key.place,
        causal,
    )


def _join(blocks: list[AttentionBlock], low: str, high: str) -> list[AttentionBlock]:
    """Let blocks grow over those that go on where they end in [low, high) and agree in the rest.

    Squares only grow over rows: no two share queries or keys. Places are not compared along the
    range that grows.
    """
    ignored = {"k0": "k_place", "q0": "q_place"}.get(low)
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


def _borders(
    rows: int, documents: Sequence[Sequence[int]] | None, end: int
) -> list[tuple[int, ...]]:
    """Return where each row's documents begin and end, empty ones left out."""
    if documents is None:
        return [(0, end)] * rows
    row_bounds = []
    for row, bounds in enumerate(documents):
        document_bounds = tuple(int(x) for x in bounds)
        decreases = any(b < a for a, b in pairwise(document_bounds))
        if not document_bounds or document_bounds[0] != 0 or decreases or document_bounds[-1] < end:
            raise ValueError(
                f"documents of row {row} are {list(document_bounds)}: they must rise from 0 to the "
                f"row's end, at least {end}"
            )
        row_bounds.append(tuple(dict.fromkeys(document_bounds)))
    return row_bounds


def _visits(ranges: Sequence[tuple[int, int, int, int]], rows: int, length: int) -> Visits:
    """Return the visits of blocks at (row0, row1, first, last) of a tensor [length, rows, ...]."""
    seen = np.zeros((rows, length), dtype=bool)
    is_first, covered = [], 0
    for row0, row1, start, stop in ranges:
        region = seen[row0:row1, start:stop]
        is_first.append(not region.any())
        covered += region.size if is_first[-1] else 0
        region[:] = True
    return Visits(tuple(ranges), tuple(is_first), covered == seen.size)


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
        raise ValueError(f"documents of {len(documents)} rows for {rows} rows: give one of each")
    if window is not None and window < 1:
        raise ValueError(f"window {window}: use at least 1, or None for no window")
    if window is not None and joined:
        raise ValueError(f"joined blocks have no places for a window of {window}: leave one out")


#: On a CPU one more block costs what a mask by document ids costs for this many (query, key, head)
#: of causal rows. Measured on one thread, forward and backward: 0.17 ms a block, the two equal at
#: 3,500 to 5,100 (128 to 1024 tokens, 4 and 8 heads of 16 to 64 features: documents of 15 tokens in
#: rows of 128, of 4 in rows of 256 with 8 heads); twice that, as masks gain more from threads.
PAIRS_WORTH_A_BLOCK = 10_000


class _Rule(NamedTuple):
    """What all blocks of an attention share."""

    scale: float
    window: int | None
    dropout: AttentionDropout | None
    cpu_dtype: torch.dtype | None


def worth_blocks(count: int, *, rows: int, length: int, heads: int) -> bool:
    """Say whether causal attention on a CPU is faster in blocks than with a mask by document ids.

    Documents of 64 tokens in rows of 256 to 1024 are 3 to 9 times faster in blocks.

    Args:
        count: of blocks: of documents, where rows are whole.
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
    window: int | None = None,
    dropout: AttentionDropout | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys of all blocks; a query that is in none gets out 0 and lse -inf.

    Args:
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        blocks: which queries see which keys, every pair in one block; `Blocks` keep what is worked
            out of them for the next call.
        scale: factor on the logits.
        window: a query at place q sees only keys k with q - k < window.
        dropout: drops probabilities, by place.
        into: a former result over other keys; this one is merged into it, in place.
        cpu_dtype: what a CPU multiplies 16-bit operands in, see `ops.backend_choice.matmul_dtype`.

    Returns:
        (out [s_q, b, n, d], lse [b, n, s_q]), both fp32 (fp64 for fp64): see `finish`.
    """
    sum_dtype = accumulation_dtype(query.dtype)
    # Converted once here, not in every block.
    query, key, value = (x.to(matmul_dtype(x, cpu_dtype)) for x in (query, key, value))
    rule = _Rule(scale, window, dropout, cpu_dtype)
    if into is None and len(blocks) == 1 and _holds_all(blocks[0], query):
        return _block_forward(query, key, value, blocks[0], rule)
    if into is None:
        _, is_first, is_full = Blocks.of(blocks).visits("query", query.shape[1], query.shape[0])
        out = torch.empty(query.shape, dtype=sum_dtype, device=query.device)
        lse = torch.empty((*query.shape[1:3], query.shape[0]), dtype=sum_dtype, device=query.device)
        if not is_full:
            out.zero_()
            lse.fill_(-math.inf)
    else:
        is_first, (out, lse) = (False,) * len(blocks), into
    for block, is_first_visit in zip(blocks, is_first, strict=True):
        block_out, block_lse = _block_forward(query, key, value, block, rule)
        rows, queries = slice(block.row0, block.row1), slice(block.q0, block.q1)
        whole, whole_lse = out[queries, rows], lse[rows, :, queries]
        if is_first_visit:
            whole.copy_(block_out)
            whole_lse.copy_(block_lse)
        else:
            merge(whole, whole_lse, block_out, block_lse)
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
    window: int | None = None,
    dropout: AttentionDropout | None = None,
    wide: bool = False,
    cpu_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Differentiate the attention to the keys of these blocks; sums over blocks are fp32.

    Args:
        grad_out: [s_q, b, n, d].
        query: [s_q, b, n, d].
        key: [s_k, b, g, d].
        value: [s_k, b, g, d].
        out: [s_q, b, n, d], the complete output: of all blocks of all ranks, and of sinks.
        lse: [b, n, s_q], the complete log-sum-exp.
        blocks: those of the forward pass that lie between these queries and keys.
        scale, window, dropout, cpu_dtype: those of the forward pass.
        wide: return the sums as they are, in fp32 (fp64 for fp64), to be added to others.

    Returns:
        (dq, dk, dv), shaped like query, key and value, in their dtype or wide.
    """
    kind = accumulation_dtype(query.dtype) if wide else query.dtype
    shortest = min((block.q1 - block.q0 for block in blocks), default=0)
    if window is not None or dropout is not None:
        shortest = 0  # by chunks, which compute in fp32
    dtype = reference.backward_dtype(query, shortest, cpu_dtype)
    fast = [x.to(dtype) for x in (grad_out, query, key, value, out)]
    rule = _Rule(scale, window, dropout, cpu_dtype)
    if len(blocks) == 1 and _holds_all(blocks[0], query, key):
        return tuple(x.to(kind) for x in _block_backward(fast, lse, blocks[0], rule))
    blocks = Blocks.of(blocks)
    sums, visits = [], []
    for x, side in ((query, "query"), (key, "key"), (value, "key")):
        visits.append(blocks.visits(side, x.shape[1], x.shape[0]))
        make = torch.empty if visits[-1].covers else torch.zeros
        sums.append(make(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device))
    for index, block in enumerate(blocks):
        block_grads = _block_backward(fast, lse, block, rule)
        for total, block_grad, visit in zip(sums, block_grads, visits, strict=True):
            row0, row1, start, stop = visit.places[index]
            target = total[start:stop, row0:row1]
            target.copy_(block_grad) if visit.is_first[index] else target.add_(block_grad)
    return tuple(x.to(kind) for x in sums)


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Merge attention to other keys into (out, lse), in place; exact where either saw no key.

    Args:
        out: [s_q, b, n, d], fp32 or fp64.
        lse: [b, n, s_q], -inf where nothing was seen; out is 0 there.
        other: [s_q, b, n, d], to be merged.
        other_lse: [b, n, s_q].
    """
    # exp(lse_i - total) by the difference of the two, which keeps its digits where both are large.
    # What saw nothing on either side has no difference, and no output to weigh.
    ahead = (lse - other_lse).nan_to_num_(0.0, math.inf, -math.inf)  # [b, n, s_q]
    torch.logaddexp(lse, other_lse, out=lse)
    keep, take = (x.permute(2, 0, 1)[..., None] for x in (ahead.sigmoid(), ahead.neg_().sigmoid_()))
    # Not lerp: it is one pass and 15 times slower than these two (torch 2.13, [1024, 4, 8, 64]).
    out.mul_(keep).addcmul_(other, take)


def finish(
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let sinks [n] take their probability, once, after all keys; return out in `dtype`, and lse.

    Their gradient is `ops.attention.reference.sink_gradient` of the complete out and lse.
    """
    if sinks is not None:
        out, lse = reference.add_sinks(out, lse, sinks)
    return out.to(dtype), lse


def _block_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: AttentionBlock,
    rule: _Rule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of one block, fp32 or fp64."""
    dropout = rule.dropout
    rows, keys = slice(block.row0, block.row1), slice(block.k0, block.k1)
    tensors = (query[block.q0 : block.q1, rows], key[keys, rows], value[keys, rows])
    mask, sum_dtype = _mask(block, rule), accumulation_dtype(query.dtype)
    compute, _ = functions_of(*tensors[:2], mask, dropout=dropout)
    if compute is not reference.attention_forward:
        return compute(*tensors, None, rule.scale, mask, dtype=sum_dtype)
    return reference.attention_forward(
        *tensors,
        None,
        rule.scale,
        mask,
        _of_block(dropout, block),
        dtype=sum_dtype,
        cpu_dtype=rule.cpu_dtype,
    )


def _block_backward(
    tensors: Sequence[torch.Tensor],
    lse: torch.Tensor,
    block: AttentionBlock,
    rule: _Rule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (dq, dk, dv) of one block from all of (grad_out, query, key, value, out) and lse."""
    dropout = rule.dropout
    rows = slice(block.row0, block.row1)
    queries, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
    spans = (queries, queries, keys, keys, queries)
    block_tensors = [x[span, rows] for x, span in zip(tensors, spans, strict=True)]
    block_tensors.append(lse[rows, :, queries])
    mask = _mask(block, rule)
    _, differentiate = functions_of(*block_tensors[1:3], mask, dropout=dropout)
    if differentiate is not reference.attention_backward:
        return differentiate(*block_tensors, scale=rule.scale, mask=mask)
    return reference.attention_backward(
        *block_tensors,
        scale=rule.scale,
        mask=mask,
        dropout=_of_block(dropout, block),
        cpu_dtype=rule.cpu_dtype,
    )


def _mask(block: AttentionBlock, rule: _Rule) -> Mask:
    """Return the op's rule of one block, without a window that hides none of its pairs.

    Dropout counts in places of a sample, which has all documents of a block, and so all its tokens.
    """
    window, dropout = rule.window, rule.dropout
    sample_start = (
        _sample(dropout, block) * (dropout.sample_length or 0) if dropout is not None else 0
    )
    if window is not None:
        farthest = block.q_place + block.q1 - block.q0 - 1 - block.k_place
        window = window if farthest >= window else None
    return Mask(
        causal=block.causal,
        window=window,
        query_start=block.q_place - sample_start,
        key_start=block.k_place - sample_start,
    )


def _of_block(dropout: AttentionDropout | None, block: AttentionBlock) -> AttentionDropout | None:
    """Return the dropout of a block's rows of the batch, or of the sample that it is of."""
    if dropout is None:
        return None
    samples = slice(block.row0, block.row1)
    if dropout.sample_length is not None:
        samples = slice(_sample(dropout, block), _sample(dropout, block) + 1)
    return replace(dropout, sample_ids=dropout.sample_ids[samples], sample_length=None)


def _sample(dropout: AttentionDropout, block: AttentionBlock) -> int:
    """Return the number of the sample in its row that a block is of."""
    return 0 if dropout.sample_length is None else block.q_place // dropout.sample_length


def _holds_all(block: AttentionBlock, query: torch.Tensor, key: torch.Tensor | None = None) -> bool:
    """Say whether a block holds all queries [s_q, b, ...] and, if given, all keys [s_k, b, ...]."""
    keys = (block.k0, block.k1) if key is None else (0, key.shape[0])
    whole = AttentionBlock(
        0, query.shape[1], 0, query.shape[0], *keys, block.q_place, block.k_place, False
    )
    return replace(block, causal=False) == whole
