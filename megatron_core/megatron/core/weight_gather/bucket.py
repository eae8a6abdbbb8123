# SPDX-License-Identifier: Apache-2.0
"""Blocks and buckets: how the weights of a store lie in flat buffers, and who shares them.

A *block* is gathered as one: one weight over gtp, or one unit (a layer) over the data-parallel
ranks. It is stored whole, or as one shard on each of the ranks that share it; the whole block then
exists only while a gatherer has it bound (`bind` … `unbind`). Handles see views of the bound
buffer. The weights of one op must be in one block: a request for another block may release the
first.

A *bucket* stores what a rank has of one or more blocks, one after another in one flat buffer. Its
gradients are summed over the ranks that hold the same shards by one collective, and a rank's
optimizer updates one range of it.

`Storage` divides the weights of a store into buckets and shards them:

strategy             stored            a bucket is
no_shard, optim,     whole             one block of about `bucket_bytes` of fp32 gradients, in
optim_grads                            reverse order of declaration (backward's: early ones fill
                                       first)
optim_grads_params   in shards         one block: a unit, or a run of weights outside any unit; by
                                       weight: a matrix and the vectors declared after it

Generalized tensor parallelism stores matrices in shards under the other strategies too: each is a
block that gtp (egtp) ranks share. A bucket is about `bucket_bytes` of the fp32 gradients of such
shards, which the data-parallel replicas hold too.

Dense weights and experts have different data-parallel groups, and thus different buckets; so have
weights of different dtypes. A bucket whose data-parallel group is one rank is stored whole under
every strategy, and neither gathered nor reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

import torch

from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_gather.wire import (
    EncodedWeight,
    GatherFormat,
    ScaleBlocks,
    WireFormat,
    wire_formats,
)
from megatron.core.weight_sharding import (
    DENSE_DATA_AXES,
    EXPERT_DATA_AXES,
    GTP,
    REPLICATE_AXES,
    GradientPlan,
    OuterStrategy,
    Placement,
    Strategy,
    placement,
    shard_range,
)

#: Every shard ends at a multiple of this many elements: 128 bytes of fp32, for vector loads.
QUANTUM = 32


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
        member_quantum: int = QUANTUM,
        shard_quantum: int = QUANTUM,
    ) -> BufferLayout:
        """Lay tensors one after another.

        Args:
            shapes: (name, shape) in order.
            parts: number of equal shards the whole must divide into.
            member_quantum: every member starts at a multiple of this.
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


class WeightSource(Protocol):
    """Who makes a block's weights whole when an op needs them."""

    def consume(self, block: BucketBlock) -> None:
        """Make the block current: bound, complete, and kept until another is."""

    def is_late(self, block: BucketBlock) -> bool:
        """Return whether updates by other ranks of what this rank stores have not arrived."""


class BucketBlock:
    """Weights that are gathered together.

    Where forward and backward gather it in different formats (1-D scale blocks), it has two planes:
    the block itself, and another one over the same storage that backward reads.

    Args:
        bucket: stores it.
        handles: in the order in which they lie.
        layout: of the whole block [numel].
        start: the first element in its bucket's storage.
        wires: the formats of its planes; none is as it is stored.
        forward: forward reads it.

    Attributes:
        views: the weights by name while the block is bound.
        stored_range: the elements of the whole block that this rank stores.
        shard_range: those that it shares with no other rank of the bucket's group.
        data: what this rank stores, a view of the bucket's storage.
        current: handles may read what is bound without asking anybody.
        source: whom to ask otherwise.
        index: its number in the plan of that source.
        wire: the format in which it is gathered; None is as it is stored.
        keeps_codes: it is multiplied in that format, and not decoded.
        encoded: what is bound then, in place of `views`.
        planes: what forward reads and what backward reads, if that is another one.
    """

    def __init__(
        self,
        bucket: Bucket,
        handles: list[WeightHandle],
        *,
        layout: BufferLayout,
        start: int,
        wires: tuple[WireFormat, ...] = (),
        forward: bool = True,
    ) -> None:
        self.bucket, self.handles, self.layout, self.start = bucket, handles, layout, start
        self.shard_range = layout.shard(bucket.group.rank)
        self.stored_range = self.shard_range if bucket.sharded else (0, layout.numel)
        low, high = self.stored_range
        self.data = bucket.data[start : start + high - low]
        self.current = not bucket.sharded
        self.wire = wires[0] if wires else None
        takes = handles[0].multiplies
        self.keeps_codes = takes is not None and isinstance(self.wire, takes)
        self.encoded: EncodedWeight | None = None
        self.views: dict[str, torch.Tensor] = {}
        self.source: WeightSource | None = None
        self.index = bucket.index
        for handle in handles:
            handle.backward_block = self
            if forward:
                handle.block = self
        self.planes: tuple[BucketBlock, ...] = (
            self,
            *(
                BucketBlock(
                    bucket, handles, layout=layout, start=start, wires=(wire,), forward=False
                )
                for wire in wires[1:]
            ),
        )
        if not bucket.sharded:
            self.bind(self.data)
        if bucket.alone:
            for handle in handles:
                handle.whole = self.views[handle.name]

    @property
    def name(self) -> str:
        """That of its unit, or of its first and last weight."""
        first, last = self.handles[-1].name, self.handles[0].name
        return self.bucket.unit or (first if first == last else f"{first} ... {last}")

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard [numel/size], a view."""
        start, stop = self.shard_range
        return self.data[start - self.stored_range[0] : stop - self.stored_range[0]]

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole block."""
        return self.layout.numel * self.data.element_size()

    @property
    def columns(self) -> int:
        """The length of the rows that a wire format encodes, of its only weight."""
        (handle,) = self.handles
        return handle.shape[-1]

    @property
    def wire_bytes(self) -> int:
        """Bytes of this rank's shard as it is gathered."""
        if self.wire is None:
            return self.shard.nbytes
        return self.wire.wire_bytes((len(self.shard) // self.columns, self.columns))

    @property
    def lease(self) -> tuple[int, torch.dtype]:
        """Elements and dtype of the buffer that the whole block is bound in."""
        if self.keeps_codes:
            return self.wire_bytes * self.bucket.group.size, torch.uint8
        return self.layout.numel, self.data.dtype

    @property
    def trainable(self) -> bool:
        """Whether any of its weights is trained."""
        return any(handle.trainable for handle in self.handles)

    def members(self) -> Iterator[tuple[WeightHandle, Member]]:
        """Pair every handle with its place in the whole block."""
        return zip(self.handles, self.layout.members, strict=True)

    def bind(self, whole: torch.Tensor) -> None:
        """Show the handles their weights in `whole` [numel]."""
        for handle, member in self.members():
            self.views[handle.name] = whole[member.start : member.stop].view(member.shape)

    def arrive(
        self, gathered: torch.Tensor, whole: torch.Tensor, *, amax: torch.Tensor | None
    ) -> None:
        """Make what was gathered in the wire format [wire_bytes · size] readable.

        Args:
            whole: what `lease` says, where it is bound.
            amax: of the whole weight, if the format needs it.
        """
        assert self.wire is not None
        columns = self.columns
        shape = (self.layout.numel // columns, columns)
        if not self.keeps_codes:
            matrix = whole.view(shape)
            self.wire.decode(gathered, shape, dtype=whole.dtype, amax=amax, out=matrix)
            return
        found = self.wire.separate(gathered, shape, amax=amax, out=whole)
        self.encoded = found.first(self.layout.members[0].stop // columns)

    def unbind(self) -> None:
        """Take away what was bound: its memory may be used for something else."""
        self.current, self.encoded = False, None
        self.views.clear()

    def need(self) -> None:
        """Have the whole weights made ready.

        Raises:
            ValueError: nobody was asked to gather them.
        """
        if self.source is None:
            raise ValueError(
                f"{self.name} is stored in shards: build DataParallel over its store to use it"
            )
        self.source.consume(self)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The element ranges that belong to no weight that is trained: padding and frozen ones."""
        found, at = [], 0
        for handle, member in self.members():
            if not handle.trainable:
                continue
            if member.start > at:
                found.append((at, member.start))
            at = member.stop
        return found + ([(at, self.layout.numel)] if at < self.layout.numel else [])


@dataclass(frozen=True)
class WeightRange:
    """Elements [start, stop) of a local weight, which lie at `at` in a flat tensor."""

    handle: WeightHandle
    start: int
    stop: int
    at: int

    def within(self, low: int, high: int) -> WeightRange | None:
        """Return what lies in [low, high) of the flat tensor, placed from `low`; None if nothing
        does."""
        first, last = max(self.at, low), min(self.at + self.stop - self.start, high)
        if first >= last:
            return None
        start = self.start + first - self.at
        return WeightRange(self.handle, start, start + last - first, first - low)


class Bucket:
    """Blocks in one flat buffer.

    Args:
        index: its number in the store.
        plan: which weights it holds.
        groups: who shares it.
        device: where it lives.
        wires: the formats in which forward and backward gather weights over gtp, or one for both;
            none is as they are stored.

    Attributes:
        unit: the unit that its weights belong to; None if to none.
        part: the model chunk that its weights belong to.
        placement: which axes shard which role; none if its data-parallel group is this rank.
        group: the ranks that share it; each owns one of `Group.size` ranges of every block.
        outer: the ranks that hold the same ranges, under hybrid sharding and generalized tensor
            parallelism; one rank otherwise.
        alone: nobody else has it: it is stored whole, and neither gathered nor reduced.
        sharded: this rank stores one shard of each block only.
        gtp: its blocks are weights sharded over gtp or egtp alone.
        outer_shards: the outer ranks own different ranges of the same shards.
        blocks: in the order in which backward fills them. One that is stored whole has no others.
        data: what this rank stores, flat.
        reduced_range: the elements of `data` whose gradients, summed over `group`, it receives.
        owned_range: the elements of `data` that this rank's optimizer updates.
    """

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        groups: BucketGroups,
        *,
        device: torch.device,
        wires: tuple[WireFormat, ...] = (),
    ) -> None:
        self.index, self.unit, self.part = index, plan.unit, plan.part
        self.placement, self.groups = plan.placement, groups
        self.group, self.outer = groups.shared, groups.outer
        self.alone = self.group.size * self.outer.size == 1
        self.gtp = plan.placement.weight == GTP
        self.sharded = bool(plan.placement.weight)
        self.outer_shards = groups.outer.size > 1 and any(
            axis in plan.placement.optimizer for axis in groups.outer_axes
        )
        assert self.sharded or len(plan.blocks) == 1
        wires = wires if self.gtp else ()
        multiple = QUANTUM * self.outer.size  # outer ranks may own equal ranges of it
        layouts = [self._layout(handles, multiple, wires) for handles in plan.blocks]
        stored = [of.numel // of.parts if self.sharded else of.numel for of in layouts]
        length = -(-sum(stored) // multiple) * multiple
        self.data = torch.zeros(length, dtype=plan.blocks[0][0].dtype, device=device)
        starts = [sum(stored[:i]) for i in range(len(stored))]
        self.blocks = [
            BucketBlock(self, handles, layout=layout, start=start, wires=wires)
            for handles, layout, start in zip(plan.blocks, layouts, starts, strict=True)
        ]
        start, stop = 0, len(self.data)
        if plan.placement.optimizer and not self.sharded:
            start, stop = self.blocks[0].shard_range
        self.reduced_range = start, stop
        if self.outer_shards:
            part = (stop - start) // groups.outer.size
            start += part * groups.outer.rank
            stop = start + part
        self.owned_range = start, stop

    @property
    def name(self) -> str:
        """That of its unit, or of its first and last weight."""
        first, last = self.handles[-1].name, self.handles[0].name
        return self.unit or (first if first == last else f"{first} ... {last}")

    @property
    def handles(self) -> list[WeightHandle]:
        """Its weights, in the order in which they lie."""
        return [handle for block in self.blocks for handle in block.handles]

    @property
    def numel(self) -> int:
        """Elements that the ranks which share it store of it together, padding included."""
        return len(self.data) * (self.group.size if self.sharded else 1)

    def _layout(
        self, handles: list[WeightHandle], multiple: int, wires: tuple[WireFormat, ...]
    ) -> BufferLayout:
        """Lay out a block. A range of one that is not among others divides by `multiple`; shards in
        wire formats are whole rows of their blocks."""
        quantum = QUANTUM if self.gtp else multiple
        if wires:
            (handle,) = handles
            rows = math.lcm(*(wire.block[0] for wire in wires))
            quantum = math.lcm(QUANTUM, rows * handle.shape[-1])
        shapes = [(handle.name, handle.shape) for handle in handles]
        return BufferLayout.of(shapes, parts=self.group.size, shard_quantum=quantum)

    @property
    def expert(self) -> bool:
        """Whether its weights are of experts."""
        return self.handles[0].sharding.expert

    @property
    def trainable(self) -> bool:
        """Whether any of its weights is trained."""
        return any(block.trainable for block in self.blocks)

    @property
    def owned(self) -> torch.Tensor:
        """The weights that this rank's optimizer updates, a view of what it stores."""
        start, stop = self.owned_range
        return self.data[start:stop]

    def stored(self) -> Iterator[WeightRange]:
        """Yield what this rank stores of every weight, and where in `data`; nothing of one leaves
        an empty range."""
        for block in self.blocks:
            low, high = block.stored_range
            for handle, member in block.members():
                start = max(member.start, low)
                stop = max(start, min(member.stop, high))
                at = block.start + start - low
                yield WeightRange(handle, start - member.start, stop - member.start, at)

    def owned_weights(self) -> Iterator[WeightRange]:
        """Yield what this rank's optimizer updates of every weight, and where in `owned`."""
        for found in self.stored():
            inside = found.within(*self.owned_range)
            if inside is not None:
                yield inside


@dataclass(frozen=True)
class Reduction:
    """A sum of gradients over a group of ranks.

    Args:
        scatter: each rank receives its own range of the sum (reduce-scatter), else all of it
            (all-reduce).
        each_microbatch: in every microbatch, else once a step.
    """

    scatter: bool
    each_microbatch: bool


def reductions(
    placed: Placement, outer_axes: tuple[str, ...], *, once: bool = False
) -> tuple[Reduction, Reduction]:
    """Return the sums that make a bucket's gradients whole, in order: of each block over the ranks
    that share it, then of the bucket's shards over the outer ranks.

    Args:
        placed: which data axes shard which role of its weights.
        outer_axes: those that the outer ranks are on.
        once: whole gradients are kept until the last microbatch, wherever shards are.
    """
    return (
        Reduction(bool(placed.optimizer), bool(placed.gradient) and not once),
        Reduction(
            any(axis in placed.optimizer for axis in outer_axes),
            any(axis in placed.gradient for axis in outer_axes) and not once,
        ),
    )


Granularity: TypeAlias = Literal["unit", "weight"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How weights are stored.

    Args:
        strategy: the strategy of the data-parallel engine that will be built over the store.
        outer: what hybrid sharding does over the outer data axis: "no_shard" or "optim".
        bucket_bytes: fp32 gradient bytes after which a bucket closes, where weights are stored
            whole or over gtp; a weight is never split.
        granularity: of weights that are stored in shards: a block is a "unit" or a "weight".
        gather_format: in which weights sharded over gtp are gathered, see `wire`; "bf16" is their
            own dtype.
        gather_scale_blocks: "2d" or "1d" blocks of that format's scales.
        initialize: write initial values; otherwise zeros.

    Raises:
        ValueError: an unknown strategy, granularity or format, or 1-D scale blocks of a format
            that has none.
    """

    strategy: Strategy = "no_shard"
    outer: OuterStrategy = "no_shard"
    bucket_bytes: int = 160_000_000
    granularity: Granularity = "unit"
    gather_format: GatherFormat = "bf16"
    gather_scale_blocks: ScaleBlocks = "2d"
    initialize: bool = True

    def __post_init__(self) -> None:
        placement(self.strategy, self.outer)
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity {self.granularity!r}: use {' or '.join(GRANULARITIES)}")
        wire_formats(self.gather_format, scale_blocks=self.gather_scale_blocks)

    @property
    def wires(self) -> tuple[WireFormat, ...]:
        """The formats of what forward and backward read, one if it is the same; none is no
        encoding."""
        if self.gather_format == "bf16":
            return ()
        return wire_formats(self.gather_format, scale_blocks=self.gather_scale_blocks)

    @property
    def placement(self) -> Placement:
        return placement(self.strategy, self.outer)

    def effective(self, groups: ProcessGroupCollection) -> Placement:
        """Return the strategy's placement on these ranks: none where the data-parallel groups of
        dense weights and of experts both have one rank.

        Where only one of the two has one rank, its buckets have no placement of their own.
        """
        data_axes = DENSE_DATA_AXES + EXPERT_DATA_AXES
        sizes = [groups.grid.size(axis) for axis in data_axes]
        return Placement() if max(sizes) == 1 else self.placement


@dataclass(frozen=True)
class BucketPlan:
    """The weights of a bucket to be, before anything is allocated.

    Args:
        unit: the unit that they belong to; None if to none.
        blocks: the weights of each, those without weight decay last: the optimizer then sees two
            ranges a block, not one a weight.
        part: the model chunk that they belong to.
        placement: which axes shard which role of each.
    """

    unit: str | None
    blocks: list[list[WeightHandle]]
    part: int
    placement: Placement


def bucket_plans(
    handles: Iterable[WeightHandle],
    plans: Mapping[str, GradientPlan],
    *,
    units: Mapping[str, str | None],
    parts: Mapping[str, int],
    storage: Storage,
    strategy: Placement,
    grid: RankGrid,
) -> list[BucketPlan]:
    """Divide weights into buckets, each of one data-parallel group, one placement, one dtype and
    one model chunk.

    A weight of several pipeline stages has a bucket to itself: its owners then lay it out alike,
    and hold the same ranges of it, whatever else they have.

    Args:
        handles: in order of declaration.
        plans: by weight name.
        units: the unit of each weight by name; None if it is in none.
        parts: the part of each weight by name.
        strategy: what it shards; buckets are filled by bytes unless that is weights.
        grid: decides what gtp shards.

    Returns:
        In the order in which backward fills them.
    """
    found: list[BucketPlan] = []
    opened: dict[tuple[str, torch.dtype, Placement], list[WeightHandle]] = {}
    opened_bytes: dict[tuple[str, torch.dtype, Placement], int] = {}
    unit: str | None = None
    part = 0

    def close(kind: tuple[str, torch.dtype, Placement]) -> None:
        members, placed = opened.pop(kind), kind[-1]
        del opened_bytes[kind]
        if placed.weight == GTP:
            blocks = [[handle] for handle in members]
        else:
            blocks = [sorted(members, key=lambda h: not h.sharding.weight_decay)]
        found.append(BucketPlan(unit, blocks, part, placed))

    def reduced_bytes(handle: WeightHandle, placed: Placement) -> int:
        shards = grid.size(handle.sharding.gtp_axis) if placed.weight == GTP else 1
        return 4 * math.prod(handle.shape) // shards

    # Backward goes through the last model chunk first, in whatever order they were declared.
    for handle in sorted(reversed(list(handles)), key=lambda h: -parts[h.name]):
        placed = handle.sharding.placement(grid, strategy)
        kind = plans[handle.name].data_group, handle.dtype, placed
        shared = len(set(handle.sharding.stages)) > 1
        if shared or parts[handle.name] != part:
            for other in list(opened):
                close(other)
            part = parts[handle.name]
        if strategy.weight and units[handle.name] != unit:
            for other in list(opened):
                close(other)
            unit = units[handle.name]
        opened.setdefault(kind, []).append(handle)
        opened_bytes[kind] = opened_bytes.get(kind, 0) + reduced_bytes(handle, placed)
        if strategy.weight:
            full = storage.granularity == "weight" and len(handle.shape) > 1
        else:
            full = opened_bytes[kind] >= storage.bucket_bytes
        if full or shared:
            close(kind)
    for kind in list(opened):
        close(kind)
    return found


@dataclass(frozen=True)
class BucketGroups:
    """Who shares a bucket: its owners, the ranks that hold the same ranges, and who gathers it.

    `outer_axes` are the data axes that `outer` spans, as a placement names them.
    """

    shared: Group
    outer: Group
    gather: Group
    outer_axes: tuple[str, ...] = REPLICATE_AXES

    @staticmethod
    def of(groups: ProcessGroupCollection, data_group: str, placement: Placement) -> BucketGroups:
        """Choose the groups of a placement; `data_group` ("gtp_cp_dp" or "egtp_edp") reduces the
        gradients."""
        expert = data_group == "egtp_edp"
        prefix = "expert_" if expert else ""
        if placement.weight == GTP:
            shared, replicas = ("egtp", "edp") if expert else ("gtp", "dp_cp")
            return BucketGroups(
                groups[shared], groups[replicas], groups[f"{shared}_gather"], ("cp", "dp_inner")
            )
        alone = Group.single("outer", groups.rank)
        hybrid = groups.grid.instances > 1 and bool(placement.optimizer)
        shared = groups[f"{prefix}shard" if hybrid else data_group]
        outer = groups[f"{prefix}replicate"] if hybrid else alone
        # Gathers have a communicator of their own: they never queue behind gradients.
        gather = groups[f"{prefix}shard_gather"] if placement.weight else shared
        return BucketGroups(shared, outer, gather)
