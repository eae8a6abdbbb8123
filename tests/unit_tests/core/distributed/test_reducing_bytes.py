# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way into shards take as many bytes as the formula says, and no more."""

from __future__ import annotations

from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.ranks import run_ranks
from tests.unit_tests.core.distributed.test_many_units import built, step


def reducing(rank: int, world: int) -> None:
    """Compare the arena's peak of a step of two microbatches with the formula."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for overlap in (True, False):
        model, engine = built(groups, strategy="optim_grads_params", overlap_grad_reduce=overlap)
        step(model, engine, microbatches=2)
        engine.arena.reset_peak()
        step(model, engine, microbatches=2, number=1)
        sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
        formula = bytes_per_rank(sizes, engine.placement, of=ElementBytes(), overlap=overlap)
        largest = 4 * max(size.numel for size in sizes if not size.root)
        assert formula.reducing - largest <= engine.arena.peak_bytes <= formula.reducing, overlap


def test_peaks_of_reductions_are_those_of_the_formula():
    run_ranks(reducing, 2)
