# SPDX-License-Identifier: Apache-2.0
"""The state of hooks in checkpoints, when only some ranks have state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import Solo, StoreCoordinator, TensorChunk, save_checkpoint
from megatron.training import restore as module
from megatron.training.hooks import Progress, TrainingHooks


class TensorHooks(TrainingHooks):
    """Hooks whose state is one tensor, or empty."""

    def __init__(self, tensor):
        self.tensor = tensor

    def state_chunks(self):
        return [] if self.tensor is None else [chunk(self.tensor)]


def chunk(tensor):
    name = "experiment.kept/state"
    return TensorChunk(name=name, shape=(2,), offsets=(0,), tensor=tensor, replica_ranks=(0,))


@pytest.mark.parametrize("owner", [0, 1])
def test_hook_state_of_a_single_rank_is_loaded(owner, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_run", lambda *args, **options: Progress())
    folder = save_checkpoint(
        tmp_path, 1, [chunk(torch.tensor([3.0, 4.0]))], {}, coordinator=Solo(print)
    )
    store, messages = dist.HashStore(), []
    tensors = [torch.zeros(2) if rank == owner else None for rank in range(2)]

    def load(rank):
        coordinator = StoreCoordinator(store, rank, 2, timeout_seconds=4.0, say=messages.append)
        unused = dict.fromkeys(("optimizer", "window", "metadata"))
        experiments = SimpleNamespace(experiment=("kept",))
        return module.load_session(
            SimpleNamespace(
                run=SimpleNamespace(config=SimpleNamespace(experiments=experiments)),
                context=SimpleNamespace(coordinator=coordinator),
                model=SimpleNamespace(store=None),
                hooks=(TrainingHooks(), TensorHooks(tensors[rank])),
                **unused,
            ),
            folder,
        )

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(load, range(2))) == [Progress(), Progress()]
    assert tensors[owner].tolist() == [3.0, 4.0]
    assert messages == []
