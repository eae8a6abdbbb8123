# SPDX-License-Identifier: Apache-2.0
"""Sampling against its equations, and the kernels against plain torch, on one row or several."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from megatron.core.ops.sampling import ScoreChange, change_scores_, choose_tokens, naive
from tests.support.gpu_agreement import use_launches
from tests.support.nan_memory import nan_memory

KERNELS = pytest.mark.gpu

SIZE = 211


@dataclass(frozen=True)
class Filter:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


#: All kinds of filters, as in the rows of one batch.
FILTERS = [
    Filter(*values)
    for values in itertools.product(
        (0.3, 1.7), (0, 1, 7, SIZE, 10 * SIZE), (1e-9, 0.3, 0.9, 1.0), (0.0, 0.05)
    )
][::7] + [Filter(0.0), Filter(1e-35), Filter(1e35)]


@pytest.fixture(params=[128, 256], ids=["several blocks", "one block"])
def block_size(request, monkeypatch):
    """Use several blocks per row with a partial last block, or one block."""
    use_launches(monkeypatch, "sampling", ("SAMPLE", "TOP"), BLOCK=request.param)


@pytest.mark.parametrize("draw", [0.0, 0.37, 1 - 2.0**-52])
def test_plain_torch_chooses_the_token_of_the_equations(draw):
    """All filters in one batch, with and without ties."""
    for ties in (False, True):
        logits = random_logits(len(FILTERS), seed=1)
        logits = (2 * logits).round() / 2 if ties else logits
        draws, num_top = [draw] * len(FILTERS), [0] * len(FILTERS)
        choice = choose_tokens(logits, logits, FILTERS, draws, num_top=num_top)
        expected = [naive.choose_token(*row, draw) for row in zip(logits, FILTERS, strict=True)]
        assert choice.tokens.tolist() == expected
        logprobs = logits.double().log_softmax(-1).gather(1, choice.tokens[:, None])[:, 0]
        torch.testing.assert_close(choice.logprobs, logprobs.float(), rtol=0, atol=1e-5)
        assert len(set(expected)) > 5


# --- kernels


@pytest.fixture(autouse=True)
def device_of_logits(request):
    """Make logits on the device of the kernels; other tests run on the CPU."""
    if request.node.get_closest_marker("gpu"):
        with torch.device(request.getfixturevalue("device")):
            yield
    else:
        yield


def choose_twice(logits, filters, draws, *, scores=None, num_top=None):
    """Return the choices of the kernel and of the reference."""
    scores = logits if scores is None else scores
    num_top = num_top or [0] * len(filters)
    with nan_memory():
        kernel = choose_tokens(
            logits, scores, filters, draws, num_top=num_top, implementation="triton"
        )
    return kernel, choose_tokens(
        logits, scores, filters, draws, num_top=num_top, implementation="reference"
    )


def assert_same(kernel, reference):
    assert kernel.tokens.tolist() == reference.tokens.tolist()
    assert kernel.finite.tolist() == reference.finite.tolist()
    torch.testing.assert_close(
        kernel.logprobs, reference.logprobs, rtol=0, atol=1e-5, equal_nan=True
    )


def random_logits(rows, seed=0, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, size, generator=generator, device="cpu")
    return logits.to(torch.get_default_device())


@KERNELS
@pytest.mark.parametrize("draw", [0.37, 1 - 2.0**-52])
def test_every_filter_matches_reference(block_size, draw):
    logits = random_logits(len(FILTERS))
    kernel, reference = choose_twice(logits, FILTERS, [draw] * len(FILTERS))
    assert_same(kernel, reference)
    assert len(set(kernel.tokens.tolist())) > 5


@KERNELS
@pytest.mark.parametrize("steps", [4, 1, 0], ids=["ties", "many ties", "all tie"])
def test_ties_are_ordered_by_token_id(block_size, steps):
    logits = (random_logits(len(FILTERS), seed=2) * steps).round() / 2
    assert_same(*choose_twice(logits, FILTERS, [0.5] * len(FILTERS)))


@KERNELS
def test_nucleus_includes_the_token_that_reaches_p(block_size):
    """The nucleus ends at the token whose cumulative weight reaches p; weights are exact."""
    logits = torch.zeros(9, 4)  # each 1/4, without rounding
    top_ps = (0.2499, 0.25, 0.2501, 0.4999, 0.5, 0.5001, 0.75, 0.7501, 1.0)
    draws = [1 - 2.0**-52] * 9  # draw the last token of the nucleus
    kernel, reference = choose_twice(logits, [Filter(top_p=p) for p in top_ps], draws)
    assert kernel.tokens.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert_same(kernel, reference)


@KERNELS
def test_draws_follow_the_distribution(block_size):
    count = 40
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(count, 4)
    draws = [(n + 0.5) / count for n in range(count)]
    kernel, _ = choose_twice(logits, [Filter()] * count, draws)
    assert torch.bincount(kernel.tokens).tolist() == [20, 10, 5, 5]


@KERNELS
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
def test_rows_without_valid_token_are_marked(block_size):
    logits = random_logits(12)
    bad = {1: math.nan, 2: math.inf, 4: math.nan, 5: math.inf}
    for row, value in bad.items():
        logits[row, 70 + row] = value
    logits[7:9] = -math.inf
    scores = logits.clone()
    scores[10:] = -math.inf  # a mask that allows no token
    filters = [Filter(0.0 if n % 2 else 0.8, top_k=n, top_p=0.9) for n in range(12)]
    kernel, reference = choose_twice(logits, filters, [0.6] * 12, scores=scores)
    assert_same(kernel, reference)
    assert kernel.finite.tolist() == [n in (0, 3, 6, 9) for n in range(12)]
    assert kernel.tokens[[1, 2, 4, 5, 7, 8, 10, 11]].tolist() == [0] * 8


@KERNELS
def test_tokens_use_scores_and_logprobs_use_logits(block_size):
    logits = random_logits(6)
    scores = logits.clone()
    scores[:, 9] += 100
    kernel, reference = choose_twice(
        logits, [Filter(n / 5) for n in range(6)], [0.5] * 6, scores=scores
    )
    assert kernel.tokens.tolist() == [9] * 6
    assert_same(kernel, reference)
    expected = logits.double().log_softmax(-1)[:, 9].float()
    torch.testing.assert_close(kernel.logprobs, expected, rtol=0, atol=1e-5)


@KERNELS
def test_top_logprobs_match_reference(block_size):
    logits = (random_logits(5, seed=7) / 2).round()  # many ties
    logits[3], logits[3, ::2] = 0.0, -0.0
    num_top = [3, 20, 0, 7, 1]
    kernel, reference = choose_twice(logits, [Filter(0.0)] * 5, [0.0] * 5, num_top=num_top)
    for row, count in enumerate(num_top):
        assert kernel.top_ids[row, :count].tolist() == reference.top_ids[row, :count].tolist()
        values = (choice.top_logprobs[row, :count] for choice in (kernel, reference))
        torch.testing.assert_close(*values, rtol=0, atol=1e-5)
    six_tokens, _ = choose_twice(torch.zeros(1, 6), [Filter(0.0)], [0.0], num_top=[20])
    assert six_tokens.top_ids.tolist() == [[0, 1, 2, 3, 4, 5]]


@KERNELS
def test_strided_and_empty_logits_match_reference(block_size):
    padded = torch.full((4, 300), math.nan)
    padded[:, 20 : 20 + SIZE] = random_logits(4)
    view, dense = padded[:, 20 : 20 + SIZE], random_logits(4)
    filters = [Filter(0.1 * n, top_p=0.8) for n in range(4)]
    assert_same(
        choose_twice(view, filters, [0.4] * 4)[0], choose_twice(dense, filters, [0.4] * 4)[1]
    )
    columns = dense.t().contiguous().t()
    assert_same(
        choose_twice(columns, filters, [0.4] * 4)[0], choose_twice(dense, filters, [0.4] * 4)[1]
    )
    empty, _ = choose_twice(random_logits(0), [], [])
    assert empty.tokens.shape == (0,)


@KERNELS
@pytest.mark.filterwarnings("ignore:overflow")
def test_penalties_match_reference(monkeypatch):
    """One launch changes rows with different penalties and more entries than a block."""
    use_launches(monkeypatch, "sampling", ("CHANGE",), BLOCK=16)
    none = {"biases": {}, "repeated": (), "counts": {}}
    strengths = {"repetition": 1.3, "frequency": 0.4, "presence": 0.25}
    changes = {
        0: ScoreChange(**none | {"biases": {3: 2.0, 210: -100.0}}, **strengths),
        2: ScoreChange(**none | {"repeated": {*range(0, 200, 3)}}, **strengths),
        3: ScoreChange(**none | {"counts": {n: n % 5 for n in range(40)}}, **strengths),
        5: ScoreChange(
            biases={n: n / 10 for n in range(50)}, repeated={*range(20, 60)},
            counts={7: 2, 30: 1, 55: 9}, repetition=1e-38, frequency=-0.5, presence=1.5,
        ),
    }  # fmt: skip
    logits = random_logits(6)
    kernel, reference = logits.clone(), logits.clone()
    change_scores_(kernel, changes, implementation="triton")
    change_scores_(reference, changes, implementation="reference")
    torch.testing.assert_close(kernel, reference, rtol=1e-6, atol=1e-6)
    assert kernel.isfinite().all()
    changed = (kernel != logits).any(1).tolist()
    assert changed == [True, False, True, True, False, True]
    repeated = (kernel[2] != logits[2]).sum().item()
    assert repeated == len(changes[2].repeated)
