# SPDX-License-Identifier: Apache-2.0
"""Bytes per parameter of every strategy, counted over live storages of a 24-layer model."""

from __future__ import annotations

import gc
from fractions import Fraction

import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import (
    BucketSize,
    ElementBytes,
    bytes_per_parameter,
    bytes_per_rank,
)
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.transformer import AttentionConfig, MLPConfig
from megatron.core.weight_sharding import STRATEGIES
from tests.support.gatherers import gatherer_of
from tests.support.inputs import microbatch
from tests.support.live_memory import UNOWNED, live_bytes, live_storages
from tests.support.ranks import run_ranks

LAYERS, HIDDEN, VOCABULARY = 24, 48, 96
TOLERANCE = 0.03
ELEMENTS = {
    torch.float32: ElementBytes(),
    torch.bfloat16: ElementBytes(weight=2, optimizer=12),
}


def gpt(groups: ProcessGroupCollection, config: DataParallelConfig, dtype: torch.dtype) -> GPTModel:
    """Return a model of 24 units plus embedding and head."""
    return GPTModel(
        GPTConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            vocab_size=VOCABULARY,
            attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=12),
            mlp=MLPConfig(ffn_hidden_size=112),
        ),
        groups,
        dtype=dtype,
        storage=config.storage(bucket_bytes=200_000),
    )


def measure(
    groups: ProcessGroupCollection, config: DataParallelConfig, dtype: torch.dtype
) -> dict[str, float]:
    """Train two steps, the second with planned gathers; return bytes per parameter by owner."""
    before = live_storages()
    model = gpt(groups, config, dtype)
    engine = DataParallel(model.store, groups, config=config)
    optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig())
    for index in range(2):
        batch = microbatch(
            seed=1,
            dp_rank=groups["dense_dp"].rank,
            index=index,
            batch=1,
            sequence=8,
            vocabulary=VOCABULARY,
        )
        engine.begin_step()
        loss, _ = model.loss(batch.tokens, batch.labels, batch.loss_mask / 16)
        engine.backward(loss, last=True)
        engine.finish()
        optimizer.step(1e-3)
        engine.start_param_sync()
    gathered = 0
    if gatherer_of(engine) is not None:
        assert gatherer_of(engine).counts.mismatches == 0
        gathered = gatherer_of(engine).counts.peak_bytes
        gatherer_of(engine).pool.trim()
        sizes = [BucketSize.of(bucket) for bucket in model.store.buckets]
        planned = bytes_per_rank(sizes, engine.placement, element_bytes=ELEMENTS[dtype]).gathered
        assert gathered <= planned
        assert (gathered > 0) == (config.strategy == "optim_grads_params")
    engine.pool.trim()
    del loss
    optimizer_state = [
        t for range_state in optimizer.ranges for t in range_state.named_tensors().values()
    ]
    bytes_by_owner = live_bytes(
        {
            "weights": [bucket.data for bucket in model.store.buckets],
            "gradients": [owned.gradients for owned in engine.owned()],
            "optimizer": optimizer_state,
        },
        before=before,
    )
    parameters = model.store.num_parameters
    formula = bytes_per_parameter(
        config.strategy,
        config.outer,
        inner_size=groups["shard"].size,
        outer_size=groups["replicate"].size,
        element_bytes=ELEMENTS[dtype],
    )
    assert len(model.store.buckets) >= LAYERS or not engine.placement.weight
    return {
        **{owner: size / parameters for owner, size in bytes_by_owner.items()},
        "counted": sum(bytes_by_owner.values()) / parameters,
        "formula": float(Fraction(formula)),
    }


def measure_all_strategies(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Measure every strategy in both precisions."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    measurements = {}
    for strategy in STRATEGIES:
        for dtype in ELEMENTS:
            config = DataParallelConfig(strategy=strategy)
            measurements[f"{strategy} {dtype}"] = measure(groups, config, dtype)
            gc.collect()
    return measurements


def measure_hybrid(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Measure both kinds of hybrid sharding."""
    grid = RankGrid(world_size=world, instances=2)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    measurements = {}
    for outer in ("no_shard", "optim"):
        config = DataParallelConfig(strategy="optim_grads_params", outer=outer)
        measurements[outer] = measure(groups, config, torch.float32)
    return measurements


def assert_formula_holds(ranks: list[dict[str, dict[str, float]]]) -> None:
    """Compare the counted bytes with the formula; nearly all must have an owner."""
    for measurements in ranks:
        for case, bytes_by_owner in measurements.items():
            error = bytes_by_owner["counted"] / bytes_by_owner["formula"] - 1
            assert abs(error) <= TOLERANCE, (case, bytes_by_owner)
            assert bytes_by_owner[UNOWNED] <= 0.01 * bytes_by_owner["formula"], (
                case,
                bytes_by_owner,
            )


def test_bytes_per_parameter_match_the_formula():
    assert_formula_holds(run_ranks(measure_all_strategies, 2))


def test_hybrid_bytes_per_parameter_match_the_formula():
    assert_formula_holds(run_ranks(measure_hybrid, 4))


def test_live_bytes_count_views_once_and_report_unowned():
    before = live_storages()
    owned, stray = torch.zeros(1000), torch.zeros(10)
    view = owned[5:].view(-1, 5)
    bytes_by_owner = live_bytes({"own": [view]}, before=before)
    assert bytes_by_owner == {"own": 4000, UNOWNED: stray.nbytes}
    del view, stray
    assert live_bytes({"own": [owned]}, before=before) == {"own": 4000, UNOWNED: 0}
