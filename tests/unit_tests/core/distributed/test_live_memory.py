# SPDX-License-Identifier: Apache-2.0
"""Bytes per parameter of every strategy, counted over the live storages of a rank of 24 layers."""

from __future__ import annotations

import gc
from fractions import Fraction

import torch

from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.distributed.formulas import (
    BucketSize,
    ElementBytes,
    bytes_per_parameter,
    bytes_per_rank,
)
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
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
    """Return a model of 24 units beside the vocabularies."""
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


def measured(
    groups: ProcessGroupCollection, config: DataParallelConfig, dtype: torch.dtype
) -> dict[str, float]:
    """Train two steps, the second by planned gathers; return bytes per parameter by owner."""
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
    state = [t for one in optimizer.ranges for t in one.named_tensors().values()]
    found = live_bytes(
        {
            "weights": [bucket.data for bucket in model.store.buckets],
            "gradients": [owned.gradients for owned in engine.owned()],
            "optimizer": state,
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
        **{owner: size / parameters for owner, size in found.items()},
        "counted": sum(found.values()) / parameters,
        "formula": float(Fraction(formula)),
    }


def all_strategies(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Measure every strategy in both precisions."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    found = {}
    for strategy in STRATEGIES:
        for dtype in ELEMENTS:
            config = DataParallelConfig(strategy=strategy)
            found[f"{strategy} {dtype}"] = measured(groups, config, dtype)
            gc.collect()
    return found


def hybrid(rank: int, world: int) -> dict[str, dict[str, float]]:
    """Measure both kinds of hybrid sharding."""
    grid = RankGrid(world_size=world, instances=2)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    found = {}
    for outer in ("no_shard", "optim"):
        config = DataParallelConfig(strategy="optim_grads_params", outer=outer)
        found[outer] = measured(groups, config, torch.float32)
    return found


def assert_by_formula(ranks: list[dict[str, dict[str, float]]]) -> None:
    """Hold what was counted to the formula, and to the owners alone."""
    for found in ranks:
        for case, bytes_each in found.items():
            error = bytes_each["counted"] / bytes_each["formula"] - 1
            assert abs(error) <= TOLERANCE, (case, bytes_each)
            assert bytes_each[UNOWNED] <= 0.01 * bytes_each["formula"], (case, bytes_each)


def test_bytes_per_parameter_are_those_of_the_formula():
    assert_by_formula(run_ranks(all_strategies, 2))


def test_bytes_per_parameter_under_hybrid_sharding():
    assert_by_formula(run_ranks(hybrid, 4))


def test_live_storages_count_views_once_and_see_what_nobody_owns():
    before = live_storages()
    own, stray = torch.zeros(1000), torch.zeros(10)
    view = own[5:].view(-1, 5)
    found = live_bytes({"own": [view]}, before=before)
    assert found == {"own": 4000, UNOWNED: stray.nbytes}
    del view, stray
    assert live_bytes({"own": [own]}, before=before) == {"own": 4000, UNOWNED: 0}
