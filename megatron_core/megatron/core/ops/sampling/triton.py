# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens in Triton: a program a row walks over its scores, which stay in the cache.

Top-k and top-p are searches for the score at the edge of the set: bits of fp32 numbers of one sign
are ordered as the numbers are, and a walk over the row halves the range of the edge twice. What a
walk adds are counts or whole numbers, in int64: exact in any order, so rows of equal scores and
parameters get equal tokens wherever they stand in a batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches
from megatron.core.ops.sampling.reference import ScoreChange, TokenFilter, on_device

# BLOCK: entries that a program changes at once.
CHANGE = Launches("change_scores", {"BLOCK": 512, "num_warps": 4})
# BLOCK: scores that a program looks at at once.
SAMPLE = Launches("choose_tokens", {"BLOCK": 4096, "num_warps": 16})
TOP = Launches("most_probable", {"BLOCK": 4096, "num_warps": 16})


@triton.jit
def change_scores_kernel(
    scores_ptr,
    rows_ptr,
    numbers_ptr,
    bounds_ptr,
    tokens_ptr,
    values_ptr,
    scores_stride_row,
    changes,
    BLOCK: tl.constexpr,
):
    """Apply one `ScoreChange`: biases, then the repetition penalty, then the other penalties.

    Entries lie kind by kind and change by change; those of kind n and change i end where those of
    the next begin. A token has one entry of each kind at most.
    """
    change = tl.program_id(0)
    scores_ptr += tl.load(rows_ptr + change).to(tl.int64) * scores_stride_row
    repetition = tl.load(numbers_ptr + change)
    frequency = tl.load(numbers_ptr + changes + change)
    presence = tl.load(numbers_ptr + 2 * changes + change)
    for kind in tl.static_range(3):
        begin = tl.load(bounds_ptr + kind * changes + change)
        end = tl.load(bounds_ptr + kind * changes + change + 1)
        for start in range(begin, end, BLOCK):
            entries = start + tl.arange(0, BLOCK)
            inside = entries < end
            places = scores_ptr + tl.load(tokens_ptr + entries, mask=inside, other=0)
            x = tl.load(places, mask=inside, other=0.0)
            if kind == 1:
                # A penalty near 0 must not make a score infinite.
                x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
                x = tl.minimum(x, 3.4028234663852886e38)
            else:
                value = tl.load(values_ptr + entries, mask=inside, other=0.0)
                if kind == 0:
                    x += value
                else:
                    x -= frequency * value + presence
            tl.store(places, x, mask=inside)
        tl.debug_barrier()  # threads of the next kind read what others have written here


def change_scores_(scores: torch.Tensor, changes: Mapping[int, ScoreChange]) -> None:
    """Apply biases and penalties as `ops.sampling.change_scores_` does: one copy to the device and
    one launch."""
    every = list(changes.values())
    kinds = (
        [(change.biases, change.biases.values()) for change in every],
        [(change.repeated, (0,) * len(change.repeated)) for change in every],
        [(change.counts, change.counts.values()) for change in every],
    )
    lengths = [len(tokens) for kind in kinds for tokens, _ in kind]
    numbers = [
        *(change.repetition for change in every),
        *(change.frequency for change in every),
        *(change.presence for change in every),
    ]
    values = [value for kind in kinds for _, values in kind for value in values]
    tokens = [token for kind in kinds for ids, _ in kind for token in ids]
    whole = [*changes, 0, *itertools.accumulate(lengths), *tokens]
    # fp32 and int32 in one copy, four bytes each.
    device = scores.device
    host = torch.empty(len(numbers) + len(values) + len(whole), pin_memory=device.type == "cuda")
    parts = (len(numbers), len(values), len(whole))
    for part, kind in zip(host.split(parts), (numbers, values, whole), strict=True):
        dtype = torch.int32 if kind is whole else torch.float32
        part.view(dtype).copy_(torch.tensor(kind, dtype=dtype))
    numbers, values, whole = host.to(device, non_blocking=True).split(parts)
    rows, bounds, tokens = whole.view(torch.int32).split(
        (len(every), len(lengths) + 1, len(tokens))
    )
    change_scores_kernel[(len(every),)](
        scores,
        rows,
        numbers,
        bounds,
        tokens,
        values,
        scores.stride(0),
        len(every),
        **CHANGE.pick(scores),
    )


@triton.jit
def scaled_scores(row_ptr, columns, size, best, temperature):
    """Return (scores - best) / temperature of some columns, -inf beyond the last."""
    scores = tl.load(row_ptr + columns, mask=columns < size, other=float("-inf"))
    return tl.div_rn(scores - best, temperature)


@triton.jit
def finite_or_zero(x):
    """Return x, 0 for -inf: columns that have seen -inf alone have the sum 0."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def distances(scaled):
    """Return int32 that are ordered as the scaled scores are, 0 for the best."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def weights_of(scaled, total):
    """Return floor(2^52 exp(x) / total) as int64, 0 where that is not a number."""
    probability = tl.exp(scaled) / total
    weight = (probability.to(tl.float64) * 4503599627370496.0).to(tl.int64)
    return tl.where(probability >= 0.0, weight, 0)


@triton.jit
def edge_of(
    row_ptr, size, best, temperature, total, limit, last, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the least distance up to which tokens add up to `limit`.

    Args:
        total: of exp(x), with WEIGHTS.
        limit: int64, positive, and reached by `last`.
        last: int32, the distance of the last token that counts.
        WEIGHTS: add up weights, else count tokens.
    """
    low = tl.full([], -1, tl.int32)  # does not reach the limit
    high = last
    while high - low > 1:
        quarter = (high - low) // 4
        one, two, three = low + quarter, low + (high - low) // 2, high - quarter
        below_one = tl.zeros([BLOCK], tl.int64)
        below_two = tl.zeros([BLOCK], tl.int64)
        below_three = tl.zeros([BLOCK], tl.int64)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            scaled = scaled_scores(row_ptr, columns, size, best, temperature)
            distance = distances(scaled)
            if WEIGHTS:
                value = weights_of(scaled, total)
            else:
                value = (columns < size).to(tl.int64)
            below_one += tl.where(distance <= one, value, 0)
            below_two += tl.where(distance <= two, value, 0)
            below_three += tl.where(distance <= three, value, 0)
        reaches_one = tl.sum(below_one) >= limit
        reaches_two = tl.sum(below_two) >= limit
        reaches_three = tl.sum(below_three) >= limit
        low = tl.where(
            reaches_one, low, tl.where(reaches_two, one, tl.where(reaches_three, two, three))
        )
        high = tl.where(
            reaches_one, one, tl.where(reaches_two, two, tl.where(reaches_three, three, high))
        )
    return high


@triton.jit
def draw_token(row_ptr, size, best, temperature, top_k, top_p, least, draw, BLOCK: tl.constexpr):
    """Return the token of a row whose temperature is not 0, int64; see `ops.sampling`.

    Args:
        least: log(min-p).
    """
    infinity = tl.full([], 0x7F800000, tl.int32)
    last = infinity
    if (top_k > 0) & (top_k < size):
        last = edge_of(row_ptr, size, best, temperature, 1.0, top_k, infinity, False, BLOCK)

    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scaled = scaled_scores(row_ptr, columns, size, best, temperature)
        sums += tl.where(distances(scaled) <= last, tl.exp(scaled), 0.0)
    total = tl.sum(sums)

    weights = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scaled = scaled_scores(row_ptr, columns, size, best, temperature)
        weights += tl.where(distances(scaled) <= last, weights_of(scaled, total), 0)
    whole = tl.sum(weights)

    edge, tied_kept = last, tl.full([], 0x7FFFFFFF, tl.int64)
    if (top_p < 1.0) & (whole > 0):
        # Sums are whole: they are below the limit where they are below the next whole number.
        limit = tl.ceil(top_p * whole.to(tl.float64)).to(tl.int64)
        edge = edge_of(row_ptr, size, best, temperature, total, limit, last, True, BLOCK)
        before = tl.zeros([BLOCK], tl.int64)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            scaled = scaled_scores(row_ptr, columns, size, best, temperature)
            before += tl.where(distances(scaled) < edge, weights_of(scaled, total), 0)
        # Of tokens that tie at the edge the first stay, until the weights before one reach it.
        tied = tl.maximum(weights_of(-edge.to(tl.float32, bitcast=True), total), 1)
        tied_kept = (limit - tl.sum(before) + tied - 1) // tied

    sums_kept = tl.zeros([BLOCK], tl.int64)
    ties = tl.zeros([], tl.int64)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scaled = scaled_scores(row_ptr, columns, size, best, temperature)
        kept, ties = kept_weights(scaled, total, edge, tied_kept, ties, least)
        sums_kept += kept
    target = draw * tl.sum(sums_kept).to(tl.float64)

    token = tl.full([], 0, tl.int64) + size - 1
    below, ties = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    start = tl.zeros([], tl.int32)
    searching = start < size
    while searching:
        columns = start + tl.arange(0, BLOCK)
        scaled = scaled_scores(row_ptr, columns, size, best, temperature)
        kept, ties = kept_weights(scaled, total, edge, tied_kept, ties, least)
        above = below + tl.sum(kept)
        start += BLOCK
        searching = start < size
        if above.to(tl.float64) > target:
            cumulative = below + tl.cumsum(kept)
            passed = cumulative.to(tl.float64) > target
            token = tl.min(tl.where(passed, columns, size - 1)).to(tl.int64)
            searching = start < 0  # never
        below = above
    return token


@triton.jit
def kept_weights(scaled, total, edge, tied_kept, ties, least):
    """Return the weights of the tokens that all filters keep, and how many tokens up to here tie
    at the edge of top-p, of which the first `tied_kept` stay."""
    distance = distances(scaled)
    at_edge = (distance == edge).to(tl.int64)
    rank = ties + tl.cumsum(at_edge) - at_edge
    inside = (distance < edge) | ((distance == edge) & (rank < tied_kept))
    kept = tl.where(inside & (scaled >= least), weights_of(scaled, total), 0)
    return kept, ties + tl.sum(at_edge)


@triton.jit
def choose_tokens_kernel(
    logits_ptr,
    scores_ptr,
    parameters_ptr,
    tokens_ptr,
    logprobs_ptr,
    finite_ptr,
    normalizers_ptr,
    size,
    logits_stride_row,
    scores_stride_row,
    rows,
    BLOCK: tl.constexpr,
):
    """Choose the token of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride_row
    scores_ptr += row * scores_stride_row
    temperature = tl.load(parameters_ptr + row).to(tl.float32)
    top_k = tl.load(parameters_ptr + rows + row).to(tl.int64)
    top_p = tl.load(parameters_ptr + 2 * rows + row)
    least = tl.load(parameters_ptr + 3 * rows + row).to(tl.float32)
    draw = tl.load(parameters_ptr + 4 * rows + row)

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)  # of exp(logit - highest), by column of a block
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        best = tl.maximum(best, tl.load(scores_ptr + columns, mask=inside, other=float("-inf")))
        logits = tl.load(logits_ptr + columns, mask=inside, other=float("-inf"))
        raised = tl.maximum(highest, logits)
        level = finite_or_zero(raised)
        sums = sums * tl.exp(highest - level) + tl.exp(logits - level)
        highest = raised
    best = tl.max(best)
    maximum = tl.max(highest)
    total = tl.sum(sums * tl.exp(highest - finite_or_zero(maximum)))
    normalizer = maximum + tl.log(total)

    if temperature > 0.0:
        token = draw_token(scores_ptr, size, best, temperature, top_k, top_p, least, draw, BLOCK)
    else:
        first = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            scores = tl.load(scores_ptr + columns, mask=columns < size, other=float("-inf"))
            first = tl.minimum(first, tl.where(scores == best, columns, 0x7FFFFFFF))
        token = tl.minimum(tl.min(first), size - 1).to(tl.int64)

    score = tl.load(scores_ptr + token)
    logprob = tl.load(logits_ptr + token) - normalizer
    # A sum of NaN or +inf, or of -inf alone, makes the log-probability NaN; none is above 0.
    finite = (logprob > float("-inf")) & (tl.abs(score) < float("inf")) & (total == total)
    tl.store(tokens_ptr + row, tl.where(finite, token, 0))
    tl.store(logprobs_ptr + row, tl.where(finite, logprob, float("nan")))
    tl.store(finite_ptr + row, finite)
    tl.store(normalizers_ptr + row, normalizer)


def choose_tokens(
    logits: torch.Tensor,
    scores: torch.Tensor,
    filters: Sequence[TokenFilter],
    draws: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, log-probabilities and finite as `ops.sampling.choose_tokens` does, and fp32
    [r], what to take off logits to have log-probabilities."""
    rows, size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs, normalizers = (logits.new_empty(rows) for _ in range(2))
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows == 0:
        return tokens, logprobs, finite, normalizers
    logits, scores = with_dense_rows(logits), with_dense_rows(scores)
    choose_tokens_kernel[(rows,)](
        logits,
        scores,
        on_device(logits.device, packed(filters, draws), torch.float64),
        tokens,
        logprobs,
        finite,
        normalizers,
        size,
        logits.stride(0),
        scores.stride(0),
        rows,
        **SAMPLE.pick(logits),
    )
    return tokens, logprobs, finite, normalizers


def packed(filters: Sequence[TokenFilter], draws: Sequence[float]) -> list[float]:
    """Return the parameters of all rows, kind by kind, as one copy to the device takes them."""
    # A temperature below 1e-30 sends all but the best to -inf, and fp32 would round it to 0.
    temperatures = [row.temperature and min(max(row.temperature, 1e-30), 1e30) for row in filters]
    kinds = (
        temperatures,
        [row.top_k for row in filters],
        [row.top_p for row in filters],
        [math.log(row.min_p) if row.min_p > 0 else -math.inf for row in filters],
        draws,
    )
    return [float(value) for kind in kinds for value in kind]


def with_dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [r, V] with the numbers of a row one after the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def most_probable_kernel(
    logits_ptr,
    normalizers_ptr,
    counts_ptr,
    ids_ptr,
    logprobs_ptr,
    size,
    logits_stride_row,
    width,
    BLOCK: tl.constexpr,
):
    """List the most probable tokens of one row: a walk over it for each."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride_row
    normalizer = tl.load(normalizers_ptr + row)
    count = tl.minimum(tl.load(counts_ptr + row), size)
    previous = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for index in range(count):
        best = tl.full([BLOCK], -0x7FFFFFFFFFFFFFFF, tl.int64)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < size
            # A key of its own for each token: bits that are ordered as the values are, less the id.
            values = tl.load(logits_ptr + columns, mask=inside, other=float("-inf")) + 0.0
            bits = values.to(tl.int32, bitcast=True)
            ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
            keys = ordered * 4294967296 - columns
            best = tl.where(inside & (keys < previous) & (keys > best), keys, best)
        previous = tl.max(best)
        token = (-previous) & 0xFFFFFFFF
        tl.store(ids_ptr + row * width + index, token)
        tl.store(logprobs_ptr + row * width + index, tl.load(logits_ptr + token) - normalizer)


def most_probable(
    logits: torch.Tensor, normalizers: torch.Tensor, num_top: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return ids and log-probabilities as `ops.sampling.most_probable` does.

    Args:
        logits: fp32 [r, V].
        normalizers: fp32 [r], of `choose_tokens`.
        num_top: [r].
    """
    width = min(max(num_top, default=0), logits.shape[-1])
    if width == 0:
        return None, None
    logits = with_dense_rows(logits)
    shape = (len(num_top), width)
    ids = torch.zeros(shape, dtype=torch.int64, device=logits.device)
    logprobs = logits.new_full(shape, -math.inf)
    most_probable_kernel[(len(num_top),)](
        logits,
        normalizers,
        on_device(logits.device, num_top, torch.int32),
        ids,
        logprobs,
        logits.shape[-1],
        logits.stride(0),
        width,
        **TOP.pick(logits),
    )
    return ids, logprobs
