# SPDX-License-Identifier: Apache-2.0
"""The cost of a data-parallel strategy: memory per rank, and collectives per step.

Pure arithmetic on the sizes of the buckets, for tests of the engine, for the line that a run logs
at its start, and to choose a strategy by. With w, g, s bytes of weight, gradient and optimizer
state per element, over i inner and o outer data-parallel ranks (ZeRO: Rajbhandari et al. 2020,
section 5):

    no_shard              w + g + s
    optim                 w + g + s/i
    optim_grads           w + (4 + s)/i         and unreduced gradients
    optim_grads_params    (w + 4 + s)/i         and unreduced gradients and unsharded weights
      outer "optim"       (w + 4)/i + s/(i·o)

Unreduced gradients are the buffers of buckets that backward fills or that are being reduced.
Sharded gradients are stored in fp32, whatever the dtype of the buffers that backward fills.

A weight sharded over g gtp ranks is stored as under hybrid sharding, with the g ranks as the inner
and its r replicas as the outer ranks. Strategies shard over the replicas too:

    no_shard              (w + 4 + s)/g         and unreduced gradients
    optim                 (w + 4)/g + s/(g·r)   and unreduced gradients
    optim_grads           w/g + (4 + s)/(g·r)   and unreduced gradients, and 4/g of two buckets
      reduced once a step                       all gradients instead of the unreduced ones
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron.core.weight_gather import Bucket, Reduction, reductions
from megatron.core.weight_sharding import (
    REPLICATE_AXES,
    SHARD_AXES,
    OuterStrategy,
    Placement,
    Strategy,
    placement,
)

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class BlockSize:
    """The size of a block of a bucket.

    Args:
        numel: elements, padding included.
        trainable: it has gradients.
        uses: uses of its weight in a microbatch, for a weight over gtp.
        encoded: bytes of all its encoded shards, for each direction; empty without a gather format.
        amax: the gather format scales by the largest magnitude of the block.
    """

    numel: int
    trainable: bool = True
    uses: int = 1
    encoded: tuple[int, ...] = ()
    amax: bool = False

    def gathered(self, weight: int) -> tuple[int, ...]:
        """Return the output bytes of its all-gather for each direction, with `weight` bytes per
        element of a weight."""
        return self.encoded or (weight * self.numel,)


@dataclass(frozen=True, kw_only=True)
class BucketSize:
    """The size of a bucket and of its groups.

    Args:
        numel: elements over all ranks of the shard group, padding included.
        inner: number of ranks of the shard group.
        outer: number of ranks with the same shards, under hybrid sharding and for weights over gtp.
        root: its weights belong to no unit.
        trainable: it has gradients.
        expert: its weights are sharded over the expert data-parallel ranks.
        gtp: its blocks are weights sharded over gtp or egtp.
        blocks: its blocks, each gathered and reduced by a collective of its own; empty means a
            single block of all elements.
    """

    numel: int
    inner: int
    outer: int = 1
    root: bool = False
    trainable: bool = True
    expert: bool = False
    gtp: bool = False
    blocks: tuple[BlockSize, ...] = ()

    def __post_init__(self) -> None:
        if not self.blocks:
            block = BlockSize(numel=self.numel, trainable=self.trainable)
            object.__setattr__(self, "blocks", (block,))

    @property
    def unsharded_numel(self) -> int:
        """Elements of its unsharded blocks, which are gathered and reduced."""
        return sum(block.numel for block in self.blocks)

    @property
    def single_rank(self) -> bool:
        """Whether a single rank stores it: no strategy shards it, for instance experts whose
        data-parallel group is a single rank."""
        return self.inner * self.outer == 1

    def placement(self, strategy: Placement) -> Placement:
        """Return its placement under a strategy, on an inner and an outer data axis."""
        if self.single_rank:
            return Placement()
        if not self.gtp:
            return strategy
        return Placement(
            weight=SHARD_AXES,
            gradient=SHARD_AXES + (REPLICATE_AXES if strategy.gradient else ()),
            optimizer=SHARD_AXES + (REPLICATE_AXES if strategy.optimizer else ()),
        )

    def group_names(self, placement: Placement) -> tuple[str, str, str]:
        """Return the names of its shard group, its all-gather group and its replicate group."""
        prefix = "expert_" if self.expert else ""
        if self.gtp:
            shared, replicas = ("egtp", "edp") if self.expert else ("gtp", "dp_cp")
            return shared, f"{shared}_gather", replicas
        hybrid = self.outer > 1 and bool(placement.optimizer)
        data_group = "expert_dp" if self.expert else "dense_dp"
        shared = f"{prefix}shard" if hybrid else data_group
        gather = f"{prefix}shard_gather" if placement.weight else shared
        return shared, gather, f"{prefix}replicate"

    @staticmethod
    def of(bucket: Bucket) -> BucketSize:
        """Return the size of a bucket of a store."""
        return BucketSize(
            numel=bucket.numel,
            inner=bucket.group.size,
            outer=bucket.outer.size,
            root=bucket.unit is None,
            trainable=bucket.trainable,
            expert=bucket.expert,
            gtp=bucket.gtp,
            blocks=tuple(
                BlockSize(
                    numel=block.layout.numel,
                    trainable=block.trainable,
                    uses=block.handles[0].uses if bucket.gtp else 1,
                    encoded=tuple(
                        directed.encoded_bytes * bucket.group.size
                        for directed in block.directions
                        if directed.gather_format is not None
                    ),
                    amax=block.gather_format is not None and block.gather_format.needs_amax,
                )
                for block in bucket.blocks
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ElementBytes:
    """Bytes per element.

    Args:
        weight: of weights in storage and in all-gathers.
        gradient: of the gradients that backward fills and that are sent.
        optimizer: of optimizer state, with the fp32 master weight unless the weight is in fp32.
        fp32_sum: bf16 gradients are summed in fp32, in a second buffer.
        gtp_once: gradients of weights over gtp are reduced once a step, and stored unreduced until
            then.
    """

    weight: int = 4
    gradient: int = 4
    optimizer: int = 8
    fp32_sum: bool = False
    gtp_once: bool = False

    def persistent_gradients(self, placement: Placement, inner: int, *, outer: int = 1) -> Fraction:
        """Return the gradient bytes per element that stay allocated between steps."""
        if placement.gradient:
            return Fraction(_FP32_BYTES, _num_shards(placement.gradient, inner, outer))
        fp32_shard_bytes = Fraction(_FP32_BYTES, inner) if self.fp32_sum else Fraction(0)
        return self.gradient + fp32_shard_bytes


@dataclass(frozen=True)
class RoleBytes:
    """Bytes on one rank.

    Args:
        weights, gradients, optimizer: bytes that stay allocated between steps.
        gathered: maximum bytes of unsharded weights at a time.
        reducing: maximum bytes of unreduced gradients at a time.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    reducing: int = 0

    @property
    def persistent(self) -> int:
        """Bytes that stay allocated between steps."""
        return self.weights + self.gradients + self.optimizer


def bytes_per_parameter(
    strategy: Strategy,
    outer: OuterStrategy = "no_shard",
    *,
    inner_size: int,
    outer_size: int,
    element_bytes: ElementBytes,
) -> Fraction:
    """Return the bytes per parameter that stay allocated on one rank between steps.

    Raises:
        ValueError: there is no such strategy.
    """
    axes = placement(strategy, outer)
    weights = Fraction(element_bytes.weight, _num_shards(axes.weight, inner_size, outer_size))
    state = Fraction(element_bytes.optimizer, _num_shards(axes.optimizer, inner_size, outer_size))
    return weights + element_bytes.persistent_gradients(axes, inner_size) + state


def bytes_per_rank(
    buckets: Sequence[BucketSize],
    strategy: Placement,
    *,
    element_bytes: ElementBytes,
    prefetch: bool = False,
    prefetch_bytes: int = 0,
    overlap: bool = True,
) -> RoleBytes:
    """Return the bytes on one rank.

    Args:
        buckets: the buckets of its model chunks.
        strategy: placement of the strategy.
        element_bytes: bytes per element.
        prefetch, prefetch_bytes: the next unit is gathered early, and the bytes beyond it.
        overlap: a bucket is reduced while backward fills the next one.
    """
    weights = gradients = optimizer = Fraction(0)
    for b in buckets:
        axes, of_bucket = b.placement(strategy), element_bytes
        if b.single_rank:  # nothing is reduced, so there is no fp32 shard
            of_bucket = replace(element_bytes, fp32_sum=False)
        num_shards = _num_shards(axes.weight, b.inner, b.outer)
        weights += Fraction(element_bytes.weight * b.numel, num_shards)
        if b.trainable:
            gradients += b.numel * of_bucket.persistent_gradients(axes, b.inner, outer=b.outer)
            if b.gtp and element_bytes.gtp_once:
                gradients += element_bytes.gradient * sum(x.numel for x in b.blocks if x.trainable)
            num_shards = _num_shards(axes.optimizer, b.inner, b.outer)
            optimizer += Fraction(element_bytes.optimizer * b.numel, num_shards)
    # Weights over gtp are gathered one by one, others by unit: two separate budgets.
    over_gtp = [b for b in buckets if b.gtp]
    gathered, reducing = _transient_over_gtp(
        over_gtp,
        strategy,
        element_bytes=element_bytes,
        prefetch_bytes=prefetch_bytes,
        overlap=overlap,
    )
    shared = [b for b in buckets if not b.single_rank and not b.gtp]
    if strategy.weight and shared:
        max_bytes = element_bytes.weight * _largest_units(shared, 1 + prefetch)
        all_bytes = element_bytes.weight * sum(b.unsharded_numel for b in shared)
        gathered += min(max_bytes + prefetch_bytes * prefetch, all_bytes)
    trained = [b for b in shared if b.trainable]
    in_flight = (1 + overlap) * max((b.unsharded_numel for b in trained), default=0)
    if strategy.gradient:
        # A single bucket is reduced while backward fills the same bucket of the next microbatch.
        numel = _largest_units(trained, 1 + overlap) if len(trained) > 1 else in_flight
        reducing += element_bytes.gradient * numel
    if element_bytes.fp32_sum and strategy.optimizer and trained:
        # The receive buffer of the all-to-all. If shards accumulate over microbatches, the sum of a
        # microbatch takes an fp32 shard too.
        num_shards = min(b.inner for b in trained)
        fp32_shard_bytes = Fraction(_FP32_BYTES, num_shards) if strategy.gradient else 0
        reducing += math.ceil((element_bytes.gradient + fp32_shard_bytes) * in_flight)
    return RoleBytes(int(weights), int(gradients), int(optimizer), gathered, reducing)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one group.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        group: name of the process group.
        count: number of collectives.
        bytes: bytes of their larger tensors, the output of an all-gather and the input of others.
    """

    kind: str
    group: str
    count: int
    bytes: int


def collectives_per_step(
    buckets: Sequence[BucketSize],
    strategy: Placement,
    *,
    element_bytes: ElementBytes,
    microbatches: int,
    gathers: Sequence[int] | None = None,
) -> list[Traffic]:
    """Return the data-parallel collectives of one step, with the all-gathers of its updates.

    Args:
        buckets: the buckets of this rank's model chunks.
        strategy: placement of the strategy.
        element_bytes: bytes per element.
        microbatches: number of microbatches of the step.
        gathers: number of all-gathers of each block, for each of its directions. None is one for
            each trained block; for weights stored in shards the gather plan determines the numbers.

    Returns:
        Sorted by kind and group; nothing on a single data-parallel rank.
    """
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()

    def add(kind: str, group: str, size: int, *, num_ranks: int, times: int = 1) -> None:
        if num_ranks > 1 and times:
            counts[kind, group] += times
            sent[kind, group] += times * size

    blocks = [(b, block) for b in buckets for block in b.blocks]
    outputs = [(b, x, size) for b, x in blocks for size in x.gathered(element_bytes.weight)]
    if gathers is None:
        gathers = [int(block.trainable) for _, block, _ in outputs]
    for (bucket, _, size), count in zip(outputs, gathers, strict=True):
        axes = bucket.placement(strategy)
        if axes.optimizer:
            _, gather, _ = bucket.group_names(axes)
            add("all_gather", gather, size, num_ranks=bucket.inner, times=count)
    for bucket, block in blocks:
        axes = bucket.placement(strategy)
        inner, _, _ = bucket.group_names(axes)
        inner_reduction, _ = _reductions(axes, bucket, element_bytes)
        if block.trainable:
            # An fp32 sum of bf16 gradients is an all-to-all and a local sum.
            scatter = "all_to_all" if element_bytes.fp32_sum else "reduce_scatter"
            kind = scatter if inner_reduction.scatter else "all_reduce"
            count = microbatches if inner_reduction.every_microbatch else 1
            size = element_bytes.gradient * block.numel
            add(kind, inner, size, num_ranks=bucket.inner, times=count)
    for expert in (False, True):  # one all-reduce of the largest magnitudes of all blocks
        of_kind = [b for b in buckets if b.gtp and b.expert == expert]
        changed = [x for b in of_kind for x in b.blocks if x.amax and x.trainable]
        if changed:
            _, gather, _ = of_kind[0].group_names(of_kind[0].placement(strategy))
            add("all_reduce", gather, _FP32_BYTES * len(changed), num_ranks=of_kind[0].inner)
    for bucket in buckets:
        axes, shard = bucket.placement(strategy), bucket.numel // bucket.inner
        _, _, outer = bucket.group_names(axes)
        inner_reduction, outer_reduction = _reductions(axes, bucket, element_bytes)
        if not (bucket.trainable and axes.optimizer):
            continue
        if outer_reduction.scatter:
            add("all_gather", outer, element_bytes.weight * shard, num_ranks=bucket.outer)
        # Shards accumulate in fp32; gradients that are reduced in place keep their dtype.
        fp32 = axes.gradient or element_bytes.fp32_sum
        kind = "reduce_scatter" if outer_reduction.scatter else "all_reduce"
        size = (_FP32_BYTES if fp32 else element_bytes.gradient) * shard
        count = microbatches if outer_reduction.every_microbatch else 1
        add(kind, outer, size, num_ranks=bucket.outer, times=count)
    return [Traffic(*key, counts[key], sent[key]) for key in sorted(counts)]


def _reductions(
    axes: Placement, bucket: BucketSize, element_bytes: ElementBytes
) -> tuple[Reduction, Reduction]:
    return reductions(axes, REPLICATE_AXES, per_step=bucket.gtp and element_bytes.gtp_once)


def _transient_over_gtp(
    buckets: Sequence[BucketSize],
    strategy: Placement,
    *,
    element_bytes: ElementBytes,
    prefetch_bytes: int,
    overlap: bool,
) -> tuple[int, int]:
    """Return the maximum bytes of unsharded weights over gtp and of their unreduced gradients.

    Weights: the two largest (the weight in use and the next one) with their encoded shards, and
    `prefetch_bytes`. Gradients: the largest weight twice, as it is filled and as it is reduced, and
    every weight with several uses, whose gradient stays unreduced between them. If the replicas
    shard gradients too: also the shards of a bucket and of the bucket being reduced.
    """
    blocks = [block for bucket in buckets for block in bucket.blocks]
    encoded_sizes = [(block, size) for block in blocks for size in block.encoded or (0,)]
    sizes = sorted(element_bytes.weight * block.numel + size for block, size in encoded_sizes)
    gathered = min(sum(sizes[-2:]) + prefetch_bytes, sum(sizes))
    trained = [block.numel for block in blocks if block.trainable]
    in_flight = (1 + overlap) * max(trained, default=0)
    reducing = 0
    if not element_bytes.gtp_once:
        reused = [block.numel for block in blocks if block.trainable and block.uses > 1]
        reducing = element_bytes.gradient * min(in_flight + sum(reused), sum(trained))
    if element_bytes.fp32_sum and trained:
        fp32_shard_bytes = Fraction(_FP32_BYTES, min(b.inner for b in buckets if b.trainable))
        reducing += math.ceil((element_bytes.gradient + fp32_shard_bytes) * in_flight)
    if strategy.gradient:
        shards = [b.numel // b.inner for b in buckets if b.trainable and b.outer > 1]
        reducing += _FP32_BYTES * sum(sorted(shards)[-1 - overlap :])
    return gathered, reducing


def _largest_units(buckets: Sequence[BucketSize], units: int) -> int:
    """Return the elements of the weights outside units and of the largest units. A unit may have a
    bucket of dense weights and a bucket of experts, which are in use one after the other."""
    largest = {False: 0, True: 0}
    for b in buckets:
        if not b.root:
            largest[b.expert] = max(largest[b.expert], b.unsharded_numel)
    return sum(b.unsharded_numel for b in buckets if b.root) + units * sum(largest.values())


def _num_shards(axes: tuple[str, ...], inner_size: int, outer_size: int) -> int:
    """Return the number of shards of weights, gradients or optimizer state on these axes."""
    if not axes:
        return 1
    return inner_size * (outer_size if any(axis in axes for axis in REPLICATE_AXES) else 1)
