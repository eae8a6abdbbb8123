# SPDX-License-Identifier: Apache-2.0
"""Gradients on their way into shards take as many bytes as the formula says, and no more."""

from __future__ import annotations

import itertools

import torch

from megatron.core.distributed.formulas import BucketSize, ElementBytes, bytes_per_rank
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.ranks import run_ranks
from tests.unit_tests.core.distributed.test_many_units import built, step


def reducing(rank: int, world: int) -> None:
    """Compare the pool's peak of a step of two microbatches with the formula."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    for overlap in (True, False):
        model, engine = built(groups, strategy="optim_grads_params", overlap_grad_reduce=overlap)
        step(model, engine, microbatches=2)
        engine.pool.reset_peak()
        step(model, engine, microbatches=2, number=1)
        sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
        formula = bytes_per_rank(
            sizes, engine.placement, element_bytes=ElementBytes(), overlap=overlap
        )
        largest = 4 * max(size.numel for size in sizes if not size.root)
        assert formula.reducing - largest <= engine.pool.peak_bytes <= formula.reducing, overlap


def over_gtp(rank: int, world: int) -> None:
    """Compare what a rank keeps, gathers and reduces of weights over gtp with the formula."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, gtp=2), rank=rank)
    bf16 = {"grad_dtype": torch.bfloat16, "fp32_accumulation": True}
    for strategy, more, of in (
        ("no_shard", {}, ElementBytes()),
        ("optim", {}, ElementBytes()),
        ("optim", bf16, ElementBytes(gradient=2, fp32_sum=True)),
    ):
        model, engine = built(groups, strategy=strategy, **more)
        leased = engine.gatherers[0]
        step(model, engine, microbatches=2)
        engine.pool.reset_peak()
        leased.pool.reset_peak()
        step(model, engine, microbatches=2, number=1)
        sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
        assert sum(len(size.blocks) for size in sizes if size.gtp) > 4 * 24
        formula = bytes_per_rank(sizes, engine.placement, element_bytes=of)
        assert formula.weights == sum(b.data.nbytes for b in model.store.buckets)
        over = 4 * sum(size.numel // 2 for size in sizes if size.gtp)
        owned = sum(b.gradients.nbytes for b in engine.buckets if b.bucket.gtp)
        assert owned == over if strategy == "no_shard" else owned == over // 2
        # The most are the matrices of an MLP, one of which is twice the other.
        neighbours = [4 * a + 4 * b for a, b in itertools.pairwise(
            block.numel for size in sizes if size.gtp for block in size.blocks)]  # fmt: skip
        assert leased.pool.peak_bytes == leased.budget == max(neighbours)
        assert leased.budget < formula.gathered < 1.5 * leased.budget
        peak = engine.pool.peak_bytes
        # The formula adds the peaks of both kinds of buckets, which wide sums reach in turn.
        least = 0.4 if more else 0.6
        assert least * formula.reducing <= peak <= formula.reducing, (strategy, peak, formula)


def reducing_wide(rank: int, world: int) -> None:
    """The same of bf16 gradients that are summed in fp32, in shards and not."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    narrow = ElementBytes(gradient=2, fp32_sum=True)
    for strategy in ("optim", "optim_grads_params"):
        model, engine = built(
            groups,
            strategy=strategy,
            grad_dtype=torch.bfloat16,
            fp32_accumulation=True,
        )
        step(model, engine, microbatches=2)
        engine.pool.reset_peak()
        step(model, engine, microbatches=2, number=1)
        sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
        formula = bytes_per_rank(sizes, engine.placement, element_bytes=narrow, overlap=True)
        assert 0 < engine.pool.peak_bytes <= formula.reducing, strategy
        assert engine.pool.peak_bytes >= formula.reducing * 0.6, strategy


def test_bytes_of_weights_over_gtp_are_those_of_the_formula():
    run_ranks(over_gtp, 4)


def test_peaks_of_wide_reductions_stay_below_the_formula():
    run_ranks(reducing_wide, 2)


def test_peaks_of_reductions_are_those_of_the_formula():
    run_ranks(reducing, 2)
