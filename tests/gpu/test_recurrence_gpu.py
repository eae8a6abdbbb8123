# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule and SSD on the GPU: outputs, states and all gradients, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from experimental.recurrence_splits.splits import recur_split
from megatron.core.ops.chunked_recurrence import triton as kernels
from megatron.core.ops.gated_delta_rule import delta_recurrence, gated_delta_rule
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.state_space_dual import add_skip, state_space_dual, state_space_recurrence
from tests.support.gpu_agreement import DTYPES, REHEARSES, agree, random_tensor, sized
from tests.support.launch_kernels import assert_launches

pytestmark = pytest.mark.gpu

WIDE = (3, 4, 5)  # gates and states
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
def small(monkeypatch):
    """Let a rehearsal use small tiles: an interpreter works on whole ones."""
    if REHEARSES:
        for name in ("SWEEP_FP32", "REVERSE_FP32", "GRADIENTS_FP32"):
            tile = {"BLOCK_V": 16, "num_warps": 1, "num_stages": 1}
            monkeypatch.setattr(kernels, name, Launches(name, tile))


def inputs_of(device, kind, name, *, bounds=BOUNDS, slowness=1.0):
    """Return query, key, value, decay, strength and first states in fp32."""
    groups, shared, keys, values = SIZES[kind][name]
    tokens, heads = bounds[-1], groups * shared
    key = random_tensor(device, tokens, groups, keys)
    query = random_tensor(device, groups, tokens, keys).transpose(0, 1)  # other numbers, not dense
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
        *given, initial = tensors
        options = {"sequences": sequences, "implementation": implementation}
        return OPS[kind](*given, initial=initial, **options)

    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_packs(device, dtype, kind, name):
    sequences = Sequences(BOUNDS, device=device)
    agree(run(kind, sequences), inputs_of(device, kind, name), dtype, fp32_inputs=WIDE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_gentle_decays_over_many_chunks(device, dtype, kind):
    bounds = (0, sized(3000, 50))
    given = inputs_of(device, kind, "odd", bounds=bounds, slowness=0.01)
    agree(run(kind, Sequences(bounds, device=device)), given, dtype, fp32_inputs=WIDE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_splits_are_the_whole(device, dtype, kind):
    """Segments side by side, from S_ext and M, give what the sequence gives."""
    bounds, chunk = (0, sized(2000, 40)), sized(64, 16)
    sequences = Sequences(bounds, device=device)
    make = delta_recurrence if kind == "delta" else state_space_recurrence

    def call(*tensors, implementation):
        *given, initial = tensors
        return recur_split(
            make(implementation=implementation),
            RecurrenceInputs(*given),
            sequences,
            splits=3 if implementation == "triton" else 1,
            initial=initial,
            chunk=chunk,
        )

    given = inputs_of(device, kind, "odd", bounds=bounds, slowness=0.05)
    agree(call, given, dtype, fp32_inputs=WIDE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_keys_are_solved(device, dtype):
    """T then has ones beside zeros, which a series over rows would be a difference of millions."""
    bounds = (0, sized(200, 40))
    query, key, value, decay, _, initial = inputs_of(device, "delta", "odd", bounds=bounds)
    key = key[:1].expand_as(key)
    given = (query, key, value, decay * 0.05, torch.ones_like(decay), initial)
    agree(run("delta", Sequences(bounds, device=device)), given, dtype, fp32_inputs=WIDE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 52])
def test_what_a_token_adds_to_its_own_output(device, dtype, width):
    shape = sized((1500, 128, width), (33, 3, 5))
    given = (
        random_tensor(device, *shape),
        random_tensor(device, shape[1], shape[0], shape[2]).transpose(0, 1),
    )
    agree(add_skip, (*given, random_tensor(device, shape[1])), dtype, fp32_inputs=(2,))


def test_what_a_token_adds_is_one_pass_each_way(device):
    shape = sized((1500, 128, 64), (33, 3, 5))
    leaves = [random_tensor(device, *x).requires_grad_() for x in (shape, shape, shape[1:2])]
    pull = random_tensor(device, *shape)

    def forward():
        return add_skip(*leaves, implementation="triton")

    assert_launches(forward, {"add_skip_kernel": 1})
    assert_launches(
        lambda: torch.autograd.grad(forward(), leaves, pull),
        {"add_skip_kernel": 1, "add_skip_backward_kernel": 1},
        allowed=("copy", "sum"),  # the parts of the gradient of D
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_decays_that_are_no_numbers_give_none(device, dtype, kind):
    """A maximum of a number and of one that is none is the number on a GPU."""
    bounds = (0, 2, sized(300, 37))
    tensors = inputs_of(device, kind, "odd", bounds=bounds)
    tensors[3][5, 1] = torch.nan
    leaves = [x.to(dtype if i not in WIDE else x.dtype) for i, x in enumerate(tensors)]
    leaves = [x.detach().requires_grad_() for x in leaves]
    out, last = run(kind, Sequences(bounds, device=device))(*leaves, implementation="triton")
    assert out[5:, 1].isnan().all()
    assert last[1, 1].isnan().all()
    grads = torch.autograd.grad((out, last), leaves, (torch.ones_like(out), torch.ones_like(last)))
    for x in (out, last, *grads[2:]):  # of values, gates and states; heads share the others
        others = x[:, [0, 2]]
        assert others.isfinite().all()
    assert grads[5][1, 1].isnan().all()
    for number, grad in enumerate(grads):
        assert grad.isnan().any(), number
        firsts = grad[:1] if number == 5 else grad[:2]
        assert firsts.isfinite().all(), number  # of the sequence before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def test_kernels_of_forward_and_backward(device, dtype, kind):
    sequences = Sequences(BOUNDS, device=device)
    tensors = inputs_of(device, kind, "odd")
    leaves = [x.to(dtype if i not in WIDE else x.dtype) for i, x in enumerate(tensors)]
    leaves = [x.detach().requires_grad_() for x in leaves]

    def forward():
        return run(kind, sequences)(*leaves, implementation="triton")

    out, last = (torch.ones_like(x) for x in forward())  # what is made once is made now
    prepares = {"solve_kernel": 1} if kind == "delta" else {"decay_sums_kernel": 1}
    seen = 1 if kind == "ssd" and dtype == torch.float32 else 0
    prepares |= {"seen_kernel": 1} if seen else {}
    assert_launches(forward, prepares | {"sweep_kernel": 1})
    launched = {"reverse_sweep_kernel": 1, "recurrence_gradients_kernel": 1}
    launched |= {"seen_kernel": 1 + seen} if seen or kind == "delta" else {}
    make = delta_recurrence if kind == "delta" else state_space_recurrence
    prepared = make(implementation="triton").prepare(RecurrenceInputs(*leaves[:5]), sequences)
    if kernels.heads_per_program(prepared) < SIZES[kind]["odd"][1]:  # of a group
        launched["sum_units_kernel"] = 1
    assert_launches(
        lambda: torch.autograd.grad(forward(), leaves, (out, last)),
        prepares | {"sweep_kernel": 2} | launched,
        allowed=("copy",),
    )
