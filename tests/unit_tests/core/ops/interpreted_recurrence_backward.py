# SPDX-License-Identifier: Apache-2.0
"""Gradients of both recurrences in Triton's interpreter against the fp64 reference.

`test_triton.py` runs this file in a separate process, because TRITON_INTERPRET must be set before
the first import of Triton.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import RecurrenceInputs, recur
from megatron.core.ops.recurrence.delta_rule.cpu import DeltaRecurrence
from megatron.core.ops.recurrence.ssd.cpu import StateSpaceDual
from megatron.core.ops.recurrence.sweep import triton as kernels
from megatron.core.ops.recurrence.sweep.triton import TritonRecurrence
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import relative_error
from tests.support.gpu_agreement import BOUND
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

NAMES = (*RecurrenceInputs._fields, "initial")
PACK = (0, 0, 19, 20, 20)  # empty sequences, one token, a whole chunk, a tail


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use tiles so small that values need two, and one program for all heads of a group."""
    monkeypatch.setattr(kernels, "PROGRAMS", 1)
    for name in ("SWEEP_FP32", "REVERSE_FP32", "GRADIENTS_FP32"):
        launch = {"BLOCK_V": 16, "num_warps": 4, "num_stages": 1}
        monkeypatch.setattr(kernels, name, Launches(name, launch))


def make_inputs(bounds, *, delta_rule, shared=2, keys=5, values=19, groups=2, seed=1):
    """Return inputs and initial states in fp64, and gradients of outputs and final states."""
    source, t, heads = generator(seed), bounds[-1], groups * shared

    def randn(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    key = F.normalize(randn(t, groups, keys), dim=-1)
    raw_beta = randn(t, heads)
    inputs = RecurrenceInputs(
        query=randn(t, groups, keys),
        key=key,
        value=randn(t, heads, values),
        decay=-F.softplus(randn(t, heads)),
        beta=raw_beta.sigmoid() if delta_rule else F.softplus(raw_beta),
    )
    states = (len(bounds) - 1, heads, keys, values)
    return inputs, randn(*states), (randn(t, heads, values), randn(*states))


def recurrence_pair(delta_rule, chunk):
    """Return the kernel recurrence and the reference recurrence."""
    kernel_recurrence = TritonRecurrence(delta_rule, None if delta_rule else 1.0, chunk)
    return kernel_recurrence, (
        DeltaRecurrence(None, chunk) if delta_rule else StateSpaceDual(chunk)
    )


def gradients(recurrence, bounds, case, dtype, *, with_last=True, run=recur):
    """Return all six gradients of `recur` by name."""
    inputs, initial, grad_outputs = case
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (*inputs, initial)]
    gate_dtype = dtype if dtype == torch.float64 else torch.float32
    for i in (3, 4, 5):  # gates and states
        leaves[i] = leaves[i].detach().to(gate_dtype).requires_grad_()
    *recurrence_inputs, initial_leaf = leaves
    outputs = run(
        recurrence, RecurrenceInputs(*recurrence_inputs), Sequences(bounds), initial=initial_leaf
    )
    outputs = outputs if with_last else outputs[:1]
    grad_outputs = [
        grad_output.to(y.dtype) for grad_output, y in zip(grad_outputs, outputs, strict=False)
    ]
    torch.autograd.backward(outputs, grad_outputs)
    return dict(zip(NAMES, (x.grad for x in leaves), strict=True))


def compare(bounds, case, *, delta_rule, chunk=16, bound=1e-5, dtype=torch.float32, **options):
    """Compare all gradients with the fp64 reference on the same rounded inputs."""
    kernel_recurrence, reference = recurrence_pair(delta_rule, chunk)
    inputs, initial, grad_outputs = case
    rounded = RecurrenceInputs(*(x.to(dtype) for x in inputs[:3]), *(x.float() for x in inputs[3:]))
    case = rounded, initial.float(), (grad_outputs[0].to(dtype), grad_outputs[1].float())
    actual = gradients(kernel_recurrence, bounds, case, dtype, **options)
    expected = gradients(reference, bounds, case, torch.float64, **options)
    # Gradients after strong decays are products of the decays: small, but significant.
    errors = {name: relative_error(actual[name], expected[name], scale=0.0) for name in NAMES}
    assert max(errors.values()) <= bound, errors
    return actual, expected


@pytest.mark.parametrize("delta_rule", [True, False], ids=["delta", "ssd"])
@pytest.mark.parametrize("shared", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_packed_gradients_match_fp64(delta_rule, shared, monkeypatch):
    if shared == 3:  # one program per head, and sums in memory
        monkeypatch.setattr(kernels, "PROGRAMS", 1 << 30)
    groups = 2 if shared == 1 else 1
    case = make_inputs(PACK, delta_rule=delta_rule, shared=shared, groups=groups)
    compare(PACK, case, delta_rule=delta_rule, with_last=shared > 1)


@pytest.mark.parametrize("delta_rule", [True, False], ids=["delta", "ssd"])
def test_gradients_without_tokens_match_fp64(delta_rule):
    bounds = (0, 0, 0)
    case = make_inputs(bounds, delta_rule=delta_rule, shared=1, groups=1)
    compare(bounds, case, delta_rule=delta_rule)


@pytest.mark.parametrize("delta_rule", [True, False], ids=["delta", "ssd"])
def test_gradients_of_final_states_alone_match_fp64(delta_rule):
    bounds = (0, 18)
    inputs, initial, grad_outputs = make_inputs(bounds, delta_rule=delta_rule, shared=1, groups=1)
    grad_outputs = grad_outputs[0] * 0, grad_outputs[1]
    actual, _ = compare(bounds, (inputs, initial, grad_outputs), delta_rule=delta_rule)
    assert not actual["query"].any()


@pytest.mark.parametrize("delta_rule", [True, False], ids=["delta", "ssd"])
def test_gradients_with_extreme_gates_match_fp64(delta_rule):
    bounds = (0, 21)
    inputs, initial, grad_outputs = make_inputs(bounds, delta_rule=delta_rule, shared=1, groups=1)
    decay, beta = inputs.decay.clone(), inputs.beta.clone()
    decay[::5], decay[2::5], decay[3::5], decay[7] = -30.0, 0.0, -12.0, -torch.inf
    beta[::3], beta[1::3] = 0.0, 1.0
    inputs = inputs._replace(decay=decay, beta=beta)
    actual, expected = compare(bounds, (inputs, initial, grad_outputs), delta_rule=delta_rule)
    assert actual["decay"][7].item() == 0.0
    # Check these alone too: log A accumulates them times the decay, so noise would move log A.
    strong = decay[:, 0] == -12.0
    error = relative_error(actual["decay"][strong], expected["decay"][strong], scale=0.0)
    assert error <= 1e-4, error


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 4e-3), (torch.bfloat16, BOUND[torch.bfloat16])], ids=str
)
@pytest.mark.parametrize("delta_rule", [True, False], ids=["delta", "ssd"])
def test_half_precision_gradients_with_chunks_of_64_match_fp64(delta_rule, dtype, bound):
    bounds = (0, 70)
    case = make_inputs(bounds, delta_rule=delta_rule, shared=1, groups=1)
    compare(bounds, case, delta_rule=delta_rule, chunk=64, dtype=dtype, bound=bound)


@pytest.mark.parametrize("delta_rule", [True, False], ids=["delta", "ssd"])
def test_recomputed_forward_gives_the_same_gradients(delta_rule):
    bounds = (0, 17)
    case = make_inputs(bounds, delta_rule=delta_rule, shared=1, groups=1)
    triton_recurrence, _ = recurrence_pair(delta_rule, 16)

    def checkpointed_recur(recurrence, inputs, sequences, *, initial):
        """Run forward with activation checkpointing, which recomputes it in backward."""

        def run(*tensors):
            *recurrence_inputs, initial_state = tensors
            return recur(
                recurrence, RecurrenceInputs(*recurrence_inputs), sequences, initial=initial_state
            )

        return checkpoint(run, *inputs, initial, use_reentrant=False)

    actual = gradients(triton_recurrence, bounds, case, torch.float32, run=checkpointed_recur)
    expected = gradients(triton_recurrence, bounds, case, torch.float32)
    for name in NAMES:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("delta_rule", [True, False], ids=["delta", "ssd"])
def test_saved_states_give_the_same_gradients(delta_rule, monkeypatch):
    bounds = (0, 5, 5, 39)
    case = make_inputs(bounds, delta_rule=delta_rule, shared=2, groups=1)
    triton_recurrence, _ = recurrence_pair(delta_rule, 16)
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
    assert "states_before" not in sweeps[0], "states are kept although no gradient is needed"


@pytest.mark.parametrize("delta_rule", [True, False], ids=["delta", "ssd"])
def test_state_gradient_matches_fp64(delta_rule):
    bounds = (0, 0, 19)
    inputs, _, grad_outputs = make_inputs(bounds, delta_rule=delta_rule, shared=2, groups=1)
    gradients_by_dtype = []
    for recurrence, dtype in zip(
        recurrence_pair(delta_rule, 16), (torch.float32, torch.float64), strict=True
    ):
        recurrence_inputs = RecurrenceInputs(*(x.to(dtype) for x in inputs))
        prepared = recurrence.prepare(recurrence_inputs, Sequences(bounds))
        gradients_by_dtype.append(recurrence.state_gradient(prepared, grad_outputs[0].to(dtype)))
    assert relative_error(*gradients_by_dtype) <= 1e-5


def test_gradients_of_projection_slices_match_fp64():
    """Query, key and value are slices of one projection; the gradient is expanded."""
    bounds = (0, 17)
    inputs, initial, grad_outputs = make_inputs(bounds, delta_rule=True, shared=1, groups=1)

    def sliced(recurrence, recurrence_inputs, sequences, *, initial):
        projection = torch.cat([x.flatten(1) for x in recurrence_inputs[:3]], 1)
        qkv = [
            x.unflatten(1, (1, -1))
            for x in projection.split([x.shape[-1] for x in recurrence_inputs[:3]], 1)
        ]
        recurrence_inputs = RecurrenceInputs(*qkv, *recurrence_inputs[3:])
        out, final = recur(recurrence, recurrence_inputs, sequences, initial=initial)
        return out.sum(-1, keepdim=True), final

    grad_outputs = grad_outputs[0][..., :1], grad_outputs[1]
    compare(bounds, (inputs, initial, grad_outputs), delta_rule=True, run=sliced)
