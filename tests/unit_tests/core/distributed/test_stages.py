# SPDX-License-Identifier: Apache-2.0
"""Engine and optimizer on pipeline stages: weights of two stages, and stages without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from megatron.core.comm import all_gather, trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.optimizer import MuonConfig, Optimizer, OptimizerConfig, OptimizerStepResult
from megatron.core.optimizer.loss_scaler import DynamicLossScaler, DynamicLossScalerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import STRATEGIES, WeightSharding
from tests.support.activation import assert_active
from tests.support.closeness import assert_close_by_metric, assert_piece_close
from tests.support.gatherers import gatherer_of
from tests.support.inputs import generator
from tests.support.mutants import Mutation, apply, planted
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Late, simulated

#: Weights and their stages of two; the two tied ones are declared in another order on each.
TIED_FIRST = ("embedding.weight", "low", "shared.norm")
TIED_LAST = ("shared.norm", "high", "embedding.weight", "top")
SHAPES = {
    "embedding.weight": (13, 6),
    "low": (7, 5),
    "shared.norm": (6,),
    "high": (3, 11),
    "top": (9, 4),
}
SHARED = ("embedding.weight", "shared.norm")


class Stage:
    """A store, an engine and an optimizer of one stage, stepped on given logical gradients."""

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
        placed = DataParallelConfig(**{"debug": True, **(parallel or {})})  # type: ignore[arg-type]
        self.store = WeightStore(groups, seed=3, dtype=dtype)
        for name in names:
            self.store.declare(self._sharding(name), InitSpec.normal(0.5))
        self.store.materialize(placed.storage(bucket_bytes=bucket_bytes))
        self.engine = DataParallel(self.store, groups, config=placed)
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
        return _plain(name, stages=(0, pp - 1) if name in SHARED else (stage,))

    def gradients(self, wanted: Mapping[str, torch.Tensor], *, fault: float = 0.0) -> None:
        """Put this rank's share of every gradient; lanes and stages have uneven ones."""
        lanes, last = self.groups["dense_dp"], self.groups["pp"].rank > 0
        self.engine.begin_step()
        self.engine.set_is_last_backward(True)
        for name, handle in self.store.handles.items():
            share = (lanes.rank + 1) / sum(range(lanes.size + 1))
            if self.groups.grid.pp > 1 and name in SHARED:
                share *= 0.75 if last else 0.25
            handle.accumulate_grad(wanted[name] * share * self.scaler.scale + fault)
        self.engine.finish()

    def step(
        self, wanted: Mapping[str, torch.Tensor], *, fault: float = 0.0
    ) -> OptimizerStepResult:
        """Train one step."""
        self.gradients(wanted, fault=fault)
        result = self.optimizer.step(0.01, 0.1)
        self.engine.start_param_sync()
        return result

    def weights(self) -> dict[str, torch.Tensor]:
        """Return whole weights."""
        with self.engine.evaluation():
            return {name: handle.get().clone() for name, handle in self.store.handles.items()}


def _plain(name: str, **more: object) -> WeightSharding:
    return WeightSharding.of(name, SHAPES[name], weight_decay=len(SHAPES[name]) > 1, **more)


def drawn(step: int) -> dict[str, torch.Tensor]:
    """Return gradients of a step, some elements exactly zero."""
    found = {}
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator(4, step, *name.encode()))
        found[name] = values.where(values.abs() > 0.1, 0.0)
    return found


# --- weights of two stages ------------------------------------------------------------------------


def tied(rank: int, world: int, parallel: dict, instances: int, fault: Mutation | None) -> list:
    """Sum the gradients of two shared weights, which lie among others on either stage."""
    if fault is not None:
        apply(fault)
    grid = RankGrid(world_size=world, pp=2, instances=instances)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    first = groups["pp"].rank == 0
    with simulated(groups, Late()):
        stage = Stage(groups, TIED_FIRST if first else TIED_LAST, parallel=parallel)
        alone = [b.name for b in stage.store.buckets if len(b.handles) == 1]
        assert set(SHARED) <= set(alone)
        for step in range(3):
            wanted = drawn(step)
            with trace(groups) as records:
                stage.gradients(wanted)
            mine = {p.name for o in stage.engine.owned() for p in o.boxes} & set(SHARED)
            assert_active(records, group="tied", exactly=1 if mine else 0, at_least=0)
            scale = stage.scaler.scale
            seen = 0
            for owned in stage.engine.owned():
                for placed in owned.boxes:
                    whole = scale * wanted[placed.name]
                    got = placed.of(owned.gradients)
                    seen += got.numel()
                    assert_piece_close(
                        placed.name, got, whole, placed.offsets, bound=1e-6, scale=scale
                    )
            assert seen > 0 or stage.engine.sharded
            norm = stage.optimizer.grad_norm() / scale
            exact = sum(float(w.double().square().sum()) for w in wanted.values()) ** 0.5
            assert abs(norm - exact) <= 1e-6 * exact, "each weight counts once"
            stage.optimizer.step(0.01)
            stage.engine.start_param_sync()
        weights = stage.weights()
    for name in SHARED:
        both = all_gather(weights[name][None], groups["tied"])
        assert torch.equal(both[0], both[1])
    return _boxes(stage)


def _boxes(stage: Stage) -> list[dict[tuple, tuple[int, ...]]]:
    """Return the boxes that this rank's optimizer and memory hold, and who holds the same."""
    owned = [placed for one in stage.engine.owned() for placed in one.boxes]
    held = [h for handle in stage.store.handles.values() for h in stage.store.chunks(handle)]
    return [
        {(b.name, b.box.offsets, b.box.sizes): b.replica_ranks for b in boxes}
        for boxes in (owned, held)
    ]


def assert_replicas(ranks: Sequence[list[dict[tuple, tuple[int, ...]]]]) -> None:
    """Check that a box is held by the ranks that are said to hold it, and by no others."""
    for everywhere in zip(*ranks, strict=True):
        for mine in everywhere:
            for box, said in mine.items():
                holders = [rank for rank, other in enumerate(everywhere) if box in other]
                assert sorted(said) == holders, box


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_shared_by_stages_are_summed_and_stay_equal(strategy: str):
    parallel = {"strategy": strategy, "overlap_param_gather": strategy != "no_shard"}
    assert_replicas(run_ranks(tied, 4, parallel, 1, None))


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_shared_weights_under_hybrid_sharding(outer: str):
    parallel = {"strategy": "optim_grads_params", "outer": outer, "overlap_param_gather": True}
    assert_replicas(run_ranks(tied, 8, parallel, 2, None))


#: Faults of shared weights.
TIED_BUGS = {
    "a shared weight lies among others": (
        "megatron.core.weight_gather.bucket",
        "bucket_plans",
        "tied = len(set(handle.sharding.stages)) > 1",
        "tied = False",
    ),
    "shared weights are summed in the order of declaration": (
        "megatron.core.distributed.data_parallel",
        "ModelSums.__init__",
        "sorted(named_views, key=lambda x: x[0])",
        "named_views",
    ),
    "a shared weight is summed twice": (
        "megatron.core.distributed.data_parallel",
        "ModelSums.run",
        "all_reduce(flat, group, out=flat)",
        "all_reduce(flat, group, out=flat)\n            all_reduce(flat, group, out=flat)",
    ),
}
ACCIDENTS = ("NameError", "TypeError", "AttributeError", "SyntaxError", "no live function")


@pytest.mark.parametrize("name", TIED_BUGS)
def test_a_bug_of_shared_weights_is_noticed(name: str):
    with pytest.raises(RankFailure) as error:
        run_ranks(tied, 4, {"strategy": "optim"}, 1, planted(*TIED_BUGS[name]), timeout=20.0)
    assert not any(word in str(error.value) for word in ACCIDENTS), error.value


# --- stages without weights -----------------------------------------------------------------------

OPTIMIZERS = {
    "adam": OptimizerConfig(count_zeros=True, clip_grad=0.5),
    "host": OptimizerConfig(count_zeros=True, clip_grad=0.5, offload_fraction=1.0),
    "sgd": OptimizerConfig(kind="sgd", sgd_momentum=0.9, count_zeros=True),
    "muon": OptimizerConfig(kind="muon", muon=MuonConfig(scale_mode="rms"), count_zeros=True),
    "factors": OptimizerConfig(lr_factors=(("high", 0.1),), decay_factors=(("top", 0.0),)),
}


def of_stage(pp: int, stage: int) -> tuple[str, ...]:
    """Return the weights of a stage: the first and the last have all."""
    return TIED_FIRST if stage == 0 else TIED_LAST if stage == pp - 1 else ()


def empty(
    rank: int, world: int, pp: int, instances: int, cases: Sequence[tuple[str, str, torch.dtype]]
) -> list:
    """Train with stages that have nothing; return the results of each case."""
    grid = RankGrid(world_size=world, pp=pp, instances=instances)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    stage = groups["pp"].rank
    found = []
    for kind, strategy, dtype in cases:
        parallel = {"strategy": strategy, "overlap_param_gather": strategy != "no_shard"}
        if instances > 1 and strategy == "optim_grads_params":
            parallel["outer"] = "optim"
        one = Stage(
            groups,
            of_stage(pp, stage),
            parallel=parallel,
            config=OPTIMIZERS[kind],
            dtype=dtype,
            bucket_bytes=100,
        )
        if not of_stage(pp, stage):
            assert one.store.buckets == one.engine.buckets == []
            assert gatherer_of(one.engine) is None
            with pytest.raises(ValueError, match="the store is already materialised"):
                one.store.materialize()
        results = []
        for step in range(4):
            # not finite on one lane of one stage
            fault = torch.inf if step == 1 and rank == world - 1 else 0.0
            results.append(one.step(drawn(step), fault=fault))
            one.engine.complete_weights()
        one.engine.begin_step(program=["forward"])
        one.engine.enter_segment("forward")
        one.engine.prefetch_segment("forward")
        one.engine.begin_last_backward(0)
        one.engine.post_backward(0)
        one.engine.abort()
        params = one.optimizer.params_norm()
        found.append((results, params, one.scaler.scale, one.weights()))
    return found


def check_empty(
    world: int, pp: int, cases: list[tuple[str, str, torch.dtype]], *, instances: int = 1
) -> None:
    """Compare stages, of which some are empty, with one process."""
    ranks = run_ranks(empty, world, pp, instances, cases)
    for number, (kind, _, dtype) in enumerate(cases):
        alone = Stage(
            ProcessGroupCollection.single(), list(SHAPES), config=OPTIMIZERS[kind], dtype=dtype
        )
        expected = [
            alone.step(drawn(step), fault=torch.inf if step == 1 else 0.0) for step in range(4)
        ]
        params, weights = alone.optimizer.params_norm(), alone.weights()
        for results, norm, scale, got in (one[number] for one in ranks):
            assert [r.applied for r in results] == [True, False, True, True]
            assert scale == alone.scaler.scale == 2.0
            assert abs(norm - params) <= 1e-6 * params
            for result, wanted in zip(results, expected, strict=True):
                if wanted.applied:
                    error = abs(result.grad_norm - wanted.grad_norm)
                    assert error <= 1e-6 * wanted.grad_norm
                    assert result.num_zeros == wanted.num_zeros
            bound = 1e-5 if dtype is torch.float32 else 1e-2
            for name, values in got.items():
                assert_close_by_metric(name, values, weights[name], bound=bound)
    seen = {name for one in ranks for name in one[0][3]}
    assert seen == set(SHAPES)


def test_stages_without_weights_decide_and_sum_with_the_others():
    cases = [(kind, "no_shard", torch.float32) for kind in OPTIMIZERS]
    check_empty(3, 3, [*cases, ("adam", "no_shard", torch.bfloat16)])


def test_ranks_of_stages_without_weights():
    check_empty(
        6, 3, [(k, s, torch.float32) for k in ("adam", "muon") for s in STRATEGIES if s != "optim"]
    )


def test_stages_without_weights_under_hybrid_sharding():
    cases = [(k, s, torch.float32) for k in ("adam", "muon") for s in STRATEGIES[1:]]
    check_empty(6, 3, cases, instances=2)


def alone_in_its_groups(rank: int, world: int) -> None:
    """Check that stages with and without experts call the same sums."""
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


def test_all_stages_call_the_sums_that_any_stage_needs():
    run_ranks(alone_in_its_groups, 2)
