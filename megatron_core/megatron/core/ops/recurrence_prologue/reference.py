# SPDX-License-Identifier: Apache-2.0
"""The prologue of recurrences in plain torch: its steps one after another.

Parts: what the columns of a unit are, and the weights they meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from megatron.core.ops.backend_choice import accumulation_dtype, apply_function
from megatron.core.ops.causal_conv1d import causal_conv1d
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import PackingIndices, Sequences


class PrologueWeights(NamedTuple):
    """What the prologue multiplies and adds, of u units and H heads.

    Args:
        weight: [u, c, W], of the convolution; the last column meets the token itself.
        bias: [u, c] or None.
        rates: [H], A_log.
        step_bias: [H], dt_bias.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    rates: torch.Tensor
    step_bias: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class UnitParts:
    """The columns of one unit, a group and its r heads; those that are convolved come first.

    Args:
        heads: r.
        key_channels: K.
        value_channels: V, of each head.
        query, key, value: the first column of each.
        steps: the first of r columns, from which a token's step, so its decay, is worked out.
        strengths: the first of r columns, from which a token's strength is; None: it is its step.
        normalised: whether queries and keys are scaled to length one.
        limits: least and most step, where it is the strength.
    """

    heads: int
    key_channels: int
    value_channels: int
    query: int
    key: int
    value: int
    steps: int
    strengths: int | None
    normalised: bool
    limits: tuple[float, float] = (0.0, math.inf)

    @staticmethod
    def delta(heads: int, key_channels: int, value_channels: int) -> UnitParts:
        """Return those of a gated delta net: query, key, r values, r betas, r alphas."""
        convolved = 2 * key_channels + heads * value_channels
        return UnitParts(
            heads=heads,
            key_channels=key_channels,
            value_channels=value_channels,
            query=0,
            key=key_channels,
            value=2 * key_channels,
            strengths=convolved,
            steps=convolved + heads,
            normalised=True,
        )

    @staticmethod
    def state_space(
        heads: int, key_channels: int, value_channels: int, limits: tuple[float, float]
    ) -> UnitParts:
        """Return those of Mamba-2: the channels x of r heads, B, C, r steps dt."""
        values = heads * value_channels
        return UnitParts(
            heads=heads,
            key_channels=key_channels,
            value_channels=value_channels,
            value=0,
            key=values,
            query=values + key_channels,
            strengths=None,
            steps=values + 2 * key_channels,
            normalised=False,
            limits=limits,
        )

    def with_heads(self, heads: int) -> UnitParts:
        """Return those of a unit of so many heads."""
        if heads == self.heads:
            return self
        sizes = heads, self.key_channels, self.value_channels
        if self.strengths is None:
            return UnitParts.state_space(*sizes, self.limits)
        return UnitParts.delta(*sizes)

    @property
    def convolved(self) -> int:
        """c, the columns that are convolved."""
        return 2 * self.key_channels + self.heads * self.value_channels

    @property
    def width(self) -> int:
        """w, all columns."""
        return self.convolved + self.heads * (1 if self.strengths is None else 2)


def prologue(
    source: torch.Tensor,
    weights: PrologueWeights,
    *,
    parts: UnitParts,
    sequences: Sequences,
    places: PackingIndices | None,
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


class L2Norm(torch.autograd.Function):
    """y = x * r, r = 1 / sqrt(sum(x^2) + eps).

    Forward: as above. dgrad: dx = r * (g - y sum(g y)). Saves y and r [...]; y is what the next op
    saves too.
    """

    @staticmethod
    def forward(ctx, x, eps):
        wide = x.to(accumulation_dtype(x.dtype))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().add_(eps).rsqrt_()  # [..., 1]
        y = (wide * scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        y, wide = y.to(scale.dtype), grad.to(scale.dtype)
        along = (wide * y).sum(-1, keepdim=True)
        return torch.addcmul(wide, y, along, value=-1).mul_(scale).to(grad.dtype), None


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divide the last dimension by its length: y = x / sqrt(sum(x^2) + eps).

    Sums are taken in fp32. Backward saves y and one number a row.

    Args:
        x: [..., K]; may be strided.
        eps: added to the sum of squares, so that zeros stay zeros.

    Returns:
        y [..., K] in x's dtype.

    Raises:
        ValueError: x without a dimension, not of floats, or a negative `eps`.
    """
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(f"l2norm: x {tuple(x.shape)} {x.dtype}: give vectors of floats")
    if eps < 0:
        raise ValueError(f"l2norm: eps={eps} must not be negative")
    return apply_function(L2Norm, x, eps)
