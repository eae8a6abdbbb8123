# SPDX-License-Identifier: Apache-2.0
"""Norms with gates, in both orders, against autograd through the plain formula in fp64."""

import pytest
import torch

from megatron.core.ops.gated_rms_norm import GATE_FIRST, NORM_FIRST, gated_rms_norm, reference
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import compare, maker

ORDERS = pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])


def naive(x, gate, weight, *, order, size, eps=1e-5):
    """Normalise and gate, from the definition."""
    opened = gate * torch.sigmoid(gate)
    inner = x * opened if order == GATE_FIRST else x
    groups = inner.unflatten(-1, (-1, size))
    normal = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    normal = normal.flatten(-2) * weight
    return normal if order == GATE_FIRST else normal * opened


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [12, 4, 1])
def test_output_and_gradients(order, dtype, size):
    make = maker()
    with nan_memory():
        compare(
            lambda *x: gated_rms_norm(*x, eps=1e-5, order=order, group_size=size),
            lambda *x: naive(*x, order=order, size=size),
            (make(5, 3, 12), make(5, 3, 12), make(12)),
            dtype,
        )


@ORDERS
def test_blocks_of_rows_join_and_the_gate_may_be_a_slice(order, monkeypatch):
    """Two rows at a time and one left over; the gate is a part of what a layer projects."""
    monkeypatch.setattr(reference, "ELEMENTS_IN_CACHE", 40)
    make = maker()
    compare(
        lambda x, wide, w: gated_rms_norm(
            x, wide[..., 3:21].unflatten(-1, (3, 6)), w, eps=1e-5, order=order
        ),
        lambda x, wide, w: naive(x, wide[..., 3:21].unflatten(-1, (3, 6)), w, order=order, size=6),
        (make(5, 3, 6), make(5, 25), make(6)),
        torch.float64,
    )


def test_the_weight_may_have_its_own_dtype_and_rows_may_be_none():
    x, gate = (torch.randn(4, 6).bfloat16().requires_grad_() for _ in range(2))
    weight = torch.randn(6).requires_grad_()
    gated_rms_norm(x, gate, weight, eps=1e-6).sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    weight.grad = None
    gated_rms_norm(x[:0], gate[:0], weight, eps=1e-6, order=GATE_FIRST).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6))


@ORDERS
def test_gates_far_from_zero_are_open_or_shut(order):
    """exp of such a gate is infinite in fp32."""
    make = maker()
    gate = make(4, 6).mul_(300)
    assert float(gate.min()) < -100
    assert float(gate.max()) > 100
    compare(
        lambda *x: gated_rms_norm(*x, eps=1e-5, order=order),
        lambda *x: naive(*x, order=order, size=6),
        (make(4, 6), gate, make(6)),
        torch.float32,
    )


WRONG = {
    "gate": ({"gate": torch.ones(2, 5)}, "must have one shape"),
    "weight": ({"weight": torch.ones(5)}, r"weight \(5,\) must be \(6,\)"),
    "dtype": ({"gate": torch.ones(2, 6, dtype=torch.int64)}, "give floating-point tensors"),
    "eps": ({"eps": -1.0}, "eps=-1.0 must not be negative"),
    "order": ({"order": "norm"}, "order='norm': use norm_first or gate_first"),
    "group_size": ({"group_size": 4}, "group_size 4 must divide the 6 features"),
    "triton": ({"implementation": "triton"}, "[Tt]riton"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_are_named(kind):
    changes, message = WRONG[kind]
    given = {"x": torch.ones(2, 6), "gate": torch.ones(2, 6), "weight": torch.ones(6), "eps": 1e-5}
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**{**given, **changes})
