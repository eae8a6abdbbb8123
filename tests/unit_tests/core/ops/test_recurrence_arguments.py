# SPDX-License-Identifier: Apache-2.0
"""Errors for wrong arguments of recurrences, steps and convolutions name the fix."""

import pytest
import torch

from megatron.core.ops.recurrence import (
    causal_conv1d,
    causal_conv1d_step,
    gated_delta_rule,
    gated_delta_step,
    state_space_dual,
    state_space_step,
)
from megatron.core.ops.sequences import Sequences

FULL = {"delta": gated_delta_rule, "ssd": state_space_dual}
STEP = {"delta": gated_delta_step, "ssd": state_space_step}


def recurrence_inputs(heads=2, keys=3):
    tokens = torch.ones(4, heads, keys), torch.ones(4, heads, keys), torch.ones(4, 2, 5)
    return [*tokens, -torch.ones(4, 2), torch.ones(4, 2)]


def inputs_with_dtypes(**dtypes):
    """Return inputs, with some converted to another dtype."""
    names = ("query", "key", "value", "decay", "beta")
    return [
        x.to(dtypes.get(name, x.dtype)) for name, x in zip(names, recurrence_inputs(), strict=True)
    ]


WRONG = {
    "whole numbers": (
        inputs_with_dtypes(query=torch.int64, key=torch.int64, value=torch.int64),
        "value torch.int64; give all three in one floating-point dtype",
    ),
    "key": (inputs_with_dtypes(key=torch.bfloat16), "query is torch.float32, key torch.bfloat16"),
    "value": (
        inputs_with_dtypes(value=torch.float64),
        "value torch.float64; give all three in one",
    ),
    "decay": (
        inputs_with_dtypes(decay=torch.float16),
        "decay is torch.float16; make it torch.float32",
    ),
    "whole decay": (
        inputs_with_dtypes(decay=torch.int64),
        "decay is torch.int64; make it torch.float32",
    ),
    "beta": (inputs_with_dtypes(beta=torch.int64), "(beta|dt) is torch.int64; give a floating"),
    "no heads": (recurrence_inputs(heads=0), "with at least one head and one feature"),
    "no features": (recurrence_inputs(keys=0), "with at least one head and one feature"),
    "no value": (
        [x[..., :0] if x.shape[-1] == 5 else x for x in recurrence_inputs()],
        "value .* feature",
    ),
}


@pytest.mark.parametrize("op", FULL)
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_inputs_are_named(op, kind):
    inputs, message = WRONG[kind]
    with pytest.raises(ValueError, match=message):
        FULL[op](*inputs, sequences=Sequences((0, 4)))
    state, slots = torch.zeros(4, 2, inputs[1].shape[2], 5), torch.arange(4)
    with pytest.raises(ValueError, match=message):
        STEP[op](*inputs, state=state, slots=slots)


@pytest.mark.parametrize("op", FULL)
def test_gates_may_have_a_higher_precision(op):
    inputs = inputs_with_dtypes(decay=torch.float64, beta=torch.float64)
    out, _ = FULL[op](*inputs, sequences=Sequences((0, 4)))
    assert out.dtype == torch.float32
    assert torch.allclose(out, FULL[op](*recurrence_inputs(), sequences=Sequences((0, 4)))[0])


def test_sequences_are_required():
    for op in FULL.values():
        with pytest.raises(ValueError, match="sequences is a list: give Sequences"):
            op(*recurrence_inputs(), sequences=[0, 4])
    x, weight = torch.ones(4, 3), torch.ones(3, 2)
    with pytest.raises(ValueError, match="causal_conv1d: sequences is a tuple: give Sequences"):
        causal_conv1d(x, weight, None, sequences=(0, 4))
    with pytest.raises(ValueError, match=r"cu_seqlens \[0, 5.5\]: give integers"):
        Sequences([0, 5.5])
    with pytest.raises(ValueError, match=r"query .* has no tokens, the sequences 4"):
        state_space_dual(torch.ones(()), *recurrence_inputs()[1:], sequences=Sequences((0, 4)))


def test_convolution_slots_must_be_int64():
    state = torch.zeros(4, 1, 3)
    for slots in (torch.arange(4, dtype=torch.int32), torch.arange(3)):
        with pytest.raises(ValueError, match=r"slots .* must be int64, one for each of 4 rows"):
            causal_conv1d_step(torch.ones(4, 3), torch.ones(3, 2), None, state=state, slots=slots)
