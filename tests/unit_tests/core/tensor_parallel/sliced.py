# SPDX-License-Identifier: Apache-2.0
"""The same layers on the ranks of a tp group and in a single process, compared piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.core.distributed import DataParallel
from megatron.core.process_groups import Group, ProcessGroupCollection
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.weight_gather import WeightStore
from tests.support.closeness import assert_all_close

SEED = 17


@dataclass
class Side:
    """A store with its layers, on some groups."""

    groups: ProcessGroupCollection
    store: WeightStore
    region: TensorParallelRegion
    layers: dict[str, torch.nn.Module]
    engine: DataParallel

    @property
    def tp(self) -> Group:
        return self.groups["tp"]


Build = Callable[[WeightStore, TensorParallelRegion], dict[str, torch.nn.Module]]


def side(groups: ProcessGroupCollection, build: Build, *, sequence_parallel: bool = False) -> Side:
    """Build layers on `groups`; initial values are those of the logical weights, biases too."""
    store = WeightStore(groups, seed=SEED)
    region = TensorParallelRegion(groups["tp"], sequence_parallel)
    layers = build(store, region)
    store.materialize()
    for handle in store.handles.values():
        if handle.name.endswith(".bias"):  # zeros hide a bias that is added once per rank
            for box in store.boxes(handle):
                place = torch.arange(box.offsets[0], box.offsets[0] + box.numel)
                handle.get().view(-1)[box.start : box.start + box.numel] = 0.3 + torch.sin(place)
    return Side(groups, store, region, layers, DataParallel(store, groups))


def run_step(one: Side, loss: torch.Tensor) -> None:
    """Run backward through the engine, so that gradients are whole afterwards."""
    one.engine.begin_step()
    for handle in one.store.handles.values():
        handle.main_grad.fill_(torch.nan)
    one.engine.backward(loss, last=True)
    one.engine.finish()


def gradients(one: Side) -> dict[str, torch.Tensor]:
    """Return this rank's pieces of the logical gradients by name and place."""
    found = {}
    for handle in one.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in one.store.boxes(handle):
            piece = flat[box.start : box.start + box.numel].view(box.sizes)
            found[f"{box.name} at {box.offsets} of {box.sizes}"] = piece
    return found


def assert_gradients_agree(parallel: Side, whole: Side) -> None:
    """Fail unless every piece of this rank is the slice of the single process's gradient."""
    logical = {}
    for handle in whole.store.handles.values():
        flat = handle.main_grad.view(-1)
        for box in whole.store.boxes(handle):
            piece = flat[box.start : box.start + box.numel].view(box.sizes)
            logical[box.name] = piece
    wanted = {}
    for handle in parallel.store.handles.values():
        for box in parallel.store.boxes(handle):
            piece = logical[box.name]
            for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                piece = piece.narrow(dim, first, size)
            wanted[f"{box.name} at {box.offsets} of {box.sizes}"] = piece
    if wanted:
        assert_all_close(gradients(parallel), wanted, bound=2e-6)


def padding(one: Side, name: str) -> torch.Tensor:
    """Return which elements of a local weight are padding, a mask of its shape."""
    handle = one.store.handles[name]
    mask = torch.ones(handle.shape, dtype=torch.bool)
    for box in one.store.boxes(handle):
        mask.view(-1)[box.start : box.start + box.numel] = False
    return mask


def own_sequence(x: torch.Tensor, one: Side) -> torch.Tensor:
    """Return what this rank holds of [s, b, h] outside the blocks: all, or its rows with sp."""
    return x.chunk(one.tp.size)[one.tp.rank] if one.region.scatters else x
