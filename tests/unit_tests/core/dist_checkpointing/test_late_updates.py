# SPDX-License-Identifier: Apache-2.0
"""A save on several ranks is refused until the other ranks' weight updates have arrived."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointError,
    Coordinator,
    Solo,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.inputs import generator
from tests.support.ranks import run_ranks

CONFIG = GPTConfig(
    num_layers=1,
    hidden_size=8,
    vocab_size=16,
    attention=AttentionConfig(num_attention_heads=2, num_query_groups=1, kv_channels=4),
    mlp=MLPConfig(ffn_hidden_size=12),
)
#: The batch of the only step, one row per rank.
TOKENS = torch.randint(0, 16, (2, 9), generator=generator(6))


def save_early_and_late(rank: int, world: int, root: str) -> list[str]:
    """Train one step, save too early and then in time; return the errors of the early saves."""
    config = DataParallelConfig(strategy="optim", overlap_param_gather=True)
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    model = GPTModel(CONFIG, groups, seed=1, storage=config.storage())
    engine = DataParallel(model.store, groups, config=config)
    optimizer = Optimizer(engine.owned(), groups, config=OptimizerConfig(kind="sgd", clip_grad=0.0))
    chunks = weight_chunks(model.store)
    saver = AsyncSaver(f"{root}/background", chunks, coordinator=Coordinator.from_groups(groups))
    row = TOKENS[rank : rank + 1]
    engine.begin_step()
    loss, _ = model.loss(row[:, :-1], row[:, 1:], torch.full((1, 8), 1 / 16))
    engine.backward(loss, last=True)
    engine.finish()
    optimizer.step(0.5)
    engine.start_param_sync()
    coordinator, errors = Coordinator.from_groups(groups), []
    with pytest.raises(CheckpointError) as sync_error:
        save_checkpoint(root, 1, chunks, {}, coordinator=coordinator)
    errors.append(str(sync_error.value))
    with pytest.raises(ValueError, match="complete_weights") as async_error:
        saver.save(1, {})
    errors.append(str(async_error.value))
    engine.complete_weights()
    saver.save(1, {})
    save_checkpoint(root, 1, chunks, {}, coordinator=coordinator)
    saver.close()
    return errors


def test_save_is_refused_until_weights_are_complete(tmp_path: Path) -> None:
    for errors in run_ranks(save_early_and_late, 2, str(tmp_path)):
        assert all("complete_weights()" in error for error in errors)
        assert len(errors) == 2
    single = GPTModel(CONFIG, ProcessGroupCollection.single(), seed=1)
    parameters = list(single.parameters())
    loss, _ = single.loss(TOKENS[:, :-1], TOKENS[:, 1:], torch.full((2, 8), 1 / 16))
    loss.backward()
    torch.optim.SGD(parameters, lr=0.5).step()
    for root in (tmp_path, tmp_path / "background"):
        loaded = GPTModel(CONFIG, ProcessGroupCollection.single(), seed=2)
        folder = latest_checkpoint(root)
        assert folder is not None
        load_checkpoint(folder, weight_chunks(loaded.store), coordinator=Solo())
        for p, q in zip(loaded.parameters(), parameters, strict=True):
            assert float((p - q).detach().abs().max()) < 1e-6
