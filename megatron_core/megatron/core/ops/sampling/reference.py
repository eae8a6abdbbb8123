# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens in plain torch; a batch pays for the filters that some row asks for."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# The sum of a row's weights is about 2^52 and each is a whole number: fp64 adds them exactly.
_WEIGHT_SCALE = 2.0**52

# Bits of the largest fp32 number that is not NaN, infinity.
_INFINITY_BITS = 0x7F800000


class TokenFilter(Protocol):
    """How a row chooses among its tokens; `SamplingParams` has these."""

    @property
    def temperature(self) -> float:
        """Divisor of the scores; 0 takes the best."""
        ...

    @property
    def top_k(self) -> int:
        """How many of the most probable tokens stay; 0 keeps all."""
        ...

    @property
    def top_p(self) -> float:
        """The probability that the tokens which stay have together; 1 keeps all."""
        ...

    @property
    def min_p(self) -> float:
        """The least probability of a token, relative to the best one's; 0 keeps all."""
        ...


@dataclass(frozen=True, kw_only=True)
class ScoreChange:
    """What biases and penalties change in the scores of a row, in this order.

        x = x + bias
        x = x / r if x > 0 else x r            for repeated tokens, r: repetition
        x = x - f count - p                    for counted tokens, f: frequency, p: presence

    Args:
        biases: by token.
        repeated: tokens of prompt or output.
        repetition: r, positive.
        counts: how often the output has each of its tokens.
        frequency, presence: f and p.
    """

    biases: Mapping[int, float]
    repeated: Collection[int]
    repetition: float
    counts: Mapping[int, int]
    frequency: float
    presence: float


class TokenChoice(NamedTuple):
    """What was chosen for r rows.

    Args:
        tokens: int64 [r].
        logprobs: fp32 [r], of `tokens`.
        finite: bool [r]; False where there was nothing to choose: NaN or +inf among the logits, or
            no token with a score. Such a row has token 0 and log-probability NaN.
        top_ids: int64 [r, k], the most probable tokens of each row, of equals the lower id first;
            None if no row asks for any.
        top_logprobs: fp32 [r, k]; -inf in rows that ask for none.
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
        at = _entries(device, repeats)
        penalty = _by_entry(device, repeats, [changes[n].repetition for n in repeats])
        old = scores[at]  # [entries]
        new = torch.where(old > 0, old / penalty, old * penalty)
        # A penalty near 0 must not make a logit infinite.
        scores[at] = new.clamp(max=torch.finfo(torch.float32).max)
    counts = {n: change.counts for n, change in changes.items() if change.counts}
    if counts:
        times = [count for tokens in counts.values() for count in tokens.values()]
        frequency, presence = (
            _by_entry(device, counts, [getattr(changes[n], name) for n in counts])
            for name in ("frequency", "presence")
        )
        scores[_entries(device, counts)] -= (
            frequency * on_device(device, times, torch.float32) + presence
        )


def _entries(device: torch.device, ids: Mapping[int, Collection[int]]) -> tuple[Tensor, Tensor]:
    """Return row and column, each [entries], of the tokens of some rows."""
    flat = [token for tokens in ids.values() for token in tokens]
    rows = _by_entry(device, ids, list(ids), dtype=torch.int64)
    return rows, on_device(device, flat, torch.int64)


def _by_entry(
    device: torch.device,
    ids: Mapping[int, Collection[int]],
    values: Sequence[float],
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return [entries], the value of each row for each of its tokens."""
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
    drawn = [n for n, row in enumerate(filters) if row.temperature != 0]
    if len(drawn) < len(filters):
        tokens = scores.argmax(dim=-1)
    else:
        tokens = scores.new_empty(len(filters), dtype=torch.int64)
    if drawn:
        weights = draw_weights(select_rows(scores, drawn), [filters[n] for n in drawn])
        uniform = on_device(logits.device, [draws[n] for n in drawn], torch.float64)
        tokens = replace_rows(tokens, drawn, invert(weights, uniform))
    everything = logits.log_softmax(dim=-1)  # [r, V]
    logprobs = everything.gather(1, tokens.unsqueeze(1)).squeeze(1)
    # One NaN or +inf, and -inf alone, make all log-probabilities of a row NaN; none is above 0.
    finite = logprobs > -math.inf
    if scores is not logits:
        finite &= scores.gather(1, tokens.unsqueeze(1)).squeeze(1).isfinite()
    return TokenChoice(
        tokens.where(finite, 0),
        logprobs.where(finite, math.nan),
        finite,
        *most_probable(everything, num_top),
    )


def on_device(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return a tensor of host values without making the host wait for the device."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def select_rows(batch: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of a batch, in their order; the batch itself if it is all of them."""
    if len(rows) == batch.shape[0]:
        return batch
    return batch.index_select(0, on_device(batch.device, rows, torch.int64))


def replace_rows(batch: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """Return the batch with some rows replaced; `values` itself if they are all of them."""
    if len(rows) == batch.shape[0]:
        return values
    return batch.index_copy(0, on_device(batch.device, rows, torch.int64), values)


def nucleus_by_sort(scores: Tensor, weights: Tensor, limits: Tensor) -> Tensor:
    """Tell which tokens belong to the top-p set of each row.

    Tokens are taken by descending score, those of equal score by ascending id; a token belongs to
    the set while the weights of the tokens before it have not reached the limit.

    Args:
        scores: [r, V] fp32, the maximum of a row is 0.
        weights: [r, V] fp64, whole numbers, ascending with the scores.
        limits: [r, 1] fp64, positive and less than the sum of the row's weights.

    Returns:
        [r, V] bool.
    """
    keep = torch.zeros_like(weights, dtype=torch.bool)
    # All tokens of less than (total - limit) / V together have less than total - limit: those above
    # them reach the limit, so only they need sorting. Half of it, so that no rounding matters.
    floor = (weights.sum(dim=-1, keepdim=True) - limits) / (2 * weights.shape[-1])  # [r, 1]
    for row, candidates in enumerate(weights > floor):
        ids = candidates.nonzero().squeeze(1)
        ids = ids[scores[row, ids].sort(descending=True, stable=True).indices]
        ordered = weights[row, ids]
        keep[row, ids] = ordered.cumsum(dim=0) - ordered < limits[row]
    return keep


def nucleus_by_search(scores: Tensor, weights: Tensor, limits: Tensor) -> Tensor:
    """Tell the same as `nucleus_by_sort` without sorting and without waiting for the device.

    Bisects for the score at the edge of the set: 31 masked sums over the vocabulary, since the
    scores are fp32 numbers of one sign.
    """
    # Bits of fp32 numbers of one sign are ordered as the numbers are: 0 is the most probable token.
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
    # `high` is the score of the last token of the set; of those that tie with it the first stay.
    ties = distance == high
    tied = weights.where(ties, 0.0)
    before = up_to(high - 1) + tied.cumsum(dim=-1) - tied
    return (distance < high) | (ties & (before < limits))


def draw_weights(scores: Tensor, filters: Sequence[TokenFilter]) -> Tensor:
    """Return the distribution that tokens are drawn from, after temperature and filters.

    Args:
        scores: [r, V] fp32.
        filters: [r], none greedy.

    Returns:
        [r, V] fp64: whole numbers in proportion to the probabilities, 0 for excluded tokens. A row
        without filters has a sum of about 2^52, less what was rounded down.
    """
    device, vocab_size = scores.device, scores.shape[-1]
    # With the maximum at 0 a tiny temperature sends the others to -inf and makes no NaN. Below
    # 1e-30 that is true of every fp32 difference, and fp32 would round the divisor to 0.
    divisors = [min(max(p.temperature, 1e-30), 1e30) for p in filters]
    scores = scores - scores.amax(dim=-1, keepdim=True)
    scores /= on_device(device, divisors, torch.float32).unsqueeze(1)
    few = [n for n, p in enumerate(filters) if 0 < p.top_k < vocab_size]
    if few:
        part = select_rows(scores, few)
        counts = [filters[n].top_k for n in few]
        best = part.topk(max(counts), dim=-1).values
        kth = best.gather(1, on_device(device, counts, torch.int64).unsqueeze(1) - 1)  # [few, 1]
        scores = replace_rows(scores, few, part.masked_fill(part < kth, -math.inf))
    weights = scores.softmax(dim=-1).double().mul_(_WEIGHT_SCALE).floor_()
    likely = [n for n, p in enumerate(filters) if p.top_p < 1]
    if likely:
        part, whole = select_rows(scores, likely), select_rows(weights, likely)
        limits = on_device(device, [filters[n].top_p for n in likely], torch.float64).unsqueeze(1)
        limits = limits * whole.sum(dim=-1, keepdim=True)
        nucleus = nucleus_by_sort if device.type == "cpu" else nucleus_by_search
        weights = replace_rows(weights, likely, whole.where(nucleus(part, whole, limits), 0.0))
    near = [n for n, p in enumerate(filters) if p.min_p > 0]
    if near:
        # exp(score) is the probability over that of the most probable token.
        least = on_device(
            device, [math.log(filters[n].min_p) for n in near], torch.float32
        ).unsqueeze(1)
        kept = select_rows(weights, near).where(select_rows(scores, near) >= least, 0.0)
        weights = replace_rows(weights, near, kept)
    return weights


def invert(weights: Tensor, draws: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution passes each draw.

    Args:
        weights: [b, V] fp64, not negative; rows need not sum to 1.
        draws: [b] fp64 in [0, 1 - 2^-52].

    Returns:
        [b] int64, never a token of weight 0; the last token where all are 0 or NaN.
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
        num_top: [r], how many each row asks for.
    """
    count = min(max(num_top, default=0), logprobs.shape[-1])
    if count == 0:
        return None, None
    asking = [n for n, top in enumerate(num_top) if top]
    part = select_rows(logprobs, asking)
    # Topk leaves open which of equal values it returns and how it orders them, so each token gets a
    # key of its own: 32 bits that are ordered as the values are, less the id.
    bits = part.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) - torch.arange(part.shape[-1], device=part.device)
    ids = -keys.topk(count, dim=-1).values & 0xFFFFFFFF  # [asking, count]
    shape = (len(num_top), count)
    return (
        replace_rows(ids.new_zeros(shape), asking, ids),
        replace_rows(part.new_full(shape, -math.inf), asking, part.gather(1, ids)),
    )
