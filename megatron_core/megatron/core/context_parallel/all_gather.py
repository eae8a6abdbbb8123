# SPDX-License-Identifier: Apache-2.0
"""Attention with the keys and values of all ranks gathered before, and again for backward."""

from __future__ import annotations

import torch

from megatron.core.comm.collectives import all_gather, reduce_scatter
from megatron.core.context_parallel import blockwise
from megatron.core.context_parallel.attend import Attend
from megatron.core.context_parallel.blocks import Block
from megatron.core.ops.attention.reference import sink_gradient


class AllGatherAttention(torch.autograd.Function):
    """forward out = attention of own queries to all keys; dgrad through the keys and values of all,
    whose gradients are summed over the ranks; wgrad (sinks) of own queries.

    Saves its own q, k, v, out and lse.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, attend: Attend):
        keys, values = _gathered(key, value, attend)
        blocks = _blocks(attend)
        out, lse = attend.forward(query, keys, values, blocks)
        out, lse = blockwise.finish(out, lse, sinks, dtype=query.dtype)
        ctx.attend = attend
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        attend: Attend = ctx.attend
        keys, values = _gathered(key, value, attend)
        blocks = _blocks(attend)
        d_query, *d_pair = attend.backward(grad, (query, keys, values), (out, lse), blocks=blocks)
        del keys, values
        d_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
        if attend.group.size == 1:
            return d_query, *d_pair, d_sinks, None
        both = attend.layout.to_ranks(torch.cat(d_pair, dim=2))  # [cp · s/cp, b, 2g, d]
        d_key, d_value = reduce_scatter(both, attend.group).chunk(2, dim=2)  # [s/cp, b, g, d]
        return d_query, d_key.contiguous(), d_value.contiguous(), d_sinks, None


def _blocks(attend: Attend) -> tuple[Block, ...]:
    """Return the blocks of own queries and what `_gathered` returns."""
    return attend.blocks(None if attend.group.size > 1 else 0)


def _gathered(
    key: torch.Tensor, value: torch.Tensor, attend: Attend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of whole rows [s, b, g, d] in the order of their places; one
    rank's own as they lie."""
    if attend.group.size == 1:
        return key, value
    both = all_gather(torch.cat([key, value], dim=2), attend.group)  # [cp · s/cp, b, 2g, d]
    keys, values = attend.layout.to_rows(both).chunk(2, dim=2)
    return keys, values
