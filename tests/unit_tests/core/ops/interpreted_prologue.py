# SPDX-License-Identifier: Apache-2.0
"""The prologue kernels in Triton's interpreter against fp64 formulas, on NaN-filled memory.

`test_triton.py` runs this file in a separate process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import PrologueWeights, UnitLayout, recurrence_prologue
from megatron.core.ops.recurrence import prologue as op
from megatron.core.ops.recurrence.prologue import triton as kernels
from megatron.core.ops.sequences import PackingIndices, Sequences
from tests.support import gpu_agreement
from tests.support.closeness import assert_close_by_metric, relative_error
from tests.support.nan_memory import nan_memory

#: The bound of fp32 in the metric of all tests.
BOUND = 1e-5
#: Documents that tiles do not divide, empty ones, and some shorter than the convolution; one
#: begins two tokens after the second of three segments, whose program runs last.
BOUNDS = (0, 1, 1, 3, 17, 19, 34, 38)


@dataclass(frozen=True)
class Case:
    """Sizes and flags of one call."""

    unit: UnitLayout
    bounds: tuple[int, ...] = BOUNDS
    units: int = 1
    width: int = 4
    padding: int = 0  # rows without a token; negative: rows lie in packed order
    bias: bool = False
    initial: bool = False
    spare: int = 3  # unread columns after a unit


DELTA = UnitLayout.delta(3, 5, 4)  # values fill one tile and half of another
FULL_TILES = UnitLayout.delta(2, 8, 4)  # all tiles are full
STATE_SPACE = UnitLayout.state_space(2, 6, 4, (0.2, 0.9))
SHORT_BOUNDS = (0, 1, 1, 3, 12)
CASES = {
    "delta": Case(DELTA, units=2, bounds=SHORT_BOUNDS),
    "delta from packed rows": Case(FULL_TILES, padding=-1, spare=12),
    "delta with padding and initial rows": Case(FULL_TILES, padding=5, initial=True),
    "state space within limits": Case(
        STATE_SPACE, units=2, bounds=SHORT_BOUNDS, padding=3, bias=True
    ),
    "state space, initial rows": Case(
        STATE_SPACE, bounds=(0, 2, 14), bias=True, initial=True, spare=0
    ),
    "three taps": Case(STATE_SPACE, width=3, bounds=SHORT_BOUNDS, initial=True),
    "two taps": Case(FULL_TILES, width=2, bounds=SHORT_BOUNDS, padding=2, initial=True),
    "one tap": Case(FULL_TILES, width=1, bounds=SHORT_BOUNDS, padding=2, initial=True, bias=True),
    "one token": Case(FULL_TILES, bounds=(0, 1), initial=True),
    "no token": Case(DELTA, bounds=(0, 0, 0), padding=2, initial=True),
}


@pytest.fixture(autouse=True)
def small_launches(monkeypatch):
    """Use tiles so small that tokens fill many, on NaN-filled memory."""
    monkeypatch.setattr(
        kernels, "FORWARD", Launches("f", {"BLOCK_T": 32, "num_warps": 1, "num_stages": 1})
    )
    segments = {"SEGMENTS": 4, "STEPS": 4, "AHEAD": 1, "num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(kernels, "BACKWARD", Launches("b", segments))
    monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 10)  # fewer programs than segments
    monkeypatch.setattr(kernels, "GATES", 32)
    with nan_memory():
        yield


def tensors(case: Case) -> dict[str, torch.Tensor]:
    """Return the arguments of a case in fp64; the source has spare columns."""
    unit, units, tokens = case.unit, case.units, case.bounds[-1]
    random = torch.Generator().manual_seed(tokens + case.width)
    heads, channels = units * unit.heads, unit.conv_channels
    shapes = {
        "source": (tokens + max(0, case.padding), units, unit.width + case.spare),
        "weight": (units, channels, case.width),
        "a_log": (heads,),
        "dt_bias": (heads,),
    }
    if case.bias:
        shapes["bias"] = (units, channels)
    if case.initial:
        shapes["initial"] = (len(case.bounds) - 1, case.width - 1, units, channels)
    tensors_by_name = {}
    for name, shape in shapes.items():
        tensors_by_name[name] = (
            torch.randn(shape, generator=random, dtype=torch.float64).float().double()
        )
    return tensors_by_name


def packing_of(case: Case, sequences: Sequences) -> PackingIndices | None:
    """Return unordered row indices; some rows have no token."""
    if case.padding < 0:
        return None
    count = sequences.tokens + case.padding
    rows = np.random.default_rng(count).permutation(count)[: sequences.tokens]
    return PackingIndices.of(rows, count, sequences.to_device)


def run(
    case: Case, inputs_by_name: dict[str, torch.Tensor], kind: torch.dtype, implementation: str
):
    """Return the outputs and all gradients by name."""
    sequences = Sequences(case.bounds)
    gate_dtype = torch.promote_types(kind, torch.float32)
    kinds = {"a_log": gate_dtype, "dt_bias": gate_dtype}
    leaves = {
        name: x.detach().to(kinds.get(name, kind)).requires_grad_()
        for name, x in inputs_by_name.items()
    }
    weights = PrologueWeights(
        leaves["weight"], leaves.get("bias"), leaves["a_log"], leaves["dt_bias"]
    )
    inputs, final_rows = recurrence_prologue(
        leaves["source"][..., : case.unit.width],
        weights,
        unit=case.unit,
        sequences=sequences,
        packing=packing_of(case, sequences),
        initial=leaves.get("initial"),
        return_conv_state=True,
        implementation=implementation,
    )
    random = torch.Generator().manual_seed(9)
    grad_outputs = [
        torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype) for y in inputs
    ]
    torch.autograd.backward(inputs, grad_outputs)
    outputs = {"last": final_rows, **inputs._asdict()}
    return outputs | {f"d_{name}": leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("name", CASES)
def test_prologue_matches_fp64(name):
    case = CASES[name]
    arguments = tensors(case)
    actual = run(case, arguments, torch.float32, "triton")
    expected = run(case, arguments, torch.float64, "reference")
    assert actual.keys() == expected.keys()
    errors = {
        output: relative_error(actual[output], expected_tensor)
        for output, expected_tensor in expected.items()
    }
    assert max(errors.values()) <= BOUND, errors
    spared = actual["d_source"][..., case.unit.width :]
    assert not spared.any()


@pytest.mark.parametrize("name", ["delta with padding and initial rows", "three taps"])
def test_bf16_prologue_matches_fp64(name):
    case = CASES[name]
    arguments = tensors(case)
    rounded = {x: y if x in ("a_log", "dt_bias") else y.bfloat16() for x, y in arguments.items()}
    actual = run(case, rounded, torch.bfloat16, "triton")
    expected = run(case, rounded, torch.float64, "reference")
    for output, expected_tensor in expected.items():
        assert_close_by_metric(
            output, actual[output], expected_tensor, bound=gpu_agreement.BOUND[torch.bfloat16]
        )


@pytest.mark.parametrize("unit", [FULL_TILES, STATE_SPACE], ids=["delta", "state space"])
def test_nan_steps_give_nan_gates(unit):
    """Neither dt limits nor the softplus turn NaN into numbers."""
    case = Case(unit, bounds=SHORT_BOUNDS, padding=2)
    arguments = tensors(case)
    arguments["source"][3, 0, unit.dt + 1] = torch.nan
    actual = run(case, arguments, torch.float32, "triton")
    expected = run(case, arguments, torch.float64, "reference")
    for output, expected_tensor in expected.items():
        assert torch.equal(actual[output].isnan(), expected_tensor.isnan()), output
    assert actual["decay"].isnan().sum() == 1
    for output, count in {"d_source": 1, "d_a_log": 1, "d_dt_bias": 1, "d_weight": 0}.items():
        assert actual[output].isnan().sum() == count, output


def test_unsupported_shape_is_refused_if_forced_else_falls_back(monkeypatch):
    case = Case(DELTA, width=5, padding=-1)
    arguments = tensors(case)
    with pytest.raises(ValueError, match="takes up to 4"):
        run(case, arguments, torch.float32, "triton")
    implementations = []

    def chosen(implementation, *args, **kwargs):
        implementations.append(implementation)
        return "triton"

    monkeypatch.setattr(op, "choose", chosen)
    run(case, arguments, torch.float32, None)
    assert implementations == [None]
