# SPDX-License-Identifier: Apache-2.0
"""Row permutations against their definition in fp64: outputs, gradients and dropped rows."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.permutation.naive import sum_rows as naive_sum_rows
from tests.support.closeness import assert_close_by_metric
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import (
    PERMUTATIONS,
    compare,
    compare_with_padding,
    make_permutation,
    maker,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
CASES = pytest.mark.parametrize("case", PERMUTATIONS)


@pytest.fixture
def make():
    """Make fp64 tensors from a fixed seed."""
    return maker()


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@DTYPES
@CASES
def test_take_rows_matches_its_definition(make, dtype, case):
    permutation = make_permutation(case)
    tokens, copies = permutation.slots.shape
    compare(
        lambda x: take_rows(x, permutation),
        lambda x: x[permutation.sources // copies],
        (make(tokens, 37),),
        dtype,
    )


@DTYPES
@CASES
@pytest.mark.parametrize("weighted", [False, True])
def test_sum_rows_matches_its_definition(make, dtype, case, weighted):
    permutation = make_permutation(case)
    # the weights are fp32 whatever the rows are
    weights = make(*permutation.slots.shape).to(torch.promote_types(dtype, torch.float32))
    leaf = weights.double().requires_grad_()
    weights.requires_grad_()
    compare(
        lambda y: sum_rows(y, permutation, weights=weights if weighted else None),
        lambda y: naive_sum_rows(y, permutation.slots, leaf if weighted else None),
        (make(len(permutation.sources), 37),),
        dtype,
    )
    if weighted:
        # rows and dout are the same numbers on both sides, and the products are summed in fp32
        bound = 1e-12 if dtype is torch.float64 else 1e-6
        assert_close_by_metric("gradient of weights", weights.grad, leaf.grad, bound=bound)
        dropped = permutation.slots < 0
        assert (dropped.any(), weights.grad[dropped].count_nonzero()) == ("drop" in case, 0)


def test_bf16_rows_are_weighted_in_fp32():
    """fp32 weights of bf16 rows are not rounded to bf16."""
    permutation = make_permutation("three copies, dropped")
    tokens, copies = permutation.slots.shape
    y = torch.ones(len(permutation.sources), 5, dtype=torch.bfloat16)
    # 1 + 2^-9 would be 1 in bf16
    weights = torch.tensor([-1.0, 1 + 2.0**-9, 2.0**-12]).expand(tokens, copies).contiguous()
    out = sum_rows(y, permutation, weights=weights)
    expected = (weights * (permutation.slots >= 0)).sum(1)
    assert torch.equal(out, expected.bfloat16()[:, None].expand(-1, 5))
    occurs = bool((out == 2.0**-9 + 2.0**-12).any())
    assert occurs


@pytest.mark.parametrize("tokens", [0, 3])
def test_sums_without_rows_are_zero(tokens):
    permutation = Permutation.of(torch.empty(0, dtype=torch.int64), tokens, 2)
    x = torch.ones(tokens, 5, requires_grad=True)
    weights = torch.ones(tokens, 2, requires_grad=True)
    rows = take_rows(x, permutation)
    assert rows.shape == (0, 5)
    out = sum_rows(rows, permutation, weights=weights)
    assert torch.equal(out, torch.zeros(tokens, 5))
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(tokens, 5))
    assert torch.equal(weights.grad, torch.zeros(tokens, 2))


def test_strided_gradients_match_contiguous_ones(make):
    """Expanded and transposed gradients give the same numbers as contiguous ones."""
    permutation = make_permutation("two copies, dropped")
    tokens, copies = permutation.slots.shape
    x = make(7, tokens).t().requires_grad_()
    weights = make(tokens, copies).requires_grad_()
    out = sum_rows(take_rows(x, permutation), permutation, weights=weights)
    grad_outputs = [torch.ones(1, 1, dtype=torch.float64).expand(tokens, 7), make(7, tokens).t()]
    for grad_out in grad_outputs:
        actual = torch.autograd.grad(out, (x, weights), grad_out, retain_graph=True)
        expected = torch.autograd.grad(out, (x, weights), grad_out.contiguous(), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_sources_and_slots_are_inverse():
    permutation = make_permutation("three copies, dropped")
    flat = permutation.slots.flatten()
    assert torch.equal(flat[permutation.sources], torch.arange(len(permutation.sources)))
    count = int((flat >= 0).sum())
    assert count == len(permutation.sources)
    assert len(permutation.sources) < len(flat)


X, PERMUTATION = torch.ones(3, 5), Permutation.of(torch.tensor([4, 0]), 3, 2)
BAD = {
    "few rows": (lambda: take_rows(X[:2], PERMUTATION), r"take_rows: x \(2, 5\) must be \[3, h\]"),
    "not rows": (lambda: take_rows(X[0], PERMUTATION), r"x \(5,\)"),
    "other rows": (lambda: sum_rows(X, PERMUTATION), r"sum_rows: y \(3, 5\) must be \[2, h\]"),
    "weights": (
        lambda: sum_rows(X[:2], PERMUTATION, weights=torch.ones(2, 2)),
        r"weights \(2, 2\) torch.float32 must be \(3, 2\) torch.float32",
    ),
    "narrow weights": (
        lambda: sum_rows(X[:2], PERMUTATION, weights=torch.ones(3, 2).bfloat16()),
        "torch.bfloat16 must be",
    ),
    "int32 sources": (
        lambda: Permutation(PERMUTATION.sources.int(), PERMUTATION.slots),
        "sources torch.int32",
    ),
    "flat slots": (
        lambda: Permutation(PERMUTATION.sources, PERMUTATION.slots.flatten()),
        r"slots \(6,\) \[t, k\]",
    ),
    "many sources": (
        lambda: Permutation(torch.arange(7), PERMUTATION.slots),
        r"sources \(7,\) must be \[r\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_padding_rows_match_the_definition(make):
    compare_with_padding(make, "reference")
