# SPDX-License-Identifier: Apache-2.0
"""Causal convolution against a loop over tokens and torch's conv1d; carried states and steps."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.recurrence import causal_conv1d, naive
from megatron.core.ops.recurrence.convolution import cpu as conv_op
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import assert_all_close
from tests.support.inputs import generator

BOUNDS = {
    "one": (0, 9),
    "several": (0, 5, 6, 6, 8, 15),  # lengths below W-1, empty, and above
    "long": (0, 70, 71, 150),
    "none": (0, 0),
}
CHANNELS = (3, 5)  # units, columns
BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-6}


def inputs(width: int, bounds, *, bias: bool, initial: bool, seed: int = 1):
    """Return fp64 inputs and the gradient of each output."""
    source, count = generator(seed), len(bounds) - 1

    def random(*shape):
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    tensors = {"x": random(bounds[-1], *CHANNELS), "weight": random(*CHANNELS, width)}
    if bias:
        tensors["bias"] = random(*CHANNELS)
    if initial:
        tensors["initial"] = random(count, width - 1, *CHANNELS)
    return tensors, (random(bounds[-1], *CHANNELS), random(count, width - 1, *CHANNELS))


def run_with_gradients(function, inputs, grad_outputs, dtype):
    """Return the outputs and the gradients of all inputs."""
    leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in inputs.items()}
    out, final = function(**leaves)
    pairs = [
        (y, g.to(y.dtype))
        for y, g in zip((out, final), grad_outputs, strict=True)
        if y.requires_grad
    ]
    torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    tensors = {"out": out.detach(), "last": final.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is None or leaf.grad.dtype == dtype
        tensors[f"d_{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return tensors


def compare(width, bounds, dtype, *, bias=True, initial=True, silu=True):
    """Compare outputs and gradients with the loop over tokens in fp64."""
    tensors, grad_outputs = inputs(width, bounds, bias=bias, initial=initial)
    tensors = {name: x.to(dtype).double() for name, x in tensors.items()}
    sequences = Sequences(bounds)

    def mcore_conv1d(x, weight, bias=None, initial=None):
        activation = "silu" if silu else None
        return causal_conv1d(
            x, weight, bias, sequences=sequences, activation=activation, initial=initial
        )

    def equation(x, weight, bias=None, initial=None):
        return naive.causal_conv1d(
            x,
            weight,
            bias,
            sequences=sequences,
            activation="silu" if silu else None,
            initial=initial,
        )

    expected = run_with_gradients(equation, tensors, grad_outputs, torch.float64)
    actual = run_with_gradients(mcore_conv1d, tensors, grad_outputs, dtype)
    zeros = [name for name, x in expected.items() if not x.any()]
    assert bool(zeros) == (width == 1 or bounds[-1] == 0)
    assert_all_close(actual, expected, bound=BOUND[dtype], zeros=zeros)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_all_widths_and_sequence_lengths_match_naive(width, name):
    for bias, initial, silu in itertools.product([False, True], repeat=3):
        compare(width, BOUNDS[name], torch.float64, bias=bias, initial=initial, silu=silu)
    compare(width, BOUNDS[name], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp32_and_bf16_match_naive(dtype):
    for initial in (False, True):
        compare(4, BOUNDS["several"], dtype, initial=initial)


@pytest.mark.parametrize("name", ["several", "long"])
def test_row_blocks_match_naive(name, monkeypatch):
    """Blocks are shorter or longer than the kernel width; the last block is partial."""
    for rows in (2, 7):
        monkeypatch.setattr(conv_op, "_CPU_BLOCK", rows * CHANNELS[0] * CHANNELS[1])
        compare(4, BOUNDS[name], torch.float64, bias=True, initial=True, silu=True)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_fast_convolution_matches_plain_convolution():
    source = generator(2)
    rows = torch.randn(33, 20, generator=source)
    assert conv_op._has_fast_convolution(rows)
    for width, reverse in itertools.product([2, 3, 4], [False, True]):
        taps, bias = torch.randn(width, 20, generator=source), torch.randn(20, generator=source)
        fast = conv_op._convolved(rows, taps, bias, reverse=reverse)
        plain = conv_op._convolved(rows.double(), taps.double(), bias.double(), reverse=reverse)
        assert_all_close({"out": fast}, {"out": plain}, bound=1e-6)


def test_each_sequence_matches_torch_conv1d():
    tensors, grad_outputs = inputs(4, BOUNDS["long"], bias=True, initial=False)
    sequences = Sequences(BOUNDS["long"])

    def mcore_conv1d(**tensors):
        return causal_conv1d(**tensors, sequences=sequences)

    def torchs(x, weight, bias):
        outs = []
        for sequence in x.split(sequences.lengths):
            image = F.pad(sequence.flatten(1).t()[None], (3, 0))  # [1, c, 3 + t]
            kernel = weight.flatten(0, 1)[:, None]
            out = F.conv1d(image, kernel, bias.flatten(), groups=len(kernel))
            outs.append(out[0].t().unflatten(1, CHANNELS))
        final_states = [
            F.pad(sequence, (0, 0, 0, 0, 3, 0))[-3:] for sequence in x.split(sequences.lengths)
        ]
        return torch.cat(outs), torch.stack(final_states)

    expected = run_with_gradients(torchs, tensors, grad_outputs, torch.float64)
    assert_all_close(
        run_with_gradients(mcore_conv1d, tensors, grad_outputs, torch.float64),
        expected,
        bound=1e-12,
    )


def test_slice_of_wider_rows_matches_contiguous_input():
    tensors, _ = inputs(4, BOUNDS["several"], bias=False, initial=False)
    sequences = Sequences(BOUNDS["several"])
    for dtype in (torch.float64, torch.float32):
        x, weight = tensors["x"].to(dtype), tensors["weight"].to(dtype)
        padded = torch.cat([x, torch.full_like(x, torch.nan)], -1).requires_grad_()
        slice_ = padded[..., : CHANNELS[1]]
        assert not slice_.is_contiguous()
        out, final = causal_conv1d(slice_, weight, None, sequences=sequences, activation="silu")
        expected = causal_conv1d(x, weight, None, sequences=sequences, activation="silu")
        assert torch.equal(out, expected[0])
        assert torch.equal(final, expected[1])
        (grad,) = torch.autograd.grad(out.sum(), padded)
        assert not grad[..., CHANNELS[1] :].any()
        assert grad.isfinite().all()


def test_nan_in_one_sequence_does_not_reach_another():
    tensors, _ = inputs(4, BOUNDS["several"], bias=True, initial=True)
    for dtype, number in itertools.product((torch.float64, torch.float32), (0, 1, 3, 4)):
        bounds, sequences = BOUNDS["several"], Sequences(BOUNDS["several"])
        leaves = {name: x.to(dtype, copy=True) for name, x in tensors.items()}
        tokens = slice(bounds[number], bounds[number + 1])
        leaves["x"][tokens] = torch.nan
        leaves["initial"][number] = torch.nan
        x, initial = leaves["x"].requires_grad_(), leaves["initial"].requires_grad_()
        out, final = causal_conv1d(**leaves, sequences=sequences, activation="silu")
        d_x, d_initial = torch.autograd.grad((out.sum() + final.sum()), (x, initial))
        for output in (out, d_x):
            assert output[tokens].isnan().all()
            assert output.isnan().sum() == output[tokens].numel()
        assert final.isnan().sum() == final[number].numel() == final[number].isnan().sum()
        assert d_initial[torch.arange(5) != number].isfinite().all()


@pytest.mark.parametrize("length", range(10))
def test_split_sequence_continues_from_its_state(length):
    tensors, _ = inputs(4, (0, length), bias=True, initial=True, seed=length + 3)
    sequences = Sequences((0, length))
    out, final = causal_conv1d(**tensors, sequences=sequences, activation="silu")
    for cut in range(length + 1):
        state, outs = tensors["initial"], []
        for tokens in tensors["x"].split([cut, length - cut]):
            y, state = causal_conv1d(
                tokens,
                tensors["weight"],
                tensors["bias"],
                sequences=Sequences((0, len(tokens))),
                activation="silu",
                initial=state,
            )
            outs.append(y)
        assert_all_close({"out": torch.cat(outs)}, {"out": out}, bound=1e-12) if length else None
        assert torch.equal(state, final)


def test_sequence_bounds_are_computed_once_for_all_layers():
    sequences = Sequences(BOUNDS["several"])
    x, weight = torch.randn(15, 4), torch.randn(4, 4)
    causal_conv1d(x, weight, None, sequences=sequences)
    cached = dict(sequences._cache)
    causal_conv1d(x, weight, None, sequences=sequences)
    assert sequences._cache == cached
    assert len(cached) == 1


X, WEIGHT, SEQUENCES = torch.ones(5, 3), torch.ones(3, 4), Sequences((0, 5))
BAD = {
    "weight": (
        lambda: causal_conv1d(X, torch.ones(2, 4), None, sequences=SEQUENCES),
        "weight (2, 4) must be [*c, W] for the channels (3,) of x (5, 3)",
    ),
    "bias": (
        lambda: causal_conv1d(X, WEIGHT, torch.ones(4), sequences=SEQUENCES),
        "bias (4,) must be (3,)",
    ),
    "tokens": (
        lambda: causal_conv1d(X, WEIGHT, None, sequences=Sequences((0, 4))),
        "x (5, 3) has 5 tokens, the sequences 4",
    ),
    "initial": (
        lambda: causal_conv1d(X, WEIGHT, None, sequences=SEQUENCES, initial=torch.ones(1, 4, 3)),
        "initial (1, 4, 3) must be (1, 3, 3)",
    ),
    "activation": (
        lambda: causal_conv1d(X, WEIGHT, None, sequences=SEQUENCES, activation="gelu"),
        "activation='gelu' is unknown",
    ),
    "integers": (
        lambda: causal_conv1d(X.long(), WEIGHT, None, sequences=SEQUENCES),
        "dtype torch.int64",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
