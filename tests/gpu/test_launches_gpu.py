# SPDX-License-Identifier: Apache-2.0
"""The launch counter of the other tests: launches are counted by name, unexpected ones fail."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.permutation import Permutation, take_rows
from megatron.core.ops.rmsnorm import rms_norm
from megatron.core.ops.swiglu import gated
from tests.support.gpu_agreement import DTYPES, agree, random_tensor, sized
from tests.support.launch_kernels import assert_launches, launched

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
