# SPDX-License-Identifier: Apache-2.0
"""Flat storage of many tensors over a group of ranks: a layout and a placement.

The weights of one bucket of a data-parallel engine are one of these, whole on every rank or in
shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from megatron.core.process_groups import Group
from megatron.core.weight_sharding import shard_range


class BufferPlacement(Enum):
    """What this rank's storage means: the whole, or this rank's range of it."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True)
class Member:
    """One tensor in a flat buffer: its name, shape and first element."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class BufferLayout:
    """Where each member is in a flat buffer [numel] that `parts` ranks share evenly."""

    members: tuple[Member, ...]
    numel: int
    parts: int

    @staticmethod
    def of(
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        *,
        parts: int,
        member_quantum: int = 32,
        shard_quantum: int = 32,
    ) -> BufferLayout:
        """Lay tensors one after another.

        Args:
            shapes: (name, shape) in order.
            parts: number of equal shards the whole must divide into.
            member_quantum: every member starts at a multiple of this (32 fp32 = 128 bytes: vector
                loads).
            shard_quantum: every shard boundary is a multiple of this.
        """
        members, at = [], 0
        for name, shape in shapes:
            at = -(-at // member_quantum) * member_quantum
            members.append(Member(name, tuple(shape), at))
            at = members[-1].stop
        _, numel = shard_range(at, parts, parts - 1, quantum=shard_quantum)
        return BufferLayout(tuple(members), numel, parts)

    def shard(self, index: int) -> tuple[int, int]:
        """Return the element range of shard `index`."""
        part = self.numel // self.parts
        return index * part, (index + 1) * part


@dataclass
class ShardedBuffer:
    """A flat tensor [numel] (one shard: [numel/size]) with its layout, group and placement."""

    layout: BufferLayout
    group: Group
    placement: BufferPlacement
    data: torch.Tensor

    @staticmethod
    def empty(
        layout: BufferLayout,
        group: Group,
        *,
        placement: BufferPlacement,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ShardedBuffer:
        """Allocate a buffer of zeros (padding must be zero: it takes part in sums).

        Raises:
            ValueError: the layout was made for another number of ranks.
        """
        if layout.parts != group.size:
            raise ValueError(f"a layout for {layout.parts} shards on a group of {group.size}")
        sharded = placement is BufferPlacement.SHARDED
        numel = layout.numel // group.size if sharded else layout.numel
        data = torch.zeros(numel, dtype=dtype, device=device)
        return ShardedBuffer(layout, group, placement, data)

    def view(self, member: Member) -> torch.Tensor:
        """Return a member as a tensor of its shape; the buffer must hold the whole."""
        if self.placement is BufferPlacement.SHARDED:
            raise ValueError(f"{member.name}: this buffer holds one shard, not whole tensors")
        return self.data[member.start : member.stop].view(member.shape)

    @property
    def shard_range(self) -> tuple[int, int]:
        """The element range that is this rank's shard."""
        return self.layout.shard(self.group.rank)

    @property
    def stored_range(self) -> tuple[int, int]:
        """The element range that this rank's storage covers."""
        whole = self.data.numel() == self.layout.numel
        return (0, self.layout.numel) if whole else self.shard_range

    def shard(self) -> torch.Tensor:
        """Return this rank's shard [numel/size], a view."""
        low, _ = self.stored_range
        start, stop = self.shard_range
        return self.data[start - low : stop - low]
