# SPDX-License-Identifier: Apache-2.0
"""A decay of -inf in the gated delta rule resets the state at its token and nowhere else."""

import pytest
import torch

from megatron.core.ops.recurrence import RecurrenceInputs, gated_delta_step
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import relative_error
from tests.unit_tests.core.ops.test_gated_delta_rule import (
    chunked,
    make_inputs,
    naive,
    outputs_and_gradients,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [-torch.inf, -3e38])
def test_decay_of_minus_infinity_resets_the_state(decay, dtype):
    sequences = Sequences((0, 29))
    inputs, initial = make_inputs(sequences, dtype=dtype)
    resets = torch.zeros(29, 4, dtype=torch.bool)
    for head, tokens in enumerate([(0, 28), (7, 8), (12, 13), ()]):
        resets[list(tokens), head] = True
    rates = inputs.decay.detach().masked_fill(resets, decay)
    inputs = inputs._replace(decay=rates.requires_grad_())
    actual = outputs_and_gradients(chunked(sequences), inputs, initial)
    fp64_inputs = RecurrenceInputs(*(x.detach().double().requires_grad_() for x in inputs))
    fp64_initial = initial.detach().double().requires_grad_()
    expected = outputs_and_gradients(lambda i, s: naive(i, sequences, s), fp64_inputs, fp64_initial)
    bound = 1e-5 if dtype == torch.float32 else 1e-12
    for name, tensor in expected.items():
        assert relative_error(actual[name], tensor) <= bound, name
    assert not actual["decay"][resets].any()
    assert actual["decay"][~resets].all()


def test_decay_of_minus_infinity_in_a_step_resets_the_state():
    sequence = Sequences((0, 1))
    inputs, initial = make_inputs(sequence)
    inputs.decay.data[0, ::2] = -torch.inf
    expected, final = naive(inputs, sequence, initial)
    state = initial.detach().clone()
    out = gated_delta_step(*inputs, state=state, slots=torch.tensor([0]))
    assert relative_error(out, expected) <= 1e-12
    assert relative_error(state, final) <= 1e-12
