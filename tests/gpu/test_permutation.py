# SPDX-License-Identifier: Apache-2.0
"""Row permutations against their equations: outputs, gradients, dropped and padding rows."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.permutation import Permutation, naive, sum_rows, take_rows
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import (
    DTYPES,
    assert_refused,
    random_tensor,
    sized,
    use_launches,
)
from tests.support.inputs import generator
from tests.support.launch_kernels import assert_launches
from tests.support.nan_memory import nan_memory

KERNELS = pytest.mark.gpu
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("triton", marks=KERNELS)]
)
# tokens, copies, number of dropped rows
PERMUTATIONS = {
    "one copy": (7, 1, 0),
    "two copies": (11, 2, 0),
    "two copies, dropped": (13, 2, 9),
    "three copies, dropped": (9, 3, 5),
    "eight copies": (5, 8, 0),
    "model size, dropped": sized((3000, 8, 5000), (5, 10, 7)),
}


def make_permutation(case: str, device: torch.device | str = "cpu") -> Permutation:
    """Return a permutation whose rows are in a different order than the token copies."""
    tokens, copies, missing = PERMUTATIONS[case]
    source = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(tokens * copies, generator=source)
    return Permutation.of(slots[missing:].to(device), tokens, copies)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Use blocks so small that a row has several, and fill uninitialised memory with NaN."""
    use_launches(monkeypatch, "permutation", ("TAKE",), BLOCK=16)
    with nan_memory():
        yield


@pytest.mark.parametrize("features", sized([2048, 1030], [37]))
@pytest.mark.parametrize("case", PERMUTATIONS)
def test_permutations_match_their_equations(backend, case, features):
    permutation = make_permutation(case, backend.device)
    slots, rows = permutation.slots, len(permutation.sources)
    (x,) = backend.random((len(slots), features))
    backend.agree(
        lambda x, **options: take_rows(x, permutation, **options),
        lambda x: x[permutation.sources // slots.shape[1]],
        (x,),
    )
    # A factor's gradient is a sum in fp32 of products that both sides read unrounded.
    for weights in ([], [slots.shape]):
        backend.agree(
            lambda y, w=None, **options: sum_rows(y, permutation, weights=w, **options),
            lambda y, w=None: naive.sum_rows(y, slots, w),
            backend.random((rows, features), *weights),
            fp32_inputs=(1,),
        )


def test_gradients_of_weights_are_summed_in_fp32(backend):
    """Rows and gradients are the same numbers on both sides, whatever their dtype."""
    permutation = make_permutation("three copies, dropped", backend.device)
    slots = permutation.slots
    y, weights, grad = backend.random((len(permutation.sources), 37), slots.shape, (len(slots), 37))
    y, grad = y.to(backend.dtype), grad.to(backend.dtype)
    weights = weights.to(torch.promote_types(backend.dtype, torch.float32)).requires_grad_()
    out = sum_rows(y, permutation, weights=weights, implementation=backend.implementation)
    (actual,) = torch.autograd.grad(out, weights, grad)
    leaf = weights.detach().double().requires_grad_()
    if backend.device.type == "cuda":
        out = sum_rows(y.double(), permutation, weights=leaf, implementation="reference")
    else:
        out = naive.sum_rows(y.double(), slots, leaf)
    expected = torch.autograd.grad(out, leaf, grad.double())
    bound = 1e-12 if backend.dtype is torch.float64 else 1e-6
    assert_close_by_metric("gradient of weights", actual, *expected, bound=bound)
    dropped = slots < 0
    assert dropped.any()
    assert not actual[dropped].any()


@IMPLEMENTATIONS
def test_padding_rows_match_the_definition(implementation):
    """Fewer, as many and more rows than slots."""
    tokens, copies, features, source = 5, 2, 37, generator(1234)

    def make(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    slots_with_row = torch.tensor([7, 2, 9, 0, 4, 3])
    for rows, count in ((3, 0), (8, 6), (tokens * copies, 6), (13, 6)):
        row_slots = slots_with_row[:count]
        slots = torch.full((rows,), 6)  # the slot of padding rows, which no token row uses
        row_index = torch.tensor([1, 0, 3, 4, 6, 7])[:count]
        slots[row_index] = row_slots
        present = torch.zeros(rows, dtype=torch.bool)
        present[row_index] = True
        permutation = Permutation.with_padding(slots, present, tokens=tokens, copies=copies)
        options = {"implementation": implementation}
        x, d_rows_in = make(tokens, features), make(rows, features)
        d_rows_in[~present] = torch.nan
        leaf = x.float().requires_grad_()
        out = take_rows(leaf, permutation, **options)
        out.backward(d_rows_in.float())
        if not count:
            assert not leaf.grad.any()
            assert not sum_rows(d_rows_in.float(), permutation, **options).any()
            continue
        assert_close_by_metric("copies", out[row_index], x[row_slots // copies])
        grad = torch.zeros_like(x).index_add_(0, row_slots // copies, d_rows_in[row_index])
        assert_close_by_metric("gradient of tokens", leaf.grad, grad)
        weights, d_sums = make(tokens, copies), make(tokens, features)
        y, w = (t.float().requires_grad_() for t in (d_rows_in, weights))
        sums = sum_rows(y, permutation, weights=w, **options)
        sums.backward(d_sums.float())
        factors = weights.flatten()[row_slots].unsqueeze(1)
        expected_sums = torch.zeros_like(x).index_add_(
            0, row_slots // copies, factors * d_rows_in[row_index]
        )
        assert_close_by_metric("sums", sums, expected_sums)
        d_rows = factors * d_sums[row_slots // copies]
        assert_close_by_metric("gradient of rows", y.grad[row_index], d_rows)
        d_weights = torch.zeros_like(weights).flatten()
        d_weights[row_slots] = (d_sums[row_slots // copies] * d_rows_in[row_index]).sum(1)
        assert_close_by_metric("gradient of weights", w.grad.flatten(), d_weights)


@KERNELS
def test_weighted_row_sum_computes_both_gradients_in_one_kernel(device):
    tokens, copies, features = sized(512, 3), 3, sized(2048, 37)
    order = torch.arange(tokens * copies, device=device).flip(0)
    permutation = Permutation.of(order[1:], tokens, copies)
    y = random_tensor(device, len(order) - 1, features).requires_grad_()
    weights = random_tensor(device, tokens, copies).requires_grad_()
    grad_out = random_tensor(device, tokens, features)

    def gradients():
        out = sum_rows(y, permutation, weights=weights, implementation="triton")
        return torch.autograd.grad(out, (y, weights), grad_out)

    assert_launches(gradients, {"sum_rows_kernel": 1, "sum_rows_backward_kernel": 1})


@KERNELS
def test_offsets_beyond_32_bits_match_the_rows(device):
    """The last rows of tensors beyond 2^31 elements are copied."""
    rows, width = sized(((1 << 20) + 11, 2048), (11, 40))
    x = torch.ones(rows, width, dtype=DTYPES[-1], device=device)
    x[-5:] = random_tensor(device, 5, width).to(x.dtype)
    permutation = Permutation.of(torch.arange(rows, device=device), rows, 1)
    for op in (take_rows, sum_rows):
        assert torch.equal(op(x, permutation, implementation="triton")[-5:], x[-5:])


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
@IMPLEMENTATIONS
def test_sums_without_rows_are_zero(implementation, tokens):
    permutation = Permutation.of(torch.empty(0, dtype=torch.int64), tokens, 2)
    x = torch.ones(tokens, 5, requires_grad=True)
    weights = torch.ones(tokens, 2, requires_grad=True)
    rows = take_rows(x, permutation, implementation=implementation)
    assert rows.shape == (0, 5)
    out = sum_rows(rows, permutation, weights=weights, implementation=implementation)
    assert torch.equal(out, torch.zeros(tokens, 5))
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(tokens, 5))
    assert torch.equal(weights.grad, torch.zeros(tokens, 2))


def test_strided_gradients_match_contiguous_ones():
    """Expanded and transposed gradients give the same numbers as contiguous ones."""
    permutation = make_permutation("two copies, dropped")
    tokens, copies = permutation.slots.shape
    x = torch.randn(7, tokens).double().t().requires_grad_()
    weights = torch.randn(tokens, copies).double().requires_grad_()
    out = sum_rows(take_rows(x, permutation), permutation, weights=weights)
    grad_outputs = [
        torch.ones(1, 1, dtype=torch.float64).expand(tokens, 7),
        torch.randn(7, tokens).double().t(),
    ]
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
def test_bad_arguments_are_one_line_errors(name):
    assert_refused(*BAD[name])
