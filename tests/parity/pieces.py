# SPDX-License-Identifier: Apache-2.0
"""Chunks of logical tensors that ranks hold, and assembly of whole tensors from chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.core.weight_gather import WeightStore
from tests.support.inputs import generator

#: Seed of the noise in initial states.
_STATES = 7


@dataclass(frozen=True)
class LogicalChunk:
    """A box of a logical tensor of shape `shape`, starting at `offsets`.

    `holders` are the ranks with the same box, according to this rank.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: torch.Tensor
    holders: tuple[int, ...] = ()


def local_chunks(store: WeightStore) -> list[LogicalChunk]:
    """Return a copy of every chunk of a logical weight on this rank."""
    chunks = []
    for handle in store.handles.values():
        for chunk in store.chunks(handle):
            chunks.append(
                LogicalChunk(chunk.name, chunk.shape, chunk.offsets, chunk.tensor.clone())
            )
    return chunks


def write_weights(store: WeightStore, logical: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's chunk of every weight from the logical weights."""
    for handle in store.handles.values():
        for chunk in store.chunks(handle):
            where = chunk.box.slices
            chunk.tensor.copy_(logical[chunk.name][where])
    for name, state in store.states.items():
        noise = torch.randn(state.shape, generator=generator(_STATES, *name.encode()))
        state.copy_(0.1 * noise)


def assembled(chunks: Iterable[LogicalChunk]) -> dict[str, torch.Tensor]:
    """Assemble logical tensors from the chunks of all ranks.

    Raises:
        AssertionError: if an element is missing or out of bounds, or replicas differ.
    """
    whole: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        tensor = whole.setdefault(chunk.name, torch.zeros(chunk.shape))
        mask = covered.setdefault(chunk.name, torch.zeros(chunk.shape, dtype=torch.bool))
        stops = [o + n for o, n in zip(chunk.offsets, chunk.values.shape, strict=True)]
        if any(stop > size for stop, size in zip(stops, chunk.shape, strict=True)):
            raise AssertionError(f"{chunk.name} {chunk.shape}: a chunk ends at {stops}")
        box = tuple(slice(o, stop) for o, stop in zip(chunk.offsets, stops, strict=True))
        overlap = mask[box]
        if not torch.equal(tensor[box][overlap], chunk.values[overlap]):
            raise AssertionError(f"replicas of {chunk.name} differ at {chunk.offsets}")
        tensor[box] = chunk.values
        mask[box] = True
    for name, mask in covered.items():
        if not bool(mask.all()):
            raise AssertionError(f"{name}: {int((~mask).sum())} of {mask.numel()} held nowhere")
    return whole
