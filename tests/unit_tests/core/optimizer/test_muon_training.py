# SPDX-License-Identifier: Apache-2.0
"""A tied GPT trained by Muon: faster than by SGD, and alike on four ranks and on one."""

from __future__ import annotations

import pytest
import torch

from megatron.core.comm import all_reduce
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.optimizer import MuonConfig, Optimizer, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from megatron.core.weight_sharding import loss_factor
from tests.support.inputs import generator
from tests.support.ranks import run_ranks

VOCABULARY, SEQUENCE, BATCH = 29, 12, 4
MUON = OptimizerConfig(kind="muon", muon=MuonConfig(scale_mode="rms"))


def gpt_config() -> GPTConfig:
    """Return two tied layers with one kv head for two query heads."""
    return GPTConfig(
        vocab_size=VOCABULARY,
        num_layers=2,
        hidden_size=20,
        attention=AttentionConfig(num_attention_heads=2, num_query_groups=1, kv_channels=10),
        mlp=MLPConfig(ffn_hidden_size=36, gated=True, activation="silu"),
        norm=NormConfig(kind="RMSNorm"),
        tied=True,
    )


def text(lane: int, step: int) -> torch.Tensor:
    """Return tokens [b, s + 1] of which each mostly follows from the one before it."""
    source = generator(8, lane, step)
    columns = [torch.randint(0, VOCABULARY, (BATCH,), generator=source)]
    for _ in range(SEQUENCE):
        noise = torch.rand(BATCH, generator=source) < 0.05
        columns.append((columns[-1] * 7 + 3 + noise) % VOCABULARY)
    return torch.stack(columns, 1)


def train(
    groups: ProcessGroupCollection,
    config: OptimizerConfig,
    *,
    lr: float,
    steps: int,
    lanes: tuple[int, ...],
    parallel: DataParallelConfig | None = None,
) -> list[float]:
    """Return the mean loss of every step over all lanes."""
    parallel = parallel or DataParallelConfig()
    model = GPTModel(gpt_config(), groups, seed=4, storage=parallel.storage(bucket_bytes=9000))
    engine = DataParallel(model.store, groups, config=parallel)
    weights = [handle.sharding for handle in model.store.handles.values()]
    optimizer = Optimizer(engine.owned(), groups, config=config, weights=weights)
    found = []
    for step in range(steps):
        engine.begin_step(len(lanes))
        total = torch.zeros(())
        for lane in lanes:
            tokens = text(lane, step)
            factor = loss_factor(groups.grid, len(lanes)) / (BATCH * SEQUENCE)
            shares = torch.full((BATCH, SEQUENCE), factor)
            loss, _ = model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), shares)
            engine.backward(loss, last=lane == lanes[-1])
            total += loss.detach()
        engine.finish()
        assert optimizer.step(lr=lr, weight_decay=0.01).applied
        engine.start_param_sync()
        found.append(float(all_reduce(total, groups["dense_dp"])))
    return found


def test_muon_loss_decreases_faster_than_sgd():
    groups = ProcessGroupCollection.single()
    given = {"steps": 30, "lanes": (0,)}
    muon = train(groups, MUON, lr=0.02, **given)
    sgd = [
        train(groups, OptimizerConfig(kind="sgd", sgd_momentum=0.9), lr=lr, **given)
        for lr in (0.1, 0.3, 1.0)
    ]
    assert muon[-1] < min(one[-1] for one in sgd) - 0.3


def four_ranks(rank: int, world: int) -> list[list[float]]:
    found = []
    for strategy in ("optim", "optim_grads_params"):
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=2), rank=rank)
        lane = groups.coordinates["dp"]
        parallel = DataParallelConfig(strategy=strategy)
        found.append(train(groups, MUON, lr=0.02, steps=5, lanes=(lane,), parallel=parallel))
    return found


def test_four_ranks_train_as_one_does():
    wanted = train(ProcessGroupCollection.single(), MUON, lr=0.02, steps=5, lanes=(0, 1))
    assert wanted[-1] < wanted[0] - 0.3
    for found in run_ranks(four_ranks, 4):
        for losses in found:
            assert losses == pytest.approx(wanted, rel=1e-5)
