# SPDX-License-Identifier: Apache-2.0
"""What a strategy of data parallelism costs: bytes kept per rank, and collectives per step.

Pure arithmetic on the sizes of the buckets, for tests that compare the engine with it, for the line
that a run logs at its start, and to choose a strategy by. With w, g, s bytes of weight, gradient
and optimizer state per element, over i inner and o outer data-parallel ranks (ZeRO: Rajbhandari et
al. 2020, section 5):

    no_shard              w + g + s
    optim                 w + g + s/i
    optim_grads           w + (4 + s)/i         and the buckets whose gradients are not reduced yet
    optim_grads_params    (w + 4 + s)/i         and these, and the gathered weights
      outer "optim"       (w + 4)/i + s/(i·o)

Sharded gradients are kept in fp32, whatever the dtype of the buffers that backward fills.

A weight sharded over g gtp ranks is kept as under hybrid sharding with g inner ranks, its r
replicas the outer ones; strategies shard over these too:

    no_shard              (w + 4 + s)/g         and the gradients that are not reduced yet
    optim                 (w + 4)/g + s/(g·r)   and these
    optim_grads           w/g + (4 + s)/(g·r)   and these, and 4/g of two buckets
      reduced once a step                       whole gradients instead of those not reduced yet
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron.core.weight_gather import Bucket, Reduction, reductions
from megatron.core.weight_sharding import REPLICATE_AXES, SHARD_AXES, Placement, placement

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class BlockSize:
    """The size of a block of a bucket.

    Args:
        numel: elements, padding included.
        trainable: it has gradients.
        uses: how often its weight is used in a microbatch, if it is one over gtp.
        encoded: bytes of all its encoded shards, for each direction; empty without a gather format.
        amax: that format scales by the largest magnitude of the block.
    """

    numel: int
    trainable: bool = True
    uses: int = 1
    encoded: tuple[int, ...] = ()
    amax: bool = False

    def gathered(self, weight: int) -> tuple[int, ...]:
        """Return the bytes that a gather brings, of each direction, where elements of weights have
        `weight` bytes."""
        return self.encoded or (weight * self.numel,)


@dataclass(frozen=True, kw_only=True)
class BucketSize:
    """The size of a bucket and who shares it.

    Args:
        numel: elements that the ranks which share it store together, padding included.
        inner: ranks that share it.
        outer: ranks that hold the same shards: under hybrid sharding, and of weights over gtp.
        root: its weights belong to no unit.
        trainable: it has gradients.
        expert: it is on the expert data-parallel ranks.
        gtp: its blocks are weights sharded over gtp or egtp.
        blocks: that are gathered and reduced by themselves; none is one of all elements.
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
            one = BlockSize(numel=self.numel, trainable=self.trainable)
            object.__setattr__(self, "blocks", (one,))

    @property
    def whole(self) -> int:
        """Elements of its whole blocks, which are gathered and reduced."""
        return sum(block.numel for block in self.blocks)

    @property
    def alone(self) -> bool:
        """Whether nobody shares it: it is whole whatever the strategy, as experts are that lie on
        one data-parallel rank."""
        return self.inner * self.outer == 1

    def placed(self, strategy: Placement) -> Placement:
        """Return what shards it, the inner ranks as the inner and the outer as the outer axis."""
        if self.alone:
            return Placement()
        if not self.gtp:
            return strategy
        return Placement(
            weight=SHARD_AXES,
            gradient=SHARD_AXES + (REPLICATE_AXES if strategy.gradient else ()),
            optimizer=SHARD_AXES + (REPLICATE_AXES if strategy.optimizer else ()),
        )

    def group_names(self, placed: Placement) -> tuple[str, str, str]:
        """Return the names of the groups that share it, gather it and hold the same range."""
        prefix = "expert_" if self.expert else ""
        if self.gtp:
            shared, replicas = ("egtp", "edp") if self.expert else ("gtp", "dp_cp")
            return shared, f"{shared}_gather", replicas
        hybrid = self.outer > 1 and bool(placed.optimizer)
        data_group = "egtp_edp" if self.expert else "gtp_cp_dp"
        shared = f"{prefix}shard" if hybrid else data_group
        gather = f"{prefix}shard_gather" if placed.weight else shared
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
                        directional.encoded_bytes * bucket.group.size
                        for directional in block.directions
                        if directional.gather_format is not None
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
        weight: of weights as they are stored and gathered.
        gradient: of the gradients that backward fills and that travel.
        optimizer: of optimizer state with its fp32 master, where weights are not their own.
        wide_sum: bf16 gradients are summed in fp32, apart from the buffers that backward fills.
        gtp_once: gradients of weights over gtp are reduced once a step, and kept whole until then.
    """

    weight: int = 4
    gradient: int = 4
    optimizer: int = 8
    wide_sum: bool = False
    gtp_once: bool = False

    def kept_gradients(self, placed: Placement, inner: int, *, outer: int = 1) -> Fraction:
        """Return the gradient bytes per element that stay between steps, on `inner` ranks."""
        if placed.gradient:
            return Fraction(_FP32_BYTES, _parts(placed.gradient, inner, outer))
        apart = Fraction(_FP32_BYTES, inner) if self.wide_sum else Fraction(0)
        return self.gradient + apart


@dataclass(frozen=True)
class RoleBytes:
    """Bytes on one rank, by role.

    `gathered` is the most that gathered weights take at a time, and `reducing` the most that
    gradients take that are on their way into their shards.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    reducing: int = 0

    @property
    def kept(self) -> int:
        """What stays between steps."""
        return self.weights + self.gradients + self.optimizer


def bytes_per_parameter(
    strategy: str, outer: str = "no_shard", *, inner_size: int, outer_size: int, of: ElementBytes
) -> Fraction:
    """Return the bytes per parameter that one rank keeps between steps.

    Raises:
        ValueError: there is no such strategy.
    """
    placed = placement(strategy, outer)
    weights = Fraction(of.weight, _parts(placed.weight, inner_size, outer_size))
    state = Fraction(of.optimizer, _parts(placed.optimizer, inner_size, outer_size))
    return weights + of.kept_gradients(placed, inner_size) + state


def bytes_per_rank(
    buckets: Sequence[BucketSize],
    placed: Placement,
    *,
    of: ElementBytes,
    prefetch: bool = False,
    ahead: int = 0,
    overlap: bool = True,
) -> RoleBytes:
    """Return the bytes on one rank.

    Args:
        buckets: of its model chunks.
        placed: what is sharded over which data-parallel ranks.
        of: bytes per element.
        prefetch, ahead: whether the next unit is gathered early, and the bytes beyond it.
        overlap: a bucket is reduced while backward fills the next.
    """
    weights = gradients = optimizer = Fraction(0)
    for b in buckets:
        own, by = b.placed(placed), replace(of, wide_sum=False) if b.alone else of
        weights += Fraction(of.weight * b.numel, _parts(own.weight, b.inner, b.outer))
        if b.trainable:
            gradients += b.numel * by.kept_gradients(own, b.inner, outer=b.outer)
            if b.gtp and of.gtp_once:
                gradients += of.gradient * sum(x.numel for x in b.blocks if x.trainable)
            parts = _parts(own.optimizer, b.inner, b.outer)
            optimizer += Fraction(of.optimizer * b.numel, parts)
    over_gtp = [b for b in buckets if b.gtp]
    gathered, reducing = _transient_over_gtp(over_gtp, placed, of=of, ahead=ahead, overlap=overlap)
    shared = [b for b in buckets if not b.alone and not b.gtp]
    if placed.weight and shared:
        most = of.weight * _together(shared, 1 + prefetch) + ahead * prefetch
        gathered += min(most, of.weight * sum(b.whole for b in shared))
    trained = [b for b in shared if b.trainable]
    under_way = (1 + overlap) * max((b.whole for b in trained), default=0)
    if placed.gradient:  # of a single bucket, the next microbatch's come while it is reduced
        several = len(trained) > 1
        reducing += of.gradient * (_together(trained, 1 + overlap) if several else under_way)
    if of.wide_sum and placed.optimizer and trained:
        # addends as they arrive; where shards add up over microbatches, an fp32 shard as well
        again = Fraction(_FP32_BYTES, min(b.inner for b in trained)) if placed.gradient else 0
        reducing += math.ceil((of.gradient + again) * under_way)
    return RoleBytes(int(weights), int(gradients), int(optimizer), gathered, reducing)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one group: how many, and the bytes of their wide sides."""

    kind: str
    group: str
    count: int
    bytes: int


def collectives_per_step(
    buckets: Sequence[BucketSize],
    placed: Placement,
    *,
    of: ElementBytes,
    microbatches: int,
    gathers: Sequence[int] | None = None,
) -> list[Traffic]:
    """Return what one step sends over the data-parallel ranks, up to the weights of the next.

    Args:
        buckets: of this rank's model chunks.
        placed: what is sharded over which data-parallel ranks.
        of: bytes per element.
        microbatches: of the step.
        gathers: how often each block is gathered, and of one with two planes each of them; None is
            once where any rank's range of it is trained. Where weights are stored in shards the
            gather plan determines it.

    Returns:
        Sorted by kind and group; nothing on a single data-parallel rank.
    """
    counts: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()

    def add(kind: str, group: str, size: int, *, parties: int, times: int = 1) -> None:
        if parties > 1 and times:
            counts[kind, group] += times
            sent[kind, group] += times * size

    blocks = [(b, block) for b in buckets for block in b.blocks]
    planes = [(b, block, size) for b, block in blocks for size in block.gathered(of.weight)]
    times = [int(block.trainable) for _, block, _ in planes] if gathers is None else gathers
    for (bucket, _, size), often in zip(planes, times, strict=True):
        own = bucket.placed(placed)
        if own.optimizer:
            _, gather, _ = bucket.group_names(own)
            add("all_gather", gather, size, parties=bucket.inner, times=often)
    for bucket, block in blocks:
        own = bucket.placed(placed)
        inner, _, _ = bucket.group_names(own)
        first, _ = _reductions(own, bucket, of)
        if block.trainable:
            scatter = "all_to_all" if of.wide_sum else "reduce_scatter"
            kind = scatter if first.scatter else "all_reduce"
            often = microbatches if first.every_microbatch else 1
            add(kind, inner, of.gradient * block.numel, parties=bucket.inner, times=often)
    for expert in (False, True):  # all magnitudes that are needed, at once
        of_kind = [b for b in buckets if b.gtp and b.expert == expert]
        changed = [x for b in of_kind for x in b.blocks if x.amax and x.trainable]
        if changed:
            _, gather, _ = of_kind[0].group_names(of_kind[0].placed(placed))
            add("all_reduce", gather, _FP32_BYTES * len(changed), parties=of_kind[0].inner)
    for bucket in buckets:
        own, shard = bucket.placed(placed), bucket.numel // bucket.inner
        _, _, outer = bucket.group_names(own)
        first, second = _reductions(own, bucket, of)
        if not (bucket.trainable and own.optimizer):
            continue
        if second.scatter:
            add("all_gather", outer, of.weight * shard, parties=bucket.outer)
        fp32 = own.gradient or of.wide_sum
        kind = "reduce_scatter" if second.scatter else "all_reduce"
        size = (_FP32_BYTES if fp32 else of.gradient) * shard
        often = microbatches if second.every_microbatch else 1
        add(kind, outer, size, parties=bucket.outer, times=often)
    return [Traffic(*key, counts[key], sent[key]) for key in sorted(counts)]


def _reductions(
    own: Placement, bucket: BucketSize, of: ElementBytes
) -> tuple[Reduction, Reduction]:
    return reductions(own, REPLICATE_AXES, per_step=bucket.gtp and of.gtp_once)


def _transient_over_gtp(
    buckets: Sequence[BucketSize],
    strategy: Placement,
    *,
    of: ElementBytes,
    ahead: int,
    overlap: bool,
) -> tuple[int, int]:
    """Return the most bytes of gathered weights over gtp and of their gradients being reduced.

    The two largest weights, which one in use and the next are at most, and `ahead`, with what
    arrives if they are gathered in another format; the gradients of a weight and as many bytes
    that are being reduced, and those of each one that is used several times between its uses; of
    gradients sharded over the replicas too, the shards of a bucket and of the one being reduced.
    """
    blocks = [block for bucket in buckets for block in bucket.blocks]
    arriving = [(block, size) for block in blocks for size in block.encoded or (0,)]
    sizes = sorted(of.weight * block.numel + size for block, size in arriving)
    gathered = min(sum(sizes[-2:]) + ahead, sum(sizes))
    trained = [block.numel for block in blocks if block.trainable]
    under_way = (1 + overlap) * max(trained, default=0)
    reducing = 0
    if not of.gtp_once:
        kept = [block.numel for block in blocks if block.trainable and block.uses > 1]
        reducing = of.gradient * min(under_way + sum(kept), sum(trained))
    if of.wide_sum and trained:
        again = Fraction(_FP32_BYTES, min(b.inner for b in buckets if b.trainable))
        reducing += math.ceil((of.gradient + again) * under_way)
    if strategy.gradient:
        shards = [b.numel // b.inner for b in buckets if b.trainable and b.outer > 1]
        reducing += _FP32_BYTES * sum(sorted(shards)[-1 - overlap :])
    return gathered, reducing


def _together(buckets: Sequence[BucketSize], units: int) -> int:
    """Return the elements of some units and of all that is outside units. A unit may have a bucket
    of dense weights and one of experts, which it needs in turn."""
    largest = {False: 0, True: 0}
    for b in buckets:
        if not b.root:
            largest[b.expert] = max(largest[b.expert], b.whole)
    return sum(b.whole for b in buckets if b.root) + units * sum(largest.values())


def _parts(axes: tuple[str, ...], inner_size: int, outer_size: int) -> int:
    """Return into how many shards a role is divided."""
    if not axes:
        return 1
    return inner_size * (outer_size if any(axis in axes for axis in REPLICATE_AXES) else 1)
