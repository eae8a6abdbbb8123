# SPDX-License-Identifier: Apache-2.0
"""Outputs, states and splits of both recurrences in Triton's interpreter, against fp64.

Run by `test_triton.py` in a process of its own: TRITON_INTERPRET must be set before the first
import of Triton.
"""

from itertools import pairwise

import pytest
import torch

from experimental.recurrence_splits.splits import recur_split
from megatron.core.ops import recurrence_by_device
from megatron.core.ops.chunked_recurrence import triton as kernels
from megatron.core.ops.chunked_recurrence.kernels import ChunkIndices
from megatron.core.ops.gated_delta_rule import delta_recurrence, gated_delta_rule
from megatron.core.ops.gated_delta_rule.triton import solve
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.state_space_dual import add_skip, state_space_dual, state_space_recurrence
from megatron.core.ops.state_space_dual import triton as skips
from tests.support.closeness import relative_error
from tests.support.gpu_agreement import BOUND, agree
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.interpreted_recurrence_backward import NAMES, PACK, make_inputs, pair

KINDS = pytest.mark.parametrize("corrects", [True, False], ids=["delta", "ssd"])


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let values, and the columns of M, need two tiles."""
    small = {"BLOCK_V": 16, "num_warps": 4, "num_stages": 1}
    for name in ("SWEEP", "SWEEP_DUAL", "SWEEP_FP32", "REVERSE_FP32", "GRADIENTS_FP32"):
        monkeypatch.setattr(kernels, name, Launches(name, small))


def rounded(inputs, dtype):
    """Return inputs as kernels get them: gates in fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    return RecurrenceInputs(*(x.to(dtype) for x in inputs[:3]), *(x.to(wide) for x in inputs[3:]))


def compare(bounds, case, *, corrects, chunk=16, dtype=torch.float32, bound=1e-5, initial=True):
    """Compare out, last states, S_ext and M with those of the reference; return the kernels'."""
    mine, reference = pair(corrects, chunk)
    inputs, first, _ = case
    first = first if initial else None
    given, sequences = rounded(inputs, dtype), Sequences(bounds)
    prepared = mine.prepare(given, sequences)
    got = [*mine.summary(prepared), *mine.sweep(prepared, first)]
    prepared = reference.prepare(rounded(given, torch.float64), sequences)
    wanted = [*reference.summary(prepared), *reference.sweep(prepared, first)]
    names = ("S_ext", "M", "out", "last")
    errors = {
        name: relative_error(x, y, scale=0.0 if name == "M" else 1.0)  # M is a product of decays
        for name, x, y in zip(names, got, wanted, strict=True)
    }
    if dtype != torch.float32:  # M, of an identity, has faded to less than that rounds to
        errors["M"] = (got[1] - wanted[1]).abs().max().item()
    assert max(errors.values()) <= bound, errors
    assert got[2].dtype == dtype
    assert {x.dtype for x in (got[0], got[1], got[3])} == {torch.float32}
    return dict(zip(names, got, strict=True))


@pytest.mark.parametrize("shared", [pytest.param(2, marks=pytest.mark.slow), 3])
@KINDS
def test_outputs_and_states_of_a_pack(corrects, shared):
    compare(
        PACK,
        make_inputs(PACK, corrects=corrects, shared=shared, groups=4 - shared),
        corrects=corrects,
    )


@pytest.mark.parametrize("chunk", [pytest.param(32, marks=pytest.mark.slow), 64])
@KINDS
def test_larger_chunks(corrects, chunk, monkeypatch):
    # In fp32, the delta rule takes chunks of 16, whose inverse is a single block.
    monkeypatch.setattr(kernels, "FP32_CHUNK_DELTA_RULE", 32)
    case = make_inputs((0, chunk + 9), corrects=corrects, groups=1, keys=18, values=5)
    compare((0, chunk + 9), case, corrects=corrects, chunk=chunk, initial=chunk == 32)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 2**-9), (torch.bfloat16, BOUND[torch.bfloat16])], ids=str
)
@KINDS
def test_half_precision(corrects, dtype, bound):
    case = make_inputs((0, 40), corrects=corrects, groups=1)
    compare((0, 40), case, corrects=corrects, dtype=dtype, bound=bound)


@KINDS
def test_no_tokens_pass_states_on(corrects):
    case = make_inputs((0, 0, 0), corrects=corrects)
    got = compare((0, 0, 0), case, corrects=corrects)
    assert torch.equal(got["last"].double(), case[1].float().double())


@KINDS
def test_gentle_decays_leave_a_transition(corrects):
    """M of a whole sequence of several chunks is then neither the identity nor zero."""
    inputs, *rest = make_inputs((0, 41), corrects=corrects, groups=1)
    strength = inputs.beta * (0.1 if corrects else 1.0)
    case = inputs._replace(decay=inputs.decay * 0.02, beta=strength), *rest
    got = compare((0, 41), case, corrects=corrects)
    assert 0.05 < got["M"].diagonal(0, -2, -1).abs().mean() < 0.95


@pytest.mark.parametrize(
    "decay", [-torch.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (-3e38, -20.0))]
)
@KINDS
def test_tokens_may_forget_everything(corrects, decay):
    inputs, *rest = make_inputs((0, 37), corrects=corrects, groups=1)
    rates = inputs.decay.clone()
    rates[[0, 7, 15, 16, 36], 0] = decay
    rates[::2, 1] = 0.0
    compare((0, 37), (inputs._replace(decay=rates), *rest), corrects=corrects)


@KINDS
def test_slices_of_wider_tensors(corrects):
    bounds = (0, 5, 22)
    inputs, first, _ = make_inputs(bounds, corrects=corrects)
    fused = torch.cat([inputs.query, inputs.key, inputs.query * 3], -1).float()
    query, key, _ = fused.split(5, -1)
    value = inputs.value.float().transpose(1, 2).contiguous().transpose(1, 2)
    gates = torch.stack([inputs.decay, inputs.beta], -1).float()
    given = RecurrenceInputs(query, key, value, gates[..., 0], gates[..., 1])
    assert not any(x.is_contiguous() for x in given)
    compare(bounds, (given, first, None), corrects=corrects)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_keys_that_are_all_equal_are_solved(size):
    """With beta 1 a series over rows would have terms of binomial size; T has ones and zeros."""
    inputs = make_inputs((0, size + 3), corrects=True, groups=1, shared=2)[0]
    key = inputs.key[:1].expand_as(inputs.key)
    beta = torch.ones_like(inputs.beta)
    beta[:, 1] = inputs.beta[:, 1]
    given = inputs._replace(key=key, decay=inputs.decay * 0.1, beta=beta)
    chunks = ChunkIndices.of(Sequences((0, size + 3)), size)
    cumsum, decayed_inverse, scores = solve(rounded(given, torch.float32), chunks, 0.5)
    rows = slice(0, size)
    total = given.decay[rows].T.cumsum(-1)
    decay_mask = (total[:, :, None] - total[:, None]).exp().tril()
    below = (given.beta[rows].T[:, :, None] * (key[rows, 0] @ key[rows, 0].T)).tril(-1)
    inverse = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + below)
    assert relative_error(decayed_inverse[0], inverse * decay_mask) <= 1e-5
    expected = (given.query[rows, 0] @ key[rows, 0].T) * decay_mask * 0.5
    assert relative_error(scores[0], expected) <= 1e-5
    assert relative_error(cumsum[:, 0].double().sum(0), total) <= 1e-7
    assert torch.equal(
        decayed_inverse[1, :, 3:], torch.eye(size)[3:].expand(2, -1, -1)
    )  # no tokens


@KINDS
def test_a_split_sequence_is_the_whole_one(corrects, monkeypatch):
    bounds = (0, 40, 43)
    sweeps = []

    def watched(*args, **options):
        sweeps.append(options)
        return original(*args, **options)

    original = kernels.sweep
    monkeypatch.setattr(kernels, "sweep", watched)
    inputs, first, pulls = make_inputs(bounds, corrects=corrects, groups=1)
    inputs = inputs._replace(decay=inputs.decay * 0.1)
    given = (*rounded(inputs, torch.float32), first.float())
    options = {"sequences": Sequences(bounds), "chunk": 16}
    found = []
    kinds = ((torch.float32, 3), (torch.float64, 1))
    for recurrence, (dtype, splits) in zip(pair(corrects, 16), kinds, strict=True):
        *leaves, initial = [x.to(dtype, copy=True).requires_grad_() for x in given]
        outputs = recur_split(
            recurrence, RecurrenceInputs(*leaves), splits=splits, initial=initial, **options
        )
        torch.autograd.backward(outputs, [pull.to(dtype) for pull in pulls])
        found.append([*outputs, *(x.grad for x in leaves), initial.grad])
    errors = {
        name: relative_error(mine.detach(), whole.detach())
        for name, mine, whole in zip(("out", "last", *NAMES), *found, strict=True)
    }
    assert max(errors.values()) <= 1e-5, errors
    summaries = sum("total_decay" in o or "without_values" in o for o in sweeps)
    assert summaries == 1
    assert len(sweeps) == (4 if corrects else 3)  # S_ext and M, outputs, states again


@KINDS
def test_the_public_op_runs_the_kernels(corrects, monkeypatch):
    bounds = (0, 21)
    inputs, first, _ = make_inputs(bounds, corrects=corrects)
    op = gated_delta_rule if corrects else state_space_dual
    launched = []
    monkeypatch.setattr(kernels, "sweep", lambda *a, **o: launched.append(kernels_sweep(*a, **o)))
    given = rounded(inputs, torch.float32)
    out, last = op(*given, sequences=Sequences(bounds), initial=first, implementation="triton")
    assert len(launched) == 1
    true, true_last = op(*rounded(given, torch.float64), sequences=Sequences(bounds), initial=first)
    assert max(relative_error(out, true), relative_error(last, true_last)) <= 1e-5
    op(*given, sequences=Sequences(bounds))
    assert len(launched) == 1, "a CPU tensor takes the reference unless told otherwise"


kernels_sweep = kernels.sweep
UNFIT = {
    "keys": ({"keys": 257}, {}, "keys of up to 256 features, not 257"),
    "chunk": ({}, {"chunk_size": 24}, "chunks of 16, 32 or 64 tokens, not 24"),
}


@pytest.mark.parametrize("kind", UNFIT)
@KINDS
def test_sizes_that_no_kernel_takes(corrects, kind, monkeypatch):
    """They are refused where kernels were asked for, and the reference's otherwise."""
    sizes, options, message = UNFIT[kind]
    inputs, first, _ = make_inputs((0, 4), corrects=corrects, **sizes)
    given, sequences = rounded(inputs, torch.float32), Sequences((0, 4))
    make = delta_recurrence if corrects else state_space_recurrence
    with pytest.raises(ValueError, match=f"the Triton kernels take {message}; use"):
        make(implementation="triton", **options).prepare(given, sequences)
    monkeypatch.setattr(recurrence_by_device, "choose", lambda *_: "triton")
    recurrence = make(**options)
    prepared = recurrence.prepare(given, sequences)
    assert isinstance(prepared, recurrence.prepared_type)
    assert recurrence.sweep(prepared, first)[0].isfinite().all()


def test_tiles_never_cross_a_sequence():
    bounds = (0, 0, 19, 19, 20, 53, 53)
    tiles = ChunkIndices.of(Sequences(bounds), 16)
    first, end, begin = [], [], [0]
    for low, high in pairwise(bounds):
        first += range(low, high, 16)
        end += [min(start + 16, high) for start in range(low, high, 16)]
        begin.append(len(first))
    assert (tiles.count, tiles.sequence_count, tiles.tokens) == (len(first), 6, 53)
    assert [x.tolist() for x in (tiles.starts, tiles.ends, tiles.offsets)] == [first, end, begin]
    with pytest.raises(ValueError, match="chunks of 0 tokens: use at least 1"):
        ChunkIndices.of(Sequences(bounds), 0)


@pytest.mark.parametrize("tokens", [0, 1, 21])
def test_what_a_token_adds_to_its_own_output(tokens, monkeypatch):
    """Slices of wider tensors, features that fill no tile, several tiles of a head."""
    small = {"ELEMENTS": 64, "num_warps": 1, "num_stages": 1}
    for name in ("SKIP", "SKIP_BACKWARD"):
        monkeypatch.setattr(skips, name, Launches(name, small))
    generator = torch.Generator().manual_seed(tokens)
    wide = torch.randn(tokens, 3, 2 * 6 + 1, generator=generator)
    heads = torch.randn(3, tokens, 6, generator=generator).transpose(0, 1)
    skip = torch.randn(3, generator=generator)

    def skipped(wide, heads, skip, *, implementation):
        out, x, _ = wide.split([6, 6, 1], -1)
        ours = add_skip(out, x, skip, implementation=implementation)
        return ours, add_skip(heads, out, skip, implementation=implementation)

    agree(skipped, (wide, heads, skip), torch.float32, bounds={torch.float32: 1e-5})
