# SPDX-License-Identifier: Apache-2.0
"""Attention with keys and values that go round the ranks, a step ahead of the computation.

At step i a rank has the keys and values of rank r - i, attends to what its queries see of them and
merges that into what it has; meanwhile they travel on to rank r + 1. In backward they go round once
more, and behind them the sums of their gradients, one more step, which takes them home.
"""

from __future__ import annotations

import torch

from megatron.core.comm.point_to_point import Message, exchange_async
from megatron.core.comm.transfer import Pending
from megatron.core.context_parallel import blockwise
from megatron.core.context_parallel.attend import Attend
from megatron.core.ops.attention.reference import sink_gradient
from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.process_groups import Group


class RingAttention(torch.autograd.Function):
    """forward out = merge of attention to one rank's keys after the other's; dgrad likewise, the
    gradients of keys and values summed on their way round, in fp32; wgrad (sinks) of own queries.

    Saves its own q, k, v, out and lse.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, attend: Attend):
        group = attend.group
        pair = torch.stack([key, value])  # [2, s/cp, b, g, d]
        result = None
        for step in range(group.size):
            onward = _Onward.start(pair, group) if step < group.size - 1 else None
            blocks = attend.blocks((group.rank - step) % group.size)
            if blocks or result is None:
                result = attend.forward(query, pair[0], pair[1], blocks, into=result)
            if onward is not None:
                pair = onward.wait()
        assert result is not None
        out, lse = blockwise.finish(*result, sinks, dtype=query.dtype)
        ctx.attend = attend
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        attend: Attend = ctx.attend
        group = attend.group
        pair = torch.stack([key, value])
        wide = accumulation_dtype(query.dtype)
        d_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        sums = torch.zeros(pair.shape, dtype=wide, device=pair.device)
        homeward: _Onward | None = None
        for step in range(group.size):
            onward = _Onward.start(pair, group) if step < group.size - 1 else None
            blocks = attend.blocks((group.rank - step) % group.size)
            d_pair = None
            if blocks:
                d_own, *d_pair = attend.backward(
                    grad, (query, pair[0], pair[1]), (out, lse), blocks=blocks, wide=True
                )
                d_query += d_own
            if homeward is not None:
                sums = homeward.wait()
            if d_pair is not None:
                sums[0] += d_pair[0]
                sums[1] += d_pair[1]
            if group.size > 1:
                homeward = _Onward.start(sums, group)
            if onward is not None:
                pair = onward.wait()
        if homeward is not None:
            sums = homeward.wait()
        d_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
        d_key, d_value = sums.to(key.dtype)
        return d_query.to(query.dtype), d_key, d_value, d_sinks, None


class _Onward:
    """A tensor on its way to the next rank, and another like it coming from the one before."""

    def __init__(self, sent: Pending, received: Pending) -> None:
        self._sent, self._received = sent, received

    @staticmethod
    def start(tensor: torch.Tensor, group: Group) -> _Onward:
        """Send `tensor`, which must be left alone until `wait`."""
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        room = torch.empty_like(tensor)
        messages = [Message(tensor, after, sends=True), Message(room, before, sends=False)]
        return _Onward(*exchange_async(messages, group))

    def wait(self) -> torch.Tensor:
        """Return what came."""
        received = self._received.wait()
        self._sent.wait()
        return received
