# SPDX-License-Identifier: Apache-2.0
"""Sampling in Triton: each program loops over the scores of one row, which stay in the cache.

Top-k and top-p search for the score at the edge of the set. The bits of fp32 numbers of one sign
have the order of the numbers, and each loop over the row quarters the range of the edge. The loops
accumulate counts or integer weights in int64, which is exact in any order: rows of equal scores and
parameters get equal tokens at any index of a batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches
from megatron.core.ops.sampling.cpu import ScoreChange, TokenFilter, on_device

# BLOCK: entries per iteration.
CHANGE = Launches("change_scores", {"BLOCK": 512, "num_warps": 4})
# BLOCK: scores per iteration.
SAMPLE = Launches("choose_tokens", {"BLOCK": 4096, "num_warps": 16})
TOP = Launches("most_probable", {"BLOCK": 4096, "num_warps": 16})


@triton.jit
def change_scores_kernel(
    scores_ptr,
    rows_ptr,
    penalties_ptr,
    bounds_ptr,
    tokens_ptr,
    values_ptr,
    scores_stride_row,
    num_changes,
    BLOCK: tl.constexpr,
):
    """Apply one `ScoreChange`: biases, then the repetition penalty, then the other penalties.

    Entries are sorted by kind, then by change; `bounds` has the start of each segment. A token has
    at most one entry of each kind.
    """
    change = tl.program_id(0)
    scores_ptr += tl.load(rows_ptr + change).to(tl.int64) * scores_stride_row
    repetition = tl.load(penalties_ptr + change)
    frequency = tl.load(penalties_ptr + num_changes + change)
    presence = tl.load(penalties_ptr + 2 * num_changes + change)
    for kind in tl.static_range(3):
        begin = tl.load(bounds_ptr + kind * num_changes + change)
        end = tl.load(bounds_ptr + kind * num_changes + change + 1)
        for start in range(begin, end, BLOCK):
            entries = start + tl.arange(0, BLOCK)
            inside = entries < end
            pointers = scores_ptr + tl.load(tokens_ptr + entries, mask=inside, other=0)
            x = tl.load(pointers, mask=inside, other=0.0)
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
            tl.store(pointers, x, mask=inside)
        tl.debug_barrier()  # the next kind reads scores that other threads have written


def change_scores_(scores: torch.Tensor, changes: Mapping[int, ScoreChange]) -> None:
    """Apply biases and penalties with one copy to the device and one launch.

    See `ops.sampling.change_scores_`.
    """
    all_changes = list(changes.values())
    kinds = (
        [(change.biases, change.biases.values()) for change in all_changes],
        [(change.repeated, (0,) * len(change.repeated)) for change in all_changes],
        [(change.counts, change.counts.values()) for change in all_changes],
    )
    lengths = [len(tokens) for kind in kinds for tokens, _ in kind]
    penalties = [
        *(change.repetition for change in all_changes),
        *(change.frequency for change in all_changes),
        *(change.presence for change in all_changes),
    ]
    values = [value for kind in kinds for _, values in kind for value in values]
    tokens = [token for kind in kinds for ids, _ in kind for token in ids]
    integers = [*changes, 0, *itertools.accumulate(lengths), *tokens]
    # fp32 and int32 in one copy, four bytes each.
    device = scores.device
    host = torch.empty(
        len(penalties) + len(values) + len(integers), pin_memory=device.type == "cuda"
    )
    sizes = (len(penalties), len(values), len(integers))
    for buffer, numbers in zip(host.split(sizes), (penalties, values, integers), strict=True):
        dtype = torch.int32 if numbers is integers else torch.float32
        buffer.view(dtype).copy_(torch.tensor(numbers, dtype=dtype))
    penalties, values, integers = host.to(device, non_blocking=True).split(sizes)
    rows, bounds, tokens = integers.view(torch.int32).split(
        (len(all_changes), len(lengths) + 1, len(tokens))
    )
    change_scores_kernel[(len(all_changes),)](
        scores,
        rows,
        penalties,
        bounds,
        tokens,
        values,
        scores.stride(0),
        len(all_changes),
        **CHANGE.pick(scores),
    )


@triton.jit
def scaled_scores(row_ptr, columns, size, best, temperature):
    """Return (scores - best) / temperature of some columns, -inf after the last column."""
    scores = tl.load(row_ptr + columns, mask=columns < size, other=float("-inf"))
    return tl.div_rn(scores - best, temperature)


@triton.jit
def finite_or_zero(x):
    """Return x, or 0 for -inf: a column with only -inf so far has maximum -inf and sum 0."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def distances(scaled):
    """Return int32 in the order of the scaled scores, 0 for the best."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def token_weights(scaled, denominator):
    """Return floor(2^52 exp(x) / denominator) as int64, 0 for NaN."""
    probability = tl.exp(scaled) / denominator
    weight = (probability.to(tl.float64) * 4503599627370496.0).to(tl.int64)
    return tl.where(probability >= 0.0, weight, 0)


@triton.jit
def find_edge(
    row_ptr,
    size,
    best,
    temperature,
    denominator,
    limit,
    max_distance,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the smallest distance up to which the tokens' values sum to `limit`.

    Args:
        denominator: Σ exp(x), used with WEIGHTS.
        limit: int64, positive, and reached at `max_distance`.
        max_distance: int32, the largest distance of a token that top-k keeps.
        WEIGHTS: sum weights, else count tokens.
    """
    low = tl.full([], -1, tl.int32)  # does not reach the limit
    high = max_distance
    while high - low > 1:
        quarter = (high - low) // 4
        low_quarter, middle, high_quarter = low + quarter, low + (high - low) // 2, high - quarter
        sum_low = tl.zeros([BLOCK], tl.int64)
        sum_middle = tl.zeros([BLOCK], tl.int64)
        sum_high = tl.zeros([BLOCK], tl.int64)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            scaled = scaled_scores(row_ptr, columns, size, best, temperature)
            distance = distances(scaled)
            if WEIGHTS:
                value = token_weights(scaled, denominator)
            else:
                value = (columns < size).to(tl.int64)
            sum_low += tl.where(distance <= low_quarter, value, 0)
            sum_middle += tl.where(distance <= middle, value, 0)
            sum_high += tl.where(distance <= high_quarter, value, 0)
        low_reaches = tl.sum(sum_low) >= limit
        middle_reaches = tl.sum(sum_middle) >= limit
        high_reaches = tl.sum(sum_high) >= limit
        low = tl.where(
            low_reaches,
            low,
            tl.where(middle_reaches, low_quarter, tl.where(high_reaches, middle, high_quarter)),
        )
        high = tl.where(
            low_reaches,
            low_quarter,
            tl.where(middle_reaches, middle, tl.where(high_reaches, high_quarter, high)),
        )
    return high


@triton.jit
def draw_token(
    row_ptr, size, best, temperature, top_k, top_p, min_score, draw, BLOCK: tl.constexpr
):
    """Return the token of a row whose temperature is not 0, int64; see `ops.sampling`.

    Args:
        min_score: log(min-p).
    """
    infinity = tl.full([], 0x7F800000, tl.int32)
    max_distance = infinity
    if (top_k > 0) & (top_k < size):
        max_distance = find_edge(
            row_ptr, size, best, temperature, 1.0, top_k, infinity, False, BLOCK
        )

    partial_sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scaled = scaled_scores(row_ptr, columns, size, best, temperature)
        partial_sums += tl.where(distances(scaled) <= max_distance, tl.exp(scaled), 0.0)
    denominator = tl.sum(partial_sums)

    weights = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scaled = scaled_scores(row_ptr, columns, size, best, temperature)
        weights += tl.where(
            distances(scaled) <= max_distance, token_weights(scaled, denominator), 0
        )
    weight_sum = tl.sum(weights)

    edge, num_tied = max_distance, tl.full([], 0x7FFFFFFF, tl.int64)
    if (top_p < 1.0) & (weight_sum > 0):
        # The sums are integers: a sum is below the limit if it is below the next integer.
        limit = tl.ceil(top_p * weight_sum.to(tl.float64)).to(tl.int64)
        edge = find_edge(
            row_ptr, size, best, temperature, denominator, limit, max_distance, True, BLOCK
        )
        before = tl.zeros([BLOCK], tl.int64)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            scaled = scaled_scores(row_ptr, columns, size, best, temperature)
            before += tl.where(distances(scaled) < edge, token_weights(scaled, denominator), 0)
        # Of the tokens at the edge the first ones remain, until the weights before reach the limit.
        tied_weight = tl.maximum(token_weights(-edge.to(tl.float32, bitcast=True), denominator), 1)
        num_tied = (limit - tl.sum(before) + tied_weight - 1) // tied_weight

    filtered_sums = tl.zeros([BLOCK], tl.int64)
    ties = tl.zeros([], tl.int64)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scaled = scaled_scores(row_ptr, columns, size, best, temperature)
        filtered, ties = filtered_weights(scaled, denominator, edge, num_tied, ties, min_score)
        filtered_sums += filtered
    target = draw * tl.sum(filtered_sums).to(tl.float64)

    token = tl.full([], 0, tl.int64) + size - 1
    cumulative_before, ties = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    start = tl.zeros([], tl.int32)
    searching = start < size
    while searching:
        columns = start + tl.arange(0, BLOCK)
        scaled = scaled_scores(row_ptr, columns, size, best, temperature)
        filtered, ties = filtered_weights(scaled, denominator, edge, num_tied, ties, min_score)
        cumulative_after = cumulative_before + tl.sum(filtered)
        start += BLOCK
        searching = start < size
        if cumulative_after.to(tl.float64) > target:
            cumulative = cumulative_before + tl.cumsum(filtered)
            passed = cumulative.to(tl.float64) > target
            token = tl.min(tl.where(passed, columns, size - 1)).to(tl.int64)
            searching = start < 0  # never
        cumulative_before = cumulative_after
    return token


@triton.jit
def filtered_weights(scaled, denominator, edge, num_tied, ties, min_score):
    """Return the weights after all filters, and the number of tokens so far at the edge of top-p.

    Of the tokens at the edge the first `num_tied` remain.
    """
    distance = distances(scaled)
    at_edge = (distance == edge).to(tl.int64)
    rank = ties + tl.cumsum(at_edge) - at_edge
    inside = (distance < edge) | ((distance == edge) & (rank < num_tied))
    filtered = tl.where(inside & (scaled >= min_score), token_weights(scaled, denominator), 0)
    return filtered, ties + tl.sum(at_edge)


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
    min_score = tl.load(parameters_ptr + 3 * rows + row).to(tl.float32)
    draw = tl.load(parameters_ptr + 4 * rows + row)

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    maximums = tl.full([BLOCK], float("-inf"), tl.float32)
    partial_sums = tl.zeros([BLOCK], tl.float32)  # of exp(logit - maximums), by column of a block
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        best = tl.maximum(best, tl.load(scores_ptr + columns, mask=inside, other=float("-inf")))
        logits = tl.load(logits_ptr + columns, mask=inside, other=float("-inf"))
        new_maximums = tl.maximum(maximums, logits)
        offset = finite_or_zero(new_maximums)
        partial_sums = partial_sums * tl.exp(maximums - offset) + tl.exp(logits - offset)
        maximums = new_maximums
    best = tl.max(best)
    maximum = tl.max(maximums)
    denominator = tl.sum(partial_sums * tl.exp(maximums - finite_or_zero(maximum)))
    normalizer = maximum + tl.log(denominator)

    if temperature > 0.0:
        token = draw_token(
            scores_ptr, size, best, temperature, top_k, top_p, min_score, draw, BLOCK
        )
    else:
        first_best = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            scores = tl.load(scores_ptr + columns, mask=columns < size, other=float("-inf"))
            first_best = tl.minimum(first_best, tl.where(scores == best, columns, 0x7FFFFFFF))
        token = tl.minimum(tl.min(first_best), size - 1).to(tl.int64)

    score = tl.load(scores_ptr + token)
    logprob = tl.load(logits_ptr + token) - normalizer
    # NaN, +inf, or nothing but -inf among the logits makes the log-probability NaN.
    finite = (
        (logprob > float("-inf")) & (tl.abs(score) < float("inf")) & (denominator == denominator)
    )
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
    """Return tokens, log-probabilities, finite and normalizers; see `ops.sampling.choose_tokens`.

    Normalizers are fp32 [r]: a log-probability is a logit minus its row's normalizer.
    """
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
        on_device(logits.device, pack_parameters(filters, draws), torch.float64),
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


def pack_parameters(filters: Sequence[TokenFilter], draws: Sequence[float]) -> list[float]:
    """Return the parameters of all rows, concatenated by kind for one copy to the device."""
    # A temperature below 1e-30 gives all but the best -inf, and fp32 would round it to 0.
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
    """Return x [r, V] with contiguous rows."""
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
    """Find the most probable tokens of one row, with one loop over the row for each token."""
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
            # A unique key for each token: bits in the order of the values, minus the id.
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
    """Return ids and log-probabilities as `sampling.cpu.most_probable` does.

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
