# SPDX-License-Identifier: Apache-2.0
"""What starts at the end of the optimizer step: `fsdp_all_gather_in_start_param_sync`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_sharding import STRATEGIES
from tests.support.gatherers import gatherer_of
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    Reference,
    assert_weights,
    built,
    train,
    update,
)
from tests.unit_tests.core.distributed.small_model import SmallModel, tokens

STEPS = ((0, 1), (2, 3), (4, 5), (6, 7))
FIELD = "fsdp_all_gather_in_start_param_sync"


class Counted:
    """A link that counts starts and waits."""

    def __init__(self) -> None:
        self.count = self.waited = 0

    def __call__(self, transfer):
        self.count += 1
        return _CountedTransfer(self, transfer.start())


class _CountedTransfer:
    def __init__(self, link: Counted, work) -> None:
        self.link, self.work = link, work

    def wait(self) -> None:
        self.link.waited += 1
        self.work.wait()


def ready_to_sync(
    groups: ProcessGroupCollection, reference: Reference, **config: object
) -> tuple[SmallModel, DataParallel]:
    """Return a model after some steps, the last one's update not yet gathered."""
    model, engine = built(groups, **config)
    for number, indices in enumerate(STEPS):
        train(model, engine, indices)
        update(engine)
        reference.update(reference.gradients(indices))
        if number < len(STEPS) - 1:
            engine.start_param_sync()
    return model, engine


def test_the_early_gather_is_the_default():
    fields = {field.name: field.default for field in dataclasses.fields(DataParallelConfig)}
    assert fields[FIELD] is True
    assert DataParallelConfig().fsdp_all_gather_in_start_param_sync


def enabled(rank: int, world: int, instances: int, outer: str) -> None:
    """True: the prologue of the next plan is under way after the sync, and nobody waited."""
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
            assert prologue[0] == gatherer.blocks[-1].index, "what forward needs first"
            link = Counted()
            with simulated(groups, link), trace(groups) as records:
                engine.start_param_sync()
            assert gatherer.in_flight == prologue
            assert [r.kind for r in records] == ["all_gather"] * len(prologue)
            over = "shard" if instances > 1 else "dense_dp"
            if strategy == "optim_grads_params":
                over = "replicate" if outer == "optim" else "shard_gather"
            assert {r.group for r in records} == {over}
            assert (link.count, link.waited) == (len(prologue), 0)
            assert_weights(engine, reference.weights)


def test_true_starts_exactly_the_prologue_and_waits_for_none():
    run_ranks(enabled, 2, 1, "no_shard")


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_start_param_sync_starts_inner_or_outer_gathers(outer: str):
    run_ranks(enabled, 4, 2, outer)


def over_gtp(rank: int, world: int) -> None:
    """Replicas' parts of the first bucket come first: its weights wait for them in the step."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    reference = Reference(world)
    config = {"strategy": "optim", "bucket_bytes": 10**6, "overlap_param_gather": True}
    _, engine = ready_to_sync(groups, reference, **config)
    gatherer = engine.gatherers[0]
    prologue = [gatherer.blocks[index] for index in gatherer.current_plan.prologue]
    assert len(prologue) == 2
    assert len({block.bucket.index for block in prologue}) == 1, "several weights of one bucket"
    link = Counted()
    with simulated(groups, link), trace(groups) as records:
        engine.start_param_sync()
    over = [r.group for r in records if r.bytes == 4 * prologue[0].bucket.numel // 2]
    assert over == ["dp_cp"]
    assert "gtp_gather" not in {r.group for r in records}
    assert link.waited == 0
    assert_weights(engine, reference.weights)


def test_of_weights_over_gtp_the_replicas_parts_start():
    run_ranks(over_gtp, 4)


def disabled(rank: int, world: int) -> None:
    """False: no collective from the end of the step to the first forward, then all of them."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for strategy in STRATEGIES[1:]:
        reference = Reference(world)
        model, engine = ready_to_sync(
            groups, reference, strategy=strategy, overlap_param_gather=True, **{FIELD: False}
        )
        with trace(groups) as between:
            engine.start_param_sync()
        assert between == []
        assert gatherer_of(engine).in_flight == []
        ahead = gatherer_of(engine).counts.prefetched
        with trace(groups) as inside:
            engine.begin_step(2)
            assert len(inside) == 2, "the step starts the first gathers, and the next ones"
            loss = model.loss(*tokens(rank, 0))
        assert len([r for r in inside if r.kind == "all_gather"]) >= 3
        assert gatherer_of(engine).counts.prefetched > ahead
        del loss
        engine.abort()
        assert_weights(engine, reference.weights)


def test_false_starts_nothing_before_the_next_step():
    run_ranks(disabled, 2)


def losses(rank: int, world: int) -> dict[tuple[str, bool], list[list[float]]]:
    """Train each strategy with the field on and off."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    found = {}
    for strategy in STRATEGIES:
        for early in (True, False):
            model, engine = built(
                groups,
                strategy=strategy,
                overlap_param_gather=strategy != "no_shard",
                **{FIELD: early},
            )
            found[strategy, early] = []
            with simulated(groups, Late()):
                for indices in STEPS:
                    found[strategy, early].append(train(model, engine, indices))
                    update(engine)
                    engine.start_param_sync()
    return found


def test_losses_do_not_depend_on_it_to_the_bit():
    for found in run_ranks(losses, 2):
        for strategy in STRATEGIES:
            assert found[strategy, True] == found[strategy, False]
            for mine, plain in zip(found[strategy, True], found["no_shard", True], strict=True):
                assert mine == pytest.approx(plain, rel=1e-6)
            assert len(set(map(tuple, found[strategy, True]))) == len(STEPS)


def forced(rank: int, world: int) -> None:
    """A forced sync gathers every bucket and waits, whatever the settings."""
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
            gatherer, link = gatherer_of(engine), Counted()
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
    run_ranks(forced, 2)


def nothing(rank: int, world: int) -> None:
    """Nothing is gathered where every rank updates everything."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for early in (True, False):
        reference = Reference(world)
        _, engine = ready_to_sync(groups, reference, **{FIELD: early})
        before = [bucket.data.clone() for bucket in engine.store.buckets]
        with trace(groups) as records:
            engine.start_param_sync()
            engine.start_param_sync(force_sync=True)
        assert records == []
        for bucket, data in zip(engine.store.buckets, before, strict=True):
            assert torch.equal(bucket.data, data)


def test_no_shard_gathers_nothing():
    run_ranks(nothing, 2)
