# SPDX-License-Identifier: Apache-2.0
"""A tied GPT trained by Muon: its loss decreases faster than with SGD."""

from __future__ import annotations

import torch

from megatron.core import ProcessGroupCollection
from megatron.core.comm import all_reduce
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.optimizer import MuonConfig, Optimizer, OptimizerConfig
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig
from megatron.core.weight_sharding import loss_factor
from tests.support.inputs import generator

VOCABULARY, SEQUENCE, BATCH = 29, 12, 4
MUON = OptimizerConfig(kind="muon", muon=MuonConfig(scale_mode="rms"))


def gpt_config() -> GPTConfig:
    """Return a tied two-layer model with one kv head for two query heads."""
    return GPTConfig(
        vocab_size=VOCABULARY,
        num_layers=2,
        hidden_size=20,
        attention=AttentionConfig(num_attention_heads=2, num_query_groups=1, kv_channels=10),
        mlp=MLPConfig(ffn_hidden_size=36, gated=True, activation="silu"),
        norm=NormConfig(kind="RMSNorm"),
        tied=True,
    )


def text(dp_rank: int, step: int) -> torch.Tensor:
    """Return tokens [b, s + 1]; each token is usually determined by the previous token."""
    source = generator(8, dp_rank, step)
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
    dp_ranks: tuple[int, ...],
    parallel: DataParallelConfig | None = None,
) -> list[float]:
    """Train; return the mean loss of every step over all data-parallel ranks."""
    parallel = parallel or DataParallelConfig()
    model = GPTModel(gpt_config(), groups, seed=4, storage=parallel.storage(bucket_bytes=9000))
    engine = DataParallel(model.store, groups, config=parallel)
    weights = [handle.sharding for handle in model.store.handles.values()]
    optimizer = Optimizer(engine.owned(), groups, config=config, weights=weights)
    losses = []
    for step in range(steps):
        engine.begin_step(len(dp_ranks))
        total = torch.zeros(())
        for dp_rank in dp_ranks:
            tokens = text(dp_rank, step)
            factor = loss_factor(groups.grid, len(dp_ranks)) / (BATCH * SEQUENCE)
            shares = torch.full((BATCH, SEQUENCE), factor)
            loss, _ = model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), shares)
            engine.backward(loss, last=dp_rank == dp_ranks[-1])
            total += loss.detach()
        engine.finish()
        assert optimizer.step(lr=lr, weight_decay=0.01).applied
        engine.start_param_sync()
        losses.append(float(all_reduce(total, groups["dense_dp"])))
    return losses


def test_muon_loss_decreases_faster_than_sgd():
    groups = ProcessGroupCollection.single()
    options = {"steps": 30, "dp_ranks": (0,)}
    muon = train(groups, MUON, lr=0.02, **options)
    sgd = [
        train(groups, OptimizerConfig(kind="sgd", sgd_momentum=0.9), lr=lr, **options)
        for lr in (0.1, 0.3, 1.0)
    ]
    assert muon[-1] < min(losses[-1] for losses in sgd) - 0.3
