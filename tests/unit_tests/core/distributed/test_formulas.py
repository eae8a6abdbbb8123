# SPDX-License-Identifier: Apache-2.0
"""Cost formulas of the strategies: published bytes per parameter and traffic volumes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron.core import Placement, RankGrid, WeightSharding
from megatron.core.distributed.formulas import (
    BlockSize,
    BucketSize,
    ElementBytes,
    Traffic,
    bytes_per_parameter,
    bytes_per_rank,
    collectives_per_step,
)
from megatron.core.weight_sharding import STRATEGIES, memory_bytes, placement

#: Adam: two fp32 moments, and an fp32 master copy unless the weights are fp32.
FP32 = ElementBytes()
BF16 = ElementBytes(weight=2, optimizer=12)
BF16_GRADIENTS = ElementBytes(weight=2, gradient=2, optimizer=12)
FP32_SUM = ElementBytes(weight=2, gradient=2, optimizer=12, fp32_sum=True)
#: Bytes per parameter on d ranks as (replicated, sharded over d), for the strategies in order.
PUBLISHED = (
    (FP32, ((16, 0), (8, 8), (4, 12), (0, 16))),
    (BF16, ((18, 0), (6, 12), (2, 16), (0, 18))),
    (BF16_GRADIENTS, ((16, 0), (4, 12), (2, 16), (0, 18))),
    (FP32_SUM, ((16, 4), (4, 16), (2, 16), (0, 18))),
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_bytes_per_parameter_match_published_values(num_ranks: int):
    for element_bytes, rows in PUBLISHED:
        for strategy, (replicated, sharded) in zip(STRATEGIES, rows, strict=True):
            num_bytes = bytes_per_parameter(
                strategy, inner_size=num_ranks, outer_size=1, element_bytes=element_bytes
            )
            assert num_bytes == replicated + Fraction(sharded, num_ranks), strategy


def test_hybrid_sharding_bytes_divide_by_inner_group_size():
    sizes = {"inner_size": 4, "outer_size": 2, "element_bytes": BF16}
    assert [bytes_per_parameter(name, **sizes) for name in STRATEGIES] == [
        18,
        6 + Fraction(12, 4),
        2 + Fraction(16, 4),
        Fraction(18, 4),
    ]
    inner_and_outer = bytes_per_parameter("optim_grads_params", "optim", **sizes)
    assert inner_and_outer == Fraction(2 + 4, 4) + Fraction(12, 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bucket_bytes_equal_the_sum_over_weights(strategy: str):
    grid = RankGrid(world_size=8, instances=2)
    weights = [WeightSharding.of("a", (64, 3)), WeightSharding.of("b", (128,))]
    buckets = [BucketSize(numel=numel, inner=4, outer=2) for numel in (192, 128)]
    parameter_placement = placement(strategy)
    persistent = bytes_per_rank(buckets, parameter_placement, element_bytes=BF16).persistent
    assert persistent == sum(
        memory_bytes(w, grid, parameter_placement, weight_bytes=2) for w in weights
    )
    frozen = [BucketSize(numel=192, inner=4, outer=2, trainable=False)]
    frozen_bytes = bytes_per_rank(frozen, parameter_placement, element_bytes=BF16)
    assert (frozen_bytes.gradients, frozen_bytes.optimizer) == (0, 0)
    assert frozen_bytes.weights == memory_bytes(
        weights[0], grid, parameter_placement, weight_bytes=2, gradient_bytes=0, optimizer_bytes=0
    )


def test_gathered_bytes_are_two_units_plus_root_weights():
    sizes = ((100, True), (30, False), (40, False), (40, False), (10, True))
    buckets = [BucketSize(numel=numel, inner=2, root=root) for numel, root in sizes]
    sharded = placement("optim_grads_params")
    for prefetch, prefetch_elements, gathered in ((False, 0, 150), (True, 0, 190), (True, 12, 202)):
        rank_bytes = bytes_per_rank(
            buckets,
            sharded,
            element_bytes=FP32,
            prefetch=prefetch,
            prefetch_bytes=4 * prefetch_elements,
        )
        assert (rank_bytes.gathered, rank_bytes.reducing) == (4 * gathered, 4 * 190)
    unlimited = bytes_per_rank(
        buckets, sharded, element_bytes=FP32, prefetch=True, prefetch_bytes=10**6
    )
    assert unlimited.gathered == 4 * 220
    unsharded = bytes_per_rank(
        buckets, placement("optim_grads"), element_bytes=BF16_GRADIENTS, overlap=False
    )
    assert (unsharded.gathered, unsharded.reducing) == (0, 2 * 150)
    assert bytes_per_rank(buckets, placement("optim"), element_bytes=FP32).reducing == 0


def volume(traffic: list[Traffic], ranks: int) -> Fraction:
    """Return the bytes a rank sends with ring algorithms; an all-reduce takes two rounds."""
    rounds = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
    return sum(Fraction(t.bytes * rounds[t.kind] * (ranks - 1), ranks) for t in traffic)


def test_traffic_volumes_match_published_values():
    # Rajbhandari et al. 2020, section 7: 2, 2, 2 and 3 times the parameters.
    ranks, numel = 4, 64
    buckets = [BucketSize(numel=numel // 2, inner=ranks)] * 2
    for strategy, factor in zip(STRATEGIES, (2, 2, 2, 3), strict=True):
        gathers = (2, 2) if strategy == "optim_grads_params" else None
        traffic = collectives_per_step(
            buckets, placement(strategy), element_bytes=FP32, microbatches=1, gathers=gathers
        )
        assert volume(traffic, ranks) == Fraction(factor * 4 * numel * (ranks - 1), ranks), strategy


def test_sharded_gradients_are_reduced_every_microbatch():
    buckets = [BucketSize(numel=8, inner=2), BucketSize(numel=4, inner=2, trainable=False)]

    def traffic(strategy: str, **options: object) -> list[Traffic]:
        return collectives_per_step(
            buckets,
            placement(strategy),
            element_bytes=options.pop("element_bytes", BF16_GRADIENTS),
            microbatches=3,
            **options,
        )

    assert traffic("no_shard") == [Traffic("all_reduce", "dense_dp", 1, 16)]
    assert traffic("optim") == [
        Traffic("all_gather", "dense_dp", 1, 16),
        Traffic("reduce_scatter", "dense_dp", 1, 16),
    ]
    assert traffic("optim_grads") == [
        Traffic("all_gather", "dense_dp", 1, 16),
        Traffic("reduce_scatter", "dense_dp", 3, 48),
    ]
    assert traffic("optim_grads_params", gathers=(5, 6), element_bytes=FP32_SUM) == [
        Traffic("all_gather", "shard_gather", 11, 5 * 16 + 6 * 8),
        Traffic("all_to_all", "dense_dp", 3, 48),
    ]


def test_hybrid_sharding_reduces_over_outer_ranks_once():
    buckets = [BucketSize(numel=8, inner=2, outer=2)]

    def traffic(strategy: str, outer: str = "no_shard") -> list[Traffic]:
        parameter_placement = placement(strategy, outer)
        return collectives_per_step(
            buckets, parameter_placement, element_bytes=FP32, microbatches=2, gathers=(2,)
        )

    assert traffic("optim_grads") == [
        Traffic("all_gather", "shard", 2, 64),
        Traffic("all_reduce", "replicate", 1, 16),
        Traffic("reduce_scatter", "shard", 2, 64),
    ]
    assert traffic("optim_grads_params", "optim") == [
        Traffic("all_gather", "replicate", 1, 16),
        Traffic("all_gather", "shard_gather", 2, 64),
        Traffic("reduce_scatter", "replicate", 1, 16),
        Traffic("reduce_scatter", "shard", 2, 64),
    ]


def test_gtp_traffic_uses_gtp_groups_and_encoded_bytes():
    """Two gtp ranks shard each weight, with three replicas; bf16, four microbatches."""
    dense = BucketSize(numel=6, inner=6)
    encoded = BlockSize(numel=64, encoded=(40, 48), amax=True)
    frozen = BlockSize(numel=32, encoded=(20,), amax=True, trainable=False)
    gtp_matrices = BucketSize(numel=96, inner=2, outer=3, gtp=True, blocks=(encoded, frozen))
    expert = BucketSize(numel=16, inner=2, outer=3, gtp=True, expert=True)
    idle = BucketSize(numel=8, inner=2, outer=3, gtp=True, expert=True, trainable=False)

    def traffic(strategy: str, **options: object) -> dict[tuple[str, str], tuple[int, int]]:
        traffic = collectives_per_step(
            [dense, gtp_matrices, expert, idle],
            placement(strategy),
            element_bytes=ElementBytes(weight=2, gradient=2, optimizer=12, **options),
            microbatches=4,
        )
        return {(x.kind, x.group): (x.count, x.bytes) for x in traffic}

    gathered = {
        ("all_gather", "gtp_gather"): (2, 40 + 48),
        ("all_gather", "egtp_gather"): (1, 2 * 16),
        ("all_reduce", "gtp_gather"): (1, 4),  # the trained weight's amax
    }
    updated = {
        ("all_gather", "dp_cp"): (1, 2 * 96 // 2),
        ("all_gather", "edp"): (1, 2 * 16 // 2),
        ("all_gather", "dense_dp"): (1, 2 * 6),
    }
    reduced = {
        ("reduce_scatter", "gtp"): (4, 4 * 2 * 64),
        ("reduce_scatter", "egtp"): (4, 4 * 2 * 16),
    }
    shards = {"dp_cp": 4 * 96 // 2, "edp": 4 * 16 // 2}  # fp32
    summed = {("all_reduce", group): (1, size) for group, size in shards.items()}
    scattered = {("reduce_scatter", group): (1, size) for group, size in shards.items()}
    dense_sum = {("all_reduce", "dense_dp"): (1, 2 * 6)}
    assert traffic("no_shard") == gathered | reduced | summed | dense_sum
    dense_scatter = {("reduce_scatter", "dense_dp"): (1, 2 * 6)}
    assert traffic("optim") == gathered | updated | reduced | scattered | dense_scatter
    every_microbatch = {
        key: (4, 4 * size) for key, (_, size) in (scattered | dense_scatter).items()
    }
    assert traffic("optim_grads") == gathered | updated | reduced | every_microbatch
    reduced_once = {key: (1, size // 4) for key, (_, size) in reduced.items()}
    assert (
        traffic("optim", gtp_once=True)
        == gathered | updated | reduced_once | scattered | dense_scatter
    )


def test_single_rank_sends_nothing():
    buckets = [BucketSize(numel=8, inner=1)]
    for strategy in STRATEGIES:
        parameter_placement = placement(strategy)
        assert not collectives_per_step(
            buckets, parameter_placement, element_bytes=FP32, microbatches=2, gathers=(2,)
        )
        assert buckets[0].placement(parameter_placement) == Placement(), (
            "unsharded under every strategy"
        )


def test_gathers_of_wrong_length_are_refused():
    buckets = [BucketSize(numel=8, inner=2)] * 2
    for gathers in ((1,), (1, 1, 1)):
        with pytest.raises(ValueError, match="argument 2"):
            collectives_per_step(
                buckets, placement("optim"), element_bytes=FP32, microbatches=1, gathers=gathers
            )
