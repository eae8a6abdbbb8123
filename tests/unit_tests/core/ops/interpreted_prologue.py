# SPDX-License-Identifier: Apache-2.0
"""The prologue's kernels in Triton's interpreter against its formulas in fp64, on memory of NaN.

Run by `test_triton.py` in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron.core.ops import recurrence_prologue as op
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence_prologue import PrologueWeights, UnitLayout, recurrence_prologue
from megatron.core.ops.recurrence_prologue import triton as kernels
from megatron.core.ops.sequences import PackingIndices, Sequences
from tests.support import gpu_agreement
from tests.support.closeness import assert_close_by_metric, relative_error
from tests.support.nan_memory import nan_memory

#: Of fp32, the metric of all tests.
BOUND = 1e-5
#: Documents of a length that no tile divides, empty and shorter than a convolution; one begins two
#: tokens behind the second of three stretches, whose program comes last.
BOUNDS = (0, 1, 1, 3, 17, 19, 34, 38)


@dataclass(frozen=True)
class Case:
    """Sizes and flags of one call."""

    parts: UnitLayout
    bounds: tuple[int, ...] = BOUNDS
    units: int = 1
    width: int = 4
    padding: int = 0  # rows without a token; negative: rows lie as they are packed
    bias: bool = False
    initial: bool = False
    spare: int = 3  # columns behind a unit that are not read


DELTA = UnitLayout.delta(3, 5, 4)  # values fill one tile and half of another
WHOLE = UnitLayout.delta(2, 8, 4)  # all tiles are full
NARROW = UnitLayout.state_space(2, 6, 4, (0.2, 0.9))
FEW = (0, 1, 1, 3, 12)
CASES = {
    "delta": Case(DELTA, units=2, bounds=FEW),
    "delta from rows as they lie": Case(WHOLE, padding=-1, spare=12),
    "delta with padding and rows before": Case(WHOLE, padding=5, initial=True),
    "state space within limits": Case(NARROW, units=2, bounds=FEW, padding=3, bias=True),
    "state space, rows before": Case(NARROW, bounds=(0, 2, 14), bias=True, initial=True, spare=0),
    "three taps": Case(NARROW, width=3, bounds=FEW, initial=True),
    "two taps": Case(WHOLE, width=2, bounds=FEW, padding=2, initial=True),
    "one tap": Case(WHOLE, width=1, bounds=FEW, padding=2, initial=True, bias=True),
    "one token": Case(WHOLE, bounds=(0, 1), initial=True),
    "no token": Case(DELTA, bounds=(0, 0, 0), padding=2, initial=True),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Use tiles that tokens fill many of, on memory of NaN."""
    monkeypatch.setattr(
        kernels, "FORWARD", Launches("f", {"BLOCK_T": 32, "num_warps": 1, "num_stages": 1})
    )
    stretches = {"SEGMENTS": 4, "STEPS": 4, "AHEAD": 1, "num_warps": 1, "num_stages": 1}
    monkeypatch.setattr(kernels, "BACKWARD", Launches("b", stretches))
    monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 10)  # fewer shares than stretches
    monkeypatch.setattr(kernels, "GATES", 32)
    with nan_memory():
        yield


def tensors(case: Case) -> dict[str, torch.Tensor]:
    """Return the arguments in fp64, as far as there are any; the source with spare columns."""
    parts, units, tokens = case.parts, case.units, case.bounds[-1]
    random = torch.Generator().manual_seed(tokens + case.width)
    heads, channels = units * parts.heads, parts.conv_channels
    shapes = {
        "source": (tokens + max(0, case.padding), units, parts.width + case.spare),
        "weight": (units, channels, case.width),
        "a_log": (heads,),
        "dt_bias": (heads,),
    }
    if case.bias:
        shapes["bias"] = (units, channels)
    if case.initial:
        shapes["initial"] = (len(case.bounds) - 1, case.width - 1, units, channels)
    found = {}
    for name, shape in shapes.items():
        found[name] = torch.randn(shape, generator=random, dtype=torch.float64).float().double()
    return found


def places_of(case: Case, sequences: Sequences) -> PackingIndices | None:
    """Return places in no order, of which some have no token."""
    if case.padding < 0:
        return None
    count = sequences.tokens + case.padding
    rows = np.random.default_rng(count).permutation(count)[: sequences.tokens]
    return PackingIndices.of(rows, count, sequences.to_device)


def run(case: Case, given: dict[str, torch.Tensor], kind: torch.dtype, implementation: str):
    """Return the outputs and all gradients by name."""
    sequences = Sequences(case.bounds)
    wide = torch.promote_types(kind, torch.float32)
    kinds = {"a_log": wide, "dt_bias": wide}
    leaves = {
        name: x.detach().to(kinds.get(name, kind)).requires_grad_() for name, x in given.items()
    }
    weights = PrologueWeights(
        leaves["weight"], leaves.get("bias"), leaves["a_log"], leaves["dt_bias"]
    )
    inputs, last = recurrence_prologue(
        leaves["source"][..., : case.parts.width],
        weights,
        unit=case.parts,
        sequences=sequences,
        packing=places_of(case, sequences),
        initial=leaves.get("initial"),
        return_conv_state=True,
        implementation=implementation,
    )
    random = torch.Generator().manual_seed(9)
    pulls = [
        torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype) for y in inputs
    ]
    torch.autograd.backward(inputs, pulls)
    found = {"last": last, **inputs._asdict()}
    return found | {f"d_{name}": leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("name", CASES)
def test_prologue(name):
    case = CASES[name]
    given = tensors(case)
    found = run(case, given, torch.float32, "triton")
    wanted = run(case, given, torch.float64, "reference")
    assert found.keys() == wanted.keys()
    errors = {what: relative_error(found[what], true) for what, true in wanted.items()}
    assert max(errors.values()) <= BOUND, errors
    spared = found["d_source"][..., case.parts.width :]
    assert not spared.any()


@pytest.mark.parametrize("name", ["delta with padding and rows before", "three taps"])
def test_prologue_in_bf16(name):
    case = CASES[name]
    given = tensors(case)
    rounded = {x: y if x in ("a_log", "dt_bias") else y.bfloat16() for x, y in given.items()}
    found = run(case, rounded, torch.bfloat16, "triton")
    wanted = run(case, rounded, torch.float64, "reference")
    for what, true in wanted.items():
        assert_close_by_metric(what, found[what], true, bound=gpu_agreement.BOUND[torch.bfloat16])


@pytest.mark.parametrize("parts", [WHOLE, NARROW], ids=["delta", "state space"])
def test_steps_that_are_no_numbers_give_none(parts):
    """Neither limits nor the slope of the softplus make numbers of them."""
    case = Case(parts, bounds=FEW, padding=2)
    given = tensors(case)
    given["source"][3, 0, parts.dt + 1] = torch.nan
    found = run(case, given, torch.float32, "triton")
    wanted = run(case, given, torch.float64, "reference")
    for what, true in wanted.items():
        assert torch.equal(found[what].isnan(), true.isnan()), what
    assert found["decay"].isnan().sum() == 1
    for what, count in {"d_source": 1, "d_a_log": 1, "d_dt_bias": 1, "d_weight": 0}.items():
        assert found[what].isnan().sum() == count, what


def test_unsupported_shape_is_refused_if_forced_else_falls_back(monkeypatch):
    case = Case(DELTA, width=5, padding=-1)
    given = tensors(case)
    with pytest.raises(ValueError, match="takes up to 4"):
        run(case, given, torch.float32, "triton")
    seen = []

    def chosen(implementation, *args, **kwargs):
        seen.append(implementation)
        return "triton"

    monkeypatch.setattr(op, "choose", chosen)
    run(case, given, torch.float32, None)
    assert seen == [None]
