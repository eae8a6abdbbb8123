# SPDX-License-Identifier: Apache-2.0
"""The skip connection out + D x of Mamba-2 against its formula, and the kernels on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.core.ops.recurrence import add_skip
from tests.support.closeness import relative_error
from tests.support.gpu_agreement import BOUND, DTYPES, REHEARSES, agree, random_tensor, sized
from tests.support.inputs import generator
from tests.support.launch_kernels import assert_launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_skip_connection_matches_its_formula(dtype):
    out, x, skip = (torch.randn(shape, generator=generator(3)) for shape in ((5, 4, 3),) * 2 + (4,))
    out, x, skip = ((t + i).to(dtype).requires_grad_() for i, t in enumerate((out, x, skip)))
    fp64_leaves = [t.detach().double().requires_grad_() for t in (out, x, skip)]
    y, expected = add_skip(out, x, skip), fp64_leaves[0] + fp64_leaves[2][:, None] * fp64_leaves[1]
    grad = torch.randn(y.shape, generator=generator(4)).to(dtype)
    actual = (y, *torch.autograd.grad(y, (out, x, skip), grad))
    expected = (expected, *torch.autograd.grad(expected, fp64_leaves, grad.double()))
    bounds = {**BOUND, torch.float32: 1e-5, torch.float64: 1e-12}
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) <= bounds[dtype]
    with pytest.raises(ValueError, match="skip"):
        add_skip(out, x, skip[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", sized([1500], [0, 1, 21]))
def test_skip_kernels_match_reference(device, dtype, tokens, monkeypatch):
    """Inputs are slices, features do not fill a tile, and a head has several tiles."""
    from megatron.core.ops.launches import Launches
    from megatron.core.ops.recurrence.ssd import triton as skips

    if REHEARSES:
        launch = {"ELEMENTS": 64, "num_warps": 1, "num_stages": 1}
        for name in ("SKIP", "SKIP_BACKWARD"):
            monkeypatch.setattr(skips, name, Launches(name, launch))
    heads, width = sized((128, 52), (3, 6))
    projection = random_tensor(device, tokens, heads, 2 * width + 1)
    transposed = random_tensor(device, heads, tokens, width).transpose(0, 1)

    def skipped(projection, transposed, skip, *, implementation):
        out, x, _ = projection.split([width, width, 1], -1)
        options = {"implementation": implementation}
        return add_skip(out, x, skip, **options), add_skip(transposed, out, skip, **options)

    inputs = (projection, transposed, random_tensor(device, heads))
    bounds = {**BOUND, torch.float32: 2e-5 if device.type == "cuda" else 1e-5}
    agree(skipped, inputs, dtype, fp32_inputs=(2,), bounds=bounds)


@pytest.mark.gpu
def test_skip_connection_is_one_kernel_each_way(device):
    shape = sized((1500, 128, 64), (33, 3, 5))
    leaves = [random_tensor(device, *x).requires_grad_() for x in (shape, shape, shape[1:2])]
    grad_out = random_tensor(device, *shape)
    forward = partial(add_skip, *leaves, implementation="triton")
    assert_launches(forward, {"add_skip_kernel": 1})
    assert_launches(
        lambda: torch.autograd.grad(forward(), leaves, grad_out),
        {"add_skip_kernel": 1, "add_skip_backward_kernel": 1},
        allowed=("copy", "sum"),  # the partial sums of the gradient of D
    )
