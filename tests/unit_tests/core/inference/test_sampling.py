# SPDX-License-Identifier: Apache-2.0
"""Sampling: every row with its own parameters, against plain Python and transformers."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron.core.inference import SamplingParams
from megatron.core.inference.sampling import Sampled, SampleRow, adjust_logits, sample, uniform
from megatron.core.ops.sampling.cpu import (
    draw_weights,
    invert,
    nucleus_by_search,
    nucleus_by_sort,
)

VOCABULARY = 211

TEMPERATURES = (0.3, 1.0, 1.7)
TOP_KS = (0, 1, 7, VOCABULARY, 10 * VOCABULARY)
TOP_PS = (1e-9, 0.2, 0.9, 1.0)
MIN_PS = (0.0, 0.05, 1.0)


def random_logits(rows: int = 5, *, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocabulary, generator=generator)


def make_row(
    n: int = 0,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    mask: torch.Tensor | None = None,
    **params: Any,
) -> SampleRow:
    """Return a row of sequence n at position 10 n."""
    return SampleRow(
        params=SamplingParams(**params), sequence=n, position=10 * n, prompt=prompt, output=output,
        mask=mask,
    )  # fmt: skip


def make_rows(count: int, **params: Any) -> list[SampleRow]:
    return [make_row(n, **params) for n in range(count)]


def weights_of(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Return the unnormalized distribution of sampled rows."""
    return draw_weights(adjust_logits(logits, rows), [row.params for row in rows])


def naive_scores(logits: torch.Tensor, row: SampleRow) -> list[float]:
    """Return the logits [V] of a row after bias, penalties and mask."""
    p, scores = row.params, logits.double().tolist()
    for token, bias in dict(p.logit_bias).items():
        scores[token] += bias
    for token in range(len(scores)):
        if token in row.prompt or token in row.output:
            r = p.repetition_penalty
            scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
        count = list(row.output).count(token)
        scores[token] -= p.frequency_penalty * count
        scores[token] -= p.presence_penalty if count else 0
        if row.mask is not None and not row.mask[token]:
            scores[token] = -math.inf
    return scores


def naive_probabilities(logits: torch.Tensor, row: SampleRow) -> list[float]:
    """Return the distribution [V] that the token of a row is drawn from."""
    p, scores = row.params, naive_scores(logits, row)
    best = max(scores)
    scores = [(score - best) / p.temperature for score in scores]
    if p.top_k:
        kth = sorted(scores, reverse=True)[: p.top_k][-1]
        scores = [score if score >= kth else -math.inf for score in scores]
    odds = [math.exp(score) for score in scores]
    nucleus, before, limit = set(), 0.0, p.top_p * math.fsum(odds)
    for token in sorted(range(len(scores)), key=lambda t: (-scores[t], t)):
        if p.top_p == 1 or before < limit:
            nucleus.add(token)
        before += odds[token]
    odds = [o if n in nucleus and o >= p.min_p else 0.0 for n, o in enumerate(odds)]
    total = math.fsum(odds)
    return [o / total for o in odds]


def assert_same_distribution(weights: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Compare weights with probabilities, both [b, V] fp64."""
    assert not weights[probabilities == 0].any()
    # Weights are rounded down to multiples of 2^-52.
    assert weights[probabilities > 2**-40].all()
    got = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(got, probabilities, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_filters_match_transformers(temperature: float) -> None:
    rows, expected = [], []
    logits = random_logits(len(TOP_KS) * len(TOP_PS) * len(MIN_PS))
    for row, (k, p, m) in zip(logits, itertools.product(TOP_KS, TOP_PS, MIN_PS), strict=True):
        rows.append(make_row(temperature=temperature, top_k=k, top_p=p, min_p=m))
        scores = TemperatureLogitsWarper(temperature)(None, row[None])
        scores = TopKLogitsWarper(k)(None, scores) if k else scores
        scores = TopPLogitsWarper(p)(None, scores) if p < 1 else scores
        scores = MinPLogitsWarper(m)(None, scores) if m else scores
        expected.append(scores.double().softmax(-1)[0])
    weights = weights_of(logits, rows)
    assert_same_distribution(weights, torch.stack(expected))
    # Whole numbers of at most 53 bits: their sums are exact in any order.
    assert torch.equal(weights, weights.floor())
    assert weights.sum(-1).max() <= 2**52 * (1 + 1e-5)


def test_adjustments_match_plain_python() -> None:
    source = random.Random(0)
    rows = []
    for n in range(40):
        options = {
            "repetition_penalty": source.choice([0.4, 1.3, 5.0]),
            "presence_penalty": source.choice([-2.0, 0.7]),
            "frequency_penalty": source.choice([-0.3, 2.0]),
            "logit_bias": {t: source.uniform(-100, 100) for t in source.sample(range(99), k=3)},
        }
        params = {name: options[name] for name in source.sample(sorted(options), k=n % 5)}
        tokens = source.choices(range(30), k=40)  # repeated, in both, and at the ends
        mask = torch.rand(VOCABULARY) < 0.9 if n % 3 == 0 else None
        rows.append(make_row(n, prompt=tokens[:20], output=tokens[15:], mask=mask, **params))
    logits = random_logits(len(rows))
    before = logits.clone()
    got = adjust_logits(logits, rows)
    expected = [naive_scores(*pair) for pair in zip(logits, rows, strict=True)]
    torch.testing.assert_close(got.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-5)
    assert torch.equal(logits, before)
    plain = [n for n, row in enumerate(rows) if n % 5 == 0 and row.mask is None]
    assert len(plain) > 4
    assert torch.equal(got[plain], logits[plain])
    assert adjust_logits(logits[plain], [rows[n] for n in plain]).shape == (len(plain), VOCABULARY)


def test_penalties_match_hand_computed_logits() -> None:
    logits = torch.tensor([[4.0, -4.0, 4.0, 4.0, -4.0, 0.0]])
    tokens = {"prompt": [0, 1, 1, 2], "output": [2, 3, 3, 3]}
    for params, expected in (
        ({"repetition_penalty": 2.0}, [2, -8, 2, 2, -4, 0]),
        ({"presence_penalty": 1.5}, [4, -4, 2.5, 2.5, -4, 0]),
        ({"frequency_penalty": 0.5}, [4, -4, 3.5, 2.5, -4, 0]),
        ({"logit_bias": {5: 3.0, 1: -1.0}}, [4, -5, 4, 4, -4, 3]),
        (
            {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": -0.5,
             "logit_bias": {1: 10.0, 3: -6.0}},
            [2, 3, 1.5, -3.5, -4, 0],
        ),
    ):  # fmt: skip
        assert adjust_logits(logits, [make_row(**tokens, **params)]).tolist() == [expected]


def test_a_tiny_repetition_penalty_leaves_logits_finite() -> None:
    rows = [make_row(prompt=range(VOCABULARY), temperature=t, repetition_penalty=1e-300 ** (1 / 8))
            for t in (0.0, 1.0)]  # fmt: skip
    assert sample(1e3 * random_logits(2), rows).finite.all()


def test_bias_beyond_the_vocabulary_changes_no_row() -> None:
    params = SamplingParams(logit_bias={VOCABULARY: 5.0, 3: 2.0})
    logits = random_logits(1)
    row = SampleRow(params=params, sequence=0, position=0)
    assert adjust_logits(logits, [row])[0, 3] == logits[0, 3] + 2


def test_masked_tokens_are_never_chosen() -> None:
    logits = random_logits(60)
    allowed = torch.zeros(VOCABULARY, dtype=torch.bool)
    allowed[[5, 9, 100]] = True
    kinds = ({"temperature": 0}, {"temperature": 2.0}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.5})
    rows = [
        make_row(n, mask=allowed if n % 5 else None, logit_bias={7: 100.0}, **kinds[n % 4])
        for n in range(60)
    ]
    sampled = sample(logits, rows)
    for n, token in enumerate(sampled.tokens.tolist()):
        assert token in (5, 9, 100) if n % 5 else token == 7
        if n % 5 and n % 4 == 0:
            assert token == max((5, 9, 100), key=lambda t: float(logits[n, t]))
    assert sampled.finite.all()
    assert len(sampled.tokens.unique()) == 4
    # Log-probabilities ignore mask and bias.
    expected = logits.double().log_softmax(-1).gather(1, sampled.tokens[:, None])[:, 0]
    torch.testing.assert_close(sampled.logprobs, expected.float(), rtol=0, atol=1e-5)


# The top-p set.


def naive_nucleus(scores: torch.Tensor, weights: torch.Tensor, limits: torch.Tensor) -> list:
    """Return the top-p set of each row, as nested lists of bool."""
    sets = []
    for score, weight, limit in zip(
        scores.tolist(), weights.tolist(), limits.flatten().tolist(), strict=True
    ):
        in_set, before = [False] * len(score), 0.0
        for token in sorted(range(len(score)), key=lambda t: (-score[t], t)):
            in_set[token] = before < limit
            before += weight[token]
        sets.append(in_set)
    return sets


@pytest.mark.parametrize("steps", [None, 4, 1], ids=["distinct", "ties", "many-ties"])
@pytest.mark.parametrize("nucleus", [nucleus_by_sort, nucleus_by_search])
def test_nucleus_is_the_shortest_prefix_that_reaches_p(nucleus: Any, steps: int | None) -> None:
    scores = random_logits(48, seed=2, vocabulary=97)
    if steps:
        scores = (scores * steps).round() / steps / 2
    scores -= scores.amax(-1, keepdim=True)
    scores[::3, 40:60] = -math.inf
    scores[1::3, :90] -= 60  # their weight is 0, their score is not -inf
    scores -= scores.amax(-1, keepdim=True)
    weights = scores.softmax(-1).double().mul(2.0**52).floor()
    total = weights.sum(-1, keepdim=True)
    exact = weights.sort(-1, descending=True).values.cumsum(-1)[:, 4:5]  # reached, not passed
    for limits in (exact, *(p * total for p in (1e-9, 0.3, 0.9, 1 - 2**-30))):
        limits = limits.minimum(total - 1)
        assert nucleus(scores, weights, limits).tolist() == naive_nucleus(scores, weights, limits)


@pytest.mark.parametrize("nucleus", [nucleus_by_sort, nucleus_by_search])
def test_nucleus_boundary_and_ties_match_definition(
    nucleus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.ops.sampling.cpu.nucleus_by_sort", nucleus)

    def nucleus_ids(logits: torch.Tensor, top_p: float) -> list[int]:
        return weights_of(logits[None], [make_row(top_p=top_p)])[0].nonzero().flatten().tolist()

    odds = torch.tensor([0.10, 0.40, 0.05, 0.30, 0.15])
    for top_p, tokens in ((0.39, [1]), (0.41, [1, 3]), (0.72, [1, 3, 4]), (0.96, [0, 1, 2, 3, 4])):
        assert nucleus_ids(odds.log(), top_p) == tokens
    for count in (1, 2, 3):  # each probability is 1/4, without rounding
        assert nucleus_ids(torch.zeros(4), count / 4) == list(range(count))
        # Among tied tokens, transformers keeps the last.
        assert TopPLogitsWarper(count / 4)(None, torch.zeros(1, 4)).isfinite().sum() == count
    assert nucleus_ids(torch.zeros(1000), 0.0351) == list(range(36))


# One draw per row.


def test_inverse_cdf_never_draws_zero_probability_tokens() -> None:
    probabilities = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    draws = torch.tensor([0.0, 0.3 - 1e-12, 0.3, 1 - 2.0**-52], dtype=torch.float64)
    for scale in (1.0, 1 / 3, 7e-11, 3e300):
        tokens = invert((probabilities * scale).expand(4, -1), draws)
        assert tokens.tolist() == [2, 2, 4, 4]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 12},
        {"top_k": 20, "top_p": 0.7},
        {"temperature": 1.2, "min_p": 0.1},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {3: 2.0}},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    count = 3_000
    logits = random_logits(1, seed=3) / 2
    tokens = {"prompt": [*range(50)], "output": [*range(40, 90)], "seed": 11}
    rows = make_rows(count, **tokens, **params)
    expected = torch.tensor(naive_probabilities(logits[0], rows[0])).double() * count
    drawn = sample(logits.expand(count, -1), rows).tokens
    counts = torch.bincount(drawn, minlength=VOCABULARY).double()
    assert counts[expected == 0].sum() == 0
    usual = expected >= 5
    # Rare tokens share one cell: chi-square needs at least about five expected draws per cell.
    cells = torch.cat((expected[usual], expected[~usual].sum()[None])).clamp(min=1e-9)
    seen = torch.cat((counts[usual], counts[~usual].sum()[None]))
    used = cells > 1
    degrees = int(used.sum()) - 1
    chi_square = ((seen - cells)[used] ** 2 / cells[used]).sum().item()
    # Wilson-Hilferty: the 0.9999 quantile of chi-square. The draws are fixed, so this cannot flake.
    bound = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    assert degrees > 3
    assert chi_square < bound


def test_uniform_depends_on_all_of_its_key() -> None:
    base = uniform(1, 2, 3)
    assert uniform(1, 2, 3) == base
    assert base not in (uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4), uniform(2, 1, 3))
    axis = range(20)
    values = torch.tensor(
        [uniform(s, q, p) for s in axis for q in axis for p in axis], dtype=torch.float64
    )
    assert 0 <= values.min() <= values.max() < 1
    assert values.unique().numel() == values.numel()
    assert abs(values.mean() - 0.5) < 4 / math.sqrt(12 * values.numel())
    assert uniform(-1, 0, 0) != uniform(1, 0, 0)
    assert uniform(0, 1, 23) != uniform(0, 12, 3)


def test_seed_sequence_and_position_determine_the_draw() -> None:
    logits = torch.zeros(1, 10_000)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 3, 4)]
    rows = [
        SampleRow(params=SamplingParams(seed=seed), sequence=sequence, position=position)
        for seed, sequence, position in keys
    ]
    tokens = sample(logits.expand(5, -1), rows).tokens.tolist()
    assert tokens == [int(uniform(*key) * 10_000) for key in keys]


# Every row alone.


def mixed_rows(vocabulary: int) -> list[SampleRow]:
    """Return rows with different parameters, two of each kind."""
    mask = torch.arange(vocabulary) % 3 > 0
    history = {"prompt": range(0, 60, 2), "output": [1, 1, 5, 60]}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 9},
        {"top_k": 40, "logprobs": 2},
        {"top_p": 0.6, "temperature": 1.3},
        {"min_p": 0.02, "logprobs": 5},
        {"temperature": 0.0, "logit_bias": {4: 9.0}},
        {"repetition_penalty": 1.4, **history},
        {"presence_penalty": 1.0, "frequency_penalty": 0.3, "top_p": 0.95, **history},
        {"mask": mask, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"mask": mask, "temperature": 0.0, "logprobs": 1},
        {"temperature": 1e-40},
    ]
    return [make_row(n, seed=n, **kind) for n, kind in enumerate([*kinds, *kinds])]


def row_values(sampled: Sampled, n: int, row: SampleRow) -> tuple:
    """Return the sampled values of row n."""
    num_logprobs = row.params.logprobs or 0
    ids = sampled.top_ids[n, :num_logprobs].tolist() if num_logprobs else []
    values = sampled.top_logprobs[n, :num_logprobs].tolist() if num_logprobs else []
    return (
        sampled.tokens[n].item(),
        sampled.logprobs[n].item(),
        bool(sampled.finite[n]),
        ids,
        values,
    )


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 4_001])
def test_row_outputs_do_not_depend_on_the_batch(vocabulary: int) -> None:
    rows = mixed_rows(vocabulary)
    logits = random_logits(len(rows), seed=4, vocabulary=vocabulary)
    drawn = [n for n, row in enumerate(rows) if not row.params.greedy]
    batched = weights_of(logits[drawn], [rows[n] for n in drawn])
    single = []
    for n, row in enumerate(rows):
        single.append(row_values(sample(logits[n : n + 1], [row]), 0, row))
        if n in drawn:
            assert torch.equal(weights_of(logits[n : n + 1], [row])[0], batched[drawn.index(n)])
    source = random.Random(5)
    orders = [list(range(len(rows))), *(source.sample(range(len(rows)), k) for k in (24, 11, 2))]
    for order in orders:
        sampled = sample(logits[order], [rows[n] for n in order])
        assert [row_values(sampled, index, rows[n]) for index, n in enumerate(order)] == [
            single[n] for n in order
        ]


@pytest.mark.parametrize("kind", ["nan", "inf", "empty", "masked"])
def test_invalid_row_is_marked_and_changes_no_other_row(kind: str) -> None:
    rows = mixed_rows(VOCABULARY)
    logits = random_logits(len(rows), seed=6)
    expected = sample(logits, rows)
    for invalid_row in range(12):
        broken, changed = logits.clone(), list(rows)
        if kind == "masked":
            old = rows[invalid_row]
            changed[invalid_row] = SampleRow(
                params=old.params, sequence=old.sequence, position=old.position,
                mask=torch.zeros(VOCABULARY, dtype=torch.bool),
            )  # fmt: skip
        elif kind == "empty":
            broken[invalid_row] = -math.inf
        else:
            broken[invalid_row, 17] = float(kind)
        sampled = sample(broken, changed)
        assert not sampled.finite[invalid_row]
        assert sampled.tokens[invalid_row] == 0
        assert sampled.logprobs[invalid_row].isnan()
        for n, row in enumerate(rows):
            assert n == invalid_row or row_values(sampled, n, row) == row_values(expected, n, row)


def test_a_row_that_excludes_some_tokens_is_finite() -> None:
    logits = random_logits(2)
    logits[:, 1:] = -math.inf
    sampled = sample(logits, [make_row(temperature=0), make_row(top_p=0.5)])
    assert sampled.tokens.tolist() == [0, 0]
    assert sampled.finite.all()
    assert sampled.logprobs.tolist() == [0.0, 0.0]


# Greedy, temperatures, log-probabilities.


def test_greedy_takes_the_first_maximum_and_its_log_probability() -> None:
    logits = random_logits()
    logits[2, 17] = logits[2, 5] = 100.0
    before = logits.clone()
    sampled = sample(logits, make_rows(5, temperature=0))
    assert sampled.tokens[2] == 5
    assert torch.equal(sampled.tokens, logits.argmax(-1))
    expected = logits.double().log_softmax(-1).gather(1, sampled.tokens[:, None])[:, 0]
    assert sampled.logprobs.dtype == torch.float32
    torch.testing.assert_close(sampled.logprobs, expected.float(), rtol=0, atol=1e-5)
    assert torch.equal(logits, before)
    assert (sampled.top_ids, sampled.top_logprobs) == (None, None)


def test_top_logprobs_are_sorted_and_ties_keep_token_order() -> None:
    logits = (random_logits(4, seed=7) / 2).round()  # many ties
    logits[3] = 0.0
    logits[3, ::2] = -0.0
    counts = (3, 20, None, 7)
    rows = [make_row(n, logprobs=count, temperature=n % 2) for n, count in enumerate(counts)]
    sampled = sample(logits, rows)
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    assert sampled.top_ids.shape == sampled.top_logprobs.shape == (4, 20)
    for n, count in enumerate(counts):
        if count is None:
            equal = bool((sampled.top_logprobs[n] == -math.inf).all())
            assert equal
            continue
        values = logits[n].tolist()
        order = sorted(range(VOCABULARY), key=lambda t: (-values[t], t))[:count]
        assert sampled.top_ids[n, :count].tolist() == order
        expected = logits[n].double().log_softmax(-1)[order].float()
        torch.testing.assert_close(sampled.top_logprobs[n, :count], expected, rtol=0, atol=1e-5)
    few = sample(torch.zeros(1, 6), [make_row(logprobs=20)])
    assert few.top_ids is not None
    assert few.top_ids.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_low_precision_logits_are_sampled_as_fp32() -> None:
    logits, rows = random_logits(24).bfloat16(), mixed_rows(VOCABULARY)
    got, expected = sample(logits, rows), sample(logits.float(), rows)
    assert torch.equal(got.tokens, expected.tokens)
    assert torch.equal(got.logprobs, expected.logprobs)


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-30, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits()
    sampled = sample(logits, make_rows(5, temperature=temperature))
    assert torch.equal(sampled.tokens, logits.argmax(-1))
    assert sampled.finite.all()


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_huge_temperatures_are_uniform(temperature: float) -> None:
    logits = random_logits(1)
    logits[:, :11] = -math.inf
    weights = weights_of(logits, [make_row(temperature=temperature)])
    expected = torch.full_like(weights, 1 / (VOCABULARY - 11))
    expected[:, :11] = 0
    assert_same_distribution(weights, expected)


# Parameters.


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top-k is -1"),
        ({"top_k": 1.5}, "top-k is 1.5"),
        ({"top_p": 0.0}, "top-p is 0.0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"top_p": math.nan}, "top-p is nan"),
        ({"min_p": -0.1}, "min-p is -0.1"),
        ({"min_p": 1.1}, "min-p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition-penalty is 0.0"),
        ({"presence_penalty": 2.1}, "presence-penalty is 2.1"),
        ({"frequency_penalty": math.nan}, "frequency-penalty is nan"),
        ({"logit_bias": {-1: 0.0}}, "logit-bias names token -1"),
        ({"logit_bias": {3: 101.0}}, "logit-bias of token 3 is 101.0"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"logprobs": -1}, "logprobs is -1"),
        (
            {"top_p": 2.0, "top_k": -3, "min_p": 7, "logit_bias": {9: math.nan}, "logprobs": 99},
            "top-k is -3.*; top-p is 2.0.*; min-p is 7.*; .*token 9 is nan.*; logprobs is 99",
        ),
    ],
)
def test_all_bad_parameters_are_reported(arguments: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        SamplingParams(**arguments)


def test_equal_parameters_hash_equally() -> None:
    params = SamplingParams(logit_bias={5: 1.0, 2: -1.0})
    reordered = SamplingParams(logit_bias=((2, -1.0), (5, 1.0)))
    assert len({params, reordered}) == 1
    assert params.logit_bias == ((2, -1.0), (5, 1.0))
