# SPDX-License-Identifier: Apache-2.0
"""The kernels of gated norms in Triton's interpreter, against fp64.

Run by `test_triton.py` in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.backend_choice import StoredWeight
from megatron.core.ops.gated_rms_norm import GATE_FIRST, NORM_FIRST, gated_rms_norm
from megatron.core.ops.gated_rms_norm import triton as kernels
from megatron.core.ops.launches import Launches
from megatron.core.ops.strided_rows import AlignedRows, row_tile
from tests.support.gpu_agreement import agree
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

BOUND = {torch.float32: 1e-5}
LIMITS = {"num_warps": 1, "num_stages": 1}
ORDERS = pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Use tiles of few rows, and fewer programs than tiles."""
    monkeypatch.setattr(kernels, "FORWARD", Launches("f", {"ELEMENTS": 32, **LIMITS}))
    monkeypatch.setattr(kernels, "BACKWARD", Launches("b", {"ELEMENTS": 32, "AHEAD": 2, **LIMITS}))
    monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 3)


def random_tensor(*shape: int) -> torch.Tensor:
    """Return normal numbers."""
    return torch.randn(shape, generator=generator(sum(shape)))


def normed(**options):
    """Return a gated norm of its tensors."""
    return lambda *x, implementation: gated_rms_norm(
        *x, eps=1e-5, implementation=implementation, **options
    )


@ORDERS
@pytest.mark.parametrize(("features", "size"), [(12, 2), (40, 20), (70, 70)])
def test_groups(order, features, size):
    inputs = (
        random_tensor(4, 3, features),
        random_tensor(4, 3, features) * 3,
        random_tensor(features),
    )
    agree(normed(order=order, group_size=size), inputs, torch.float32, bounds=BOUND)


@ORDERS
@pytest.mark.parametrize("before", [4, 5])
def test_gates_that_are_slices_are_read_in_place(order, before):
    """As a layer has them: heads behind the other features of a unit."""
    width = before + 2 * 6 + 4

    def call(x, wide, weight, implementation):
        gate = wide[..., before : before + 12].unflatten(-1, (2, 6))
        assert AlignedRows.from_tensor(gate).base.data_ptr() // 16 == gate.data_ptr() // 16
        return normed(order=order)(x, gate, weight, implementation=implementation)

    inputs = random_tensor(4, 2, 3, 2, 6), random_tensor(4, 2, 3, width), random_tensor(6)
    agree(call, inputs, torch.float32, bounds=BOUND)


@ORDERS
def test_weights_that_differ_by_unit(order):
    def call(x, wide, weight, implementation):
        function = normed(order=order, group_size=3)
        return function(x, wide[..., 2:8], weight, implementation=implementation)

    agree(
        call,
        (random_tensor(5, 2, 4, 6), random_tensor(5, 2, 4, 11), random_tensor(4, 6)),
        torch.float32,
        bounds=BOUND,
    )


@ORDERS
def test_rows_in_no_two_strides_are_copied(order):
    def call(x, gate, weight, implementation):
        turned = gate.permute(2, 1, 0, 3)
        return normed(order=order)(x, turned, weight, implementation=implementation)

    agree(
        call,
        (random_tensor(4, 2, 3, 6), random_tensor(3, 2, 4, 6), random_tensor(6)),
        torch.float32,
        bounds=BOUND,
    )


@ORDERS
@pytest.mark.parametrize(
    ("places", "size"),
    [((3, 0, 1, 2), 6), ((3, -1, 0, 1, -1, -1, 2), 3), ((-1, -1), 6)],
    ids=("whole", "padded", "none"),
)
def test_places(order, places, size):
    """Padding rows hold NaN in the gate and in the gradient: nothing of it comes out."""
    taken = torch.tensor(places)
    padding, count = (taken < 0)[:, None, None], int((taken >= 0).sum())
    results = []
    tensors = random_tensor(count, 2, 6), random_tensor(len(places), 2, 17), random_tensor(6)
    for implementation, kind in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in tensors]
        gate = leaves[1][..., 4:10].masked_fill(padding, torch.nan)
        gate.retain_grad()
        function = normed(order=order, group_size=size, row_index=taken)
        with nan_memory():
            y = function(leaves[0], gate, leaves[2], implementation=implementation)
            pull = random_tensor(*y.shape).to(kind).masked_fill(padding, torch.nan)
            y.backward(pull)
        assert not y[taken < 0].any()
        assert not gate.grad[taken < 0].any()
        results.append([y.detach(), gate.grad, leaves[0].grad, leaves[2].grad])
    for mine, true in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
        assert mine.isfinite().all()


@ORDERS
def test_no_rows(order):
    x, gate, weight = (random_tensor(*shape).requires_grad_() for shape in ((0, 6), (0, 6), (6,)))
    normed(order=order)(x, gate, weight, implementation="triton").sum().backward()
    assert torch.equal(weight.grad, torch.zeros(6))
    assert x.grad.shape == gate.grad.shape == (0, 6)


def test_dtypes_may_differ():
    x, gate, weight = random_tensor(7, 6).half(), random_tensor(7, 6), random_tensor(6).half()
    leaves = [z.requires_grad_() for z in (x, gate, weight)]
    y = normed()(*leaves, implementation="triton")
    y.sum().backward()
    assert y.dtype == torch.float16
    assert [z.grad.dtype for z in leaves] == [z.dtype for z in leaves]
    torch.testing.assert_close(y, normed()(*leaves, implementation="reference"), atol=2e-3, rtol=0)


def test_programs_hold_whole_rows():
    launches = Launches("t", {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1})
    x = torch.empty(0)
    for features, rows, padded, warps in ((128, 32, 128, 4), (5000, 1, 8192, 8), (1, 4096, 1, 4)):
        tile = {"ROWS": rows, "FEATURES": padded, "num_warps": warps, "num_stages": 1}
        assert row_tile(launches, x, features) == tile
    assert row_tile(launches, x, 1 << 16)["num_warps"] == 16


@ORDERS
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_stored_weight_takes_its_gradient_unrounded(order, implementation):
    """The addends put for a bf16 weight sum up to the gradient of the same weight in fp32."""
    x, gate, weight = (
        random_tensor(5, 2, 4, 6),
        random_tensor(5, 2, 4, 6),
        random_tensor(6).bfloat16(),
    )
    anchor = torch.zeros((), requires_grad=True)
    addends: list[torch.Tensor] = []
    wide = weight.float().requires_grad_()
    function = normed(order=order, group_size=3)
    y = function(
        x, gate, StoredWeight(weight, anchor, addends.append), implementation=implementation
    )
    expected = function(x, gate, wide, implementation=implementation)
    assert torch.equal(y, expected)
    expected.square().sum().backward()
    y.square().sum().backward()
    (found,) = addends
    assert anchor.grad is None
    assert found.dtype == torch.float32
    assert torch.equal(found.reshape(-1, 6).sum(0), wide.grad)
    frozen = StoredWeight(weight, anchor.detach(), addends.append)
    function(x.requires_grad_(), gate, frozen, implementation=implementation).sum().backward()
    assert len(addends) == 1, "a frozen weight takes none"
