# SPDX-License-Identifier: Apache-2.0
"""Declaring weights, their layout in buckets, initial values, and what a rank owns of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.initialize import InitSpec, fill_
from megatron.core.process_groups import GROUP_AXES, Group, ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import Bucket, OwnedRange, WeightStore, owned_range
from megatron.core.weight_sharding import Cut, Segment, WeightSharding, placement

ROWS = Cut(axis="tp", dim=0)
NORMAL = InitSpec.normal(0.5)


def pretended(grid: RankGrid, rank: int) -> ProcessGroupCollection:
    """Return the groups of one rank of many, over which nothing can be sent."""
    groups = {}
    for name, axes in GROUP_AXES.items():
        members = tuple(grid.group_of(rank, axes))
        handle = object() if len(members) > 1 else None
        groups[name] = Group(name, members, members.index(rank), handle)  # type: ignore[arg-type]
    return ProcessGroupCollection(grid, rank, groups)


def shardings(tp: int = 1) -> list[WeightSharding]:
    """Return weights of every kind, in the order of a model; two kv heads."""
    few = (Cut(axis="tp", dim=0, parts=min(2, tp)),)
    return [
        WeightSharding.of("table", (13, 6), ROWS, row_multiple=2),
        WeightSharding.of("norm", (6,), gradient={"tp": "partial"}, weight_decay=False),
        WeightSharding(
            name="qk",
            segments=(
                Segment(name="q", shape=(8, 6), cuts=(ROWS,)),
                Segment(name="k", shape=(4, 6), cuts=few),
            ),
        ),
        WeightSharding.of("down", (6, 8), Cut(axis="tp", dim=1)),
        WeightSharding.of("down.bias", (6,), gradient={"tp": "identical"}, weight_decay=False),
        WeightSharding.of("experts", (8, 6), Cut(axis="ep", dim=0), expert=True),
    ]


def store_of(groups: ProcessGroupCollection, **options: object) -> WeightStore:
    """Return a materialised store of all of them."""
    store = WeightStore(groups, seed=21)
    for sharding in shardings(groups.grid.tp):
        store.declare(sharding, NORMAL)
    store.materialize(**options)  # type: ignore[arg-type]
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
    # down.bias 24 B + down 192 B reach 200; the experts have lanes and a bucket of their own.
    assert names(store_of(groups, bucket_bytes=190)) == [
        ["experts"],
        ["down", "down.bias"],
        ["qk"],
        ["table", "norm"],
    ]
    assert names(store_of(groups)) == [["experts"], ["down", "qk", "table", "down.bias", "norm"]]


def test_weights_are_views_of_their_bucket_with_those_without_decay_last():
    store = store_of(ProcessGroupCollection.single())
    for bucket in store.buckets:
        decays = [h.sharding.weight_decay for h in bucket.handles]
        assert decays == sorted(decays, reverse=True)
        for handle, member in zip(bucket.handles, bucket.layout.members, strict=True):
            assert member.name == handle.name
            assert handle.param.data_ptr() == bucket.weights.data[member.start :].data_ptr()
            assert handle.param.shape == handle.shape
    assert store.num_parameters == 13 * 6 + 6 + 12 * 6 + 6 * 8 + 6 + 8 * 6


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_initial_values_are_those_of_the_logical_tensor_and_padding_is_zero(tp: int):
    grid = RankGrid(world_size=tp, tp=tp, etp=1, ep=tp)
    seen: set[str] = set()
    for rank in range(tp):
        store = store_of(pretended(grid, rank))
        for handle in store.handles.values():
            flat, rest = handle.get().view(-1), handle.get().clone().view(-1)
            for box in store.boxes(handle):
                whole = fill_(
                    torch.empty(box.shape),
                    NORMAL,
                    seed=21,
                    name=box.name,
                    shape=box.shape,
                    offsets=(0,) * len(box.shape),
                )
                for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                    whole = whole.narrow(dim, first, size)
                assert torch.equal(flat[box.start : box.start + box.numel], whole.flatten())
                rest[box.start : box.start + box.numel] = 0.0
                seen.add(box.name)
            assert not rest.any(), f"padding of {handle.name}"
    assert seen == {"table", "norm", "q", "k", "down", "down.bias", "experts"}
    blank = store_of(pretended(grid, 0), initialize=False)
    assert not any(b.weights.data.any() for b in blank.buckets)


def test_a_second_declaration_is_a_second_use():
    store = WeightStore(ProcessGroupCollection.single())
    first = store.declare(shardings()[0], NORMAL)
    assert store.declare(shardings()[0], NORMAL) is first
    assert first.uses == 2
    other = WeightSharding.of("table", (13, 6), ROWS)
    with pytest.raises(ValueError, match="table is declared twice with different shardings"):
        store.declare(other, NORMAL)


def test_a_store_refuses_what_cannot_be():
    grid = RankGrid(world_size=2, tp=2)
    store = WeightStore(pretended(grid, 0))
    with pytest.raises(ValueError, match=r"w: dimension 1 of 7 does not divide by tp=2"):
        store.declare(WeightSharding.of("w", (4, 7), Cut(axis="tp", dim=1)), NORMAL)
    with pytest.raises(ValueError, match="n: nothing cuts it over tp=2"):
        store.declare(WeightSharding.of("n", (4,)), NORMAL)
    assert not store.handles
    handle = store.declare(shardings()[0], NORMAL)
    store.materialize()
    with pytest.raises(ValueError, match="already materialised"):
        store.materialize()
    with pytest.raises(ValueError, match="norm: the store is materialised"):
        store.declare(shardings()[1], NORMAL)
    with pytest.raises(ValueError, match="no weight 'tabel' to freeze"):
        store.freeze("tabel")
    handle.slot = torch.zeros(handle.shape)
    with pytest.raises(ValueError, match="table: freeze it before building DataParallel"):
        store.freeze("table")


def owned_parts(store: WeightStore, bucket: Bucket, parts: int, axes) -> list[OwnedRange]:
    """Cut a bucket into `parts` spans and describe each."""
    gradients = torch.zeros(bucket.layout.numel)
    size = -(-bucket.layout.numel // parts)
    return [
        owned_range(
            store,
            bucket,
            gradients,
            span=(i * size, min((i + 1) * size, bucket.layout.numel)),
            sharded_axes=axes,
        )
        for i in range(parts)
    ]


def marked(parts: list[OwnedRange], numel: int, ranges) -> torch.Tensor:
    """Count how often each element of a bucket is in the given ranges of its parts."""
    found, at = torch.zeros(numel), 0
    for part in parts:
        for start, stop in ranges(part):
            found[at + start : at + stop] += 1
        at += part.weights.numel()
    return found


@pytest.mark.parametrize("parts", [1, 3])
def test_owned_ranges_name_every_element_once_and_no_padding(parts: int):
    grid = RankGrid(world_size=4, tp=4, etp=1, ep=4)
    for rank in range(4):
        store = store_of(pretended(grid, rank))
        store.freeze("down")
        for bucket in store.buckets:
            numel = bucket.layout.numel
            wanted = {key: torch.zeros(numel) for key in ("decayed", "undecayed", "counted", "box")}
            for handle, member in zip(bucket.handles, bucket.layout.members, strict=True):
                if handle.name == "down":
                    continue
                kind = "decayed" if handle.sharding.weight_decay else "undecayed"
                wanted[kind][member.start : member.stop] = 1
                for box in store.boxes(handle):
                    span = slice(member.start + box.start, member.start + box.start + box.numel)
                    wanted["box"][span] = 1
                    # Whole weights count on the first rank, kv heads on the first of a pair.
                    first = {"norm": rank == 0, "down.bias": rank == 0, "k": rank % 2 == 0}
                    wanted["counted"][span] = first.get(box.name, True)
            found = owned_parts(store, bucket, parts, ())
            for key in ("decayed", "undecayed", "counted"):
                got = marked(found, numel, lambda part, key=key: getattr(part, key))
                assert torch.equal(got, wanted[key]), (bucket.index, key)
            boxes = marked(
                found,
                numel,
                lambda part: [(b.box.start, b.box.start + b.box.numel) for b in part.boxes],
            )
            assert torch.equal(boxes, wanted["box"])


def test_owned_boxes_are_views_with_their_values_and_their_replicas():
    grid = RankGrid(world_size=8, tp=2, etp=1, ep=2)
    store = store_of(pretended(grid, 5))
    optimizer = placement("optim").optimizer
    for axes, norm in (((), {"model", "expert_model"}), (optimizer, {"world"})):
        groups = set()
        for bucket in store.buckets:
            for part in owned_parts(store, bucket, 3, axes):
                groups.add(part.norm_group)
                for placed in part.boxes:
                    values = placed.of(part.weights)
                    box = placed.box
                    whole = fill_(
                        torch.empty(box.sizes),
                        NORMAL,
                        seed=21,
                        name=box.name,
                        shape=box.shape,
                        offsets=box.offsets,
                    )
                    assert torch.equal(values, whole)
                    assert values.data_ptr() == part.weights[box.start :].data_ptr()
                    lanes = (5,) if axes else (1, 3, 5, 7)
                    both = {"norm", "down.bias"}
                    pairs = itertools.chain(*((r - 1, r) for r in lanes))
                    ranks = tuple(pairs) if box.name in both else lanes
                    assert placed.replica_ranks == ranks, box.name
        assert groups == norm
