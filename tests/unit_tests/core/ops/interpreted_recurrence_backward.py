# SPDX-License-Identifier: Apache-2.0
"""Gradients of both recurrences in Triton's interpreter, against the reference in fp64.

Run by `test_triton.py` in a process of its own: TRITON_INTERPRET must be set before the first
import of Triton.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.chunked_recurrence import triton as kernels
from megatron.core.ops.chunked_recurrence.triton import TritonRecurrence
from megatron.core.ops.gated_delta_rule.reference import DeltaRecurrence
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import RecurrenceInputs, recur
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.state_space_dual.reference import StateSpaceDual
from tests.support.closeness import relative_error
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

NAMES = (*RecurrenceInputs._fields, "initial")
PACK = (0, 0, 19, 19, 20, 53)  # empty ones, one token, tails, whole chunks


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let values need two tiles, and three heads of a group three programs."""
    for name in ("SWEEP_WIDE", "REVERSE_WIDE", "GRADIENTS_WIDE"):
        small = {"BLOCK_V": 16, "num_warps": 4, "num_stages": 1}
        small |= {"HEADS": 2} if name == "GRADIENTS_WIDE" else {}
        monkeypatch.setattr(kernels, name, Launches(name, small))


def made(bounds, *, corrects, shared=2, keys=5, values=19, groups=2, seed=1):
    """Return inputs and first states in fp64, and pulls of output and last states."""
    source, t, heads = generator(seed), bounds[-1], groups * shared

    def randn(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    key = F.normalize(randn(t, groups, keys), dim=-1)
    strength = randn(t, heads)
    inputs = RecurrenceInputs(
        query=randn(t, groups, keys),
        key=key,
        value=randn(t, heads, values),
        decay=-F.softplus(randn(t, heads)),
        strength=strength.sigmoid() if corrects else F.softplus(strength),
    )
    states = (len(bounds) - 1, heads, keys, values)
    return inputs, randn(*states), (randn(t, heads, values), randn(*states))


def pair(corrects, chunk):
    """Return the kernels and the reference of one recurrence."""
    mine = TritonRecurrence(corrects, None if corrects else 1.0, chunk)
    return mine, (DeltaRecurrence(None, chunk) if corrects else StateSpaceDual(chunk))


def gradients(recurrence, bounds, case, dtype, *, with_last=True, run=recur):
    """Return all six gradients by name, through `recur`."""
    inputs, initial, pulls = case
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (*inputs, initial)]
    wide = dtype if dtype == torch.float64 else torch.float32
    for i in (3, 4, 5):  # gates and states
        leaves[i] = leaves[i].detach().to(wide).requires_grad_()
    *given, first = leaves
    outputs = run(recurrence, RecurrenceInputs(*given), Sequences(bounds), initial=first)
    outputs = outputs if with_last else outputs[:1]
    pulls = [pull.to(y.dtype) for pull, y in zip(pulls, outputs, strict=False)]
    torch.autograd.backward(outputs, pulls)
    return dict(zip(NAMES, (x.grad for x in leaves), strict=True))


def compare(bounds, case, *, corrects, chunk=16, bound=1e-5, dtype=torch.float32, **options):
    """Compare all gradients with those of the reference in fp64, from the same rounded numbers."""
    mine, reference = pair(corrects, chunk)
    inputs, initial, pulls = case
    rounded = RecurrenceInputs(*(x.to(dtype) for x in inputs[:3]), *(x.float() for x in inputs[3:]))
    case = rounded, initial.float(), (pulls[0].to(dtype), pulls[1].float())
    got = gradients(mine, bounds, case, dtype, **options)
    wanted = gradients(reference, bounds, case, torch.float64, **options)
    errors = {name: relative_error(got[name], wanted[name]) for name in NAMES}
    assert max(errors.values()) <= bound, errors
    return got, wanted


@pytest.mark.parametrize("shared", [1, 2, 3])
@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])
def test_gradients_of_a_pack(corrects, shared):
    compare(PACK, made(PACK, corrects=corrects, shared=shared), corrects=corrects)
