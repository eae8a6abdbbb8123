# SPDX-License-Identifier: Apache-2.0
"""Gradient reductions of each kind of weight, against a count of the contributing ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest

from megatron.core import RankGrid, WeightSharding
from megatron.core.weight_sharding import (
    GradientPlan,
    GradientStep,
    Shard,
    SubWeight,
    gradient_plan,
    local_boxes,
    loss_factor,
)
from tests.support.mutants import apply, planted
from tests.support.ranks import start_ranks

GRID = RankGrid(world_size=16, tp=4, cp=2)
ROWS = Shard(axis="tp", dim=0)


def steps(sharding: WeightSharding, grid: RankGrid = GRID) -> tuple[GradientStep, ...]:
    """Return the reductions that follow the data-parallel reduction."""
    return gradient_plan(sharding, grid).steps


def test_sharded_weight_is_reduced_only_over_dp_ranks():
    plan = gradient_plan(WeightSharding.of("w", (8, 3), ROWS), GRID)
    assert (plan.data_group, plan.steps, plan.num_ranks_reached) == ("dense_dp", (), Fraction(4))


def test_replicated_weight_is_summed_over_tp_only_if_partial():
    assert steps(WeightSharding.of("n", (8,), gradient={"tp": "identical"})) == ()
    partial = WeightSharding.of("n", (8,), gradient={"tp": "partial"})
    assert steps(partial) == (GradientStep("tp", ("n",)),)
    assert steps(partial, RankGrid(world_size=2)) == ()


def test_axis_without_gradient_rule_is_refused():
    with pytest.raises(ValueError, match="tp=4"):
        gradient_plan(WeightSharding.of("n", (8,)), GRID)
    assert steps(WeightSharding.of("n", (8,)), RankGrid(world_size=2)) == ()


def test_replicas_of_kv_heads_are_summed_over_their_sub_group():
    def fused(num_kv_shards: int) -> WeightSharding:
        kv_shards = (Shard(axis="tp", dim=0, count=num_kv_shards),)
        return WeightSharding(
            name="qkv",
            sub_weights=(
                SubWeight(name="q", shape=(16, 3), shards=(ROWS,)),
                SubWeight(name="k", shape=(4, 3), shards=kv_shards),
                SubWeight(name="v", shape=(4, 3), shards=kv_shards),
            ),
        )

    assert steps(fused(4)) == ()
    assert steps(fused(2)) == (GradientStep("tp/2", ("k", "v")),)
    assert steps(fused(1)) == (GradientStep("tp/4", ("k", "v")),)


def test_unsharded_sub_weight_uses_the_declared_reduction():
    sharding = WeightSharding(
        name="projection",
        sub_weights=(
            SubWeight(name="cut", shape=(8, 3), shards=(ROWS,)),
            SubWeight(name="whole", shape=(2, 3)),
        ),
        gradient={"tp": "partial"},
    )
    assert steps(sharding) == (GradientStep("tp", ("whole",)),)


def test_a_tied_weight_is_summed_over_its_stages():
    grid = RankGrid(world_size=8, tp=2, pp=4)
    tied = WeightSharding.of("e", (8, 3), ROWS, stages=(0, 3))
    assert steps(tied, grid) == (GradientStep("tied", ("e",)),)
    assert steps(WeightSharding.of("e", (8, 3), ROWS, stages=(0, 0)), GRID) == ()
    with pytest.raises(ValueError, match=r"\(0, 2\).*4"):
        gradient_plan(WeightSharding.of("e", (8, 3), ROWS, stages=(0, 2)), grid)


@pytest.mark.parametrize(("etp", "ep", "egtp"), [(1, 4, 1), (1, 8, 2), (4, 2, 1), (2, 2, 2)])
def test_expert_gradients_reach_all_dp_ranks_on_any_grid(etp: int, ep: int, egtp: int):
    grid = RankGrid(world_size=16, tp=4, cp=2, etp=etp, ep=ep, egtp=egtp)
    expert = WeightSharding.of(
        "e", (ep * etp, 3), Shard(axis="ep", dim=0), Shard(axis="etp", dim=0), expert=True
    )
    plan = gradient_plan(expert, grid)
    assert (plan.data_group, plan.steps, plan.num_ranks_reached) == ("expert_dp", (), Fraction(4))


class ForgetsExperts(RankGrid):
    """A grid that sums expert gradients over the dense data-parallel ranks."""

    @property
    def edp(self) -> int:
        return self.dp * self.cp


def test_expert_gradient_over_wrong_rank_count_is_refused():
    expert = WeightSharding.of("e", (8, 3), Shard(axis="ep", dim=0), expert=True)
    for grid, num_reached in (
        (ForgetsExperts(world_size=16, tp=4, cp=2, etp=1, ep=8), 8),  # a factor of ep · etp / tp
        (ForgetsExperts(world_size=16, tp=4, cp=2, etp=1, ep=2), 2),
    ):
        with pytest.raises(
            ValueError, match=f"would be summed over {num_reached} of 4 data-parallel ranks"
        ):
            gradient_plan(expert, grid)


def test_loss_factor_leaves_context_parallel_ranks_out():
    assert loss_factor(RankGrid(world_size=24, tp=2, gtp=2, cp=3), 5) == 1.0 / (2 * 2 * 5)


# --- against a count of the ranks whose tokens contribute to a gradient ---------------------------


def grids_of_world(world: int) -> Iterator[RankGrid]:
    """Yield every grid of `world` ranks without generalised tensor parallelism."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for pp, tp, cp, etp, ep in itertools.product(divisors, repeat=5):
        if world % (pp * tp * cp) == 0 and world % (pp * etp * ep) == 0:
            yield RankGrid(world_size=world, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)


def weights_of_layers(grid: RankGrid) -> list[tuple[WeightSharding, str | None]]:
    """Return each kind of weight of an MoE layer, and the group whose tokens its layer gathers.

    Inside an expert block every rank of a stage has its own tokens.
    """
    experts = (grid.ep * 2, grid.etp * 3, 2)
    fused = [
        SubWeight(
            name=name, shape=experts, shards=(Shard(axis="ep", dim=0), Shard(axis="etp", dim=1))
        )
        for name in ("gate", "up")
    ]
    down = (Shard(axis="ep", dim=0), Shard(axis="etp", dim=2))
    return [
        (WeightSharding.of("rows", (2 * grid.tp, 3), ROWS), "tp"),
        (WeightSharding.of("bias", (3,), gradient={"tp": "identical"}), "tp"),
        (WeightSharding.of("router", (grid.ep * 2, 3), gradient={"tp": "partial"}), None),
        (
            WeightSharding(
                name="gate_up", sub_weights=tuple(fused), interleave=experts[0], expert=True
            ),
            "etp_ep",
        ),
        (WeightSharding.of("down", (grid.ep * 2, 2, grid.etp * 3), *down, expert=True), "etp_ep"),
    ]


def num_miscounted_weights(
    plan_of: Callable[[WeightSharding, RankGrid], GradientPlan], grid: RankGrid
) -> int:
    """Count the weights with a wrong gradient on some rank.

    A gradient is wrong if a rank of the stage contributes its tokens never or more than once, or
    if the plan adds up different regions of the weight.
    """
    num_wrong = 0
    groups: dict[str | None, dict[int, list[int]]] = {
        None: {rank: [rank] for rank in range(grid.world_size)}
    }
    for name in ("tp", "etp_ep", "dense_dp", "expert_dp"):
        groups[name] = {rank: ranks for ranks in grid.named_ranks(name) for rank in ranks}
    for sharding, tokens in weights_of_layers(grid):
        plan = plan_of(sharding, grid)
        sources = {rank: Counter(groups[tokens][rank]) for rank in range(grid.world_size)}
        boxes = {r: local_boxes(sharding, grid, grid.coordinates(r)) for r in sources}
        correct = plan.num_ranks_reached * grid.tp * grid.pp == grid.world_size
        for name in (plan.data_group, *(step.group for step in plan.steps)):
            for ranks in grid.named_ranks(name):
                correct &= all(_regions(boxes[rank]) == _regions(boxes[ranks[0]]) for rank in ranks)
            sources = {
                r: sum((sources[peer] for peer in groups[name][r]), Counter()) for r in sources
            }
        stage = grid.world_size // grid.pp
        for rank, counts in sources.items():
            first_rank = rank // stage * stage
            correct &= counts == Counter(range(first_rank, first_rank + stage))
        num_wrong += not correct
    return num_wrong


def _regions(boxes: list) -> list[tuple]:
    return [(box.name, box.offsets, box.sizes) for box in boxes]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 16])
def test_tokens_of_every_rank_reach_a_weight_once(world: int):
    grids = list(grids_of_world(world))
    kinds = {(grid.etp != grid.tp, grid.edp > 1, grid.ep > 1) for grid in grids}
    assert len(kinds) == 8 or world < 4
    for grid in grids:
        assert num_miscounted_weights(gradient_plan, grid) == 0, grid


#: Planted bugs: (code of `gradient_plan`, replacement).
PLAN_BUGS = (
    ('"expert_dp" if sharding.expert else "dense_dp"', '"dense_dp"'),
    ('"expert_dp" if sharding.expert else "dense_dp"', '"expert_dp"'),
    ('"etp") * grid.ep, grid.tp', '"etp"), grid.tp'),
    ('"etp") * grid.ep, grid.tp', '"ep"), grid.tp'),
    ('"etp") * grid.ep, grid.tp', '"etp") * grid.ep'),
    ("if sharding.expert:", "if not sharding.expert:"),
    ('== "partial"', '== "identical"'),
    ("steps.append(GradientStep(axis, tuple(unsharded)))", "pass"),
    (
        "steps.append(GradientStep(axis, tuple(unsharded)))",
        'steps.append(GradientStep("etp_ep", ()))',
    ),
    ("if axis in sharding.data_axes or", "if"),
)


def count_detecting_grids(rank: int, world: int) -> int:
    """Return on how many grids this rank's planted bug miscounts a weight or raises."""
    apply(planted("megatron.core.weight_sharding", "gradient_plan", *PLAN_BUGS[rank]))
    detected = 0
    for grid in grids_of_world(4):
        try:
            detected += num_miscounted_weights(gradient_plan, grid) > 0
        except ValueError:
            detected += 1
    return detected


def test_a_faulty_plan_miscounts_or_is_refused():
    with start_ranks(count_detecting_grids, len(PLAN_BUGS), init=False) as ranks:
        assert all(ranks.values(timeout=30.0)), PLAN_BUGS
