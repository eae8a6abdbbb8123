# SPDX-License-Identifier: Apache-2.0
"""A decay of -inf in the gated delta rule: its token forgets everything, and nothing else does."""

import pytest
import torch

from megatron.core.ops.gated_delta_rule import gated_delta_step
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Sequences
from tests.support.closeness import relative_error
from tests.unit_tests.core.ops.test_gated_delta_rule import chunked, make_inputs, naive, results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [-torch.inf, -3e38])
def test_a_token_may_forget_everything(decay, dtype):
    sequences = Sequences((0, 29))
    inputs, initial = make_inputs(sequences, dtype=dtype)
    forgets = torch.zeros(29, 4, dtype=torch.bool)
    for head, tokens in enumerate([(0, 28), (7, 8), (12, 13), ()]):
        forgets[list(tokens), head] = True
    rates = inputs.decay.detach().masked_fill(forgets, decay)
    inputs = inputs._replace(decay=rates.requires_grad_())
    got = results(chunked(sequences), inputs, initial)
    wide = RecurrenceInputs(*(x.detach().double().requires_grad_() for x in inputs))
    states = initial.detach().double().requires_grad_()
    wanted = results(lambda i, s: naive(i, sequences, s), wide, states)
    bound = 1e-5 if dtype == torch.float32 else 1e-12
    for name, tensor in wanted.items():
        assert relative_error(got[name], tensor) <= bound, name
    assert not got["decay"][forgets].any()
    assert got["decay"][~forgets].all()


def test_a_step_may_forget_everything():
    row = Sequences((0, 1))
    inputs, initial = make_inputs(row)
    inputs.decay.data[0, ::2] = -torch.inf
    wanted, last = naive(inputs, row, initial)
    state = initial.detach().clone()
    out = gated_delta_step(*inputs, state=state, slots=torch.tensor([0]))
    assert relative_error(out, wanted) <= 1e-12
    assert relative_error(state, last) <= 1e-12
