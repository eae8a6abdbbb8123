# SPDX-License-Identifier: Apache-2.0
"""Chunked state-space duality against the token-by-token recurrence in fp64."""

import pytest
import torch

from megatron.core.ops.recurrence import (
    RecurrenceInputs,
    add_skip,
    apply_transition,
    recur,
    state_space_dual,
    state_space_recurrence,
    state_space_step,
)
from megatron.core.ops.recurrence.ssd import cpu as state_space_op
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import relative_error
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import assert_close, compare, maker

HEADS, KEYS, VALUES, CHUNK = 6, 5, 3, 8
NAMES = ("query", "key", "value", "decay", "dt", "initial")

# One sequence: whole chunks, a partial chunk, less than a chunk, empty. Packs: whole chunks; any
# lengths with empty sequences, the longest not first.
BOUNDS = {
    "whole": (0, 24),
    "partial": (0, 29),
    "short": (0, 5),
    "nothing": (0, 0),
    "whole pack": (0, 8, 24, 32),
    "pack": (0, 3, 3, 22, 41, 42, 42),
}


def make(tokens, *, groups=2, sequences=1, dtype=torch.float64, seed=3):
    """Return inputs and initial states as leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = (
        randn(tokens, groups, KEYS),
        randn(tokens, groups, KEYS),
        randn(tokens, HEADS, VALUES),
        -randn(tokens, HEADS).exp() * 0.3,
        randn(tokens, HEADS).exp() * 0.5,
        randn(sequences, HEADS, KEYS, VALUES),
    )
    return [x.to(dtype).requires_grad_() for x in tensors]


def naive(query, key, value, decay, dt, initial, bounds):
    """Return (out, final states) of the recurrence from its definition."""
    heads_per_group = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(heads_per_group, 1) for x in (query, key))
    out, final_states = [value[:0]], []
    for begin, end, state in zip(bounds, bounds[1:], initial, strict=False):
        for t in range(begin, end):
            update = torch.einsum("hk,hv->hkv", key[t], value[t] * dt[t][:, None])
            state = decay[t].exp()[:, None, None] * state + update
            out.append(torch.einsum("hk,hkv->hv", query[t], state)[None])
        final_states.append(state)
    return torch.cat(out), torch.stack(final_states)


def gradients(outputs, inputs):
    """Return input gradients for random output gradients, seeded by shape."""
    generator = torch.Generator().manual_seed(11)
    grad_outputs = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
    grad_outputs = [
        grad_output.to(y.dtype) for grad_output, y in zip(grad_outputs, outputs, strict=True)
    ]
    return torch.autograd.grad(
        outputs, inputs, grad_outputs, allow_unused=True, materialize_grads=True
    )


def check(inputs, bounds, dtype=torch.float64, *, scale=1.0):
    """Compare outputs, final states and all gradients with the recurrence in fp64."""
    fp64_inputs = [x.detach().double().requires_grad_() for x in inputs]
    expected = naive(*fp64_inputs, bounds)
    with nan_memory():
        actual = recur(
            state_space_recurrence(CHUNK),
            RecurrenceInputs(*inputs[:5]),
            Sequences(bounds),
            initial=inputs[5],
        )
        grads = gradients(actual, inputs)
    names = ("out", "last", *NAMES)
    for name, actual_tensor, expected_tensor in zip(
        names, (*actual, *grads), (*expected, *gradients(expected, fp64_inputs)), strict=True
    ):
        assert actual_tensor.shape == expected_tensor.shape, name
        if expected_tensor.numel():
            assert_close(actual_tensor, expected_tensor, dtype, name, scale=scale)


@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("kind", BOUNDS)
def test_chunked_ssd_matches_recurrence(kind, groups):
    bounds = BOUNDS[kind]
    check(make(bounds[-1], groups=groups, sequences=len(bounds) - 1), bounds)


@pytest.mark.parametrize("elements", [1, 2 * CHUNK * CHUNK * HEADS])
def test_chunk_blocks_match_recurrence(elements, monkeypatch):
    """Blocks have one chunk, or two chunks with one left over."""
    monkeypatch.setattr(state_space_op, "ELEMENTS_IN_CACHE", elements)
    check(make(39), (0, 39))


@pytest.mark.parametrize("decays", [(0.0,), (-50.0,), (-20.0,), (0.0, -1e30), (-1e-9, -300.0)])
def test_extreme_decays_match_recurrence(decays):
    """Compare fp32 gradients relative to their own size, which is tiny after strong decay.

    With -1e30 the entries above the diagonal would be infinite; they must be masked.
    """
    inputs = make(29, dtype=torch.float32)
    with torch.no_grad():
        for number, decay in enumerate(decays):
            inputs[3][number :: len(decays)] = decay
    check(inputs, (0, 29), torch.float32, scale=0.0)


@pytest.mark.parametrize("strongest", [16.0, 100.0, 1000.0])
def test_strong_decays_are_accurate_in_fp32(strongest):
    """Rounded cumulative sums would be wrong in the fifth digit, like the gradient of a rate."""
    fp32_inputs, tokens, outputs_by_dtype = make(120, dtype=torch.float32), 120, []
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        fp32_inputs[3].uniform_(-strongest, 0.0, generator=generator)
    fp64_inputs = [x.detach().double().requires_grad_() for x in fp32_inputs]
    recurrence_inputs, recurrence = RecurrenceInputs(*fp32_inputs[:5]), state_space_recurrence(64)
    actual = recur(recurrence, recurrence_inputs, Sequences((0, tokens)), initial=fp32_inputs[5])
    for outputs, inputs in ((actual, fp32_inputs), (naive(*fp64_inputs, (0, tokens)), fp64_inputs)):
        grads = dict(zip(NAMES, gradients(outputs, inputs), strict=True))
        assert grads.pop("initial").isfinite().all()
        rate = (grads["decay"].double() * inputs[3].double()).sum(0)
        outputs_by_dtype.append({"out": outputs[0], "last": outputs[1], "rate": rate, **grads})
    for name, expected in outputs_by_dtype[1].items():
        assert relative_error(outputs_by_dtype[0][name], expected) <= 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [-torch.inf, -3e38])
def test_decay_of_minus_infinity_resets_the_state(decay, dtype):
    """Reset at sequence ends, chunk ends, in between and twice in a row, separately per head."""
    inputs = make(29, dtype=dtype)
    resets = torch.zeros(29, HEADS, dtype=torch.bool)
    for head, tokens in enumerate([(0,), (28,), (7, 8), (12, 13), (3, 24), ()]):
        resets[list(tokens), head] = True
    with torch.no_grad():
        inputs[3][resets] = decay
    check(inputs, (0, 29), dtype)
    recurrence_inputs = RecurrenceInputs(*inputs[:5])
    out, _ = recur(
        state_space_recurrence(CHUNK), recurrence_inputs, Sequences((0, 29)), initial=inputs[5]
    )
    (grad,) = torch.autograd.grad(out.sum(), inputs[3:4])
    assert not grad[resets].any()
    assert grad[~resets].all()


def test_decay_of_minus_infinity_in_a_step_resets_the_state():
    inputs = [x.detach() for x in make(1)]
    inputs[3][0, ::2] = -torch.inf
    expected, final = naive(*inputs, (0, 1))
    state = inputs[5].clone()
    out = state_space_step(*inputs[:5], state=state, slots=torch.tensor([0]))
    assert_close(out, expected, torch.float64, "out")
    assert_close(state, final, torch.float64, "state")


def test_zero_dt_matches_recurrence():
    inputs = make(20)
    with torch.no_grad():
        inputs[4][::3] = 0.0
    check(inputs, (0, 20))


def test_slices_of_a_projection_match_recurrence():
    """The layer passes slices of one projection."""
    generator = torch.Generator().manual_seed(2)
    projection = torch.randn(21, 50, generator=generator, dtype=torch.float64).requires_grad_()

    def split_projection():
        value, query, key, gates = projection.split([18, 10, 10, 12], 1)
        return (
            query.unflatten(1, (2, KEYS)),
            key.unflatten(1, (2, KEYS)),
            value.unflatten(1, (HEADS, VALUES)),
            -gates[:, :HEADS].exp(),
            gates[:, HEADS:],
        )

    initial = torch.zeros(1, HEADS, KEYS, VALUES, dtype=torch.float64)
    expected = naive(*split_projection(), initial, (0, 21))
    outputs = state_space_dual(*split_projection(), sequences=Sequences((0, 21)))
    for actual, expected_tensor in zip(
        (*outputs, *gradients(outputs, [projection])),
        (*expected, *gradients(expected, [projection])),
        strict=True,
    ):
        assert_close(actual, expected_tensor, torch.float64, "wide")


def test_bf16_outputs_are_rounded_fp32_outputs():
    tensors = [x.detach().bfloat16() for x in make(29)]
    tensors[3] = tensors[3].float()
    outputs_by_dtype = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [x.to(torch.promote_types(dtype, x.dtype)).requires_grad_() for x in tensors]
        out, final = state_space_dual(*inputs[:5], sequences=Sequences((0, 29)), initial=inputs[5])
        assert out.dtype == dtype
        assert final.dtype == torch.float32
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        grads = torch.autograd.grad(out, inputs, d_out.to(dtype))
        assert [x.dtype for x in grads] == [x.dtype for x in inputs]
        outputs_by_dtype.append((out, *grads))
    for bf16_tensor, fp32_tensor in zip(*outputs_by_dtype, strict=True):
        assert torch.equal(bf16_tensor, fp32_tensor.to(bf16_tensor.dtype))


def test_split_sequence_matches_whole_sequence():
    """Split at each offset below two chunks; the tail starts from the final states of the head."""
    inputs = [x.detach() for x in make(23)]
    recurrence = state_space_recurrence(CHUNK)
    expected = recur(
        recurrence, RecurrenceInputs(*inputs[:5]), Sequences((0, 23)), initial=inputs[5]
    )
    for offset in range(2 * CHUNK):
        state, outs = inputs[5], []
        for tokens in (slice(0, offset), slice(offset, 23)):
            recurrence_inputs = RecurrenceInputs(*(x[tokens] for x in inputs[:5]))
            sequences = Sequences((0, tokens.stop - tokens.start))
            out, state = recur(recurrence, recurrence_inputs, sequences, initial=state)
            outs.append(out)
        assert_close(torch.cat(outs), expected[0], torch.float64, f"out, cut at {offset}")
        assert_close(state, expected[1], torch.float64, f"last, cut at {offset}")


def test_recurrence_operations_are_consistent():
    """The final states are affine in the initial ones; gradients can be computed in two steps."""
    bounds = BOUNDS["pack"]
    inputs, sequences = make(42, sequences=6), Sequences(bounds)
    recurrence = state_space_recurrence(CHUNK)
    initial = inputs[5].detach()
    with torch.no_grad():
        prepared = recurrence.prepare(RecurrenceInputs(*inputs[:5]), sequences)
        added, transition = recurrence.summary(prepared)
        out, final = recurrence.sweep(prepared, initial)
        assert transition.shape == (6, HEADS, 1, 1)
        assert_close(apply_transition(transition, initial) + added, final, torch.float64, "affine")
        repeated = recurrence.summary(prepared)
        assert torch.equal(repeated[0], added)
        generator = torch.Generator().manual_seed(5)
        d_out, d_final = (
            torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, final)
        )
        state_gradient = recurrence.state_gradient(prepared, d_out)
        grads, d_initial = recurrence.backward(prepared, d_out, d_final)
    outputs = naive(*inputs, bounds)
    (expected,) = torch.autograd.grad(outputs[0], inputs[5:], d_out, retain_graph=True)
    assert_close(state_gradient, expected, torch.float64, "state_gradient")
    expected = torch.autograd.grad(outputs, inputs, (d_out, d_final))
    for name, actual, expected_grad in zip(NAMES, (*grads, d_initial), expected, strict=True):
        assert_close(actual, expected_grad, torch.float64, name)


def test_step_matches_one_token_and_keeps_other_slots():
    """Padding rows and unused slots hold NaN."""
    inputs = [x.detach() for x in make(7, sequences=1)]
    expected, final = naive(*inputs, (0, 7))
    state = torch.full((5, HEADS, KEYS, VALUES), torch.nan, dtype=torch.float64)
    state[3], state[0] = inputs[5][0], 2.0
    untouched, slots = state.nan_to_num(7.0), torch.tensor([-1, 3, -1])
    for t in range(7):
        rows = [torch.full((3, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in inputs[:5]]
        for row, x in zip(rows, inputs[:5], strict=True):
            row[1] = x[t]
        out = state_space_step(*rows, state=state, slots=slots)
        assert_close(out[1], expected[t], torch.float64, f"token {t}")
        assert torch.equal(out[[0, 2]], torch.zeros_like(out[:2]))
    assert_close(state[3], final[0], torch.float64, "state")
    other_slots = [0, 1, 2, 4]
    assert torch.equal(state[other_slots].nan_to_num(7.0), untouched[other_slots])
    state_before = state.nan_to_num(7.0)
    rows = [row[:2] for row in rows]
    assert not state_space_step(*rows, state=state, slots=torch.tensor([-1, -1])).any()
    assert torch.equal(state.nan_to_num(7.0), state_before)
    assert state_space_step(*(x[:0] for x in rows), state=state, slots=slots[:0]).shape[0] == 0


def test_bf16_step_keeps_fp32_states():
    inputs = [x.detach().bfloat16() for x in make(2, groups=1)]
    state = torch.zeros(2, HEADS, KEYS, VALUES)
    step_inputs = [
        x.float() if name == "decay" else x for name, x in zip(NAMES, inputs, strict=True)
    ]
    out = state_space_step(*step_inputs[:5], state=state, slots=torch.tensor([1, 0]))
    expected, _ = naive(*(x.double() for x in inputs[:5]), torch.zeros(2, 1, 1, 1), (0, 1, 2))
    assert out.dtype == torch.bfloat16
    assert_close(out, expected, torch.bfloat16, "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_skip_connection_matches_formula(dtype):
    draw = maker()
    tensors = (draw(5, HEADS, VALUES), draw(5, HEADS, VALUES), draw(HEADS))
    compare(add_skip, lambda out, x, d: out + d[:, None] * x, tensors, dtype)
    with pytest.raises(ValueError, match="a number for each head"):
        add_skip(*tensors[:2], tensors[2][:1])


WRONG = {
    "tokens": (lambda x: {**x, "key": x["key"][:3]}, "key .* has 3 tokens, the sequences 4"),
    "key": (lambda x: {**x, "key": x["key"][:, :1]}, "query .* and key .* must both be"),
    "heads": (lambda x: {**x, "value": x["value"][:, :5]}, "a multiple of 2 heads"),
    "dt": (lambda x: {**x, "dt": x["dt"][:, :1]}, r"dt \(4, 1\) must be \(4, 6\)"),
    "decay": (lambda x: {**x, "decay": x["decay"].float()}, "decay is torch.float32; make it"),
    "initial": (lambda x: {**x, "initial": x["initial"][..., :1]}, "initial .* must be"),
    "triton": (
        lambda x: {**x, "implementation": "triton"},
        "the Triton kernel has no float64; use",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_are_named(kind):
    change, message = WRONG[kind]
    arguments = change(dict(zip(NAMES, make(4), strict=True)))
    with pytest.raises(ValueError, match=message):
        state_space_dual(**arguments, sequences=Sequences((0, 4)))


def test_wrong_slots_and_chunks_are_named():
    inputs, state = make(2)[:5], torch.zeros(3, HEADS, KEYS, VALUES, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"slots .* must be int64, one for each of 2 rows"):
        state_space_step(*inputs, state=state, slots=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"state .* must be \(slots, 6, 5, 3\)"):
        state_space_step(*inputs, state=state[:, 1:], slots=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="chunk_size 0: use 1 or more"):
        state_space_recurrence(0)
