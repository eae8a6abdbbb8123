# SPDX-License-Identifier: Apache-2.0
"""Outputs, states and splits of both recurrences in Triton's interpreter against fp64.

`test_triton.py` runs this file in a separate process, because TRITON_INTERPRET must be set before
the first import of Triton.
"""

from itertools import pairwise

import pytest
import torch

from experimental.recurrence_splits.splits import recur_split
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import (
    RecurrenceInputs,
    add_skip,
    delta_recurrence,
    gated_delta_rule,
    state_space_dual,
    state_space_recurrence,
)
from megatron.core.ops.recurrence import by_device as recurrence_by_device
from megatron.core.ops.recurrence.delta_rule.triton import solve
from megatron.core.ops.recurrence.ssd import triton as skips
from megatron.core.ops.recurrence.sweep import triton as kernels
from megatron.core.ops.recurrence.sweep.kernels import ChunkIndices
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import relative_error
from tests.support.gpu_agreement import BOUND, agree
from tests.support.nan_memory import nan_memory
from tests.unit_tests.core.ops.interpreted_recurrence_backward import (
    NAMES,
    PACK,
    make_inputs,
    recurrence_pair,
)

KINDS = pytest.mark.parametrize("delta_rule", [True, False], ids=["delta", "ssd"])


@pytest.fixture(autouse=True)
def poison():
    """Fill uninitialised memory with NaN."""
    with nan_memory():
        yield


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use tiles so small that values and the columns of M need two."""
    launch = {"BLOCK_V": 16, "num_warps": 4, "num_stages": 1}
    for name in ("SWEEP", "SWEEP_DUAL", "SWEEP_FP32", "REVERSE_FP32", "GRADIENTS_FP32"):
        monkeypatch.setattr(kernels, name, Launches(name, launch))


def rounded(inputs, dtype):
    """Return inputs in the dtypes of the kernels, with gates in fp32."""
    gate_dtype = torch.promote_types(dtype, torch.float32)
    return RecurrenceInputs(
        *(x.to(dtype) for x in inputs[:3]), *(x.to(gate_dtype) for x in inputs[3:])
    )


def compare(bounds, case, *, delta_rule, chunk=16, dtype=torch.float32, bound=1e-5, initial=True):
    """Compare out, final states, S_ext and M with the reference; return the kernel outputs."""
    kernel_recurrence, reference = recurrence_pair(delta_rule, chunk)
    inputs, initial_states, _ = case
    initial_states = initial_states if initial else None
    recurrence_inputs, sequences = rounded(inputs, dtype), Sequences(bounds)
    prepared = kernel_recurrence.prepare(recurrence_inputs, sequences)
    actual = [
        *kernel_recurrence.summary(prepared),
        *kernel_recurrence.sweep(prepared, initial_states),
    ]
    prepared = reference.prepare(rounded(recurrence_inputs, torch.float64), sequences)
    expected = [*reference.summary(prepared), *reference.sweep(prepared, initial_states)]
    names = ("S_ext", "M", "out", "last")
    errors = {
        name: relative_error(x, y, scale=0.0 if name == "M" else 1.0)  # M is a product of decays
        for name, x, y in zip(names, actual, expected, strict=True)
    }
    if dtype != torch.float32:  # M has decayed below the rounding error of the identity
        errors["M"] = (actual[1] - expected[1]).abs().max().item()
    assert max(errors.values()) <= bound, errors
    assert actual[2].dtype == dtype
    assert {x.dtype for x in (actual[0], actual[1], actual[3])} == {torch.float32}
    return dict(zip(names, actual, strict=True))


@pytest.mark.parametrize("shared", [pytest.param(2, marks=pytest.mark.slow), 3])
@KINDS
def test_packed_outputs_and_states_match_fp64(delta_rule, shared):
    compare(
        PACK,
        make_inputs(PACK, delta_rule=delta_rule, shared=shared, groups=4 - shared),
        delta_rule=delta_rule,
    )


@pytest.mark.parametrize("chunk", [pytest.param(32, marks=pytest.mark.slow), 64])
@KINDS
def test_larger_chunks_match_fp64(delta_rule, chunk, monkeypatch):
    # In fp32, the delta rule takes chunks of 16, whose inverse is a single block.
    monkeypatch.setattr(kernels, "FP32_CHUNK_DELTA_RULE", 32)
    case = make_inputs((0, chunk + 9), delta_rule=delta_rule, groups=1, keys=18, values=5)
    compare((0, chunk + 9), case, delta_rule=delta_rule, chunk=chunk, initial=chunk == 32)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 2**-9), (torch.bfloat16, BOUND[torch.bfloat16])], ids=str
)
@KINDS
def test_half_precision_matches_fp64(delta_rule, dtype, bound):
    case = make_inputs((0, 40), delta_rule=delta_rule, groups=1)
    compare((0, 40), case, delta_rule=delta_rule, dtype=dtype, bound=bound)


@KINDS
def test_sequences_without_tokens_keep_their_states(delta_rule):
    case = make_inputs((0, 0, 0), delta_rule=delta_rule)
    actual = compare((0, 0, 0), case, delta_rule=delta_rule)
    assert torch.equal(actual["last"].double(), case[1].float().double())


@KINDS
def test_weak_decays_match_fp64(delta_rule):
    """With weak decay, M over several chunks is neither the identity nor zero."""
    inputs, *states_and_gradients = make_inputs((0, 41), delta_rule=delta_rule, groups=1)
    beta = inputs.beta * (0.1 if delta_rule else 1.0)
    case = inputs._replace(decay=inputs.decay * 0.02, beta=beta), *states_and_gradients
    actual = compare((0, 41), case, delta_rule=delta_rule)
    assert 0.05 < actual["M"].diagonal(0, -2, -1).abs().mean() < 0.95


@pytest.mark.parametrize(
    "decay", [-torch.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (-3e38, -20.0))]
)
@KINDS
def test_state_resets_match_fp64(delta_rule, decay):
    inputs, *states_and_gradients = make_inputs((0, 37), delta_rule=delta_rule, groups=1)
    rates = inputs.decay.clone()
    rates[[0, 7, 15, 16, 36], 0] = decay
    rates[::2, 1] = 0.0
    compare((0, 37), (inputs._replace(decay=rates), *states_and_gradients), delta_rule=delta_rule)


@KINDS
def test_strided_inputs_match_fp64(delta_rule):
    bounds = (0, 5, 22)
    inputs, initial_states, _ = make_inputs(bounds, delta_rule=delta_rule)
    fused = torch.cat([inputs.query, inputs.key, inputs.query * 3], -1).float()
    query, key, _ = fused.split(5, -1)
    value = inputs.value.float().transpose(1, 2).contiguous().transpose(1, 2)
    gates = torch.stack([inputs.decay, inputs.beta], -1).float()
    sliced_inputs = RecurrenceInputs(query, key, value, gates[..., 0], gates[..., 1])
    assert not any(x.is_contiguous() for x in sliced_inputs)
    compare(bounds, (sliced_inputs, initial_states, None), delta_rule=delta_rule)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_solve_with_equal_keys_matches_inverse(size):
    """With beta 1, a series over rows has terms of binomial size; T has ones and zeros."""
    inputs = make_inputs((0, size + 3), delta_rule=True, groups=1, shared=2)[0]
    key = inputs.key[:1].expand_as(inputs.key)
    beta = torch.ones_like(inputs.beta)
    beta[:, 1] = inputs.beta[:, 1]
    equal_key_inputs = inputs._replace(key=key, decay=inputs.decay * 0.1, beta=beta)
    chunks = ChunkIndices.of(Sequences((0, size + 3)), size)
    cumsum, decayed_inverse, scores = solve(rounded(equal_key_inputs, torch.float32), chunks, 0.5)
    rows = slice(0, size)
    total = equal_key_inputs.decay[rows].T.cumsum(-1)
    decay_mask = (total[:, :, None] - total[:, None]).exp().tril()
    strictly_lower = (
        equal_key_inputs.beta[rows].T[:, :, None] * (key[rows, 0] @ key[rows, 0].T)
    ).tril(-1)
    inverse = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + strictly_lower)
    assert relative_error(decayed_inverse[0], inverse * decay_mask) <= 1e-5
    expected = (equal_key_inputs.query[rows, 0] @ key[rows, 0].T) * decay_mask * 0.5
    assert relative_error(scores[0], expected) <= 1e-5
    assert relative_error(cumsum[:, 0].double().sum(0), total) <= 1e-7
    assert torch.equal(
        decayed_inverse[1, :, 3:], torch.eye(size)[3:].expand(2, -1, -1)
    )  # no tokens


@KINDS
def test_split_sequence_matches_whole_sequence(delta_rule, monkeypatch):
    bounds = (0, 40, 43)
    sweeps = []

    def recording_sweep(*args, **options):
        sweeps.append(options)
        return original(*args, **options)

    original = kernels.sweep
    monkeypatch.setattr(kernels, "sweep", recording_sweep)
    inputs, initial_states, grad_outputs = make_inputs(bounds, delta_rule=delta_rule, groups=1)
    inputs = inputs._replace(decay=inputs.decay * 0.1)
    tensors = (*rounded(inputs, torch.float32), initial_states.float())
    options = {"sequences": Sequences(bounds), "chunk": 16}
    outputs_by_dtype = []
    dtypes_and_splits = ((torch.float32, 3), (torch.float64, 1))
    for recurrence, (dtype, splits) in zip(
        recurrence_pair(delta_rule, 16), dtypes_and_splits, strict=True
    ):
        *leaves, initial = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
        outputs = recur_split(
            recurrence, RecurrenceInputs(*leaves), splits=splits, initial=initial, **options
        )
        torch.autograd.backward(outputs, [grad_output.to(dtype) for grad_output in grad_outputs])
        outputs_by_dtype.append([*outputs, *(x.grad for x in leaves), initial.grad])
    errors = {
        name: relative_error(actual.detach(), expected.detach())
        for name, actual, expected in zip(("out", "last", *NAMES), *outputs_by_dtype, strict=True)
    }
    assert max(errors.values()) <= 1e-5, errors
    summaries = sum("total_decay" in o or "without_values" in o for o in sweeps)
    assert summaries == 1
    assert len(sweeps) == (4 if delta_rule else 3)  # S_ext and M, outputs, states again


@KINDS
def test_public_op_runs_the_kernels_if_forced(delta_rule, monkeypatch):
    bounds = (0, 21)
    inputs, initial_states, _ = make_inputs(bounds, delta_rule=delta_rule)
    op = gated_delta_rule if delta_rule else state_space_dual
    launched = []
    monkeypatch.setattr(kernels, "sweep", lambda *a, **o: launched.append(kernels_sweep(*a, **o)))
    rounded_inputs = rounded(inputs, torch.float32)
    out, final = op(
        *rounded_inputs,
        sequences=Sequences(bounds),
        initial=initial_states,
        implementation="triton",
    )
    assert len(launched) == 1
    expected, expected_final = op(
        *rounded(rounded_inputs, torch.float64), sequences=Sequences(bounds), initial=initial_states
    )
    assert max(relative_error(out, expected), relative_error(final, expected_final)) <= 1e-5
    op(*rounded_inputs, sequences=Sequences(bounds))
    assert len(launched) == 1, "CPU tensors use the reference by default"


kernels_sweep = kernels.sweep
UNFIT = {
    "keys": ({"keys": 257}, {}, "keys of up to 256 features, not 257"),
    "chunk": ({}, {"chunk_size": 24}, "chunks of 16, 32 or 64 tokens, not 24"),
}


@pytest.mark.parametrize("kind", UNFIT)
@KINDS
def test_sizes_without_kernel_are_refused_or_use_reference(delta_rule, kind, monkeypatch):
    """Such sizes are refused if kernels are forced and otherwise use the reference."""
    sizes, options, message = UNFIT[kind]
    inputs, initial_states, _ = make_inputs((0, 4), delta_rule=delta_rule, **sizes)
    rounded_inputs, sequences = rounded(inputs, torch.float32), Sequences((0, 4))
    make = delta_recurrence if delta_rule else state_space_recurrence
    with pytest.raises(ValueError, match=f"the Triton kernels take {message}; use"):
        make(implementation="triton", **options).prepare(rounded_inputs, sequences)
    monkeypatch.setattr(recurrence_by_device, "choose", lambda *_: "triton")
    recurrence = make(**options)
    prepared = recurrence.prepare(rounded_inputs, sequences)
    assert isinstance(prepared, recurrence.prepared_type)
    assert recurrence.sweep(prepared, initial_states)[0].isfinite().all()


def test_chunks_never_cross_sequences():
    bounds = (0, 0, 19, 19, 20, 53, 53)
    tiles = ChunkIndices.of(Sequences(bounds), 16)
    starts, ends, offsets = [], [], [0]
    for low, high in pairwise(bounds):
        starts += range(low, high, 16)
        ends += [min(start + 16, high) for start in range(low, high, 16)]
        offsets.append(len(starts))
    assert (tiles.count, tiles.sequence_count, tiles.tokens) == (len(starts), 6, 53)
    assert [x.tolist() for x in (tiles.starts, tiles.ends, tiles.offsets)] == [
        starts,
        ends,
        offsets,
    ]
    with pytest.raises(ValueError, match="chunks of 0 tokens: use at least 1"):
        ChunkIndices.of(Sequences(bounds), 0)


@pytest.mark.parametrize("tokens", [0, 1, 21])
def test_skip_connection_matches_reference(tokens, monkeypatch):
    """Inputs are slices, features do not fill a tile, and a head has several tiles."""
    launch = {"ELEMENTS": 64, "num_warps": 1, "num_stages": 1}
    for name in ("SKIP", "SKIP_BACKWARD"):
        monkeypatch.setattr(skips, name, Launches(name, launch))
    generator = torch.Generator().manual_seed(tokens)
    projection = torch.randn(tokens, 3, 2 * 6 + 1, generator=generator)
    heads = torch.randn(3, tokens, 6, generator=generator).transpose(0, 1)
    skip = torch.randn(3, generator=generator)

    def skipped(projection, heads, skip, *, implementation):
        out, x, _ = projection.split([6, 6, 1], -1)
        sliced_output = add_skip(out, x, skip, implementation=implementation)
        return sliced_output, add_skip(heads, out, skip, implementation=implementation)

    agree(skipped, (projection, heads, skip), torch.float32, bounds={torch.float32: 1e-5})
