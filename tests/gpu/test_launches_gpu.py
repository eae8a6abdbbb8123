# SPDX-License-Identifier: Apache-2.0
"""The launch counter of the other tests: launches are counted by name, unexpected ones fail."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.attention import attention
from megatron.core.ops.dropout import dropout
from megatron.core.ops.layernorm import layer_norm
from megatron.core.ops.linear_cross_entropy import linear_cross_entropy
from megatron.core.ops.permutation import Permutation, sum_rows, take_rows
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.swiglu import gated
from tests.support.gpu_agreement import DTYPES, REHEARSES, agree, random_tensor, sized
from tests.support.launch_kernels import assert_launches, is_product, launched

pytestmark = pytest.mark.gpu

ROWS, FEATURES = sized(512, 3), sized(2048, 37)


def with_gradients(function, *inputs):
    """Return a call that runs the function forward and backward."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    grad_out = random_tensor(leaves[0].device, *function(*leaves).shape)
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad_out)


def normed(x, w):
    return rms_norm(x, w, eps=1e-5, implementation="triton")


NORM = {"rms_norm_forward_kernel": 1, "rms_norm_backward_kernel": 1}


def test_launches_are_counted_by_name(device):
    x, w = random_tensor(device, ROWS, FEATURES), random_tensor(device, FEATURES)
    assert_launches(lambda: normed(x, w), {"rms_norm_forward_kernel": 1})
    assert_launches(lambda: normed(normed(x, w), w), {"rms_norm_forward_kernel": 2})
    assert_launches(with_gradients(normed, x, w), NORM, allowed=("sum",))
    permutation = Permutation.of(torch.arange(ROWS, device=device).flip(0), ROWS, 1)
    call = with_gradients(lambda x: take_rows(x, permutation, implementation="triton"), x)
    assert_launches(call, {"take_rows_kernel": 1, "sum_rows_kernel": 1})


def test_unexpected_launch_is_reported(device):
    x, w = random_tensor(device, ROWS, FEATURES), random_tensor(device, FEATURES)
    for expected, message in (
        ({}, "rms_norm_forward_kernel: 1 launches, expected 0"),
        ({"rms_norm_forward_kernel": 2}, "1 launches, expected 2"),
        ({"rms_norm_forward_kernel": 1, "absent_kernel": 1}, "absent_kernel: 0 launches"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_launches(lambda: normed(x, w), expected)
    with pytest.raises(AssertionError, match="a product of torch's"):
        assert_launches(lambda: normed(x, w) @ x.t(), {"rms_norm_forward_kernel": 1})
    with pytest.raises(AssertionError, match="not allowed"):
        assert_launches(lambda: normed(x, w) + x, {"rms_norm_forward_kernel": 1})
    assert_launches(lambda: normed(x, w) + x, {"rms_norm_forward_kernel": 1}, allowed=("add",))


def test_product_and_sum_kernels_have_expected_names(device):
    x = random_tensor(device, ROWS, FEATURES)
    for call in (
        lambda: x @ x.t(),
        lambda: torch.bmm(x[None], x[None].mT),
        lambda: torch.addmm(x[:, :ROWS], x, x.t()) if FEATURES >= ROWS else None,
    ):
        with pytest.raises(AssertionError, match="a product of torch's"):
            assert_launches(call, {})
    assert_launches(lambda: x.sum(0), {}, allowed=("sum",))
    assert_launches(lambda: x.clone().zero_(), {}, allowed=("copy",))
    assert launched(lambda: x.view(-1)[3:]).device_kernels.total() == 0, "a view computes nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_kernel_fails_agreement(device, dtype):
    x = random_tensor(device, ROWS, 2 * FEATURES)

    def wrong(x, implementation):
        y = gated(x, "silu", implementation=implementation)
        return y * 1.05 if implementation == "triton" else y

    def unwritten(x, implementation):
        if implementation == "reference":
            return x * 1
        return x + 0 * torch.empty_like(x)

    agree(lambda x, implementation: gated(x, "silu", implementation=implementation), (x,), dtype)
    for function in (wrong, unwritten):
        with pytest.raises(AssertionError, match="output 0: error"):
            agree(function, (x,), dtype)


def inputs_of(device, *shapes):
    return [random_tensor(device, *shape).requires_grad_() for shape in shapes]


def gradients_of(function, leaves):
    """Return a call that runs a function with `implementation="triton"` forward and backward."""
    grad_out = random_tensor(leaves[0].device, *function(*leaves, implementation="triton").shape)
    return lambda: torch.autograd.grad(function(*leaves, implementation="triton"), leaves, grad_out)


def test_attention_launches_no_torch_products(device):
    heads, size = sized((256, 1, 16, 128), (20, 1, 2, 6)), sized((256, 1, 4, 128), (20, 1, 1, 6))
    leaves = inputs_of(device, heads, size, size)
    call = gradients_of(lambda q, k, v, **o: attention(q, k, v, window=9, **o)[0], leaves)
    backward = ("row_dots_kernel", "query_gradient_kernel", "key_gradient_kernel")
    assert_launches(call, dict.fromkeys(("attention_forward_kernel", *backward), 1))


@pytest.mark.parametrize(
    ("name", "function", "kernels"),
    [
        (
            "layer norm",
            lambda x, w, **o: layer_norm(x, w, w, eps=1e-5, **o),
            {"layer_norm_forward_kernel": 1, "layer_norm_backward_kernel": 1},
        ),
        (
            "gate",
            lambda x, w, **o: gated(x, "gelu", **o),
            {"gated_forward_kernel": 1, "gated_backward_kernel": 1},
        ),
    ],
    ids=["layer norm", "gate"],
)
def test_row_ops_are_one_kernel_each_way(device, name, function, kernels):
    x, w = inputs_of(device, (ROWS, 2 * FEATURES), (2 * FEATURES,))
    leaves = [x, w] if "norm" in name else [x]
    call = gradients_of(
        lambda *xs, **o: function(*(xs if len(xs) > 1 else (xs[0], None)), **o), leaves
    )
    assert_launches(call, kernels, allowed=("sum", "copy", "add"))


def test_weighted_row_sum_computes_both_gradients_in_one_kernel(device):
    copies = 3
    order = torch.arange(ROWS * copies, device=device).flip(0)
    permutation = Permutation.of(order[1:], ROWS, copies)
    leaves = inputs_of(device, (len(order) - 1, FEATURES), (ROWS, copies))
    call = gradients_of(lambda y, w, **o: sum_rows(y, permutation, weights=w, **o), leaves)
    assert_launches(call, {"sum_rows_kernel": 1, "sum_rows_backward_kernel": 1})


def test_dropout_is_one_kernel_each_way(device):
    """torch computes hashes of rows and columns; only the kernel passes over the input."""
    leaves = inputs_of(device, (ROWS, 2, FEATURES))
    site = {
        "rate": 0.1,
        "key": 5,
        "sample_ids": torch.tensor([8, 3], device=device),
        "position_ids": torch.arange(ROWS, device=device),
    }
    launches = launched(gradients_of(lambda x, **o: dropout(x, **site, **o), leaves))
    assert launches.kernels == {"dropout_kernel": 2}
    assert not any(is_product(name) for name in launches.device_kernels), launches.device_kernels


def test_cross_entropy_has_three_products_per_chunk(device):
    """torch computes the products of logits and both gradients, and nothing between them."""
    tokens, features, vocabulary = sized((512, 256, 1000), (6, 8, 40))
    hidden, weight = inputs_of(device, (tokens, features), (vocabulary, features))
    targets = torch.arange(tokens, device=device) % vocabulary
    weights = torch.ones(tokens, device=device)

    def loss():
        options = {"chunk_tokens": tokens // 2, "implementation": "triton"}
        value = linear_cross_entropy(hidden, weight, targets, weights, **options)[0]
        return torch.autograd.grad(value, (hidden, weight))

    launches = launched(loss)
    assert launches.kernels == {"chunk_statistics_kernel": 2, "chunk_gradient_kernel": 2}
    products = {name: n for name, n in launches.device_kernels.items() if is_product(name)}
    # A GPU library may split a product into several kernels; the loss is a dot product.
    assert (sum(products.values()) == 7) if REHEARSES else (sum(products.values()) >= 6), products
