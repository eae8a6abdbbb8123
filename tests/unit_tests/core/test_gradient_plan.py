# SPDX-License-Identifier: Apache-2.0
"""The sums of a weight's gradient: each kind of weight against what its layers do."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron.core.process_groups import RankGrid
from megatron.core.weight_sharding import (
    Cut,
    GradientStep,
    Segment,
    WeightSharding,
    gradient_plan,
    loss_factor,
)

GRID = RankGrid(world_size=16, tp=4, cp=2)
ROWS = Cut(axis="tp", dim=0)


def steps(sharding: WeightSharding, grid: RankGrid = GRID) -> tuple[GradientStep, ...]:
    """Return the sums after the lanes."""
    return gradient_plan(sharding, grid).steps


def test_a_cut_weight_needs_its_lanes_only():
    plan = gradient_plan(WeightSharding.of("w", (8, 3), ROWS), GRID)
    assert (plan.lanes, plan.steps, plan.lanes_reached) == ("lanes", (), Fraction(4))


def test_a_whole_weight_is_summed_over_tp_only_where_each_rank_has_an_addend():
    assert steps(WeightSharding.of("n", (8,), gradient={"tp": "identical"})) == ()
    partial = WeightSharding.of("n", (8,), gradient={"tp": "partial"})
    assert steps(partial) == (GradientStep("tp", ("n",)),)
    assert steps(partial, RankGrid(world_size=2)) == ()


def test_an_axis_about_which_nothing_is_said_is_refused():
    with pytest.raises(ValueError, match="n: nothing cuts it over tp=4 and its gradient there"):
        gradient_plan(WeightSharding.of("n", (8,)), GRID)
    assert steps(WeightSharding.of("n", (8,)), RankGrid(world_size=2)) == ()


def test_replicas_of_kv_heads_are_summed_over_their_sub_group():
    def fused(pieces: int) -> WeightSharding:
        few = (Cut(axis="tp", dim=0, parts=pieces),)
        return WeightSharding(
            name="qkv",
            segments=(
                Segment(name="q", shape=(16, 3), cuts=(ROWS,)),
                Segment(name="k", shape=(4, 3), cuts=few),
                Segment(name="v", shape=(4, 3), cuts=few),
            ),
        )

    assert steps(fused(4)) == ()
    assert steps(fused(2)) == (GradientStep("tp/2", ("k", "v")),)
    assert steps(fused(1)) == (GradientStep("tp/4", ("k", "v")),)


def test_a_segment_that_nothing_cuts_takes_the_declared_sum():
    sharding = WeightSharding(
        name="projection",
        segments=(
            Segment(name="cut", shape=(8, 3), cuts=(ROWS,)),
            Segment(name="whole", shape=(2, 3)),
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
def test_experts_hold_all_lanes_whatever_their_grid(etp: int, ep: int, egtp: int):
    grid = RankGrid(world_size=16, tp=4, cp=2, etp=etp, ep=ep, egtp=egtp)
    expert = WeightSharding.of(
        "e", (ep * etp, 3), Cut(axis="ep", dim=0), Cut(axis="etp", dim=0), expert=True
    )
    plan = gradient_plan(expert, grid)
    assert (plan.lanes, plan.steps, plan.lanes_reached) == ("expert_lanes", (), Fraction(4))


class ForgetsExperts(RankGrid):
    """A grid that sums expert gradients over the dense data-parallel ranks."""

    @property
    def edp(self) -> int:
        return self.dp * self.cp


def test_an_expert_gradient_that_misses_or_doubles_lanes_is_refused():
    expert = WeightSharding.of("e", (8, 3), Cut(axis="ep", dim=0), expert=True)
    for grid, reached in (
        (ForgetsExperts(world_size=16, tp=4, cp=2, etp=1, ep=8), 8),  # a factor of ep · etp / tp
        (ForgetsExperts(world_size=16, tp=4, cp=2, etp=1, ep=2), 2),
    ):
        with pytest.raises(ValueError, match=f"would hold {reached} of 4 data lanes"):
            gradient_plan(expert, grid)


def test_loss_factor_leaves_context_parallel_ranks_out():
    assert loss_factor(RankGrid(world_size=24, tp=2, gtp=2, cp=3), 5) == 1.0 / (2 * 2 * 5)
