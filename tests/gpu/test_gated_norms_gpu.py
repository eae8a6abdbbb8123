# SPDX-License-Identifier: Apache-2.0
"""Gated norms on the GPU against references in fp64 on the GPU."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.recurrence import GATE_FIRST, NORM_FIRST, gated_rms_norm
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import BOUND, DTYPES, agree, random_tensor, sized
from tests.support.launch_kernels import assert_launches

pytestmark = pytest.mark.gpu

UNITS = sized(16, 2)  # of Qwen3-Next

ORDERS = pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])
#: Heads and values of a unit; the gate begins at column 516 of a unit, unaligned to 16 bytes.
HEADS, VALUES, BEFORE = sized((2, 128, 516), (2, 6, 3))


def gated_inputs(device, tokens: int, rows: int, *weight: int):
    """Return x [t, u, r, V], whole units [rows, u, w], and a weight."""
    units = random_tensor(device, rows, UNITS, BEFORE + HEADS * VALUES)
    return (
        random_tensor(device, tokens, UNITS, HEADS, VALUES),
        units,
        random_tensor(device, *weight),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_padding", [False, True])
@ORDERS
def test_gated_norms_of_heads_match_reference(device, dtype, order, with_padding):
    rows = sized(3001, 7)
    tokens = rows - rows // 5 if with_padding else rows
    order_of_rows = None
    if with_padding:
        order_of_rows = torch.full((rows,), -1, device=device)
        token_rows = torch.randperm(rows, device=device)[:tokens]
        order_of_rows[token_rows] = torch.arange(tokens, device=device)

    def call(x, units, weight, implementation):
        return gated_rms_norm(
            x,
            units[..., BEFORE:].unflatten(-1, (HEADS, VALUES)),
            weight,
            eps=1e-6,
            order=order,
            row_index=order_of_rows,
            implementation=implementation,
        )

    agree(call, gated_inputs(device, tokens, rows, VALUES), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", sized((64, 1024, 5120, 8192), (6, 70)))
@ORDERS
def test_gated_norms_of_groups_match_reference(device, dtype, order, features):
    rows, groups = sized((1003, 3), (3, 2))
    shape = rows, groups * features
    inputs = (
        random_tensor(device, *shape),
        random_tensor(device, *shape) * 3,
        random_tensor(device, shape[1]),
    )

    def call(*inputs, implementation):
        options = {"eps": 1e-6, "order": order, "group_size": features}
        return gated_rms_norm(*inputs, implementation=implementation, **options)

    agree(call, inputs, dtype)


def test_gated_norm_is_one_kernel_each_way(device):
    rows = sized(999, 3)
    x, units, weight = (z.to(DTYPES[-1]) for z in gated_inputs(device, rows, rows, VALUES))
    gate = units[..., BEFORE:].unflatten(-1, (HEADS, VALUES))
    leaves = [z.requires_grad_() for z in (x, gate, weight)]
    grad_out = torch.ones_like(x)

    def forward_and_backward():
        y = gated_rms_norm(*leaves, eps=1e-6, implementation="triton")
        return torch.autograd.grad(y, leaves, grad_out)

    expected = {"gated_norm_forward_kernel": 1, "gated_norm_backward_kernel": 1}
    assert_launches(forward_and_backward, expected, allowed=("sum", "copy"))


@pytest.mark.machine
def test_offsets_beyond_32_bits_match_reference(device):
    """Rows beyond 2^31 elements of x equal the same rows computed separately."""
    channels, tail = 8192, 1000
    tokens = (1 << 31) // channels + 2 * tail
    x = torch.randn(tokens, channels, device=device, dtype=torch.bfloat16)
    gate, scale = x.flip(1), torch.randn(128, device=device)
    shape = (tokens, channels // 128, 128)
    y = gated_rms_norm(x.view(shape), gate.view(shape), scale, eps=1e-6)
    expected = gated_rms_norm(
        x[-tail:].double().view(-1, *shape[1:]),
        gate[-tail:].double().view(-1, *shape[1:]),
        scale.double(),
        eps=1e-6,
    )
    assert_close_by_metric("y", y[-tail:], expected, bound=BOUND[torch.bfloat16])
