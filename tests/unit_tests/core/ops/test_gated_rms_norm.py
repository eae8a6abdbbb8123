# SPDX-License-Identifier: Apache-2.0
"""Gated norms in both orders against autograd through the formula in fp64."""

import pytest
import torch

from megatron.core.ops.recurrence import GATE_FIRST, NORM_FIRST, gated_rms_norm
from megatron.core.ops.recurrence import gated_norm as gated_norm_op
from megatron.core.ops.recurrence import naive as equations
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import compare, maker

ORDERS = pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])


def naive(x, gate, weight, *, order, size):
    return equations.gated_rms_norm(x, gate, weight, eps=1e-5, order=order, group_size=size)


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [12, 4, 1])
def test_gated_norm_matches_fp64_formula(order, dtype, size):
    make = maker()
    with nan_memory():
        compare(
            lambda *x: gated_rms_norm(*x, eps=1e-5, order=order, group_size=size),
            lambda *x: naive(*x, order=order, size=size),
            (make(5, 3, 12), make(5, 3, 12), make(12)),
            dtype,
        )


@ORDERS
def test_row_blocks_with_gate_slices_match_formula(order, monkeypatch):
    """Blocks have two rows, the last has one; the gate is a slice of a projection."""
    monkeypatch.setattr(gated_norm_op, "ELEMENTS_IN_CACHE", 40)
    make = maker()
    compare(
        lambda x, projection, w: gated_rms_norm(
            x, projection[..., 3:21].unflatten(-1, (3, 6)), w, eps=1e-5, order=order
        ),
        lambda x, projection, w: naive(
            x, projection[..., 3:21].unflatten(-1, (3, 6)), w, order=order, size=6
        ),
        (make(5, 3, 6), make(5, 25), make(6)),
        torch.float64,
    )


@ORDERS
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_gathered_by_index_match_formula(order, padded, dtype):
    """NaN in the gate and gradient of padding rows does not reach any output."""
    make = maker()
    row_indices = [3, -1, 0, 1, -1, 2] if padded else [3, 0, 1, 2]
    valid_rows = [i for i, row in enumerate(row_indices) if row >= 0]
    index = torch.tensor(row_indices)

    def mcore_norm(x, gate, weight):
        nan_rows = torch.full((len(row_indices), 2, 6), torch.nan, dtype=gate.dtype)
        options = {"eps": 1e-5, "order": order, "group_size": 3, "row_index": index}
        y = gated_rms_norm(
            x, nan_rows.index_copy(0, torch.tensor(valid_rows), gate), weight, **options
        )
        assert not y[index < 0].any()
        nan_rows = torch.full_like(y, torch.nan)
        y.register_hook(lambda grad: torch.where((index < 0)[:, None, None], nan_rows, grad))
        return y[valid_rows]

    def naive_gathered(x, gate, weight):
        return naive(x[index[valid_rows]], gate, weight, order=order, size=3)

    with nan_memory():
        compare(mcore_norm, naive_gathered, (make(4, 2, 6), make(4, 2, 6), make(6)), dtype)


def test_all_padding_rows_give_zero_gradients():
    gate = torch.full((3, 6), torch.nan, requires_grad=True)
    x, weight = torch.ones(0, 6, requires_grad=True), torch.ones(6, requires_grad=True)
    y = gated_rms_norm(x, gate, weight, eps=1e-5, row_index=torch.full((3,), -1))
    y.sum().backward()
    assert not y.any()
    assert not gate.grad.any()
    assert not weight.grad.any()
    assert x.grad.shape == (0, 6)


@ORDERS
def test_weights_by_unit_match_formula(order):
    make = maker()
    compare(
        lambda x, projection, w: gated_rms_norm(
            x, projection[..., 2:8], w, eps=1e-5, order=order, group_size=3
        ),
        lambda x, projection, w: naive(
            x.flatten(2), projection[..., 2:8].flatten(2), w.flatten(), order=order, size=3
        ).unflatten(-1, (4, 6)),
        (make(5, 2, 4, 6), make(5, 2, 4, 11), make(4, 6)),
        torch.float64,
    )


def test_fp32_weight_with_bf16_rows_and_empty_input():
    x, gate = (torch.randn(4, 6).bfloat16().requires_grad_() for _ in range(2))
    weight = torch.randn(6).requires_grad_()
    gated_rms_norm(x, gate, weight, eps=1e-6).sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    weight.grad = None
    gated_rms_norm(x[:0], gate[:0], weight, eps=1e-6, order=GATE_FIRST).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6))


@ORDERS
def test_saturated_gates_match_formula(order):
    """exp of the gate overflows in fp32."""
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
    "weights": ({"weight": torch.ones(2, 6)}, r"weight \(2, 6\) must be \(6,\)"),
    "row_index": ({"row_index": torch.zeros(3, dtype=torch.int64)}, "one for each of 2 rows"),
    "row_index dtype": (
        {"row_index": torch.zeros(2)},
        r"row_index \(2,\) torch.float32",
    ),
    "rows": (
        {"x": torch.ones(3, 6), "row_index": torch.zeros(2, dtype=torch.int64)},
        "3 rows of x are more than 2 entries",
    ),
    "features": (
        {"x": torch.ones(1, 5), "row_index": torch.zeros(2, dtype=torch.int64)},
        "must have one shape, of rows and features, but for the number of rows",
    ),
    "dtype": ({"gate": torch.ones(2, 6, dtype=torch.int64)}, "give floating-point tensors"),
    "eps": ({"eps": -1.0}, "eps=-1.0 must not be negative"),
    "order": ({"order": "norm"}, "order='norm': use norm_first or gate_first"),
    "group_size": ({"group_size": 4}, "group_size 4 must divide the 6 features"),
    "triton": ({"implementation": "triton"}, "[Tt]riton"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_are_named(kind):
    changes, message = WRONG[kind]
    arguments = {
        "x": torch.ones(2, 6),
        "gate": torch.ones(2, 6),
        "weight": torch.ones(6),
        "eps": 1e-5,
    }
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**{**arguments, **changes})
