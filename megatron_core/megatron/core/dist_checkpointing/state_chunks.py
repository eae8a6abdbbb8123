# SPDX-License-Identifier: Apache-2.0
"""The chunks of a run's state: views of the memory of a model and its optimizer, by logical name.

    >>> chunks = weight_chunks(model.store)
    >>> folder = save_checkpoint(root, 100, chunks, {}, coordinator=Solo())
    >>> loaded = load_checkpoint(latest_checkpoint(root), chunks)

Tensors have logical names, so any layout loads a checkpoint of any other. A weight keeps its name;
its optimizer state is `optimizer.KIND/WEIGHT`. Optimizer state that belongs to no weight, such as
the number of updates, is a tensor [] called `optimizer.NAME`. After loading, call
`Optimizer.after_load` of an optimizer over the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from megatron.core.boxes import TensorChunk
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import OwnedRange, WeightStore


class StateRange(Protocol):
    """An optimizer's state for one range of weights."""

    @property
    def owned(self) -> OwnedRange:
        """The range."""
        ...

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the flat tensors [k] of the range by kind."""
        ...


class RangedOptimizer(Protocol):
    """An optimizer over ranges, such as `megatron.core.optimizer.Optimizer`."""

    @property
    def ranges(self) -> Sequence[StateRange]:
        """The optimizer's state, one entry per range."""
        ...

    @property
    def groups(self) -> ProcessGroupCollection:
        """The groups of the ranks that train together."""
        ...

    def scalars(self) -> Mapping[str, torch.Tensor]:
        """Return the state that belongs to no weight: tensors [] by name, equal on all ranks."""
        ...


def weight_chunks(store: WeightStore) -> list[TensorChunk]:
    """List this rank's boxes of logical weights, and its states, as views of its memory.

    Args:
        store: the model's weights. With overlapped gathers, call `DataParallel.complete_weights()`
            before each save. Otherwise updates by other ranks may be pending, and the save is
            refused.
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
    return states + [c for handle in store.handles.values() for c in store.chunks(handle)]


def optimizer_chunks(optimizer: RangedOptimizer, *, scalars: bool = True) -> list[TensorChunk]:
    """List this rank's boxes of optimizer state, as views of its memory.

    Args:
        scalars: whether to include the state that belongs to no weight: the number of updates, and
            the state of a dynamic loss scaler. Pass False if it is stored elsewhere.
    """
    chunks = [
        TensorChunk(
            name=f"optimizer.{kind}/{weight_box.name}",
            shape=weight_box.shape,
            offsets=weight_box.box.offsets,
            tensor=weight_box.of(flat),
            replica_ranks=weight_box.replica_ranks,
        )
        for state in optimizer.ranges
        for kind, flat in state.named_tensors().items()
        for weight_box in state.owned.boxes
    ]
    ranks = tuple(sorted(optimizer.groups["world"].ranks))
    for name, tensor in optimizer.scalars().items() if scalars else ():
        chunks.append(
            TensorChunk(
                name=f"optimizer.{name}",
                shape=(),
                offsets=(),
                tensor=tensor,
                replica_ranks=ranks,
                if_missing=_NO_SCALARS,
            )
        )
    return chunks


#: Advice for a checkpoint without the optimizer state that belongs to no weight.
_NO_SCALARS = (
    "load optimizer_chunks(optimizer, scalars=False) instead, and give the number of updates "
    "that had been applied: optimizer.after_load(with_state=True, steps=...)"
)
