# SPDX-License-Identifier: Apache-2.0
"""State-space duality in chunks against its recurrence, token by token and in fp64."""

import pytest
import torch

from megatron.core.ops import state_space_dual as state_space_op
from megatron.core.ops.recurrence import RecurrenceInputs, apply_transition, recur
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.state_space_dual import (
    add_skip,
    state_space_dual,
    state_space_recurrence,
    state_space_step,
)
from tests.support.closeness import relative_error
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.formulas import assert_close, compare, maker

HEADS, KEYS, VALUES, CHUNK = 6, 5, 3, 8
NAMES = ("query", "key", "value", "decay", "dt", "initial")

# One sequence: whole chunks, a rest, less than a chunk, nothing. Packs: of whole chunks, of any
# lengths with empty sequences, the longest not first.
BOUNDS = {
    "whole": (0, 24),
    "rest": (0, 29),
    "short": (0, 5),
    "nothing": (0, 0),
    "whole pack": (0, 8, 24, 32),
    "pack": (0, 3, 3, 22, 41, 42, 42),
}


def make(tokens, *, groups=2, sequences=1, dtype=torch.float64, seed=3):
    """Make the inputs and first states, leaves that take gradients."""
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
    """Run the recurrence from its definition; return (out, last states)."""
    shared = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(shared, 1) for x in (query, key))
    out, last = [value[:0]], []
    for first, end, state in zip(bounds, bounds[1:], initial, strict=False):
        for t in range(first, end):
            written = torch.einsum("hk,hv->hkv", key[t], value[t] * dt[t][:, None])
            state = decay[t].exp()[:, None, None] * state + written
            out.append(torch.einsum("hk,hkv->hv", query[t], state)[None])
        last.append(state)
    return torch.cat(out), torch.stack(last)


def gradients(outputs, inputs):
    """Pull random gradients of the outputs back, the same for the same shapes."""
    generator = torch.Generator().manual_seed(11)
    pulls = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in outputs]
    pulls = [pull.to(y.dtype) for pull, y in zip(pulls, outputs, strict=True)]
    return torch.autograd.grad(outputs, inputs, pulls, allow_unused=True, materialize_grads=True)


def check(inputs, bounds, dtype=torch.float64, *, scale=1.0):
    """Compare out, last states and all gradients with those of the recurrence in fp64."""
    true = [x.detach().double().requires_grad_() for x in inputs]
    expected = naive(*true, bounds)
    with nan_memory():
        found = recur(
            state_space_recurrence(CHUNK),
            RecurrenceInputs(*inputs[:5]),
            Sequences(bounds),
            initial=inputs[5],
        )
        grads = gradients(found, inputs)
    names = ("out", "last", *NAMES)
    for name, mine, its in zip(
        names, (*found, *grads), (*expected, *gradients(expected, true)), strict=True
    ):
        assert mine.shape == its.shape, name
        if its.numel():
            assert_close(mine, its, dtype, name, scale=scale)


@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("kind", BOUNDS)
def test_chunks_are_the_recurrence(kind, groups):
    bounds = BOUNDS[kind]
    check(make(bounds[-1], groups=groups, sequences=len(bounds) - 1), bounds)


@pytest.mark.parametrize("elements", [1, 2 * CHUNK * CHUNK * HEADS])
def test_blocks_of_chunks_join(elements, monkeypatch):
    """One chunk at a time, and two, with one left over at the end."""
    monkeypatch.setattr(state_space_op, "ELEMENTS_IN_CACHE", elements)
    check(make(39), (0, 39))


@pytest.mark.parametrize("decays", [(0.0,), (-50.0,), (-20.0,), (0.0, -1e30), (-1e-9, -300.0)])
def test_no_decay_and_strong_decay(decays):
    """In fp32, each gradient by its own size: after strong decay what is left is tiny, not noise.

    -1e30 would be infinite the other way round: what is above the diagonal never counts.
    """
    inputs = make(29, dtype=torch.float32)
    with torch.no_grad():
        for number, decay in enumerate(decays):
            inputs[3][number :: len(decays)] = decay
    check(inputs, (0, 29), torch.float32, scale=0.0)


@pytest.mark.parametrize("most", [16.0, 100.0, 1000.0])
def test_strong_decays_keep_all_digits_of_fp32(most):
    """Rounded sums were wrong in the fifth digit, and from them the gradient of a rate."""
    narrow, tokens, results = make(120, dtype=torch.float32), 120, []
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        narrow[3].uniform_(-most, 0.0, generator=generator)
    wide = [x.detach().double().requires_grad_() for x in narrow]
    given, recurrence = RecurrenceInputs(*narrow[:5]), state_space_recurrence(64)
    found = recur(recurrence, given, Sequences((0, tokens)), initial=narrow[5])
    for outputs, inputs in ((found, narrow), (naive(*wide, (0, tokens)), wide)):
        grads = dict(zip(NAMES, gradients(outputs, inputs), strict=True))
        assert grads.pop("initial").isfinite().all()
        rate = (grads["decay"].double() * inputs[3].double()).sum(0)
        results.append({"out": outputs[0], "last": outputs[1], "rate": rate, **grads})
    for name, true in results[1].items():
        assert relative_error(results[0][name], true) <= 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [-torch.inf, -3e38])
def test_a_token_may_forget_everything(decay, dtype):
    """At the ends of a sequence and of chunks, between, twice in a row; each head by itself."""
    inputs = make(29, dtype=dtype)
    forgets = torch.zeros(29, HEADS, dtype=torch.bool)
    for head, tokens in enumerate([(0,), (28,), (7, 8), (12, 13), (3, 24), ()]):
        forgets[list(tokens), head] = True
    with torch.no_grad():
        inputs[3][forgets] = decay
    check(inputs, (0, 29), dtype)
    given = RecurrenceInputs(*inputs[:5])
    out, _ = recur(state_space_recurrence(CHUNK), given, Sequences((0, 29)), initial=inputs[5])
    (grad,) = torch.autograd.grad(out.sum(), inputs[3:4])
    assert not grad[forgets].any()
    assert grad[~forgets].all()


def test_a_step_may_forget_everything():
    inputs = [x.detach() for x in make(1)]
    inputs[3][0, ::2] = -torch.inf
    expected, last = naive(*inputs, (0, 1))
    state = inputs[5].clone()
    out = state_space_step(*inputs[:5], state=state, slots=torch.tensor([0]))
    assert_close(out, expected, torch.float64, "out")
    assert_close(state, last, torch.float64, "state")


def test_a_token_without_strength_still_has_its_gradient():
    inputs = make(20)
    with torch.no_grad():
        inputs[4][::3] = 0.0
    check(inputs, (0, 20))


def test_slices_of_a_wider_tensor_are_read_where_they_are():
    """The layer hands over parts of one projection."""
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(21, 50, generator=generator, dtype=torch.float64).requires_grad_()

    def parts():
        value, query, key, gates = wide.split([18, 10, 10, 12], 1)
        return (
            query.unflatten(1, (2, KEYS)),
            key.unflatten(1, (2, KEYS)),
            value.unflatten(1, (HEADS, VALUES)),
            -gates[:, :HEADS].exp(),
            gates[:, HEADS:],
        )

    initial = torch.zeros(1, HEADS, KEYS, VALUES, dtype=torch.float64)
    expected = naive(*parts(), initial, (0, 21))
    found = state_space_dual(*parts(), sequences=Sequences((0, 21)))
    for mine, its in zip(
        (*found, *gradients(found, [wide])), (*expected, *gradients(expected, [wide])), strict=True
    ):
        assert_close(mine, its, torch.float64, "wide")


def test_bf16_is_fp32_rounded():
    tensors = [x.detach().bfloat16() for x in make(29)]
    tensors[3] = tensors[3].float()
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [x.to(torch.promote_types(dtype, x.dtype)).requires_grad_() for x in tensors]
        out, last = state_space_dual(*inputs[:5], sequences=Sequences((0, 29)), initial=inputs[5])
        assert out.dtype == dtype
        assert last.dtype == torch.float32
        pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        grads = torch.autograd.grad(out, inputs, pull.to(dtype))
        assert [x.dtype for x in grads] == [x.dtype for x in inputs]
        results.append((out, *grads))
    for narrow, wide in zip(*results, strict=True):
        assert torch.equal(narrow, wide.to(narrow.dtype))


def test_a_sequence_may_be_cut_anywhere():
    """Each offset below two chunks: the rest begins with the last states of what came before."""
    inputs = [x.detach() for x in make(23)]
    recurrence = state_space_recurrence(CHUNK)
    whole = recur(recurrence, RecurrenceInputs(*inputs[:5]), Sequences((0, 23)), initial=inputs[5])
    for offset in range(2 * CHUNK):
        state, outs = inputs[5], []
        for part in (slice(0, offset), slice(offset, 23)):
            given = RecurrenceInputs(*(x[part] for x in inputs[:5]))
            sequences = Sequences((0, part.stop - part.start))
            out, state = recur(recurrence, given, sequences, initial=state)
            outs.append(out)
        assert_close(torch.cat(outs), whole[0], torch.float64, f"out, cut at {offset}")
        assert_close(state, whole[1], torch.float64, f"last, cut at {offset}")


def test_operations_of_a_recurrence_agree():
    """The last states are an affine function of the first; gradients may be taken in two turns."""
    bounds = BOUNDS["pack"]
    inputs, sequences = make(42, sequences=6), Sequences(bounds)
    recurrence = state_space_recurrence(CHUNK)
    first = inputs[5].detach()
    with torch.no_grad():
        prepared = recurrence.prepare(RecurrenceInputs(*inputs[:5]), sequences)
        local, transition = recurrence.summary(prepared)
        out, last = recurrence.sweep(prepared, first)
        assert transition.shape == (6, HEADS, 1, 1)
        assert_close(apply_transition(transition, first) + local, last, torch.float64, "affine")
        again = recurrence.summary(prepared)
        assert torch.equal(again[0], local)
        generator = torch.Generator().manual_seed(5)
        pull, pull_last = (
            torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, last)
        )
        alone = recurrence.state_gradient(prepared, pull)
        grads, grad_first = recurrence.backward(prepared, pull, pull_last)
    true = naive(*inputs, bounds)
    (expected,) = torch.autograd.grad(true[0], inputs[5:], pull, retain_graph=True)
    assert_close(alone, expected, torch.float64, "state_gradient")
    expected = torch.autograd.grad(true, inputs, (pull, pull_last))
    for name, mine, its in zip(NAMES, (*grads, grad_first), expected, strict=True):
        assert_close(mine, its, torch.float64, name)


def test_step_is_one_token_and_leaves_other_slots_alone():
    """Padding rows hold NaN, and so do slots of nobody."""
    inputs = [x.detach() for x in make(7, sequences=1)]
    expected, last = naive(*inputs, (0, 7))
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
    assert_close(state[3], last[0], torch.float64, "state")
    others = [0, 1, 2, 4]
    assert torch.equal(state[others].nan_to_num(7.0), untouched[others])
    before = state.nan_to_num(7.0)
    rows = [row[:2] for row in rows]
    assert not state_space_step(*rows, state=state, slots=torch.tensor([-1, -1])).any()
    assert torch.equal(state.nan_to_num(7.0), before)
    assert state_space_step(*(x[:0] for x in rows), state=state, slots=slots[:0]).shape[0] == 0


def test_step_in_fp32_states_of_bf16_tokens():
    inputs = [x.detach().bfloat16() for x in make(2, groups=1)]
    state = torch.zeros(2, HEADS, KEYS, VALUES)
    given = [x.float() if name == "decay" else x for name, x in zip(NAMES, inputs, strict=True)]
    out = state_space_step(*given[:5], state=state, slots=torch.tensor([1, 0]))
    expected, _ = naive(*(x.double() for x in inputs[:5]), torch.zeros(2, 1, 1, 1), (0, 1, 2))
    assert out.dtype == torch.bfloat16
    assert_close(out, expected, torch.bfloat16, "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_a_token_adds_to_its_own_output(dtype):
    new = maker()
    tensors = (new(5, HEADS, VALUES), new(5, HEADS, VALUES), new(HEADS))
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
    given = change(dict(zip(NAMES, make(4), strict=True)))
    with pytest.raises(ValueError, match=message):
        state_space_dual(**given, sequences=Sequences((0, 4)))


def test_wrong_slots_and_chunks_are_named():
    inputs, state = make(2)[:5], torch.zeros(3, HEADS, KEYS, VALUES, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"slots .* must be int64, one for each of 2 rows"):
        state_space_step(*inputs, state=state, slots=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"state .* must be \(slots, 6, 5, 3\)"):
        state_space_step(*inputs, state=state[:, 1:], slots=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="chunk_size 0: use 1 or more"):
        state_space_recurrence(0)
