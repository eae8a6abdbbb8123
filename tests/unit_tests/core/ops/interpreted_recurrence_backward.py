# SPDX-License-Identifier: Apache-2.0
"""Gradients of both recurrences in Triton's interpreter, against the reference in fp64.

Run by `test_triton.py` in a process of its own: TRITON_INTERPRET must be set before the first
import of Triton.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron.core.ops.chunked_recurrence import triton as kernels
from megatron.core.ops.chunked_recurrence.triton import TritonRecurrence
from megatron.core.ops.gated_delta_rule import DeltaRecurrence
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import RecurrenceInputs, recur
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.state_space_dual import StateSpaceDual
from tests.support.closeness import relative_error
from tests.support.gpu_agreement import BOUND
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

NAMES = (*RecurrenceInputs._fields, "initial")
PACK = (0, 0, 19, 20, 20)  # empty ones, one token, a whole chunk, a tail


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let values need two tiles, and a program work on all heads of a group."""
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    for name in ("SWEEP_FP32", "REVERSE_FP32", "GRADIENTS_FP32"):
        small = {"BLOCK_V": 16, "num_warps": 4, "num_stages": 1}
        monkeypatch.setattr(kernels, name, Launches(name, small))


def make_inputs(bounds, *, corrects, shared=2, keys=5, values=19, groups=2, seed=1):
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
        beta=strength.sigmoid() if corrects else F.softplus(strength),
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
    # Gradients after strong decays are products of these: small, but not noise.
    errors = {name: relative_error(got[name], wanted[name], scale=0.0) for name in NAMES}
    assert max(errors.values()) <= bound, errors
    return got, wanted


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])
@pytest.mark.parametrize("shared", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_gradients_of_a_pack(corrects, shared, monkeypatch):
    if shared == 3:  # a program for each head, and sums in memory
        monkeypatch.setattr(kernels, "PROGRAMS", 1 << 30)
    groups = 2 if shared == 1 else 1
    case = make_inputs(PACK, corrects=corrects, shared=shared, groups=groups)
    compare(PACK, case, corrects=corrects, with_last=shared > 1)


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])
def test_no_tokens(corrects):
    bounds = (0, 0, 0)
    case = make_inputs(bounds, corrects=corrects, shared=1, groups=1)
    compare(bounds, case, corrects=corrects)


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])
def test_only_the_last_states_are_pulled(corrects):
    bounds = (0, 18)
    inputs, initial, pulls = make_inputs(bounds, corrects=corrects, shared=1, groups=1)
    pulls = pulls[0] * 0, pulls[1]
    got, _ = compare(bounds, (inputs, initial, pulls), corrects=corrects)
    assert not got["query"].any()


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])
def test_gates_at_their_ends(corrects):
    bounds = (0, 21)
    inputs, initial, pulls = make_inputs(bounds, corrects=corrects, shared=1, groups=1)
    decay, strength = inputs.decay.clone(), inputs.beta.clone()
    decay[::5], decay[2::5], decay[3::5], decay[7] = -30.0, 0.0, -12.0, -torch.inf
    strength[::3], strength[1::3] = 0.0, 1.0
    inputs = inputs._replace(decay=decay, beta=strength)
    got, wanted = compare(bounds, (inputs, initial, pulls), corrects=corrects)
    assert got["decay"][7].item() == 0.0
    # By themselves too: one that is no more than rounding would move log A by its decay times it.
    strong = decay[:, 0] == -12.0
    error = relative_error(got["decay"][strong], wanted["decay"][strong], scale=0.0)
    assert error <= 1e-4, error


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 4e-3), (torch.bfloat16, BOUND[torch.bfloat16])], ids=str
)
@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])
def test_chunks_of_64_in_half_precision(corrects, dtype, bound):
    bounds = (0, 70)
    case = make_inputs(bounds, corrects=corrects, shared=1, groups=1)
    compare(bounds, case, corrects=corrects, chunk=64, dtype=dtype, bound=bound)


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])
def test_recomputation_saves_nothing_and_finds_the_same(corrects):
    bounds = (0, 17)
    case = make_inputs(bounds, corrects=corrects, shared=1, groups=1)
    mine, _ = pair(corrects, 16)

    def again(recurrence, inputs, sequences, *, initial):
        """Run forward twice, as recomputation does; autograd fills what it kept each time."""

        def run(*tensors):
            *given, first = tensors
            return recur(recurrence, RecurrenceInputs(*given), sequences, initial=first)

        return checkpoint(run, *inputs, initial, use_reentrant=False)

    got = gradients(mine, bounds, case, torch.float32, run=again)
    wanted = gradients(mine, bounds, case, torch.float32)
    for name in NAMES:
        assert torch.equal(got[name], wanted[name]), name


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])
def test_saved_states_give_the_same_gradients(corrects, monkeypatch):
    bounds = (0, 5, 5, 39)
    case = make_inputs(bounds, corrects=corrects, shared=2, groups=1)
    triton_recurrence, _ = pair(corrects, 16)
    sweeps = []
    run_sweep = kernels.sweep

    def counted(prepared, **tensors):
        sweeps.append({name for name, tensor in tensors.items() if tensor is not None})
        run_sweep(prepared, **tensors)

    monkeypatch.setattr(kernels, "sweep", counted)
    expected = gradients(triton_recurrence, bounds, case, torch.float32)
    assert [("out" in stored, "states_before" in stored) for stored in sweeps] == [
        (True, False),
        (False, True),
    ]
    sweeps.clear()
    keeping = partial(recur, keep_states=True)
    actual = gradients(triton_recurrence, bounds, case, torch.float32, run=keeping)
    assert [("out" in stored, "states_before" in stored) for stored in sweeps] == [(True, True)]
    for name in NAMES:
        assert torch.equal(actual[name], expected[name]), name
    with torch.no_grad():
        sweeps.clear()
        inputs = RecurrenceInputs(*(tensor.float() for tensor in case[0]))
        keeping(triton_recurrence, inputs, Sequences(bounds))
    assert "states_before" not in sweeps[0], "states are kept although nothing is differentiated"


@pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])
def test_gradient_of_first_states_alone(corrects):
    bounds = (0, 0, 19)
    inputs, _, pulls = make_inputs(bounds, corrects=corrects, shared=2, groups=1)
    found = []
    for recurrence, dtype in zip(pair(corrects, 16), (torch.float32, torch.float64), strict=True):
        given = RecurrenceInputs(*(x.to(dtype) for x in inputs))
        prepared = recurrence.prepare(given, Sequences(bounds))
        found.append(recurrence.state_gradient(prepared, pulls[0].to(dtype)))
    assert relative_error(*found) <= 1e-5


def test_slices_of_wider_tensors_need_no_copy():
    """Query, key and value are slices of one projection, and the gradient is expanded."""
    bounds = (0, 17)
    inputs, initial, pulls = make_inputs(bounds, corrects=True, shared=1, groups=1)

    def sliced(recurrence, given, sequences, *, initial):
        wide = torch.cat([x.flatten(1) for x in given[:3]], 1)
        parts = [x.unflatten(1, (1, -1)) for x in wide.split([x.shape[-1] for x in given[:3]], 1)]
        given = RecurrenceInputs(*parts, *given[3:])
        out, last = recur(recurrence, given, sequences, initial=initial)
        return out.sum(-1, keepdim=True), last

    pulls = pulls[0][..., :1], pulls[1]
    compare(bounds, (inputs, initial, pulls), corrects=True, run=sliced)
