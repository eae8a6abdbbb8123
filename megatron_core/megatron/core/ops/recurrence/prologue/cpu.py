# SPDX-License-Identifier: Apache-2.0
"""The recurrence prologue in plain torch, step by step; the columns of a unit and their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from megatron.core.ops.backend_choice import accumulation_dtype, apply_function
from megatron.core.ops.recurrence.convolution import causal_conv1d
from megatron.core.ops.recurrence.interface import RecurrenceInputs
from megatron.core.ops.sequences import PackingIndices, Sequences


class PrologueWeights(NamedTuple):
    """The weights of the prologue, of u units and H heads.

    Args:
        weight: [u, c, W], of the convolution; the last column multiplies the token itself.
        bias: [u, c] or None, of the convolution.
        a_log: A_log [H].
        dt_bias: [H].
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """The columns of one unit, a group and its r heads; the convolution's input columns come first.

    Args:
        heads: r.
        key_channels: K.
        value_channels: V of each head.
        query, key, value: the first column of each.
        dt: the first of r columns with the raw step dt of each head.
        beta: the first of r columns with the raw beta of each head; None (SSD): beta is dt.
        qk_l2norm: whether queries and keys are scaled to length one.
        dt_limit: minimum and maximum of dt (SSD).
    """

    heads: int
    key_channels: int
    value_channels: int
    query: int
    key: int
    value: int
    dt: int
    beta: int | None
    qk_l2norm: bool
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @staticmethod
    def delta(heads: int, key_channels: int, value_channels: int) -> UnitLayout:
        """Return the columns of a gated delta net: query, key, r values, r betas, r alphas."""
        conv_channels = 2 * key_channels + heads * value_channels
        return UnitLayout(
            heads=heads,
            key_channels=key_channels,
            value_channels=value_channels,
            query=0,
            key=key_channels,
            value=2 * key_channels,
            beta=conv_channels,
            dt=conv_channels + heads,
            qk_l2norm=True,
        )

    @staticmethod
    def state_space(
        heads: int, key_channels: int, value_channels: int, dt_limit: tuple[float, float]
    ) -> UnitLayout:
        """Return the columns of Mamba-2: the channels x of r heads, B, C, r steps dt."""
        value_columns = heads * value_channels
        return UnitLayout(
            heads=heads,
            key_channels=key_channels,
            value_channels=value_channels,
            value=0,
            key=value_columns,
            query=value_columns + key_channels,
            beta=None,
            dt=value_columns + 2 * key_channels,
            qk_l2norm=False,
            dt_limit=dt_limit,
        )

    def with_heads(self, heads: int) -> UnitLayout:
        """Return the columns of a unit with another number of heads."""
        if heads == self.heads:
            return self
        sizes = heads, self.key_channels, self.value_channels
        if self.beta is None:
            return UnitLayout.state_space(*sizes, self.dt_limit)
        return UnitLayout.delta(*sizes)

    @property
    def conv_channels(self) -> int:
        """Number of columns c that the convolution reads."""
        return 2 * self.key_channels + self.heads * self.value_channels

    @property
    def width(self) -> int:
        """Number of all columns w."""
        return self.conv_channels + self.heads * (1 if self.beta is None else 2)


def prologue(
    source: torch.Tensor,
    weights: PrologueWeights,
    *,
    unit: UnitLayout,
    sequences: Sequences,
    packing: PackingIndices | None,
    initial: torch.Tensor | None,
) -> tuple[RecurrenceInputs, torch.Tensor]:
    """Return (inputs, state of the convolution), see `recurrence_prologue`."""
    packed = source if packing is None else packing.pack(source)
    # Backward of one split is one concatenation; two slices would add two padded tensors.
    conv_columns, gate_columns = packed.split(
        [unit.conv_channels, unit.width - unit.conv_channels], dim=-1
    )
    convolved, conv_state = causal_conv1d(
        conv_columns,
        weights.weight,
        weights.bias,
        sequences=sequences,
        activation="silu",
        initial=initial,
    )
    return recurrence_inputs(convolved, gate_columns, weights, unit=unit), conv_state


def recurrence_inputs(
    convolved: torch.Tensor,
    gate_columns: torch.Tensor,
    weights: PrologueWeights,
    *,
    unit: UnitLayout,
) -> RecurrenceInputs:
    """Return the inputs of the recurrence from the output of the convolution.

    Args:
        convolved: [t, u, c], output of the convolution.
        gate_columns: [t, u, w - c], the columns that bypass the convolution.
        weights: a_log and dt_bias are used.
        unit: the meaning of the columns.
    """
    heads, keys, values = unit.heads, unit.key_channels, unit.heads * unit.value_channels
    sizes = {unit.query: keys, unit.key: keys, unit.value: values}
    starts = sorted(sizes)
    slices = convolved.split([sizes[start] for start in starts], dim=-1)
    query, key, value = (
        slices[starts.index(start)] for start in (unit.query, unit.key, unit.value)
    )
    if unit.qk_l2norm:
        query, key = (l2norm(x) for x in (query, key))
    value = value.unflatten(-1, (heads, -1)).flatten(1, 2)
    dtype = accumulation_dtype(gate_columns.dtype)
    a_log, dt_bias = (x.to(dtype).view(-1, heads) for x in (weights.a_log, weights.dt_bias))
    if unit.beta is None:
        dt = functional.softplus(gate_columns.to(dtype) + dt_bias).clamp(
            *unit.dt_limit
        )  # [t, u, r]
        decay, beta = -a_log.exp() * dt, dt
    else:
        beta, alpha = gate_columns.to(dtype).unflatten(-1, (2, heads)).unbind(2)  # [t, u, r]
        decay = -a_log.exp() * functional.softplus(alpha + dt_bias)
        beta = beta.sigmoid()
    return RecurrenceInputs(query, key, value, decay.flatten(1), beta.flatten(1))


class L2Norm(torch.autograd.Function):
    """y = x * r, r = 1 / sqrt(sum(x^2) + eps).

    Forward: as above. dgrad: dx = r * (g - y sum(g y)). Saves y, which the next op saves too, and
    r [...].
    """

    @staticmethod
    def forward(ctx, x, eps):
        x_acc = x.to(accumulation_dtype(x.dtype))
        inverse_norm = torch.linalg.vector_norm(x_acc, dim=-1, keepdim=True)
        inverse_norm = inverse_norm.square_().add_(eps).rsqrt_()  # [..., 1]
        y = (x_acc * inverse_norm).to(x.dtype)
        ctx.save_for_backward(y, inverse_norm)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, inverse_norm = ctx.saved_tensors
        y, dy_acc = y.to(inverse_norm.dtype), dy.to(inverse_norm.dtype)
        dot = (dy_acc * y).sum(-1, keepdim=True)
        return torch.addcmul(dy_acc, y, dot, value=-1).mul_(inverse_norm).to(dy.dtype), None


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divide the last dimension by its length: y = x / sqrt(sum(x^2) + eps).

    Sums are in fp32. Backward saves y and one scalar per row.

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
