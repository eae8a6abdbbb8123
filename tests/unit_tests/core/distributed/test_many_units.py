# SPDX-License-Identifier: Apache-2.0
"""A model of 24 layers: bytes gathered at a time, and reductions started during backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig, Recompute
from megatron.core.weight_gather import Gatherer, check_plan
from megatron.core.weight_sharding import STRATEGIES
from tests.support.gatherers import gatherer_of
from tests.support.inputs import microbatch
from tests.support.ranks import run_ranks

LAYERS = 24


def build_engine(groups: ProcessGroupCollection, **config: object) -> tuple[GPTModel, DataParallel]:
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
    """Run a training step without an update."""
    dp_rank = engine.groups["dense_dp"].rank
    engine.begin_step(microbatches)
    for index in range(microbatches):
        batch = microbatch(
            seed=3, dp_rank=dp_rank, index=index + 9 * number, batch=1, sequence=5, vocabulary=20
        )
        loss, _ = model.loss(batch.tokens, batch.labels, batch.loss_mask / 5)
        engine.backward(loss, last=index == microbatches - 1)
    engine.finish()


class LiveBytesRecorder:
    """Wrap a gatherer's `unshard` and record the pool's live bytes after each call."""

    def __init__(self, gatherer: Gatherer) -> None:
        self.live_bytes_by_use: list[int] = []
        self.gatherer = gatherer
        self.unshard = gatherer.unshard
        gatherer.unshard = self._unshard  # type: ignore[method-assign]

    def _unshard(self, bucket) -> None:
        self.unshard(bucket)
        self.live_bytes_by_use.append(self.gatherer.pool.live_bytes)


def planned_bytes(gatherer: Gatherer) -> list[int]:
    """Return the gathered bytes after each use of the plan."""
    plan, sizes = gatherer.current_plan, gatherer.sizes
    assert plan is not None
    gathered_blocks = set(plan.prologue)
    gathered_bytes = []
    for use in plan.uses:
        gathered_blocks = (gathered_blocks - set(use.reshard)) | set(use.all_gather)
        gathered_bytes.append(sum(sizes[index] for index in gathered_blocks))
    return gathered_bytes


def drop_repeats(values: list[int]) -> list[int]:
    """Drop repeated successive values."""
    return [number for number, _ in itertools.groupby(values)]


def compare_gathered_bytes(rank: int, world: int) -> None:
    """Compare the gathered bytes at every use with the plan, and the budget with the formula."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    layer_by_layer = Recompute(granularity="full", method="uniform", num_layers=1)
    for recompute, granularity, prefetch, prefetch_bytes in (
        (Recompute(), "unit", False, 0),
        (layer_by_layer, "unit", True, 0),
        (Recompute(), "unit", True, 40_000),
        (Recompute(), "weight", True, 0),
    ):
        model, engine = build_engine(
            groups,
            strategy="optim_grads_params",
            granularity=granularity,
            overlap_param_gather=prefetch,
            prefetch_bytes=prefetch_bytes,
        )
        model.decoder.set_recompute(recompute)
        gatherer = gatherer_of(engine)
        step(model, engine, microbatches=2)
        assert gatherer.counts.peak_bytes <= gatherer.budget
        watch = LiveBytesRecorder(gatherer)
        for number, microbatches in enumerate((2, 1)):
            before, prefetched_before = gatherer.counts.gathers, gatherer.counts.prefetched
            gatherer.pool.reset_peak()
            watch.live_bytes_by_use.clear()
            step(model, engine, microbatches=microbatches, number=number)
            plan = gatherer.current_plan
            assert check_plan(plan, sizes=gatherer.sizes, budget=gatherer.budget) == []
            assert drop_repeats(watch.live_bytes_by_use) == drop_repeats(planned_bytes(gatherer))
            assert gatherer.pool.peak_bytes == plan.peak_bytes <= gatherer.budget
            assert gatherer.counts.gathers - before == plan.gathers
            assert gatherer.counts.mismatches == 0
            num_prefetched = gatherer.counts.prefetched - prefetched_before
            assert num_prefetched == 0 if not prefetch else num_prefetched > plan.gathers // 2
        sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
        assert sum(not size.root for size in sizes) >= LAYERS
        formula = bytes_per_rank(
            sizes,
            engine.placement,
            element_bytes=ElementBytes(),
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
        )
        assert gatherer.budget == formula.gathered


def test_gathered_bytes_at_each_use_match_the_plan():
    run_ranks(compare_gathered_bytes, 2)


def count_early_reductions(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Count the reductions started before the last op of backward."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    counts = {}
    for strategy in STRATEGIES:
        model, engine = build_engine(groups, strategy=strategy)
        handle = model.store.handles["embedding.weight"]
        started: list[int] = []
        with trace(groups) as records:
            original: Callable = handle.accumulate_embedding_grad

            def count_and_accumulate(
                *arguments, records=records, started=started, original=original
            ) -> None:
                started.append(sum(r.kind in ("all_reduce", "reduce_scatter") for r in records))
                original(*arguments)

            handle.accumulate_embedding_grad = count_and_accumulate  # type: ignore[method-assign]
            step(model, engine)
        assert len(started) == 1
        assert engine.launched_in_backward == len(engine.buckets)
        counts[strategy] = started[0], len(engine.buckets)
    return counts


def test_all_reductions_but_one_start_before_backward_ends():
    for counts in run_ranks(count_early_reductions, 2):
        assert counts.keys() == set(STRATEGIES)
        for strategy, (before, buckets) in counts.items():
            assert buckets >= 8, strategy
            assert before == buckets - 1, "all buckets but the embedding's"


def reduce_without_overlap(rank: int, world: int) -> None:
    """Check that without overlap all full gradients are reduced in `finish`."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for strategy in ("no_shard", "optim"):
        model, engine = build_engine(groups, strategy=strategy, overlap_grad_reduce=False)
        with trace(groups) as records:
            step(model, engine)
        assert engine.launched_in_backward == 0
        reduced = [r for r in records if r.kind in ("all_reduce", "reduce_scatter")]
        assert len(reduced) == len(engine.buckets)


def test_without_overlap_no_reduction_starts_in_backward():
    run_ranks(reduce_without_overlap, 2)
