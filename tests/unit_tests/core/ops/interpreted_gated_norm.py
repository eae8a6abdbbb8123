# SPDX-License-Identifier: Apache-2.0
"""The kernels of gated norms in Triton's interpreter against fp64.

`test_triton.py` runs this file in a separate process.
"""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.backend_choice import StoredWeight
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import GATE_FIRST, NORM_FIRST, gated_rms_norm
from megatron.core.ops.recurrence.gated_norm import triton as kernels
from megatron.core.ops.strided_rows import AlignedRows, row_tile
from tests.support.gpu_agreement import agree
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

BOUND = {torch.float32: 1e-5}
LIMITS = {"num_warps": 1, "num_stages": 1}
ORDERS = pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])


@pytest.fixture(autouse=True)
def small_launches(monkeypatch):
    """Use tiles of few rows and fewer programs than tiles."""
    monkeypatch.setattr(kernels, "FORWARD", Launches("f", {"ELEMENTS": 32, **LIMITS}))
    monkeypatch.setattr(kernels, "BACKWARD", Launches("b", {"ELEMENTS": 32, "AHEAD": 2, **LIMITS}))
    monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 3)


def random_tensor(*shape: int) -> torch.Tensor:
    """Return random normal numbers."""
    return torch.randn(shape, generator=generator(sum(shape)))


def norm_function(**options):
    """Return a function that computes the gated norm of its tensors."""
    return lambda *x, implementation: gated_rms_norm(
        *x, eps=1e-5, implementation=implementation, **options
    )


@ORDERS
@pytest.mark.parametrize(("features", "size"), [(12, 2), (40, 20), (70, 70)])
def test_groups_match_fp64(order, features, size):
    inputs = (
        random_tensor(4, 3, features),
        random_tensor(4, 3, features) * 3,
        random_tensor(features),
    )
    agree(norm_function(order=order, group_size=size), inputs, torch.float32, bounds=BOUND)


@ORDERS
@pytest.mark.parametrize("before", [4, 5])
def test_gate_slices_are_read_in_place(order, before):
    """Gates are slices as in a layer: heads after the other features of a unit."""
    width = before + 2 * 6 + 4

    def call(x, projection, weight, implementation):
        gate = projection[..., before : before + 12].unflatten(-1, (2, 6))
        assert AlignedRows.from_tensor(gate).base.data_ptr() // 16 == gate.data_ptr() // 16
        return norm_function(order=order)(x, gate, weight, implementation=implementation)

    inputs = random_tensor(4, 2, 3, 2, 6), random_tensor(4, 2, 3, width), random_tensor(6)
    agree(call, inputs, torch.float32, bounds=BOUND)


@ORDERS
def test_weights_by_unit_match_fp64(order):
    def call(x, projection, weight, implementation):
        function = norm_function(order=order, group_size=3)
        return function(x, projection[..., 2:8], weight, implementation=implementation)

    agree(
        call,
        (random_tensor(5, 2, 4, 6), random_tensor(5, 2, 4, 11), random_tensor(4, 6)),
        torch.float32,
        bounds=BOUND,
    )


@ORDERS
def test_rows_without_two_strides_are_copied(order):
    def call(x, gate, weight, implementation):
        transposed_gate = gate.permute(2, 1, 0, 3)
        return norm_function(order=order)(x, transposed_gate, weight, implementation=implementation)

    agree(
        call,
        (random_tensor(4, 2, 3, 6), random_tensor(3, 2, 4, 6), random_tensor(6)),
        torch.float32,
        bounds=BOUND,
    )


@ORDERS
@pytest.mark.parametrize(
    ("row_indices", "size"),
    [((3, 0, 1, 2), 6), ((3, -1, 0, 1, -1, -1, 2), 3), ((-1, -1), 6)],
    ids=("whole", "padded", "none"),
)
def test_gathered_and_padding_rows_match_fp64(order, row_indices, size):
    """NaN in the gate and gradient of padding rows does not reach any output."""
    index = torch.tensor(row_indices)
    padding, count = (index < 0)[:, None, None], int((index >= 0).sum())
    outputs_and_grads = []
    tensors = random_tensor(count, 2, 6), random_tensor(len(row_indices), 2, 17), random_tensor(6)
    for implementation, kind in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in tensors]
        gate = leaves[1][..., 4:10].masked_fill(padding, torch.nan)
        gate.retain_grad()
        function = norm_function(order=order, group_size=size, row_index=index)
        with nan_memory():
            y = function(leaves[0], gate, leaves[2], implementation=implementation)
            grad_out = random_tensor(*y.shape).to(kind).masked_fill(padding, torch.nan)
            y.backward(grad_out)
        assert not y[index < 0].any()
        assert not gate.grad[index < 0].any()
        outputs_and_grads.append([y.detach(), gate.grad, leaves[0].grad, leaves[2].grad])
    for actual, expected in zip(*outputs_and_grads, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        assert actual.isfinite().all()


@ORDERS
def test_empty_input_has_zero_gradients(order):
    x, gate, weight = (random_tensor(*shape).requires_grad_() for shape in ((0, 6), (0, 6), (6,)))
    norm_function(order=order)(x, gate, weight, implementation="triton").sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6))
    assert x.grad.shape == gate.grad.shape == (0, 6)


def test_mixed_dtypes_match_reference():
    x, gate, weight = random_tensor(7, 6).half(), random_tensor(7, 6), random_tensor(6).half()
    leaves = [z.requires_grad_() for z in (x, gate, weight)]
    y = norm_function()(*leaves, implementation="triton")
    y.sum().backward()
    assert y.dtype == torch.float16
    assert [z.grad.dtype for z in leaves] == [z.dtype for z in leaves]
    torch.testing.assert_close(
        y, norm_function()(*leaves, implementation="reference"), atol=2e-3, rtol=0
    )


def test_row_tile_holds_whole_rows():
    launches = Launches("t", {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1})
    x = torch.empty(0)
    for features, rows, padded, warps in ((128, 32, 128, 4), (5000, 1, 8192, 8), (1, 4096, 1, 4)):
        tile = {"ROWS": rows, "FEATURES": padded, "num_warps": warps, "num_stages": 1}
        assert row_tile(launches, x, features) == tile
    assert row_tile(launches, x, 1 << 16)["num_warps"] == 16


@ORDERS
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_stored_weight_takes_its_gradient_unrounded(order, implementation):
    """The addends for a bf16 weight sum to the gradient of the same weight in fp32."""
    x, gate, weight = (
        random_tensor(5, 2, 4, 6),
        random_tensor(5, 2, 4, 6),
        random_tensor(6).bfloat16(),
    )
    anchor = torch.zeros((), requires_grad=True)
    addends: list[torch.Tensor] = []
    fp32_weight = weight.float().requires_grad_()
    function = norm_function(order=order, group_size=3)
    y = function(
        x, gate, StoredWeight(weight, anchor, addends.append), implementation=implementation
    )
    expected = function(x, gate, fp32_weight, implementation=implementation)
    assert torch.equal(y, expected)
    expected.square().sum().backward()
    y.square().sum().backward()
    (addend,) = addends
    assert anchor.grad is None
    assert addend.dtype == torch.float32
    assert torch.equal(addend.reshape(-1, 6).sum(0), fp32_weight.grad)
    frozen = StoredWeight(weight, anchor.detach(), addends.append)
    function(x.requires_grad_(), gate, frozen, implementation=implementation).sum().backward()
    assert len(addends) == 1, "a frozen weight gets no gradient"
