# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way into shards take as many bytes as the formula says, and no more."""

from __future__ import annotations

import torch

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


def reducing_wide(rank: int, world: int) -> None:
    """The same of bf16 gradients that are summed in fp32, in shards and not."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    narrow = ElementBytes(gradient=2, wide_sum=True)
    for strategy in ("optim", "optim_grads_params"):
        model, engine = built(
            groups,
            strategy=strategy,
            grad_dtype=torch.bfloat16,
            fp32_accumulation=True,
        )
        step(model, engine, microbatches=2)
        engine.arena.reset_peak()
        step(model, engine, microbatches=2, number=1)
        sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
        formula = bytes_per_rank(sizes, engine.placement, of=narrow, overlap=True)
        assert 0 < engine.arena.peak_bytes <= formula.reducing, strategy
        assert engine.arena.peak_bytes >= formula.reducing * 0.6, strategy


def test_peaks_of_wide_reductions_stay_below_the_formula():
    run_ranks(reducing_wide, 2)


def test_peaks_of_reductions_are_those_of_the_formula():
    run_ranks(reducing, 2)
