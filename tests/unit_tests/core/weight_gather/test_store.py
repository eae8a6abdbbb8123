# SPDX-License-Identifier: Apache-2.0
"""Weight declarations, their layout in buckets, initial values and the ranges that a rank owns."""

from __future__ import annotations

import pytest
import torch

from megatron.core import InitSpec, ProcessGroupCollection, RankGrid, WeightSharding
from megatron.core.initialize import fill_
from megatron.core.weight_gather import OwnedRange, Storage, WeightStore, owned_range
from megatron.core.weight_sharding import Shard, SubWeight
from tests.support.pretended_groups import pretended_groups

ROWS = Shard(axis="tp", dim=0)
NORMAL = InitSpec.normal(0.5)


def shardings(tp: int = 1) -> list[WeightSharding]:
    """Return weights of every kind in the order of a model with two kv heads."""
    kv_heads = (Shard(axis="tp", dim=0, count=min(2, tp)),)
    return [
        WeightSharding.of("table", (13, 6), ROWS, row_multiple=2),
        WeightSharding.of("norm", (6,), gradient={"tp": "partial"}, weight_decay=False),
        WeightSharding(
            name="qk",
            sub_weights=(
                SubWeight(name="q", shape=(8, 6), shards=(ROWS,)),
                SubWeight(name="k", shape=(4, 6), shards=kv_heads),
            ),
        ),
        WeightSharding.of("down", (6, 8), Shard(axis="tp", dim=1)),
        WeightSharding.of("down.bias", (6,), gradient={"tp": "identical"}, weight_decay=False),
        WeightSharding.of("experts", (8, 6), Shard(axis="ep", dim=0), expert=True),
    ]


def store_of(groups: ProcessGroupCollection, **options: object) -> WeightStore:
    """Return a materialised store of all weights; the norm, qk and down form a unit."""
    store = WeightStore(groups, seed=21)
    table, *layer, experts = shardings(groups.grid.tp)
    store.declare(table, NORMAL)
    with store.unit("layer"):
        for sharding in layer:
            store.declare(sharding, NORMAL)
    store.declare(experts, NORMAL)
    store.materialize(Storage(**options))  # type: ignore[arg-type]
    return store


def test_buckets_fill_from_the_end_of_the_model_up_to_their_size():
    groups = ProcessGroupCollection.single()

    def names(store: WeightStore) -> list[list[str]]:
        return [[h.name for h in b.handles] for b in store.buckets]

    assert names(store_of(groups, bucket_bytes=1)) == [
        ["experts"],
        ["down.bias"],
        ["down"],
        ["qk"],
        ["norm"],
        ["table"],
    ]
    # down.bias 24 B + down 192 B reach 190; experts have other groups and so a separate bucket.
    assert names(store_of(groups, bucket_bytes=190)) == [
        ["experts"],
        ["down", "down.bias"],
        ["qk"],
        ["table", "norm"],
    ]
    assert names(store_of(groups)) == [["experts"], ["down", "qk", "table", "down.bias", "norm"]]


def test_weights_are_bucket_views_ordered_by_weight_decay():
    store = store_of(ProcessGroupCollection.single())
    for bucket in store.buckets:
        decays = [h.sharding.weight_decay for h in bucket.handles]
        assert decays == sorted(decays, reverse=True)
        for handle, member in zip(bucket.handles, bucket.blocks[0].layout.members, strict=True):
            assert member.name == handle.name
            assert handle.param.data_ptr() == bucket.data[member.start :].data_ptr()
            assert handle.param.shape == handle.shape
    assert store.num_parameters == 13 * 6 + 6 + 12 * 6 + 6 * 8 + 6 + 8 * 6


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_initial_values_match_logical_tensor_and_padding_is_zero(tp: int):
    grid = RankGrid(world_size=tp, tp=tp, etp=1, ep=tp)
    seen: set[str] = set()
    for rank in range(tp):
        store = store_of(pretended_groups(grid, rank))
        for handle in store.handles.values():
            flat, padding = handle.get().view(-1), handle.get().clone().view(-1)
            for box in store.boxes(handle):
                values = fill_(
                    torch.empty(box.shape),
                    NORMAL,
                    seed=21,
                    name=box.name,
                    shape=box.shape,
                    offsets=(0,) * len(box.shape),
                )
                for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    values = values.narrow(dim, offset, size)
                assert torch.equal(flat[box.start : box.start + box.numel], values.flatten())
                padding[box.start : box.start + box.numel] = 0.0
                seen.add(box.name)
            assert not padding.any(), f"padding of {handle.name}"
    assert seen == {"table", "norm", "q", "k", "down", "down.bias", "experts"}
    blank = store_of(pretended_groups(grid, 0), initialize=False)
    assert not any(b.data.any() for b in blank.buckets)


def test_second_declaration_counts_as_a_second_use():
    store = WeightStore(ProcessGroupCollection.single())
    handle = store.declare(shardings()[0], NORMAL)
    assert store.declare(shardings()[0], NORMAL) is handle
    assert handle.uses == 2
    without_multiple = WeightSharding.of("table", (13, 6), ROWS)
    with pytest.raises(ValueError, match="table is declared twice with different shardings"):
        store.declare(without_multiple, NORMAL)


def test_invalid_declarations_are_refused():
    grid = RankGrid(world_size=2, tp=2)
    store = WeightStore(pretended_groups(grid, 0))
    with pytest.raises(ValueError, match=r"1.*7.*tp=2"):
        store.declare(WeightSharding.of("w", (4, 7), Shard(axis="tp", dim=1)), NORMAL)
    with pytest.raises(ValueError, match="tp=2"):
        store.declare(WeightSharding.of("n", (4,)), NORMAL)
    assert not store.handles
    handle = store.declare(shardings()[0], NORMAL)
    store.materialize()
    with pytest.raises(ValueError, match="already materialized"):
        store.materialize()
    with pytest.raises(ValueError, match="norm: the store is materialized"):
        store.declare(shardings()[1], NORMAL)
    with pytest.raises(ValueError, match="'tabel'"):
        store.freeze("tabel")
    handle.gradients = object()  # stands for an engine
    with pytest.raises(ValueError, match="DataParallel"):
        store.freeze("table")


#: (strategy, outer strategy, instances)
LAYOUTS = [
    ("no_shard", "no_shard", 1),
    ("optim", "no_shard", 1),
    ("optim_grads", "no_shard", 2),
    ("optim_grads_params", "no_shard", 1),
    ("optim_grads_params", "no_shard", 2),
    ("optim_grads_params", "optim", 2),
]
MODEL_RANKS, DP_RANKS = 4, 6


def stores_of_dp_ranks(rank: int, strategy: str, outer: str, instances: int) -> list[WeightStore]:
    """Return the stores of all data-parallel ranks that share a model rank."""
    grid = RankGrid(world_size=MODEL_RANKS * DP_RANKS, tp=4, etp=1, ep=4, instances=instances)
    stores = []
    for dp_rank in range(DP_RANKS):
        groups = pretended_groups(grid, rank + MODEL_RANKS * dp_rank)
        stores.append(store_of(groups, strategy=strategy, outer=outer, bucket_bytes=190))
        stores[-1].freeze("down")
    return stores


def owned_ranges_of(stores: list[WeightStore], index: int) -> dict[tuple[int, int], OwnedRange]:
    """Return the owned ranges of a bucket by bounds; ranks with equal bounds must agree."""
    ranges: dict[tuple[int, int], OwnedRange] = {}
    for store in stores:
        bucket = store.buckets[index]
        stored_start = bucket.blocks[0].stored_range[0]
        low, high = (stored_start + bound for bound in bucket.owned_range)
        owned = owned_range(store, bucket, torch.zeros(high - low))
        first_owned = ranges.setdefault((low, high), owned)
        for field in ("decayed", "undecayed", "counted", "boxes", "norm_group", "replicas"):
            assert getattr(first_owned, field) == getattr(owned, field), field
        assert torch.equal(first_owned.weights, owned.weights)
    return ranges


def count_elements(
    owned_ranges: dict[tuple[int, int], OwnedRange], numel: int, select
) -> torch.Tensor:
    """Count how often each element of a bucket lies in the selected sub-ranges."""
    counts = torch.zeros(numel)
    for (low, _), owned in owned_ranges.items():
        for start, stop in select(owned):
            counts[low + start : low + stop] += 1
    return counts


@pytest.mark.parametrize(("strategy", "outer", "instances"), LAYOUTS)
def test_owned_ranges_cover_every_element_once_without_padding(
    strategy: str, outer: str, instances: int
):
    num_replicas = DP_RANKS if strategy == "no_shard" else instances if outer == "no_shard" else 1
    for rank in range(MODEL_RANKS):
        stores = stores_of_dp_ranks(rank, strategy, outer, instances)
        for index, bucket in enumerate(stores[0].buckets):
            numel = bucket.numel
            expected = {
                key: torch.zeros(numel) for key in ("decayed", "undecayed", "counted", "box")
            }
            for handle, member in bucket.blocks[0].members():
                if handle.name == "down":
                    continue
                kind = "decayed" if handle.sharding.weight_decay else "undecayed"
                expected[kind][member.start : member.stop] = 1
                for box in stores[0].boxes(handle):
                    span = slice(member.start + box.start, member.start + box.start + box.numel)
                    expected["box"][span] = 1
                    # Replicated weights count on rank 0, kv heads on the first rank of a pair.
                    counts_here = {"norm": rank == 0, "down.bias": rank == 0, "k": rank % 2 == 0}
                    expected["counted"][span] = counts_here.get(box.name, True)
            owned_ranges = owned_ranges_of(stores, index)
            assert len(owned_ranges) == DP_RANKS // num_replicas
            for key in ("decayed", "undecayed", "counted"):
                counts = count_elements(
                    owned_ranges, numel, lambda owned, key=key: getattr(owned, key)
                )
                assert torch.equal(counts, expected[key]), (bucket.index, key)
            boxes = count_elements(
                owned_ranges,
                numel,
                lambda owned: [(b.start, b.start + b.box.numel) for b in owned.boxes],
            )
            assert torch.equal(boxes, expected["box"])
            sharded = strategy != "no_shard"
            expert = bucket.handles[0].sharding.expert
            for owned in owned_ranges.values():
                assert owned.replicas == (num_replicas if sharded else 1)
                assert owned.norm_group == (
                    "world" if sharded else "expert_model" if expert else "model"
                )


def initial(box) -> torch.Tensor:
    """Return the initial values of a box."""
    return fill_(
        torch.empty(box.box.sizes),
        NORMAL,
        seed=21,
        name=box.name,
        shape=box.shape,
        offsets=box.offsets,
    )


@pytest.mark.parametrize(("strategy", "outer", "instances"), LAYOUTS)
def test_owned_boxes_are_views_with_correct_values_and_replicas(
    strategy: str, outer: str, instances: int
):
    holders: dict[tuple, list[int]] = {}
    declared_ranks: dict[tuple, set[tuple[int, ...]]] = {}
    for model_rank in range(MODEL_RANKS):
        for store in stores_of_dp_ranks(model_rank, strategy, outer, instances):
            for bucket in store.buckets:
                low, high = bucket.owned_range
                owned = owned_range(store, bucket, torch.zeros(high - low))
                for box in owned.boxes:
                    values = box.of(owned.weights)
                    assert torch.equal(values, initial(box))
                    assert values.data_ptr() == owned.weights[box.start :].data_ptr()
                    key = (box.name, box.offsets, box.sizes)
                    holders.setdefault(key, []).append(store.groups.rank)
                    declared_ranks.setdefault(key, set()).add(box.replica_ranks)
    for key, ranks in holders.items():
        assert declared_ranks[key] == {tuple(sorted(ranks))}, key


@pytest.mark.parametrize(("strategy", "outer", "instances"), LAYOUTS)
def test_chunks_cover_every_element_with_value_and_replicas(
    strategy: str, outer: str, instances: int
):
    holders: dict[tuple, list[int]] = {}
    declared_ranks: dict[tuple, set[tuple[int, ...]]] = {}
    covered: dict[tuple[int, str], int] = {}
    for model_rank in range(MODEL_RANKS):
        stores = stores_of_dp_ranks(model_rank, strategy, outer, instances)
        for store in stores:
            sharded = strategy == "optim_grads_params"
            for handle in store.handles.values():
                chunks = store.chunks(handle)
                assert sum(h.tensor.numel() for h in chunks) <= handle.param.numel()
                for chunk in chunks:
                    assert torch.equal(chunk.tensor, initial(chunk))
                    base = handle.block.data.untyped_storage().data_ptr()
                    assert chunk.tensor.untyped_storage().data_ptr() == base
                    key = (chunk.name, *chunk.box)
                    holders.setdefault(key, []).append(store.groups.rank)
                    declared_ranks.setdefault(key, set()).add(chunk.replica_ranks)
                    weight = (model_rank, handle.name)
                    covered[weight] = covered.get(weight, 0) + chunk.tensor.numel()
        num_copies = instances if sharded else DP_RANKS
        for handle in stores[0].handles.values():
            numel = sum(box.numel for box in stores[0].boxes(handle))
            assert covered.get((model_rank, handle.name), 0) == num_copies * numel, handle.name
    for key, ranks in holders.items():
        assert declared_ranks[key] == {tuple(sorted(ranks))}, key


def test_sharded_weights_are_grouped_by_unit_and_may_be_empty():
    grid = RankGrid(world_size=24, tp=1, etp=1)
    stores = [store_of(pretended_groups(grid, r), strategy="optim_grads_params") for r in range(24)]
    for store in stores:
        assert [[h.name for h in b.handles] for b in store.buckets] == [
            ["experts"],
            ["down", "qk", "down.bias", "norm"],
            ["table"],
        ]
        assert [b.name for b in store.buckets] == ["experts", "layer", "table"]
        assert [b.unit for b in store.buckets] == [None, "layer", None]
        assert all(b.sharded and not b.blocks[0].ready for b in store.buckets)
        assert all(b.data.numel() == b.numel // 24 for b in store.buckets)
    sizes = [store.handles["norm"].param.numel() for store in stores]
    assert sorted(sizes) == [0] * 23 + [6]
    with pytest.raises(ValueError, match="DataParallel"):
        stores[0].handles["table"].get()


def test_single_rank_stores_full_weights_for_any_strategy():
    store = store_of(ProcessGroupCollection.single(), strategy="optim_grads_params", outer="optim")
    assert not any(bucket.sharded for bucket in store.buckets)
    assert not store.sharded


def test_buckets_never_span_model_chunks_or_mix_tied_weights():
    grid = RankGrid(world_size=4, pp=2)
    for options in ({}, {"strategy": "optim_grads_params"}):
        layouts = []
        for rank, order in ((0, ("tied", "a", "b", "c")), (2, ("c", "tied", "b", "a"))):
            store = WeightStore(pretended_groups(grid, rank))
            for model_chunk in (1, 0):  # declared in the reverse of the execution order
                with store.model_chunk(model_chunk), store.unit("layer"):
                    for name in order[2 * model_chunk : 2 * model_chunk + 2]:
                        stages = (0, 1) if name == "tied" else ()
                        shape = (5, 7) if name == "tied" else (3, 2 + rank)
                        store.declare(WeightSharding.of(name, shape, stages=stages), NORMAL)
            store.materialize(Storage(**options))  # type: ignore[arg-type]
            bucket_weights = [
                (b.model_chunk, sorted(h.name for h in b.handles)) for b in store.buckets
            ]
            first_chunk, second_chunk = sorted(order[:2]), sorted(order[2:])
            untied = [(0, [name]) for name in first_chunk if name != "tied"]
            assert sorted(bucket_weights) == sorted([(1, second_chunk), *untied, (0, ["tied"])])
            assert [model_chunk for model_chunk, _ in bucket_weights] == [1, 0, 0]
            (bucket,) = [b for b in store.buckets if b.handles[0].name == "tied"]
            layouts.append((bucket.blocks[0].layout, bucket.owned_range))
        assert layouts[0] == layouts[1]


def test_invalid_model_chunks_are_reported():
    store = WeightStore(ProcessGroupCollection.single())
    sharding = WeightSharding.of("w", (3, 2))
    store.declare(sharding, NORMAL)
    with (
        store.model_chunk(1),
        pytest.raises(ValueError, match="w is declared in model chunks 0 and 1"),
    ):
        store.declare(sharding, NORMAL)
    assert store.declare(sharding, NORMAL).uses == 2
    with pytest.raises(ValueError, match="model chunk -1 of a weight store"), store.model_chunk(-1):
        pass


def test_empty_store_is_materialised_once():
    store = WeightStore(ProcessGroupCollection.single())
    store.materialize()
    assert store.buckets == []
    assert store.num_parameters == 0
    with pytest.raises(ValueError, match="the store is already materialized"):
        store.materialize()
    with pytest.raises(ValueError, match="declare weights before that"):
        store.declare(WeightSharding.of("w", (3, 2)), NORMAL)
