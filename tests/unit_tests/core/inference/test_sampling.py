# SPDX-License-Identifier: Apache-2.0
"""Sampling: kept sets against transformers, distribution by chi-square, no random state."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron.core.inference.sampling import (
    SamplingParams,
    filter_logits,
    invert,
    sample,
    uniform,
)

VOCABULARY = 211


def random_logits(rows: int = 5, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, VOCABULARY, generator=generator)


def draw_many(logits_row: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """Draw `count` tokens for one row of logits, each at its own position."""
    tokens, _ = sample(
        logits_row.expand(count, -1), params, sequences=[0] * count, positions=range(count)
    )
    return tokens


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, VOCABULARY, 10 * VOCABULARY])
@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.9, 1.0])
def test_filters_keep_what_transformers_keeps(temperature: float, top_k: int, top_p: float) -> None:
    logits = random_logits()
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    got = filter_logits(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(got.isfinite(), expected.isfinite())
    torch.testing.assert_close(got.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


def test_top_p_set_is_the_smallest_that_reaches_p() -> None:
    probabilities = torch.tensor([[0.10, 0.40, 0.05, 0.30, 0.15]])
    for top_p, kept in ((0.39, {1}), (0.41, {1, 3}), (0.72, {1, 3, 4}), (0.96, {0, 1, 2, 3, 4})):
        scores = filter_logits(probabilities.log(), SamplingParams(top_p=top_p))
        assert set(scores[0].isfinite().nonzero().flatten().tolist()) == kept


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_top_p_stops_at_the_token_that_reaches_p_exactly(kept: int) -> None:
    logits = torch.zeros(1, 4)  # each 1/4, without rounding
    scores = filter_logits(logits, SamplingParams(top_p=kept / 4))
    assert scores[0].isfinite().tolist() == [i < kept for i in range(4)]
    # Of tokens that tie, transformers keeps the last.
    assert TopPLogitsWarper(kept / 4)(None, logits).isfinite().sum() == kept


def test_of_equal_logits_the_lowest_ids_stay() -> None:
    scores = filter_logits(torch.zeros(1, 1000), SamplingParams(top_p=0.0351))
    assert scores[0].isfinite().nonzero().flatten().tolist() == list(range(36))


def test_the_ends_of_the_distribution_are_tokens_that_can_be_drawn() -> None:
    probabilities = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    draws = torch.tensor([0.0, 0.3 - 1e-12, 0.3, 1 - 2.0**-52], dtype=torch.float64)
    for scale in (1.0, 1 / 3, 7e-11, 3e300):
        tokens = invert((probabilities * scale).expand(4, -1), draws)
        assert tokens.tolist() == [2, 2, 4, 4]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 0.8), (1.5, 12, 1.0), (1.0, 20, 0.7)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    count = 8_000
    logits = random_logits(1, seed=3) / 2
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=11)
    expected = filter_logits(logits, params)[0].double().softmax(-1) * count
    counts = torch.bincount(draw_many(logits, params, count), minlength=VOCABULARY).double()
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


def test_greedy_takes_the_first_maximum_and_its_log_probability() -> None:
    logits = random_logits()
    logits[2, 17] = logits[2, 5] = 100.0
    tokens, logprobs = sample(
        logits, SamplingParams(temperature=0), sequences=range(5), positions=range(5)
    )
    assert tokens[2] == 5
    assert torch.equal(tokens, logits.argmax(-1))
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected.float(), rtol=0, atol=1e-5)


def test_log_probabilities_are_the_models_own() -> None:
    logits = random_logits()
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
    tokens, logprobs = sample(logits, params, sequences=range(5), positions=range(5))
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected.float(), rtol=0, atol=1e-5)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = random_logits(6)
    params = SamplingParams(seed=5)
    sequences, positions = [3, 1, 4, 1, 5, 9], [10, 20, 30, 40, 50, 60]
    whole, _ = sample(logits, params, sequences=sequences, positions=positions)
    for row in reversed(range(6)):
        alone, _ = sample(
            logits[row : row + 1], params, sequences=[sequences[row]], positions=[positions[row]]
        )
        assert alone.item() == whole[row]


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


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-30, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits()
    tokens, logprobs = sample(
        logits, SamplingParams(temperature=temperature), sequences=range(5), positions=range(5)
    )
    assert torch.equal(tokens, logits.argmax(-1))
    assert logprobs.isfinite().all()


def test_huge_temperatures_are_uniform() -> None:
    scores = filter_logits(random_logits(), SamplingParams(temperature=1e30))
    torch.testing.assert_close(scores.softmax(-1), torch.full_like(scores, 1 / VOCABULARY))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_show_in_the_log_probability(temperature: float) -> None:
    logits = random_logits(4)
    logits[0, 3] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    tokens, logprobs = sample(
        logits, SamplingParams(temperature=temperature), sequences=range(4), positions=range(4)
    )
    assert logprobs.isfinite().tolist() == [False, False, False, True]
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top-k is -1"),
        ({"top_p": 0.0}, "top-p is 0.0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"top_p": math.nan}, "top-p is nan"),
        ({"top_p": 2.0, "top_k": -3}, "top-k is -3.*; top-p is 2.0"),
    ],
)
def test_bad_parameters_are_named(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**arguments)
