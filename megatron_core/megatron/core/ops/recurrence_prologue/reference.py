# SPDX-License-Identifier: Apache-2.0
"""The prologue of recurrences in plain torch: its steps one after another."""

from __future__ import annotations

import torch
from torch.nn import functional

from megatron.core.ops.causal_conv1d import causal_conv1d
from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.l2norm import l2norm
from megatron.core.ops.places import Places
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.recurrence_prologue.parts import PrologueWeights, UnitParts
from megatron.core.ops.sequences import Sequences


def prologue(
    source: torch.Tensor,
    weights: PrologueWeights,
    *,
    parts: UnitParts,
    sequences: Sequences,
    places: Places | None,
    initial: torch.Tensor | None,
) -> tuple[RecurrenceInputs, torch.Tensor]:
    """Return (inputs, last) of packed tokens, as `recurrence_prologue` does."""
    packed = source if places is None else places.pack(source)
    # One split and not two slices: its backward is one concatenation.
    convolved, rest = packed.split([parts.convolved, parts.width - parts.convolved], dim=-1)
    mixed, last = causal_conv1d(
        convolved,
        weights.weight,
        weights.bias,
        sequences=sequences,
        activation="silu",
        initial=initial,
    )
    return recurrence_inputs(mixed, rest, weights, parts=parts), last


def recurrence_inputs(
    mixed: torch.Tensor, rest: torch.Tensor, weights: PrologueWeights, *, parts: UnitParts
) -> RecurrenceInputs:
    """Return what the recurrence reads of tokens that went through the convolution.

    Args:
        mixed: [t, u, c], behind the convolution.
        rest: [t, u, w - c], the columns that are not convolved.
        weights: of the gates; those of the convolution are not used.
        parts: what the columns are.
    """
    heads, keys, values = parts.heads, parts.key_channels, parts.heads * parts.value_channels
    columns = {parts.query: keys, parts.key: keys, parts.value: values}
    firsts = sorted(columns)
    pieces = mixed.split([columns[first] for first in firsts], dim=-1)
    query, key, value = (
        pieces[firsts.index(first)] for first in (parts.query, parts.key, parts.value)
    )
    if parts.normalised:
        query, key = (l2norm(x) for x in (query, key))
    value = value.unflatten(-1, (heads, -1)).flatten(1, 2)
    wide = accumulation_dtype(rest.dtype)
    rates, bias = (x.to(wide).view(-1, heads) for x in (weights.rates, weights.step_bias))
    if parts.strengths is None:
        steps = functional.softplus(rest.to(wide) + bias).clamp(*parts.limits)  # [t, u, r]
        decay, strength = -rates.exp() * steps, steps
    else:
        strengths, raw = rest.to(wide).unflatten(-1, (2, heads)).unbind(2)  # [t, u, r]
        decay = -rates.exp() * functional.softplus(raw + bias)
        strength = strengths.sigmoid()
    return RecurrenceInputs(query, key, value, decay.flatten(1), strength.flatten(1))
