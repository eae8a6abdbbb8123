# SPDX-License-Identifier: Apache-2.0
"""Causal convolution against a loop over tokens and torch's own, carry, halo, and one step."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops import causal_conv1d as conv_op
from megatron.core.ops.causal_conv1d import causal_conv1d, causal_conv1d_step
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator

BOUNDS = {
    "one": (0, 9),
    "several": (0, 5, 6, 6, 8, 15),  # shorter than W-1, empty, and longer
    "long": (0, 70, 71, 150),
    "none": (0, 0),
}
CHANNELS = (3, 5)  # units, columns
BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-6}


def by_token(x, weight, bias, bounds, *, silu, initial):
    """Convolve token by token: each sees the rows before it, of its own sequence or carried."""
    width = weight.shape[-1]
    outs, lasts = [x[:0]], []
    for number, (first, end) in enumerate(itertools.pairwise(bounds)):
        held = list(
            torch.zeros(width - 1, *x.shape[1:]).to(x) if initial is None else initial[number]
        )
        for token in x[first:end]:
            held.append(token)
            out = sum(held[-width + j] * weight[..., j] for j in range(width))
            out = out if bias is None else out + bias
            outs.append((out * torch.sigmoid(out) if silu else out)[None])
        lasts.append(torch.stack(held[len(held) - width + 1 :]) if width > 1 else x[:0])
    return torch.cat(outs), torch.stack(lasts)


def inputs(width: int, bounds, *, bias: bool, initial: bool, seed: int = 1):
    """Return fp64 inputs, and a pull for each output."""
    source, count = generator(seed), len(bounds) - 1

    def random(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    found = {"x": random(bounds[-1], *CHANNELS), "weight": random(*CHANNELS, width)}
    if bias:
        found["bias"] = random(*CHANNELS)
    if initial:
        found["initial"] = random(count, width - 1, *CHANNELS)
    return found, (random(bounds[-1], *CHANNELS), random(count, width - 1, *CHANNELS))


def outcome(function, given, pulls, dtype):
    """Return outputs and the gradients of all inputs."""
    leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in given.items()}
    out, last = function(**leaves)
    pulled = [
        (y, g.to(y.dtype)) for y, g in zip((out, last), pulls, strict=True) if y.requires_grad
    ]
    torch.autograd.backward([y for y, _ in pulled], [g for _, g in pulled])
    found = {"out": out.detach(), "last": last.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is None or leaf.grad.dtype == dtype
        found[f"d_{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found


def compare(width, bounds, dtype, *, bias=True, initial=True, silu=True):
    """Compare outputs and gradients with the loop's in fp64."""
    given, pulls = inputs(width, bounds, bias=bias, initial=initial)
    given = {name: x.to(dtype).double() for name, x in given.items()}
    sequences = Sequences(bounds)

    def mcore_conv1d(x, weight, bias=None, initial=None):
        activation = "silu" if silu else None
        return causal_conv1d(
            x, weight, bias, sequences=sequences, activation=activation, initial=initial
        )

    def naive(x, weight, bias=None, initial=None):
        return by_token(x, weight, bias, bounds, silu=silu, initial=initial)

    wanted = outcome(naive, given, pulls, torch.float64)
    got = outcome(mcore_conv1d, given, pulls, dtype)
    zeros = [name for name, x in wanted.items() if not x.any()]
    assert bool(zeros) == (width == 1 or bounds[-1] == 0)
    assert_all_close(got, wanted, bound=BOUND[dtype], zeros=zeros)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_over_sequences_of_any_length(width, name):
    for bias, initial, silu in itertools.product([False, True], repeat=3):
        compare(width, BOUNDS[name], torch.float64, bias=bias, initial=initial, silu=silu)
    compare(width, BOUNDS[name], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype):
    for initial in (False, True):
        compare(4, BOUNDS["several"], dtype, initial=initial)


@pytest.mark.parametrize("name", ["several", "long"])
def test_blocks_of_rows_make_the_whole(name, monkeypatch):
    """Blocks shorter than the width, and longer; the last one is cut short."""
    for rows in (2, 7):
        monkeypatch.setattr(conv_op, "_CPU_BLOCK", rows * CHANNELS[0] * CHANNELS[1])
        compare(4, BOUNDS[name], torch.float64, bias=True, initial=True, silu=True)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_the_fast_convolution_is_the_plain_one():
    source = generator(2)
    rows = torch.randn(33, 20, generator=source)
    assert conv_op._has_fast_convolution(rows)
    for width, ahead in itertools.product([2, 3, 4], [False, True]):
        taps, bias = torch.randn(width, 20, generator=source), torch.randn(20, generator=source)
        fast = conv_op._convolved(rows, taps, bias, reverse=ahead)
        plain = conv_op._convolved(rows.double(), taps.double(), bias.double(), reverse=ahead)
        assert_all_close({"out": fast}, {"out": plain}, bound=1e-6)


def test_each_sequence_is_torchs_convolution_of_it():
    given, pulls = inputs(4, BOUNDS["long"], bias=True, initial=False)
    sequences = Sequences(BOUNDS["long"])

    def mcore_conv1d(**given):
        return causal_conv1d(**given, sequences=sequences)

    def torchs(x, weight, bias):
        outs = []
        for part in x.split(sequences.lengths):
            image = F.pad(part.flatten(1).t()[None], (3, 0))  # [1, c, 3 + t]
            kernel = weight.flatten(0, 1)[:, None]
            out = F.conv1d(image, kernel, bias.flatten(), groups=len(kernel))
            outs.append(out[0].t().unflatten(1, CHANNELS))
        lasts = [F.pad(part, (0, 0, 0, 0, 3, 0))[-3:] for part in x.split(sequences.lengths)]
        return torch.cat(outs), torch.stack(lasts)

    wanted = outcome(torchs, given, pulls, torch.float64)
    assert_all_close(outcome(mcore_conv1d, given, pulls, torch.float64), wanted, bound=1e-12)


def test_a_slice_of_wider_rows_is_as_good():
    given, _ = inputs(4, BOUNDS["several"], bias=False, initial=False)
    sequences = Sequences(BOUNDS["several"])
    for dtype in (torch.float64, torch.float32):
        x, weight = given["x"].to(dtype), given["weight"].to(dtype)
        wide = torch.cat([x, torch.full_like(x, torch.nan)], -1).requires_grad_()
        slice_ = wide[..., : CHANNELS[1]]
        assert not slice_.is_contiguous()
        out, last = causal_conv1d(slice_, weight, None, sequences=sequences, activation="silu")
        whole = causal_conv1d(x, weight, None, sequences=sequences, activation="silu")
        assert torch.equal(out, whole[0])
        assert torch.equal(last, whole[1])
        (grad,) = torch.autograd.grad(out.sum(), wide)
        assert not grad[..., CHANNELS[1] :].any()
        assert grad.isfinite().all()


def test_nothing_of_one_sequence_reaches_another():
    given, _ = inputs(4, BOUNDS["several"], bias=True, initial=True)
    for dtype, number in itertools.product((torch.float64, torch.float32), (0, 1, 3, 4)):
        bounds, sequences = BOUNDS["several"], Sequences(BOUNDS["several"])
        leaves = {name: x.to(dtype, copy=True) for name, x in given.items()}
        own = slice(bounds[number], bounds[number + 1])
        leaves["x"][own] = torch.nan
        leaves["initial"][number] = torch.nan
        x, initial = leaves["x"].requires_grad_(), leaves["initial"].requires_grad_()
        out, last = causal_conv1d(**leaves, sequences=sequences, activation="silu")
        d_x, d_initial = torch.autograd.grad((out.sum() + last.sum()), (x, initial))
        for found in (out, d_x):
            assert found[own].isnan().all()
            assert found.isnan().sum() == found[own].numel()
        assert last.isnan().sum() == last[number].numel() == last[number].isnan().sum()
        assert d_initial[torch.arange(5) != number].isfinite().all()


@pytest.mark.parametrize("length", range(10))
def test_a_sequence_cut_anywhere_goes_on_with_what_it_carried(length):
    given, _ = inputs(4, (0, length), bias=True, initial=True, seed=length + 3)
    sequences = Sequences((0, length))
    out, last = causal_conv1d(**given, sequences=sequences, activation="silu")
    for at in range(length + 1):
        carried, outs = given["initial"], []
        for part in given["x"].split([at, length - at]):
            y, carried = causal_conv1d(
                part,
                given["weight"],
                given["bias"],
                sequences=Sequences((0, len(part))),
                activation="silu",
                initial=carried,
            )
            outs.append(y)
        assert_all_close({"out": torch.cat(outs)}, {"out": out}, bound=1e-12) if length else None
        assert torch.equal(carried, last)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_steps_go_on_from_where_a_prefill_ended(width, dtype):
    given, _ = inputs(width, (0, 7, 9, 20), bias=True, initial=False)
    x, weight, bias = (given[name].to(dtype) for name in ("x", "weight", "bias"))
    ends = (7, 2, 11)
    parts = x.split(ends)
    whole, last = causal_conv1d(
        x, weight, bias, sequences=Sequences((0, 7, 9, 20)), activation="silu"
    )
    prompt = [2, 0, 5]  # tokens of each that a prefill takes
    _, carried = causal_conv1d(
        torch.cat([part[:n] for part, n in zip(parts, prompt, strict=True)]),
        weight,
        bias,
        sequences=Sequences((0, 2, 2, 7)),
    )
    slots = torch.tensor([4, 0, 2])
    state = torch.full((6, width - 1, *CHANNELS), torch.nan, dtype=dtype)
    state[slots] = carried
    for token in range(6):
        running = [n + token < end for n, end in zip(prompt, ends, strict=True)]
        now = torch.where(torch.tensor(running), slots, -1)
        held = state.clone()
        tokens = [
            part[n + token] if runs else torch.full(CHANNELS, torch.nan, dtype=dtype)
            for part, n, runs in zip(parts, prompt, running, strict=True)
        ]
        out = causal_conv1d_step(
            torch.stack(tokens), weight, bias, state=state, slots=now, activation="silu"
        )
        assert out.dtype == dtype
        for row, runs in enumerate(running):
            at = sum(ends[:row]) + prompt[row] + token
            wanted = whole[at] if runs else torch.zeros(CHANNELS, dtype=dtype)
            torch.testing.assert_close(out[row], wanted)
        others = [slot for slot in range(6) if slot not in now.tolist()]
        assert torch.equal(state[others].nan_to_num(7), held[others].nan_to_num(7))
    for row, (slot, end) in enumerate(zip(slots, ends, strict=True)):
        if prompt[row] + 6 >= end:
            assert torch.equal(state[slot], last[row])


def test_a_step_of_padding_alone_touches_nothing():
    state = torch.full((3, 3, *CHANNELS), torch.nan)
    state[1:] = torch.randn(2, 3, *CHANNELS)
    held = state.clone()
    x = torch.full((2, *CHANNELS), torch.nan)
    weight = torch.randn(*CHANNELS, 4)
    out = causal_conv1d_step(x, weight, None, state=state, slots=torch.tensor([-1, -1]))
    assert torch.equal(out, torch.zeros(2, *CHANNELS))
    assert torch.equal(state.nan_to_num(7), held.nan_to_num(7))
    empty = causal_conv1d_step(
        x[:0], weight, None, state=state, slots=torch.zeros(0, dtype=torch.int64)
    )
    assert empty.shape == (0, *CHANNELS)


def test_sequence_bounds_are_computed_once_for_all_layers():
    sequences = Sequences(BOUNDS["several"])
    x, weight = torch.randn(15, 4), torch.randn(4, 4)
    causal_conv1d(x, weight, None, sequences=sequences)
    made = dict(sequences._cache)
    causal_conv1d(x, weight, None, sequences=sequences)
    assert sequences._cache == made
    assert len(made) == 1


X, WEIGHT, ONE = torch.ones(5, 3), torch.ones(3, 4), Sequences((0, 5))
BAD = {
    "weight": (
        lambda: causal_conv1d(X, torch.ones(2, 4), None, sequences=ONE),
        "weight (2, 4) must be [*c, W] for the channels (3,) of x (5, 3)",
    ),
    "bias": (
        lambda: causal_conv1d(X, WEIGHT, torch.ones(4), sequences=ONE),
        "bias (4,) must be (3,)",
    ),
    "tokens": (
        lambda: causal_conv1d(X, WEIGHT, None, sequences=Sequences((0, 4))),
        "x (5, 3) has 5 tokens, the sequences 4",
    ),
    "initial": (
        lambda: causal_conv1d(X, WEIGHT, None, sequences=ONE, initial=torch.ones(1, 4, 3)),
        "initial (1, 4, 3) must be (1, 3, 3)",
    ),
    "activation": (
        lambda: causal_conv1d(X, WEIGHT, None, sequences=ONE, activation="gelu"),
        "activation='gelu' is unknown",
    ),
    "integers": (
        lambda: causal_conv1d(X.long(), WEIGHT, None, sequences=ONE),
        "dtype torch.int64",
    ),
    "state": (
        lambda: causal_conv1d_step(
            X, WEIGHT, None, state=torch.ones(6, 4, 3), slots=torch.arange(5)
        ),
        "state (6, 4, 3) must be [slots, *(3, 3)]",
    ),
    "slots": (
        lambda: causal_conv1d_step(
            X, WEIGHT, None, state=torch.ones(6, 3, 3), slots=torch.arange(4)
        ),
        "slots (4,) torch.int64 must be int64, one for each of 5 rows",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
