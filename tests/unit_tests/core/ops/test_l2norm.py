# SPDX-License-Identifier: Apache-2.0
"""L2 norm against its formula."""

import pytest
import torch

from megatron.core.ops.recurrence import naive
from megatron.core.ops.recurrence.prologue.cpu import l2norm
from tests.unit_tests.core.ops.formulas import compare, maker


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_l2norm_matches_its_formula(dtype, eps):
    x = maker()(6, 3, 11)
    x[2] *= 1e-3  # near sqrt(eps), so eps matters
    compare(lambda x: l2norm(x, eps), lambda x: naive.l2norm(x, eps), (x,), dtype)


def test_l2norm_of_slice_matches_contiguous_input():
    x = maker()(5, 2, 20)
    assert torch.equal(l2norm(x[..., 3:11]), l2norm(x[..., 3:11].contiguous()))


def test_l2norm_of_zeros_has_finite_gradients():
    x = torch.zeros(3, 4, requires_grad=True)
    y = l2norm(x)
    y.sum().backward()
    assert not y.any()
    assert (x.grad - 1e3).abs().max() < 1e-3


def test_bad_l2norm_arguments_are_refused():
    with pytest.raises(ValueError, match=r"eps=-1\.0 must not be negative"):
        l2norm(torch.zeros(3), -1.0)
    with pytest.raises(ValueError, match="give vectors of floats"):
        l2norm(torch.zeros(3, dtype=torch.int64))
