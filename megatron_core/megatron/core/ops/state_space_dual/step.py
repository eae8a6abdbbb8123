# SPDX-License-Identifier: Apache-2.0
"""One token of state-space duality, by slot and in place, in plain torch."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.recurrence import RecurrenceInputs


def step(inputs: RecurrenceInputs, *, state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Change the states of `slots` by one token a row; return what is read from them.

    The host never waits. A padding row does what the first row with a slot does, and writes the
    same to the same place; where no row has a slot, all write back what was there.

    Args:
        inputs: [b, ...].
        state: [slots, H, K, V].
        slots: int64 [b]; -1 is a padding row.

    Returns:
        out [b, H, V] in value's dtype, zero in padding rows.
    """
    rows, heads, width = inputs.value.shape
    if not rows:
        return torch.zeros_like(inputs.value)
    wide = accumulation_dtype(inputs.value.dtype)
    alive = slots >= 0
    source = torch.where(
        alive, torch.arange(rows, device=slots.device), alive.to(torch.uint8).argmax()
    )
    query, key, value, decay, dt = (x.index_select(0, source).to(wide) for x in inputs)
    place = slots.index_select(0, source).clamp_(min=0)
    old = state.index_select(0, place)
    groups, shared = key.shape[1], heads // key.shape[1]
    shape = (rows, groups, shared, -1, width)  # [b, G, r, K, V]
    written = key[:, :, None, :, None] * (value * dt[..., None]).view(
        rows, groups, shared, 1, width
    )
    new = written.addcmul_(old.to(wide).view(shape), decay.exp().view(rows, groups, shared, 1, 1))
    out = (query[:, :, None, None] @ new).view(rows, heads, width).to(inputs.value.dtype)
    new = new.view_as(old).to(state.dtype)
    state.index_copy_(0, place, torch.where(alive.any(), new, old))
    return torch.where(alive[:, None, None], out, 0)
