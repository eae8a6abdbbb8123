# SPDX-License-Identifier: Apache-2.0
"""Blocks and buckets: the layout of a store's weights in flat buffers, and the ranks that share
them.

A *block* is all-gathered by one collective: one weight over gtp, or one unit (a layer) over the
data-parallel ranks. A block is stored whole, or as one shard on each rank of its group. A sharded
block exists unsharded only between `attach` and `reshard`: a gatherer attaches an unsharded buffer,
and the handles see views of this buffer. All weights of one op must be in one block, because
unsharding another block may reshard the first.

A *bucket* stores this rank's shards of one or more blocks, one after another in one flat buffer.
One collective sums the gradients of a bucket over its group, and a rank's optimizer updates one
range of it.

`Storage` divides the weights of a store into buckets and shards them:

strategy             stored            a bucket is
no_shard, optim,     whole             one block of about `bucket_bytes` of fp32 gradients, in
optim_grads                            reverse order of declaration (backward's: early ones fill
                                       first)
optim_grads_params   in shards         one block: a unit, or consecutive weights outside any unit;
                                       by weight: a matrix and the vectors declared after it

Generalized tensor parallelism stores matrices in shards under every strategy: each matrix is a
block, sharded over the gtp (egtp) ranks. A bucket then holds about `bucket_bytes` of fp32 gradients
of these shards, and is replicated over the data-parallel ranks.

Dense weights and experts have different data-parallel groups, so they are in different buckets.
Weights of different dtypes are in different buckets too. A bucket whose data-parallel group is a
single rank is stored whole under every strategy, and is neither gathered nor reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

import torch

from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.weight_gather.gather_format import (
    EncodedWeight,
    GatherFormat,
    GatherFormatName,
    ScaleBlocks,
    gather_formats,
)
from megatron.core.weight_gather.handle import WeightHandle
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

#: Shard boundaries are multiples of this many elements: 128 bytes of fp32, for vector loads.
ALIGNMENT = 32


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
    """The members of a flat buffer [numel] that is divided into `num_shards` equal shards."""

    members: tuple[Member, ...]
    numel: int
    num_shards: int

    @staticmethod
    def of(
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        *,
        num_shards: int,
        member_alignment: int = ALIGNMENT,
        shard_alignment: int = ALIGNMENT,
    ) -> BufferLayout:
        """Lay tensors out one after another.

        Args:
            shapes: (name, shape) in order.
            num_shards: number of equal shards of the buffer, which is padded to divide evenly.
            member_alignment: every member starts at a multiple of this.
            shard_alignment: every shard boundary is a multiple of this.
        """
        members, offset = [], 0
        for name, shape in shapes:
            offset = -(-offset // member_alignment) * member_alignment
            members.append(Member(name, tuple(shape), offset))
            offset = members[-1].stop
        # Equal shards: an all-gather and a reduce-scatter exchange the same number of elements
        # with every rank, so the buffer is padded at its end.
        _, numel = shard_range(offset, num_shards, num_shards - 1, quantum=shard_alignment)
        return BufferLayout(tuple(members), numel, num_shards)

    def shard(self, index: int) -> tuple[int, int]:
        """Return the element range of shard `index`."""
        shard_numel = self.numel // self.num_shards
        return index * shard_numel, (index + 1) * shard_numel


class BlockGatherer(Protocol):
    """Unshards a block when an op needs its weights."""

    def unshard(self, block: BucketBlock) -> None:
        """Attach the unsharded weights of a block; they stay until another block is unsharded."""

    def is_stale(self, block: BucketBlock) -> bool:
        """Return whether this rank's storage lacks updates that other ranks have made."""
        ...


class BucketBlock:
    """Weights that are gathered together.

    With 1-D scale blocks, forward and backward gather a block in different formats. It then has a
    second block over the same storage, which backward reads.

    Args:
        bucket: the bucket that stores the block.
        handles: the handles of its weights, in the order of the layout.
        layout: of the unsharded block [numel].
        start: offset of the block in the storage of its bucket, in elements.
        formats: the gather formats of forward and backward, or one for both; empty if the weights
            are gathered in their own dtype.
        forward: forward reads this block.

    Attributes:
        views: the unsharded weights by name, while the block is attached.
        stored_range: the elements of the unsharded block that this rank stores.
        shard_range: this rank's shard among the ranks of the bucket's group, in elements.
        data: this rank's storage of the block, a view of the bucket's.
        ready: handles may read the attached weights without a call of `unshard`.
        gatherer: unshards the block if it is not ready.
        index: number of the block in the gatherer's plan.
        gather_format: the format of its all-gather; None is the dtype of the weights.
        keeps_quantized: kernels multiply in the gather format, so the weight is not decoded.
        encoded: the quantized weight, attached in place of `views` if `keeps_quantized`.
        directions: the block that forward reads, and the block that backward reads if it differs.
    """

    def __init__(
        self,
        bucket: Bucket,
        handles: list[WeightHandle],
        *,
        layout: BufferLayout,
        start: int,
        formats: tuple[GatherFormat, ...] = (),
        forward: bool = True,
    ) -> None:
        self.bucket, self.handles, self.layout, self.start = bucket, handles, layout, start
        self.shard_range = layout.shard(bucket.group.rank)
        self.stored_range = self.shard_range if bucket.sharded else (0, layout.numel)
        low, high = self.stored_range
        self.data = bucket.data[start : start + high - low]
        # A block stored whole is attached for good; `Gatherer.invalidate` clears `ready` after
        # other ranks have updated their ranges of it.
        self.ready = not bucket.sharded
        self.gather_format = formats[0] if formats else None
        matmul_format = handles[0].matmul_format
        self.keeps_quantized = matmul_format is not None and isinstance(
            self.gather_format, matmul_format
        )
        self.encoded: EncodedWeight | None = None
        self.views: dict[str, torch.Tensor] = {}
        self.gatherer: BlockGatherer | None = None
        self.index = bucket.index
        # With 1-D scale blocks the block of backward, constructed below, replaces this one as
        # `backward_block`.
        for handle in handles:
            handle.backward_block = self
            if forward:
                handle.block = self
        self.directions: tuple[BucketBlock, ...] = (
            self,
            *(
                BucketBlock(
                    bucket,
                    handles,
                    layout=layout,
                    start=start,
                    formats=(gather_format,),
                    forward=False,
                )
                for gather_format in formats[1:]
            ),
        )
        if not bucket.sharded:
            self.attach(self.data)
        if bucket.single_rank:
            # No gatherer resets `ready` of this block, so handles may bypass it.
            for handle in handles:
                handle.unsharded_param = self.views[handle.name]

    @property
    def name(self) -> str:
        """The name of its unit, or the names of its first and last weight."""
        return self.bucket.unit or _span_name(self.handles)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard [numel/size], a view."""
        start, stop = self.shard_range
        return self.data[start - self.stored_range[0] : stop - self.stored_range[0]]

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded block in the dtype of its weights."""
        return self.layout.numel * self.data.element_size()

    @property
    def columns(self) -> int:
        """The row length c of its only weight [r, c], as a gather format encodes it."""
        (handle,) = self.handles
        return handle.shape[-1]

    @property
    def encoded_bytes(self) -> int:
        """Bytes of this rank's shard in its gather format."""
        if self.gather_format is None:
            return self.shard.nbytes
        return self.gather_format.encoded_bytes((len(self.shard) // self.columns, self.columns))

    @property
    def buffer_spec(self) -> tuple[int, torch.dtype]:
        """Number of elements and dtype of the buffer for the unsharded block."""
        if self.keeps_quantized:
            return self.encoded_bytes * self.bucket.group.size, torch.uint8
        return self.layout.numel, self.data.dtype

    @property
    def trainable(self) -> bool:
        """Whether any of its weights is trained."""
        return any(handle.trainable for handle in self.handles)

    def members(self) -> Iterator[tuple[WeightHandle, Member]]:
        """Pair every handle with its range of the unsharded block."""
        return zip(self.handles, self.layout.members, strict=True)

    def attach(self, unsharded: torch.Tensor) -> None:
        """Let the handles read their weights as views of `unsharded` [numel]."""
        for handle, member in self.members():
            self.views[handle.name] = unsharded[member.start : member.stop].view(member.shape)

    def decode(
        self, gathered: torch.Tensor, unsharded: torch.Tensor, *, amax: torch.Tensor | None
    ) -> None:
        """Decode the gathered shards, or unpack them for a kernel that reads the quantized values.

        Args:
            gathered: [encoded_bytes · group size] uint8, the encoded shards in order of rank.
            unsharded: the buffer that `buffer_spec` describes; written.
            amax: largest magnitude of the weight, if the format needs it.
        """
        assert self.gather_format is not None
        columns = self.columns
        shape = (self.layout.numel // columns, columns)
        if not self.keeps_quantized:
            matrix = unsharded.view(shape)
            self.gather_format.decode(gathered, shape, dtype=unsharded.dtype, amax=amax, out=matrix)
            return
        encoded = self.gather_format.unpack(gathered, shape, amax=amax, out=unsharded)
        self.encoded = encoded.first_rows(self.layout.members[0].stop // columns)

    def reshard(self) -> None:
        """Drop the views of the unsharded buffer, whose memory may be reused after this."""
        # A view that stayed would read whatever the pool stores in this buffer next.
        self.ready, self.encoded = False, None
        self.views.clear()

    def unshard(self) -> None:
        """Have the gatherer attach the unsharded weights.

        Raises:
            ValueError: no gatherer has been built over the store.
        """
        if self.gatherer is None:
            raise ValueError(
                f"{self.name} is stored in shards: build DataParallel over its store to use it"
            )
        self.gatherer.unshard(self)

    @property
    def untrained_ranges(self) -> list[tuple[int, int]]:
        """The element ranges without a gradient: padding and frozen weights."""
        ranges, end = [], 0
        for handle, member in self.members():
            if not handle.trainable:
                continue
            if member.start > end:
                ranges.append((end, member.start))
            end = member.stop
        return ranges + ([(end, self.layout.numel)] if end < self.layout.numel else [])


def _span_name(handles: Sequence[WeightHandle]) -> str:
    """Return the names of the first and the last declared weight of a block or bucket."""
    # Backward fills a bucket in reverse order of declaration.
    first_name, last_name = handles[-1].name, handles[0].name
    return first_name if first_name == last_name else f"{first_name} ... {last_name}"


@dataclass(frozen=True)
class WeightRange:
    """Elements [start, stop) of a local weight, stored from `offset` in a flat tensor."""

    handle: WeightHandle
    start: int
    stop: int
    offset: int

    def within(self, low: int, high: int) -> WeightRange | None:
        """Return the intersection with elements [low, high) of the flat tensor, its offset relative
        to `low`; None if it is empty."""
        begin, end = max(self.offset, low), min(self.offset + self.stop - self.start, high)
        if begin >= end:
            return None
        start = self.start + begin - self.offset
        return WeightRange(self.handle, start, start + end - begin, begin - low)


class Bucket:
    """Blocks in one flat buffer.

    Args:
        index: number of the bucket in the store.
        plan: the weights of the bucket.
        groups: the process groups of the bucket.
        device: of the storage.
        formats: the gather formats of forward and backward for weights over gtp, or one for both;
            empty if they are gathered in their own dtype.

    Attributes:
        unit: the unit of its weights; None for weights outside any unit.
        model_chunk: the model chunk of its weights.
        placement: the axes that shard weights, gradients and optimizer state; empty if its
            data-parallel group is a single rank.
        group: the shard group: each of its ranks owns one of `Group.size` ranges of every block.
        outer: the replicate group: ranks that store the same shards, under hybrid sharding and
            generalized tensor parallelism; a single rank otherwise.
        single_rank: no other rank stores the bucket: it is neither gathered nor reduced.
        sharded: this rank stores only its shard of each block.
        gtp: its blocks are weights sharded over gtp or egtp only.
        outer_shards: the outer ranks own different ranges of the shard that they all store.
        blocks: in the order in which backward fills them. A bucket stored whole has one block.
        data: this rank's storage, flat.
        reduced_range: the elements of `data` whose gradients this rank receives, summed over
            `group`.
        owned_range: the elements of `data` that this rank's optimizer updates.
    """

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        groups: BucketGroups,
        *,
        device: torch.device,
        formats: tuple[GatherFormat, ...] = (),
    ) -> None:
        self.index, self.unit, self.model_chunk = index, plan.unit, plan.model_chunk
        self.placement, self.groups = plan.placement, groups
        self.group, self.outer = groups.shard, groups.outer
        self.single_rank = self.group.size * self.outer.size == 1
        self.gtp = plan.placement.weight == GTP
        self.sharded = bool(plan.placement.weight)
        self.outer_shards = groups.outer.size > 1 and any(
            axis in plan.placement.optimizer for axis in groups.outer_axes
        )
        assert self.sharded or len(plan.blocks) == 1
        formats = formats if self.gtp else ()
        # A reduce-scatter over the outer ranks divides a shard into equal ranges once more.
        alignment = ALIGNMENT * self.outer.size
        layouts = [self._layout(handles, alignment, formats) for handles in plan.blocks]
        stored = [x.numel // x.num_shards if self.sharded else x.numel for x in layouts]
        length = -(-sum(stored) // alignment) * alignment
        # Padding is zero: it is gathered and encoded with the weights, and the largest magnitude
        # of a shard covers it.
        self.data = torch.zeros(length, dtype=plan.blocks[0][0].dtype, device=device)
        starts = [sum(stored[:i]) for i in range(len(stored))]
        self.blocks = [
            BucketBlock(self, handles, layout=layout, start=start, formats=formats)
            for handles, layout, start in zip(plan.blocks, layouts, starts, strict=True)
        ]
        # A bucket stored whole is reduce-scattered if the optimizer state is sharded. A sharded
        # bucket stores its reduced range only.
        start, stop = 0, len(self.data)
        if plan.placement.optimizer and not self.sharded:
            start, stop = self.blocks[0].shard_range
        self.reduced_range = start, stop
        if self.outer_shards:
            # The outer reduce-scatter divides this rank's shard once more.
            numel = (stop - start) // groups.outer.size
            start += numel * groups.outer.rank
            stop = start + numel
        self.owned_range = start, stop

    @property
    def name(self) -> str:
        """The name of its unit, or the names of its first and last weight."""
        return self.unit or _span_name(self.handles)

    @property
    def handles(self) -> list[WeightHandle]:
        """Its weights in the order of storage."""
        return [handle for block in self.blocks for handle in block.handles]

    @property
    def numel(self) -> int:
        """Elements of the bucket over all ranks of its group, padding included."""
        return len(self.data) * (self.group.size if self.sharded else 1)

    def _layout(
        self, handles: list[WeightHandle], alignment: int, formats: tuple[GatherFormat, ...]
    ) -> BufferLayout:
        """Lay out a block; encoded shards are whole block rows of the format's scale blocks."""
        alignment = ALIGNMENT if self.gtp else alignment
        if formats:
            (handle,) = handles
            rows = math.lcm(*(gather_format.block[0] for gather_format in formats))
            alignment = math.lcm(ALIGNMENT, rows * handle.shape[-1])
        shapes = [(handle.name, handle.shape) for handle in handles]
        return BufferLayout.of(shapes, num_shards=self.group.size, shard_alignment=alignment)

    @property
    def expert(self) -> bool:
        """Whether its weights are expert weights."""
        return self.handles[0].sharding.expert

    @property
    def trainable(self) -> bool:
        """Whether any of its weights is trained."""
        return any(block.trainable for block in self.blocks)

    @property
    def owned(self) -> torch.Tensor:
        """The weights that this rank's optimizer updates, a view of `data`."""
        start, stop = self.owned_range
        return self.data[start:stop]

    def stored_weights(self) -> Iterator[WeightRange]:
        """Yield this rank's range of every weight and its offset in `data`; the range is empty if
        the weight is stored on other ranks."""
        for block in self.blocks:
            low, high = block.stored_range
            for handle, member in block.members():
                start = max(member.start, low)
                stop = max(start, min(member.stop, high))
                offset = block.start + start - low
                yield WeightRange(handle, start - member.start, stop - member.start, offset)

    def owned_weights(self) -> Iterator[WeightRange]:
        """Yield the range of each weight that this rank's optimizer updates, its offset in
        `owned`."""
        for weight in self.stored_weights():
            inside = weight.within(*self.owned_range)
            if inside is not None:
                yield inside


@dataclass(frozen=True)
class Reduction:
    """A reduction of gradients over a process group.

    Args:
        scatter: reduce-scatter: each rank receives its shard of the sum; otherwise all-reduce.
        every_microbatch: reduce in every microbatch, otherwise once a step.
    """

    scatter: bool
    every_microbatch: bool


def reductions(
    placement: Placement, outer_axes: tuple[str, ...], *, per_step: bool = False
) -> tuple[Reduction, Reduction]:
    """Return the two reductions of a bucket's gradients, in order: of each block over the shard
    group, then of the bucket's shards over the outer ranks.

    Args:
        placement: the data axes that shard weights, gradients and optimizer state.
        outer_axes: the data axes of the outer ranks.
        per_step: unreduced gradients are kept until the last microbatch, also where the placement
            shards them.
    """
    return (
        Reduction(bool(placement.optimizer), bool(placement.gradient) and not per_step),
        Reduction(
            any(axis in placement.optimizer for axis in outer_axes),
            any(axis in placement.gradient for axis in outer_axes) and not per_step,
        ),
    )


Granularity: TypeAlias = Literal["unit", "weight"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How weights are stored.

    Args:
        strategy: the strategy of the data-parallel engine that will be built over the store.
        outer: strategy of hybrid sharding over the outer data axis: "no_shard" or "optim".
        bucket_bytes: fp32 gradient bytes after which a bucket closes, for weights stored whole or
            over gtp; a weight is never split.
        granularity: a block of weights stored in shards is a "unit" or a "weight".
        gather_format: format of the all-gather of weights sharded over gtp, see `gather_format`;
            "bf16" is the dtype of the weights.
        gather_scale_blocks: "2d" or "1d" scale blocks of the gather format.
        initialize: write initial values; otherwise zeros.

    Raises:
        ValueError: an unknown strategy, granularity or format, or 1-D scale blocks of a format
            that has none.
    """

    strategy: Strategy = "no_shard"
    outer: OuterStrategy = "no_shard"
    bucket_bytes: int = 160_000_000
    granularity: Granularity = "unit"
    gather_format: GatherFormatName = "bf16"
    gather_scale_blocks: ScaleBlocks = "2d"
    initialize: bool = True

    def __post_init__(self) -> None:
        placement(self.strategy, self.outer)
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity {self.granularity!r}: use {' or '.join(GRANULARITIES)}")
        gather_formats(self.gather_format, scale_blocks=self.gather_scale_blocks)

    @property
    def gather_formats(self) -> tuple[GatherFormat, ...]:
        """The gather formats of forward and backward, or one for both; empty without encoding."""
        if self.gather_format == "bf16":
            return ()
        return gather_formats(self.gather_format, scale_blocks=self.gather_scale_blocks)

    @property
    def placement(self) -> Placement:
        return placement(self.strategy, self.outer)

    def effective(self, groups: ProcessGroupCollection) -> Placement:
        """Return the strategy's placement on these ranks, which is empty if the data-parallel group
        of dense weights and the data-parallel group of experts both have a single rank.

        If only one of the two groups has a single rank, its buckets have an empty placement.
        """
        rank_axes = (DENSE_DATA_AXES, EXPERT_DATA_AXES)
        sizes = [groups.grid.size(axis) for axes in rank_axes for axis in axes]
        return Placement() if max(sizes) == 1 else self.placement


@dataclass(frozen=True)
class BucketPlan:
    """The weights of a bucket before it is allocated.

    Args:
        unit: the unit of the weights; None for weights outside any unit.
        blocks: the weights of each block, weights without weight decay last: the optimizer then
            updates two ranges per block rather than one range per weight.
        model_chunk: the model chunk of the weights.
        placement: the axes that shard weights, gradients and optimizer state.
    """

    unit: str | None
    blocks: list[list[WeightHandle]]
    model_chunk: int
    placement: Placement


def bucket_plans(
    handles: Iterable[WeightHandle],
    plans: Mapping[str, GradientPlan],
    *,
    units: Mapping[str, str | None],
    model_chunks: Mapping[str, int],
    storage: Storage,
    strategy: Placement,
    grid: RankGrid,
) -> list[BucketPlan]:
    """Divide weights into buckets, each of one data-parallel group, one placement, one dtype and
    one model chunk.

    A weight that several pipeline stages share has a bucket to itself. These stages then lay it
    out alike and own the same ranges of it, whatever other weights they have.

    Args:
        handles: the weights in order of declaration.
        plans: the gradient plan of each weight by name.
        units: the unit of each weight by name; None for a weight outside any unit.
        model_chunks: the model chunk of each weight by name.
        strategy: placement of the strategy; buckets are filled by bytes unless it shards weights.
        grid: the rank grid, which decides whether gtp shards a weight.

    Returns:
        Bucket plans in the order in which backward fills the buckets.
    """
    closed: list[BucketPlan] = []
    open_handles: dict[tuple[str, torch.dtype, Placement], list[WeightHandle]] = {}
    open_bytes: dict[tuple[str, torch.dtype, Placement], int] = {}
    unit: str | None = None
    model_chunk = 0

    def close(key: tuple[str, torch.dtype, Placement]) -> None:
        members, placement = open_handles.pop(key), key[-1]
        del open_bytes[key]
        if placement.weight == GTP:
            # Each weight is gathered by itself, just before its matrix product.
            blocks = [[handle] for handle in members]
        else:
            blocks = [sorted(members, key=lambda h: not h.sharding.weight_decay)]
        closed.append(BucketPlan(unit, blocks, model_chunk, placement))

    def reduced_bytes(handle: WeightHandle, placement: Placement) -> int:
        # fp32 bytes, whatever the dtype: buckets are then the same for every gradient dtype.
        shards = grid.size(handle.sharding.gtp_axis) if placement.weight == GTP else 1
        return 4 * math.prod(handle.shape) // shards

    # Buckets follow the order of backward, so that they fill one after another: the last model
    # chunk first, and within a chunk the reverse order of declaration.
    for handle in sorted(reversed(list(handles)), key=lambda h: -model_chunks[h.name]):
        placement = handle.sharding.placement(grid, strategy)
        key = plans[handle.name].data_group, handle.dtype, placement
        tied = len(set(handle.sharding.stages)) > 1
        # A tied weight is summed over its stages, which must agree on its owned ranges.
        if tied or model_chunks[handle.name] != model_chunk:
            for open_key in list(open_handles):
                close(open_key)
            model_chunk = model_chunks[handle.name]
        if strategy.weight and units[handle.name] != unit:
            for open_key in list(open_handles):
                close(open_key)
            unit = units[handle.name]
        open_handles.setdefault(key, []).append(handle)
        open_bytes[key] = open_bytes.get(key, 0) + reduced_bytes(handle, placement)
        if strategy.weight:
            full = storage.granularity == "weight" and len(handle.shape) > 1
        else:
            full = open_bytes[key] >= storage.bucket_bytes
        if full or tied:
            close(key)
    for key in list(open_handles):
        close(key)
    return closed


@dataclass(frozen=True)
class BucketGroups:
    """The process groups of a bucket.

    Args:
        shard: the shard group: each rank owns one shard of every block.
        outer: the replicate group: ranks with the same shards.
        gather: the communicator of the all-gathers over the ranks of `shard`.
        outer_axes: the data axes that `outer` spans, as a placement names them.
    """

    shard: Group
    outer: Group
    gather: Group
    outer_axes: tuple[str, ...] = REPLICATE_AXES

    @staticmethod
    def of(groups: ProcessGroupCollection, group_name: str, placement: Placement) -> BucketGroups:
        """Choose the groups of a placement.

        Args:
            groups: all process groups.
            group_name: the data-parallel group, "dense_dp" or "expert_dp".
            placement: the axes that shard weights, gradients and optimizer state.
        """
        expert = group_name == "expert_dp"
        prefix = "expert_" if expert else ""
        if placement.weight == GTP:
            shard_name, replicate_name = ("egtp", "edp") if expert else ("gtp", "dp_cp")
            return BucketGroups(
                shard=groups[shard_name],
                outer=groups[replicate_name],
                gather=groups[f"{shard_name}_gather"],
                outer_axes=("cp", "dp_inner"),
            )
        single_rank = Group.single("outer", groups.rank)
        hybrid = groups.grid.instances > 1 and bool(placement.optimizer)
        shard = groups[f"{prefix}shard" if hybrid else group_name]
        outer = groups[f"{prefix}replicate"] if hybrid else single_rank
        # A communicator runs its collectives in order. All-gathers have one of their own, so a
        # prefetch of weights never queues behind a reduce-scatter of gradients.
        gather = shard
        if placement.weight:
            gather = groups[f"{prefix}shard_gather"]
        return BucketGroups(shard, outer, gather)
