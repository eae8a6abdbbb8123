# SPDX-License-Identifier: Apache-2.0
"""Choose the next token from logits: greedy, temperature, top-k, top-p, with stateless randomness.

A draw is a function of (seed, sequence, position) and of nothing else: it does not depend on which
other sequences share the batch, on how many steps ran before, or on how the model is spread over
ranks. Because `position` is the absolute position of the new token, generating 20 tokens at once
and generating 10, then 10 more from the longer prompt, draw the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.initialize import stream_key


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Say how tokens are chosen; filters apply in the order temperature, top-k, top-p.

    Args:
        temperature: divides the logits; 0 takes the most probable token and ignores the rest.
        top_k: keep only the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability (after top-k,
            renormalised) reaches top_p; 1.0 keeps all. The most probable token always stays.
        seed: any integer; the same seed repeats the same choices.

    Raises:
        ValueError: a value out of range, all problems in one line.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(
                f"temperature is {self.temperature}: use 0 (greedy) or a positive value"
            )
        if self.top_k < 0:
            problems.append(f"top-k is {self.top_k}: use 0 (keep all) or a positive count")
        if not 0 < self.top_p <= 1:
            problems.append(f"top-p is {self.top_p}: use more than 0 and at most 1 (1 keeps all)")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def uniform(seed: int, sequence: int, position: int) -> float:
    """Return a number in [0, 1) with 52 random bits, a pure function of its three arguments.

    52 bits, not 53: `u * total` then rounds to less than `total` for every positive `total`.
    """
    return (stream_key(seed, f"sample/{sequence}/{position}") >> 12) / 2.0**52


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Divide by the temperature and set the logits of excluded tokens to -inf.

    Args:
        logits: [b, V] fp32.
        params: not greedy.

    Returns:
        [b, V] fp32. Tokens that tie with the k-th stay; among tokens that tie at the edge of the
        top-p set, those with lower ids stay.
    """
    # With the maximum at 0 a tiny temperature sends the others to -inf and makes no NaN. Below
    # 1e-30 that is true of every fp32 difference, and fp32 would round the divisor to 0.
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / max(params.temperature, 1e-30)
    if 0 < params.top_k < scores.shape[-1]:
        kth = scores.topk(params.top_k, dim=-1).values[:, -1:]  # [b, 1]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if params.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)  # [b, V]
        probabilities = ordered.double().softmax(dim=-1)
        # A token stays while the tokens before it have not reached top_p yet.
        before = probabilities.cumsum(dim=-1) - probabilities
        drop = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, before >= params.top_p)
        scores = scores.masked_fill(drop, -math.inf)
    return scores


def invert(probabilities: Tensor, draws: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution passes each draw.

    Args:
        probabilities: [b, V] fp64, not negative; rows need not sum to 1.
        draws: [b] fp64 in [0, 1 - 2^-52].

    Returns:
        [b] int64, never a token of probability 0.
    """
    cumulative = probabilities.cumsum(dim=-1)  # [b, V]
    targets = draws.unsqueeze(1) * cumulative[:, -1:]  # [b, 1]
    # right=True finds the first entry above the target: one of probability 0 is equal to the
    # entry before it, so it never is the first.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1)


def sample(
    logits: Tensor, params: SamplingParams, *, sequences: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Choose one token per row and say how probable the model found it.

    Args:
        logits: [b, V] without padding columns, equal on all ranks that must agree on the token.
        params: how to choose.
        sequences: [b] identity of each row; part of the key of its random number.
        positions: [b] absolute position that each new token will take.

    Returns:
        (tokens [b] int64, log-probabilities [b] fp32). The log-probability is the model's own: over
        the whole vocabulary, before temperature and filters.
    """
    logits = logits.float()
    if params.greedy:
        tokens = logits.argmax(dim=-1)
    else:
        draws = [uniform(params.seed, s, p) for s, p in zip(sequences, positions, strict=True)]
        draw = torch.tensor(draws, dtype=torch.float64, device=logits.device)
        # fp64, so that the sum over a vocabulary of 10^5 loses nothing.
        tokens = invert(filter_logits(logits, params).double().softmax(dim=-1), draw)
        tokens.clamp_(max=logits.shape[-1] - 1)  # of NaN logits; the log-probability shows them
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, chosen - logits.logsumexp(dim=-1)
