# SPDX-License-Identifier: Apache-2.0
"""One decode step of recurrent mixers in plain torch, op by op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from megatron.core.ops.backend_choice import accumulation_dtype
from megatron.core.ops.recurrence import naive
from megatron.core.ops.recurrence.gated_norm import NORM_FIRST, gated_rms_norm
from megatron.core.ops.recurrence.interface import RecurrenceInputs
from megatron.core.ops.recurrence.prologue import PrologueWeights, UnitLayout, recurrence_inputs
from megatron.core.ops.recurrence.ssd import add_skip


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
    if not source.shape[0]:
        return source.new_empty(0, source.shape[1] * unit.heads, unit.value_channels)
    conv_columns, gate_columns = source.split(
        [unit.conv_channels, unit.width - unit.conv_channels], dim=-1
    )
    rows = ActiveRows(memory.slots)
    mixed = convolve(conv_columns, weights.weight, weights.bias, state=memory.conv, rows=rows)
    inputs = recurrence_inputs(mixed, gate_columns, weights, unit=unit)
    equation = naive.ssd if unit.beta is None else naive.delta_rule
    out = update_states(equation, inputs, state=memory.state, rows=rows)
    if skip is not None:
        out = add_skip(out, inputs.value, skip)
    return out if norm is None else apply_output_norm(out, norm, memory.slots)


class ActiveRows:
    """The rows with a slot among b rows; the host never waits.

    A padding row repeats the first row with a slot, and writes the same values to the same slot; if
    there is none, it writes back the state that it read.

    Args:
        slots: int64 [b]; -1 is a padding row.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        self._is_active = slots >= 0
        rows = torch.arange(slots.shape[0], device=slots.device)
        self._source = torch.where(self._is_active, rows, self._is_active.to(torch.uint8).argmax())
        self._slots = slots.index_select(0, self._source).clamp_(min=0)

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [b, ...], with the first active row in padding rows."""
        return x.index_select(0, self._source)

    def load(self, state: torch.Tensor) -> torch.Tensor:
        """Return the states of the rows [b, ...]."""
        return state.index_select(0, self._slots)

    def store(self, state: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
        """Write the states of the rows; `old` is what `load` returned."""
        rows = torch.where(self._is_active.any(), new.to(state.dtype), old)
        state.index_copy_(0, self._slots, rows)

    def mask(self, out: torch.Tensor) -> torch.Tensor:
        """Return out [b, ...], zero in padding rows."""
        return torch.where(self._is_active.view(-1, *[1] * (out.ndim - 1)), out, 0)


def update_states(
    equation: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: RecurrenceInputs,
    *,
    state: torch.Tensor,
    rows: ActiveRows,
) -> torch.Tensor:
    """Update the states of the rows by one token each, in place; return out [b, H, V].

    Args:
        equation: of `ops.recurrence.naive`.
        inputs: of one token per row.
        state: [slots, H, K, V].
        rows: the slot of each row.
    """
    dtype = accumulation_dtype(inputs.value.dtype)
    query, key, value, decay, beta = (rows.repeat(x).to(dtype) for x in inputs)
    group_heads = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(group_heads, 1) for x in (query, key))
    old_state = rows.load(state)
    new_state, out = equation(old_state.to(dtype), query, key, value, decay, beta)
    rows.store(state, old_state, new_state)
    return rows.mask(out.to(inputs.value.dtype))


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    state: torch.Tensor,
    rows: ActiveRows,
    silu: bool = True,
) -> torch.Tensor:
    """Convolve one token per row [b, u, c] and append the token to the row's state.

    Args:
        x: [b, u, c].
        weight: [u, c, W].
        bias: [u, c] or None.
        state: [slots, W-1, u, c], the last inputs of each slot; updated.
        rows: the slot of each row.
        silu: apply SiLU.
    """
    old_state = rows.load(state)  # [b, W-1, u, c]
    window = torch.cat([old_state, rows.repeat(x).to(state.dtype)[:, None]], 1)
    rows.store(state, old_state, window[:, 1:])
    dtype = accumulation_dtype(x.dtype)
    inputs = torch.cat([old_state.to(dtype), x.to(dtype)[:, None]], 1)  # [b, W, u, c]
    out = (inputs * weight.movedim(-1, 0).to(dtype)).sum(1)
    if bias is not None:
        out = out + bias.to(dtype)
    return rows.mask(functional.silu(out) if silu else out).to(x.dtype)


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
