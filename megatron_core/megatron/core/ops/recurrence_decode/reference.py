# SPDX-License-Identifier: Apache-2.0
"""One more token of recurrent mixers in plain torch: the ops that it is made of, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.core.ops.causal_conv1d import causal_conv1d_step
from megatron.core.ops.gated_delta_rule import gated_delta_step
from megatron.core.ops.gated_rms_norm import NORM_FIRST, gated_rms_norm
from megatron.core.ops.recurrence_prologue import PrologueWeights, UnitParts, recurrence_inputs
from megatron.core.ops.state_space_dual import add_skip, state_space_step


@dataclass(frozen=True)
class DecodeMemory:
    """What a mixer keeps of each sequence, changed in place, and where the rows have theirs.

    Args:
        conv: [slots, W-1, u, c], the rows before the convolution.
        state: [slots, H, K, V]; fp32, or a dtype with fewer bits, to which it is rounded.
        slots: int64 [b], each row's, none twice; -1 is a padding row.
        arrived: int32 [slots, u], zeros that programs of a GPU kernel count themselves in, zeros
            again behind it; None: it has one program for all heads of a unit.
    """

    conv: torch.Tensor
    state: torch.Tensor
    slots: torch.Tensor
    arrived: torch.Tensor | None = None


@dataclass(frozen=True)
class OutputNorm:
    """The norm and the gate behind a recurrence, see `gated_rms_norm`.

    Args:
        gate: [b, u, r V]; may be a slice of the last dimension.
        weight: [V], the same of all heads, or [H V].
        eps: added to the mean square.
        order: "norm_first" or "gate_first".
        group_size: features that are normalised together; None is as many as there are weights.
    """

    gate: torch.Tensor
    weight: torch.Tensor
    eps: float
    order: str = NORM_FIRST
    group_size: int | None = None


if TYPE_CHECKING:
    pass


def decode(
    source: torch.Tensor,
    weights: PrologueWeights,
    *,
    parts: UnitParts,
    memory: DecodeMemory,
    skip: torch.Tensor | None,
    norm: OutputNorm | None,
) -> torch.Tensor:
    """Return y [b, H, V], as `recurrence_decode` does."""
    convolved, rest = source.split([parts.convolved, parts.width - parts.convolved], dim=-1)
    mixed = causal_conv1d_step(
        convolved,
        weights.weight,
        weights.bias,
        state=memory.conv,
        slots=memory.slots,
        activation="silu",
    )
    inputs = recurrence_inputs(mixed, rest, weights, parts=parts)
    step = state_space_step if parts.strengths is None else gated_delta_step
    out = step(*inputs, state=memory.state, slots=memory.slots)
    if skip is not None:
        out = add_skip(out, inputs.value, skip)
    return out if norm is None else normed(out, norm, memory.slots)


def normed(out: torch.Tensor, norm: OutputNorm, slots: torch.Tensor) -> torch.Tensor:
    """Return out [b, H, V] behind norm and gate, zero in padding rows."""
    shape = (out.shape[0], -1, len(norm.weight))
    y = gated_rms_norm(
        out.reshape(shape),
        norm.gate.reshape(shape),
        norm.weight,
        eps=norm.eps,
        order=norm.order,
        group_size=norm.group_size,
    )
    return y.view(out.shape).masked_fill_((slots < 0)[:, None, None], 0)
