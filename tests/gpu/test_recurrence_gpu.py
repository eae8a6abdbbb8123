# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule and SSD on the GPU: outputs, states and all gradients, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
from megatron.core.ops.recurrence.sweep import triton as kernels
from megatron.core.ops.sequences import Sequences
from tests.support.gpu_agreement import DTYPES, REHEARSES, agree, random_tensor, sized
from tests.support.launch_kernels import assert_launches

pytestmark = pytest.mark.gpu

FP32_INPUTS = (3, 4, 5)  # gates and states
#: Empty sequences, single tokens, whole chunks and tails.
BOUNDS = sized((0, 0, 1, 65, 129, 700, 700, 1500), (0, 0, 1, 33))
OPS = {"delta": gated_delta_rule, "ssd": state_space_dual}
#: groups, heads of each, features of keys and of values
SIZES = {
    "delta": {
        "Qwen3-Next": sized((16, 2, 128, 128), (1, 2, 6, 5)),
        "odd": sized((3, 3, 100, 52), (1, 3, 5, 3)),
        "wide": sized((2, 1, 256, 200), (1, 1, 18, 17)),
    },
    "ssd": {
        "Nemotron-H": sized((8, 16, 128, 64), (1, 2, 6, 5)),
        "odd": sized((1, 5, 40, 33), (1, 3, 5, 3)),
        "wide": sized((1, 4, 256, 64), (1, 1, 18, 17)),
    },
}
CASES = [(kind, name) for kind, sizes in SIZES.items() for name in sizes]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use small tiles in a rehearsal: the interpreter computes whole tiles."""
    if REHEARSES:
        for name in ("SWEEP_FP32", "REVERSE_FP32", "GRADIENTS_FP32"):
            tile = {"BLOCK_V": 16, "num_warps": 1, "num_stages": 1}
            monkeypatch.setattr(kernels, name, Launches(name, tile))


def inputs_of(device, kind, name, *, bounds=BOUNDS, slowness=1.0):
    """Return query, key, value, decay, strength and first states in fp32."""
    groups, shared, keys, values = SIZES[kind][name]
    tokens, heads = bounds[-1], groups * shared
    key = random_tensor(device, tokens, groups, keys)
    query = random_tensor(device, groups, tokens, keys).transpose(0, 1)  # not contiguous
    strength = random_tensor(device, tokens, heads)
    return (
        F.normalize(query, dim=-1),
        F.normalize(key, dim=-1),
        random_tensor(device, tokens, heads, values),
        -F.softplus(random_tensor(device, heads, tokens).T) * slowness,
        strength.sigmoid() if kind == "delta" else F.softplus(strength),
        random_tensor(device, len(bounds) - 1, heads, keys, values) / keys**0.5,
    )


def run(kind, sequences):
    """Return the op as a function of its inputs and of first states."""

    def call(*tensors, implementation):
        *inputs, initial = tensors
        options = {"sequences": sequences, "implementation": implementation}
        return OPS[kind](*inputs, initial=initial, **options)

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_packed_sequences_match_reference(device, dtype, kind, name):
    sequences = Sequences(BOUNDS, device=device)
    agree(run(kind, sequences), inputs_of(device, kind, name), dtype, fp32_inputs=FP32_INPUTS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_slow_decays_over_many_chunks_match_reference(device, dtype, kind):
    bounds = (0, sized(3000, 50))
    inputs = inputs_of(device, kind, "odd", bounds=bounds, slowness=0.01)
    agree(run(kind, Sequences(bounds, device=device)), inputs, dtype, fp32_inputs=FP32_INPUTS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_split_recurrence_matches_whole_recurrence(device, dtype, kind):
    """Parallel segments, combined from S_ext and M, equal the whole sequence."""
    bounds, chunk = (0, sized(2000, 40)), sized(64, 16)
    sequences = Sequences(bounds, device=device)
    make = delta_recurrence if kind == "delta" else state_space_recurrence

    def call(*tensors, implementation):
        *inputs, initial = tensors
        return recur_split(
            make(implementation=implementation),
            RecurrenceInputs(*inputs),
            sequences,
            splits=3 if implementation == "triton" else 1,
            initial=initial,
            chunk=chunk,
        )

    inputs = inputs_of(device, kind, "odd", bounds=bounds, slowness=0.05)
    agree(call, inputs, dtype, fp32_inputs=FP32_INPUTS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_keys_match_reference(device, dtype):
    """With equal keys, a series for T would be a difference of huge numbers."""
    bounds = (0, sized(200, 40))
    query, key, value, decay, _, initial = inputs_of(device, "delta", "odd", bounds=bounds)
    key = key[:1].expand_as(key)
    inputs = (query, key, value, decay * 0.05, torch.ones_like(decay), initial)
    agree(run("delta", Sequences(bounds, device=device)), inputs, dtype, fp32_inputs=FP32_INPUTS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 52])
def test_skip_connection_matches_reference(device, dtype, width):
    shape = sized((1500, 128, width), (33, 3, 5))
    inputs = (
        random_tensor(device, *shape),
        random_tensor(device, shape[1], shape[0], shape[2]).transpose(0, 1),
    )
    agree(add_skip, (*inputs, random_tensor(device, shape[1])), dtype, fp32_inputs=(2,))


def test_skip_connection_is_one_kernel_each_way(device):
    shape = sized((1500, 128, 64), (33, 3, 5))
    leaves = [random_tensor(device, *x).requires_grad_() for x in (shape, shape, shape[1:2])]
    grad_out = random_tensor(device, *shape)

    def forward():
        return add_skip(*leaves, implementation="triton")

    assert_launches(forward, {"add_skip_kernel": 1})
    assert_launches(
        lambda: torch.autograd.grad(forward(), leaves, grad_out),
        {"add_skip_kernel": 1, "add_skip_backward_kernel": 1},
        allowed=("copy", "sum"),  # the partial sums of the gradient of D
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_nan_decays_propagate(device, dtype, kind):
    """On a GPU, the maximum of a number and NaN is the number."""
    bounds = (0, 2, sized(300, 37))
    tensors = inputs_of(device, kind, "odd", bounds=bounds)
    tensors[3][5, 1] = torch.nan
    leaves = [x.to(dtype if i not in FP32_INPUTS else x.dtype) for i, x in enumerate(tensors)]
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, final_state = run(kind, Sequences(bounds, device=device))(*leaves, implementation="triton")
    assert out[5:, 1].isnan().all()
    assert final_state[1, 1].isnan().all()
    grads = torch.autograd.grad(
        (out, final_state), leaves, (torch.ones_like(out), torch.ones_like(final_state))
    )
    for x in (out, final_state, *grads[2:]):  # of values, gates and states; heads share the others
        clean_heads = x[:, [0, 2]]
        assert clean_heads.isfinite().all()
    assert grads[5][1, 1].isnan().all()
    for number, grad in enumerate(grads):
        assert grad.isnan().any(), number
        grads_of_sequence_0 = grad[:1] if number == 5 else grad[:2]
        assert grads_of_sequence_0.isfinite().all(), number  # of the sequence before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_recurrence_launches_expected_kernels(device, dtype, kind):
    sequences = Sequences(BOUNDS, device=device)
    tensors = inputs_of(device, kind, "odd")
    leaves = [x.to(dtype if i not in FP32_INPUTS else x.dtype) for i, x in enumerate(tensors)]
    leaves = [x.detach().requires_grad_() for x in leaves]

    def forward():
        return run(kind, sequences)(*leaves, implementation="triton")

    out, final_state = (torch.ones_like(x) for x in forward())  # warm up caches
    prepares = {"solve_kernel": 1} if kind == "delta" else {"decay_sums_kernel": 1}
    num_seen = 1 if kind == "ssd" and dtype == torch.float32 else 0
    prepares |= {"seen_kernel": 1} if num_seen else {}
    assert_launches(forward, prepares | {"sweep_kernel": 1})
    launched = {"reverse_sweep_kernel": 1, "recurrence_gradients_kernel": 1}
    launched |= {"seen_kernel": 1 + num_seen} if num_seen or kind == "delta" else {}
    make = delta_recurrence if kind == "delta" else state_space_recurrence
    prepared = make(implementation="triton").prepare(RecurrenceInputs(*leaves[:5]), sequences)
    if kernels.heads_per_program(prepared) < SIZES[kind]["odd"][1]:  # of a group
        launched["sum_units_kernel"] = 1
    assert_launches(
        lambda: torch.autograd.grad(forward(), leaves, (out, final_state)),
        prepares | {"sweep_kernel": 2} | launched,
        allowed=("copy",),
    )
