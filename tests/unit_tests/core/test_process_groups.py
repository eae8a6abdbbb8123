# SPDX-License-Identifier: Apache-2.0
"""The rank grid against brute-force enumeration, and the process groups created from it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import torch
import torch.distributed as dist

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import all_reduce
from megatron.core.process_groups import DENSE_AXES, EXPERT_AXES, GROUP_AXES, GROUP_NAMES
from tests.support.ranks import run_ranks


def random_grid(rng: random.Random) -> RankGrid:
    """Draw a grid of up to a few dozen ranks whose dense and expert products both divide."""
    tp, gtp, cp, dp, pp = (rng.choice((1, 1, 2, 3)) for _ in range(5))
    world = tp * gtp * cp * dp * pp
    ranks_per_stage = world // pp
    etp = rng.choice([n for n in range(1, ranks_per_stage + 1) if ranks_per_stage % n == 0])
    ep = rng.choice(
        [n for n in range(1, ranks_per_stage // etp + 1) if (ranks_per_stage // etp) % n == 0]
    )
    expert_ranks = ranks_per_stage // etp // ep
    egtp = rng.choice([n for n in range(1, expert_ranks + 1) if expert_ranks % n == 0])
    max_instances = math.gcd(dp, expert_ranks // egtp)
    instances = rng.choice([n for n in range(1, max_instances + 1) if max_instances % n == 0])
    sizes = {"tp": tp, "gtp": gtp, "cp": cp, "pp": pp, "etp": etp, "ep": ep, "egtp": egtp}
    return RankGrid(world_size=world, instances=instances, **sizes)


def enumerate_ranks(grid: RankGrid, order: tuple[str, ...]) -> list[dict[str, int]]:
    """Number the ranks with nested loops, the first axis of `order` in the innermost."""
    loops = itertools.product(*(range(grid.size(axis)) for axis in reversed(order)))
    return [dict(zip(reversed(order), point, strict=True)) for point in loops]


def merge_data_axes(order: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the inner and the outer data axis of a factorisation by their merged axis."""
    data_axis = "dp" if order == DENSE_AXES else "edp"
    return (*(axis for axis in order if not axis.startswith(data_axis)), data_axis)


def brute_force_groups(grid: RankGrid, axes: tuple[str, ...]) -> set[tuple[int, ...]]:
    """Group the ranks that agree on every axis outside `axes`."""
    inner_and_outer = {"dp": ["dp_inner", "dp_outer"], "edp": ["edp_inner", "edp_outer"]}
    axes = tuple(single for axis in axes for single in inner_and_outer.get(axis, [axis]))
    order = DENSE_AXES if set(axes) <= set(DENSE_AXES) else EXPERT_AXES
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, point in enumerate(enumerate_ranks(grid, order)):
        groups.setdefault(tuple(point[a] for a in order if a not in axes), []).append(rank)
    return {tuple(members) for members in groups.values()}


def test_grid_equals_brute_force_enumeration():
    rng = random.Random(1)
    for _ in range(40):
        grid = random_grid(rng)
        for order in (DENSE_AXES, EXPERT_AXES):
            for rank, point in enumerate(enumerate_ranks(grid, order)):
                assert {a: grid.coordinates(rank)[a] for a in order} == point
                assert grid.rank_of(**point) == rank
                merged = {axis: grid.coordinates(rank)[axis] for axis in merge_data_axes(order)}
                assert grid.rank_of(**merged) == rank
            for count in (0, 1, 2, 3):
                axes = tuple(rng.sample(rng.choice((order, merge_data_axes(order))), count))
                assert {tuple(g) for g in grid.ranks(axes)} == brute_force_groups(grid, axes)


def test_groups_partition_the_world_and_contain_their_ranks():
    rng = random.Random(2)
    for _ in range(20):
        grid = random_grid(rng)
        for name, axes in GROUP_AXES.items():
            groups = grid.ranks(axes)
            assert groups == grid.named_ranks(name)
            assert sorted(itertools.chain(*groups)) == list(range(grid.world_size)), name
            assert all(members == sorted(members) for members in groups), name
            for members in groups:
                assert len(members) == math.prod(grid.size(a) for a in axes)
                assert all(
                    grid.group_of(rank, axes) == members for rank in {*members[:2], members[-1]}
                )


def test_groups_of_eight_ranks_match_the_worked_example():
    grid = RankGrid(world_size=8, tp=2, pp=2)
    assert grid.dp == 2
    assert grid.ranks(("tp",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(grid.ranks(("dp",))) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(grid.ranks(("pp",))) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_hybrid_sharding_splits_dp_into_inner_and_outer_axes():
    grid = RankGrid(world_size=16, tp=2, instances=2)
    assert (grid.dp, grid.dp_inner, grid.dp_outer) == (8, 4, 2)
    assert (grid.edp, grid.edp_inner, grid.edp_outer) == (8, 4, 2)
    assert grid.named_ranks("shard")[0] == [0, 2, 4, 6]
    assert grid.named_ranks("replicate")[0] == [0, 8]
    assert grid.named_ranks("dense_dp")[0] == [0, 2, 4, 6, 8, 10, 12, 14]
    coordinates = grid.coordinates(11)
    assert (coordinates["dp"], coordinates["dp_inner"], coordinates["dp_outer"]) == (5, 1, 1)
    assert grid.rank_of(tp=1, dp=5) == grid.rank_of(tp=1, dp_inner=1, dp_outer=1) == 11
    for instances, text in (
        (3, "3 optimizer instances do not divide dp=8: use a divisor of 8"),
        (0, "instances size is 0: use a positive integer"),
    ):
        with pytest.raises(ValueError, match=text):
            RankGrid(world_size=16, tp=2, instances=instances)
    with pytest.raises(ValueError, match=r"2.*edp=1"):
        RankGrid(world_size=8, tp=2, etp=1, ep=8, instances=2)


def test_without_instances_the_outer_axis_has_one_rank():
    rng = random.Random(4)
    for _ in range(20):
        hybrid_grid = random_grid(rng)
        grid = dataclasses.replace(hybrid_grid, instances=1)
        for inner, merged in (("shard", "dense_dp"), ("expert_shard", "expert_dp")):
            assert grid.named_ranks(inner) == grid.named_ranks(merged)
        assert all(len(members) == 1 for members in grid.named_ranks("replicate"))
        for name in ("dense_dp", "dp_cp", "dp", "edp", "expert_dp", "world"):
            assert grid.named_ranks(name) == hybrid_grid.named_ranks(name)


def test_expert_tp_defaults_to_dense_tp():
    assert RankGrid(world_size=8, tp=4).etp == 4
    grid = RankGrid(world_size=8, tp=4, etp=1, ep=4)
    assert (grid.etp, grid.ep, grid.edp, grid.dp) == (1, 4, 2, 2)
    assert grid.ranks(("ep",)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_dense_and_expert_grids_agree_on_pipeline_groups():
    rng = random.Random(3)
    for _ in range(20):
        grid = random_grid(rng)
        assert set(map(tuple, grid.ranks(("pp",)))) == {
            tuple(grid.rank_of(**point, pp=stage) for stage in range(grid.pp))
            for point in enumerate_ranks(grid, EXPERT_AXES[:-1])
        }


def test_all_problems_of_a_grid_are_reported_together():
    with pytest.raises(ValueError) as caught:
        RankGrid(world_size=12, tp=5, cp=2, etp=7)
    text = str(caught.value)
    assert "tp=5 x gtp=1 x cp=2 x pp=1 = 10" in text
    assert "etp=7" in text
    assert "start a multiple of 10 processes" in text
    with pytest.raises(ValueError) as caught:
        RankGrid(world_size=4, tp=0, pp=-1)
    assert "tp size is 0" in str(caught.value)
    assert "pp size is -1" in str(caught.value)


def test_invalid_queries_raise_value_errors():
    grid = RankGrid(world_size=4, tp=2)
    for query, text in (
        (lambda: grid.size("xp"), "unknown axis 'xp'"),
        (lambda: grid.ranks(("tp", "ep")), "mix the dense and the expert grid"),
        (lambda: grid.coordinates(4), "outside the world of 4"),
        (lambda: grid.rank_of(tp=2), "tp coordinate 2 is outside"),
        (lambda: grid.named_ranks("nobody"), "unknown group 'nobody'"),
        (lambda: Group("tp", (0, 1), 0), "needs a process group"),
        (lambda: Group("tp", (0,), 1), "local rank 1 of 1"),
    ):
        with pytest.raises(ValueError, match=text):
            query()


def test_tied_groups_join_first_and_last_stages():
    assert RankGrid(world_size=12, tp=2, pp=3).named_ranks("tied") == [
        [0, 8],
        [1, 9],
        [2, 10],
        [3, 11],
    ]
    assert RankGrid(world_size=2, tp=2).named_ranks("tied") == [[0], [1]]


def test_single_process_has_all_groups_without_distributed():
    groups = ProcessGroupCollection.single()
    for name in GROUP_NAMES:
        assert (groups[name].size, groups[name].rank, groups[name].handle) == (1, 0, None)
    assert set(groups.coordinates.values()) == {0}
    with pytest.raises(ValueError, match=r"'other'.*dense_dp, dp_cp"):
        groups["other"]


def check_groups_on_four_ranks(rank: int, world: int) -> None:
    """Check every group by an all-reduce over it, then replica groups and errors."""
    for grid in (
        RankGrid(world_size=4, tp=2, pp=2, etp=1, ep=2),
        RankGrid(world_size=4, tp=2, gtp=2),
        RankGrid(world_size=4, pp=4),
        RankGrid(world_size=4, instances=2),
    ):
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for name, axes in GROUP_AXES.items():
            members = grid.group_of(rank, axes)
            assert list(groups[name].ranks) == members
            assert groups[name].rank == members.index(rank)
            total = all_reduce(torch.tensor([2.0**rank]), groups[name])
            assert total.item() == sum(2.0**r for r in members), name
        if grid.pp > 1:  # backward transfers must not queue behind forward transfers
            assert groups["pp"].ranks == groups["pp_backward"].ranks
            assert groups["pp"].handle is not groups["pp_backward"].handle
        stages = grid.group_of(rank, ("pp",))
        if rank in (stages[0], stages[-1]):
            total = all_reduce(torch.tensor([2.0**rank]), groups["tied"])
            assert total.item() == sum(2.0**r for r in {stages[0], stages[-1]})
        else:
            with pytest.raises(ValueError, match="'tied'"):
                groups["tied"]
        if grid.gtp > 1:  # equal groups share a communicator if they carry the same kind of traffic
            equal = [groups[name] for name in ("dense_dp", "shard_gather", "gtp")]
            assert len({group.ranks for group in equal}) == 1
            assert len({id(group.handle) for group in equal}) == 3
            assert groups["tp"].handle is groups["tp_cp"].handle
            assert groups["dense_dp"].handle is groups["shard"].handle
            assert groups["shard_gather"].handle is groups["gtp_gather"].handle
    _check_replica_groups_and_errors(rank)


def _check_replica_groups_and_errors(rank: int) -> None:
    grid = RankGrid(world_size=4, tp=4)
    tp_groups = ProcessGroupCollection.create(grid, rank=rank, names=("tp",))
    with pytest.raises(ValueError, match="no group 'dp': this collection has tp"):
        tp_groups["dp"]
    groups = ProcessGroupCollection.create(grid, rank=rank)
    pair = groups["tp/2"]
    assert (pair.name, pair.ranks, pair.rank) == ("tp/2", ((0, 1), (2, 3))[rank // 2], rank % 2)
    assert all_reduce(torch.tensor([2.0**rank]), pair).item() == (3.0, 12.0)[rank // 2]
    assert groups["tp/4"].handle is groups["tp"].handle
    assert (groups["tp/4"].name, groups["tp/4"].ranks) == ("tp/4", groups["tp"].ranks)
    for name in ("tp/1", "tp/3", "cp/2"):
        with pytest.raises(ValueError, match=f"no group '{name}': this collection has dense_dp"):
            groups[name]
    with pytest.raises(ValueError, match=r"'tp/3'.*tp/2, tp/4"):
        grid.named_ranks("tp/3")
    with pytest.raises(ValueError, match="the grid is for 2 ranks but the world has 4"):
        ProcessGroupCollection.create(RankGrid(world_size=2), rank=0)
    with pytest.raises(ValueError, match="'nobody'"):
        ProcessGroupCollection.create(grid, rank=rank, names=("nobody",))


def test_created_groups_reduce_over_their_ranks():
    run_ranks(check_groups_on_four_ranks, 4)


def test_nccl_groups_on_the_critical_path_have_high_priority(monkeypatch):
    """tp, cp and ep have priority over weight gathers and gradient reductions; gloo has no such
    option."""
    options = {}

    class NCCL:
        class Options:
            def __init__(self, is_high_priority_stream=False):
                self.is_high_priority_stream = is_high_priority_stream

    def new_group(ranks, *, timeout, pg_options=None):
        options.setdefault(tuple(ranks), []).append(pg_options)
        return object()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "new_group", new_group)
    grid = RankGrid(world_size=8, tp=2, ep=2)
    priorities = {}
    for backend in ("nccl", "gloo"):
        options.clear()
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        ProcessGroupCollection.create(grid, rank=0, names=("tp", "etp_ep", "dense_dp"))
        priorities[backend] = {
            ranks: [
                option is not None and option.is_high_priority_stream for option in group_options
            ]
            for ranks, group_options in options.items()
        }
    tensor, experts, gradients = (
        tuple(grid.group_of(0, axes)) for axes in (("tp",), ("etp", "ep"), ("gtp", "cp", "dp"))
    )
    assert priorities["nccl"][tensor] == priorities["nccl"][experts] == [True]
    assert priorities["nccl"][gradients] == [False]
    assert not any(any(group_options) for group_options in priorities["gloo"].values())
