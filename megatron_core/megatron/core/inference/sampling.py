# SPDX-License-Identifier: Apache-2.0
"""Sampling: choose the next token of each row of a batch, with separate parameters per row.

The steps of a row, each skipped if its parameters disable it:

1. `logit_bias`, then repetition, frequency and presence penalty, then the mask (`adjust_logits`);
2. temperature, top-k, top-p, min-p;
3. one draw, or at temperature 0 the first maximum of step 1 (2 and 3: `ops.sampling`).

A draw is a function of (seed, sequence, position) only. It does not depend on the other sequences
of the batch, on the number of earlier steps, or on the parallel layout. `position` is the absolute
position of the new token, so generating 20 tokens at once draws the same numbers as generating 10
tokens, then 10 more from the longer prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.device import to_host
from megatron.core.initialize import stream_key
from megatron.core.ops.sampling import ScoreChange, change_scores_, choose_tokens
from megatron.core.ops.sampling.cpu import replace_rows, select_rows

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Args:
        temperature: divides the logits; 0 takes the most probable token (greedy).
        top_k: keep the k most probable tokens and all tokens that tie with the k-th; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability (after top-k,
            renormalised) reaches top_p; of tokens that tie at its edge those with lower ids stay.
            1 keeps all. The most probable token always stays.
        min_p: keep tokens at least min_p times as probable as the most probable one (after
            temperature); 0 keeps all.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens in the
            prompt or the output (Keskar et al. 2019, section 4.1); 1 is none.
        presence_penalty: subtracted from the logits of tokens in the output, not the prompt, as
            OpenAI defines it.
        frequency_penalty: subtracted once for each time that a token is in the output, not the
            prompt, as OpenAI defines it.
        logit_bias: token id -> number added to its logit, before the penalties; kept as pairs in
            the order of ids.
        seed: any integer; the same seed repeats the same choices.
        logprobs: number of most probable alternatives to report per token, at most 20; 0 and None
            report only the log-probability of the sampled token.

    Raises:
        ValueError: a value is out of range; one line lists all problems.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        # A sorted tuple instead of a mapping makes the parameters hashable.
        object.__setattr__(self, "logit_bias", tuple(sorted(dict(self.logit_bias).items())))
        problems = self._problems()
        if problems:
            raise ValueError("; ".join(problems))

    def _problems(self) -> list[str]:
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(
                f"temperature is {self.temperature}: use 0 (greedy) or a positive value"
            )
        if not (isinstance(self.top_k, int) and self.top_k >= 0):
            problems.append(f"top-k is {self.top_k}: use 0 (keep all) or a positive count")
        if not 0 < self.top_p <= 1:
            problems.append(f"top-p is {self.top_p}: use more than 0 and at most 1 (1 keeps all)")
        if not 0 <= self.min_p <= 1:
            problems.append(f"min-p is {self.min_p}: use 0 (keep all) to 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            problems.append(
                f"repetition-penalty is {self.repetition_penalty}: use a positive value (1 is none)"
            )
        for name in ("presence", "frequency"):
            penalty = getattr(self, f"{name}_penalty")
            if not abs(penalty) <= MAX_PENALTY:
                problems.append(f"{name}-penalty is {penalty}: use -2 to 2 (0 is none)")
        for token, bias in dict(self.logit_bias).items():
            if not (isinstance(token, int) and token >= 0):
                problems.append(f"logit-bias names token {token!r}: use a token id")
            if not abs(bias) <= MAX_LOGIT_BIAS:
                problems.append(f"logit-bias of token {token} is {bias}: use -100 to 100")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            problems.append(f"logprobs is {self.logprobs}: use 0 to {MAX_LOGPROBS}")
        return problems

    @cached_property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def penalizes(self) -> bool:
        """Whether any penalty changes logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRow:
    """Input of `sample` for one row, in addition to the logits.

    Args:
        params: sampling parameters.
        sequence: sequence number, part of the key of the random draw.
        position: absolute position of the new token.
        prompt: token ids of the prompt; read only for a repetition penalty.
        output: token ids of the output so far; read only for penalties.
        mask: bool [V] on any device, True for allowed tokens, for example of a grammar; None allows
            all tokens.
    """

    params: SamplingParams
    sequence: int
    position: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    mask: Tensor | None = None

    @property
    def uniform(self) -> float:
        """Uniform draw in [0, 1) of the token."""
        return uniform(self.params.seed, self.sequence, self.position)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """Sampled tokens of a batch of b rows.

    Log-probabilities are log-softmax values over the whole vocabulary, before bias, penalties,
    mask, temperature and filters.

    Args:
        tokens: int64 [b].
        logprobs: fp32 [b], log-probabilities of `tokens`.
        top_ids: int64 [b, k], the most probable tokens of each row in descending order; ties by
            ascending id. k is the largest number that a row requests, at most V; a row that
            requests n tokens reads the first n. None if no row requests alternatives.
        top_logprobs: fp32 [b, k], log-probabilities of `top_ids`; -inf in rows without
            alternatives.
        finite: bool [b]; False if no token can be sampled: a logit is NaN or +inf, all logits are
            -inf, or the mask allows no token. Such a row has token 0 and log-probability NaN. Other
            rows are not affected.
    """

    tokens: Tensor
    logprobs: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    finite: Tensor

    def on_host(self) -> Sampled:
        """Start the copy to the host; the values are valid once the queued work is done."""
        return Sampled(
            tokens=to_host(self.tokens),
            logprobs=to_host(self.logprobs),
            top_ids=None if self.top_ids is None else to_host(self.top_ids),
            top_logprobs=None if self.top_logprobs is None else to_host(self.top_logprobs),
            finite=to_host(self.finite),
        )


def uniform(seed: int, sequence: int, position: int) -> float:
    """Return a number in [0, 1) with 52 random bits, a pure function of its three arguments.

    52 bits, not 53: `u * total` then rounds to less than `total` for every positive `total`.
    """
    return (stream_key(seed, f"sample/{sequence}/{position}") >> 12) / 2.0**52


def adjust_logits(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Add biases, apply penalties, and set the logits of tokens that a mask excludes to -inf.

        l = logit + bias
        l = l / r if l > 0 else l * r          for tokens of prompt or output, r: repetition
        l = l - f * count - p * [count > 0]    count: in the output; f: frequency, p: presence

    Args:
        logits: [b, V] fp32; not changed.
        rows: [b].

    Returns:
        [b, V] fp32; `logits` itself if no row needs an adjustment.
    """
    # Rows without adjustments pay nothing, and an unadjusted batch is not even copied.
    adjusted = [n for n, row in enumerate(rows) if row.params.logit_bias or row.params.penalizes]
    masked = [n for n, row in enumerate(rows) if row.mask is not None]
    if not adjusted and not masked:
        return logits
    scores, device = logits.clone(), logits.device
    change_scores_(scores, {n: _change_of(rows[n], scores.shape[1]) for n in adjusted})
    if masked:
        masks = [row.mask.to(device, non_blocking=True) for row in rows if row.mask is not None]
        filled = select_rows(scores, masked).masked_fill(~torch.stack(masks), -math.inf)
        scores = replace_rows(scores, masked, filled)
    return scores


def _change_of(row: SampleRow, vocab_size: int) -> ScoreChange:
    """Return the score changes of a row's bias and penalties."""
    params, biases = row.params, dict(row.params.logit_bias)
    counts = params.presence_penalty or params.frequency_penalty
    return ScoreChange(
        # An out-of-range id would fail the whole batch. `check_request` rejects it earlier; this
        # filter protects callers that skip the check.
        biases={token: bias for token, bias in biases.items() if token < vocab_size},
        repeated={*row.prompt, *row.output} if params.repetition_penalty != 1 else (),
        repetition=params.repetition_penalty,
        counts=Counter(row.output) if counts else {},
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )


class Chosen(NamedTuple):
    """Verified tokens of one sequence after a step.

    Args:
        tokens: new tokens: the accepted drafts, then one sampled token.
        accepted: number of accepted drafts.
        logprobs: log-probability of each token.
        tops: alternatives of each token as (id, log-probability).
        error: no token could be sampled after `tokens`, which then are all drafts.
    """

    tokens: list[int]
    accepted: int
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    error: bool


def accepted_drafts(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Return the number of accepted drafts, the longest prefix that agrees with the samples.

    The model samples a token at the position of each draft with the random draw of the position, as
    it does without drafts. A draft is accepted if it equals the sample. The sample replaces the
    first draft that differs. Drafts therefore never change the output.

    For a deterministic draft x this is the rule of Leviathan et al. 2023 (arXiv 2211.17192, section
    2.3) with a point-mass proposal: x is accepted with probability p(x), otherwise the token comes
    from p without x. A draft sampled from q with the same uniform draw is accepted if both inverse
    CDFs return the same token (coupling by common random numbers). The acceptance rate is at most
    the rate 1 - TV(p, q) of Leviathan et al., but the output does not depend on q or on the number
    of drafts.

    Args:
        drafts: [k] draft tokens.
        chosen: at least [k] tokens sampled at the drafts' positions, given the drafts before each.
    """
    pairs = zip(drafts, chosen, strict=False)
    return next((n for n, (draft, token) in enumerate(pairs) if draft != token), len(drafts))


def verified(sampled: Sampled, drafts: Sequence[Sequence[int]]) -> list[Chosen]:
    """Return the verified tokens of each sequence.

    Args:
        sampled: [b] samples: for each sequence the samples at the positions of its drafts, then the
            sample after its last draft.
        drafts: drafts of each sequence.
    """
    tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
    finite = sampled.finite.tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        ids, values = sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    chosen, start = [], 0
    for proposed in drafts:
        accepted = accepted_drafts(proposed, tokens[start:]) if proposed else 0
        count = accepted + 1
        valid = finite[start : start + count]
        # Tokens before the first invalid row are accepted drafts and stay valid.
        if error := not all(valid):
            accepted = count = valid.index(False)
        rows = slice(start, start + count)
        chosen.append(Chosen(tokens[rows], accepted, logprobs[rows], tops[rows], error))
        start += len(proposed) + 1
    return chosen


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Sample one token per row, with log-probabilities.

    An all-greedy batch without bias, penalties and masks costs an argmax and a log-softmax. The
    host does not wait for the device.

    Args:
        logits: [b, V] without padding columns, equal on all ranks that must sample the same tokens;
            not changed.
        rows: [b] sampling inputs.
    """
    logits = logits.float()
    choice = choose_tokens(
        logits,
        adjust_logits(logits, rows),
        [row.params for row in rows],
        [0.0 if row.params.greedy else row.uniform for row in rows],
        num_top=[row.params.logprobs or 0 for row in rows],
    )
    return Sampled(**choice._asdict())
