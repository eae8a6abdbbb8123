# SPDX-License-Identifier: Apache-2.0
"""Activations kept for backward: a rank of cp keeps a cp-th of what one process keeps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.inputs import generator
from tests.support.ranks import run_ranks

LENGTH = 512
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=48,
    vocab_size=50,
    attention=AttentionConfig(num_attention_heads=8, num_query_groups=4, kv_channels=6),
    mlp=MLPConfig(ffn_hidden_size=96),
)


def saved_bytes(groups: ProcessGroupCollection, engine: str) -> int:
    """Return the bytes that a forward of the layers saves, weights aside."""
    group = groups["cp"]
    backend = dataclasses.replace(LOCAL, context_engine=engine)
    model = GPTModel(CONFIG, groups, backend=backend)
    layout = SequenceLayout.make(SequenceSharding.of(LENGTH, group.size), group.rank, rows=2)
    tokens = torch.randint(0, 50, (2, LENGTH), generator=generator(3))
    weights = {h.anchor.untyped_storage().data_ptr() for h in model.store.handles.values()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(layout.local(tokens), layout=layout)
    assert hidden.requires_grad, "the graph must be alive, or addresses are used twice"
    assert len(kept) > 10
    return sum(kept.values())


def on_rank(rank: int, world: int, engine: str) -> int:
    """Return what one rank keeps."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    return saved_bytes(groups, engine)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("engine", ["p2p", "all_gather", "a2a"])
def test_a_rank_keeps_its_part_of_the_activations(engine, cp):
    alone = saved_bytes(ProcessGroupCollection.single(), engine)
    most = max(run_ranks(on_rank, cp, engine))
    assert most <= 1.1 / cp * alone
    assert most > 0.9 / cp * alone, "so little that something was not counted"
