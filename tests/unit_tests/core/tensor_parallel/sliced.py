# SPDX-License-Identifier: Apache-2.0
"""Build the same layers on a tp group and in a single process, and compare their shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.core import Group, ProcessGroupCollection
from megatron.core.distributed import DataParallel
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.weight_gather import WeightStore
from tests.support.closeness import assert_all_close

SEED = 17


@dataclass
class ModelUnderTest:
    """Layers with their weight store and engine on one set of process groups."""

    groups: ProcessGroupCollection
    store: WeightStore
    region: TensorParallelRegion
    layers: dict[str, torch.nn.Module]
    engine: DataParallel

    @property
    def tp(self) -> Group:
        return self.groups["tp"]


Build = Callable[[WeightStore, TensorParallelRegion], dict[str, torch.nn.Module]]


def build_model(
    groups: ProcessGroupCollection, build: Build, *, sequence_parallel: bool = False
) -> ModelUnderTest:
    """Build layers on `groups`, initialized from the logical weights, biases included."""
    store = WeightStore(groups, seed=SEED)
    region = TensorParallelRegion(groups["tp"], sequence_parallel)
    layers = build(store, region)
    store.materialize()
    for handle in store.handles.values():
        if handle.name.endswith(".bias"):  # a zero bias would hide that every rank adds it
            for box in store.boxes(handle):
                index = torch.arange(box.offsets[0], box.offsets[0] + box.numel)
                handle.get().view(-1)[box.start : box.start + box.numel] = 0.3 + torch.sin(index)
    return ModelUnderTest(groups, store, region, layers, DataParallel(store, groups))


def run_step(model: ModelUnderTest, loss: torch.Tensor) -> None:
    """Run backward through the engine, which reduces the gradients."""
    model.engine.begin_step()
    for handle in model.store.handles.values():
        handle.main_grad.fill_(torch.nan)
    model.engine.backward(loss, last=True)
    model.engine.finish()


def gradient_shards(model: ModelUnderTest) -> dict[str, torch.Tensor]:
    """Return this rank's shards of the logical gradients by name, offsets and sizes."""
    shards = {}
    for handle in model.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in model.store.boxes(handle):
            shard = flat[box.start : box.start + box.numel].view(box.sizes)
            shards[f"{box.name} at {box.offsets} of {box.sizes}"] = shard
    return shards


def assert_gradients_match(parallel: ModelUnderTest, single: ModelUnderTest) -> None:
    """Fail unless every gradient shard of this rank matches the single-process gradient."""
    logical = {}
    for handle in single.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in single.store.boxes(handle):
            shard = flat[box.start : box.start + box.numel].view(box.sizes)
            logical[box.name] = shard
    expected = {}
    for handle in parallel.store.handles.values():
        for box in parallel.store.boxes(handle):
            shard = logical[box.name]
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                shard = shard.narrow(dim, offset, size)
            expected[f"{box.name} at {box.offsets} of {box.sizes}"] = shard
    if expected:
        assert_all_close(gradient_shards(parallel), expected, bound=2e-6)


def padding(model: ModelUnderTest, name: str) -> torch.Tensor:
    """Return a mask of the local weight's shape that is True for padding."""
    handle = model.store.handles[name]
    mask = torch.ones(handle.shape, dtype=torch.bool)
    for box in model.store.boxes(handle):
        mask.view(-1)[box.start : box.start + box.numel] = False
    return mask


def local_sequence(x: torch.Tensor, model: ModelUnderTest) -> torch.Tensor:
    """Return the rows of x [s, b, h] on this rank: all, or its shard with sequence parallelism."""
    return x.chunk(model.tp.size)[model.tp.rank] if model.region.scatters else x
