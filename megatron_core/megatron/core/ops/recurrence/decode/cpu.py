# SPDX-License-Identifier: Apache-2.0
"""One decode step of recurrent mixers in plain torch, op by op."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops.recurrence.convolution import causal_conv1d_step
from megatron.core.ops.recurrence.delta_rule.cpu import gated_delta_step
from megatron.core.ops.recurrence.gated_norm import NORM_FIRST, gated_rms_norm
from megatron.core.ops.recurrence.prologue import PrologueWeights, UnitLayout, recurrence_inputs
from megatron.core.ops.recurrence.ssd.cpu import add_skip, state_space_step


@dataclass(frozen=True)
class DecodeMemory:
    """The states of a mixer, updated in place, and the slot of each row.

    Args:
        conv: [slots, W-1, u, c], the convolution's state: its last W-1 inputs.
        state: [slots, H, K, V], the recurrence's state; fp32, or a narrower dtype, to which it is
            rounded.
        slots: int64 [b], slot of each row, without duplicates; -1 is a padding row.
        arrival_counts: int32 [slots, u], counters of a GPU kernel's programs, zero before and after
            a call; None: one program processes all heads of a unit.
    """

    conv: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor
    arrival_counts: torch.Tensor | None = None


@dataclass(frozen=True)
class OutputNorm:
    """The norm and the gate after a recurrence, see `gated_rms_norm`.

    Args:
        gate: [b, u, r V]; may be a slice of the last dimension.
        weight: [V], shared by all heads, or [H V].
        eps: added to the mean square.
        order: "norm_first" or "gate_first".
        group_size: features of a norm group; None is the size of `weight`.
    """

    gate: torch.Tensor
    weight: torch.Tensor
    eps: float
    order: str = NORM_FIRST
    group_size: int | None = None


def decode(
    source: torch.Tensor,
    weights: PrologueWeights,
    *,
    unit: UnitLayout,
    memory: DecodeMemory,
    skip: torch.Tensor | None,
    norm: OutputNorm | None,
) -> torch.Tensor:
    """Return y [b, H, V], see `recurrence_decode`."""
    conv_columns, gate_columns = source.split(
        [unit.conv_channels, unit.width - unit.conv_channels], dim=-1
    )
    convolved = causal_conv1d_step(
        conv_columns,
        weights.weight,
        weights.bias,
        state=memory.conv,
        slots=memory.slots,
        activation="silu",
    )
    inputs = recurrence_inputs(convolved, gate_columns, weights, unit=unit)
    step = state_space_step if unit.beta is None else gated_delta_step
    out = step(*inputs, state=memory.state, slots=memory.slots)
    if skip is not None:
        out = add_skip(out, inputs.value, skip)
    return out if norm is None else apply_output_norm(out, norm, memory.slots)


def apply_output_norm(out: torch.Tensor, norm: OutputNorm, slots: torch.Tensor) -> torch.Tensor:
    """Apply norm and gate to out [b, H, V]; padding rows become zero."""
    rows_shape = (out.shape[0], -1, len(norm.weight))
    y = gated_rms_norm(
        out.reshape(rows_shape),
        norm.gate.reshape(rows_shape),
        norm.weight,
        eps=norm.eps,
        order=norm.order,
        group_size=norm.group_size,
    )
    return y.view(out.shape).masked_fill_((slots < 0)[:, None, None], 0)
