# SPDX-License-Identifier: Apache-2.0
"""Gated norms on the GPU against the references in fp64 there."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.gated_rms_norm import GATE_FIRST, NORM_FIRST, gated_rms_norm
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import BOUND, DTYPES, agree, random_tensor, sized
from tests.support.launch_kernels import assert_launches

pytestmark = pytest.mark.gpu

UNITS = sized(16, 2)  # of Qwen3-Next

ORDERS = pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])
#: Values of a unit and heads of them; the gate begins 516 columns into a unit, and is no multiple
#: of 16 bytes from anything.
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
@pytest.mark.parametrize("places", [False, True])
@ORDERS
def test_gated_norms_of_heads(device, dtype, order, places):
    rows = sized(3001, 7)
    tokens = rows - rows // 5 if places else rows
    order_of_rows = None
    if places:
        order_of_rows = torch.full((rows,), -1, device=device)
        real = torch.randperm(rows, device=device)[:tokens]
        order_of_rows[real] = torch.arange(tokens, device=device)

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
def test_gated_norms_of_groups(device, dtype, order, features):
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


def test_launches_of_a_gated_norm(device):
    rows = sized(999, 3)
    x, units, weight = (z.to(DTYPES[-1]) for z in gated_inputs(device, rows, rows, VALUES))
    gate = units[..., BEFORE:].unflatten(-1, (HEADS, VALUES))
    leaves = [z.requires_grad_() for z in (x, gate, weight)]
    pull = torch.ones_like(x)

    def both():
        y = gated_rms_norm(*leaves, eps=1e-6, implementation="triton")
        return torch.autograd.grad(y, leaves, pull)

    expected = {"gated_norm_forward_kernel": 1, "gated_norm_backward_kernel": 1}
    assert_launches(both, expected, allowed=("sum", "copy"))


@pytest.mark.machine
def test_places_beyond_32_bits(device):
    """Rows that are more than 2^31 elements into x are held to the same ones by themselves."""
    channels, tail = 8192, 1000
    tokens = (1 << 31) // channels + 2 * tail
    x = torch.randn(tokens, channels, device=device, dtype=torch.bfloat16)
    gate, scale = x.flip(1), torch.randn(128, device=device)
    shape = (tokens, channels // 128, 128)
    y = gated_rms_norm(x.view(shape), gate.view(shape), scale, eps=1e-6)
    wanted = gated_rms_norm(
        x[-tail:].double().view(-1, *shape[1:]),
        gate[-tail:].double().view(-1, *shape[1:]),
        scale.double(),
        eps=1e-6,
    )
    assert_close_by_metric("y", y[-tail:], wanted, bound=BOUND[torch.bfloat16])
