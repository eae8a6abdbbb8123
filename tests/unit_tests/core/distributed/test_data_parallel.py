# SPDX-License-Identifier: Apache-2.0
"""The data-parallel engine: gradients against fp64, overlap, and traffic by formula."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from megatron.core import InitSpec, ProcessGroupCollection, RankGrid, WeightSharding
from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import STRATEGIES, Shard
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
    build_engine,
    train,
    train_and_compare,
    update,
)
from tests.unit_tests.core.distributed.small_model import (
    SmallModel,
    reference_gradients,
)

#: Microbatches of each step: their number changes, repeats and changes again.
STEPS = ((0,), (1, 2, 3), (4, 5, 6), (7,))


def configs() -> Iterator[tuple[dict[str, object], int]]:
    """Yield every strategy, kind of overlap and, where it is free, bucket size."""
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
    """Train four steps; check gradients, overlap, gathers and traffic."""
    model, engine = build_engine(groups, bucket_bytes=bucket_bytes, **config)
    num_ranks = groups["dense_dp"].size
    reference = Reference(num_ranks)
    for number, indices in enumerate(STEPS):
        if gatherer_of(engine) is not None:
            gatherer_of(engine).pool.reset_peak()
        with trace(groups) as records:
            engine.start_param_sync()
            with nan_memory():
                train(model, engine, indices)
        expected = reference.gradients(indices)
        elements = assert_gradients(engine, expected)
        if not engine.sharded:
            assert elements == sum(w.numel() for w in expected.values())
        sharded_gradients = bool(engine.placement.gradient)
        launched = engine.config.overlap_grad_reduce or sharded_gradients
        assert engine.launched_in_backward == (len(engine.buckets) if launched else 0)
        if number > 0:  # the first step records the plan that the formula needs
            assert_traffic(engine, records, len(indices))
        update(engine)
        reference.update(expected)
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
    """Run every config; with the smallest buckets also with late or early collectives."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for config, bucket_bytes in configs():
        engine_case(groups, config, bucket_bytes)
        if bucket_bytes == 1:
            link = Late() if config["overlap_grad_reduce"] else Early()
            with simulated(groups, link):
                engine_case(groups, config)
            assert link.count > 0


def test_strategies_match_reference_and_traffic_on_two_ranks():
    run_ranks(engine_cases, 2)


#: (strategy, outer) on four ranks in two instances.
HYBRID = (
    ("optim", "no_shard"),
    ("optim_grads", "no_shard"),
    ("optim_grads_params", "no_shard"),
    ("optim_grads_params", "optim"),
)


def hybrid_cases(rank: int, world: int) -> list[str]:
    """Run hybrid sharding over 2 x 2 ranks, and ZeRO-3 over four ranks; return the names of this
    rank's empty shards under ZeRO-3."""
    hybrid = ProcessGroupCollection.create(RankGrid(world_size=world, instances=2), rank=rank)
    for (strategy, outer), gather in itertools.product(HYBRID, (True, False)):
        config = {"strategy": strategy, "outer": outer, "overlap_param_gather": gather}
        with simulated(hybrid, Late()) as link:
            engine_case(hybrid, config)
        assert link.count > 0
    plain = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    zero3 = {"strategy": "optim_grads_params", "overlap_param_gather": True}
    engine_case(plain, zero3)
    model, _ = build_engine(plain, **zero3)
    return [name for name, handle in model.store.handles.items() if not handle.param.numel()]


def test_hybrid_sharding_matches_reference_and_traffic():
    empty = run_ranks(hybrid_cases, 4)
    assert {"scale", "second.bias"} <= set(empty[3]), "some shards are empty"


def test_hybrid_ranks_own_equal_shards_and_count_replicas():
    ranges_by_rank = run_ranks(_owned_of_hybrid, 4)
    for strategy, outer in HYBRID:
        (ranges,) = {rank_ranges[strategy, outer] for rank_ranges in ranges_by_rank}
        num_shards = 4 if outer == "optim" else 2
        for numel, replicas, bucket_numel in ranges:
            assert numel * num_shards == bucket_numel
            assert replicas == 4 // num_shards


def _owned_of_hybrid(rank: int, world: int) -> dict:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, instances=2), rank=rank)
    ranges: dict = {}
    for strategy, outer in HYBRID:
        model, engine = build_engine(groups, strategy=strategy, outer=outer, bucket_bytes=10**9)
        train(model, engine, (0,))
        ranges[strategy, outer] = tuple(
            (owned.weights.numel(), owned.replicas, entry.bucket.numel)
            for owned, entry in zip(engine.owned(), engine.buckets, strict=True)
        )
    return ranges


def reduce_partial_gradients(rank: int, world: int) -> None:
    """Check that a partial(tp) gradient is summed once over dense_dp and once over tp."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=2), rank=rank)
    for strategy in STRATEGIES:
        config = DataParallelConfig(strategy=strategy, debug=True)
        store = WeightStore(groups)
        norm = WeightSharding.of("norm", (70,), gradient={"tp": "partial"})
        bias = WeightSharding.of("bias", (5,), gradient={"tp": "identical"})
        norm_handle = store.declare(norm, InitSpec.constant(1.0))
        bias_handle = store.declare(bias, InitSpec.constant(1.0))
        store.materialize(config.storage())
        engine = DataParallel(store, groups, config=config)
        dp_rank, tp = groups["dense_dp"].rank, groups["tp"].rank
        for _ in range(2):
            engine.begin_step()
            if norm_handle.main_grad is not None:
                norm_handle.main_grad.fill_(torch.nan)
            loss = norm_handle.use().sum() * (1.0 + 10.0 * dp_rank + 100.0 * tp)
            engine.backward(loss + bias_handle.use().sum() * (1.0 + 10.0 * dp_rank), last=True)
            with trace(groups) as records:
                engine.finish()
            boxes = [(p, p.of(o.gradients)) for o in engine.owned() for p in o.boxes]
            for box, gradient in boxes:
                value = 224.0 if box.name == "norm" else 12.0
                equal = bool((gradient == value).all())
                assert equal, box.name
            summed = sum(g.nbytes for box, g in boxes if box.name == "norm")
            assert_active(records, group="tp", exactly=1, exactly_bytes=summed)


def test_partial_tp_gradients_are_reduced_exactly_once():
    run_ranks(reduce_partial_gradients, 4)


def train_experts(rank: int, world: int) -> None:
    """Check dense weights on four data-parallel ranks with experts on two."""
    for instances in (1, 2):
        grid = RankGrid(world_size=world, ep=2, instances=instances)
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for strategy in STRATEGIES if instances == 1 else STRATEGIES[1:]:
            config = DataParallelConfig(strategy=strategy, debug=True)
            store = WeightStore(groups)
            ep_shard = Shard(axis="ep", dim=0)
            expert = store.declare(
                WeightSharding.of("expert", (6, 9), ep_shard, expert=True), InitSpec.constant(1.0)
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
                    for box in owned.boxes:
                        expert_ranks = groups["expert_dp"].ranks
                        expected = {
                            "expert": sum(1.0 + 10.0 * r for r in expert_ranks),
                            "dense": 604.0,
                        }
                        gradient = box.of(owned.gradients)
                        equal = bool((gradient == expected[box.name]).all())
                        assert equal, box
                        if box.name == "expert":
                            box.of(owned.weights).sub_(1.0)
                engine.start_param_sync()


def test_expert_weights_are_sharded_over_expert_dp_ranks():
    run_ranks(train_experts, 4)


def reduce_tied_weight(rank: int, world: int) -> int:
    """Sum a tied weight's gradient over its two stages; return the elements this rank counts."""
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
    assert [box.replica_ranks for box in owned.boxes] == [(0, 1)]
    return sum(stop - start for start, stop in owned.counted)


def test_weight_tied_across_stages_is_summed_and_counted_once():
    assert run_ranks(reduce_tied_weight, 2) == [15, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_single_process_sends_nothing_and_equals_autograd(strategy: str):
    groups = ProcessGroupCollection.single()
    model, engine = build_engine(groups, bucket_bytes=400, strategy=strategy)
    assert gatherer_of(engine) is None
    reference = Reference(1)
    with nan_memory(), trace(groups) as records:
        train_and_compare(model, engine, reference, ((0, 1, 2), (3,)))
    assert records == []
    main_grads = {name: handle.main_grad for name, handle in model.store.handles.items()}
    assert all(main_grad is not None for main_grad in main_grads.values())
    assert_weights(engine, reference.weights)
    assert [owned.replicas for owned in engine.owned()] == [1] * len(engine.buckets)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_single_rank_accumulates_bf16_gradients_in_place(strategy: str, fp32_accumulation: bool):
    model, engine = build_engine(
        ProcessGroupCollection.single(),
        strategy=strategy,
        grad_dtype=torch.bfloat16,
        fp32_accumulation=fp32_accumulation,
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
    is_weight = torch.zeros(entry.bucket.numel, dtype=torch.bool)
    for member in entry.bucket.blocks[0].layout.members:
        is_weight[member.start : member.stop] = True
    assert (~is_weight).any()
    assert not entry.gradients[~is_weight].any()
    assert not entry.bucket.data[~is_weight].any()


def test_unknown_strategy_or_unmaterialized_store_is_refused():
    with pytest.raises(ValueError, match=r"'zero9'.*no_shard"):
        DataParallelConfig(strategy="zero9")
    groups = ProcessGroupCollection.single()
    with pytest.raises(ValueError, match="materialize the weight store before"):
        DataParallel(WeightStore(groups), groups)


#: Invalid settings and their error messages.
INVALID_SETTINGS = (
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
        "step needs unsharded gradients, which optim_grads shards",
    ),
    ({"overlap_param_gather": True}, "overlap_param_gather has no effect with no_shard"),
)


@pytest.mark.parametrize(("settings", "message"), INVALID_SETTINGS)
def test_invalid_settings_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DataParallelConfig(**settings)


def test_all_config_problems_are_reported_at_once():
    with pytest.raises(ValueError, match=r"'x'.*; grad_dtype.*; prefetch_bytes.*-2"):
        DataParallelConfig(strategy="optim", outer="x", grad_dtype=torch.float64, prefetch_bytes=-2)


def build_mismatched_engine(rank: int, world: int) -> None:
    """Build an engine with a strategy that differs from the weight store's."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    model = SmallModel(groups, config=DataParallelConfig(strategy="optim_grads_params"))
    with pytest.raises(ValueError, match="optim_grads_params"):
        DataParallel(model.store, groups, config=DataParallelConfig(strategy="optim"))


def test_engine_with_other_strategy_than_store_is_refused():
    run_ranks(build_mismatched_engine, 2)


def test_gradients_accumulate_in_fp32_for_bf16_weights():
    model, engine = build_engine(ProcessGroupCollection.single(), dtype=torch.bfloat16)
    train(model, engine, (0, 1))
    expected = reference_gradients(model.store, [(0, 0), (0, 1)])
    for name, handle in model.store.handles.items():
        assert handle.main_grad.dtype is torch.float32
        assert_close_by_metric(name, handle.main_grad, expected[name], bound=4e-2)


def sum_after_uneven_shards(rank: int, world: int) -> list[float]:
    """Return the sum over tp of a gradient that is replicated over gtp, after one sharded over gtp
    into other sizes on its two ranks."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=3, gtp=2), rank=rank)
    store = WeightStore(groups)
    partial = {"gradient": {"tp": "partial"}}
    store.declare(WeightSharding.of("matrix", (7, 1), gtp=True, **partial), InitSpec.normal(1.0))
    store.declare(WeightSharding.of("norm", (61,), **partial), InitSpec.normal(1.0))
    config = DataParallelConfig()
    store.materialize(config.storage())
    engine = DataParallel(store, groups, config=config)
    engine.begin_step()
    terms = torch.randn(61, generator=torch.Generator().manual_seed(groups["tp"].rank))
    engine.backward((store.handles["norm"].use() * terms).sum(), last=True)
    engine.finish()
    gradient = store.handles["norm"].main_grad
    assert gradient is not None
    return gradient.flatten().tolist()


@pytest.mark.slow(seconds=6)  # six ranks: the order of two addends does not matter
def test_replicas_over_gtp_add_their_terms_in_one_order():
    sums = run_ranks(sum_after_uneven_shards, 6)
    assert all(values == sums[0] for values in sums)
    terms = [torch.randn(61, generator=torch.Generator().manual_seed(tp)) for tp in range(3)]
    exact = 2 * torch.stack(terms).double().sum(0)
    assert_close_by_metric("norm", torch.tensor(sums[0]), exact)
