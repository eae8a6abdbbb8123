# SPDX-License-Identifier: Apache-2.0
"""Blocks in buckets: the layout of flat buffers, and weights over gtp that share a bucket."""

from __future__ import annotations

import random

import pytest
import torch

from megatron.core.initialize import InitSpec
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import Bucket, Storage, WeightStore, owned_range
from megatron.core.weight_gather.bucket import ALIGNMENT, BucketGroups, BufferLayout
from megatron.core.weight_sharding import STRATEGIES, WeightSharding, placement
from tests.support.pretended_groups import pretended_groups

NORMAL = InitSpec.normal(1.0)
#: Odd sizes: no shard of them ends at a border of rows.
SHAPES = {"first": (7, 5), "second": (33, 3), "third": (2, 129)}


def test_members_and_shards_are_aligned_and_shards_are_even():
    source = random.Random(3)
    for _ in range(200):
        shapes = [
            (str(i), tuple(source.randint(1, 6) for _ in range(source.randint(1, 3))))
            for i in range(source.randint(1, 6))
        ]
        parts, member_alignment, shard_alignment = (source.randint(1, 8) for _ in range(3))
        layout = BufferLayout.of(
            shapes,
            num_shards=parts,
            member_alignment=member_alignment,
            shard_alignment=shard_alignment,
        )
        assert [(m.name, m.shape) for m in layout.members] == shapes
        assert all(m.start % member_alignment == 0 for m in layout.members)
        ends = [0, *(m.stop for m in layout.members)]
        gaps = [m.start - end for m, end in zip(layout.members, ends[:-1], strict=True)]
        assert all(0 <= gap < member_alignment for gap in gaps)
        bounds = [layout.shard(i) for i in range(parts)]
        assert [b for b, _ in bounds] == [0, *(e for _, e in bounds)][:-1]
        assert bounds[-1][1] == layout.numel
        assert ends[-1] <= layout.numel < ends[-1] + parts * shard_alignment
        assert all((e - b) % shard_alignment == 0 for b, e in bounds)


def stores(strategy: str, *, gtp: int = 2, dp: int = 3) -> list[WeightStore]:
    """Return the stores of all ranks, with three matrices over gtp and a vector."""
    found = []
    for rank in range(gtp * dp):
        groups = pretended_groups(RankGrid(world_size=gtp * dp, gtp=gtp), rank)
        store = WeightStore(groups, seed=3)
        for name, shape in SHAPES.items():
            store.declare(WeightSharding.of(name, shape, gtp=True), NORMAL)
        store.declare(WeightSharding.of("vector", (5,), weight_decay=False), NORMAL)
        store.materialize(Storage(strategy=strategy))
        found.append(store)
    return found


def over_gtp(store: WeightStore) -> Bucket:
    """Return the only bucket of weights over gtp."""
    (bucket,) = [bucket for bucket in store.buckets if bucket.gtp]
    return bucket


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_gtp_weights_share_a_bucket_but_are_gathered_separately(strategy: str):
    wanted = WeightStore(ProcessGroupCollection.single(), seed=3)
    for name, shape in SHAPES.items():
        wanted.declare(WeightSharding.of(name, shape), NORMAL)
    wanted.materialize()
    ranks = stores(strategy)
    for store in ranks:
        bucket = over_gtp(store)
        assert [block.name for block in bucket.blocks] == list(reversed(SHAPES))
        assert len(bucket.data) % (ALIGNMENT * bucket.outer.size) == 0
        assert all(len(block.data) % ALIGNMENT == 0 for block in bucket.blocks)
        padding = bucket.numel - sum(torch.Size(shape).numel() for shape in SHAPES.values())
        assert padding < ALIGNMENT * bucket.group.size * (len(SHAPES) + bucket.outer.size)
    # Ranks are numbered with gtp inside dp: a gather is of two neighbours.
    for first in range(0, len(ranks), 2):
        pair = [over_gtp(store) for store in ranks[first : first + 2]]
        assert [bucket.group.rank for bucket in pair] == [0, 1]
        for blocks in zip(*(bucket.blocks for bucket in pair), strict=True):
            whole = torch.cat([block.data for block in blocks])
            (member,) = blocks[0].layout.members
            weight = whole[member.start : member.stop].view(member.shape)
            assert torch.equal(weight, wanted.handles[member.name].anchor.detach())
            assert not whole[member.stop :].any(), "padding is zero"


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_replicas_own_every_element_of_a_bucket_once_or_all(strategy: str):
    ranks = stores(strategy)
    times = 3 if strategy == "no_shard" else 1
    counts = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    sizes = set()
    for store in ranks:
        bucket = over_gtp(store)
        low, high = bucket.owned_range
        sizes.add(high - low)
        part = owned_range(store, bucket, torch.zeros(high - low))
        assert torch.equal(part.weights, bucket.data[low:high])
        for box in part.boxes:
            values = store.handles[box.name]
            assert values.sharding.name == box.name
            at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            counts[box.name][at] += 1
            assert len(box.replica_ranks) == times
            assert store.groups.rank in box.replica_ranks
        assert sum(stop - start for start, stop in part.decayed) == sum(
            box.numel for box in part.boxes
        )
    assert len(sizes) == 1, "replicas own as much each"
    assert all((count == times).all() for count in counts.values())


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [(1024, [1] * 5), (1025, [2, 2, 1]), (2048, [2, 2, 1]), (4 * 1024, [4, 1]), (5 * 1024, [5])],
)
@pytest.mark.parametrize("gtp", [False, True])
def test_a_bucket_closes_by_the_bytes_of_its_gradients(gtp: bool, bucket_bytes: int, expected):
    """Five weights of 1024 bytes of fp32 gradients, of a quarter of the weight over gtp."""
    store = WeightStore(pretended_groups(RankGrid(world_size=4, gtp=4 if gtp else 1), 0))
    for index in range(5):
        store.declare(WeightSharding.of(str(index), (32 if gtp else 8, 32), gtp=gtp), NORMAL)
    store.materialize(Storage(bucket_bytes=bucket_bytes))
    assert [len(bucket.handles) for bucket in store.buckets] == expected


def test_shards_are_views_of_their_bucket():
    for store in stores("optim"):
        bucket = over_gtp(store)
        starts = [block.start for block in bucket.blocks]
        assert starts == sorted(starts)
        for block in bucket.blocks:
            block.data.fill_(float(block.start))
        held = {found.handle.name: found for found in bucket.stored_weights()}
        for name in SHAPES:
            found = held[name]
            inside = bucket.data[found.offset : found.offset + found.stop - found.start]
            assert torch.equal(store.handles[name].anchor.detach().view(-1), inside)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bucket_holds_weights_of_its_own_placement_alone(strategy: str):
    """Matrices over gtp and vectors are declared in turns; buckets have room for all of them."""
    grid = RankGrid(world_size=6, gtp=2)
    store = WeightStore(pretended_groups(grid, 0))
    for index in range(3):
        store.declare(WeightSharding.of(f"matrix {index}", (4, 3), gtp=True), NORMAL)
        store.declare(WeightSharding.of(f"vector {index}", (5,), weight_decay=False), NORMAL)
    storage = Storage(strategy=strategy)
    store.materialize(storage)
    matrices, vectors = ([f"{kind} {i}" for i in (2, 1, 0)] for kind in ("matrix", "vector"))
    found = {tuple(h.name for h in b.handles): b for b in store.buckets}
    if strategy == "optim_grads_params":  # gtp ranks are among those that share all weights
        ((names, bucket),) = found.items()
        assert sorted(names) == sorted(matrices + vectors)
        assert not bucket.gtp
        assert bucket.placement == storage.placement
        return
    assert set(found) == {tuple(matrices), tuple(vectors)}
    over_gtp, whole = found[tuple(matrices)], found[tuple(vectors)]
    assert whole.placement == storage.placement
    assert (whole.gtp, whole.sharded, whole.group.size, whole.outer.size) == (False, False, 6, 1)
    assert (over_gtp.gtp, over_gtp.sharded) == (True, True)
    assert (over_gtp.group.size, over_gtp.outer.size) == (2, 3)
    assert over_gtp.outer_shards == (strategy != "no_shard")


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
def test_hybrid_sharding_shares_over_inner_ranks(strategy: str, expert: bool):
    """Two instances of two ranks; what nothing shards, all four ranks share."""
    grid = RankGrid(world_size=4, instances=2)
    shared, outer = [], []
    for rank in range(4):
        placed = placement(strategy)
        lanes = "expert_dp" if expert else "dense_dp"
        groups = BucketGroups.of(pretended_groups(grid, rank), lanes, placed)
        shared.append(groups.shard.ranks)
        outer.append(groups.outer.ranks)
        assert groups.gather.ranks == groups.shard.ranks
        assert (groups.gather.name != groups.shard.name) == (strategy == "optim_grads_params")
        assert (groups.shard.name in ("expert_dp", "expert_shard")) == expert
    if strategy == "no_shard":
        assert shared == [(0, 1, 2, 3)] * 4
        assert outer == [(0,), (1,), (2,), (3,)]
    else:
        assert shared == [(0, 1)] * 2 + [(2, 3)] * 2
        assert outer == [(0, 2), (1, 3)] * 2
