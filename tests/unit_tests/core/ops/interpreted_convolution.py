# SPDX-License-Identifier: Apache-2.0
"""The kernels of causal convolution in Triton's interpreter against the reference in fp64.

Run by `test_triton.py` in a process of its own. Tiles are so small that sequences begin and end at,
before and behind every border of a program.
"""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.causal_conv1d import causal_conv1d, causal_conv1d_step
from megatron.core.ops.causal_conv1d import triton as kernels
from megatron.core.ops.launches import Launches
from megatron.core.ops.sequences import Sequences
from tests.support.gpu_agreement import agree
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory

BOUND = {torch.float32: 1e-5}
LIMITS = {"num_warps": 1, "num_stages": 1}
PACKS = {
    "one": (0, 9),
    "several": (0, 5, 6, 6, 8, 15),  # shorter than W-1, empty, and longer
    "many": (0, 0, 1, 3, 3, 7, 12, 13, 15, 16, 16, 16, 20, 20),
    "none": (0, 0, 0),
}
CHANNELS, UNITS = (5,), (2, 5)  # of a token, and of units of it


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Use tiles of few tokens and channels."""
    monkeypatch.setattr(kernels, "FORWARD", Launches("f", {"BLOCK_T": 8, "BLOCK_C": 4, **LIMITS}))
    tile = {"GROUP": 2, "AHEAD": 3, "BLOCK_C": 8, **LIMITS}
    monkeypatch.setattr(kernels, "BACKWARD", Launches("b", tile))
    monkeypatch.setattr(kernels, "LAST", Launches("l", {"BLOCK_T": 2, "BLOCK_C": 8, **LIMITS}))
    monkeypatch.setattr(kernels, "STEP", Launches("s", {"BLOCK_C": 4, **LIMITS}))
    monkeypatch.setattr(kernels, "BACKWARD_TOKENS", 5)


def given(width: int, bounds, *, bias: bool = True, initial: bool = True, channels=UNITS):
    """Return x, weight, and bias and initial rows where there are any."""
    random = generator(width + bounds[-1])
    shapes = [(bounds[-1], *channels), (*channels, width)]
    shapes += [channels] * bias + [(len(bounds) - 1, width - 1, *channels)] * initial
    return [torch.randn(shape, generator=random) for shape in shapes]


def convolution(bounds, *, bias: bool = True, silu: bool = True, outputs=slice(None)):
    """Return a function of the tensors that are given, with these outputs alone."""

    def call(x, weight, *rest, implementation):
        rest = list(rest)
        out = causal_conv1d(
            x,
            weight,
            rest.pop(0) if bias else None,
            sequences=Sequences(bounds),
            activation="silu" if silu else None,
            initial=rest.pop(0) if rest else None,
            implementation=implementation,
        )
        return out[outputs]

    return call


def compare(width, bounds, *, bias=True, initial=True, silu=True, outputs=slice(None)):
    """Compare outputs and all gradients with the reference's in fp64."""
    function = convolution(bounds, bias=bias, silu=silu, outputs=outputs)
    inputs = given(width, bounds, bias=bias, initial=initial, channels=CHANNELS)
    agree(function, inputs, torch.float32, bounds=BOUND)


@pytest.mark.parametrize("pack", ["several", "none"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_widths(width, pack):
    compare(width, PACKS[pack])


@pytest.mark.parametrize(
    ("bias", "initial", "silu"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, False)],
)
def test_flags(bias, initial, silu):
    compare(3, PACKS["several"], bias=bias, initial=initial, silu=silu)


def test_a_long_sequence():
    compare(4, (0, 49, 50, 65))


@pytest.mark.parametrize("share", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_programs_that_begin_anywhere(share, monkeypatch):
    monkeypatch.setattr(kernels, "BACKWARD_TOKENS", share)
    monkeypatch.setattr(
        kernels, "BACKWARD", Launches("b", {"GROUP": 1, "AHEAD": 1, "BLOCK_C": 8, **LIMITS})
    )
    compare(4, PACKS["many"])


def test_few_programs_take_many_tokens_each(monkeypatch):
    monkeypatch.setattr(kernels, "BACKWARD_PROGRAMS", 4)
    compare(4, PACKS["many"])


@pytest.mark.parametrize("output", [0, 1])
def test_one_output_may_have_no_gradient(output):
    """The other gets none: of `last` alone, weights have the gradient of nothing."""
    bounds = PACKS["several"]
    inputs = given(4, bounds, channels=CHANNELS)
    results = []
    for implementation, kind in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in inputs]
        with nan_memory():
            y = convolution(bounds)(*leaves, implementation=implementation)[output]
            y.backward(torch.ones_like(y) * 0.5)
        results.append([leaf.grad for leaf in leaves])
    for mine, true in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)


def test_channels_of_three_dimensions():
    bounds = PACKS["several"]
    inputs = given(4, bounds, channels=(2, 1, 4))
    agree(convolution(bounds), inputs, torch.float32, bounds=BOUND)


@pytest.mark.parametrize(("before", "behind", "step"), [(4, 7, 16), (2, 5, 2), (3, 4, 1)])
def test_slices_of_wider_units_are_read_in_place(before, behind, step):
    """Units are `before + 5 + behind` columns apart."""
    bounds = PACKS["one"]
    x, *rest = given(4, bounds)
    wide = torch.full((*x.shape[:2], before + 5 + behind), torch.nan)
    wide[..., before : before + 5] = x
    cut = wide[..., before : before + 5]
    steps = kernels._Call.of(cut, *rest).x
    assert steps.step == step
    assert (steps.base.data_ptr() % 16, steps.offset * steps.step) == (0, before % 4)
    assert steps.inner * steps.step == before + 5 + behind

    def of_slice(wide, *rest, implementation):
        inner = wide[..., before : before + 5]
        return convolution(bounds)(inner, *rest, implementation=implementation)

    agree(of_slice, [wide, *rest], torch.float32, bounds=BOUND)


@pytest.mark.parametrize("number", [1, 3])
def test_nothing_of_one_sequence_reaches_another(number):
    bounds = PACKS["several"]
    x, weight, bias, initial = given(4, bounds, channels=CHANNELS)
    own = slice(bounds[number], bounds[number + 1])
    x[own], initial[number] = torch.nan, torch.nan
    x.requires_grad_()
    initial.requires_grad_()
    out, last = convolution(bounds)(x, weight, bias, initial, implementation="triton")
    d_x, d_initial = torch.autograd.grad(out.sum() + last.sum(), (x, initial))
    for found in (out, d_x):
        assert found[own].isnan().all()
        assert found.isnan().sum() == found[own].numel()
    assert last.isnan().sum() == last[number].numel() == last[number].isnan().sum()
    assert d_initial[torch.arange(len(initial)) != number].isfinite().all()


@pytest.mark.parametrize(("width", "bias"), [(1, True), (2, False), (4, True)])
def test_steps(width, bias):
    """Rows of slot -1 and slots that no row names hold NaN, and keep it to themselves."""
    x, weight, *rest = given(width, (0, 5), bias=bias, initial=False)
    wide = torch.cat([torch.full_like(x, torch.nan), x], -1)
    slots = torch.tensor([3, -1, 0, 6, -1])
    wide[slots < 0] = torch.nan
    state = torch.randn(8, width - 1, *UNITS, generator=generator(3))
    state[[1, 2, 4, 5, 7]] = torch.nan
    found = []
    for implementation in ("triton", "reference"):
        held = state.clone()
        out = causal_conv1d_step(
            wide[..., UNITS[1] :],
            weight,
            rest[0] if bias else None,
            state=held,
            slots=slots,
            activation="silu",
            implementation=implementation,
        )
        found.append((out, held))
    (mine, mine_held), (other, other_held) = found
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    assert not mine[slots < 0].any()
    assert torch.equal(mine_held.nan_to_num(7), other_held.nan_to_num(7))


def test_a_step_writes_in_place_or_not_at_all():
    x, weight = given(4, (0, 2), bias=False, initial=False)
    state = torch.zeros(3, 3, *UNITS[::-1]).transpose(2, 3)
    with pytest.raises(ValueError, match="the channels of a row must be dense"):
        causal_conv1d_step(
            x, weight, None, state=state, slots=torch.arange(2), implementation="triton"
        )


def test_marks_are_made_once_for_all_layers():
    sequences = Sequences(PACKS["several"])
    x, weight = given(4, PACKS["several"], bias=False, initial=False)
    for _ in range(2):
        causal_conv1d(x, weight, None, sequences=sequences, implementation="triton")
        made = dict(sequences._made)
        assert list(made) == ["marks"]
    assert sequences._made["marks"] is made["marks"]
    assert made["marks"].after.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 0, 1, 2, 3, 4, 5, 6]
    assert made["marks"].number.tolist() == [0] * 5 + [1] + [3] * 2 + [4] * 7
