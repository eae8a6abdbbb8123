# SPDX-License-Identifier: Apache-2.0
"""A rank's stored weights are complete before a save, even with late gathers."""

from __future__ import annotations

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from tests.support.gatherers import gatherer_of
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Late, simulated
from tests.unit_tests.core.distributed.small_model import SmallModel, tokens


def check_stored_weights(rank: int, world: int) -> None:
    """Write this rank's owned ranges and read the stored copies of other ranks' ranges."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, instances=2), rank=rank)
    for strategy, outer in (("optim_grads_params", "optim"), ("optim", "no_shard")):
        for early in (True, False):
            config = DataParallelConfig(
                strategy=strategy,
                outer=outer,
                overlap_param_gather=True,
                fsdp_all_gather_in_start_param_sync=early,
            )
            with simulated(groups, Late()):
                _write_and_complete(groups, config)


def _write_and_complete(groups: ProcessGroupCollection, config: DataParallelConfig) -> None:
    model = SmallModel(groups, config=config)
    engine = DataParallel(model.store, groups, config=config)
    for step in range(5):
        engine.begin_step()
        with pytest.raises(ValueError, match="complete_weights"):
            engine.complete_weights()
        engine.backward(model.loss(*tokens(groups["dense_dp"].rank, step)), last=True)
        engine.finish()
        for bucket in model.store.buckets:
            stored_start = bucket.blocks[0].stored_range[0]
            start, stop = (stored_start + bound for bound in bucket.owned_range)
            bucket.owned.copy_(step + torch.arange(start, stop) / 1e4)
        engine.start_param_sync()
        if step % 2 == 0:
            continue  # the next step gathers its weights, by plan from the second time on
        engine.complete_weights()
        for bucket in model.store.buckets:
            start, stop = bucket.blocks[0].stored_range
            assert torch.equal(bucket.data, step + torch.arange(start, stop) / 1e4), (
                config,
                bucket.name,
            )
    assert gatherer_of(engine) is not None
    assert gatherer_of(engine).counts.mismatches == 0
    assert gatherer_of(engine).counts.gathers >= 4 * len(model.store.buckets)


def test_complete_weights_gathers_every_ranks_updates():
    run_ranks(check_stored_weights, 4)


def test_single_process_has_no_weights_to_gather():
    groups = ProcessGroupCollection.single()
    model = SmallModel(groups, config=DataParallelConfig(strategy="optim"))
    before = [bucket.data.clone() for bucket in model.store.buckets]
    DataParallel(
        model.store, groups, config=DataParallelConfig(strategy="optim")
    ).complete_weights()
    for bucket, values in zip(model.store.buckets, before, strict=True):
        assert torch.equal(bucket.data, values)
