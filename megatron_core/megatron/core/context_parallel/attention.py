# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence sharded over cp ranks: ring, all-gather and all-to-all.

Every rank has the queries, keys and values of its own tokens, and its queries attend to keys of all
ranks. An engine exchanges them. Blocks of queries and keys with visible pairs are then attended one
by one and merged by their log-sum-exp (`blockwise`), in the same way for all engines.

| engine | forward sends | backward sends | memory for other ranks' tokens |
|---|---|---|---|
| p2p | keys and values, step by step | keys, values and their gradients | one rank |
| all_gather | keys and values at once | keys and values; gradients reduce-scattered | all ranks |
| a2a | q, k, v and the output: shards heads, not the sequence | their gradients | none |

p2p, or ring: at step i rank r has the keys and values of rank r - i, attends to them and merges the
result, while it sends them to rank r + 1. In backward keys and values go round the ring again,
followed by the sums of their gradients, which need one more step to return to their rank. Liu et
al. 2023 (arXiv 2310.01889), in the zigzag order of Brandon et al. 2023 (2311.09431).

all_gather: keys and values are gathered before attention, and again for backward. Llama 3
(2407.21783), section 3.3.2.

a2a: each rank attends over whole rows with 1/cp of the heads. An all-to-all before attention moves
the sharding from the sequence to the heads, an all-to-all after it moves it back. With fewer key
heads than ranks, consecutive ranks get copies of a key head, and the gradients of the copies are
summed on the rank of the head. DeepSpeed Ulysses (2309.14509).

`choose` picks the engine by its volume per layer and rank, forward and backward, with t = s/cp
local tokens of b rows, d features per head and cp - 1 of cp shards leaving the rank:

    ring        2 (cp-1) steps of keys and values, and cp steps of their gradients in fp32
    all_gather  keys and values of the other ranks twice, their gradients once
    all_to_all  (cp-1)/cp of q, k, v, the output and all their gradients

Grouped-query attention makes ring and all_gather cheap; many ranks make all_to_all cheap, because
it moves 1/cp of each head. The ring never moves the least, because it sends fp32 sums. It is for
long rows: all_gather holds the keys and values of all ranks at a time, the ring only of two ranks.
Only the user knows this memory limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from megatron.core.comm.collectives import (
    P2PMessage,
    Pending,
    all_gather,
    exchange_async,
    reduce_scatter,
)
from megatron.core.context_parallel import blockwise
from megatron.core.context_parallel.all_to_all import all_to_all_cp2hp, all_to_all_hp2cp
from megatron.core.context_parallel.blockwise import AttentionBlock
from megatron.core.context_parallel.layout import AUTO, SequenceLayout
from megatron.core.ops.attention.cpu import sink_gradient
from megatron.core.ops.backend_choice import accumulation_dtype, apply_function
from megatron.core.ops.dropout import AttentionDropout
from megatron.core.process_groups import Group

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

RING, ALL_GATHER, ALL_TO_ALL = "p2p", "all_gather", "a2a"
ENGINES = (RING, ALL_GATHER, ALL_TO_ALL)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The shape of one rank's attention.

    Args:
        tokens: local tokens of a row, s/cp, with padding.
        rows: b.
        heads: local query heads, n/tp.
        groups: local key heads, g/tp.
        features: features of a head, d.
        element_bytes: bytes of an element of an activation.
    """

    tokens: int
    rows: int
    heads: int
    groups: int
    features: int
    element_bytes: int

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of this rank's tokens."""
        return self.tokens * self.rows * self.features * self.element_bytes


@dataclass(frozen=True)
class CommTypeChoice:
    """An engine and the reason for its choice.

    Args:
        engine: one of `ENGINES`.
        why: the reason, one line.
    """

    engine: str
    why: str


def head_problem(heads: int, groups: int, cp: int) -> str | None:
    """Return why heads cannot be sharded over cp ranks, with the fix; None if they can."""
    if heads % cp:
        return f"{heads} query heads do not divide over {cp} context parallel ranks: use p2p"
    if groups % cp and cp % groups:
        return f"{groups} key heads do not divide over {cp} context parallel ranks: use p2p"
    return None


def context_problems(engine: str, *, heads: int, groups: int, cp: int) -> list[str]:
    """Return the reasons why an engine cannot run on cp ranks, each with its fix.

    Args:
        engine: "p2p", "all_gather", "a2a" or "auto".
        heads: query heads of a rank, n/tp.
        groups: key heads of a rank, at least 1.
        cp: ranks.
    """
    if engine not in (AUTO, *ENGINES):
        return [f"context-parallel engine {engine!r}: use {', '.join((AUTO, *ENGINES))}"]
    reason = head_problem(heads, groups, cp) if engine == ALL_TO_ALL else None
    return [] if reason is None else [f"context-parallel engine a2a: {reason}"]


def sent_groups(groups: int, cp: int) -> int:
    """Return the key heads of each rank under all_to_all, with copies."""
    return max(1, groups // cp)


def moved_bytes(engine: str, shape: AttentionShape, cp: int) -> int:
    """Return the bytes that leave a rank in forward and backward of one layer.

    Raises:
        ValueError: an unknown engine.
    """
    kv_bytes = 2 * shape.groups * shape.head_bytes
    if engine == RING:
        kv_grad_bytes = kv_bytes * 4 // shape.element_bytes  # fp32 sums
        return 2 * (cp - 1) * kv_bytes + (cp * kv_grad_bytes if cp > 1 else 0)
    if engine == ALL_GATHER:
        return 3 * (cp - 1) * kv_bytes
    if engine == ALL_TO_ALL:
        groups = cp * sent_groups(shape.groups, cp)
        return (cp - 1) * (4 * shape.heads + 4 * groups) * shape.head_bytes // cp
    raise ValueError(f"context-parallel engine {engine!r}: use {', '.join((AUTO, *ENGINES))}")


def choose(engine: str, shape: AttentionShape, cp: int) -> CommTypeChoice:
    """Return the requested engine, or for "auto" the engine with the least communication.

    Raises:
        ValueError: an unknown engine, or heads that do not divide for all_to_all.
    """
    reason = head_problem(shape.heads, shape.groups, cp)
    if engine != AUTO:
        moved_bytes(engine, shape, cp)
        if engine == ALL_TO_ALL and reason is not None:
            raise ValueError(f"context-parallel engine a2a: {reason}")
        return CommTypeChoice(engine, f"{engine} was requested")
    engines = [e for e in ENGINES if e != ALL_TO_ALL or reason is None]
    bytes_by_engine = {e: moved_bytes(e, shape, cp) for e in engines}
    best = min(engines, key=lambda e: bytes_by_engine[e])
    volumes = ", ".join(
        f"{e} {bytes_by_engine[e] / 1e6:,.2f} MB"
        for e in sorted(engines, key=lambda e: bytes_by_engine[e])
    )
    why = f"fewest bytes sent per rank and layer: {volumes}"
    if best == ALL_GATHER:
        kv_megabytes = 2 * shape.groups * shape.head_bytes / 1e6
        why += (
            f"; it stores {cp * kv_megabytes:,.2f} MB of keys and values at a time, p2p "
            f"{2 * kv_megabytes:,.2f} MB: use p2p where rows are long"
        )
    return CommTypeChoice(best, why if reason is None else f"{why}; not a2a: {reason}")


def explain(engine: str, shape: AttentionShape, cp: int) -> str:
    """Return one line with the chosen engine and the reason."""
    choice = choose(engine, shape, cp)
    return f"context parallel {cp} by {choice.engine}: {choice.why}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Attend:
    """Options of one attention over a sharded sequence.

    Args:
        layout: layout of the microbatch, with the tokens of each rank.
        group: cp.
        scale: factor on the logits, usually 1 / sqrt(d).
        softcap: bound of the logits before the mask, see `ops.attention`.
        window: a query at row index q sees only keys k with q - k < window.
        dropout: dropout of the probabilities.
        cpu_dtype: dtype of matrix products of 16-bit operands on a CPU, see `ops.backend_choice`.
    """

    layout: SequenceLayout
    group: Group
    scale: float
    softcap: float | None = None
    window: int | None = None
    dropout: AttentionDropout | None = None
    cpu_dtype: torch.dtype | None = None

    def blocks(self, key_rank: int | None) -> tuple[AttentionBlock, ...]:
        """Return the blocks of this rank's queries and one rank's keys; None: keys of whole
        rows."""
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
        """Return (out, lse) of `blocks`, merged into the result `into` of earlier blocks if
        given."""
        return blockwise.forward(
            query,
            key,
            value,
            blocks,
            scale=self.scale,
            softcap=self.softcap,
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
        fp32_sums: bool = False,
    ) -> Tensors:
        """Return (dq, dk, dv) of `blocks`, in fp32 if `fp32_sums`; `result` is the complete
        (out, lse)."""
        return blockwise.backward(
            grad,
            *qkv,
            *result,
            blocks,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            dropout=self.dropout,
            fp32_sums=fp32_sums,
            cpu_dtype=self.cpu_dtype,
        )


class AllGatherAttention(torch.autograd.Function):
    """forward out = attention of local queries to all keys; dgrad through all keys and values, with
    a reduce-scatter of their gradients; wgrad (sinks) of local queries.

    Saves the local q, k, v, out and lse.
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
    """Return the blocks of local queries and the keys of `_gathered`."""
    return attend.blocks(None if attend.group.size > 1 else 0)


def _gathered(
    key: torch.Tensor, value: torch.Tensor, attend: Attend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of whole rows [s, b, g, d] in the order of the row. A single rank
    returns its own in local order."""
    if attend.group.size == 1:
        return key, value
    key_value = all_gather(torch.cat([key, value], dim=2), attend.group)  # [cp · s/cp, b, 2g, d]
    keys, values = attend.layout.to_rows(key_value).chunk(2, dim=2)
    return keys, values


class AllToAllAttention(torch.autograd.Function):
    """forward out = attention of all queries to all keys for 1/cp of the heads; dgrad and wgrad
    (sinks) for the same heads. Saves q, k, v, out and lse of its heads, and the sinks."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, attend: Attend):
        cp, groups = attend.group.size, key.shape[2]
        copies = [_repeat_heads(x, cp) for x in (key, value)]  # [s/cp, b, cp · g', d]
        q, k, v = _to_heads([query, *copies], attend)  # [s, b, n/cp or g', d]
        attend = replace(attend, dropout=_local_dropout(attend, q.shape[2]))
        blocks = attend.layout.row_blocks(attend.window)
        local_sinks = None if sinks is None else _local_sinks(sinks, attend)
        out, lse = attend.forward(q, k, v, blocks)
        out, lse = blockwise.finish(out, lse, local_sinks, dtype=query.dtype)
        ctx.attend, ctx.groups = attend, groups
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return _to_sequence([out], attend)[0]

    @staticmethod
    def backward(ctx, grad):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        attend: Attend = ctx.attend
        (d_out,) = _to_heads([grad.contiguous()], attend)  # [s, b, n/cp, d]
        blocks = attend.layout.row_blocks(attend.window)
        grads = attend.backward(d_out, (q, k, v), (out, lse), blocks=blocks)
        d_sinks = None
        if sinks is not None:
            d_sinks = torch.zeros_like(sinks)
            _local_sinks(d_sinks, attend).copy_(
                sink_gradient(d_out, out, lse, _local_sinks(sinks, attend))
            )
        d_query, *copies = _to_sequence(list(grads), attend)
        d_key, d_value = (_sum_copies(x, ctx.groups) for x in copies)
        return d_query, d_key, d_value, d_sinks, None


def _to_heads(tensors: list[torch.Tensor], attend: Attend) -> list[torch.Tensor]:
    """Turn [s/cp, b, cp · x, d] into [s, b, x, d] in the order of the row, in one all-to-all."""
    # [s/cp, b, cp, x, d] each, joined to [s/cp, b, cp, x..., d]
    head_shards = [t.unflatten(2, (attend.group.size, -1)) for t in tensors]
    joined = torch.cat(head_shards, dim=3).flatten(2, 3)
    rows = attend.layout.to_rows(all_to_all_cp2hp(joined, attend.group))  # [s, b, x..., d]
    sizes = [p.shape[3] for p in head_shards]
    return [tensor.contiguous() for tensor in rows.split(sizes, dim=2)]


def _to_sequence(tensors: list[torch.Tensor], attend: Attend) -> list[torch.Tensor]:
    """Turn [s, b, x, d] in the order of the row into [s/cp, b, cp · x, d], in one all-to-all."""
    joined = attend.layout.to_ranks(torch.cat(tensors, dim=2))  # [cp · s/cp, b, x..., d]
    received = all_to_all_hp2cp(joined, attend.group)  # [s/cp, b, cp, x..., d]
    sizes = [t.shape[2] for t in tensors]
    return [tensor.flatten(2, 3).contiguous() for tensor in received.split(sizes, dim=3)]


def _repeat_heads(x: torch.Tensor, cp: int) -> torch.Tensor:
    """Repeat heads [s/cp, b, g, d] until they divide over cp ranks: [s/cp, b, cp · g', d]."""
    num_sent_heads = cp * sent_groups(x.shape[2], cp)
    copies = num_sent_heads // x.shape[2]
    return x if copies == 1 else x.repeat_interleave(copies, dim=2)


def _sum_copies(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum the copies of each head: [s/cp, b, cp · g', d] to [s/cp, b, g, d]."""
    copies = x.shape[2] // groups
    return x if copies == 1 else x.unflatten(2, (groups, copies)).sum(3)


def _local_sinks(sinks: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Return this rank's share of the heads' sinks [n], a view."""
    return sinks.chunk(attend.group.size)[attend.group.rank]


def _local_dropout(attend: Attend, heads: int):
    """Return the dropout of this rank's heads."""
    if attend.dropout is None:
        return None
    first_head = attend.dropout.head_offset + attend.group.rank * heads
    return replace(attend.dropout, head_offset=first_head)


class RingAttention(torch.autograd.Function):
    """forward out = merge of the attention to each rank's keys in turn; dgrad in the same order,
    with fp32 sums of the gradients of keys and values sent round the ring; wgrad (sinks) of local
    queries.

    Saves the local q, k, v, out and lse.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, attend: Attend):
        group = attend.group
        pair = torch.stack([key, value])  # [2, s/cp, b, g, d]
        result = None
        for step in range(group.size):
            kv_transfer = _RingTransfer.start(pair, group) if step < group.size - 1 else None
            blocks = attend.blocks((group.rank - step) % group.size)
            if blocks or result is None:
                result = attend.forward(query, pair[0], pair[1], blocks, into=result)
            if kv_transfer is not None:
                pair = kv_transfer.wait()  # after the attention, which overlaps with the transfer
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
        grad_transfer: _RingTransfer | None = None
        for step in range(group.size):
            kv_transfer = _RingTransfer.start(pair, group) if step < group.size - 1 else None
            blocks = attend.blocks((group.rank - step) % group.size)
            d_pair = None
            if blocks:
                d_query_block, *d_pair = attend.backward(
                    grad, (query, pair[0], pair[1]), (out, lse), blocks=blocks, fp32_sums=True
                )
                d_query += d_query_block
            if grad_transfer is not None:
                sums = grad_transfer.wait()
            if d_pair is not None:
                sums[0] += d_pair[0]
                sums[1] += d_pair[1]
            if group.size > 1:
                grad_transfer = _RingTransfer.start(sums, group)
            if kv_transfer is not None:
                pair = kv_transfer.wait()
        if grad_transfer is not None:
            sums = grad_transfer.wait()
        d_sinks = None if sinks is None else sink_gradient(grad, out, lse, sinks)
        d_key, d_value = sums.to(key.dtype)
        return d_query.to(query.dtype), d_key, d_value, d_sinks, None


class _RingTransfer:
    """A send of a tensor to the next rank, and a receive of the same shape from the previous
    rank."""

    def __init__(self, sent: Pending, received: Pending) -> None:
        self._sent, self._received = sent, received

    @staticmethod
    def start(tensor: torch.Tensor, group: Group) -> _RingTransfer:
        """Start both; `tensor` must not be written until `wait`."""
        next_rank, prev_rank = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        recv_buffer = torch.empty_like(tensor)
        messages = [
            P2PMessage(tensor, next_rank, sends=True),
            P2PMessage(recv_buffer, prev_rank, sends=False),
        ]
        return _RingTransfer(*exchange_async(messages, group))

    def wait(self) -> torch.Tensor:
        """Return the received tensor."""
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
        attend: options, with a layout for the ranks of the group. A single rank attends to its own
            keys, document by document.
        engine: "p2p", "all_gather", "a2a", or "auto" for the engine with the least communication.
        sinks: [n], learned logits.

    Raises:
        ValueError: a layout for other ranks, or heads that do not divide for a2a.
    """
    layout, group = attend.layout, attend.group
    sharding = layout.sharding
    if sharding is None or sharding.size != group.size or layout.rank != group.rank:
        layout_text = (
            "is not sharded"
            if sharding is None
            else f"is for rank {layout.rank} of {sharding.size}"
        )
        raise ValueError(
            f"the layout {layout_text}, but group {group.name} is rank {group.rank} of "
            f"{group.size}: make the layout for this group"
        )
    if query.shape[0] != sharding.local_length:
        raise ValueError(
            f"{query.shape[0]} queries, but the layout has {sharding.local_length} on this rank"
        )
    name = ALL_GATHER  # a single rank needs no collective
    if group.size > 1:
        shape = attention_shape(query, key)
        name = layout.once((engine, shape), lambda: choose(engine, shape, group.size).engine)
    return apply_function(_FUNCTIONS[name], query, key, value, sinks, attend)


def attention_shape(query: torch.Tensor, key: torch.Tensor) -> AttentionShape:
    """Return the shape for the choice of an engine."""
    tokens, rows, heads, features = query.shape
    return AttentionShape(
        tokens=tokens,
        rows=rows,
        heads=heads,
        groups=key.shape[2],
        features=features,
        element_bytes=query.element_size(),
    )
