# SPDX-License-Identifier: Apache-2.0
"""Gathers started after the optimizer step: `fsdp_all_gather_in_start_param_sync`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.weight_sharding import STRATEGIES
from tests.support.gatherers import gatherer_of
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    Reference,
    assert_weights,
    build_engine,
    train,
    update,
)
from tests.unit_tests.core.distributed.small_model import SmallModel, tokens

STEPS = ((0, 1), (2, 3), (4, 5), (6, 7))
FIELD = "fsdp_all_gather_in_start_param_sync"


class CountingLink:
    """A link that counts starts and waits."""

    def __init__(self) -> None:
        self.count = self.waited = 0

    def __call__(self, transfer):
        self.count += 1
        return _CountingTransfer(self, transfer.start())


class _CountingTransfer:
    def __init__(self, link: CountingLink, work) -> None:
        self.link, self.work = link, work

    def wait(self) -> None:
        self.link.waited += 1
        self.work.wait()


def ready_to_sync(
    groups: ProcessGroupCollection, reference: Reference, **config: object
) -> tuple[SmallModel, DataParallel]:
    """Return a model after some steps, before the parameter sync of the last update."""
    model, engine = build_engine(groups, **config)
    for number, indices in enumerate(STEPS):
        train(model, engine, indices)
        update(engine)
        reference.update(reference.gradients(indices))
        if number < len(STEPS) - 1:
            engine.start_param_sync()
    return model, engine


def test_early_gather_is_the_default():
    fields = {field.name: field.default for field in dataclasses.fields(DataParallelConfig)}
    assert fields[FIELD] is True
    assert DataParallelConfig().fsdp_all_gather_in_start_param_sync


def check_early_gather(rank: int, world: int, instances: int, outer: str) -> None:
    """Check that the sync starts the prologue of the next plan without waiting."""
    grid = RankGrid(world_size=world, instances=instances)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    for strategy in STRATEGIES[3:] if outer == "optim" else STRATEGIES[1:]:
        for prefetch in (0, 10**6):
            reference = Reference(world)
            _, engine = ready_to_sync(
                groups,
                reference,
                strategy=strategy,
                outer=outer,
                overlap_param_gather=True,
                prefetch_bytes=prefetch,
            )
            gatherer = gatherer_of(engine)
            prologue = list(gatherer.current_plan.prologue)
            assert len(prologue) == (len(gatherer.blocks) if prefetch else 2)
            assert prologue[0] == gatherer.blocks[-1].index, "the first block of forward"
            link = CountingLink()
            with simulated(groups, link), trace(groups) as records:
                engine.start_param_sync()
            assert gatherer.in_flight == prologue
            assert [r.kind for r in records] == ["all_gather"] * len(prologue)
            group = "shard" if instances > 1 else "dense_dp"
            if strategy == "optim_grads_params":
                group = "replicate" if outer == "optim" else "shard_gather"
            assert {r.group for r in records} == {group}
            assert (link.count, link.waited) == (len(prologue), 0)
            assert_weights(engine, reference.weights)


def test_early_gather_starts_the_prologue_without_waiting():
    run_ranks(check_early_gather, 2, 1, "no_shard")


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_start_param_sync_starts_inner_or_outer_gathers(outer: str):
    run_ranks(check_early_gather, 4, 2, outer)


def check_gtp_early_gather(rank: int, world: int) -> None:
    """Check that the sync gathers the first bucket's shards over replicas, not over gtp."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    reference = Reference(world)
    config = {"strategy": "optim", "bucket_bytes": 10**6, "overlap_param_gather": True}
    _, engine = ready_to_sync(groups, reference, **config)
    gatherer = engine.gatherers[0]
    prologue = [gatherer.blocks[index] for index in gatherer.current_plan.prologue]
    assert len(prologue) == 2
    assert len({block.bucket.index for block in prologue}) == 1, "several weights of one bucket"
    link = CountingLink()
    with simulated(groups, link), trace(groups) as records:
        engine.start_param_sync()
    first_bucket_groups = [r.group for r in records if r.bytes == 4 * prologue[0].bucket.numel // 2]
    assert first_bucket_groups == ["dp_cp"]
    assert "gtp_gather" not in {r.group for r in records}
    assert link.waited == 0
    assert_weights(engine, reference.weights)


def test_gtp_early_gather_starts_with_replica_shards():
    run_ranks(check_gtp_early_gather, 4)


def check_late_gather(rank: int, world: int) -> None:
    """Check that no collective runs before the next step, which then starts all gathers."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for strategy in STRATEGIES[1:]:
        reference = Reference(world)
        model, engine = ready_to_sync(
            groups, reference, strategy=strategy, overlap_param_gather=True, **{FIELD: False}
        )
        with trace(groups) as sync_records:
            engine.start_param_sync()
        assert sync_records == []
        assert gatherer_of(engine).in_flight == []
        prefetched_before = gatherer_of(engine).counts.prefetched
        with trace(groups) as step_records:
            engine.begin_step(2)
            assert len(step_records) == 2, "begin_step starts the first two gathers"
            loss = model.loss(*tokens(rank, 0))
        assert len([r for r in step_records if r.kind == "all_gather"]) >= 3
        assert gatherer_of(engine).counts.prefetched > prefetched_before
        del loss
        engine.abort()
        assert_weights(engine, reference.weights)


def test_late_gather_starts_nothing_before_the_next_step():
    run_ranks(check_late_gather, 2)


def train_losses(rank: int, world: int) -> dict[tuple[str, bool], list[list[float]]]:
    """Train every strategy with the setting on and off; return the losses."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    losses_by_case = {}
    for strategy in STRATEGIES:
        for early in (True, False):
            model, engine = build_engine(
                groups,
                strategy=strategy,
                overlap_param_gather=strategy != "no_shard",
                **{FIELD: early},
            )
            losses_by_case[strategy, early] = []
            with simulated(groups, Late()):
                for indices in STEPS:
                    losses_by_case[strategy, early].append(train(model, engine, indices))
                    update(engine)
                    engine.start_param_sync()
    return losses_by_case


def test_losses_are_bit_equal_with_early_and_late_gather():
    for losses_by_case in run_ranks(train_losses, 2):
        for strategy in STRATEGIES:
            assert losses_by_case[strategy, True] == losses_by_case[strategy, False]
            for sharded_losses, no_shard_losses in zip(
                losses_by_case[strategy, True], losses_by_case["no_shard", True], strict=True
            ):
                assert sharded_losses == pytest.approx(no_shard_losses, rel=1e-6)
            assert len(set(map(tuple, losses_by_case[strategy, True]))) == len(STEPS)


def check_forced_sync(rank: int, world: int) -> None:
    """Check that a forced sync gathers every bucket and waits, under all settings."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for strategy in STRATEGIES[1:]:
        for overlap, early in ((True, True), (True, False), (False, True)):
            reference = Reference(world)
            _, engine = ready_to_sync(
                groups,
                reference,
                strategy=strategy,
                overlap_param_gather=overlap,
                **{FIELD: early},
            )
            gatherer, link = gatherer_of(engine), CountingLink()
            with simulated(groups, link), trace(groups) as records:
                engine.start_param_sync(force_sync=True)
            assert gatherer.in_flight == []
            assert gatherer.pool.live_bytes == 0
            sizes = [block.unsharded_bytes for block in reversed(gatherer.blocks)]
            assert [(r.kind, r.bytes) for r in records] == [("all_gather", b) for b in sizes]
            assert link.waited == link.count == len(sizes)
            if not gatherer.reshards:
                assert all(block.ready for block in gatherer.blocks)
            assert_weights(engine, reference.weights)


def test_a_forced_sync_gathers_everything_and_waits():
    run_ranks(check_forced_sync, 2)


def check_no_shard(rank: int, world: int) -> None:
    """Check that no_shard gathers nothing, since every rank updates all weights."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for early in (True, False):
        reference = Reference(world)
        _, engine = ready_to_sync(groups, reference, **{FIELD: early})
        before = [bucket.data.clone() for bucket in engine.store.buckets]
        with trace(groups) as records:
            engine.start_param_sync()
            engine.start_param_sync(force_sync=True)
        assert records == []
        for bucket, values in zip(engine.store.buckets, before, strict=True):
            assert torch.equal(bucket.data, values)


def test_no_shard_gathers_nothing():
    run_ranks(check_no_shard, 2)
