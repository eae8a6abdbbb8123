# SPDX-License-Identifier: Apache-2.0
"""Experts through the engine: every strategy on grids of all kinds, against sums known exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_sharding import STRATEGIES, GradientKind, Placement, placement
from tests.support.closeness import assert_all_close
from tests.support.gatherers import gatherer_of
from tests.support.mutants import apply, planted
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.distributed.engine_steps import assert_traffic, cut, planned_gathers
from tests.unit_tests.core.distributed.expert_weights import (
    ExpertModel,
    is_expert,
    of_stage,
    whole_gradients,
    whole_of,
)

STEPS = (1, 2)
"""Microbatches of each."""
SGD = OptimizerConfig(kind="sgd", sgd_momentum=0.5, clip_grad=40.0, count_zeros=True)
NO_SHARD, OPTIM, OPTIM_GRADS, CUT_WEIGHTS = ({"strategy": strategy} for strategy in STRATEGIES)
EARLY = {"overlap_param_gather": True}
BOTH = {**CUT_WEIGHTS, "outer": "optim"}

#: Degrees, lanes of dense weights, lanes of experts: four ranks.
GRIDS = (
    ({"ep": 4}, 4, 1),
    ({"ep": 2}, 4, 2),
    ({"tp": 2, "etp": 1, "ep": 2}, 2, 2),
    ({"tp": 2, "etp": 2, "ep": 2}, 2, 1),
    ({"tp": 4, "etp": 1}, 1, 4),
    ({"tp": 4, "etp": 1, "ep": 2}, 1, 2),
    ({"tp": 2, "etp": 1}, 2, 4),
    ({"etp": 2, "ep": 2}, 4, 1),
    ({"etp": 2}, 4, 2),
    ({"tp": 2, "etp": 4}, 2, 1),
    ({"cp": 2, "ep": 2}, 4, 2),
    ({"tp": 4, "etp": 2, "ep": 2}, 1, 1),
)
#: Settings for them, in turn.
CONFIGS = (
    NO_SHARD,
    *(a | b for a, b in itertools.product((OPTIM, OPTIM_GRADS, CUT_WEIGHTS), ({}, EARLY))),
    CUT_WEIGHTS | EARLY | {"granularity": "weight"},
    OPTIM_GRADS | {"overlap_grad_reduce": False},
    *({**a, "grad_dtype": torch.bfloat16, "fp32_accumulation": True} for a in (OPTIM, CUT_WEIGHTS)),
)
HYBRID_GRIDS = (
    ({"instances": 2, "ep": 2}, 4, 2),
    ({"instances": 2, "tp": 2, "etp": 1}, 2, 4),
    ({"instances": 2, "etp": 2}, 4, 2),
)
#: Dense weights and experts on other stages, and stages that have neither.
STAGE_GRIDS = (
    ({"pp": 2, "ep": 2}, 2, 1),
    ({"pp": 2, "tp": 2, "etp": 1}, 1, 2),
    ({"pp": 4}, 1, 1),
)
EIGHT = (
    ({"pp": 2, "tp": 2, "etp": 1, "ep": 2}, 2, 2),
    ({"instances": 2, "tp": 2, "etp": 2, "ep": 2}, 4, 2),
)


def trained(
    groups: ProcessGroupCollection,
    parallel: dict[str, object],
    *,
    router: GradientKind = "partial",
) -> ExpertModel:
    """Train on this rank, every gradient, norm and message as it must be."""
    model = ExpertModel(
        groups, parallel=parallel, optimizer=SGD, has=of_stage(groups), router=router
    )
    engine = model.engine
    for step, microbatches in enumerate(STEPS):
        wanted = whole_gradients(step, microbatches)
        with trace(groups) as records:
            engine.start_param_sync()
            model.gradients(step, microbatches)
        if engine.config.overlap_grad_reduce:
            assert engine.launched_in_backward == len(engine.buckets)
        for owned in engine.owned():
            assert owned.gradients.isfinite().all()
            for placed in owned.boxes:
                got, whole = placed.of(owned.gradients), wanted[placed.name]
                assert torch.equal(got, cut(whole, placed.box)), placed
        if step > 0:  # the first step makes the plan that the formula asks for
            data_groups = ("dense_dp", "expert_dp", "shard", "replicate", "shard_gather")
            names = {name for group in data_groups for name in (group, f"expert_{group}")}
            over_data = [record for record in records if record.group in names]
            assert_traffic(engine, over_data, microbatches)
            # once for forward and once for backward, though a layer needs its buckets in turn
            assert max(planned_gathers(engine) or [0]) <= 2 * microbatches
        result = model.update()
        exact = sum(float(w.double().square().sum()) for w in wanted.values()) ** 0.5
        assert abs(result.grad_norm - exact) <= 1e-6 * exact
        assert exact > 2 * SGD.clip_grad, "nothing is clipped"
        assert result.num_zeros == sum(int((w == 0).sum()) for w in wanted.values())
    if gatherer_of(engine) is not None:
        assert gatherer_of(engine).counts.mismatches == 0
        assert gatherer_of(engine).counts.prefetched > 0 or not engine.config.overlap_param_gather
    return model


def assert_sharded_bytes(model: ExpertModel, lanes: int, expert_lanes: int) -> None:
    """See that dense and expert weights are each cut over their own lanes, as the formula says."""
    engine, instances = model.engine, model.groups.grid.instances
    placed = Placement() if lanes == expert_lanes == 1 else engine.config.placement
    weights = gradients = 0
    for entry in engine.buckets:
        bucket = entry.bucket
        sizes = {is_expert(s.name) for h in bucket.handles for s in h.sharding.sub_weights}
        (expert,) = sizes
        share = (expert_lanes if expert else lanes) // instances
        both = instances if engine.config.outer == "optim" else 1
        whole = bucket.numel
        assert len(bucket.data) == (whole // share if placed.weight else whole)
        assert len(entry.gradients) == (whole // (share * both) if placed.optimizer else whole)
        alone = share * instances == 1
        assert bucket.single_rank == alone
        assert entry.every_microbatch == (bool(placed.gradient) and not alone)
        weights += bucket.data.nbytes
        gradients += 0 if entry.every_microbatch else whole * engine.config.grad_dtype.itemsize
        gradients += 4 * whole // share if entry.every_microbatch or entry.fp32_sum else 0
        assert entry.fp32_sum == (engine.config.fp32_accumulation and not alone)
    formula = bytes_per_rank(
        [BucketSize.of(bucket) for bucket in model.store.buckets],
        engine.placement,
        element_bytes=ElementBytes(
            gradient=engine.config.grad_dtype.itemsize,
            fp32_sum=engine.config.fp32_accumulation and bool(placed.optimizer),
        ),
        prefetch=engine.config.overlap_param_gather,
        overlap=engine.config.overlap_grad_reduce,
    )
    assert (formula.weights, formula.gradients) == (weights, gradients)
    assert engine.pool.live_bytes == 0
    assert engine.pool.peak_bytes <= formula.reducing
    peak = 0 if gatherer_of(engine) is None else gatherer_of(engine).counts.peak_bytes
    assert peak <= formula.gathered
    shared = [b for b in model.store.buckets if b.sharded]
    if shared:
        assert peak > 0
        everything = sum(block.unsharded_bytes for b in shared for block in b.blocks)
        assert min(gatherer_of(engine).budget, everything) == formula.gathered


def test_what_is_alone_is_whole_by_the_formula():
    sizes = [BucketSize(numel=64, inner=4), BucketSize(numel=96, inner=1, expert=True)]
    narrow = ElementBytes(weight=2, gradient=2, optimizer=12, fp32_sum=True)
    found = bytes_per_rank(sizes, placement(STRATEGIES[3]), element_bytes=narrow)
    assert found.weights == 2 * (64 // 4 + 96)
    assert found.gradients == 4 * (64 // 4) + 2 * 96
    assert found.optimizer == 12 * (64 // 4 + 96)
    assert found.gathered == 2 * 64
    assert (
        found.reducing
        == bytes_per_rank(sizes[:1], placement(STRATEGIES[3]), element_bytes=narrow).reducing
    )
    root = [BucketSize(numel=64, inner=4, root=True)]
    assert (
        bytes_per_rank(root, placement("optim_grads"), element_bytes=ElementBytes()).reducing
        == 2 * 4 * 64
    )


def on_grids(rank: int, world: int, grids: tuple, configs: tuple, each: int) -> list:
    """Train on every grid with every `each`th of the settings; return the weights of each run."""
    torch.set_num_threads(1)
    found = []
    for number, (degrees, lanes, expert_lanes) in enumerate(grids):
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        assert (groups["dense_dp"].size, groups["expert_dp"].size) == (lanes, expert_lanes)
        for turn, parallel in enumerate(configs):
            if (turn - number) % each == 0:
                with simulated(groups, (Late(), Early())[turn % 2]) as link:
                    model = trained(groups, parallel)
                assert link.count > 0
                assert_sharded_bytes(model, lanes, expert_lanes)
                found.append(model.pieces())
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    """Return the weights that a single process has after the steps."""
    return whole_of(trained(ProcessGroupCollection.single(), OPTIM).pieces())


@pytest.mark.parametrize(
    ("world", "grids", "configs", "each"),
    [
        (4, GRIDS, CONFIGS, 7),
        (4, HYBRID_GRIDS, (OPTIM, OPTIM_GRADS | EARLY, CUT_WEIGHTS | EARLY, BOTH | EARLY), 2),
        (4, STAGE_GRIDS, (NO_SHARD, OPTIM_GRADS | EARLY, CUT_WEIGHTS | EARLY), 2),
        (8, EIGHT, (CUT_WEIGHTS | EARLY,), 1),
    ],
    ids=["grids", "instances", "stages", "eight"],
)
def test_ranks_equal_one_process(
    alone: dict[str, torch.Tensor], world: int, grids: tuple, configs: tuple, each: int
):
    runs = list(zip(*run_ranks(on_grids, world, grids, configs, each), strict=True))
    assert len(runs) >= len(grids)
    for run in runs:
        found = whole_of([piece for pieces in run for piece in pieces])
        assert_all_close(found, alone, bound=1e-6)


_LANES = (
    "megatron.core.weight_sharding",
    "gradient_plan",
    '"expert_dp" if sharding.expert else "dense_dp"',
    '"dense_dp"',
)


def faulty(
    rank: int, world: int, degrees: dict[str, int], edit: tuple[str, ...], router: GradientKind
) -> None:
    """Train with a fault."""
    if edit:
        apply(planted(*edit))
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    trained(groups, NO_SHARD, router=router)


@pytest.mark.parametrize(
    ("degrees", "edit", "router", "shows"),
    [
        ({"ep": 2}, _LANES, "partial", "down"),
        ({"tp": 2, "etp": 1}, _LANES, "partial", "down"),
        ({"tp": 2, "ep": 2}, (), "identical", "router"),
    ],
    ids=["a factor of ep", "a factor of etp over tp", "an unsummed router"],
)
def test_a_wrong_scale_is_seen(
    degrees: dict[str, int], edit: tuple[str, ...], router: GradientKind, shows: str
):
    with pytest.raises(RankFailure, match=f"AssertionError: LocalBox.name='1.{shows}'"):
        run_ranks(faulty, 4, degrees, edit, router)


def disagreeing(rank: int, world: int) -> None:
    """Need two buckets of experts of one size in another order on every other rank: their lanes
    hold all ranks, those of dense weights only ranks that agree."""
    grid = RankGrid(world_size=world, tp=2, etp=1)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    model = ExpertModel(groups, parallel=CUT_WEIGHTS | {"granularity": "weight"})
    model.engine.begin_step()
    for layer in (0, 1) if rank % 2 else (1, 0):
        model.store.handles[f"{layer}.down"].get()
    with pytest.raises(ValueError, match="needed them in different orders in this step"):
        model.engine.finish()


def test_debug_mode_reports_ranks_using_experts_in_other_order():
    run_ranks(disagreeing, 4)
