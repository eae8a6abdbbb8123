# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence sharded over cp ranks: ring, all-gather and all-to-all.

Every rank has the queries, keys and values of its own tokens, and its queries attend to keys of
other ranks. An engine brings them together. Blocks of queries and keys that see each other are then
attended one by one and merged by their log-sum-exp (`blockwise`), the same way in all engines.

| engine | forward moves | backward moves | keeps of other ranks |
|---|---|---|---|
| p2p | keys and values, step by step | them again, and their gradients | one rank's at a time |
| all_gather | keys and values at once | them again; gradients reduced | all at a time |
| a2a | q, k, v and the output: shards heads, not the sequence | their gradients | nothing |

p2p, or ring: at step i rank r has the keys and values of rank r - i, attends to what its queries
see of them and merges the result; meanwhile they are sent on to rank r + 1. In backward keys and
values go round the ring again, followed by the sums of their gradients, which need one more step to
return to their rank. Liu et al. 2023 (arXiv 2310.01889), in the zigzag order of Brandon et al. 2023
(2311.09431).

all_gather: keys and values are gathered before attention, and again for backward. Llama 3
(2407.21783), section 3.3.2.

a2a: each rank attends over whole rows with a share of the heads; one all-to-all before moves the
sharding from sequence to heads, one after moves it back. With fewer key heads than ranks,
consecutive ranks get copies of one; the gradients of copies are summed on the head's own rank.
DeepSpeed Ulysses (2309.14509).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from megatron.core.comm.collectives import Pending, all_gather, reduce_scatter
from megatron.core.comm.point_to_point import P2PMessage, exchange_async
from megatron.core.context_parallel import blockwise
from megatron.core.context_parallel.all_to_all import all_to_all_cp2hp, all_to_all_hp2cp
from megatron.core.context_parallel.blockwise import AttentionBlock
from megatron.core.context_parallel.comm_type import (
    ALL_GATHER,
    ALL_TO_ALL,
    AUTO,
    RING,
    AttentionShape,
    choose,
    sent_groups,
)
from megatron.core.context_parallel.layout import SequenceLayout
from megatron.core.ops.attention.reference import sink_gradient
from megatron.core.ops.backend_choice import accumulation_dtype, apply_function
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.process_groups import Group

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Attend:
    """One attention over a split sequence.

    Args:
        layout: of the microbatch; its split gives the tokens of each rank.
        group: cp.
        scale: factor on the logits, usually 1 / sqrt(d).
        window: a query at place q sees only keys k with q - k < window.
        dropout: drops probabilities.
        cpu_dtype: what a CPU multiplies 16-bit queries and keys in, see `ops.backend_choice`.
    """

    layout: SequenceLayout
    group: Group
    scale: float
    window: int | None = None
    dropout: AttentionDropout | None = None
    cpu_dtype: torch.dtype | None = None

    def blocks(self, key_rank: int | None) -> tuple[AttentionBlock, ...]:
        """Return the blocks of this rank's queries and one rank's keys, of whole rows' if None."""
        joined = self.window is None and self.dropout is None
        return self.layout.blocks(key_rank, self.window, joined=joined)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: tuple[AttentionBlock, ...],
        *,
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) of these blocks, merged into what is there if `into` is given."""
        return blockwise.forward(
            query,
            key,
            value,
            blocks,
            scale=self.scale,
            window=self.window,
            dropout=self.dropout,
            into=into,
            cpu_dtype=self.cpu_dtype,
        )

    def backward(
        self,
        grad: torch.Tensor,
        qkv: Tensors,
        result: tuple[torch.Tensor, torch.Tensor],
        *,
        blocks: tuple[AttentionBlock, ...],
        wide: bool = False,
    ) -> Tensors:
        """Return (dq, dk, dv) of these blocks, as sums of fp32 if `wide`; `result` is the complete
        (out, lse)."""
        return blockwise.backward(
            grad,
            *qkv,
            *result,
            blocks,
            scale=self.scale,
            window=self.window,
            dropout=self.dropout,
            wide=wide,
            cpu_dtype=self.cpu_dtype,
        )


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
        d_key_value = attend.layout.to_ranks(torch.cat(d_pair, dim=2))  # [cp · s/cp, b, 2g, d]
        d_key, d_value = reduce_scatter(d_key_value, attend.group).chunk(
            2, dim=2
        )  # [s/cp, b, g, d]
        return d_query, d_key.contiguous(), d_value.contiguous(), d_sinks, None


def _blocks(attend: Attend) -> tuple[AttentionBlock, ...]:
    """Return the blocks of own queries and what `_gathered` returns."""
    return attend.blocks(None if attend.group.size > 1 else 0)


def _gathered(
    key: torch.Tensor, value: torch.Tensor, attend: Attend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of whole rows [s, b, g, d] in the order of their places; one
    rank's own as stored."""
    if attend.group.size == 1:
        return key, value
    key_value = all_gather(torch.cat([key, value], dim=2), attend.group)  # [cp · s/cp, b, 2g, d]
    keys, values = attend.layout.to_rows(key_value).chunk(2, dim=2)
    return keys, values


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
        own_sinks = None if sinks is None else _local_sinks(sinks, attend)
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
            _local_sinks(d_sinks, attend).copy_(
                sink_gradient(whole, out, lse, _local_sinks(sinks, attend))
            )
        d_query, *copies = _to_sequence(list(grads), attend)
        d_key, d_value = (_collected(x, ctx.groups) for x in copies)
        return d_query, d_key, d_value, d_sinks, None


def _to_heads(tensors: list[torch.Tensor], attend: Attend) -> list[torch.Tensor]:
    """Turn [s/cp, b, cp · x, d] into [s, b, x, d] in the order of places, in one exchange."""
    # [s/cp, b, cp, x, d] each, joined to [s/cp, b, cp, x..., d]
    head_shards = [t.unflatten(2, (attend.group.size, -1)) for t in tensors]
    joined = torch.cat(head_shards, dim=3).flatten(2, 3)
    rows = attend.layout.to_rows(all_to_all_cp2hp(joined, attend.group))  # [s, b, x..., d]
    sizes = [p.shape[3] for p in head_shards]
    return [tensor.contiguous() for tensor in rows.split(sizes, dim=2)]


def _to_sequence(tensors: list[torch.Tensor], attend: Attend) -> list[torch.Tensor]:
    """Turn [s, b, x, d] in the order of places into [s/cp, b, cp · x, d], in one exchange."""
    joined = attend.layout.to_ranks(torch.cat(tensors, dim=2))  # [cp · s/cp, b, x..., d]
    received = all_to_all_hp2cp(joined, attend.group)  # [s/cp, b, cp, x..., d]
    sizes = [t.shape[2] for t in tensors]
    return [tensor.flatten(2, 3).contiguous() for tensor in received.split(sizes, dim=3)]


def _spread(x: torch.Tensor, cp: int) -> torch.Tensor:
    """Repeat heads [s/cp, b, g, d] so that each of cp ranks gets as many: [s/cp, b, cp · g', d]."""
    num_sent_heads = cp * sent_groups(x.shape[2], cp)
    copies = num_sent_heads // x.shape[2]
    return x if copies == 1 else x.repeat_interleave(copies, dim=2)


def _collected(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum the copies of each head: [s/cp, b, cp · g', d] to [s/cp, b, g, d]."""
    copies = x.shape[2] // groups
    return x if copies == 1 else x.unflatten(2, (groups, copies)).sum(3)


def _local_sinks(sinks: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Return this rank's share of the heads' sinks [n], a view."""
    return sinks.chunk(attend.group.size)[attend.group.rank]


def _own_heads(attend: Attend, heads: int):
    """Return the dropout of this rank's heads."""
    if attend.dropout is None:
        return None
    first_head = attend.dropout.head_offset + attend.group.rank * heads
    return replace(attend.dropout, head_offset=first_head)


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
        sum_dtype = accumulation_dtype(query.dtype)
        d_query = torch.zeros(query.shape, dtype=sum_dtype, device=query.device)
        sums = torch.zeros(pair.shape, dtype=sum_dtype, device=pair.device)
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
        messages = [P2PMessage(tensor, after, sends=True), P2PMessage(room, before, sends=False)]
        return _Onward(*exchange_async(messages, group))

    def wait(self) -> torch.Tensor:
        """Return what came."""
        received = self._received.wait()
        self._sent.wait()
        return received


_FUNCTIONS: Mapping[str, type[torch.autograd.Function]] = MappingProxyType(
    {RING: RingAttention, ALL_GATHER: AllGatherAttention, ALL_TO_ALL: AllToAllAttention}
)


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attend: Attend,
    engine: str = AUTO,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of this rank's queries to the keys of all ranks, [s/cp, b, n, d].

    Args:
        query: [s/cp, b, n, d].
        key, value: [s/cp, b, g, d], g dividing n.
        attend: the layout, split over the ranks of the group, and the rules. On one rank it attends
            to its own keys, document by document.
        engine: "p2p", "all_gather", "a2a", or "auto" for the one that moves least.
        sinks: [n], learned logits.

    Raises:
        ValueError: a layout that is split for other ranks, heads that do not divide for a2a.
    """
    layout, group = attend.layout, attend.group
    cut = layout.cut
    if cut is None or cut.size != group.size or layout.rank != group.rank:
        layout_text = (
            "is not cut" if cut is None else f"is cut for rank {layout.rank} of {cut.size}"
        )
        raise ValueError(
            f"the layout {layout_text}, group {group.name} is rank {group.rank} of {group.size}: "
            "make it for this group"
        )
    if query.shape[0] != cut.local_length:
        raise ValueError(f"{query.shape[0]} queries, the layout has {cut.local_length} here")
    name = ALL_GATHER  # of one rank: no collective
    if group.size > 1:
        shape = attention_shape(query, key)
        name = layout.once((engine, shape), lambda: choose(engine, shape, group.size).engine)
    return apply_function(_FUNCTIONS[name], query, key, value, sinks, attend)


def attention_shape(query: torch.Tensor, key: torch.Tensor) -> AttentionShape:
    """Return the shape by which an engine is chosen."""
    tokens, rows, heads, features = query.shape
    return AttentionShape(
        tokens=tokens,
        rows=rows,
        heads=heads,
        groups=key.shape[2],
        features=features,
        element_bytes=query.element_size(),
    )
