# SPDX-License-Identifier: Apache-2.0
"""Activations saved for backward: a cp rank saves 1/cp of the bytes of one process."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.models import GPTConfig, GPTModel
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
    """Return the bytes that a forward of the layers saves for backward, excluding weights."""
    group = groups["cp"]
    backend = dataclasses.replace(LOCAL, context_engine=engine)
    model = GPTModel(CONFIG, groups, backend=backend)
    layout = SequenceLayout.make(SequenceSharding.of(LENGTH, group.size), group.rank, rows=2)
    tokens = torch.randint(0, 50, (2, LENGTH), generator=generator(3))
    weights = {h.anchor.untyped_storage().data_ptr() for h in model.store.handles.values()}
    storages: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(record, lambda tensor: tensor):
        hidden = model(layout.local(tokens), layout=layout)
    assert hidden.requires_grad, "the graph must be alive, or addresses are reused"
    assert len(storages) > 10
    return sum(storages.values())


def on_rank(rank: int, world: int, engine: str) -> int:
    """Return the bytes that one rank saves."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    return saved_bytes(groups, engine)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("engine", ["p2p", "all_gather", "a2a"])
def test_cp_rank_saves_its_share_of_activations(engine, cp):
    single = saved_bytes(ProcessGroupCollection.single(), engine)
    max_bytes = max(run_ranks(on_rank, cp, engine))
    assert max_bytes <= 1.1 / cp * single
    assert max_bytes > 0.9 / cp * single, "too few bytes: some tensors were not counted"
