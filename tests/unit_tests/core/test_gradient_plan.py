# SPDX-License-Identifier: Apache-2.0
"""The sums of a weight's gradient: each kind of weight against what its layers do."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest

from megatron.core.process_groups import RankGrid
from megatron.core.weight_sharding import (
    GradientPlan,
    GradientStep,
    Shard,
    SubWeight,
    WeightSharding,
    gradient_plan,
    local_boxes,
    loss_factor,
)
from tests.support.mutants import apply, planted
from tests.support.ranks import start_ranks

GRID = RankGrid(world_size=16, tp=4, cp=2)
ROWS = Shard(axis="tp", dim=0)


def steps(sharding: WeightSharding, grid: RankGrid = GRID) -> tuple[GradientStep, ...]:
    """Return the sums after the lanes."""
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
    with pytest.raises(ValueError, match="n: nothing cuts it over tp=4 and its gradient there"):
        gradient_plan(WeightSharding.of("n", (8,)), GRID)
    assert steps(WeightSharding.of("n", (8,)), RankGrid(world_size=2)) == ()


def test_replicas_of_kv_heads_are_summed_over_their_sub_group():
    def fused(pieces: int) -> WeightSharding:
        few = (Shard(axis="tp", dim=0, count=pieces),)
        return WeightSharding(
            name="qkv",
            sub_weights=(
                SubWeight(name="q", shape=(16, 3), shards=(ROWS,)),
                SubWeight(name="k", shape=(4, 3), shards=few),
                SubWeight(name="v", shape=(4, 3), shards=few),
            ),
        )

    assert steps(fused(4)) == ()
    assert steps(fused(2)) == (GradientStep("tp/2", ("k", "v")),)
    assert steps(fused(1)) == (GradientStep("tp/4", ("k", "v")),)


def test_a_segment_that_nothing_cuts_takes_the_declared_sum():
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
    with pytest.raises(ValueError, match=r"e: owned by stages \(0, 2\) of 4; only the first and"):
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
    for grid, reached in (
        (ForgetsExperts(world_size=16, tp=4, cp=2, etp=1, ep=8), 8),  # a factor of ep · etp / tp
        (ForgetsExperts(world_size=16, tp=4, cp=2, etp=1, ep=2), 2),
    ):
        with pytest.raises(
            ValueError, match=f"would be summed over {reached} of 4 data-parallel ranks"
        ):
            gradient_plan(expert, grid)


def test_loss_factor_leaves_context_parallel_ranks_out():
    assert loss_factor(RankGrid(world_size=24, tp=2, gtp=2, cp=3), 5) == 1.0 / (2 * 2 * 5)


# --- against a count of the ranks whose tokens reach a weight -------------------------------------


def degrees_of(world: int) -> Iterator[RankGrid]:
    """Yield every grid of so many ranks without generalised tensor parallelism."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for pp, tp, cp, etp, ep in itertools.product(divisors, repeat=5):
        if world % (pp * tp * cp) == 0 and world % (pp * etp * ep) == 0:
            yield RankGrid(world_size=world, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)


def weights_of_layers(grid: RankGrid) -> list[tuple[WeightSharding, str | None]]:
    """Return each kind of weight of a layer with experts, and the group whose tokens come to it.

    Inside of an expert block every rank of a stage has tokens of its own.
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


def miscounted(plan_of: Callable[[WeightSharding, RankGrid], GradientPlan], grid: RankGrid) -> int:
    """Count the weights in whose gradient, on some rank, the tokens of some rank of the stage are
    not exactly once, or which other ranks' pieces are added to."""
    found = 0
    groups: dict[str | None, dict[int, list[int]]] = {
        None: {rank: [rank] for rank in range(grid.world_size)}
    }
    for name in ("tp", "etp_ep", "dense_dp", "expert_dp"):
        groups[name] = {rank: ranks for ranks in grid.named_ranks(name) for rank in ranks}
    for sharding, tokens in weights_of_layers(grid):
        plan = plan_of(sharding, grid)
        held = {rank: Counter(groups[tokens][rank]) for rank in range(grid.world_size)}
        boxes = {r: local_boxes(sharding, grid, grid.coordinates(r)) for r in held}
        right = plan.num_ranks_reached * grid.tp * grid.pp == grid.world_size
        for name in (plan.data_group, *(step.group for step in plan.steps)):
            for ranks in grid.named_ranks(name):
                right &= all(_places(boxes[rank]) == _places(boxes[ranks[0]]) for rank in ranks)
            held = {r: sum((held[other] for other in groups[name][r]), Counter()) for r in held}
        stage = grid.world_size // grid.pp
        for rank, seen in held.items():
            first = rank // stage * stage
            right &= seen == Counter(range(first, first + stage))
        found += not right
    return found


def _places(boxes: list) -> list[tuple]:
    return [(box.name, box.offsets, box.sizes) for box in boxes]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 16])
def test_the_tokens_of_every_rank_reach_a_weight_once(world: int):
    grids = list(degrees_of(world))
    kinds = {(grid.etp != grid.tp, grid.edp > 1, grid.ep > 1) for grid in grids}
    assert len(kinds) == 8 or world < 4
    for grid in grids:
        assert miscounted(gradient_plan, grid) == 0, grid


#: Faults of the plan: (code, faulty code).
PLAN_BUGS = (
    ('"expert_dp" if sharding.expert else "dense_dp"', '"dense_dp"'),
    ('"expert_dp" if sharding.expert else "dense_dp"', '"expert_dp"'),
    ('"etp") * grid.ep, grid.tp', '"etp"), grid.tp'),
    ('"etp") * grid.ep, grid.tp', '"ep"), grid.tp'),
    ('"etp") * grid.ep, grid.tp', '"etp") * grid.ep'),
    ("if sharding.expert:", "if not sharding.expert:"),
    ('== "partial"', '== "identical"'),
    ("steps.append(GradientStep(axis, tuple(whole)))", "pass"),
    ("steps.append(GradientStep(axis, tuple(whole)))", 'steps.append(GradientStep("etp_ep", ()))'),
    ("if axis in sharding.data_axes or", "if"),
)


def faulty(rank: int, world: int) -> int:
    """Return on how many grids this rank's fault miscounts or refuses a weight."""
    apply(planted("megatron.core.weight_sharding", "gradient_plan", *PLAN_BUGS[rank]))
    dead = 0
    for grid in degrees_of(4):
        try:
            dead += miscounted(gradient_plan, grid) > 0
        except ValueError:
            dead += 1
    return dead


def test_a_faulty_plan_miscounts_or_is_refused():
    with start_ranks(faulty, len(PLAN_BUGS), init=False) as ranks:
        assert all(ranks.values(timeout=30.0)), PLAN_BUGS
