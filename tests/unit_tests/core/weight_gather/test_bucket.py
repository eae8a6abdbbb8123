# SPDX-License-Identifier: Apache-2.0
"""Blocks in buckets: the layout of flat buffers, and weights over gtp that share a bucket."""

from __future__ import annotations

import random

import pytest
import torch

from megatron.core import InitSpec, ProcessGroupCollection, RankGrid, WeightSharding
from megatron.core.weight_gather import Bucket, Storage, WeightStore, owned_range
from megatron.core.weight_gather.bucket import ALIGNMENT, BucketGroups, BufferLayout
from megatron.core.weight_sharding import STRATEGIES, placement
from tests.support.pretended_groups import pretended_groups

NORMAL = InitSpec.normal(1.0)
#: Odd sizes, so that no shard ends at a row boundary.
SHAPES = {"first": (7, 5), "second": (33, 3), "third": (2, 129)}


def test_members_and_shards_are_aligned_and_shards_are_even():
    rng = random.Random(3)
    for _ in range(200):
        shapes = [
            (str(i), tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3))))
            for i in range(rng.randint(1, 6))
        ]
        num_shards, member_alignment, shard_alignment = (rng.randint(1, 8) for _ in range(3))
        layout = BufferLayout.of(
            shapes,
            num_shards=num_shards,
            member_alignment=member_alignment,
            shard_alignment=shard_alignment,
        )
        assert [(m.name, m.shape) for m in layout.members] == shapes
        assert all(m.start % member_alignment == 0 for m in layout.members)
        ends = [0, *(m.stop for m in layout.members)]
        gaps = [m.start - end for m, end in zip(layout.members, ends[:-1], strict=True)]
        assert all(0 <= gap < member_alignment for gap in gaps)
        bounds = [layout.shard(i) for i in range(num_shards)]
        assert [b for b, _ in bounds] == [0, *(e for _, e in bounds)][:-1]
        assert bounds[-1][1] == layout.numel
        assert ends[-1] <= layout.numel < ends[-1] + num_shards * shard_alignment
        assert all((e - b) % shard_alignment == 0 for b, e in bounds)


def stores(strategy: str, *, gtp: int = 2, dp: int = 3) -> list[WeightStore]:
    """Return the stores of all ranks, each with three gtp-sharded matrices and a vector."""
    stores_by_rank = []
    for rank in range(gtp * dp):
        groups = pretended_groups(RankGrid(world_size=gtp * dp, gtp=gtp), rank)
        store = WeightStore(groups, seed=3)
        for name, shape in SHAPES.items():
            store.declare(WeightSharding.of(name, shape, gtp=True), NORMAL)
        store.declare(WeightSharding.of("vector", (5,), weight_decay=False), NORMAL)
        store.materialize(Storage(strategy=strategy))
        stores_by_rank.append(store)
    return stores_by_rank


def gtp_bucket(store: WeightStore) -> Bucket:
    """Return the only bucket of gtp-sharded weights."""
    (bucket,) = [bucket for bucket in store.buckets if bucket.gtp]
    return bucket


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_gtp_weights_share_a_bucket_but_are_gathered_separately(strategy: str):
    reference = WeightStore(ProcessGroupCollection.single(), seed=3)
    for name, shape in SHAPES.items():
        reference.declare(WeightSharding.of(name, shape), NORMAL)
    reference.materialize()
    ranks = stores(strategy)
    for store in ranks:
        bucket = gtp_bucket(store)
        assert [block.name for block in bucket.blocks] == list(reversed(SHAPES))
        assert len(bucket.data) % (ALIGNMENT * bucket.outer.size) == 0
        assert all(len(block.data) % ALIGNMENT == 0 for block in bucket.blocks)
        padding = bucket.numel - sum(torch.Size(shape).numel() for shape in SHAPES.values())
        assert padding < ALIGNMENT * bucket.group.size * (len(SHAPES) + bucket.outer.size)
    # gtp is the innermost axis: two consecutive ranks form a gather group.
    for first_rank in range(0, len(ranks), 2):
        pair = [gtp_bucket(store) for store in ranks[first_rank : first_rank + 2]]
        assert [bucket.group.rank for bucket in pair] == [0, 1]
        for blocks in zip(*(bucket.blocks for bucket in pair), strict=True):
            unsharded = torch.cat([block.data for block in blocks])
            (member,) = blocks[0].layout.members
            weight = unsharded[member.start : member.stop].view(member.shape)
            assert torch.equal(weight, reference.handles[member.name].anchor.detach())
            assert not unsharded[member.stop :].any(), "padding is zero"


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_each_element_is_owned_by_one_replica_or_by_all(strategy: str):
    ranks = stores(strategy)
    num_owners = 3 if strategy == "no_shard" else 1
    counts = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sizes = set()
    for store in ranks:
        bucket = gtp_bucket(store)
        low, high = bucket.owned_range
        sizes.add(high - low)
        owned = owned_range(store, bucket, torch.zeros(high - low))
        assert torch.equal(owned.weights, bucket.data[low:high])
        for box in owned.boxes:
            handle = store.handles[box.name]
            assert handle.sharding.name == box.name
            slices = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            counts[box.name][slices] += 1
            assert len(box.replica_ranks) == num_owners
            assert store.groups.rank in box.replica_ranks
        assert sum(stop - start for start, stop in owned.decayed) == sum(
            box.numel for box in owned.boxes
        )
    assert len(sizes) == 1, "replicas own equally many elements"
    assert all((count == num_owners).all() for count in counts.values())


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [(1024, [1] * 5), (1025, [2, 2, 1]), (2048, [2, 2, 1]), (4 * 1024, [4, 1]), (5 * 1024, [5])],
)
@pytest.mark.parametrize("gtp", [False, True])
def test_bucket_size_is_limited_by_gradient_bytes(gtp: bool, bucket_bytes: int, expected):
    """Each of five weights has 1024 bytes of fp32 gradients per rank, with and without gtp."""
    store = WeightStore(pretended_groups(RankGrid(world_size=4, gtp=4 if gtp else 1), 0))
    for index in range(5):
        store.declare(WeightSharding.of(str(index), (32 if gtp else 8, 32), gtp=gtp), NORMAL)
    store.materialize(Storage(bucket_bytes=bucket_bytes))
    assert [len(bucket.handles) for bucket in store.buckets] == expected


def test_shards_are_views_of_their_bucket():
    for store in stores("optim"):
        bucket = gtp_bucket(store)
        starts = [block.start for block in bucket.blocks]
        assert starts == sorted(starts)
        for block in bucket.blocks:
            block.data.fill_(float(block.start))
        stored_weights = {stored.handle.name: stored for stored in bucket.stored_weights()}
        for name in SHAPES:
            stored = stored_weights[name]
            inside = bucket.data[stored.offset : stored.offset + stored.stop - stored.start]
            assert torch.equal(store.handles[name].anchor.detach().view(-1), inside)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buckets_do_not_mix_placements(strategy: str):
    """Gtp-sharded matrices and vectors alternate; one bucket would have room for all weights."""
    grid = RankGrid(world_size=6, gtp=2)
    store = WeightStore(pretended_groups(grid, 0))
    for index in range(3):
        store.declare(WeightSharding.of(f"matrix {index}", (4, 3), gtp=True), NORMAL)
        store.declare(WeightSharding.of(f"vector {index}", (5,), weight_decay=False), NORMAL)
    storage = Storage(strategy=strategy)
    store.materialize(storage)
    matrices, vectors = ([f"{kind} {i}" for i in (2, 1, 0)] for kind in ("matrix", "vector"))
    buckets = {tuple(h.name for h in b.handles): b for b in store.buckets}
    if strategy == "optim_grads_params":  # all weights are sharded over all ranks, gtp included
        ((names, bucket),) = buckets.items()
        assert sorted(names) == sorted(matrices + vectors)
        assert not bucket.gtp
        assert bucket.placement == storage.placement
        return
    assert set(buckets) == {tuple(matrices), tuple(vectors)}
    gtp_bucket, replicated = buckets[tuple(matrices)], buckets[tuple(vectors)]
    assert replicated.placement == storage.placement
    assert (replicated.gtp, replicated.sharded, replicated.group.size, replicated.outer.size) == (
        False,
        False,
        6,
        1,
    )
    assert (gtp_bucket.gtp, gtp_bucket.sharded) == (True, True)
    assert (gtp_bucket.group.size, gtp_bucket.outer.size) == (2, 3)
    assert gtp_bucket.outer_shards == (strategy != "no_shard")


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        ("unit", [("b", ["b.2", "b.1", "b.bias"]), (None, ["root"]), ("a", ["a.1", "a.bias"])]),
        (
            "weight",
            [
                ("b", ["b.2"]),
                ("b", ["b.1", "b.bias"]),
                (None, ["root"]),
                ("a", ["a.1", "a.bias"]),
            ],
        ),
    ],
)
def test_sharded_weights_are_gathered_by_unit_or_by_weight(granularity: str, expected: list):
    store = WeightStore(pretended_groups(RankGrid(world_size=2), 0))

    def declare(*names: str) -> None:
        for name in names:
            shape = (4, 3) if name[-1].isdigit() else (5,)
            sharding = WeightSharding.of(name, shape, weight_decay=len(shape) > 1)
            store.declare(sharding, NORMAL)

    with store.unit("a"):
        declare("a.1", "a.bias")
    declare("root")
    with store.unit("b"):
        declare("b.1", "b.bias", "b.2")
    store.materialize(Storage(strategy="optim_grads_params", granularity=granularity))
    assert [(b.unit, [h.name for h in b.handles]) for b in store.buckets] == expected


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hybrid_sharding_shards_within_an_instance(strategy: str, expert: bool):
    """Two instances of two ranks; `no_shard` reduces over all four ranks."""
    grid = RankGrid(world_size=4, instances=2)
    shard_ranks, outer_ranks = [], []
    for rank in range(4):
        parameter_placement = placement(strategy)
        axis = "expert_dp" if expert else "dense_dp"
        groups = BucketGroups.of(pretended_groups(grid, rank), axis, parameter_placement)
        shard_ranks.append(groups.shard.ranks)
        outer_ranks.append(groups.outer.ranks)
        assert groups.gather.ranks == groups.shard.ranks
        assert (groups.gather.name != groups.shard.name) == (strategy == "optim_grads_params")
        assert (groups.shard.name in ("expert_dp", "expert_shard")) == expert
    if strategy == "no_shard":
        assert shard_ranks == [(0, 1, 2, 3)] * 4
        assert outer_ranks == [(0,), (1,), (2,), (3,)]
    else:
        assert shard_ranks == [(0, 1)] * 2 + [(2, 3)] * 2
        assert outer_ranks == [(0, 2), (1, 3)] * 2
