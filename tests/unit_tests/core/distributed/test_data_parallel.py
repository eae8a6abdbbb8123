# SPDX-License-Identifier: Apache-2.0
"""The data-parallel engine: gradients against fp64, overlap, and traffic by formula."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import STRATEGIES, Shard, WeightSharding
from tests.support.activation import assert_active
from tests.support.closeness import assert_close_by_metric
from tests.support.gatherers import gatherer_of
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    Reference,
    assert_gradients,
    assert_traffic,
    assert_weights,
    built,
    steps_against,
    train,
    update,
)
from tests.unit_tests.core.distributed.small_model import (
    SmallModel,
    reference_gradients,
)

#: Microbatches of the steps of a case: another number than before, and the same again.
STEPS = ((0,), (1, 2, 3), (4, 5, 6), (7,))


def configs() -> Iterator[tuple[dict[str, object], int]]:
    """Yield every strategy, kind of overlap, and size of buckets where that is a choice."""
    for strategy, reduce, gather in itertools.product(STRATEGIES, (True, False), (True, False)):
        if strategy == "no_shard" and gather:
            continue
        config = {
            "strategy": strategy,
            "overlap_grad_reduce": reduce,
            "overlap_param_gather": gather,
        }
        if strategy == "optim_grads_params":
            yield config, 1
            yield {**config, "granularity": "weight"}, 1
        else:
            for bucket_bytes in (1, 400) if reduce else (1, 10**9):
                yield config, bucket_bytes
    early = {"strategy": "optim_grads_params", "overlap_param_gather": True}
    yield {**early, "overlap_grad_reduce": True, "prefetch_bytes": 300}, 1


def engine_case(
    groups: ProcessGroupCollection, config: dict[str, object], bucket_bytes: int = 1
) -> None:
    """Train four steps: gradients, overlap, what was gathered when, and what was sent."""
    model, engine = built(groups, bucket_bytes=bucket_bytes, **config)
    lanes = groups["dense_dp"].size
    reference = Reference(lanes)
    for number, indices in enumerate(STEPS):
        if gatherer_of(engine) is not None:
            gatherer_of(engine).pool.reset_peak()
        with trace(groups) as records:
            engine.start_param_sync()
            with nan_memory():
                train(model, engine, indices)
        wanted = reference.gradients(indices)
        elements = assert_gradients(engine, wanted)
        if not engine.sharded:
            assert elements == sum(w.numel() for w in wanted.values())
        cut_gradients = bool(engine.placement.gradient)
        launched = engine.config.overlap_grad_reduce or cut_gradients
        assert engine.launched_in_backward == (len(engine.buckets) if launched else 0)
        if number > 0:  # the first step makes the plan that the formula asks for
            assert_traffic(engine, records, len(indices))
        update(engine)
        reference.update(wanted)
    engine.start_param_sync()
    gatherer = gatherer_of(engine)
    assert (gatherer is None) == (engine.config.strategy == "no_shard")
    if gatherer is not None:
        assert gatherer.counts.mismatches == 0
        assert gatherer.counts.peak_bytes <= gatherer.budget
        assert (gatherer.counts.prefetched > 0) == engine.config.overlap_param_gather
        if gatherer.reshards:
            assert any(use.reshard for use in gatherer.current_plan.uses)
            assert gatherer.pool.peak_bytes == gatherer.current_plan.peak_bytes
        assert (gatherer.current_plan is not None) == (
            gatherer.reshards or engine.config.overlap_param_gather
        )
    assert_weights(engine, reference.weights)
    assert engine.pool.live_bytes == 0
    assert gatherer is None or gatherer.pool.live_bytes == 0


def engine_cases(rank: int, world: int) -> None:
    """Run every config; one size of buckets also as late or as early as may be."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for config, bucket_bytes in configs():
        engine_case(groups, config, bucket_bytes)
        if bucket_bytes == 1:
            link = Late() if config["overlap_grad_reduce"] else Early()
            with simulated(groups, link):
                engine_case(groups, config)
            assert link.count > 0


def test_gradients_overlap_and_traffic_on_two_ranks():
    run_ranks(engine_cases, 2)


#: (strategy, outer) on four ranks in two instances.
HYBRID = (
    ("optim", "no_shard"),
    ("optim_grads", "no_shard"),
    ("optim_grads_params", "no_shard"),
    ("optim_grads_params", "optim"),
)


def hybrid_cases(rank: int, world: int) -> list[str]:
    """Run hybrid sharding over 2 x 2 ranks, and ZeRO-3 over four; return the weights of which this
    rank then stores nothing."""
    hybrid = ProcessGroupCollection.create(RankGrid(world_size=world, instances=2), rank=rank)
    for (strategy, outer), gather in itertools.product(HYBRID, (True, False)):
        config = {"strategy": strategy, "outer": outer, "overlap_param_gather": gather}
        with simulated(hybrid, Late()) as link:
            engine_case(hybrid, config)
        assert link.count > 0
    plain = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    cut = {"strategy": "optim_grads_params", "overlap_param_gather": True}
    engine_case(plain, cut)
    model, _ = built(plain, **cut)
    return [name for name, handle in model.store.handles.items() if not handle.param.numel()]


def test_hybrid_sharding_over_two_by_two_ranks():
    empty = run_ranks(hybrid_cases, 4)
    assert {"scale", "second.bias"} <= set(empty[3]), "empty shards were among them"


def test_hybrid_ranks_own_equal_shards_and_count_replicas():
    found = run_ranks(_owned_of_hybrid, 4)
    for strategy, outer in HYBRID:
        (ranges,) = {one[strategy, outer] for one in found}
        parts = 4 if outer == "optim" else 2
        for numel, replicas, whole in ranges:
            assert numel * parts == whole
            assert replicas == 4 // parts


def _owned_of_hybrid(rank: int, world: int) -> dict:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, instances=2), rank=rank)
    found: dict = {}
    for strategy, outer in HYBRID:
        model, engine = built(groups, strategy=strategy, outer=outer, bucket_bytes=10**9)
        train(model, engine, (0,))
        found[strategy, outer] = tuple(
            (owned.weights.numel(), owned.replicas, entry.bucket.numel)
            for owned, entry in zip(engine.owned(), engine.buckets, strict=True)
        )
    return found


def two_axes(rank: int, world: int) -> None:
    """Check a partial(tp) gradient: summed over lanes and over tp, once each."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=2), rank=rank)
    for strategy in STRATEGIES:
        config = DataParallelConfig(strategy=strategy, debug=True)
        store = WeightStore(groups)
        norm = WeightSharding.of("norm", (70,), gradient={"tp": "partial"})
        whole = WeightSharding.of("bias", (5,), gradient={"tp": "identical"})
        norm_handle = store.declare(norm, InitSpec.constant(1.0))
        bias_handle = store.declare(whole, InitSpec.constant(1.0))
        store.materialize(config.storage())
        engine = DataParallel(store, groups, config=config)
        lane, tp = groups["dense_dp"].rank, groups["tp"].rank
        for _ in range(2):
            engine.begin_step()
            if norm_handle.main_grad is not None:
                norm_handle.main_grad.fill_(torch.nan)
            loss = norm_handle.use().sum() * (1.0 + 10.0 * lane + 100.0 * tp)
            engine.backward(loss + bias_handle.use().sum() * (1.0 + 10.0 * lane), last=True)
            with trace(groups) as records:
                engine.finish()
            boxes = [(p, p.of(o.gradients)) for o in engine.owned() for p in o.boxes]
            for placed, gradient in boxes:
                value = 224.0 if placed.name == "norm" else 12.0
                equal = bool((gradient == value).all())
                assert equal, placed.name
            summed = sum(g.nbytes for placed, g in boxes if placed.name == "norm")
            assert_active(records, group="tp", exactly=1, exactly_bytes=summed)


def test_what_the_plan_sums_over_tp_is_summed_once():
    run_ranks(two_axes, 4)


def experts(rank: int, world: int) -> None:
    """Check weights of two grids: dense ones on four lanes, experts on two of their own."""
    for instances in (1, 2):
        grid = RankGrid(world_size=world, ep=2, instances=instances)
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for strategy in STRATEGIES if instances == 1 else STRATEGIES[1:]:
            config = DataParallelConfig(strategy=strategy, debug=True)
            store = WeightStore(groups)
            cut_by_ep = Shard(axis="ep", dim=0)
            expert = store.declare(
                WeightSharding.of("expert", (6, 9), cut_by_ep, expert=True), InitSpec.constant(1.0)
            )
            dense = store.declare(WeightSharding.of("dense", (70,)), InitSpec.constant(2.0))
            store.materialize(config.storage())
            engine = DataParallel(store, groups, config=config)
            assert {b.group.name in ("expert_dp", "expert_shard") for b in store.buckets} == {
                True,
                False,
            }
            for step in range(3):
                engine.begin_step()
                with simulated(groups, Late()):
                    loss = expert.use().sum() * (1.0 + 10.0 * rank) + dense.use().sum() * (
                        1.0 + 100.0 * rank
                    )
                    assert loss.item() == pytest.approx(
                        (27 * (1 - step) * (1 + 10 * rank)) + 140 * (1 + 100 * rank)
                    )
                    engine.backward(loss, last=True)
                    engine.finish()
                for owned in engine.owned():
                    for placed in owned.boxes:
                        mine = groups["expert_dp"].ranks
                        wanted = {"expert": sum(1.0 + 10.0 * r for r in mine), "dense": 604.0}
                        got = placed.of(owned.gradients)
                        equal = bool((got == wanted[placed.name]).all())
                        assert equal, placed
                        if placed.name == "expert":
                            placed.of(owned.weights).sub_(1.0)
                engine.start_param_sync()


def test_expert_weights_are_sharded_over_expert_dp_ranks():
    run_ranks(experts, 4)


def tied_stages(rank: int, world: int) -> int:
    """Sum a tied weight's gradient over its two stages; return the elements counted here."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, pp=2), rank=rank)
    store = WeightStore(groups)
    tied = WeightSharding.of("table", (5, 3), stages=(0, 1))
    handle = store.declare(tied, InitSpec.constant(1.0))
    store.materialize()
    engine = DataParallel(store, groups)
    engine.begin_step()
    engine.backward(handle.use().sum() * (1.0 + 10.0 * rank), last=True)
    engine.finish()
    equal = bool((handle.main_grad == 12.0).all())
    assert equal
    (owned,) = engine.owned()
    assert [placed.replica_ranks for placed in owned.boxes] == [(0, 1)]
    return sum(stop - start for start, stop in owned.counted)


def test_weight_shared_by_two_stages_is_summed_and_counted_once():
    assert run_ranks(tied_stages, 2) == [15, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_sends_nothing_and_equals_autograd(strategy: str):
    groups = ProcessGroupCollection.single()
    model, engine = built(groups, bucket_bytes=400, strategy=strategy)
    assert gatherer_of(engine) is None
    reference = Reference(1)
    with nan_memory(), trace(groups) as records:
        steps_against(model, engine, reference, ((0, 1, 2), (3,)))
    assert records == []
    slots = {name: handle.main_grad for name, handle in model.store.handles.items()}
    assert all(slot is not None for slot in slots.values())
    assert_weights(engine, reference.weights)
    assert [owned.replicas for owned in engine.owned()] == [1] * len(engine.buckets)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("wide", [False, True])
def test_single_rank_accumulates_bf16_gradients_in_place(strategy: str, wide: bool):
    model, engine = built(
        ProcessGroupCollection.single(),
        strategy=strategy,
        grad_dtype=torch.bfloat16,
        fp32_accumulation=wide,
    )
    reference = Reference(1)
    for indices in ((0,), (1, 2)):
        train(model, engine, indices)
        assert_gradients(engine, reference.gradients(indices), bound=len(indices) * 2**-7)


def test_padding_of_gradients_and_weights_stays_zero():
    model = SmallModel(ProcessGroupCollection.single(), bucket_bytes=10**9)
    engine = DataParallel(model.store, model.store.groups)
    train(model, engine, (0,))
    (entry,) = engine.buckets
    inside = torch.zeros(entry.bucket.numel, dtype=torch.bool)
    for member in entry.bucket.blocks[0].layout.members:
        inside[member.start : member.stop] = True
    assert (~inside).any()
    assert not entry.gradients[~inside].any()
    assert not entry.bucket.data[~inside].any()


def test_what_cannot_be_built_says_why():
    with pytest.raises(ValueError, match="strategy 'zero9': use one of no_shard, optim"):
        DataParallelConfig(strategy="zero9")
    groups = ProcessGroupCollection.single()
    with pytest.raises(ValueError, match="materialize the weight store before"):
        DataParallel(WeightStore(groups), groups)


#: Settings that cannot be, and what is said about each.
REFUSED = (
    ({"strategy": "optim", "outer": "optim"}, "outer sharding strategy 'optim' with 'optim'"),
    ({"outer": "all"}, "outer data-parallel sharding strategy 'all'"),
    ({"grad_dtype": torch.float16}, "grad_dtype is torch.float16: use torch.float32 or"),
    ({"strategy": "optim", "fp32_accumulation": True}, "fp32_accumulation is for bf16 gradients"),
    (
        {"grad_dtype": torch.bfloat16, "fp32_accumulation": True},
        "fp32_accumulation needs a strategy that reduce-scatters: use optim",
    ),
    ({"prefetch_bytes": -1}, "prefetch_bytes is -1: use 0 or more"),
    ({"gtp_reduce_scatter_per": "run"}, "gtp_reduce_scatter_per 'run': use microbatch or step"),
    (
        {"strategy": "optim_grads", "gtp_reduce_scatter_per": "step"},
        "step keeps whole gradients, which optim_grads shards",
    ),
    ({"overlap_param_gather": True}, "overlap_param_gather has no effect with no_shard"),
)


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_do_not_go_together_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DataParallelConfig(**settings)


def test_all_config_problems_are_reported_at_once():
    with pytest.raises(ValueError, match=r"strategy 'x'.*; grad_dtype is .*; prefetch_bytes is -2"):
        DataParallelConfig(strategy="optim", outer="x", grad_dtype=torch.float64, prefetch_bytes=-2)


def mismatched(rank: int, world: int) -> None:
    """Build an engine for another strategy than the weights are stored for."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    model = SmallModel(groups, config=DataParallelConfig(strategy="optim_grads_params"))
    with pytest.raises(ValueError, match=r"stored for strategy optim_grads_params .* is to carry "):
        DataParallel(model.store, groups, config=DataParallelConfig(strategy="optim"))


def test_engine_with_other_strategy_than_store_is_refused():
    run_ranks(mismatched, 2)


def test_gradients_accumulate_in_fp32_for_bf16_weights():
    model, engine = built(ProcessGroupCollection.single(), dtype=torch.bfloat16)
    train(model, engine, (0, 1))
    wanted = reference_gradients(model.store, [(0, 0), (0, 1)])
    for name, handle in model.store.handles.items():
        assert handle.main_grad.dtype is torch.float32
        assert_close_by_metric(name, handle.main_grad, wanted[name], bound=4e-2)
