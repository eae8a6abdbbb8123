# SPDX-License-Identifier: Apache-2.0
"""Engine and optimizer on pipeline stages: weights tied across stages, stages without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from megatron.core import InitSpec, ProcessGroupCollection, RankGrid, WeightSharding
from megatron.core.comm import all_gather, trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.optimizer import (
    DynamicLossScaler,
    DynamicLossScalerConfig,
    MuonConfig,
    Optimizer,
    OptimizerConfig,
    OptimizerStepResult,
)
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import STRATEGIES
from tests.support.activation import assert_active
from tests.support.closeness import assert_close_by_metric, assert_piece_close
from tests.support.gatherers import gatherer_of
from tests.support.inputs import generator
from tests.support.mutants import Mutation, apply, bug_table
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Late, simulated

#: Weights of the first and the last stage; they declare the two tied weights in different orders.
FIRST_STAGE = ("embedding.weight", "low", "shared.norm")
LAST_STAGE = ("shared.norm", "high", "embedding.weight", "top")
SHAPES = {
    "embedding.weight": (13, 6),
    "low": (7, 5),
    "shared.norm": (6,),
    "high": (3, 11),
    "top": (9, 4),
}
TIED = ("embedding.weight", "shared.norm")


class Stage:
    """The store, engine and optimizer of a stage, stepped with logical gradients."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        names: Sequence[str],
        *,
        parallel: Mapping[str, object] | None = None,
        config: OptimizerConfig | None = None,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = 10**9,
    ) -> None:
        self.groups = groups
        data_parallel = DataParallelConfig(**{"debug": True, **(parallel or {})})  # type: ignore[arg-type]
        self.store = WeightStore(groups, seed=3, dtype=dtype)
        for name in names:
            self.store.declare(self._sharding(name), InitSpec.normal(0.5))
        self.store.materialize(data_parallel.storage(bucket_bytes=bucket_bytes))
        self.engine = DataParallel(self.store, groups, config=data_parallel)
        self.scaler = DynamicLossScaler(DynamicLossScalerConfig(initial_scale=4.0, hysteresis=1))
        self.optimizer = Optimizer(
            self.engine.owned(),
            groups,
            config=config or OptimizerConfig(kind="sgd", clip_grad=0.0),
            scaler=self.scaler,
            weights=[_plain(name) for name in SHAPES],
        )

    def _sharding(self, name: str) -> WeightSharding:
        pp = self.groups.grid.pp
        if pp == 1:
            return _plain(name)
        stage = self.groups["pp"].rank
        return _plain(name, stages=(0, pp - 1) if name in TIED else (stage,))

    def gradients(self, gradients: Mapping[str, torch.Tensor], *, fault: float = 0.0) -> None:
        """Accumulate this rank's share of every gradient, uneven over ranks and stages."""
        dp_group, is_last_stage = self.groups["dense_dp"], self.groups["pp"].rank > 0
        self.engine.begin_step()
        self.engine.set_is_last_backward(True)
        for name, handle in self.store.handles.items():
            share = (dp_group.rank + 1) / sum(range(dp_group.size + 1))
            if self.groups.grid.pp > 1 and name in TIED:
                share *= 0.75 if is_last_stage else 0.25
            handle.accumulate_grad(gradients[name] * share * self.scaler.scale + fault)
        self.engine.finish()

    def step(
        self, gradients: Mapping[str, torch.Tensor], *, fault: float = 0.0
    ) -> OptimizerStepResult:
        """Run a training step."""
        self.gradients(gradients, fault=fault)
        step_result = self.optimizer.step(0.01, 0.1)
        self.engine.start_param_sync()
        return step_result

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the full weights."""
        with self.engine.evaluation():
            return {name: handle.get().clone() for name, handle in self.store.handles.items()}


def _plain(name: str, **options: object) -> WeightSharding:
    return WeightSharding.of(name, SHAPES[name], weight_decay=len(SHAPES[name]) > 1, **options)


def random_gradients(step: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step, with some elements exactly zero."""
    gradients = {}
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator(4, step, *name.encode()))
        gradients[name] = values.where(values.abs() > 0.1, 0.0)
    return gradients


# --- tied weights ---------------------------------------------------------------------------------


def train_tied_weights(
    rank: int, world: int, parallel: dict, instances: int, fault: Mutation | None
) -> list:
    """Sum the gradients of two tied weights, declared between other weights on both stages."""
    if fault is not None:
        apply(fault)
    grid = RankGrid(world_size=world, pp=2, instances=instances)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    is_first_stage = groups["pp"].rank == 0
    with simulated(groups, Late()):
        stage = Stage(groups, FIRST_STAGE if is_first_stage else LAST_STAGE, parallel=parallel)
        single_weight_buckets = [b.name for b in stage.store.buckets if len(b.handles) == 1]
        assert set(TIED) <= set(single_weight_buckets)
        for step in range(3):
            expected = random_gradients(step)
            with trace(groups) as records:
                stage.gradients(expected)
            owned_tied_weights = {p.name for o in stage.engine.owned() for p in o.boxes} & set(TIED)
            assert_active(records, group="tied", exactly=1 if owned_tied_weights else 0, at_least=0)
            scale = stage.scaler.scale
            num_elements = 0
            for owned in stage.engine.owned():
                for box in owned.boxes:
                    full_gradient = scale * expected[box.name]
                    gradient = box.of(owned.gradients)
                    num_elements += gradient.numel()
                    assert_piece_close(
                        box.name, gradient, full_gradient, box.offsets, bound=1e-6, scale=scale
                    )
            assert num_elements > 0 or stage.engine.sharded
            norm = stage.optimizer.grad_norm() / scale
            expected_norm = sum(float(w.double().square().sum()) for w in expected.values()) ** 0.5
            assert abs(norm - expected_norm) <= 1e-6 * expected_norm, "each weight counts once"
            stage.optimizer.step(0.01)
            stage.engine.start_param_sync()
        weights = stage.weights()
    for name in TIED:
        stage_copies = all_gather(weights[name][None], groups["tied"])
        assert torch.equal(stage_copies[0], stage_copies[1])
    return _boxes(stage)


def _boxes(stage: Stage) -> list[dict[tuple, tuple[int, ...]]]:
    """Return the boxes in this rank's optimizer and store, with their replica ranks."""
    owned_boxes = [box for owned_range in stage.engine.owned() for box in owned_range.boxes]
    chunks = [
        chunk for handle in stage.store.handles.values() for chunk in stage.store.chunks(handle)
    ]
    return [
        {(b.name, b.box.offsets, b.box.sizes): b.replica_ranks for b in boxes}
        for boxes in (owned_boxes, chunks)
    ]


def assert_replicas(ranks: Sequence[list[dict[tuple, tuple[int, ...]]]]) -> None:
    """Check that exactly the declared replica ranks hold each box."""
    for boxes_by_rank in zip(*ranks, strict=True):
        for boxes in boxes_by_rank:
            for box, replica_ranks in boxes.items():
                holders = [
                    rank for rank, rank_boxes in enumerate(boxes_by_rank) if box in rank_boxes
                ]
                assert sorted(replica_ranks) == holders, box


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_weights_are_summed_and_stay_equal_on_stages(strategy: str):
    parallel = {"strategy": strategy, "overlap_param_gather": strategy != "no_shard"}
    assert_replicas(run_ranks(train_tied_weights, 4, parallel, 1, None))


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_tied_weights_stay_equal_under_hybrid_sharding(outer: str):
    parallel = {"strategy": "optim_grads_params", "outer": outer, "overlap_param_gather": True}
    assert_replicas(run_ranks(train_tied_weights, 8, parallel, 2, None))


#: Planted bugs of tied weights.
TIED_BUGS = bug_table(r"""
a tied weight shares its bucket []
    weight_gather.bucket bucket_plans: tied = len(set(handle.sharding.stages)) > 1 => tied = False
tied weights are summed in the order of declaration []
    distributed.data_parallel ModelSums.__init__: sorted(named_views, key=lambda x: x[0])
    => named_views
a tied weight is summed twice []
    distributed.data_parallel ModelSums.run: all_reduce(flat, group, out=flat)
    => all_reduce(flat, group, out=flat); all_reduce(flat, group, out=flat)
""")
PLANTING_ERRORS = ("NameError", "TypeError", "AttributeError", "SyntaxError", "no live function")


@pytest.mark.parametrize("name", TIED_BUGS)
def test_planted_bug_of_tied_weights_is_detected(name: str):
    (fault,) = TIED_BUGS[name].mutations()
    with pytest.raises(RankFailure) as error:
        run_ranks(train_tied_weights, 4, {"strategy": "optim"}, 1, fault, timeout=20.0)
    assert not any(word in str(error.value) for word in PLANTING_ERRORS), error.value


# --- stages without weights -----------------------------------------------------------------------

OPTIMIZERS = {
    "adam": OptimizerConfig(count_zeros=True, clip_grad=0.5),
    "host": OptimizerConfig(count_zeros=True, clip_grad=0.5, offload_fraction=1.0),
    "sgd": OptimizerConfig(kind="sgd", sgd_momentum=0.9, count_zeros=True),
    "muon": OptimizerConfig(kind="muon", muon=MuonConfig(scale_mode="rms"), count_zeros=True),
    "factors": OptimizerConfig(lr_factors=(("high", 0.1),), decay_factors=(("top", 0.0),)),
}


def weights_of_stage(pp: int, stage: int) -> tuple[str, ...]:
    """Return the weights of a stage; only the first and the last have any."""
    return FIRST_STAGE if stage == 0 else LAST_STAGE if stage == pp - 1 else ()


def train_empty_stages(
    rank: int, world: int, pp: int, instances: int, cases: Sequence[tuple[str, str, torch.dtype]]
) -> list:
    """Train with stages that have no weights; return step results and weights of each case."""
    grid = RankGrid(world_size=world, pp=pp, instances=instances)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    stage = groups["pp"].rank
    outcomes = []
    for kind, strategy, dtype in cases:
        parallel = {"strategy": strategy, "overlap_param_gather": strategy != "no_shard"}
        if instances > 1 and strategy == "optim_grads_params":
            parallel["outer"] = "optim"
        trained_stage = Stage(
            groups,
            weights_of_stage(pp, stage),
            parallel=parallel,
            config=OPTIMIZERS[kind],
            dtype=dtype,
            bucket_bytes=100,
        )
        if not weights_of_stage(pp, stage):
            assert trained_stage.store.buckets == trained_stage.engine.buckets == []
            assert gatherer_of(trained_stage.engine) is None
            with pytest.raises(ValueError, match="the store is already materialized"):
                trained_stage.store.materialize()
        step_results = []
        for step in range(4):
            # infinite on one data-parallel rank of one stage
            fault = torch.inf if step == 1 and rank == world - 1 else 0.0
            step_results.append(trained_stage.step(random_gradients(step), fault=fault))
            trained_stage.engine.complete_weights()
        trained_stage.engine.begin_step(program=["forward"])
        trained_stage.engine.enter_segment("forward")
        trained_stage.engine.prefetch_segment("forward")
        trained_stage.engine.begin_last_backward(0)
        trained_stage.engine.post_backward(0)
        trained_stage.engine.abort()
        params = trained_stage.optimizer.params_norm()
        outcomes.append((step_results, params, trained_stage.scaler.scale, trained_stage.weights()))
    return outcomes


def compare_with_single_process(
    world: int, pp: int, cases: list[tuple[str, str, torch.dtype]], *, instances: int = 1
) -> None:
    """Compare pipeline stages, including empty stages, with a single process."""
    ranks = run_ranks(train_empty_stages, world, pp, instances, cases)
    for number, (kind, _, dtype) in enumerate(cases):
        single = Stage(
            ProcessGroupCollection.single(), list(SHAPES), config=OPTIMIZERS[kind], dtype=dtype
        )
        expected = [
            single.step(random_gradients(step), fault=torch.inf if step == 1 else 0.0)
            for step in range(4)
        ]
        params, weights = single.optimizer.params_norm(), single.weights()
        for step_results, norm, scale, rank_weights in (outcomes[number] for outcomes in ranks):
            assert [r.applied for r in step_results] == [True, False, True, True]
            assert scale == single.scaler.scale == 2.0
            assert abs(norm - params) <= 1e-6 * params
            for step_result, expected_result in zip(step_results, expected, strict=True):
                if expected_result.applied:
                    error = abs(step_result.grad_norm - expected_result.grad_norm)
                    assert error <= 1e-6 * expected_result.grad_norm
                    assert step_result.num_zeros == expected_result.num_zeros
            bound = 1e-5 if dtype is torch.float32 else 1e-2
            for name, values in rank_weights.items():
                assert_close_by_metric(name, values, weights[name], bound=bound)
    names = {name for outcomes in ranks for name in outcomes[0][3]}
    assert names == set(SHAPES)


def test_stages_without_weights_step_like_a_single_process():
    cases = [(kind, "no_shard", torch.float32) for kind in OPTIMIZERS]
    compare_with_single_process(3, 3, [*cases, ("adam", "no_shard", torch.bfloat16)])


def test_stages_without_weights_match_with_sharded_weights():
    compare_with_single_process(
        6, 3, [(k, s, torch.float32) for k in ("adam", "muon") for s in STRATEGIES if s != "optim"]
    )


def test_stages_without_weights_match_under_hybrid_sharding():
    cases = [(k, s, torch.float32) for k in ("adam", "muon") for s in STRATEGIES[1:]]
    compare_with_single_process(6, 3, cases, instances=2)


def check_norm_reductions(rank: int, world: int) -> None:
    """Check that stages with and without experts call the same reductions."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=2), rank=rank)
    store = WeightStore(groups)
    stage = groups["pp"].rank
    expert = WeightSharding.of("expert", (4, 3), stages=(stage,), expert=True)
    dense = WeightSharding.of("dense", (5, 3), stages=(stage,))
    for sharding in (dense, expert)[: stage + 1]:
        store.declare(sharding, InitSpec.constant(1.0))
    store.materialize()
    engine = DataParallel(store, groups)
    optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(clip_grad=0.0))
    engine.begin_step()
    for handle in store.handles.values():
        handle.accumulate_grad(torch.ones(handle.shape))
    engine.finish()
    with trace(groups) as records:
        assert optimizer.grad_norm() == pytest.approx(42**0.5)
    assert sorted(r.group for r in records) == ["expert_model", "model"]


def test_all_stages_join_every_norm_reduction():
    run_ranks(check_norm_reductions, 2)
