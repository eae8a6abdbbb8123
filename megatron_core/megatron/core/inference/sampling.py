# SPDX-License-Identifier: Apache-2.0
"""Choose the next token of every row of a batch, each row by parameters of its own.

A row goes through these steps, and pays only for those it asks for:

1. `logit_bias`, then repetition, frequency and presence penalty, then the mask (`adjust_logits`);
2. temperature, top-k, top-p, min-p (`draw_weights`);
3. one draw (`invert`), or at temperature 0 the first maximum of step 1.

A draw is a function of (seed, sequence, position) and of nothing else: it does not depend on which
other sequences share the batch, on how many steps ran before, or on how the model is spread over
ranks. Because `position` is the absolute position of the new token, generating 20 tokens at once
and generating 10, then 10 more from the longer prompt, draw the same numbers.

Probabilities are rounded down to multiples of 2^-52 before they are added in fp64. Such sums are
exact, so neither their order nor the kernel that adds them changes a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.device import to_host
from megatron.core.initialize import stream_key

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0

# The sum of a row's weights is about 2^52 and each is a whole number: fp64 adds them exactly.
_WEIGHT_SCALE = 2.0**52

# Bits of the largest fp32 number that is not NaN, infinity.
_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Say how the tokens of one request are chosen.

    Args:
        temperature: divides the logits; 0 takes the most probable token (greedy).
        top_k: keep the k most probable tokens and those that tie with the k-th; 0 keeps all.
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
        logprobs: most probable alternatives to report for each token, at most 20; 0 and None
            report that of the chosen token alone.

    Raises:
        ValueError: values out of range, all problems in one line.
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
        # Frozen like the rest, so that the parameters can be a key.
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
        for token, bias in self.logit_bias:
            if not (isinstance(token, int) and token >= 0):
                problems.append(f"logit-bias names token {token!r}: use a token id")
            if not abs(bias) <= MAX_LOGIT_BIAS:
                problems.append(f"logit-bias of token {token} is {bias}: use -100 to 100")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            problems.append(f"logprobs is {self.logprobs}: use 0 to {MAX_LOGPROBS}")
        return problems

    def check_vocabulary(self, vocab_size: int) -> None:
        """Reject a bias of tokens that the model does not have.

        Raises:
            ValueError: naming the first of them.
        """
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                raise ValueError(
                    f"logit-bias names token {token}, outside the vocabulary of {vocab_size}: use "
                    "ids of the model's own tokenizer"
                )

    @cached_property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def penalizes(self) -> bool:
        """Whether any penalty changes logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRow:
    """What `sample` must know of one row besides its logits.

    Args:
        params: how to choose.
        sequence: identity of the row's sequence; part of the key of its random number.
        position: absolute position that the new token will take.
        prompt: token ids of the prompt; read only for a repetition penalty.
        output: token ids generated so far; read only for penalties.
        mask: bool [V], on any device: the tokens that are allowed, by a grammar for example; None
            allows all.
    """

    params: SamplingParams
    sequence: int
    position: int
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """The tokens chosen for a batch of b rows.

    Log-probabilities are the model's own: over the whole vocabulary, before bias, penalties, mask,
    temperature and filters.

    Args:
        tokens: int64 [b].
        logprobs: fp32 [b], of `tokens`.
        top_ids: int64 [b, k], the most probable tokens of each row, the most probable first, of
            equals the lower id first. k is the most that any row asked for, and at most V; a row
            that asked for n reads its first n. None if no row asked for any.
        top_logprobs: fp32 [b, k], of `top_ids`; -inf in rows that asked for none.
        finite: bool [b]; False where there was nothing to choose: NaN or +inf among the logits, all
            of them -inf, or a mask that allows no token. Such a row has token 0 and log-probability
            NaN; other rows are not affected.
    """

    tokens: Tensor
    logprobs: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    finite: Tensor

    def on_host(self) -> Sampled:
        """Return it on the host, there once the device has done what it was told so far."""
        if self.tokens.is_cpu:
            return self
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


def _on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return a tensor of host values without making the host wait for the device."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _select(batch: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of a batch, in their order; the batch itself if it is all of them."""
    if len(rows) == batch.shape[0]:
        return batch
    return batch.index_select(0, _on(batch.device, rows, torch.int64))


def _replace(batch: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """Return the batch with some rows replaced; `values` itself if they are all of them."""
    if len(rows) == batch.shape[0]:
        return values
    return batch.index_copy(0, _on(batch.device, rows, torch.int64), values)


def _entries(device: torch.device, ids: Mapping[int, Collection[int]]) -> tuple[Tensor, Tensor]:
    """Return row and column, each [entries], of the tokens of some rows."""
    counts = [len(tokens) for tokens in ids.values()]
    rows = _on(device, list(ids), torch.int64)
    rows = rows.repeat_interleave(_on(device, counts, torch.int64), output_size=sum(counts))
    flat = [token for tokens in ids.values() for token in tokens]
    return rows, _on(device, flat, torch.int64)


def adjust_logits(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Add biases, apply penalties, and set the logits of tokens that a mask excludes to -inf.

        l = logit + bias
        l = l / r if l > 0 else l * r          for tokens of prompt or output, r: repetition
        l = l - f * count - p * [count > 0]    count: in the output; f: frequency, p: presence

    Args:
        logits: [b, V] fp32; not changed.
        rows: [b].

    Returns:
        [b, V] fp32; `logits` itself if no row asks for any of this.
    """
    work = [n for n, row in enumerate(rows) if row.params.logit_bias or row.params.penalizes]
    masked = [n for n, row in enumerate(rows) if row.mask is not None]
    if not work and not masked:
        return logits
    scores, device = logits.clone(), logits.device
    params = [row.params for row in rows]
    # An id beyond the vocabulary would end the whole batch here; `check_vocabulary` refuses it.
    biases = {n: [e for e in params[n].logit_bias if e[0] < scores.shape[1]] for n in work}
    if any(biases.values()):
        at = _entries(device, {n: [token for token, _ in found] for n, found in biases.items()})
        flat = [bias for found in biases.values() for _, bias in found]
        scores[at] += _on(device, flat, torch.float32)
    repeats = [n for n in work if params[n].repetition_penalty != 1]
    if repeats:
        at = _entries(device, {n: {*rows[n].prompt, *rows[n].output} for n in repeats})
        penalty = _on(device, [p.repetition_penalty for p in params], torch.float32)[at[0]]
        old = scores[at]  # [entries]
        new = torch.where(old > 0, old / penalty, old * penalty)
        # A penalty near 0 must not make a logit infinite.
        scores[at] = new.clamp(max=torch.finfo(torch.float32).max)
    counted = [n for n in work if params[n].presence_penalty or params[n].frequency_penalty]
    if counted:
        counts = {n: Counter(rows[n].output) for n in counted}
        at = _entries(device, counts)
        times = _on(device, [c for found in counts.values() for c in found.values()], torch.float32)
        frequency = _on(device, [p.frequency_penalty for p in params], torch.float32)[at[0]]
        presence = _on(device, [p.presence_penalty for p in params], torch.float32)[at[0]]
        scores[at] -= frequency * times + presence
    if masked:
        masks = [row.mask.to(device, non_blocking=True) for row in rows if row.mask is not None]
        filled = _select(scores, masked).masked_fill(~torch.stack(masks), -math.inf)
        scores = _replace(scores, masked, filled)
    return scores


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


def draw_weights(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return the distribution that tokens are drawn from, after temperature and filters.

    Args:
        scores: [r, V] fp32, of `adjust_logits`.
        rows: [r], none greedy.

    Returns:
        [r, V] fp64: whole numbers in proportion to the probabilities, 0 for excluded tokens. A row
        without filters has a sum of about 2^52, less what was rounded down.
    """
    params = [row.params for row in rows]
    device, vocab_size = scores.device, scores.shape[-1]
    # With the maximum at 0 a tiny temperature sends the others to -inf and makes no NaN. Below
    # 1e-30 that is true of every fp32 difference, and fp32 would round the divisor to 0.
    divisors = [min(max(p.temperature, 1e-30), 1e30) for p in params]
    scores = scores - scores.amax(dim=-1, keepdim=True)
    scores /= _on(device, divisors, torch.float32).unsqueeze(1)
    few = [n for n, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if few:
        part = _select(scores, few)
        counts = [params[n].top_k for n in few]
        best = part.topk(max(counts), dim=-1).values
        kth = best.gather(1, _on(device, counts, torch.int64).unsqueeze(1) - 1)  # [few, 1]
        scores = _replace(scores, few, part.masked_fill(part < kth, -math.inf))
    weights = scores.softmax(dim=-1).double().mul_(_WEIGHT_SCALE).floor_()
    likely = [n for n, p in enumerate(params) if p.top_p < 1]
    if likely:
        part, whole = _select(scores, likely), _select(weights, likely)
        limits = _on(device, [params[n].top_p for n in likely], torch.float64).unsqueeze(1)
        limits = limits * whole.sum(dim=-1, keepdim=True)
        nucleus = nucleus_by_sort if device.type == "cpu" else nucleus_by_search
        weights = _replace(weights, likely, whole.where(nucleus(part, whole, limits), 0.0))
    near = [n for n, p in enumerate(params) if p.min_p > 0]
    if near:
        # exp(score) is the probability over that of the most probable token.
        least = _on(device, [math.log(params[n].min_p) for n in near], torch.float32).unsqueeze(1)
        kept = _select(weights, near).where(_select(scores, near) >= least, 0.0)
        weights = _replace(weights, near, kept)
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
    logprobs: Tensor, rows: Sequence[SampleRow]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return ids and log-probabilities of the alternatives that rows ask for (see `Sampled`).

    Args:
        logprobs: [b, V] fp32.
        rows: [b].
    """
    counts = [row.params.logprobs or 0 for row in rows]
    count = min(max(counts, default=0), logprobs.shape[-1])
    if count == 0:
        return None, None
    asking = [n for n, wanted in enumerate(counts) if wanted]
    part = _select(logprobs, asking)
    # Topk leaves open which of equal values it returns and how it orders them, so each token gets a
    # key of its own: 32 bits that are ordered as the values are, less the id.
    bits = part.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) - torch.arange(part.shape[-1], device=part.device)
    ids = -keys.topk(count, dim=-1).values & 0xFFFFFFFF  # [asking, count]
    shape = (len(rows), count)
    return (
        _replace(ids.new_zeros(shape), asking, ids),
        _replace(part.new_full(shape, -math.inf), asking, part.gather(1, ids)),
    )


class Chosen(NamedTuple):
    """What a step chose for a row.

    Args:
        tokens: to append: accepted drafts, then one that is none.
        accepted: how many of these are drafts.
        logprobs, tops: of each.
        error: nothing could be chosen after `tokens`, which are drafts then.
    """

    tokens: list[int]
    accepted: int
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    error: bool


def accepted_drafts(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many drafts of a row a model accepts: those before the first that it would not
    have chosen itself.

    The model chooses a token at the place of each draft by the draw of that place, as it does
    without drafts. A draft is accepted if it is that token; the first that is not is replaced by
    it. So no draft changes a token. Of a draft that is a function of the tokens before it this is
    the rule of Leviathan et al. 2023 (arXiv 2211.17192, section 2.3) with a proposal of one token
    x: accepted with probability p(x), else a token of p without x. One that is drawn from q by the
    same draw is accepted where both cumulative distributions have the same token (a coupling by
    common random numbers): at most as often as that rule, 1 - TV(p, q), but unlike there what is
    generated is independent of q and of how many drafts there were.

    Args:
        drafts: [k].
        chosen: at least [k], the token chosen at the place of each, given those before it.
    """
    pairs = zip(drafts, chosen, strict=False)
    return next((n for n, (draft, token) in enumerate(pairs) if draft != token), len(drafts))


def verified(sampled: Sampled, drafts: Sequence[Sequence[int]]) -> list[Chosen]:
    """Return what follows for each row: accepted drafts and one more token.

    Args:
        sampled: [b], of all rows in turn the token at the place of each draft, and the one after
            these.
        drafts: of each row.
    """
    tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
    finite = sampled.finite.tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        ids, values = sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    chosen, first = [], 0
    for proposed in drafts:
        accepted = accepted_drafts(proposed, tokens[first:]) if proposed else 0
        count = accepted + 1
        valid = finite[first : first + count]
        if error := not all(valid):
            accepted = count = valid.index(False)
        part = slice(first, first + count)
        chosen.append(Chosen(tokens[part], accepted, logprobs[part], tops[part], error))
        first += len(proposed) + 1
    return chosen


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Choose one token per row and say how probable the model found it.

    A batch that is all greedy, without bias, penalties and masks, costs an argmax and a
    log-softmax. The host does not wait for the device.

    Args:
        logits: [b, V] without padding columns, equal on all ranks that must agree on the token; not
            changed.
        rows: [b].
    """
    logits = logits.float()
    scores = adjust_logits(logits, rows)
    drawn = [n for n, row in enumerate(rows) if not row.params.greedy]
    if len(drawn) < len(rows):
        tokens = scores.argmax(dim=-1)
    else:
        tokens = scores.new_empty(len(rows), dtype=torch.int64)
    if drawn:
        work = [rows[n] for n in drawn]
        draws = [uniform(row.params.seed, row.sequence, row.position) for row in work]
        weights = draw_weights(_select(scores, drawn), work)
        chosen = invert(weights, _on(logits.device, draws, torch.float64))
        tokens = _replace(tokens, drawn, chosen)
    everything = logits.log_softmax(dim=-1)  # [b, V]
    logprobs = everything.gather(1, tokens.unsqueeze(1)).squeeze(1)
    # One NaN or +inf, and -inf alone, make all log-probabilities of a row NaN; none is above 0.
    finite = logprobs > -math.inf
    if scores is not logits:
        finite &= scores.gather(1, tokens.unsqueeze(1)).squeeze(1).isfinite()
    top_ids = top_logprobs = None
    if any(row.params.logprobs for row in rows):
        top_ids, top_logprobs = most_probable(everything, rows)
    return Sampled(
        tokens=tokens.where(finite, 0),
        logprobs=logprobs.where(finite, math.nan),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finite=finite,
    )
