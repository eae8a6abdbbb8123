# SPDX-License-Identifier: Apache-2.0
"""Attention of whole rows on each rank, for a part of the heads: the cut moves from sequence to
heads before, and back behind.

With fewer key heads than ranks, consecutive ranks get copies of one; the gradients of copies are
summed where the head came from.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.core.comm.collectives import all_to_all
from megatron.core.context_parallel import blockwise
from megatron.core.context_parallel.attend import Attend
from megatron.core.context_parallel.choice import sent_groups
from megatron.core.ops.attention.reference import sink_gradient


class AllToAllAttention(torch.autograd.Function):
    """forward out = attention of all queries to all keys for 1/cp of the heads; dgrad and wgrad
    (sinks) likewise. Saves q, k, v, out and lse of its heads, and the sinks."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, attend: Attend):
        cp, groups = attend.group.size, key.shape[2]
        copies = [_spread(x, cp) for x in (key, value)]  # [s/cp, b, cp · g', d]
        q, k, v = _to_heads([query, *copies], attend)  # [s, b, n/cp or g', d]
        attend = replace(attend, dropout=_own_heads(attend, q.shape[2]))
        blocks = attend.layout.row_blocks(attend.window)
        own_sinks = None if sinks is None else _own(sinks, attend)
        out, lse = attend.forward(q, k, v, blocks)
        out, lse = blockwise.finish(out, lse, own_sinks, dtype=query.dtype)
        ctx.attend, ctx.groups = attend, groups
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return _to_sequence([out], attend)[0]

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        attend: Attend = ctx.attend
        (whole,) = _to_heads([grad.contiguous()], attend)  # [s, b, n/cp, d]
        blocks = attend.layout.row_blocks(attend.window)
        grads = attend.backward(whole, (q, k, v), (out, lse), blocks=blocks)
        d_sinks = None
        if sinks is not None:
            d_sinks = torch.zeros_like(sinks)
            _own(d_sinks, attend).copy_(sink_gradient(whole, out, lse, _own(sinks, attend)))
        d_query, *copies = _to_sequence(list(grads), attend)
        d_key, d_value = (_collected(x, ctx.groups) for x in copies)
        return d_query, d_key, d_value, d_sinks, None


def _to_heads(tensors: list[torch.Tensor], attend: Attend) -> list[torch.Tensor]:
    """Turn [s/cp, b, cp · x, d] into [s, b, x, d] in the order of places, in one exchange."""
    cp = attend.group.size
    # [s/cp, b, cp, x, d] each, joined to [s/cp, b, cp, x..., d]
    parts = [t.unflatten(2, (cp, t.shape[2] // cp)) for t in tensors]
    sizes = [p.shape[3] for p in parts]
    joined = torch.cat(parts, dim=3).permute(2, 0, 1, 3, 4).flatten(0, 1)  # [cp · s/cp, b, x..., d]
    rows = attend.layout.to_rows(all_to_all(joined.contiguous(), attend.group))  # [s, b, x..., d]
    return [part.contiguous() for part in rows.split(sizes, dim=2)]


def _to_sequence(tensors: list[torch.Tensor], attend: Attend) -> list[torch.Tensor]:
    """Turn [s, b, x, d] in the order of places into [s/cp, b, cp · x, d], in one exchange."""
    cp = attend.group.size
    sizes = [t.shape[2] for t in tensors]
    joined = attend.layout.to_ranks(torch.cat(tensors, dim=2))  # [cp · s/cp, b, x..., d]
    found = all_to_all(joined, attend.group).unflatten(0, (cp, -1))  # [cp, s/cp, b, x..., d]
    found = found.permute(1, 2, 0, 3, 4)  # [s/cp, b, cp, x..., d]
    return [part.flatten(2, 3).contiguous() for part in found.split(sizes, dim=3)]


def _spread(x: torch.Tensor, cp: int) -> torch.Tensor:
    """Repeat heads [s/cp, b, g, d] so that each of cp ranks gets as many: [s/cp, b, cp · g', d]."""
    wanted = cp * sent_groups(x.shape[2], cp)
    copies = wanted // x.shape[2]
    return x if copies == 1 else x.repeat_interleave(copies, dim=2)


def _collected(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum the copies of each head: [s/cp, b, cp · g', d] to [s/cp, b, g, d]."""
    copies = x.shape[2] // groups
    return x if copies == 1 else x.unflatten(2, (groups, copies)).sum(3)


def _own(sinks: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Return this rank's part of the heads' sinks [n], a view."""
    return sinks.chunk(attend.group.size)[attend.group.rank]


def _own_heads(attend: Attend, heads: int):
    """Return the dropout of this rank's heads."""
    if attend.dropout is None:
        return None
    first = attend.dropout.head_offset + attend.group.rank * heads
    return replace(attend.dropout, head_offset=first)
