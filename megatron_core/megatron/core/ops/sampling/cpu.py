# SPDX-License-Identifier: Apache-2.0
"""Sampling in plain PyTorch; a batch computes only filters that some row uses."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# A row's weights are integers with a sum of about 2^52, so fp64 adds them exactly.
_WEIGHT_SCALE = 2.0**52

# Bits of the largest fp32 number that is not NaN, infinity.
_INFINITY_BITS = 0x7F800000


class TokenFilter(Protocol):
    """Sampling parameters of a row; `SamplingParams` implements it."""

    @property
    def temperature(self) -> float:
        """Divisor of the scores; 0 takes the best."""
        ...

    @property
    def top_k(self) -> int:
        """Number of most probable tokens that remain; 0 keeps all."""
        ...

    @property
    def top_p(self) -> float:
        """Total probability of the tokens that remain; 1 keeps all."""
        ...

    @property
    def min_p(self) -> float:
        """Smallest probability of a token relative to the most probable one; 0 keeps all."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScoreChange:
    """Bias and penalties of a row, applied to its scores in this order:

        x = x + bias
        x = x / r if x > 0 else x r            for repeated tokens, r: repetition
        x = x - f count - p                    for counted tokens, f: frequency, p: presence

    Args:
        biases: by token.
        repeated: tokens of prompt or output.
        repetition: r, positive.
        counts: occurrences of each token in the output.
        frequency, presence: f and p.
    """

    biases: Mapping[int, float]
    repeated: Collection[int]
    repetition: float
    counts: Mapping[int, int]
    frequency: float
    presence: float


class TokenChoice(NamedTuple):
    """Tokens and log-probabilities of r rows.

    Args:
        tokens: int64 [r].
        logprobs: fp32 [r], of `tokens`.
        finite: bool [r]; False if the logits contain NaN or +inf, or if every token is masked.
            Such a row has token 0 and log-probability NaN.
        top_ids: int64 [r, k], the most probable tokens of each row, the lower id first on ties;
            None if `num_top` is 0 for all rows.
        top_logprobs: fp32 [r, k]; -inf in rows whose `num_top` is 0.
    """

    tokens: Tensor
    logprobs: Tensor
    finite: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None


def change_scores_(scores: Tensor, changes: Mapping[int, ScoreChange]) -> None:
    """Apply biases and penalties; see `ops.sampling.change_scores_`."""
    device = scores.device
    biases = {n: change.biases for n, change in changes.items() if change.biases}
    if biases:
        values = [bias for tokens in biases.values() for bias in tokens.values()]
        scores[_entries(device, biases)] += on_device(device, values, torch.float32)
    repeats = {n: change.repeated for n, change in changes.items() if change.repeated}
    if repeats:
        entries = _entries(device, repeats)
        penalty = _expand_to_entries(device, repeats, [changes[n].repetition for n in repeats])
        scores_before = scores[entries]  # [entries]
        penalized = torch.where(scores_before > 0, scores_before / penalty, scores_before * penalty)
        # A penalty near 0 must not make a logit infinite.
        scores[entries] = penalized.clamp(max=torch.finfo(torch.float32).max)
    counts = {n: change.counts for n, change in changes.items() if change.counts}
    if counts:
        occurrences = [count for tokens in counts.values() for count in tokens.values()]
        frequency, presence = (
            _expand_to_entries(device, counts, [getattr(changes[n], name) for n in counts])
            for name in ("frequency", "presence")
        )
        scores[_entries(device, counts)] -= (
            frequency * on_device(device, occurrences, torch.float32) + presence
        )


def _entries(device: torch.device, ids: Mapping[int, Collection[int]]) -> tuple[Tensor, Tensor]:
    """Return row and column indices, each [entries], of the tokens of some rows."""
    flat = [token for tokens in ids.values() for token in tokens]
    rows = _expand_to_entries(device, ids, list(ids), dtype=torch.int64)
    return rows, on_device(device, flat, torch.int64)


def _expand_to_entries(
    device: torch.device,
    ids: Mapping[int, Collection[int]],
    values: Sequence[float],
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return [entries], each row's value repeated for each of its tokens."""
    counts = [len(tokens) for tokens in ids.values()]
    repeats = on_device(device, counts, torch.int64)
    return on_device(device, values, dtype).repeat_interleave(repeats, output_size=sum(counts))


def choose_tokens(
    logits: Tensor,
    scores: Tensor,
    filters: Sequence[TokenFilter],
    draws: Sequence[float],
    num_top: Sequence[int],
) -> TokenChoice:
    """Choose a token of each row; see `ops.sampling.choose_tokens`."""
    sampled_rows = [n for n, p in enumerate(filters) if p.temperature != 0]
    if len(sampled_rows) < len(filters):
        tokens = scores.argmax(dim=-1)
    else:
        tokens = scores.new_empty(len(filters), dtype=torch.int64)
    if sampled_rows:
        weights = draw_weights(
            select_rows(scores, sampled_rows), [filters[n] for n in sampled_rows]
        )
        uniform = on_device(logits.device, [draws[n] for n in sampled_rows], torch.float64)
        tokens = replace_rows(tokens, sampled_rows, invert(weights, uniform))
    all_logprobs = logits.log_softmax(dim=-1)  # [r, V]
    logprobs = all_logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    # A NaN or +inf, or nothing but -inf, makes all log-probabilities of a row NaN.
    finite = logprobs > -math.inf
    if scores is not logits:
        finite &= scores.gather(1, tokens.unsqueeze(1)).squeeze(1).isfinite()
    return TokenChoice(
        tokens.where(finite, 0),
        logprobs.where(finite, math.nan),
        finite,
        *most_probable(all_logprobs, num_top),
    )


def on_device(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return a tensor of host values without making the host wait for the device."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def select_rows(batch: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows of a batch in the given order; the batch itself if it is all rows."""
    if len(rows) == batch.shape[0]:
        return batch
    return batch.index_select(0, on_device(batch.device, rows, torch.int64))


def replace_rows(batch: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """Return the batch with some rows replaced; `values` itself if it is all rows."""
    if len(rows) == batch.shape[0]:
        return values
    return batch.index_copy(0, on_device(batch.device, rows, torch.int64), values)


def nucleus_by_sort(scores: Tensor, weights: Tensor, limits: Tensor) -> Tensor:
    """Return whether each token belongs to the top-p set of its row.

    Tokens are ordered by descending score, then by ascending id. A token belongs to the set if the
    weights of the tokens before it have not reached the limit.

    Args:
        scores: [r, V] fp32, the maximum of a row is 0.
        weights: [r, V] fp64, integers, ascending with the scores.
        limits: [r, 1] fp64, positive and less than the sum of the row's weights.

    Returns:
        [r, V] bool.
    """
    keep = torch.zeros_like(weights, dtype=torch.bool)
    # Tokens with weights below (total - limit) / V sum to less than total - limit, so the tokens
    # above reach the limit and only they need sorting. Half of it, so that rounding is harmless.
    floor = (weights.sum(dim=-1, keepdim=True) - limits) / (2 * weights.shape[-1])  # [r, 1]
    for row, candidates in enumerate(weights > floor):
        ids = candidates.nonzero().squeeze(1)
        ids = ids[scores[row, ids].sort(descending=True, stable=True).indices]
        ordered = weights[row, ids]
        keep[row, ids] = ordered.cumsum(dim=0) - ordered < limits[row]
    return keep


def nucleus_by_search(scores: Tensor, weights: Tensor, limits: Tensor) -> Tensor:
    """Return the same as `nucleus_by_sort`, without sorting and without waiting for the device.

    Bisects for the score at the edge with 31 masked sums over the vocabulary: all scores
    have one sign, so their fp32 bits have 31 bits of order.
    """
    # The bits of fp32 numbers of one sign have the order of the numbers: 0 is the best token.
    distance = scores.abs().view(torch.int32)  # [r, V]

    def up_to(edge: Tensor) -> Tensor:
        return weights.where(distance <= edge, 0.0).sum(dim=-1, keepdim=True)  # [r, 1]

    high = torch.full_like(limits, _INFINITY_BITS, dtype=torch.int32)  # reaches the limit
    low = torch.full_like(high, -1)  # does not
    for _ in range(_INFINITY_BITS.bit_length()):
        middle = low + (high - low) // 2
        reached = up_to(middle) >= limits
        high = torch.where(reached, middle, high)
        low = torch.where(reached, low, middle)
    # `high` is the score of the last token in the set; of its ties the first ones remain.
    ties = distance == high
    tied_weights = weights.where(ties, 0.0)
    before = up_to(high - 1) + tied_weights.cumsum(dim=-1) - tied_weights
    return (distance < high) | (ties & (before < limits))


def draw_weights(scores: Tensor, filters: Sequence[TokenFilter]) -> Tensor:
    """Return the distribution from which tokens are drawn, after temperature and filters.

    Args:
        scores: [r, V] fp32.
        filters: [r], none greedy.

    Returns:
        [r, V] fp64: integers proportional to the probabilities, 0 for excluded tokens. A row
        without filters sums to about 2^52, minus what rounding down removes.
    """
    device, vocab_size = scores.device, scores.shape[-1]
    # With the maximum at 0 a tiny temperature gives all others -inf and never NaN. Below 1e-30
    # every fp32 difference becomes -inf, and fp32 would round the divisor to 0.
    divisors = [min(max(p.temperature, 1e-30), 1e30) for p in filters]
    scores = scores - scores.amax(dim=-1, keepdim=True)
    scores /= on_device(device, divisors, torch.float32).unsqueeze(1)
    top_k_rows = [n for n, p in enumerate(filters) if 0 < p.top_k < vocab_size]
    if top_k_rows:
        row_scores = select_rows(scores, top_k_rows)
        counts = [filters[n].top_k for n in top_k_rows]
        top_scores = row_scores.topk(max(counts), dim=-1).values
        kth = top_scores.gather(
            1, on_device(device, counts, torch.int64).unsqueeze(1) - 1
        )  # [top_k_rows, 1]
        scores = replace_rows(
            scores, top_k_rows, row_scores.masked_fill(row_scores < kth, -math.inf)
        )
    weights = scores.softmax(dim=-1).double().mul_(_WEIGHT_SCALE).floor_()
    top_p_rows = [n for n, p in enumerate(filters) if p.top_p < 1]
    if top_p_rows:
        row_scores, row_weights = select_rows(scores, top_p_rows), select_rows(weights, top_p_rows)
        limits = on_device(device, [filters[n].top_p for n in top_p_rows], torch.float64).unsqueeze(
            1
        )
        limits = limits * row_weights.sum(dim=-1, keepdim=True)
        nucleus = nucleus_by_sort if device.type == "cpu" else nucleus_by_search
        weights = replace_rows(
            weights, top_p_rows, row_weights.where(nucleus(row_scores, row_weights, limits), 0.0)
        )
    min_p_rows = [n for n, p in enumerate(filters) if p.min_p > 0]
    if min_p_rows:
        # exp(score) is the probability relative to the most probable token.
        min_score = on_device(
            device, [math.log(filters[n].min_p) for n in min_p_rows], torch.float32
        ).unsqueeze(1)
        row_weights = select_rows(weights, min_p_rows).where(
            select_rows(scores, min_p_rows) >= min_score, 0.0
        )
        weights = replace_rows(weights, min_p_rows, row_weights)
    return weights


def invert(weights: Tensor, draws: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution passes each draw.

    Args:
        weights: [b, V] fp64, not negative; rows need not sum to 1.
        draws: [b] fp64 in [0, 1 - 2^-52].

    Returns:
        [b] int64, never a token of weight 0; the last token if all weights are 0 or NaN.
    """
    cumulative = weights.cumsum(dim=-1)  # [b, V]
    targets = draws.unsqueeze(1) * cumulative[:, -1:]  # [b, 1]
    # right=True finds the first entry above the target: one of weight 0 is equal to the entry
    # before it, so it never is the first.
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return tokens.clamp_(max=weights.shape[-1] - 1)


def most_probable(
    logprobs: Tensor, num_top: Sequence[int]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return ids and log-probabilities of the most probable tokens (see `TokenChoice`).

    Args:
        logprobs: [r, V] fp32.
        num_top: [r], number of tokens to return for each row.
    """
    count = min(max(num_top, default=0), logprobs.shape[-1])
    if count == 0:
        return None, None
    rows_with_top = [n for n, top in enumerate(num_top) if top]
    row_logprobs = select_rows(logprobs, rows_with_top)
    # topk does not specify which of equal values it returns, nor their order, so each token gets a
    # unique key: 32 bits in the order of the values, minus the id.
    bits = row_logprobs.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) - torch.arange(row_logprobs.shape[-1], device=row_logprobs.device)
    ids = -keys.topk(count, dim=-1).values & 0xFFFFFFFF  # [rows_with_top, count]
    shape = (len(num_top), count)
    return (
        replace_rows(ids.new_zeros(shape), rows_with_top, ids),
        replace_rows(
            row_logprobs.new_full(shape, -math.inf), rows_with_top, row_logprobs.gather(1, ids)
        ),
    )


def token_ranks(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Return the rank of one token of each row in the order of `most_probable`, from 1.

    Args:
        logprobs: [r, V] fp32.
        tokens: int64 [r].

    Returns:
        int64 [r].
    """
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    token_logprobs = logprobs.gather(1, tokens[:, None])  # [r, 1]
    precedes = (logprobs == token_logprobs) & (ids < tokens[:, None])  # [r, V]
    precedes |= logprobs > token_logprobs
    return 1 + precedes.sum(1)
