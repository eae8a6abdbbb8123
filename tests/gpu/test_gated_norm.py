# SPDX-License-Identifier: Apache-2.0
"""Gated norms in both orders against their equation: outputs and all gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from megatron.core.ops.backend_choice import StoredWeight
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import GATE_FIRST, NORM_FIRST, gated_rms_norm, naive
from megatron.core.ops.recurrence.gated_norm import cpu
from megatron.core.ops.strided_rows import AlignedRows, row_tile
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import (
    BOUND,
    DTYPES,
    REHEARSES,
    assert_refused,
    random_tensor,
    sized,
)
from tests.support.launch_kernels import assert_launches

KERNELS = pytest.mark.gpu
ORDERS = pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])
#: Units of Qwen3-Next, their heads and values; the gate begins at column 516 of a unit, or 5,
#: unaligned to 16 bytes.
UNITS, HEADS, VALUES, BEFORE = sized((16, 2, 128, 516), (3, 2, 6, 5))
WIDTH = BEFORE + HEADS * VALUES


@pytest.fixture(autouse=True)
def tiles_of_few_rows(monkeypatch):
    """In the interpreter, use tiles of few rows and fewer programs than tiles."""
    if REHEARSES:
        from megatron.core.ops.recurrence.gated_norm import triton as kernels

        limits = {"ELEMENTS": 32, "num_warps": 1, "num_stages": 1}
        monkeypatch.setattr(kernels, "FORWARD", Launches("f", limits))
        monkeypatch.setattr(kernels, "BACKWARD", Launches("b", {**limits, "AHEAD": 2}))
        monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 3)


def gate_of(units):
    """Return the gates [..., HEADS, VALUES] in whole units [..., WIDTH]."""
    return units[..., BEFORE:].unflatten(-1, (HEADS, VALUES))


def compare_with_equation(backend, inputs, *, gate_view=lambda gate: gate, **options):
    """Compare the norm of x with its equation; `gate_view` takes the gate from the second input."""
    options = {"eps": 1e-5, "group_size": inputs[2].shape[-1]} | options

    def equation(x, gate, weight):
        return naive.gated_rms_norm(x, gate_view(gate), weight, **options)

    backend.agree(
        lambda x, gate, weight, implementation: gated_rms_norm(
            x, gate_view(gate), weight, implementation=implementation, **options
        ),
        equation,
        inputs,
    )


@ORDERS
@pytest.mark.parametrize(
    ("features", "size"),
    sized(
        [(192, 64), (3072, 1024), (15360, 5120), (24576, 8192)],
        [(12, 1), (12, 2), (40, 20), (70, 70)],
    ),
)
def test_groups_match_the_equation(backend, order, features, size):
    x, gate, weight = backend.random((1003, features), (1003, features), (features,))
    inputs = [x[: sized(1003, 7)], gate[: sized(1003, 7)] * 3, weight]
    compare_with_equation(backend, inputs, order=order, group_size=size)


@ORDERS
def test_gate_slices_are_read_in_place(backend, order):
    """Gates are slices as in a layer: heads after the other features of a unit."""

    def gate_view(units):
        gate = gate_of(units)
        assert AlignedRows.from_tensor(gate).base.data_ptr() // 16 == gate.data_ptr() // 16
        return gate

    rows = 4, sized(2048, 2)
    shapes = (*rows, UNITS, HEADS, VALUES), (*rows, UNITS, WIDTH + 4), (VALUES,)
    x, units, weight = backend.random(*shapes)
    compare_with_equation(
        backend, (x, units[..., :WIDTH], weight), gate_view=gate_view, order=order
    )


@ORDERS
def test_weights_by_unit_match_the_equation(backend, order):
    compare_with_equation(
        backend,
        backend.random((5, 2, 4, 6), (5, 2, 4, 11), (4, 6)),
        gate_view=lambda units: units[..., 2:8],
        order=order,
        group_size=3,
    )


@ORDERS
def test_rows_without_two_strides_match_the_equation(backend, order):
    inputs = backend.random((4, 2, 3, 6), (3, 2, 4, 6), (6,))
    compare_with_equation(
        backend, inputs, gate_view=lambda gate: gate.permute(2, 1, 0, 3), order=order
    )


@ORDERS
def test_row_blocks_match_the_equation(backend, order, monkeypatch):
    """Blocks have two rows, the last has one."""
    monkeypatch.setattr(cpu, "ELEMENTS_IN_CACHE", 4 * HEADS * VALUES)
    inputs = backend.random((5, HEADS, VALUES), (5, WIDTH), (VALUES,))
    compare_with_equation(backend, inputs, gate_view=gate_of, order=order)


@pytest.mark.filterwarnings("ignore:overflow")
@ORDERS
def test_saturated_gates_match_the_equation(backend, order):
    """exp of the gate overflows in fp32."""
    x, gate, weight = backend.random((4, 6), (4, 6), (6,))
    gate *= 300
    assert float(gate.min()) < -100
    assert float(gate.max()) > 100
    compare_with_equation(backend, (x, gate, weight), order=order)


@ORDERS
@pytest.mark.parametrize("padded", [False, True])
def test_gathered_and_padding_rows_match_the_equation(backend, order, padded):
    """NaN in the gate and the gradient of padding rows does not reach any output."""
    rows = sized(3001, 7)
    tokens, device = rows - rows // 5 if padded else rows, backend.device
    valid_rows = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[:tokens]
    index = torch.full((rows,), -1)
    index[valid_rows] = torch.arange(tokens)
    index, valid_rows = index.to(device), valid_rows.to(device)

    def gathered(x, gate, weight, implementation):
        nan_rows = torch.full((rows, *gate.shape[1:]), torch.nan, dtype=gate.dtype, device=device)
        gates = nan_rows.index_copy(0, valid_rows, gate)
        options = {"eps": 1e-5, "order": order, "group_size": 3, "row_index": index}
        y = gated_rms_norm(x, gates, weight, implementation=implementation, **options)
        assert not y[index < 0].any()
        padding = (index < 0)[:, None, None]
        y.register_hook(lambda grad: grad.masked_fill(padding, torch.nan))
        return y[valid_rows]

    backend.agree(
        gathered,
        lambda x, gate, weight: naive.gated_rms_norm(
            x, gate, weight, eps=1e-5, order=order, group_size=3
        ),
        backend.random((tokens, 2, 6), (tokens, 2, 6), (6,)),
    )


def test_all_padding_rows_give_zero_gradients(backend):
    options = {"requires_grad": True, "device": backend.device}
    gate = torch.full((3, 6), torch.nan, **options)
    x, weight = torch.ones(0, 6, **options), torch.ones(6, **options)
    index = torch.full((3,), -1, device=backend.device)
    implementation = backend.implementation
    y = gated_rms_norm(x, gate, weight, eps=1e-5, row_index=index, implementation=implementation)
    y.sum().backward()
    assert not y.any()
    assert not gate.grad.any()
    assert not weight.grad.any()
    assert x.grad.shape == (0, 6)


@ORDERS
def test_empty_input_has_zero_gradients(backend, order):
    inputs = (x.to(backend.dtype).requires_grad_() for x in backend.random((0, 6), (0, 6), (6,)))
    x, gate, weight = inputs
    options = {"eps": 1e-5, "order": order, "implementation": backend.implementation}
    gated_rms_norm(x, gate, weight, **options).sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert x.grad.shape == gate.grad.shape == (0, 6)


def test_gradients_have_the_dtypes_of_their_inputs(backend):
    x, gate, weight = backend.random((7, 6), (7, 6), (6,))
    leaves = [z.requires_grad_() for z in (x.half(), gate.float(), weight.half())]
    y = gated_rms_norm(*leaves, eps=1e-5, implementation=backend.implementation)
    y.sum().backward()
    assert y.dtype == torch.float16
    assert [z.grad.dtype for z in leaves] == [z.dtype for z in leaves]
    expected = naive.gated_rms_norm(*(z.detach().double() for z in leaves), eps=1e-5)
    assert_close_by_metric("y", y, expected, bound=2e-3)


@KERNELS
def test_gated_norm_is_one_kernel_each_way(device):
    shapes = (sized(999, 3), UNITS, HEADS, VALUES), (sized(999, 3), UNITS, WIDTH), (VALUES,)
    x, units, weight = (random_tensor(device, *shape).to(DTYPES[-1]) for shape in shapes)
    gate = gate_of(units)
    leaves = [z.requires_grad_() for z in (x, gate, weight)]
    grad_out = torch.ones_like(x)

    def forward_and_backward():
        y = gated_rms_norm(*leaves, eps=1e-6, implementation="triton")
        return torch.autograd.grad(y, leaves, grad_out)

    expected = {"gated_norm_forward_kernel": 1, "gated_norm_backward_kernel": 1}
    assert_launches(forward_and_backward, expected, allowed=("sum", "copy"))


@KERNELS
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


def test_row_tile_holds_whole_rows():
    launches = Launches("t", {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1})
    x = torch.empty(0)
    for features, rows, padded, warps in ((128, 32, 128, 4), (5000, 1, 8192, 8), (1, 4096, 1, 4)):
        tile = {"ROWS": rows, "FEATURES": padded, "num_warps": warps, "num_stages": 1}
        assert row_tile(launches, x, features) == tile
    assert row_tile(launches, x, 1 << 16)["num_warps"] == 16


@ORDERS
def test_stored_weight_takes_its_gradient_unrounded(backend, order):
    """The addends for a bf16 weight sum to the gradient of the same weight in fp32."""
    x, gate, weight = (z.float() for z in backend.random((5, 2, 4, 6), (5, 2, 4, 6), (6,)))
    weight, implementation = weight.bfloat16(), backend.implementation
    anchor = torch.zeros((), requires_grad=True, device=x.device)
    addends: list[torch.Tensor] = []
    fp32_weight = weight.float().requires_grad_()
    function = partial(gated_rms_norm, eps=1e-5, order=order, group_size=3)
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


BAD = {
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


@pytest.mark.parametrize("kind", BAD)
def test_bad_arguments_are_one_line_errors(kind):
    changes, message = BAD[kind]
    arguments = {
        "x": torch.ones(2, 6),
        "gate": torch.ones(2, 6),
        "weight": torch.ones(6),
        "eps": 1e-5,
    }
    assert_refused(lambda: gated_rms_norm(**{**arguments, **changes}), message)
