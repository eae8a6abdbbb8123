# SPDX-License-Identifier: Apache-2.0
"""The equations of recurrent layers, as the papers write them; autograd differentiates them.

The two recurrences differ in one function each, the update of a head's state by a token. Tests
compare every optimised implementation with this module; the decode step of a CPU calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch.nn import functional

from megatron.core.ops.recurrence.interface import RecurrenceInputs
from megatron.core.ops.sequences import Sequences


def delta_rule(state, query, key, value, decay, beta, *, scale=None):
    """Return (S, out) after one token of the gated delta rule (arXiv 2412.06464, equation 10).

    S <- exp(decay) S;  S <- S + key (beta (value - S^T key))^T;  out = scale S^T query.

    Args:
        state: S [..., K, V].
        query, key: [..., K].
        value: [..., V].
        decay, beta: [...].
        scale: factor of the query; None is K^-0.5.
    """
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (x.unsqueeze(-2) for x in (query * scale, key, value))
    state = state * decay.exp()[..., None, None]
    delta = (value - key @ state) * beta[..., None, None]
    state = torch.addcmul(state, key.mT, delta)
    return state, (query @ state).squeeze(-2)


def ssd(state, query, key, value, decay, dt):
    """Return (S, out) after one token of Mamba-2 (arXiv 2405.21060, section 6).

    S <- exp(decay) S + dt key value^T;  out = S^T query. See `delta_rule` for the arguments.
    """
    addend = key.unsqueeze(-1) * (value * dt[..., None]).unsqueeze(-2)
    state = torch.addcmul(addend, state, decay.exp()[..., None, None])
    return state, (query.unsqueeze(-2) @ state).squeeze(-2)


def recur(
    equation: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: RecurrenceInputs,
    sequences: Sequences,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [t, H, V], final states [N, H, K, V]), token by token.

    Args:
        equation: `delta_rule` or `ssd`.
        inputs: of the t tokens.
        sequences: the boundaries of the tokens.
        initial: [N, H, K, V], the initial states; None is zeros.
    """
    query, key, value, decay, beta = inputs
    heads = value.shape[1]
    query, key = (x.repeat_interleave(heads // x.shape[1], 1) for x in (query, key))
    if initial is None:
        initial = value.new_zeros(sequences.count, heads, key.shape[2], value.shape[2])
    outs, final_states = [value[:0]], []
    for state, (begin, end) in zip(initial, pairwise(sequences.bounds), strict=True):
        for t in range(begin, end):
            state, out = equation(state, query[t], key[t], value[t], decay[t], beta[t])
            outs.append(out[None])
        final_states.append(state)
    return torch.cat(outs), torch.stack(final_states)


def causal_conv1d(x, weight, bias, *, sequences, activation=None, initial=None):
    """Return (out [t, *c], final_rows [N, W-1, *c]), token by token.

    out[t] = act(bias + sum_k weight[..., W-1-k] x[t-k]), k = 0 ... W-1, within a sequence.

    Args:
        x: [t, *c].
        weight: [*c, W].
        bias: [*c] or None.
        sequences: the boundaries of the tokens.
        activation: "silu" or None.
        initial: [N, W-1, *c], the rows before each sequence; None is zeros.
    """
    width = weight.shape[-1]
    if initial is None:
        initial = x.new_zeros(sequences.count, width - 1, *x.shape[1:])
    outs, final_rows = [x[:0]], []
    for before, (begin, end) in zip(initial, pairwise(sequences.bounds), strict=True):
        rows = torch.cat([before, x[begin:end]])
        for t in range(end - begin):
            out = (rows[t : t + width] * weight.movedim(-1, 0)).sum(0)
            out = out if bias is None else out + bias
            outs.append((functional.silu(out) if activation == "silu" else out)[None])
        final_rows.append(rows[end - begin :])
    return torch.cat(outs), torch.stack(final_rows)


def l2norm(x, eps=1e-6):
    """Return x / sqrt(sum(x^2) + eps), sums over the last dimension."""
    return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()


def prologue(source, weights, *, unit, sequences, initial=None):
    """Return (inputs of the recurrence, final_rows of the convolution), see `recurrence_prologue`.

    Args:
        source: [t, u, w], features of packed tokens.
        weights: weights of the convolution and of the gates.
        unit: the meaning of the w columns.
        sequences: the boundaries of the tokens.
        initial: the rows before each sequence.
    """
    weight, bias, a_log, dt_bias = weights
    columns = source[..., : unit.conv_channels]
    mixed, final_rows = causal_conv1d(
        columns, weight, bias, sequences=sequences, activation="silu", initial=initial
    )
    heads, width = unit.heads, unit.heads * unit.value_channels
    query = mixed[..., unit.query : unit.query + unit.key_channels]
    key = mixed[..., unit.key : unit.key + unit.key_channels]
    value = mixed[..., unit.value : unit.value + width].unflatten(-1, (heads, -1)).flatten(1, 2)
    raw_dt = source[..., unit.dt : unit.dt + heads].flatten(1)  # [t, H]
    dt = functional.softplus(raw_dt + dt_bias).clamp(*unit.dt_limit)
    beta = dt
    if unit.beta is not None:
        query, key = l2norm(query), l2norm(key)
        beta = source[..., unit.beta : unit.beta + heads].flatten(1).sigmoid()
    return RecurrenceInputs(query, key, value, -a_log.exp() * dt, beta), final_rows


def gated_rms_norm(x, gate, weight, *, eps, order="norm_first", group_size=None):
    """Return rms(x) w silu(gate), or with order "gate_first" rms(x silu(gate)) w.

    Args:
        x, gate: [..., n].
        weight: [n].
        eps: added to the mean square.
        order: whether the norm or the gate comes first.
        group_size: features of a norm group; None is n.
    """
    gate = functional.silu(gate)
    normed = x if order == "norm_first" else x * gate
    groups = normed.unflatten(-1, (-1, group_size or x.shape[-1]))
    groups = groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = groups.flatten(-2) * weight
    return normed * gate if order == "norm_first" else normed
