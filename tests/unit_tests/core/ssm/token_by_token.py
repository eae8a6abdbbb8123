# SPDX-License-Identifier: Apache-2.0
"""Recurrences token by token, as they are written in papers; autograd differentiates them."""

from __future__ import annotations

import torch

from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Sequences


def delta(state, q, k, v, decay, strength):
    """Take a token into the state [H, K, V] of the gated delta rule and read it."""
    state = decay.exp()[:, None, None] * state
    change = strength[:, None] * (v - (state * k[:, :, None]).sum(1))
    state = state + k[:, :, None] * change[:, None, :]
    return state, (state * q[:, :, None]).sum(1) * q.shape[1] ** -0.5


def dual(state, q, k, v, decay, strength):
    """Take a token into the state [H, K, V] of Mamba-2 and read it."""
    state = decay.exp()[:, None, None] * state
    state = state + k[:, :, None] * (strength[:, None] * v)[:, None, :]
    return state, (state * q[:, :, None]).sum(1)


STEPS = {"delta": delta, "dual": dual}


def run(kind: str, inputs: RecurrenceInputs, state: torch.Tensor):
    """Return (out [t, H, V], last state) of one sequence from a state [H, K, V]."""
    heads = inputs.value.shape[1]
    shared = heads // inputs.query.shape[1]
    query, key = (x.repeat_interleave(shared, dim=1) for x in inputs[:2])
    outs = []
    for token in zip(query, key, *inputs[2:], strict=True):
        state, out = STEPS[kind](state, *token)
        outs.append(out)
    return torch.stack(outs) if outs else inputs.value[:0], state


def run_all(kind: str, inputs: RecurrenceInputs, sequences: Sequences, first=None):
    """Return (out [t, H, V], last states [N, H, K, V]) of all sequences."""
    outs, lasts = [], []
    for number, start in enumerate(sequences.bounds[:-1]):
        part = RecurrenceInputs(*(x[start : sequences.bounds[number + 1]] for x in inputs))
        state = zeros(inputs, 1)[0] if first is None else first[number]
        out, last = run(kind, part, state)
        outs.append(out)
        lasts.append(last)
    return torch.cat(outs), torch.stack(lasts)


def zeros(inputs: RecurrenceInputs, count: int) -> torch.Tensor:
    """Return so many states of zeros."""
    shape = (count, inputs.value.shape[1], inputs.key.shape[2], inputs.value.shape[2])
    return inputs.value.new_zeros(shape)
