# SPDX-License-Identifier: Apache-2.0
"""What a rank saves of a model and of its optimizer: chunks of logical tensors, views of memory.

    save_checkpoint(root, step, weight_chunks(model.store), {}, coordinator=Solo())
    load_checkpoint(latest_checkpoint(root), weight_chunks(other.store))

Tensors go by logical names, a weight under its own and optimizer state under
`optimizer.KIND/WEIGHT`, so what one layout saved another loads. After loading, an optimizer over
the weights has to be told: `Optimizer.after_load`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from megatron.core.dist_checkpointing.chunk import TensorChunk
from megatron.core.weight_gather import OwnedRange, WeightStore


class StateRange(Protocol):
    """The state of an optimizer for one range of weights."""

    @property
    def owned(self) -> OwnedRange:
        """The range."""

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the flat tensors [k] of the range by kind."""


class RangedOptimizer(Protocol):
    """An optimizer over ranges, such as `megatron.core.optimizer.Optimizer`."""

    @property
    def ranges(self) -> Sequence[StateRange]:
        """Its state, a range at a time."""


def weight_chunks(store: WeightStore) -> list[TensorChunk]:
    """List the boxes of logical weights, and the states, that this rank holds, as views of its
    memory.

    Args:
        store: of a model. Under a sharded optimizer, call `DataParallel.complete_weights()` before
            saving: other ranks' updates may not have arrived.
    """
    states = [
        TensorChunk(
            name=name,
            shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            tensor=tensor,
            replica_ranks=store.state_ranks,
        )
        for name, tensor in store.states.items()
    ]
    return states + [
        TensorChunk(
            name=held.box.name,
            shape=held.box.shape,
            offsets=held.box.offsets,
            tensor=held.tensor,
            replica_ranks=held.replica_ranks,
        )
        for handle in store.handles.values()
        for held in store.held(handle)
    ]


def optimizer_chunks(optimizer: RangedOptimizer) -> list[TensorChunk]:
    """List the boxes of optimizer state that this rank holds, as views of its memory."""
    return [
        TensorChunk(
            name=f"optimizer.{kind}/{placed.box.name}",
            shape=placed.box.shape,
            offsets=placed.box.offsets,
            tensor=placed.of(flat),
            replica_ranks=placed.replica_ranks,
        )
        for state in optimizer.ranges
        for kind, flat in state.named_tensors().items()
        for placed in state.owned.boxes
    ]
