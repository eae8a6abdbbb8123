# SPDX-License-Identifier: Apache-2.0
"""The prologue of recurrences on the GPU against its formulas in fp64, for any row order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import PrologueWeights, UnitLayout, recurrence_prologue
from megatron.core.ops.recurrence.prologue import triton as kernels
from megatron.core.ops.sequences import PackingIndices, Sequences
from tests.support.gpu_agreement import DTYPES, REHEARSES, agree, random_tensor, sized
from tests.support.launch_kernels import assert_launches

pytestmark = pytest.mark.gpu

#: Documents that are empty, shorter than a convolution, or longer than a program's segment.
BOUNDS = sized((0, 1, 1, 3, 2000, 2003, 4096, 4099, 9001), (0, 1, 1, 3, 14))
MANY = sized(tuple(range(0, 3001, 3)), (0, 3, 6))
#: Limits of steps. Few steps are at a limit, where fp32 rounding would change the gradient.
NO_LIMITS, LIMITS = (0.0, float("inf")), (0.2, 0.9)
QWEN = sized((16, UnitLayout.delta(2, 128, 128), 256), (1, UnitLayout.delta(2, 6, 3), 4))
#: units, their layout, columns of the gate after each unit
LAYERS = {
    "Qwen3-Next": QWEN,
    "Nemotron-H": sized(
        (8, UnitLayout.state_space(16, 128, 64, NO_LIMITS), 1024),
        (2, UnitLayout.state_space(2, 4, 3, LIMITS), 6),
    ),
    "Mamba-2": sized(
        (1, UnitLayout.state_space(80, 128, 64, NO_LIMITS), 5120),
        (1, UnitLayout.state_space(3, 4, 2, LIMITS), 0),
    ),
    "limits": sized(
        (2, UnitLayout.state_space(3, 20, 24, LIMITS), 7),
        (1, UnitLayout.state_space(2, 4, 3, LIMITS), 1),
    ),
    "odd": sized((3, UnitLayout.delta(3, 100, 52), 7), (1, UnitLayout.delta(3, 5, 2), 1)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use small tiles in a rehearsal: the interpreter computes whole tiles."""
    if REHEARSES:
        tile = {"BLOCK_T": 16, "num_warps": 1, "num_stages": 1}
        monkeypatch.setattr(kernels, "FORWARD", Launches("f", tile))
        stretches = {"SEGMENTS": 4, "STEPS": 4, "AHEAD": 1, "num_warps": 1, "num_stages": 1}
        monkeypatch.setattr(kernels, "BACKWARD", Launches("b", stretches))


def prologue(device, name, *, bounds=BOUNDS, width=4, padding=None, bias=False, initial=False):
    """Return a prologue of a slice of wider units, and its inputs.

    Args:
        device: where it runs.
        name: name of the layer.
        bounds: bounds of documents.
        width: width of the convolution.
        padding: number of rows without a token, with tokens in random order; None: as packed.
        bias, initial: whether there are biases and initial rows.
    """
    units, unit, gate = LAYERS[name]
    sequences = Sequences(bounds, device=device)
    count = sequences.tokens + (padding or 0)
    packing = None
    if padding is not None:
        rows = np.random.default_rng(3).permutation(count)[: sequences.tokens]
        packing = PackingIndices.of(rows, count, sequences.to_device)
    heads, channels = units * unit.heads, unit.conv_channels
    inputs = [
        random_tensor(device, count, units, unit.width + gate),
        random_tensor(device, units, channels, width) / 2,
        random_tensor(device, heads) / 2,
        random_tensor(device, heads + 1)[1:],
    ]
    inputs += [random_tensor(device, units, channels)] * bias
    inputs += [random_tensor(device, sequences.count, width - 1, units, channels)] * initial

    def call(rows_of_units, weight, rates, step_bias, *optional, implementation):
        outputs, _ = recurrence_prologue(
            rows_of_units[..., : unit.width],
            PrologueWeights(weight, optional[0] if bias else None, rates, step_bias),
            unit=unit,
            sequences=sequences,
            packing=packing,
            initial=optional[-1] if initial else None,
            implementation=implementation,
        )
        return tuple(outputs)

    return call, inputs


CASES = {
    "as packed": ("Qwen3-Next", {}),
    "with padding": ("Qwen3-Next", {"padding": 77}),
    "rows before": ("Qwen3-Next", {"padding": 0, "initial": True}),
    "many short documents": ("Qwen3-Next", {"bounds": MANY, "initial": True}),
    "groups of many heads": ("Nemotron-H", {"padding": 5, "bias": True}),
    "one group": ("Mamba-2", {"bias": True, "initial": True}),
    "limits": ("limits", {"padding": 3}),
    "odd": ("odd", {"padding": 5, "bias": True, "initial": True}),
    "three taps": ("odd", {"width": 3, "initial": True}),
    "two taps": ("odd", {"width": 2, "bias": True}),
    "one tap": ("odd", {"width": 1}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_prologue_matches_fp64(device, dtype, case):
    name, options = CASES[case]
    call, inputs = prologue(device, name, **options)
    agree(call, inputs, dtype, fp32_inputs=(2, 3))


@pytest.mark.parametrize("name", ["Qwen3-Next", "limits"])
def test_nan_steps_propagate(device, name):
    """On a GPU, the maximum of a number and NaN is the number."""
    call, inputs = prologue(device, name)
    heads = LAYERS[name][1].heads
    token, head = 3, heads - 1  # of the first unit
    inputs[0][token, 0, LAYERS[name][1].dt + head] = torch.nan
    leaves = [x.requires_grad_() for x in inputs]
    *_, decay, strength = outputs = call(*leaves, implementation="triton")
    assert decay.isnan().nonzero().tolist() == [[token, head]]
    assert strength.isnan().sum() == (name == "limits")
    source, weight, rates, step_bias = torch.autograd.grad(
        outputs, leaves, [torch.ones_like(y) for y in outputs]
    )
    index = [token, 0, LAYERS[name][1].dt + head]
    assert source.isnan().nonzero().tolist() == [index]
    assert rates.isnan().nonzero().tolist() == [[head]]
    assert step_bias.isnan().nonzero().tolist() == [[head]]
    assert not weight.isnan().any()


def test_prologue_is_one_kernel_each_way(device):
    call, inputs = prologue(device, "Qwen3-Next", padding=0)
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


def test_weight_gradients_are_reproducible(device):
    call, inputs = prologue(device, "Qwen3-Next", padding=0)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = call(*leaves, implementation="triton")
    grad_outputs = [random_tensor(device, *y.shape) for y in outputs]
    grads, repeated = (
        torch.autograd.grad(outputs, leaves, grad_outputs, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, repeated, strict=True))
