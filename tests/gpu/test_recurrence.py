# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule and SSD against their equations: outputs, states and all gradients.

Tests of the CPU engine run everywhere. Tests of the kernels, marked gpu, run in Triton's
interpreter (`test_triton.py`) and on a GPU, where the CPU engine in fp64 replaces the equation: a
loop over thousands of tokens takes too long.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import megatron.core.ops.recurrence as op
from experimental.recurrence_splits.splits import recur_split
from megatron.core.ops.recurrence import (
    RecurrenceInputs,
    apply_transition,
    delta_recurrence,
    gated_delta_rule,
    naive,
    recur,
    state_space_dual,
    state_space_recurrence,
)
from megatron.core.ops.recurrence.delta_rule import cpu as delta_rule_cpu
from megatron.core.ops.recurrence.ssd import cpu as ssd_cpu
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import assert_close_by_metric, relative_error
from tests.support.gpu_agreement import BOUND, REHEARSES, random_tensor, sized
from tests.support.inputs import generator
from tests.support.launch_kernels import assert_launches
from tests.support.nan_memory import nan_memory

OPS = {"delta": gated_delta_rule, "ssd": state_space_dual}
RECURRENCES = {"delta": delta_recurrence, "ssd": state_space_recurrence}
EQUATIONS = {"delta": naive.delta_rule, "ssd": naive.ssd}
KINDS = pytest.mark.parametrize("kind", OPS)
KERNELS = pytest.mark.gpu
#: The interpreter computes bf16 in fp32, and takes twice the time for both.
DTYPES = (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow))
NAMES = (*RecurrenceInputs._fields, "initial")
GATES_AND_STATES = (3, 4, 5)
CHUNK = 8  # of the CPU engine
#: On a CPU; a GPU sums fp32 in another order.
BOUNDS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: BOUND[torch.bfloat16],
    torch.float16: 4e-3,
}


def bound_of(dtype, device) -> float:
    """Return the largest error of a dtype on a device."""
    on_gpu = torch.device(device).type == "cuda" and dtype == torch.float32
    return BOUND[dtype] if on_gpu else BOUNDS[dtype]


PACK = (0, 5, 5, 23, 24, 48, 57)  # an empty sequence, one token, whole chunks, tails


@pytest.fixture(autouse=True)
def blocks_and_tiles(monkeypatch):
    """Use blocks that split the steps of a sweep, and in the interpreter tiles of 16 columns."""
    monkeypatch.setattr(delta_rule_cpu, "ELEMENTS_IN_CACHE", 3 * 4 * CHUNK * CHUNK)
    monkeypatch.setattr(ssd_cpu, "ELEMENTS_IN_CACHE", 2 * CHUNK * CHUNK * 4)
    if REHEARSES:
        set_tiles(monkeypatch)


def set_tiles(monkeypatch, *, programs: int = 1) -> None:
    """Use tiles so small that values need two; `programs` sets how many share the heads."""
    from megatron.core.ops.launches import Launches
    from megatron.core.ops.recurrence.sweep import triton as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    launch = {"BLOCK_V": 16, "num_warps": 4, "num_stages": 1}
    for name in ("SWEEP", "SWEEP_DUAL", "SWEEP_FP32", "REVERSE_FP32", "GRADIENTS_FP32"):
        monkeypatch.setattr(kernels, name, Launches(name, launch))


def make_inputs(kind, bounds, *, groups=2, shared=2, keys=5, values=7, slowness=1.0, seed=1):
    """Return query, key, value, decay, beta and initial states in fp64."""
    source, tokens, heads = generator(seed), bounds[-1], groups * shared

    def draw(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    raw = draw(tokens, heads)
    return [
        draw(tokens, groups, keys),
        F.normalize(draw(tokens, groups, keys), dim=-1),
        draw(tokens, heads, values),
        -F.softplus(draw(tokens, heads)) * slowness,
        raw.sigmoid() if kind == "delta" else F.softplus(raw),
        draw(len(bounds) - 1, heads, keys, values),
    ]


def rounded(tensors, dtype):
    """Return the tensors in `dtype`, gates and states in fp32 at least."""
    gate_dtype = torch.promote_types(dtype, torch.float32)
    return [x.to(gate_dtype if i in GATES_AND_STATES else dtype) for i, x in enumerate(tensors)]


def engine(kind, sequences, *, implementation="reference", chunk=CHUNK, **options):
    """Return the recurrence in chunks as a function of (inputs, initial states)."""
    recurrence = RECURRENCES[kind](chunk_size=chunk, implementation=implementation)
    return lambda inputs, initial: recur(
        recurrence.operations(inputs), inputs, sequences, initial=initial, **options
    )


def equation(kind, sequences):
    """Return the recurrence token by token; on a GPU in fp64 in chunks, with kept states."""
    if sequences.device.type == "cuda":
        return engine(kind, sequences, chunk=64)
    return lambda inputs, initial: naive.recur(EQUATIONS[kind], inputs, sequences, initial)


def results(function, tensors, dtype=torch.float64, outputs=("out", "last")):
    """Return outputs and input gradients by name; the output gradients are seeded by shape."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, final = function(RecurrenceInputs(*leaves[:5]), leaves[5])
    by_name = {"out": out, "last": final}
    ys = [by_name[name] for name in outputs]
    grads = [random_tensor(torch.device("cpu"), *y.shape).to(dtype).to(y) for y in ys]
    gradients = torch.autograd.grad(ys, leaves, grads, materialize_grads=True)
    return by_name | dict(zip(NAMES, gradients, strict=True))


def check(kind, bounds, tensors, dtype, *, bound=None, scale=0.0, device="cpu", **options):
    """Compare all results in `dtype` with the equation in fp64 on the same rounded inputs."""
    sequences = Sequences(bounds, device=device)
    tensors = [x.to(device) for x in rounded(tensors, dtype)]
    outputs = options.pop("outputs", ("out", "last"))
    with nan_memory():
        actual = results(engine(kind, sequences, **options), tensors, dtype, outputs)
    fp64 = [x.double() for x in tensors]
    expected = results(equation(kind, sequences), fp64, dtype, outputs)
    for number, name in enumerate(("out", "last", *NAMES)):
        if number > 1:
            assert actual[name].dtype == tensors[number - 2].dtype, name
        assert_close_by_metric(
            name, actual[name], expected[name], bound=bound or bound_of(dtype, device), scale=scale
        )
    return actual, expected


# --- the equations: every implementation, any packing


CASES = {
    "whole chunks": (0, 24),
    "tail": (0, 19),
    "shorter than a chunk": (0, 3),
    "pack": PACK,
    "whole pack": (0, 8, 24, 32),
    "empty ends": (0, 0, 9, 9),
    "nothing": (0, 0),
}


@KINDS
@pytest.mark.parametrize("shared", [1, 2, 3])
@pytest.mark.parametrize("bounds", CASES.values(), ids=CASES)
def test_chunks_match_the_equation(kind, bounds, shared):
    for dtype in (torch.float64, torch.float32):
        check(kind, bounds, make_inputs(kind, bounds, shared=shared), dtype)
    if kind == "ssd":
        check(kind, bounds, make_inputs(kind, bounds, groups=1, shared=shared), torch.float64)


@KINDS
def test_blocks_of_one_chunk_match_the_equation(kind, monkeypatch):
    for module in (delta_rule_cpu, ssd_cpu):
        monkeypatch.setattr(module, "ELEMENTS_IN_CACHE", 1)
    check(kind, (0, 39), make_inputs(kind, (0, 39)), torch.float64)


#: groups, heads of each, features of keys and of values
SIZES = {
    ("delta", "Qwen3-Next"): sized((16, 2, 128, 128), (1, 2, 6, 5)),
    ("delta", "odd"): sized((3, 3, 100, 52), (1, 3, 5, 19)),
    ("delta", "wide"): sized((2, 1, 256, 200), (1, 1, 18, 17)),
    ("ssd", "Nemotron-H"): sized((8, 16, 128, 64), (1, 2, 6, 5)),
    ("ssd", "odd"): sized((1, 5, 40, 33), (1, 3, 5, 19)),
    ("ssd", "wide"): sized((1, 4, 256, 64), (2, 2, 18, 17)),
}
#: Empty sequences, single tokens, whole chunks and tails.
LONG_PACK = sized((0, 0, 1, 65, 129, 700, 700, 1500), (0, 0, 19, 20, 20))


def sized_inputs(kind, name, bounds, **options):
    groups, shared, keys, values = SIZES[kind, name]
    return make_inputs(
        kind, bounds, groups=groups, shared=shared, keys=keys, values=values, **options
    )


KERNEL = {"implementation": "triton", "chunk": sized(64, 16)}


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "name"), SIZES)
def test_kernels_match_the_equation(device, dtype, kind, name):
    inputs = sized_inputs(kind, name, LONG_PACK)
    check(kind, LONG_PACK, inputs, dtype, device=device, **KERNEL)


@KERNELS
@KINDS
def test_one_program_per_head_matches_the_equation(device, kind, monkeypatch):
    set_tiles(monkeypatch, programs=1 << 30)
    inputs = sized_inputs(kind, "odd", LONG_PACK)
    check(kind, LONG_PACK, inputs, torch.float32, device=device, **KERNEL)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@KINDS
def test_half_precision_with_chunks_of_64_matches_the_equation(device, kind, dtype):
    inputs = make_inputs(kind, (0, 70), groups=1, shared=1, values=19)
    options = {**KERNEL, "chunk": 64, "device": device}
    actual, expected = check(kind, (0, 70), inputs, dtype, **options)
    bound = 2**-9 if dtype == torch.float16 else BOUNDS[dtype]
    for name in ("out", "last"):
        assert relative_error(actual[name], expected[name]) <= bound


@KERNELS
@pytest.mark.parametrize("chunk", [32, 64])
@KINDS
def test_larger_chunks_in_fp32_match_the_equation(device, kind, chunk, monkeypatch):
    from megatron.core.ops.recurrence.sweep import triton as kernels

    # By default the delta rule has chunks of 16 in fp32, whose inverse is a single block.
    monkeypatch.setattr(kernels, "FP32_CHUNK_DELTA_RULE", 32)
    bounds = (0, chunk + 9)
    inputs = make_inputs(kind, bounds, groups=1, shared=1, keys=18, values=5)
    check(kind, bounds, inputs, torch.float32, device=device, implementation="triton", chunk=chunk)


@KERNELS
@KINDS
def test_sequences_without_tokens_keep_their_states(device, kind):
    inputs = make_inputs(kind, (0, 0, 0), groups=1)
    actual, _ = check(kind, (0, 0, 0), inputs, torch.float32, device=device, **KERNEL)
    assert torch.equal(actual["last"].cpu(), inputs[5].float())


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
def test_weak_decays_over_many_chunks_match_the_equation(device, dtype, kind):
    bounds = (0, sized(3000, 50))
    inputs = sized_inputs(kind, "odd", bounds, slowness=0.01)
    check(kind, bounds, inputs, dtype, device=device, **KERNEL)


# --- gates: strong and weak decays, resets, beta of 0 and 1


def gated(kind, bounds, decays, beta=None):
    """Return inputs with these decays in turn, and with a constant beta."""
    inputs = make_inputs(kind, bounds)
    for number, decay in enumerate(decays):
        inputs[3][number :: len(decays)] = decay
    if beta is not None:
        inputs[4].fill_(beta)
    return inputs


@pytest.mark.parametrize("decays", [(0.0,), (-50.0,), (-20.0,), (0.0, -1e30), (-1e-9, -300.0)])
def test_ssd_with_extreme_decays_matches_the_equation(decays):
    """Gradients are compared relative to their own size, which is tiny after a strong decay.

    With -1e30 the entries above the diagonal would be infinite; they must be masked.
    """
    check("ssd", (0, 29), gated("ssd", (0, 29), decays), torch.float32)
    check("ssd", (0, 29), gated("ssd", (0, 29), decays, beta=0.5), torch.float32)


@pytest.mark.parametrize("decay", [-50.0, -1e-3, 0.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_delta_rule_with_extreme_gates_matches_the_equation(decay, beta):
    sequences = Sequences((0, 5, 24))
    inputs = gated("delta", sequences.bounds, (decay,), beta)
    actual = results(engine("delta", sequences), inputs)
    expected = results(equation("delta", sequences), inputs)
    # A decay of -50 has a gradient of 1e-22, a difference of terms of size 1.
    assert (actual["decay"] - expected.pop("decay")).abs().max() <= 1e-12
    for name, tensor in expected.items():
        assert_close_by_metric(name, actual[name], tensor, bound=1e-12, scale=0.0)


def test_steps_of_zero_match_the_equation():
    inputs = make_inputs("ssd", (0, 20))
    inputs[4][::3] = 0.0
    check("ssd", (0, 20), inputs, torch.float64)


@pytest.mark.parametrize("decay", [-torch.inf, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@KINDS
def test_decay_of_minus_infinity_resets_the_state(kind, dtype, decay):
    """Reset at sequence ends, chunk ends, in between and twice in a row, separately per head."""
    inputs, resets = make_inputs(kind, (0, 29)), torch.zeros(29, 4, dtype=torch.bool)
    for head, tokens in enumerate([(0, 28), (7, 8), (12, 13, 24), ()]):
        resets[list(tokens), head] = True
    inputs[3][resets] = decay
    actual, _ = check(kind, (0, 29), inputs, dtype)
    assert not actual["decay"][resets].any()
    assert actual["decay"][~resets].all()


@KERNELS
@pytest.mark.parametrize(
    "strong", [-torch.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (-3e38, -20.0))]
)
@KINDS
def test_kernels_with_extreme_gates_match_the_equation(device, kind, strong):
    inputs = make_inputs(kind, (0, 37), groups=1, shared=1)
    decay, beta = inputs[3:5]
    decay[::5], decay[2::5], decay[3::5] = -30.0, 0.0, -12.0
    decay[[7, 16, 36]] = strong
    beta[::3], beta[1::3] = 0.0, 1.0
    actual, expected = check(kind, (0, 37), inputs, torch.float32, device=device, **KERNEL)
    if strong == -torch.inf:
        assert not actual["decay"][[7, 16, 36]].any()
    # Check these alone too: log A accumulates them times the decay, so noise would move log A.
    twelve = inputs[3][:, 0] == -12.0
    error = relative_error(actual["decay"][twelve], expected["decay"][twelve], scale=0.0)
    assert error <= 1e-4, error


@pytest.mark.parametrize("decay", [-1e4, -300.0])
@KINDS
def test_states_reset_by_strong_decays_stay_finite(kind, decay):
    inputs = make_inputs(kind, (0, 150))
    inputs[3].zero_()
    inputs[3][3::7] = decay  # these tokens reset the state, the others do not decay it
    check(kind, (0, 150), inputs, torch.float32, chunk=64)


@pytest.mark.parametrize("strongest", [16.0, 100.0, 1000.0])
@KINDS
def test_strong_decays_are_accurate_in_fp32(kind, strongest):
    """Rounded cumulative sums would be wrong in the fifth digit, like the gradient of a rate."""
    inputs = make_inputs(kind, (0, 120))
    inputs[3].uniform_(-strongest, 0.0, generator=generator(5))
    inputs, sequences = rounded(inputs, torch.float32), Sequences((0, 120))
    actual = results(engine(kind, sequences, chunk=64), inputs)
    expected = results(equation(kind, sequences), [x.double() for x in inputs])
    for values in (actual, expected):
        assert values.pop("initial").isfinite().all()
        values["rate"] = (values["decay"].double() * inputs[3].double()).sum(0)
    for name, tensor in expected.items():
        bound = 3e-6 if kind == "delta" else 1e-6
        assert_close_by_metric(name, actual[name], tensor, bound=bound)


def test_strong_decays_give_no_denormals():
    inputs = rounded(make_inputs("delta", (0, 64)), torch.float32)[:5]
    for rate in (-1.0, -3.0, -30.0):
        grids = RecurrenceInputs(*(x[None] for x in inputs))
        grids = grids._replace(decay=torch.full_like(grids.decay, rate))
        chunks = delta_rule_cpu.DeltaRuleChunks(grids, scale=1.0, dtype=torch.float32)
        names = "decay_mask decay_from_start decay_to_end decayed_inverse transition q_state addend"
        for name in names.split():
            sizes = getattr(chunks, name).abs()
            tiny = torch.finfo(torch.float32).tiny
            denormal = ((sizes > 0) & (sizes < tiny)).any()
            assert not denormal, (rate, name)


def test_repeated_keys_are_stable():
    """Powers of A grow like binomial coefficients here; the inverse does not."""
    inputs = make_inputs("delta", (0, 128))
    inputs[1] = inputs[1][:1].expand_as(inputs[1])
    inputs[3].zero_()
    inputs[4].fill_(1.0)
    check("delta", (0, 128), inputs, torch.float32, chunk=64)


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_with_repeated_keys_are_stable(device, dtype):
    bounds = (0, sized(200, 40))
    inputs = sized_inputs("delta", "odd", bounds, slowness=0.05)
    inputs[1] = inputs[1][:1].expand_as(inputs[1])
    inputs[4].fill_(1.0)
    check("delta", bounds, inputs, dtype, device=device, **KERNEL)


@KERNELS
@pytest.mark.parametrize("size", [16, 32, 64])
def test_solve_with_equal_keys_matches_inverse(device, size, monkeypatch):
    """With beta 1, a series over rows has terms of binomial size; T has ones and zeros."""
    from megatron.core.ops.recurrence.sweep import triton as kernels

    monkeypatch.setattr(kernels, "FP32_CHUNK_DELTA_RULE", size)
    query, key, value, decay, beta, _ = make_inputs("delta", (0, size + 3), groups=1)
    key, decay = key[:1].expand_as(key), decay * 0.1
    beta[:, 0] = 1.0
    inputs = [x.to(device) for x in rounded([query, key, value, decay, beta], torch.float32)]
    inputs = RecurrenceInputs(*inputs)
    recurrence = delta_recurrence(0.5, size, implementation="triton").operations(inputs)
    prepared = recurrence.prepare(inputs, Sequences((0, size + 3), device=device))
    total = decay[:size].T.cumsum(-1)
    decay_mask = (total[:, :, None] - total[:, None]).exp().tril()
    gram = key[:size, 0] @ key[:size, 0].T
    lower = (beta[:size].T[:, :, None] * gram).tril(-1)
    inverse = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + lower)
    scores = (query[:size, 0] @ key[:size, 0].T) * decay_mask * 0.5
    bound = bound_of(torch.float32, device)
    assert relative_error(prepared.decayed_inverse[0].cpu(), inverse * decay_mask) <= bound
    assert relative_error(prepared.scores[0].cpu(), scores) <= bound
    assert relative_error(prepared.decay_cumsum[:, 0].double().sum(0).cpu(), total) <= 1e-7
    tail = torch.eye(size)[3:].expand(2, -1, -1)  # rows without tokens
    assert torch.equal(prepared.decayed_inverse[1, :, 3:].cpu(), tail)


# --- sequences: NaN, splits, summaries


@KINDS
def test_nan_stays_in_its_sequence(kind):
    sequences = Sequences((0, 11, 30, 35))
    inputs = make_inputs(kind, sequences.bounds)[:5]
    clean, _ = engine(kind, sequences)(RecurrenceInputs(*inputs), None)
    for tensor in inputs:
        tensor[11:30] = math.nan
    out, final = engine(kind, sequences)(RecurrenceInputs(*inputs), None)
    assert torch.equal(out[:11], clean[:11])
    assert torch.equal(out[30:], clean[30:])
    assert out[11:30].isnan().all()
    assert final.isnan().flatten(1).all(1).tolist() == [False, True, False]


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
def test_nan_decays_propagate(device, dtype, kind):
    """On a GPU, the maximum of a number and NaN is the number."""
    bounds = (0, 2, sized(300, 37))
    inputs = [x.to(device) for x in rounded(sized_inputs(kind, "odd", bounds), dtype)]
    inputs[3][5, 1] = torch.nan
    groups, shared = SIZES[kind, "odd"][:2]
    function = engine(kind, Sequences(bounds, device=device), **KERNEL)
    actual = results(function, inputs, dtype)
    assert actual["out"][5:, 1].isnan().all()
    assert actual["last"][1, 1].isnan().all()
    clean_heads = [head for head in range(groups * shared) if head != 1]
    for name in ("out", "last", "value", "decay", "beta", "initial"):  # heads share the others
        assert actual[name][:, clean_heads].isfinite().all(), name
    assert actual["initial"][1, 1].isnan().all()
    for name in NAMES:
        assert actual[name].isnan().any(), name
        assert actual[name][: 1 if name == "initial" else 2].isfinite().all(), name


@KINDS
def test_split_sequence_matches_whole_sequence(kind):
    """Split at each offset below two chunks; the tail starts from the final states of the head."""
    *inputs, initial = make_inputs(kind, (0, 27))
    expected = engine(kind, Sequences((0, 27)))(RecurrenceInputs(*inputs), initial)
    for cut in range(2 * CHUNK + 1):
        state, outs = initial, []
        for tokens in (slice(0, cut), slice(cut, 27)):
            sequences = Sequences((0, tokens.stop - tokens.start))
            segment = RecurrenceInputs(*(x[tokens] for x in inputs))
            out, state = engine(kind, sequences)(segment, state)
            outs.append(out)
        assert relative_error(torch.cat(outs), expected[0]) <= 1e-12, cut
        assert relative_error(state, expected[1]) <= 1e-12, cut


def check_operations(kind, bounds, inputs, dtype, *, bound, device="cpu", **options):
    """The final states are affine in the initial ones; gradients can be computed in two steps."""
    sequences = Sequences(bounds, device=device)
    *inputs, initial = [x.to(device) for x in rounded(inputs, dtype)]
    inputs = RecurrenceInputs(*inputs)
    operations = RECURRENCES[kind](**options).operations(inputs)
    with nan_memory():
        prepared = operations.prepare(inputs, sequences)
        added, transition = operations.summary(prepared)
        out, final = operations.sweep(prepared, initial)
        d_out, d_final = (random_tensor(x.device, *x.shape).to(x.dtype) for x in (out, final))
        separate = operations.state_gradient(operations.prepare(inputs, sequences), d_out)
        combined = operations.state_gradient(prepared, d_out)
        _, d_initial = operations.backward(prepared, d_out, d_final)
    size = inputs.key.shape[2] if kind == "delta" else 1
    assert transition.shape == (*initial.shape[:2], size, size)
    assert relative_error(apply_transition(transition, initial) + added, final) <= bound
    leaf = initial.double().requires_grad_()
    fp64_inputs = RecurrenceInputs(*(x.double() for x in inputs))
    expected_out, expected_final = equation(kind, sequences)(fp64_inputs, leaf)
    (from_outputs,) = torch.autograd.grad(expected_out, leaf, d_out.double(), retain_graph=True)
    (from_states,) = torch.autograd.grad(expected_final, leaf, d_final.double())
    assert relative_error(separate, from_outputs) <= bound
    assert relative_error(combined, from_outputs) <= bound
    # M decays below the rounding error of a 16-bit identity.
    passed = apply_transition(transition, d_final, transposed=True)
    assert (passed - from_states).abs().max() <= bound * from_states.abs().max().clamp(min=1e-3)
    assert relative_error(d_initial, from_outputs + from_states) <= bound
    assert from_states.abs().max() > 1e-9  # the test depends on M
    return transition


@pytest.mark.parametrize("bounds", [(0, 21), PACK[:4]], ids=["one", "pack"])
@KINDS
def test_final_states_are_affine_in_initial_states(kind, bounds):
    inputs = make_inputs(kind, bounds, slowness=0.1)
    check_operations(kind, bounds, inputs, torch.float64, bound=1e-12, chunk_size=CHUNK)


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
def test_kernels_final_states_are_affine_in_initial_states(device, kind, dtype):
    """With weak decay, M over several chunks is neither the identity nor zero."""
    inputs = make_inputs(kind, (0, 0, 41), groups=1, values=19, slowness=0.02)
    inputs[4] *= 0.1 if kind == "delta" else 1.0
    options = {"chunk_size": 16, "implementation": "triton", "device": device}
    transition = check_operations(
        kind, (0, 0, 41), inputs, dtype, bound=bound_of(dtype, device), **options
    )
    assert 0.05 < transition[1].diagonal(0, -2, -1).abs().mean() < 0.95


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
def test_parallel_segments_match_whole_sequence(device, dtype, kind):
    bounds, chunk = (0, sized(2000, 40)), sized(64, 16)
    sequences = Sequences(bounds, device=device)
    splits = {"splits": 3, "chunk": chunk}
    inputs = [x.to(device) for x in rounded(sized_inputs(kind, "odd", bounds), dtype)]
    recurrence = RECURRENCES[kind](implementation="triton", chunk_size=chunk)

    def split(recurrence_inputs, initial):
        operations = recurrence.operations(recurrence_inputs)
        return recur_split(operations, recurrence_inputs, sequences, initial=initial, **splits)

    actual = results(split, inputs, dtype)
    expected = results(equation(kind, sequences), [x.double() for x in inputs], dtype)
    for name, tensor in expected.items():
        assert_close_by_metric(name, actual[name], tensor, bound=bound_of(dtype, device), scale=0.0)


# --- layouts and dtypes


@KINDS
def test_slices_of_a_projection_match_the_equation(kind):
    """The layer passes slices of one projection, and backward gets an expanded gradient."""
    projection = torch.randn(21, 46, generator=generator(2), dtype=torch.float64).requires_grad_()
    sequences = Sequences((0, 21))

    def split():
        value, query, key, decay, beta = projection.split([18, 10, 10, 4, 4], 1)
        value = torch.nn.functional.pad(value, (0, 2)).unflatten(1, (4, 5))
        query, key = (x.unflatten(1, (2, 5)) for x in (query, key))
        return RecurrenceInputs(
            query, F.normalize(key, dim=-1), value, -decay.exp(), beta.sigmoid()
        )

    grads = []
    for function in (engine(kind, sequences), equation(kind, sequences)):
        out, _ = function(split(), None)
        grads.append((out, *torch.autograd.grad(out.sum(), projection)))
    for actual, expected in zip(*grads, strict=True):
        assert relative_error(actual, expected) <= 1e-12


@KERNELS
@KINDS
def test_kernels_read_strided_inputs(device, kind):
    query, key, value, decay, beta, initial = make_inputs(kind, (0, 5, 22), groups=1, values=19)
    query, key, _ = torch.cat([query, key, query * 3], -1).split(5, -1)
    value = value.transpose(1, 2).contiguous().transpose(1, 2)
    decay, beta = torch.stack([decay, beta], -1).unbind(-1)
    tensors = [query, key, value, decay, beta]
    assert not any(x.is_contiguous() for x in tensors)
    check(kind, (0, 5, 22), [*tensors, initial], torch.float32, device=device, **KERNEL)


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_results_are_rounded_once(kind, dtype):
    inputs = rounded(make_inputs(kind, (0, 5, 21)), dtype)
    low = [x.to(dtype) if i == 4 else x for i, x in enumerate(inputs)]
    fp32_inputs = [x.float() for x in low]
    function = engine(kind, Sequences((0, 5, 21)))
    actual, expected = (results(function, x, dtype, ("out",)) for x in (low, fp32_inputs))
    for name, tensor in expected.items():
        fp32 = name in ("last", "decay", "initial")
        assert actual[name].dtype == (torch.float32 if fp32 else dtype), name
        assert torch.equal(actual[name], tensor.to(actual[name].dtype)), name


@KINDS
def test_gates_may_have_a_higher_precision(kind):
    inputs = rounded(make_inputs(kind, (0, 4)), torch.float32)[:5]
    fp64_gates = [x.double() if i in GATES_AND_STATES else x for i, x in enumerate(inputs)]
    sequences = Sequences((0, 4))
    out, _ = OPS[kind](*fp64_gates, sequences=sequences)
    assert out.dtype == torch.float32
    assert torch.allclose(out, OPS[kind](*inputs, sequences=sequences)[0])


# --- what backward saves and recomputes


@KINDS
def test_saved_tensors_suffice_for_backward(kind):
    sequences = Sequences((0, 40))
    leaves = [x.requires_grad_() for x in make_inputs(kind, (0, 40))]
    inputs, initial, saved = RecurrenceInputs(*leaves[:5]), leaves[5], []

    def pack(tensor):
        saved.append(tensor)
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: saved[index].clone()):
        out, final = engine(kind, sequences)(inputs, initial)
    if kind == "delta":
        shapes = [*(tuple(x.shape) for x in inputs), (5, 4, 8, 8), (5, 4, 5, 7)]
        assert sorted(tuple(x.shape) for x in saved) == sorted(shapes)
    expected_out, expected_final = equation(kind, sequences)(inputs, initial)
    expected = torch.autograd.grad(expected_out.sum() + expected_final.sum(), leaves)
    # Copies of these tensors alone give the gradients, and give them twice.
    for _ in range(2):
        actual = torch.autograd.grad(out.sum() + final.sum(), leaves, retain_graph=True)
        for name, gradient, expected_gradient in zip(NAMES, actual, expected, strict=True):
            assert relative_error(gradient, expected_gradient) <= 1e-12, name


@KINDS
def test_gradient_of_final_states_alone_matches_the_equation(kind):
    inputs = make_inputs(kind, (0, 9, 20))
    actual, _ = check(kind, (0, 9, 20), inputs, torch.float64, outputs=("last",))
    assert not actual["query"].any()


@KERNELS
@KINDS
def test_kernels_gradient_of_final_states_alone_matches(device, kind):
    inputs = make_inputs(kind, (0, 18), groups=1, shared=1, values=19)
    options = {**KERNEL, "device": device, "outputs": ("last",)}
    actual, _ = check(kind, (0, 18), inputs, torch.float32, **options)
    assert not actual["query"].any()


@KERNELS
@KINDS
def test_recomputed_forward_gives_the_same_gradients(device, kind):
    inputs = make_inputs(kind, (0, 17), groups=1, shared=1, values=19)
    inputs = [x.to(device) for x in rounded(inputs, torch.float32)]
    function = engine(kind, Sequences((0, 17), device=device), **KERNEL)

    def checkpointed(recurrence_inputs, initial):
        def run(*tensors):
            return function(RecurrenceInputs(*tensors[:5]), tensors[5])

        return checkpoint(run, *recurrence_inputs, initial, use_reentrant=False)

    actual, expected = results(checkpointed, inputs), results(function, inputs)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@KERNELS
@KINDS
def test_kept_states_skip_a_sweep_and_give_the_same_gradients(device, kind, monkeypatch):
    from megatron.core.ops.recurrence.sweep import triton as kernels

    bounds, sweeps, sweep_launch = (0, 5, 5, 39), [], kernels.sweep_launch

    def counted(prepared, **tensors):
        sweeps.append({name for name, tensor in tensors.items() if tensor is not None})
        return sweep_launch(prepared, **tensors)

    monkeypatch.setattr(kernels, "sweep_launch", counted)
    inputs = [x.to(device) for x in rounded(make_inputs(kind, bounds, groups=1), torch.float32)]
    sequences, gradients = Sequences(bounds, device=device), []
    for keep_states, stored in ((False, [(True, False), (False, True)]), (True, [(True, True)])):
        sweeps.clear()
        function = engine(kind, sequences, keep_states=keep_states, **KERNEL)
        gradients.append(results(function, inputs))
        assert [("out" in x, "states_before" in x) for x in sweeps] == stored
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in NAMES)
    sweeps.clear()
    with torch.no_grad():
        function(RecurrenceInputs(*inputs[:5]), None)
    assert "states_before" not in sweeps[0], "states are kept although no gradient is needed"


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@KINDS
def test_recurrence_launches_expected_kernels(device, dtype, kind):
    from megatron.core.ops.recurrence.sweep import triton as kernels

    sequences = Sequences(LONG_PACK, device=device)
    inputs = sized_inputs(kind, "odd", LONG_PACK)
    leaves = [x.to(device).requires_grad_() for x in rounded(inputs, dtype)]
    recurrence_inputs = RecurrenceInputs(*leaves[:5])
    function = partial(engine(kind, sequences, **KERNEL), recurrence_inputs, leaves[5])
    grad_outputs = [torch.ones_like(x) for x in function()]  # warm up caches
    prepares = {"solve_kernel": 1} if kind == "delta" else {"decay_sums_kernel": 1}
    num_seen = 1 if kind == "ssd" and dtype == torch.float32 else 0
    prepares |= {"seen_kernel": 1} if num_seen else {}
    assert_launches(function, prepares | {"sweep_kernel": 1})
    launched = {"reverse_sweep_kernel": 1, "recurrence_gradients_kernel": 1}
    launched |= {"seen_kernel": 1 + num_seen} if num_seen or kind == "delta" else {}
    operations = RECURRENCES[kind](implementation="triton").operations(recurrence_inputs)
    prepared = operations.prepare(recurrence_inputs, sequences)
    if kernels.heads_per_program(prepared) < SIZES[kind, "odd"][1]:  # of a group
        launched["sum_units_kernel"] = 1
    assert_launches(
        lambda: torch.autograd.grad(function(), leaves, grad_outputs),
        prepares | {"sweep_kernel": 2} | launched,
        allowed=("copy",),
    )


# --- peers


def test_delta_rule_matches_transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    bounds = (0, 70, 83, 211)

    def transformers_delta_rule(inputs, initial):
        """Run each sequence alone, with repeated key heads."""
        query, key = (x.repeat_interleave(2, 1) for x in inputs[:2])
        outputs = [
            torch_chunk_gated_delta_rule(
                *(x[None, begin:end] for x in (query, key, inputs.value)),
                g=inputs.decay[None, begin:end],
                beta=inputs.beta[None, begin:end],
                initial_state=initial[number : number + 1],
                output_final_state=True,
            )
            for number, (begin, end) in enumerate(pairwise(bounds))
        ]
        return torch.cat([out[0] for out, _ in outputs]), torch.cat([final for _, final in outputs])

    inputs = rounded(make_inputs("delta", bounds), torch.float32)
    actual = results(engine("delta", Sequences(bounds), chunk=64), inputs)
    for name, tensor in results(transformers_delta_rule, inputs).items():
        assert_close_by_metric(name, actual[name], tensor)


def test_ssd_matches_the_mamba2_scan_of_transformers():
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    bounds, rate = (0, 37, 38, 150), -torch.rand(4, generator=generator(6)).exp()

    def scan(inputs, initial):
        """Scan each sequence alone from zero states, in chunks of 32."""
        outs, final_states = [], []
        for begin, end in pairwise(bounds):
            query, key, value, _, dt = (x[None, begin:end] for x in inputs)
            out, state = mamba2.mamba2_chunk_scan(
                value, dt, rate, key, query, chunk_size=32, return_final_states=True
            )
            outs.append(out[0])
            final_states.append(state.mT)  # transformers has [1, H, V, K]
        return torch.cat(outs), torch.cat(final_states)

    def mcore_ssd(inputs, initial):
        inputs = inputs._replace(decay=inputs.beta * rate)
        return engine("ssd", Sequences(bounds), chunk=64)(inputs, None)

    inputs = rounded(make_inputs("ssd", bounds, keys=16, values=8), torch.float32)
    actual, expected = results(mcore_ssd, inputs), results(scan, inputs)
    for name in ("out", "last", "query", "key", "value", "beta"):
        assert_close_by_metric(name, actual[name], expected[name])


# --- arguments and choice


WRONG = {
    "tokens": (lambda x: {"key": x["key"][:3]}, "key", "3 tokens"),
    "keys": (lambda x: {"key": x["key"][:, :1]}, "key", "must both be"),
    "heads": (lambda x: {"value": x["value"][:, :3]}, "value", "multiple of 2 heads"),
    "no heads": (lambda x: {n: x[n][:, :0] for n in ("query", "key")}, "key", "at least one head"),
    "no features": (lambda x: {n: x[n][..., :0] for n in ("query", "key")}, "key", "one feature"),
    "no value": (lambda x: {"value": x["value"][..., :0]}, "value", "at least one feature"),
    "decay": (lambda x: {"decay": x["decay"][:, :2]}, "decay", "(4, 4)"),
    "gate": (lambda x: {"gate": x["gate"][:, :1]}, "gate", "(4, 4)"),
    "integers": (
        lambda x: {n: x[n].long() for n in ("query", "key", "value")},
        "value",
        "torch.int64",
    ),
    "key dtype": (lambda x: {"key": x["key"].bfloat16()}, "key", "torch.bfloat16"),
    "value dtype": (lambda x: {"value": x["value"].float()}, "value", "torch.float32"),
    "decay dtype": (lambda x: {"decay": x["decay"].float()}, "decay", "torch.float64"),
    "whole decay": (lambda x: {"decay": x["decay"].long()}, "decay", "torch.int64"),
    "gate dtype": (lambda x: {"gate": x["gate"].long()}, "gate", "torch.int64"),
    "initial": (lambda x: {"initial": torch.zeros(2, 4, 5, 7)}, "initial", "(1, 4, 5, 7)"),
    "sequences": (lambda _: {"sequences": [0, 4]}, "sequences", "list"),
    "lengths": (lambda _: {"sequences": Sequences((0, 5))}, "query", "4 tokens"),
    "no dimension": (lambda _: {"query": torch.ones(())}, "query", "no tokens"),
    "triton": (lambda _: {"implementation": "triton"}, "Triton", "float64"),
}


@pytest.mark.parametrize("name", WRONG)
@KINDS
def test_wrong_arguments_are_named(kind, name):
    change, argument, value = WRONG[name]
    gate = "beta" if kind == "delta" else "dt"
    arguments = dict(zip(NAMES, make_inputs(kind, (0, 4)), strict=True))
    arguments |= {"gate": arguments.pop("beta"), "sequences": Sequences((0, 4))}
    arguments |= change(arguments)
    arguments[gate] = arguments.pop("gate")
    with pytest.raises(ValueError) as error:
        OPS[kind](**arguments)
    message = str(error.value)
    assert "\n" not in message
    assert OPS[kind].__name__ in message
    assert (gate if argument == "gate" else argument) in message
    assert value in message


@KINDS
def test_an_empty_chunk_is_refused(kind):
    with pytest.raises(ValueError, match="chunk_size 0"):
        RECURRENCES[kind](chunk_size=0)


@KERNELS
@pytest.mark.parametrize(
    ("sizes", "options", "value"),
    [({"keys": 257}, {}, "256 features, not 257"), ({}, {"chunk_size": 24}, "not 24")],
    ids=["keys", "chunk"],
)
@KINDS
def test_sizes_without_kernel_are_refused_or_use_reference(
    device, kind, sizes, options, value, monkeypatch
):
    """Such sizes are refused if kernels are forced and otherwise use the reference."""
    tensors = rounded(make_inputs(kind, (0, 4), **sizes), torch.float32)
    inputs = RecurrenceInputs(*(x.to(device) for x in tensors[:5]))
    with pytest.raises(ValueError, match=value):
        RECURRENCES[kind](implementation="triton", **options).operations(inputs)
    monkeypatch.setattr(op, "choose", lambda *_: "triton")
    operations = RECURRENCES[kind](**options).operations(inputs)
    assert isinstance(operations, (delta_rule_cpu.DeltaRecurrence, ssd_cpu.StateSpaceDual))
    sequences = Sequences((0, 4), device=device)
    assert recur(operations, inputs, sequences)[0].isfinite().all()


@KERNELS
@KINDS
def test_public_op_runs_the_forced_implementation(device, kind, monkeypatch):
    from megatron.core.ops.recurrence.sweep import triton as kernels

    inputs = [x.to(device) for x in rounded(make_inputs(kind, (0, 21)), torch.float32)]
    options = {"sequences": Sequences((0, 21), device=device), "initial": inputs[5]}
    launches, sweep_launch = [], kernels.sweep_launch
    monkeypatch.setattr(
        kernels, "sweep_launch", lambda *x, **y: launches.append(1) or sweep_launch(*x, **y)
    )
    OPS[kind](*inputs[:5], implementation="triton", **options)
    assert len(launches) == 1
    OPS[kind](*inputs[:5], **options)
    assert len(launches) == (2 if device.type == "cuda" else 1)


@KERNELS
def test_chunks_of_kernels_never_cross_sequences():
    from megatron.core.ops.recurrence.sweep.kernels import ChunkIndices

    bounds = (0, 0, 19, 19, 20, 53, 53)
    chunks = ChunkIndices.of(Sequences(bounds), 16)
    starts, ends, offsets = [], [], [0]
    for low, high in pairwise(bounds):
        starts += range(low, high, 16)
        ends += [min(start + 16, high) for start in range(low, high, 16)]
        offsets.append(len(starts))
    assert (chunks.count, chunks.sequence_count, chunks.tokens) == (len(starts), 6, 53)
    tables = (chunks.starts, chunks.ends, chunks.offsets)
    assert [x.tolist() for x in tables] == [starts, ends, offsets]
    with pytest.raises(ValueError, match="chunks of 0 tokens"):
        ChunkIndices.of(Sequences(bounds), 0)
