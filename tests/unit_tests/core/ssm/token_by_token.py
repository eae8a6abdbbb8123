# SPDX-License-Identifier: Apache-2.0
"""Recurrences token by token, as the papers write them; autograd differentiates them."""

from __future__ import annotations

import torch

from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Sequences


def delta(state, q, k, v, decay, beta):
    """Update the state [H, K, V] of the gated delta rule with one token and read it."""
    state = decay.exp()[:, None, None] * state
    change = beta[:, None] * (v - (state * k[:, :, None]).sum(1))
    state = state + k[:, :, None] * change[:, None, :]
    return state, (state * q[:, :, None]).sum(1) * q.shape[1] ** -0.5


def dual(state, q, k, v, decay, dt):
    """Update the state [H, K, V] of Mamba-2 with one token and read it."""
    state = decay.exp()[:, None, None] * state
    state = state + k[:, :, None] * (dt[:, None] * v)[:, None, :]
    return state, (state * q[:, :, None]).sum(1)


STEPS = {"delta": delta, "dual": dual}


def run(kind: str, inputs: RecurrenceInputs, state: torch.Tensor):
    """Return (out [t, H, V], final state) of one sequence from a state [H, K, V]."""
    heads = inputs.value.shape[1]
    shared = heads // inputs.query.shape[1]
    query, key = (x.repeat_interleave(shared, dim=1) for x in inputs[:2])
    outs = []
    for token in zip(query, key, *inputs[2:], strict=True):
        state, out = STEPS[kind](state, *token)
        outs.append(out)
    return torch.stack(outs) if outs else inputs.value[:0], state


def run_all(kind: str, inputs: RecurrenceInputs, sequences: Sequences, initial_states=None):
    """Return (out [t, H, V], final states [N, H, K, V]) of all sequences."""
    outs, final_states = [], []
    for index, start in enumerate(sequences.bounds[:-1]):
        sequence_inputs = RecurrenceInputs(
            *(x[start : sequences.bounds[index + 1]] for x in inputs)
        )
        state = zeros(inputs, 1)[0] if initial_states is None else initial_states[index]
        out, final_state = run(kind, sequence_inputs, state)
        outs.append(out)
        final_states.append(final_state)
    return torch.cat(outs), torch.stack(final_states)


def zeros(inputs: RecurrenceInputs, count: int) -> torch.Tensor:
    """Return `count` states of zeros."""
    shape = (count, inputs.value.shape[1], inputs.key.shape[2], inputs.value.shape[2])
    return inputs.value.new_zeros(shape)
