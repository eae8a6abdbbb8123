# SPDX-License-Identifier: Apache-2.0
"""One token of the gated delta rule, by slot and in place, in plain torch."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.recurrence import RecurrenceInputs


def step(
    inputs: RecurrenceInputs, *, state: torch.Tensor, slots: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Change the states of `slots` by one token a row; return what is read from them.

    The host never waits. A padding row works on a copy of nothing, and writes what the first row
    with a slot writes, to the same place.

    Args:
        inputs: [b, ...].
        state: [slots, Hv, K, V].
        slots: int64 [b]; -1 is a padding row.
        scale: of queries; None is K^-0.5.

    Returns:
        out [b, Hv, V] in value's dtype, zero in padding rows.
    """
    query, key, value, decay, beta = inputs
    if not value.shape[0]:
        return torch.zeros_like(value)
    wide = accumulation_dtype(value.dtype)
    shared = value.shape[1] // key.shape[1]
    query, key = (x.to(wide).repeat_interleave(shared, 1).unsqueeze(2) for x in (query, key))
    query = query * (key.shape[-1] ** -0.5 if scale is None else scale)  # [b, Hv, 1, K]
    alive = slots >= 0
    first = alive.to(torch.uint8).argmax()  # 0 if there is none
    row = torch.arange(slots.shape[0], device=slots.device)
    source = torch.where(alive, row, first)
    place = slots.index_select(0, source).clamp_(min=0)
    old = state.index_select(0, place)
    kept = old.to(wide) * decay.to(wide).exp()[..., None, None].index_select(0, source)
    key = key.index_select(0, source)
    delta = value.to(wide).index_select(0, source).unsqueeze(2) - key @ kept  # [b, Hv, 1, V]
    delta = delta * beta.to(wide)[..., None, None].index_select(0, source)
    new = torch.addcmul(kept, key.mT, delta)
    out = (query.index_select(0, source) @ new).squeeze(2).to(value.dtype)
    state[place] = torch.where(alive.any(), new.to(state.dtype), old)
    return torch.where(alive[:, None, None], out, 0)
