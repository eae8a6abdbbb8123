# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in chunks and in steps against the token-by-token recurrence."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.recurrence import (
    RecurrenceInputs,
    apply_transition,
    delta_recurrence,
    gated_delta_rule,
    gated_delta_step,
    recur,
)
from megatron.core.ops.recurrence.delta_rule import cpu as delta_rule_op
from megatron.core.ops.recurrence.delta_rule.cpu import DeltaRuleChunks
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import relative_error
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

CHUNK = 8
NAMES = (*RecurrenceInputs._fields, "initial")
PACKS = {
    "whole chunks": (0, 16),
    "tail": (0, 19),
    "shorter than a chunk": (0, 3),
    "pack": (0, 5, 5, 23, 24, 48, 57),  # an empty sequence, one token, whole chunks
    "empty ends": (0, 0, 9, 9),
    "nothing": (0, 0),
}


def naive(inputs, sequences, initial):
    """Return (out, final states), computed token by token."""
    query, key, value, decay, beta = inputs
    heads_per_group = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(heads_per_group, 1) for x in (query, key))
    out, final_states = [], []
    for number, (begin, end) in enumerate(pairwise(sequences.bounds)):
        state = initial[number]  # [H, K, V]
        for t in range(begin, end):
            state = state * decay[t].exp()[:, None, None]
            prediction = torch.einsum("hkv,hk->hv", state, key[t])
            u = beta[t][:, None] * (value[t] - prediction)
            state = state + torch.einsum("hk,hv->hkv", key[t], u)
            out.append(torch.einsum("hkv,hk->hv", state, query[t]) / math.sqrt(key.shape[-1]))
        final_states.append(state)
    return torch.stack(out) if out else value * 0, torch.stack(final_states)


def make_inputs(sequences, *, shared=2, dtype=torch.float64, decay=None, beta=None, seed=1):
    """Return inputs and initial states as leaves, with 2 key heads, K = 5 and V = 7."""
    source, t, groups = generator(seed), sequences.tokens, 2

    def leaf(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    def gate(value, default):
        return default if value is None else torch.full_like(default, value)

    decay_values = gate(decay, -F.softplus(leaf(t, groups * shared)))
    beta_values = gate(beta, leaf(t, groups * shared).sigmoid())
    inputs = RecurrenceInputs(
        query=leaf(t, groups, 5),
        key=F.normalize(leaf(t, groups, 5), dim=-1),
        value=leaf(t, groups * shared, 7),
        decay=decay_values,
        beta=beta_values,
    )
    inputs = RecurrenceInputs(*(x.to(dtype).requires_grad_() for x in inputs))
    states = leaf(sequences.count, groups * shared, 5, 7).to(dtype).requires_grad_()
    return inputs, states


def outputs_and_gradients(function, inputs, initial):
    """Return outputs and all six gradients by name; both outputs have a gradient."""
    out, final = function(inputs, initial)
    grad_outputs = [
        torch.randn(y.shape, generator=generator(3), dtype=torch.float64) for y in (out, final)
    ]
    total = sum(
        (y.double() * grad_output).sum()
        for y, grad_output in zip((out, final), grad_outputs, strict=True)
    )
    gradients = torch.autograd.grad(total, [*inputs, initial], materialize_grads=True)
    return {"out": out, "last": final, **dict(zip(NAMES, gradients, strict=True))}


def chunked(sequences, chunk=CHUNK):
    """Return the chunked recurrence as a function for `outputs_and_gradients`."""
    return lambda inputs, initial: recur(
        delta_recurrence(chunk_size=chunk), inputs, sequences, initial=initial
    )


def assert_same(actual, expected, bound=1e-12, *, scale=1.0):
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert relative_error(actual[name], tensor, scale=scale) <= bound, name


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Set the block size to a chunk and a half of values, so that blocks split steps."""
    monkeypatch.setattr(delta_rule_op, "ELEMENTS_IN_CACHE", 3 * 4 * CHUNK * CHUNK)


@pytest.mark.parametrize("shared", [1, 2, 3])
@pytest.mark.parametrize("bounds", PACKS.values(), ids=PACKS)
def test_chunked_delta_rule_matches_recurrence(bounds, shared):
    sequences = Sequences(bounds)
    inputs, initial = make_inputs(sequences, shared=shared)
    with nan_memory():
        actual = outputs_and_gradients(chunked(sequences), inputs, initial)
    assert_same(actual, outputs_and_gradients(lambda i, s: naive(i, sequences, s), inputs, initial))


@pytest.mark.parametrize("decay", [-50.0, -1e-3, 0.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_extreme_gates_match_recurrence(decay, beta):
    sequences = Sequences((0, 5, 24))
    inputs, initial = make_inputs(sequences, decay=decay, beta=beta)
    actual = outputs_and_gradients(chunked(sequences), inputs, initial)
    expected = outputs_and_gradients(lambda i, s: naive(i, sequences, s), inputs, initial)
    # A decay of -50 has a gradient of 1e-22, a difference of terms of size 1.
    assert (actual["decay"] - expected.pop("decay")).abs().max() <= 1e-12
    assert_same(actual, expected, scale=0.0)  # products of decays: tiny, but significant


@pytest.mark.parametrize("decay", [-1e4, -300.0])
def test_state_reset_by_strong_decay_stays_finite(decay):
    sequences = Sequences((0, 150))
    inputs, initial = make_inputs(sequences, dtype=torch.float32)
    rates = torch.zeros_like(inputs.decay)
    rates[3::7] = decay  # these tokens reset the state, the others do not decay it
    inputs = inputs._replace(decay=rates.requires_grad_())
    actual = outputs_and_gradients(chunked(sequences, 64), inputs, initial)
    fp64_inputs = RecurrenceInputs(*(x.detach().double().requires_grad_() for x in inputs))
    fp64_initial = initial.detach().double().requires_grad_()
    expected = outputs_and_gradients(lambda i, s: naive(i, sequences, s), fp64_inputs, fp64_initial)
    for name, tensor in expected.items():
        assert actual[name].isfinite().all(), name
        assert relative_error(actual[name], tensor) <= 1e-5, name


def test_strong_decays_have_accurate_fp32_gradients():
    # Computed as differences of sums, they would be wrong in the fourth digit.
    sequences = Sequences((0, 256))
    inputs, initial = make_inputs(sequences)
    rates = inputs.decay.detach() * torch.tensor([1.0, 4.0, 9.0, 16.0])
    fp64_inputs = inputs._replace(decay=rates.float().double().requires_grad_())
    fp32_inputs = RecurrenceInputs(*(x.detach().float().requires_grad_() for x in fp64_inputs))
    actual = outputs_and_gradients(
        chunked(sequences, 64), fp32_inputs, initial.detach().float().requires_grad_()
    )
    expected = outputs_and_gradients(chunked(sequences, 64), fp64_inputs, initial)
    assert relative_error(actual["decay"], expected["decay"]) <= 3e-6
    rate_gradients = [
        (outputs["decay"].double() * fp64_inputs.decay).sum(0) for outputs in (actual, expected)
    ]
    assert relative_error(*rate_gradients) <= 3e-6


TERMS = (
    *("decay_mask", "decay_from_start", "decay_to_end", "decayed_inverse"),
    *("transition", "q_state", "addend"),
)


def test_strong_decays_give_no_denormals():
    sequences = Sequences((0, 64))
    inputs, _ = make_inputs(sequences, dtype=torch.float32)
    for rate in (-1.0, -3.0, -30.0):
        grids = RecurrenceInputs(*(x.detach()[None] for x in inputs))
        grids = grids._replace(decay=torch.full_like(grids.decay, rate))
        chunks = DeltaRuleChunks(grids, scale=1.0, dtype=torch.float32)
        for name in TERMS:
            sizes = getattr(chunks, name).abs()
            subnormal = ((sizes > 0) & (sizes < torch.finfo(torch.float32).tiny)).any()
            assert not subnormal, (rate, name)


def test_repeated_key_is_numerically_stable():
    # Powers of A grow like binomial coefficients here; the inverse does not.
    sequences = Sequences((0, 128))
    inputs, initial = make_inputs(sequences, dtype=torch.float32, decay=0.0, beta=1.0)
    key = inputs.key.detach()[:1].expand_as(inputs.key).clone().requires_grad_()
    inputs = inputs._replace(key=key)
    actual = outputs_and_gradients(chunked(sequences, 64), inputs, initial)
    fp64_inputs = RecurrenceInputs(*(x.detach().double().requires_grad_() for x in inputs))
    fp64_initial = initial.detach().double().requires_grad_()
    expected = outputs_and_gradients(lambda i, s: naive(i, sequences, s), fp64_inputs, fp64_initial)
    for name, tensor in expected.items():
        assert relative_error(actual[name], tensor) <= 1e-5, name


def test_nan_stays_in_its_sequence():
    sequences = Sequences((0, 11, 30, 35))
    inputs, _ = make_inputs(sequences)
    clean, _ = chunked(sequences)(inputs, None)
    nan_inputs = RecurrenceInputs(*(x.detach().clone() for x in inputs))
    for tensor in nan_inputs:
        tensor[11:30] = math.nan
    out, final = chunked(sequences)(nan_inputs, None)
    assert torch.equal(out[:11], clean[:11])
    assert torch.equal(out[30:], clean[30:])
    assert out[11:30].isnan().all()
    assert final.isnan().flatten(1).all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("bounds", [(0, 21), (0, 5, 5, 23)], ids=["one", "pack"])
def test_final_state_is_affine_in_initial_state(bounds):
    sequences = Sequences(bounds)
    recurrence = delta_recurrence(chunk_size=CHUNK)
    inputs, initial = make_inputs(sequences)
    inputs, initial = RecurrenceInputs(*(x.detach() for x in inputs)), initial.detach()
    prepared = recurrence.prepare(inputs, sequences)
    added, transition = recurrence.summary(prepared)
    out, final = recurrence.sweep(prepared, initial)
    assert transition.shape == (*initial.shape[:3], 5)
    assert relative_error(apply_transition(transition, initial) + added, final) <= 1e-12
    d_out = torch.randn(out.shape, generator=generator(4), dtype=out.dtype)
    state_gradient = recurrence.state_gradient(recurrence.prepare(inputs, sequences), d_out)
    _, d_initial = recurrence.backward(prepared, d_out, None)
    assert relative_error(state_gradient, d_initial) <= 1e-12
    d_final = torch.randn(final.shape, generator=generator(5), dtype=final.dtype)
    _, d_initial_both = recurrence.backward(prepared, d_out, d_final)
    expected = d_initial + apply_transition(transition, d_final, transposed=True)
    assert relative_error(d_initial_both, expected) <= 1e-12
    assert relative_error(d_initial, expected) > 1e-9  # the test depends on M


def test_split_sequence_matches_whole_sequence():
    whole = Sequences((0, 27))
    inputs, initial = make_inputs(whole)
    expected = chunked(whole)(inputs, initial)
    for cut in range(2 * CHUNK + 1):
        head, tail = (RecurrenceInputs(*(x[tokens] for x in inputs)) for tokens in _split_at(cut))
        out, state = chunked(Sequences((0, cut)))(head, initial)
        tail_out, final = chunked(Sequences((0, 27 - cut)))(tail, state)
        assert relative_error(torch.cat([out, tail_out]), expected[0]) <= 1e-12, cut
        assert relative_error(final, expected[1]) <= 1e-12, cut


def _split_at(cut):
    return slice(None, cut), slice(cut, None)


@pytest.mark.parametrize("shared", [1, 2])
def test_delta_rule_matches_transformers(shared):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    sequences = Sequences((0, 70, 83, 211))
    inputs, initial = make_inputs(sequences, shared=shared, dtype=torch.float32)

    def transformers_delta_rule(inputs, initial):
        # transformers supports neither packed sequences nor shared key heads.
        query, key = (x.repeat_interleave(shared, 1) for x in inputs[:2])
        outputs = [
            torch_chunk_gated_delta_rule(
                *(x[None, begin:end] for x in (query, key, inputs.value)),
                g=inputs.decay[None, begin:end],
                beta=inputs.beta[None, begin:end],
                initial_state=initial[number : number + 1],
                output_final_state=True,
            )
            for number, (begin, end) in enumerate([(0, 70), (70, 83), (83, 211)])
        ]
        return torch.cat([out[0] for out, _ in outputs]), torch.cat([final for _, final in outputs])

    def mcore_delta_rule(inputs, initial):
        query, key, value, decay, beta = inputs
        return gated_delta_rule(
            query, key, value, decay, beta, sequences=sequences, initial=initial
        )

    assert_same(
        outputs_and_gradients(mcore_delta_rule, inputs, initial),
        outputs_and_gradients(transformers_delta_rule, inputs, initial),
        1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_outputs_are_rounded_once(dtype):
    sequences = Sequences((0, 5, 21))
    rounded = [x.detach().to(dtype) for x in make_inputs(sequences)[0]]
    rounded[3] = make_inputs(sequences, dtype=torch.float32)[0].decay.detach()
    initial = make_inputs(sequences, dtype=torch.float32)[1]
    low_inputs = RecurrenceInputs(*(x.requires_grad_() for x in rounded))
    fp32_inputs = RecurrenceInputs(*(x.detach().float().requires_grad_() for x in rounded))
    d_out = torch.randn(low_inputs.value.shape, generator=generator(4)).to(dtype)

    def run(inputs):
        out, final = chunked(sequences)(inputs, initial)
        return out, final, *torch.autograd.grad(out, [*inputs, initial], d_out.to(out.dtype))

    for name, actual, expected in zip(
        ("out", "last", *NAMES), run(low_inputs), run(fp32_inputs), strict=True
    ):
        assert actual.dtype == (torch.float32 if name in ("last", "decay", "initial") else dtype)
        assert torch.equal(actual, expected.to(actual.dtype)), name


def test_saved_tensors_suffice_for_backward():
    sequences = Sequences((0, 40))
    inputs, initial = make_inputs(sequences)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: saved[index].clone()):
        out, final = chunked(sequences)(inputs, initial)
    shapes = sorted(tuple(x.shape) for x in saved)
    assert shapes == sorted([*(tuple(x.shape) for x in inputs), (5, 4, 8, 8), (5, 4, 5, 7)])
    # Copies of these tensors alone give the gradients, and give them twice.
    repeated_gradients = [
        torch.autograd.grad(out.sum() + final.sum(), [*inputs, initial], retain_graph=True)
        for _ in range(2)
    ]
    expected_out, final = naive(inputs, sequences, initial)
    expected = torch.autograd.grad(expected_out.sum() + final.sum(), [*inputs, initial])
    for gradients in repeated_gradients:
        for name, actual, expected_grad in zip(NAMES, gradients, expected, strict=True):
            assert relative_error(actual, expected_grad) <= 1e-12, name


def test_gradient_of_final_state_alone_matches_recurrence():
    sequences = Sequences((0, 9, 20))
    inputs, initial = make_inputs(sequences)
    needed = [*inputs[1:], initial]  # the final state does not depend on the query
    actual = torch.autograd.grad(chunked(sequences)(inputs, initial)[1].sum(), needed)
    expected = torch.autograd.grad(naive(inputs, sequences, initial)[1].sum(), needed)
    for name, actual_grad, expected_grad in zip(NAMES[1:], actual, expected, strict=True):
        assert relative_error(actual_grad, expected_grad) <= 1e-12, name


@pytest.mark.parametrize("shared", [1, 3])
def test_step_matches_one_token_of_the_recurrence(shared):
    rows = Sequences((0, 1, 2, 3, 4, 5))
    inputs, initial = make_inputs(rows, shared=shared)
    expected, final = naive(inputs, rows, initial)
    slots = torch.tensor([3, -1, 0, 5, -1])
    state = torch.full((7, *initial.shape[1:]), math.nan, dtype=torch.float64)
    active = slots >= 0
    state[slots[active]] = initial[active].detach()
    padded = RecurrenceInputs(*(x.detach().clone() for x in inputs))
    for tensor in padded:
        tensor[~active] = math.nan
    state_before = state.clone()
    with nan_memory():
        out = gated_delta_step(*padded, state=state, slots=slots)
    assert relative_error(out[active], expected[active]) <= 1e-12
    assert torch.equal(out[~active], torch.zeros_like(out[~active]))
    assert relative_error(state[slots[active]], final[active]) <= 1e-12
    other_slots = [1, 2, 4, 6]
    assert torch.equal(state[other_slots].isnan(), state_before[other_slots].isnan())
    state = state_before.clone()
    out = gated_delta_step(*padded, state=state, slots=torch.full_like(slots, -1))
    assert not out.any()
    assert torch.equal(state.nan_to_num(7.0), state_before.nan_to_num(7.0))


def test_steps_continue_a_prefill():
    whole = Sequences((0, 13))
    inputs, _ = make_inputs(whole, dtype=torch.float32)
    inputs = RecurrenceInputs(*(x.detach() for x in inputs))
    expected, final = chunked(whole)(inputs, None)
    state = chunked(Sequences((0, 9)))(RecurrenceInputs(*(x[:9] for x in inputs)), None)[1]
    for t in range(9, 13):
        token = RecurrenceInputs(*(x[t : t + 1] for x in inputs))
        out = gated_delta_step(*token, state=state, slots=torch.tensor([0]))
        assert relative_error(out, expected[t : t + 1]) <= 1e-5
    assert relative_error(state, final) <= 1e-5


def _call(**changes):
    sequences = changes.pop("sequences", Sequences((0, 4)))
    inputs, _ = make_inputs(Sequences((0, 4)))
    arguments = {**inputs._asdict(), **changes}
    return gated_delta_rule(**arguments, sequences=sequences)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequences": Sequences((0, 5))}, "query .* has 4 tokens, the sequences 5"),
        ({"query": torch.zeros(4, 2, 6)}, "query .* and key .* must both be"),
        ({"value": torch.zeros(4, 3, 7)}, "a multiple of 2 heads"),
        ({"decay": torch.zeros(4, 2)}, r"decay \(4, 2\) must be \(4, 4\)"),
        ({"decay": torch.zeros(4, 4).bfloat16()}, "decay is torch.bfloat16; make it torch.float64"),
        ({"initial": torch.zeros(2, 4, 5, 7)}, r"initial .* must be \(1, 4, 5, 7\)"),
        ({"implementation": "triton"}, "the Triton kernel has no float64; use"),
    ],
)
def test_inconsistent_delta_rule_inputs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_step_refuses_inconsistent_slots_and_states():
    inputs, initial = make_inputs(Sequences((0, 2)))
    with pytest.raises(ValueError, match=r"slots .* must be int64, one for each of 2 rows"):
        gated_delta_step(*inputs, state=initial.detach(), slots=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"state .* must be \(slots, 4, 5, 7\)"):
        gated_delta_step(
            *inputs, state=torch.zeros(3, 4, 7, 5), slots=torch.zeros(2, dtype=torch.int64)
        )
