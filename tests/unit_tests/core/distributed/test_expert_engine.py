# SPDX-License-Identifier: Apache-2.0
"""Experts in the data-parallel engine: every strategy on many grids, against exact sums."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.core import Placement, ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.optimizer import OptimizerConfig
from megatron.core.weight_sharding import STRATEGIES, GradientKind, placement
from tests.support.closeness import assert_all_close
from tests.support.gatherers import gatherer_of
from tests.support.mutants import apply, planted
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    assert_traffic,
    planned_gathers,
    slice_box,
)
from tests.unit_tests.core.distributed.expert_weights import (
    ExpertModel,
    assemble,
    full_gradients,
    is_expert,
    stage_filter,
)

#: Microbatches of each step.
STEPS = (1, 2)
SGD = OptimizerConfig(kind="sgd", sgd_momentum=0.5, clip_grad=40.0, count_zeros=True)
NO_SHARD, OPTIM, OPTIM_GRADS, ZERO3 = ({"strategy": strategy} for strategy in STRATEGIES)
PREFETCH = {"overlap_param_gather": True}
ZERO3_OUTER_OPTIM = {**ZERO3, "outer": "optim"}

#: Grids of four ranks: degrees, sizes of dense_dp and of expert_dp.
GRIDS = (
    ({"ep": 4}, 4, 1), ({"ep": 2}, 4, 2), ({"tp": 2, "etp": 1, "ep": 2}, 2, 2),
    ({"tp": 2, "etp": 2, "ep": 2}, 2, 1), ({"tp": 4, "etp": 1}, 1, 4),
    ({"tp": 4, "etp": 1, "ep": 2}, 1, 2), ({"tp": 2, "etp": 1}, 2, 4), ({"etp": 2, "ep": 2}, 4, 1),
    ({"etp": 2}, 4, 2), ({"tp": 2, "etp": 4}, 2, 1), ({"cp": 2, "ep": 2}, 4, 2),
    ({"tp": 4, "etp": 2, "ep": 2}, 1, 1),
)  # fmt: skip
#: Engine settings, dealt to the grids in turn.
CONFIGS = (
    NO_SHARD,
    *(a | b for a, b in itertools.product((OPTIM, OPTIM_GRADS, ZERO3), ({}, PREFETCH))),
    ZERO3 | PREFETCH | {"granularity": "weight"},
    OPTIM_GRADS | {"overlap_grad_reduce": False},
    *({**a, "grad_dtype": torch.bfloat16, "fp32_accumulation": True} for a in (OPTIM, ZERO3)),
)
HYBRID_GRIDS = (
    ({"instances": 2, "ep": 2}, 4, 2),
    ({"instances": 2, "tp": 2, "etp": 1}, 2, 4),
    ({"instances": 2, "etp": 2}, 4, 2),
)
#: Dense weights and experts on different stages, and stages with neither.
STAGE_GRIDS = (
    ({"pp": 2, "ep": 2}, 2, 1),
    ({"pp": 2, "tp": 2, "etp": 1}, 1, 2),
    ({"pp": 4}, 1, 1),
)
EIGHT_RANK_GRIDS = (
    ({"pp": 2, "tp": 2, "etp": 1, "ep": 2}, 2, 2),
    ({"instances": 2, "tp": 2, "etp": 2, "ep": 2}, 4, 2),
)


def train_and_check(
    groups: ProcessGroupCollection,
    parallel: dict[str, object],
    *,
    router: GradientKind = "partial",
) -> ExpertModel:
    """Train on this rank; check every gradient, norm and collective."""
    model = ExpertModel(
        groups, parallel=parallel, optimizer=SGD, has=stage_filter(groups), router=router
    )
    engine = model.engine
    for step, microbatches in enumerate(STEPS):
        expected = full_gradients(step, microbatches)
        with trace(groups) as records:
            engine.start_param_sync()
            model.gradients(step, microbatches)
        if engine.config.overlap_grad_reduce:
            assert engine.launched_in_backward == len(engine.buckets)
        for owned in engine.owned():
            assert owned.gradients.isfinite().all()
            for box in owned.boxes:
                gradient, full_gradient = box.of(owned.gradients), expected[box.name]
                assert torch.equal(gradient, slice_box(full_gradient, box.box)), box
        if step > 0:  # the first step records the plan that the formula needs
            data_groups = ("dense_dp", "expert_dp", "shard", "replicate", "shard_gather")
            names = {name for group in data_groups for name in (group, f"expert_{group}")}
            data_records = [record for record in records if record.group in names]
            assert_traffic(engine, data_records, microbatches)
            # once for forward and once for backward, although a layer's buckets alternate
            assert max(planned_gathers(engine) or [0]) <= 2 * microbatches
        step_result = model.update()
        expected_norm = sum(float(w.double().square().sum()) for w in expected.values()) ** 0.5
        assert abs(step_result.grad_norm - expected_norm) <= 1e-6 * expected_norm
        assert expected_norm > 2 * SGD.clip_grad, "the gradients are clipped"
        assert step_result.num_zeros == sum(int((w == 0).sum()) for w in expected.values())
    if gatherer_of(engine) is not None:
        assert gatherer_of(engine).counts.mismatches == 0
        assert gatherer_of(engine).counts.prefetched > 0 or not engine.config.overlap_param_gather
    return model


def assert_sharded_bytes(model: ExpertModel, dense_size: int, expert_size: int) -> None:
    """Check that dense and expert weights are sharded over their own groups, as in the formula."""
    engine, instances = model.engine, model.groups.grid.instances
    parameter_placement = Placement() if dense_size == expert_size == 1 else engine.config.placement
    weights = gradients = 0
    for entry in engine.buckets:
        bucket = entry.bucket
        sizes = {is_expert(s.name) for h in bucket.handles for s in h.sharding.sub_weights}
        (expert,) = sizes
        num_shards = (expert_size if expert else dense_size) // instances
        outer_shards = instances if engine.config.outer == "optim" else 1
        numel = bucket.numel
        assert len(bucket.data) == (numel // num_shards if parameter_placement.weight else numel)
        assert len(entry.gradients) == (
            numel // (num_shards * outer_shards) if parameter_placement.optimizer else numel
        )
        single_rank = num_shards * instances == 1
        assert bucket.single_rank == single_rank
        assert entry.every_microbatch == (bool(parameter_placement.gradient) and not single_rank)
        weights += bucket.data.nbytes
        gradients += 0 if entry.every_microbatch else numel * engine.config.grad_dtype.itemsize
        gradients += 4 * numel // num_shards if entry.every_microbatch or entry.fp32_sum else 0
        assert entry.fp32_sum == (engine.config.fp32_accumulation and not single_rank)
    formula = bytes_per_rank(
        [BucketSize.of(bucket) for bucket in model.store.buckets],
        engine.placement,
        element_bytes=ElementBytes(
            gradient=engine.config.grad_dtype.itemsize,
            fp32_sum=engine.config.fp32_accumulation and bool(parameter_placement.optimizer),
        ),
        prefetch=engine.config.overlap_param_gather,
        overlap=engine.config.overlap_grad_reduce,
    )
    assert (formula.weights, formula.gradients) == (weights, gradients)
    assert engine.pool.live_bytes == 0
    assert engine.pool.peak_bytes <= formula.reducing
    peak = 0 if gatherer_of(engine) is None else gatherer_of(engine).counts.peak_bytes
    assert peak <= formula.gathered
    sharded_buckets = [b for b in model.store.buckets if b.sharded]
    if sharded_buckets:
        assert peak > 0
        unsharded_bytes = sum(block.unsharded_bytes for b in sharded_buckets for block in b.blocks)
        assert min(gatherer_of(engine).budget, unsharded_bytes) == formula.gathered


def test_formula_counts_unsharded_experts_in_full():
    sizes = [BucketSize(numel=64, inner=4), BucketSize(numel=96, inner=1, expert=True)]
    element_bytes = ElementBytes(weight=2, gradient=2, optimizer=12, fp32_sum=True)
    rank_bytes = bytes_per_rank(sizes, placement(STRATEGIES[3]), element_bytes=element_bytes)
    assert rank_bytes.weights == 2 * (64 // 4 + 96)
    assert rank_bytes.gradients == 4 * (64 // 4) + 2 * 96
    assert rank_bytes.optimizer == 12 * (64 // 4 + 96)
    assert rank_bytes.gathered == 2 * 64
    assert (
        rank_bytes.reducing
        == bytes_per_rank(sizes[:1], placement(STRATEGIES[3]), element_bytes=element_bytes).reducing
    )
    root = [BucketSize(numel=64, inner=4, root=True)]
    assert (
        bytes_per_rank(root, placement("optim_grads"), element_bytes=ElementBytes()).reducing
        == 2 * 4 * 64
    )


def train_on_grids(rank: int, world: int, grids: tuple, configs: tuple, stride: int) -> list:
    """Train on every grid with every `stride`-th setting; return the weight shards of each run."""
    torch.set_num_threads(1)
    shards_by_run = []
    for grid_index, (degrees, dense_size, expert_size) in enumerate(grids):
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        assert (groups["dense_dp"].size, groups["expert_dp"].size) == (dense_size, expert_size)
        for config_index, parallel in enumerate(configs):
            if (config_index - grid_index) % stride == 0:
                with simulated(groups, (Late(), Early())[config_index % 2]) as link:
                    model = train_and_check(groups, parallel)
                assert link.count > 0
                assert_sharded_bytes(model, dense_size, expert_size)
                shards_by_run.append(model.shards())
    return shards_by_run


@pytest.fixture(scope="module")
def single_process_weights() -> dict[str, torch.Tensor]:
    """Return the weights after the same steps in a single process."""
    return assemble(train_and_check(ProcessGroupCollection.single(), OPTIM).shards())


@pytest.mark.parametrize(
    ("world", "grids", "configs", "stride"),
    [
        (4, GRIDS, CONFIGS, 7),
        (
            4,
            HYBRID_GRIDS,
            (OPTIM, OPTIM_GRADS | PREFETCH, ZERO3 | PREFETCH, ZERO3_OUTER_OPTIM | PREFETCH),
            2,
        ),
        (4, STAGE_GRIDS, (NO_SHARD, OPTIM_GRADS | PREFETCH, ZERO3 | PREFETCH), 2),
        (8, EIGHT_RANK_GRIDS, (ZERO3 | PREFETCH,), 1),
    ],
    ids=["grids", "instances", "stages", "eight"],
)
def test_expert_training_matches_a_single_process(
    single_process_weights: dict[str, torch.Tensor],
    world: int,
    grids: tuple,
    configs: tuple,
    stride: int,
):
    runs = list(zip(*run_ranks(train_on_grids, world, grids, configs, stride), strict=True))
    assert len(runs) >= len(grids)
    for rank_shards in runs:
        weights = assemble([shard for shards in rank_shards for shard in shards])
        assert_all_close(weights, single_process_weights, bound=1e-6)


WRONG_EXPERT_GROUP = (
    "megatron.core.weight_sharding",
    "gradient_plan",
    '"expert_dp" if sharding.expert else "dense_dp"',
    '"dense_dp"',
)


def train_with_fault(
    rank: int, world: int, degrees: dict[str, int], edit: tuple[str, ...], router: GradientKind
) -> None:
    """Train with a planted fault."""
    if edit:
        apply(planted(*edit))
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    train_and_check(groups, NO_SHARD, router=router)


@pytest.mark.parametrize(
    ("degrees", "edit", "router", "weight"),
    [
        ({"ep": 2}, WRONG_EXPERT_GROUP, "partial", "down"),
        ({"tp": 2, "etp": 1}, WRONG_EXPERT_GROUP, "partial", "down"),
        ({"tp": 2, "ep": 2}, (), "identical", "router"),
    ],
    ids=["a factor of ep", "a factor of etp over tp", "an unsummed router"],
)
def test_wrong_gradient_scale_is_detected(
    degrees: dict[str, int], edit: tuple[str, ...], router: GradientKind, weight: str
):
    with pytest.raises(RankFailure, match=f"AssertionError: LocalBox.name='1.{weight}'"):
        run_ranks(train_with_fault, 4, degrees, edit, router)


def use_weights_in_different_order(rank: int, world: int) -> None:
    """Use two expert buckets of equal size in a different order on odd ranks: expert_dp spans all
    ranks, dense_dp only ranks with the same order."""
    grid = RankGrid(world_size=world, tp=2, etp=1)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    model = ExpertModel(groups, parallel=ZERO3 | {"granularity": "weight"})
    model.engine.begin_step()
    for layer in (0, 1) if rank % 2 else (1, 0):
        model.store.handles[f"{layer}.down"].get()
    with pytest.raises(ValueError, match="needed them in different orders in this step"):
        model.engine.finish()


def test_debug_mode_reports_ranks_using_experts_in_other_order():
    run_ranks(use_weights_in_different_order, 4)
