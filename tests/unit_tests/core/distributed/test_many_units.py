# SPDX-License-Identifier: Apache-2.0
"""A model of 24 layers: what is gathered at a time, and what starts before backward ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import AttentionConfig, MLPConfig, Recompute
from megatron.core.weight_gather import Gatherer, check_plan
from megatron.core.weight_sharding import STRATEGIES
from tests.support.gatherers import gatherer_of
from tests.support.inputs import microbatch
from tests.support.ranks import run_ranks

LAYERS = 24


def built(groups: ProcessGroupCollection, **config: object) -> tuple[GPTModel, DataParallel]:
    """Return a model whose layers are units between embedding and head."""
    settings = DataParallelConfig(**config)  # type: ignore[arg-type]
    model = GPTModel(
        GPTConfig(
            num_layers=LAYERS,
            hidden_size=16,
            vocab_size=20,
            attention=AttentionConfig(num_attention_heads=2, num_query_groups=1, kv_channels=8),
            mlp=MLPConfig(ffn_hidden_size=24),
        ),
        groups,
        storage=settings.storage(bucket_bytes=12_000),
    )
    return model, DataParallel(model.store, groups, config=settings)


def step(model: GPTModel, engine: DataParallel, *, microbatches: int = 1, number: int = 0) -> None:
    """Run a step without an update."""
    lane = engine.groups["dense_dp"].rank
    engine.begin_step(microbatches)
    for index in range(microbatches):
        data = microbatch(
            seed=3, dp_rank=lane, index=index + 9 * number, batch=1, sequence=5, vocabulary=20
        )
        loss, _ = model.loss(data.tokens, data.labels, data.loss_mask / 5)
        engine.backward(loss, last=index == microbatches - 1)
    engine.finish()


class Watch:
    """Stand before a gatherer's `unshard` and note the bytes held behind every one."""

    def __init__(self, gatherer: Gatherer) -> None:
        self.held: list[int] = []
        self.gatherer = gatherer
        self.unshard = gatherer.unshard
        gatherer.unshard = self._unshard  # type: ignore[method-assign]

    def _unshard(self, bucket) -> None:
        self.unshard(bucket)
        self.held.append(self.gatherer.pool.live_bytes)


def replayed(gatherer: Gatherer) -> list[int]:
    """Return the bytes that the plan holds behind every need."""
    plan, sizes = gatherer.current_plan, gatherer.sizes
    assert plan is not None
    held = set(plan.prologue)
    found = []
    for use in plan.uses:
        held = (held - set(use.reshard)) | set(use.all_gather)
        found.append(sum(sizes[index] for index in held))
    return found


def changes(found: list[int]) -> list[int]:
    """Drop what is equal to the number before it."""
    return [number for number, _ in itertools.groupby(found)]


def gathered(rank: int, world: int) -> None:
    """Gathered bytes at every need are the plan's, and the plan's two units and what is around."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    layer_by_layer = Recompute(granularity="full", method="uniform", num_layers=1)
    for recompute, granularity, prefetch, ahead in (
        (Recompute(), "unit", False, 0),
        (layer_by_layer, "unit", True, 0),
        (Recompute(), "unit", True, 40_000),
        (Recompute(), "weight", True, 0),
    ):
        model, engine = built(
            groups,
            strategy="optim_grads_params",
            granularity=granularity,
            overlap_param_gather=prefetch,
            prefetch_bytes=ahead,
        )
        model.decoder.set_recompute(recompute)
        gatherer = gatherer_of(engine)
        step(model, engine, microbatches=2)
        assert gatherer.counts.peak_bytes <= gatherer.budget
        watch = Watch(gatherer)
        for number, microbatches in enumerate((2, 1)):
            before, ahead_before = gatherer.counts.gathers, gatherer.counts.prefetched
            gatherer.pool.reset_peak()
            watch.held.clear()
            step(model, engine, microbatches=microbatches, number=number)
            plan = gatherer.current_plan
            assert check_plan(plan, sizes=gatherer.sizes, budget=gatherer.budget) == []
            assert changes(watch.held) == changes(replayed(gatherer))
            assert gatherer.pool.peak_bytes == plan.peak_bytes <= gatherer.budget
            assert gatherer.counts.gathers - before == plan.gathers
            assert gatherer.counts.mismatches == 0
            early = gatherer.counts.prefetched - ahead_before
            assert early == 0 if not prefetch else early > plan.gathers // 2
        sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
        assert sum(not size.root for size in sizes) >= LAYERS
        of = bytes_per_rank(
            sizes,
            engine.placement,
            element_bytes=ElementBytes(),
            prefetch=prefetch,
            prefetch_bytes=ahead,
        )
        assert gatherer.budget == of.gathered


def test_what_is_gathered_at_every_need_is_what_the_plan_says():
    run_ranks(gathered, 2)


def launched(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Count the reductions that have started when the last op of backward begins."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    found = {}
    for strategy in STRATEGIES:
        model, engine = built(groups, strategy=strategy)
        handle = model.store.handles["embedding.weight"]
        seen: list[int] = []
        with trace(groups) as records:
            original: Callable = handle.accumulate_embedding_grad

            def last(*arguments, records=records, seen=seen, original=original) -> None:
                seen.append(sum(r.kind in ("all_reduce", "reduce_scatter") for r in records))
                original(*arguments)

            handle.accumulate_embedding_grad = last  # type: ignore[method-assign]
            step(model, engine)
        assert len(seen) == 1
        assert engine.launched_in_backward == len(engine.buckets)
        found[strategy] = seen[0], len(engine.buckets)
    return found


def test_all_reductions_but_one_start_before_backward_ends():
    for found in run_ranks(launched, 2):
        assert found.keys() == set(STRATEGIES)
        for strategy, (before, buckets) in found.items():
            assert buckets >= 8, strategy
            assert before == buckets - 1, "all but the embedding's"


def waiting(rank: int, world: int) -> None:
    """Without overlap whole gradients wait for `finish`."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for strategy in ("no_shard", "optim"):
        model, engine = built(groups, strategy=strategy, overlap_grad_reduce=False)
        with trace(groups) as records:
            step(model, engine)
        assert engine.launched_in_backward == 0
        reduced = [r for r in records if r.kind in ("all_reduce", "reduce_scatter")]
        assert len(reduced) == len(engine.buckets)


def test_without_overlap_none_starts_in_backward():
    run_ranks(waiting, 2)
