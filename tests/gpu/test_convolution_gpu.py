# SPDX-License-Identifier: Apache-2.0
"""Causal convolution, gated norms and lengths on the GPU against the references in fp64 there."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.ops.causal_conv1d import causal_conv1d, causal_conv1d_step
from megatron.core.ops.gated_rms_norm import GATE_FIRST, NORM_FIRST, gated_rms_norm
from megatron.core.ops.l2norm import l2norm
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import BOUND, DTYPES, agree, made, sized
from tests.support.launch_kernels import assert_launches

pytestmark = pytest.mark.gpu

#: Units of Qwen3-Next: 512 convolved columns of 772, of which the last 256 are the gate.
UNITS, COLUMNS, APART = sized((16, 512, 772), (2, 5, 12))
BOUNDS = sized(
    (0, 2000, 2001, 2001, 2003, 4096, 4099, 4603, 5000),  # empty, and shorter than W-1
    (0, 20, 21, 21, 23, 41),
)
CONVOLUTION = {
    "silu": {},
    "nothing": {"activation": None},
    "bias": {"bias": True},
    "initial": {"initial": True},
    "two taps, all": {"bias": True, "initial": True, "width": 2},
    "one tap": {"width": 1},
    "one sequence": {"bounds": (0, BOUNDS[-1]), "initial": True},
}


def convolution(device, *, width=4, bias=False, initial=False, bounds=BOUNDS, activation="silu"):
    """Return a convolution of a slice of wider units, and its inputs."""
    sequences = Sequences(bounds, device=device)
    inputs = [made(device, bounds[-1], UNITS, APART), made(device, UNITS, COLUMNS, width)]
    inputs += [made(device, UNITS, COLUMNS)] * bias
    inputs += [made(device, sequences.count, width - 1, UNITS, COLUMNS)] * initial

    def call(wide, weight, *rest, implementation):
        return causal_conv1d(
            wide[..., :COLUMNS],
            weight,
            rest[0] if bias else None,
            sequences=sequences,
            activation=activation,
            initial=rest[-1] if initial else None,
            implementation=implementation,
        )

    return call, inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CONVOLUTION)
def test_convolution(device, dtype, case):
    agree(*convolution(device, **CONVOLUTION[case]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution_of_many_short_sequences(device, dtype):
    count, channels = sized((100_000, 64), (30, 3))
    lengths = [number % 7 for number in range(count)]
    sequences = Sequences((0, *itertools.accumulate(lengths)), device=device)
    inputs = (
        made(device, sequences.tokens, channels),
        made(device, channels, 4),
        made(device, count, 3, channels),
    )

    def call(x, weight, initial, implementation):
        return causal_conv1d(
            x, weight, None, sequences=sequences, initial=initial, implementation=implementation
        )

    agree(call, inputs, dtype)


def test_launches_of_a_convolution(device):
    """Beside the kernels: taps are transposed, so is their gradient, and partial sums added up."""
    _, (wide, weight) = convolution(device)
    x = wide.to(DTYPES[-1])[..., :COLUMNS].requires_grad_()
    weight = weight.to(DTYPES[-1]).requires_grad_()
    sequences = Sequences(BOUNDS, device=device)

    def forward():
        return causal_conv1d(
            x, weight, None, sequences=sequences, activation="silu", implementation="triton"
        )[0]

    pull = torch.ones_like(forward())
    kernels = {"convolution_forward_kernel": 1, "convolution_last_kernel": 1}
    assert_launches(forward, kernels, allowed=("copy",))
    kernels["convolution_backward_kernel"] = 1
    assert_launches(
        lambda: torch.autograd.grad(forward(), (x, weight), pull), kernels, allowed=("copy", "sum")
    )


def test_a_step_is_one_kernel(device):
    """Beside it taps are transposed."""
    rows, dtype = sized(200, 5), DTYPES[-1]
    x = made(device, rows, UNITS, APART).to(dtype)[..., :COLUMNS]
    weight, bias = made(device, UNITS, COLUMNS, 4).to(dtype), made(device, UNITS, COLUMNS).to(dtype)
    state = made(device, rows, 3, UNITS, COLUMNS).to(dtype)
    slots = torch.arange(rows, device=device).flip(0)

    def step():
        options = {"state": state, "slots": slots, "activation": "silu"}
        return causal_conv1d_step(x, weight, bias, implementation="triton", **options)

    assert_launches(step, {"convolution_step_kernel": 1}, allowed=("copy",))


def test_a_convolution_is_the_same_every_time(device):
    call, inputs = convolution(device, bias=True, initial=True)
    leaves = [x.to(DTYPES[-1]).requires_grad_() for x in inputs]
    runs = []
    for _ in range(2):
        outputs = call(*leaves, implementation="triton")
        pulls = [torch.ones_like(y) for y in outputs]
        runs.append([*outputs, *torch.autograd.grad(outputs, leaves, pulls)])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_steps(device, dtype, width):
    """Padding rows and slots that nobody names hold NaN, and keep it."""
    rows, slots_in_all = sized((200, 513), (5, 9))
    slots = torch.randperm(slots_in_all, device=device)[:rows]
    slots[::3] = -1
    wide = made(device, rows, UNITS, APART).to(dtype)
    wide[slots < 0] = torch.nan
    weight, bias = made(device, UNITS, COLUMNS, width), made(device, UNITS, COLUMNS)
    state = made(device, slots_in_all, width - 1, UNITS, COLUMNS).to(dtype)
    named = torch.zeros(slots_in_all, dtype=torch.bool, device=device)
    named[slots[slots >= 0]] = True
    state[~named] = torch.nan
    held = state.clone()

    def step(state, x, implementation):
        return causal_conv1d_step(
            x[..., :COLUMNS],
            weight.to(x.dtype),
            bias.to(x.dtype),
            state=state,
            slots=slots,
            activation="silu",
            implementation=implementation,
        )

    weight, bias = weight.to(dtype), bias.to(dtype)
    out = step(state, wide, "triton")
    true = held.double()
    expected = step(true, wide.double(), "reference")
    assert_close_by_metric("out", out, expected, bound=BOUND[dtype])
    assert not out[slots < 0].any()
    assert torch.equal(state.double().nan_to_num(7), true.nan_to_num(7))


ORDERS = pytest.mark.parametrize("order", [NORM_FIRST, GATE_FIRST])
#: Values of a unit and heads of them; the gate begins 516 columns into a unit, and is no multiple
#: of 16 bytes from anything.
HEADS, VALUES, BEFORE = sized((2, 128, 516), (2, 6, 3))


def gated_inputs(device, tokens: int, rows: int, *weight: int):
    """Return x [t, u, r, V], whole units [rows, u, w], and a weight."""
    units = made(device, rows, UNITS, BEFORE + HEADS * VALUES)
    return made(device, tokens, UNITS, HEADS, VALUES), units, made(device, *weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("places", [False, True])
@ORDERS
def test_gated_norms_of_heads(device, dtype, order, places):
    rows = sized(3001, 7)
    tokens = rows - rows // 5 if places else rows
    order_of_rows = None
    if places:
        order_of_rows = torch.full((rows,), -1, device=device)
        real = torch.randperm(rows, device=device)[:tokens]
        order_of_rows[real] = torch.arange(tokens, device=device)

    def call(x, units, weight, implementation):
        return gated_rms_norm(
            x,
            units[..., BEFORE:].unflatten(-1, (HEADS, VALUES)),
            weight,
            eps=1e-6,
            order=order,
            places=order_of_rows,
            implementation=implementation,
        )

    agree(call, gated_inputs(device, tokens, rows, VALUES), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", sized((64, 1024, 5120, 8192), (6, 70)))
@ORDERS
def test_gated_norms_of_groups(device, dtype, order, features):
    rows, groups = sized((1003, 3), (3, 2))
    shape = rows, groups * features
    inputs = made(device, *shape), made(device, *shape) * 3, made(device, shape[1])

    def call(*inputs, implementation):
        options = {"eps": 1e-6, "order": order, "group_size": features}
        return gated_rms_norm(*inputs, implementation=implementation, **options)

    agree(call, inputs, dtype)


def test_launches_of_a_gated_norm(device):
    rows = sized(999, 3)
    x, units, weight = (z.to(DTYPES[-1]) for z in gated_inputs(device, rows, rows, VALUES))
    gate = units[..., BEFORE:].unflatten(-1, (HEADS, VALUES))
    leaves = [z.requires_grad_() for z in (x, gate, weight)]
    pull = torch.ones_like(x)

    def both():
        y = gated_rms_norm(*leaves, eps=1e-6, implementation="triton")
        return torch.autograd.grad(y, leaves, pull)

    expected = {"gated_norm_forward_kernel": 1, "gated_norm_backward_kernel": 1}
    assert_launches(both, expected, allowed=("sum", "copy"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", sized((64, 128, 192, 256), (5, 16)))
def test_lengths(device, dtype, features):
    wide = made(device, sized(3001, 5), sized(8, 2), 3 * features + 4)

    def call(wide, implementation):
        return l2norm(wide[..., 4 : 4 + features], implementation=implementation)

    agree(call, (wide,), dtype)


def test_lengths_take_a_kernel_each_way(device):
    wide = made(device, sized(999, 5), 2, sized(772, 12)).to(DTYPES[-1])
    x = wide[..., 4 : sized(132, 9)].requires_grad_()
    pull = torch.ones_like(x)

    def both():
        return torch.autograd.grad(l2norm(x, implementation="triton"), x, pull)

    assert_launches(both, {"l2norm_forward_kernel": 1, "l2norm_backward_kernel": 1})


@pytest.mark.machine
def test_places_beyond_32_bits(device):
    """Tokens that are more than 2^31 elements into x are held to the same ones by themselves."""
    channels, tail = 8192, 1000
    tokens = (1 << 31) // channels + 2 * tail
    sequences = Sequences((0, 5, tokens), device=device)
    x = torch.randn(tokens, channels, device=device, dtype=torch.bfloat16)
    weight = torch.randn(channels, 4, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    weight.requires_grad_()
    out, last = causal_conv1d(x, weight, None, sequences=sequences, activation="silu")
    pull = torch.zeros_like(out)
    pull[-tail:] = torch.randn(tail, channels, device=device).bfloat16()
    d_x, d_weight = torch.autograd.grad(out, (x, weight), pull)

    own = x[-tail:].detach().double().requires_grad_()
    wide = weight.detach().double().requires_grad_()
    before = x[-tail - 3 : -tail].detach().double()[None]
    options = {"sequences": Sequences((0, tail), device=device), "activation": "silu"}
    true, _ = causal_conv1d(own, wide, None, initial=before, **options)
    d_own, d_wide = torch.autograd.grad(true, (own, wide), pull[-tail:].double())
    bound = BOUND[torch.bfloat16]
    assert_close_by_metric("out", out[-tail:], true, bound=bound)
    assert_close_by_metric("d_x", d_x[-tail:], d_own, bound=bound)
    assert_close_by_metric("d_weight", d_weight, d_wide, bound=bound)
    assert torch.equal(last[1], x[-3:])
    del d_x, d_weight, last

    gate, scale = out.detach(), torch.randn(128, device=device)
    shape = (tokens, channels // 128, 128)
    y = gated_rms_norm(x.detach().view(shape), gate.view(shape), scale, eps=1e-6)
    wanted = gated_rms_norm(
        x[-tail:].detach().double().view(-1, *shape[1:]),
        gate[-tail:].double().view(-1, *shape[1:]),
        scale.double(),
        eps=1e-6,
    )
    assert_close_by_metric("y", y[-tail:], wanted, bound=bound)
