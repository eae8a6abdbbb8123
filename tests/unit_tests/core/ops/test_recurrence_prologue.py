# SPDX-License-Identifier: Apache-2.0
"""The prologue of recurrences, and its L2 norm, in plain torch against their equations."""

from functools import partial

import pytest
import torch

from megatron.core.ops.recurrence import PrologueWeights, UnitLayout, naive, recurrence_prologue
from megatron.core.ops.recurrence.prologue.cpu import l2norm
from megatron.core.ops.sequences import Sequences
from tests.unit_tests.core.ops.formulas import compare, maker


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_l2norm_matches_its_formula(dtype, eps):
    x = maker()(6, 3, 11)
    x[2] *= 1e-3  # near sqrt(eps), so eps matters
    compare(lambda x: l2norm(x, eps), lambda x: naive.l2norm(x, eps), (x,), dtype)


def test_l2norm_of_slice_matches_contiguous_input():
    x = maker()(5, 2, 20)
    assert torch.equal(l2norm(x[..., 3:11]), l2norm(x[..., 3:11].contiguous()))


def test_l2norm_of_zeros_has_finite_gradients():
    x = torch.zeros(3, 4, requires_grad=True)
    y = l2norm(x)
    y.sum().backward()
    assert not y.any()
    assert (x.grad - 1e3).abs().max() < 1e-3


def test_bad_l2norm_arguments_are_refused():
    with pytest.raises(ValueError, match=r"eps=-1\.0 must not be negative"):
        l2norm(torch.zeros(3), -1.0)
    with pytest.raises(ValueError, match="give vectors of floats"):
        l2norm(torch.zeros(3, dtype=torch.int64))


UNITS = {
    "delta": UnitLayout.delta(3, 5, 4),
    "state space": UnitLayout.state_space(2, 6, 4, (0.2, 0.9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", UNITS)
def test_prologue_matches_its_equations(dtype, name):
    unit, bounds, make = UNITS[name], (0, 1, 1, 3, 12), maker()
    channels, sequences = unit.conv_channels, Sequences(bounds)
    inputs = (
        make(12, 2, unit.width + 3)[..., 1:-2],
        make(2, channels, 4),
        make(2, channels),
        make(2 * unit.heads) / 2,
        make(2 * unit.heads),
        make(4, 3, 2, channels),
    )

    def run(prologue, source, weight, bias, a_log, dt_bias, initial):
        weights = PrologueWeights(weight, bias, a_log, dt_bias)
        options = {"unit": unit, "sequences": sequences, "initial": initial}
        outputs, final_rows = prologue(source, weights, **options)
        rows.append(final_rows)
        return tuple(outputs)

    rows: list[torch.Tensor] = []
    compare(
        partial(run, partial(recurrence_prologue, return_conv_state=True)),
        partial(run, naive.prologue),
        inputs,
        dtype,
    )
    assert torch.equal(rows[0], rows[1].to(dtype))
