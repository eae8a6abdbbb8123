# SPDX-License-Identifier: Apache-2.0
"""The prologue of recurrences, and its L2 norm, against their equations, for any row order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import PrologueWeights, UnitLayout, naive, recurrence_prologue
from megatron.core.ops.recurrence import prologue as op
from megatron.core.ops.recurrence.prologue.cpu import l2norm
from megatron.core.ops.sequences import PackingIndices, Sequences
from tests.support.gpu_agreement import REHEARSES, assert_refused, random_tensor, sized
from tests.support.inputs import generator
from tests.support.launch_kernels import assert_launches

KERNELS = pytest.mark.gpu
#: Documents that are empty, shorter than a convolution, or longer than a program's segment; on a
#: CPU one begins two tokens after the second of three segments, whose program runs last.
BOUNDS = sized((0, 1, 1, 3, 2000, 2003, 4096, 4099, 9001), (0, 1, 1, 3, 17, 19, 34, 38))
SHORT = sized(BOUNDS, (0, 1, 1, 3, 12))
MANY = sized(tuple(range(0, 3001, 3)), (0, 3, 6))
#: Limits of steps. Few steps are at a limit, where fp32 rounding would change the gradient.
NO_LIMITS, LIMITS = (0.0, float("inf")), (0.2, 0.9)
#: units, their layout, columns of the gate after each unit
LAYERS = {
    "Qwen3-Next": sized(
        (16, UnitLayout.delta(2, 128, 128), 256), (1, UnitLayout.delta(2, 8, 4), 12)
    ),
    "Nemotron-H": sized(
        (8, UnitLayout.state_space(16, 128, 64, NO_LIMITS), 1024),
        (2, UnitLayout.state_space(2, 6, 4, LIMITS), 3),
    ),
    "Mamba-2": sized(
        (1, UnitLayout.state_space(80, 128, 64, NO_LIMITS), 5120),
        (1, UnitLayout.state_space(3, 4, 2, LIMITS), 0),
    ),
    "limits": sized(
        (2, UnitLayout.state_space(3, 20, 24, LIMITS), 7),
        (1, UnitLayout.state_space(2, 6, 4, LIMITS), 1),
    ),
    "odd": sized((3, UnitLayout.delta(3, 100, 52), 7), (2, UnitLayout.delta(3, 5, 4), 3)),
}
CASES = {
    "as packed": ("Qwen3-Next", {"bounds": BOUNDS}),
    "rows before and padding": ("Qwen3-Next", {"bounds": BOUNDS, "padding": 5, "initial": True}),
    "many short documents": ("Qwen3-Next", {"bounds": MANY, "initial": True}),
    "groups of many heads": ("Nemotron-H", {"padding": 5, "bias": True}),
    "one group": ("Mamba-2", {"bias": True, "initial": True}),
    "limits": ("limits", {"padding": 3}),
    "odd": ("odd", {"padding": 5, "bias": True, "initial": True}),
    "three taps": ("limits", {"width": 3, "initial": True}),
    "two taps": ("odd", {"width": 2, "padding": 2, "bias": True}),
    "one tap": ("Qwen3-Next", {"width": 1, "padding": 2, "bias": True}),
    "one token": ("Qwen3-Next", {"bounds": (0, 1), "initial": True}),
    "no token": ("odd", {"bounds": (0, 0, 0), "padding": 2, "initial": True}),
}


@pytest.fixture(autouse=True)
def tiles_of_few_tokens(monkeypatch):
    """In the interpreter, use small tiles and fewer programs than segments."""
    if REHEARSES:
        from megatron.core.ops.recurrence.prologue import triton as kernels

        tile = {"BLOCK_T": 32, "num_warps": 1, "num_stages": 1}
        monkeypatch.setattr(kernels, "FORWARD", Launches("f", tile))
        segments = {"SEGMENTS": 4, "STEPS": 4, "AHEAD": 1, "num_warps": 1, "num_stages": 1}
        monkeypatch.setattr(kernels, "BACKWARD", Launches("b", segments))
        monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 10)
        monkeypatch.setattr(kernels, "GATES", 32)


def prologue(
    device, name, *, bounds=SHORT, width=4, padding=None, bias=False, initial=False, state=True
):
    """Return a prologue of a slice of wider units, its equation, and their inputs.

    The convolution's state, which has no gradient, is compared in the calls.

    Args:
        device: where it runs.
        name: name of the layer.
        bounds: bounds of documents.
        width: width of the convolution.
        padding: number of rows without a token, with tokens in random order; None: as packed.
        bias, initial: whether there are biases and initial rows.
        state: whether the calls return the convolution's state.
    """
    units, unit, gate = LAYERS[name]
    sequences = Sequences(bounds, device=device)
    count, packing = sequences.tokens + (padding or 0), None
    rows = np.arange(count)
    if padding is not None:
        rows = np.random.default_rng(3).permutation(count)[: sequences.tokens]
        packing = PackingIndices.of(rows, count, sequences.to_device)
    heads, channels = units * unit.heads, unit.conv_channels
    shapes = [
        (count, units, unit.width + gate),
        (units, channels, width),
        (heads,),
        (heads,),
        *[(units, channels)] * bias,
        *[(sequences.count, width - 1, units, channels)] * initial,
    ]
    source = generator(count, width)
    inputs = [torch.randn(shape, generator=source).to(device) for shape in shapes]
    inputs[1], inputs[2] = inputs[1] / 2, inputs[2] / 2
    conv_states = []

    def run(function, source, weight, rates, step_bias, *optional, **options):
        weights = PrologueWeights(weight, optional[0] if bias else None, rates, step_bias)
        options |= {"initial": optional[-1]} if initial else {}
        outputs, rows = function(source, weights, unit=unit, sequences=sequences, **options)
        conv_states.append(rows)
        return tuple(outputs)

    def call(source, *tensors, implementation):
        options = {"packing": packing, "return_conv_state": state}
        options |= {"implementation": implementation}
        return run(recurrence_prologue, source[..., : unit.width], *tensors, **options)

    def equation(source, *tensors):
        outputs = run(naive.prologue, source[torch.from_numpy(rows), :, : unit.width], *tensors)
        assert torch.equal(conv_states[0].double(), conv_states[1])
        return outputs

    return call, equation, inputs


@pytest.mark.parametrize("case", CASES)
def test_prologue_matches_its_equations(backend, case):
    name, options = CASES[case]
    call, equation, inputs = prologue(backend.device, name, **options)
    backend.agree(call, equation, inputs, fp32_inputs=(2, 3), zeros=case == "no token")


@pytest.mark.parametrize("name", ["Qwen3-Next", "limits"])
def test_nan_steps_propagate(backend, name):
    """Neither limits nor the softplus turn NaN into numbers; on a GPU the maximum of a number and
    NaN is the number."""
    call, _, inputs = prologue(backend.device, name)
    heads = LAYERS[name][1].heads
    column, head = LAYERS[name][1].dt + heads - 1, heads - 1  # of the first unit
    inputs[0][3, 0, column] = torch.nan
    leaves = [x.requires_grad_() for x in inputs]
    *_, decay, strength = outputs = call(*leaves, implementation=backend.implementation)
    assert decay.isnan().nonzero().tolist() == [[3, head]]
    assert strength.isnan().sum() == (name == "limits")
    source, weight, rates, step_bias = torch.autograd.grad(
        outputs, leaves, [torch.ones_like(y) for y in outputs]
    )
    assert source.isnan().nonzero().tolist() == [[3, 0, column]]
    assert rates.isnan().nonzero().tolist() == [[head]]
    assert step_bias.isnan().nonzero().tolist() == [[head]]
    assert not weight.isnan().any()


@KERNELS
def test_unsupported_width_is_refused_if_forced_else_falls_back(device, monkeypatch):
    call, _, inputs = prologue(device, "odd", width=5)
    assert_refused(lambda: call(*inputs, implementation="triton"), "takes up to 4")
    implementations = []

    def chosen(implementation, *args, **kwargs):
        implementations.append(implementation)
        return "triton"

    monkeypatch.setattr(op, "choose", chosen)
    call(*inputs, implementation=None)
    assert implementations == [None]


@KERNELS
def test_prologue_is_one_kernel_each_way(device):
    call, _, inputs = prologue(device, "Qwen3-Next", padding=0, state=False)
    leaves = [x.bfloat16() if not REHEARSES else x for x in inputs[:2]] + inputs[2:]
    leaves = [x.requires_grad_() for x in leaves]
    outputs = call(*leaves, implementation="triton")
    assert_launches(
        lambda: call(*leaves, implementation="triton"),
        {"prologue_forward_kernel": 1},
        allowed=("copy",),  # of taps, to make their columns contiguous
    )
    grad_outputs = [torch.ones_like(y) for y in outputs]
    assert_launches(
        lambda: torch.autograd.grad(outputs, leaves[1:], grad_outputs, retain_graph=True),
        {"prologue_backward_kernel": 1},
        allowed=("sum", "copy"),
    )


@KERNELS
def test_weight_gradients_are_reproducible(device):
    call, _, inputs = prologue(device, "Qwen3-Next", padding=0)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = call(*leaves, implementation="triton")
    grad_outputs = [random_tensor(device, *y.shape) for y in outputs]
    grads, repeated = (
        torch.autograd.grad(outputs, leaves, grad_outputs, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, repeated, strict=True))


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_l2norm_matches_its_equation(backend, eps):
    (x,) = backend.random((6, 3, 11))
    x[2] *= 1e-3  # near sqrt(eps), so eps matters
    backend.agree(lambda x, implementation: l2norm(x, eps), lambda x: naive.l2norm(x, eps), (x,))


def test_l2norm_of_slice_matches_contiguous_input():
    x = torch.randn(5, 2, 20)
    assert torch.equal(l2norm(x[..., 3:11]), l2norm(x[..., 3:11].contiguous()))


def test_l2norm_of_zeros_has_finite_gradients():
    x = torch.zeros(3, 4, requires_grad=True)
    y = l2norm(x)
    y.sum().backward()
    assert not y.any()
    assert (x.grad - 1e3).abs().max() < 1e-3


def test_bad_l2norm_arguments_are_refused():
    assert_refused(lambda: l2norm(torch.zeros(3), -1.0), r"eps=-1\.0 must not be negative")
    vectors = torch.zeros(3, dtype=torch.int64)
    assert_refused(lambda: l2norm(vectors), "give vectors of floats")
