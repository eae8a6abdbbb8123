# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in chunks, and by one token, against the recurrence token after token."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops import gated_delta_rule as delta_rule_op
from megatron.core.ops.gated_delta_rule import (
    DeltaRuleChunks,
    delta_recurrence,
    gated_delta_rule,
    gated_delta_step,
)
from megatron.core.ops.recurrence import RecurrenceInputs, apply_transition, recur
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
    "pack": (0, 5, 5, 23, 24, 48, 57),  # an empty one, one token, whole chunks
    "empty ends": (0, 0, 9, 9),
    "nothing": (0, 0),
}


def naive(inputs, sequences, initial):
    """Return (out, last states), one token after the other."""
    query, key, value, decay, beta = inputs
    shared = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(shared, 1) for x in (query, key))
    out, last = [], []
    for number, (begin, end) in enumerate(pairwise(sequences.bounds)):
        state = initial[number]  # [H, K, V]
        for t in range(begin, end):
            state = state * decay[t].exp()[:, None, None]
            returned = torch.einsum("hkv,hk->hv", state, key[t])
            change = beta[t][:, None] * (value[t] - returned)
            state = state + torch.einsum("hk,hv->hkv", key[t], change)
            out.append(torch.einsum("hkv,hk->hv", state, query[t]) / math.sqrt(key.shape[-1]))
        last.append(state)
    return torch.stack(out) if out else value * 0, torch.stack(last)


def make_inputs(sequences, *, shared=2, dtype=torch.float64, decay=None, beta=None, seed=1):
    """Return the inputs and first states as leaves: 2 key heads, K = 5, V = 7."""
    source, t, groups = generator(seed), sequences.tokens, 2

    def leaf(*shape):
        return torch.randn(shape, generator=source, dtype=torch.float64)

    def gate(value, default):
        return default if value is None else torch.full_like(default, value)

    rates = gate(decay, -F.softplus(leaf(t, groups * shared)))
    strengths = gate(beta, leaf(t, groups * shared).sigmoid())
    inputs = RecurrenceInputs(
        query=leaf(t, groups, 5),
        key=F.normalize(leaf(t, groups, 5), dim=-1),
        value=leaf(t, groups * shared, 7),
        decay=rates,
        beta=strengths,
    )
    inputs = RecurrenceInputs(*(x.to(dtype).requires_grad_() for x in inputs))
    states = leaf(sequences.count, groups * shared, 5, 7).to(dtype).requires_grad_()
    return inputs, states


def results(function, inputs, initial):
    """Return outputs and all six gradients by name; both outputs are pulled at."""
    out, last = function(inputs, initial)
    pulls = [torch.randn(y.shape, generator=generator(3), dtype=torch.float64) for y in (out, last)]
    total = sum((y.double() * pull).sum() for y, pull in zip((out, last), pulls, strict=True))
    gradients = torch.autograd.grad(total, [*inputs, initial], materialize_grads=True)
    return {"out": out, "last": last, **dict(zip(NAMES, gradients, strict=True))}


def chunked(sequences, chunk=CHUNK):
    """Return the function that `results` takes."""
    return lambda inputs, initial: recur(
        delta_recurrence(chunk_size=chunk), inputs, sequences, initial=initial
    )


def assert_same(got, wanted, bound=1e-12, *, scale=1.0):
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert relative_error(got[name], tensor, scale=scale) <= bound, name


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let blocks begin and end within steps: a chunk and a half of values."""
    monkeypatch.setattr(delta_rule_op, "ELEMENTS_IN_CACHE", 3 * 4 * CHUNK * CHUNK)


@pytest.mark.parametrize("shared", [1, 2, 3])
@pytest.mark.parametrize("bounds", PACKS.values(), ids=PACKS)
def test_chunks_are_the_recurrence(bounds, shared):
    sequences = Sequences(bounds)
    inputs, initial = make_inputs(sequences, shared=shared)
    with nan_memory():
        got = results(chunked(sequences), inputs, initial)
    assert_same(got, results(lambda i, s: naive(i, sequences, s), inputs, initial))


@pytest.mark.parametrize("decay", [-50.0, -1e-3, 0.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_gates_at_their_ends(decay, beta):
    sequences = Sequences((0, 5, 24))
    inputs, initial = make_inputs(sequences, decay=decay, beta=beta)
    got = results(chunked(sequences), inputs, initial)
    wanted = results(lambda i, s: naive(i, sequences, s), inputs, initial)
    # A decay of -50 has a gradient of 1e-22, a difference of terms of size 1.
    assert (got["decay"] - wanted.pop("decay")).abs().max() <= 1e-12
    assert_same(got, wanted, scale=0.0)  # products of decays: tiny, not noise


@pytest.mark.parametrize("decay", [-1e4, -300.0])
def test_a_state_that_fades_at_once_is_finite(decay):
    sequences = Sequences((0, 150))
    inputs, initial = make_inputs(sequences, dtype=torch.float32)
    rates = torch.zeros_like(inputs.decay)
    rates[3::7] = decay  # some tokens forget everything, those between nothing
    inputs = inputs._replace(decay=rates.requires_grad_())
    got = results(chunked(sequences, 64), inputs, initial)
    wide = RecurrenceInputs(*(x.detach().double().requires_grad_() for x in inputs))
    states = initial.detach().double().requires_grad_()
    wanted = results(lambda i, s: naive(i, sequences, s), wide, states)
    for name, tensor in wanted.items():
        assert got[name].isfinite().all(), name
        assert relative_error(got[name], tensor) <= 1e-5, name


def test_strong_decays_keep_their_gradients_in_fp32():
    # As differences of sums they are wrong in the fourth digit, and so is that of a rate.
    sequences = Sequences((0, 256))
    inputs, initial = make_inputs(sequences)
    rates = inputs.decay.detach() * torch.tensor([1.0, 4.0, 9.0, 16.0])
    wide = inputs._replace(decay=rates.float().double().requires_grad_())
    narrow = RecurrenceInputs(*(x.detach().float().requires_grad_() for x in wide))
    got = results(chunked(sequences, 64), narrow, initial.detach().float().requires_grad_())
    wanted = results(chunked(sequences, 64), wide, initial)
    assert relative_error(got["decay"], wanted["decay"]) <= 3e-6
    rate = [(found["decay"].double() * wide.decay).sum(0) for found in (got, wanted)]
    assert relative_error(*rate) <= 3e-6


TERMS = (
    *("decay_mask", "decay_from_start", "decay_to_end", "decayed_inverse"),
    *("transition", "q_state", "addend"),
)


def test_nothing_is_denormal_however_strong_decays_are():
    sequences = Sequences((0, 64))
    inputs, _ = make_inputs(sequences, dtype=torch.float32)
    for rate in (-1.0, -3.0, -30.0):
        grids = RecurrenceInputs(*(x.detach()[None] for x in inputs))
        grids = grids._replace(decay=torch.full_like(grids.decay, rate))
        found = DeltaRuleChunks(grids, scale=1.0, dtype=torch.float32)
        for name in TERMS:
            sizes = getattr(found, name).abs()
            subnormal = ((sizes > 0) & (sizes < torch.finfo(torch.float32).tiny)).any()
            assert not subnormal, (rate, name)


def test_the_same_key_again_and_again_is_stable():
    # Powers of A grow like binomials here; its inverse does not.
    sequences = Sequences((0, 128))
    inputs, initial = make_inputs(sequences, dtype=torch.float32, decay=0.0, beta=1.0)
    key = inputs.key.detach()[:1].expand_as(inputs.key).clone().requires_grad_()
    inputs = inputs._replace(key=key)
    got = results(chunked(sequences, 64), inputs, initial)
    wide = RecurrenceInputs(*(x.detach().double().requires_grad_() for x in inputs))
    states = initial.detach().double().requires_grad_()
    wanted = results(lambda i, s: naive(i, sequences, s), wide, states)
    for name, tensor in wanted.items():
        assert relative_error(got[name], tensor) <= 1e-5, name


def test_what_is_not_a_number_stays_in_its_sequence():
    sequences = Sequences((0, 11, 30, 35))
    inputs, _ = make_inputs(sequences)
    clean, _ = chunked(sequences)(inputs, None)
    broken = RecurrenceInputs(*(x.detach().clone() for x in inputs))
    for tensor in broken:
        tensor[11:30] = math.nan
    out, last = chunked(sequences)(broken, None)
    assert torch.equal(out[:11], clean[:11])
    assert torch.equal(out[30:], clean[30:])
    assert out[11:30].isnan().all()
    assert last.isnan().flatten(1).all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("bounds", [(0, 21), (0, 5, 5, 23)], ids=["one", "pack"])
def test_a_last_state_is_affine_in_the_first(bounds):
    sequences = Sequences(bounds)
    recurrence = delta_recurrence(chunk_size=CHUNK)
    inputs, initial = make_inputs(sequences)
    inputs, initial = RecurrenceInputs(*(x.detach() for x in inputs)), initial.detach()
    prepared = recurrence.prepare(inputs, sequences)
    added, transition = recurrence.summary(prepared)
    out, last = recurrence.sweep(prepared, initial)
    assert transition.shape == (*initial.shape[:3], 5)
    assert relative_error(apply_transition(transition, initial) + added, last) <= 1e-12
    pull = torch.randn(out.shape, generator=generator(4), dtype=out.dtype)
    alone = recurrence.state_gradient(recurrence.prepare(inputs, sequences), pull)
    _, first = recurrence.backward(prepared, pull, None)
    assert relative_error(alone, first) <= 1e-12
    grad_last = torch.randn(last.shape, generator=generator(5), dtype=last.dtype)
    _, both = recurrence.backward(prepared, pull, grad_last)
    wanted = first + apply_transition(transition, grad_last, transposed=True)
    assert relative_error(both, wanted) <= 1e-12
    assert relative_error(first, wanted) > 1e-9  # M is seen


def test_a_sequence_may_be_cut_anywhere():
    whole = Sequences((0, 27))
    inputs, initial = make_inputs(whole)
    wanted = chunked(whole)(inputs, initial)
    for cut in range(2 * CHUNK + 1):
        first, rest = (RecurrenceInputs(*(x[part] for x in inputs)) for part in _halves(cut))
        out, state = chunked(Sequences((0, cut)))(first, initial)
        others, last = chunked(Sequences((0, 27 - cut)))(rest, state)
        assert relative_error(torch.cat([out, others]), wanted[0]) <= 1e-12, cut
        assert relative_error(last, wanted[1]) <= 1e-12, cut


def _halves(cut):
    return slice(None, cut), slice(cut, None)


@pytest.mark.parametrize("shared", [1, 2])
def test_transformers_computes_the_same(shared):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    sequences = Sequences((0, 70, 83, 211))
    inputs, initial = make_inputs(sequences, shared=shared, dtype=torch.float32)

    def transformers_delta_rule(inputs, initial):
        # It has neither packs nor shared heads.
        query, key = (x.repeat_interleave(shared, 1) for x in inputs[:2])
        found = [
            torch_chunk_gated_delta_rule(
                *(x[None, begin:end] for x in (query, key, inputs.value)),
                g=inputs.decay[None, begin:end],
                beta=inputs.beta[None, begin:end],
                initial_state=initial[number : number + 1],
                output_final_state=True,
            )
            for number, (begin, end) in enumerate([(0, 70), (70, 83), (83, 211)])
        ]
        return torch.cat([out[0] for out, _ in found]), torch.cat([last for _, last in found])

    def mcore_delta_rule(inputs, initial):
        query, key, value, decay, beta = inputs
        return gated_delta_rule(
            query, key, value, decay, beta, sequences=sequences, initial=initial
        )

    assert_same(
        results(mcore_delta_rule, inputs, initial),
        results(transformers_delta_rule, inputs, initial),
        1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    sequences = Sequences((0, 5, 21))
    narrow = [x.detach().to(dtype) for x in make_inputs(sequences)[0]]
    narrow[3] = make_inputs(sequences, dtype=torch.float32)[0].decay.detach()
    initial = make_inputs(sequences, dtype=torch.float32)[1]
    low = RecurrenceInputs(*(x.requires_grad_() for x in narrow))
    high = RecurrenceInputs(*(x.detach().float().requires_grad_() for x in narrow))
    pull = torch.randn(low.value.shape, generator=generator(4)).to(dtype)

    def run(inputs):
        out, last = chunked(sequences)(inputs, initial)
        return out, last, *torch.autograd.grad(out, [*inputs, initial], pull.to(out.dtype))

    for name, got, wanted in zip(("out", "last", *NAMES), run(low), run(high), strict=True):
        assert got.dtype == (torch.float32 if name in ("last", "decay", "initial") else dtype)
        assert torch.equal(got, wanted.to(got.dtype)), name


def test_all_saved_tensors_are_held_by_autograd():
    sequences = Sequences((0, 40))
    inputs, initial = make_inputs(sequences)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: kept[number].clone()):
        out, last = chunked(sequences)(inputs, initial)
    shapes = sorted(tuple(x.shape) for x in kept)
    assert shapes == sorted([*(tuple(x.shape) for x in inputs), (5, 4, 8, 8), (5, 4, 5, 7)])
    # Whatever is not among them was not needed: these copies alone give the gradients, twice.
    twice = [
        torch.autograd.grad(out.sum() + last.sum(), [*inputs, initial], retain_graph=True)
        for _ in range(2)
    ]
    again, last = naive(inputs, sequences, initial)
    wanted = torch.autograd.grad(again.sum() + last.sum(), [*inputs, initial])
    for gradients in twice:
        for name, got, true in zip(NAMES, gradients, wanted, strict=True):
            assert relative_error(got, true) <= 1e-12, name


def test_a_last_state_alone_may_be_pulled_at():
    sequences = Sequences((0, 9, 20))
    inputs, initial = make_inputs(sequences)
    needed = [*inputs[1:], initial]  # nothing reads a query
    got = torch.autograd.grad(chunked(sequences)(inputs, initial)[1].sum(), needed)
    wanted = torch.autograd.grad(naive(inputs, sequences, initial)[1].sum(), needed)
    for name, a, b in zip(NAMES[1:], got, wanted, strict=True):
        assert relative_error(a, b) <= 1e-12, name


@pytest.mark.parametrize("shared", [1, 3])
def test_a_step_is_one_token_of_the_recurrence(shared):
    rows = Sequences((0, 1, 2, 3, 4, 5))
    inputs, initial = make_inputs(rows, shared=shared)
    wanted, last = naive(inputs, rows, initial)
    slots = torch.tensor([3, -1, 0, 5, -1])
    state = torch.full((7, *initial.shape[1:]), math.nan, dtype=torch.float64)
    alive = slots >= 0
    state[slots[alive]] = initial[alive].detach()
    padded = RecurrenceInputs(*(x.detach().clone() for x in inputs))
    for tensor in padded:
        tensor[~alive] = math.nan
    before = state.clone()
    with nan_memory():
        out = gated_delta_step(*padded, state=state, slots=slots)
    assert relative_error(out[alive], wanted[alive]) <= 1e-12
    assert torch.equal(out[~alive], torch.zeros_like(out[~alive]))
    assert relative_error(state[slots[alive]], last[alive]) <= 1e-12
    others = [1, 2, 4, 6]
    assert torch.equal(state[others].isnan(), before[others].isnan())
    state = before.clone()
    out = gated_delta_step(*padded, state=state, slots=torch.full_like(slots, -1))
    assert not out.any()
    assert torch.equal(state.nan_to_num(7.0), before.nan_to_num(7.0))


def test_steps_follow_a_prefill():
    whole = Sequences((0, 13))
    inputs, _ = make_inputs(whole, dtype=torch.float32)
    inputs = RecurrenceInputs(*(x.detach() for x in inputs))
    wanted, last = chunked(whole)(inputs, None)
    state = chunked(Sequences((0, 9)))(RecurrenceInputs(*(x[:9] for x in inputs)), None)[1]
    for t in range(9, 13):
        token = RecurrenceInputs(*(x[t : t + 1] for x in inputs))
        out = gated_delta_step(*token, state=state, slots=torch.tensor([0]))
        assert relative_error(out, wanted[t : t + 1]) <= 1e-5
    assert relative_error(state, last) <= 1e-5


def _call(**changes):
    sequences = changes.pop("sequences", Sequences((0, 4)))
    inputs, _ = make_inputs(Sequences((0, 4)))
    given = {**inputs._asdict(), **changes}
    return gated_delta_rule(**given, sequences=sequences)


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
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_a_step_refuses_what_does_not_fit():
    inputs, initial = make_inputs(Sequences((0, 2)))
    with pytest.raises(ValueError, match=r"slots .* must be int64, one for each of 2 rows"):
        gated_delta_step(*inputs, state=initial.detach(), slots=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"state .* must be \(slots, 4, 5, 7\)"):
        gated_delta_step(
            *inputs, state=torch.zeros(3, 4, 7, 5), slots=torch.zeros(2, dtype=torch.int64)
        )
