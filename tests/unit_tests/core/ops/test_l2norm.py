# SPDX-License-Identifier: Apache-2.0
"""Scaling to length one against its formula."""

import pytest
import torch

from megatron.core.ops.recurrence_prologue.reference import l2norm
from tests.unit_tests.core.ops.formulas import compare, maker


def naive(x, eps):
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_vectors_get_length_one(dtype, eps):
    x = maker()(6, 3, 11)
    x[2] *= 1e-3  # as small as the epsilon's root: it counts
    compare(lambda x: l2norm(x, eps), lambda x: naive(x, eps), (x,), dtype)


def test_a_slice_of_wider_rows_is_read_in_place():
    wide = maker()(5, 2, 20)
    assert torch.equal(l2norm(wide[..., 3:11]), l2norm(wide[..., 3:11].contiguous()))


def test_zeros_stay_zeros_with_finite_gradients():
    x = torch.zeros(3, 4, requires_grad=True)
    y = l2norm(x)
    y.sum().backward()
    assert not y.any()
    assert (x.grad - 1e3).abs().max() < 1e-3


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"eps=-1\.0 must not be negative"):
        l2norm(torch.zeros(3), -1.0)
    with pytest.raises(ValueError, match="give vectors of floats"):
        l2norm(torch.zeros(3, dtype=torch.int64))
