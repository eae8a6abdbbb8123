# SPDX-License-Identifier: Apache-2.0
"""Pieces of logical tensors: what ranks hold, and the whole put together from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.core.weight_gather import WeightStore
from tests.support.inputs import generator

#: Of the noise that states start from.
_STATES = 7


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor of shape `shape`, starting at `offsets`.

    `holders` are the ranks that hold the same box, as far as this rank knows.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: torch.Tensor
    holders: tuple[int, ...] = ()


def weight_pieces(store: WeightStore) -> list[Piece]:
    """Return a copy of every piece of a logical weight that this rank holds."""
    found = []
    for handle in store.handles.values():
        for held in store.chunks(handle):
            found.append(Piece(held.name, held.shape, held.offsets, held.tensor.clone()))
    return found


def write_weights(store: WeightStore, logical: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's part of every weight from the logical ones."""
    for handle in store.handles.values():
        for held in store.chunks(handle):
            where = held.box.slices
            held.tensor.copy_(logical[held.name][where])
    for name, state in store.states.items():
        noise = torch.randn(state.shape, generator=generator(_STATES, *name.encode()))
        state.copy_(0.1 * noise)


def assembled(pieces: Iterable[Piece]) -> dict[str, torch.Tensor]:
    """Put logical tensors together from the pieces of all ranks.

    Raises:
        AssertionError: an element that no rank holds, one outside, or replicas that differ.
    """
    whole: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    for piece in pieces:
        tensor = whole.setdefault(piece.name, torch.zeros(piece.shape))
        seen = known.setdefault(piece.name, torch.zeros(piece.shape, dtype=torch.bool))
        stops = [o + n for o, n in zip(piece.offsets, piece.values.shape, strict=True)]
        if any(stop > size for stop, size in zip(stops, piece.shape, strict=True)):
            raise AssertionError(f"{piece.name} {piece.shape}: a piece of it ends at {stops}")
        where = tuple(slice(o, stop) for o, stop in zip(piece.offsets, stops, strict=True))
        again = seen[where]
        if not torch.equal(tensor[where][again], piece.values[again]):
            raise AssertionError(f"replicas of {piece.name} differ at {piece.offsets}")
        tensor[where] = piece.values
        seen[where] = True
    for name, seen in known.items():
        if not bool(seen.all()):
            raise AssertionError(f"{name}: {int((~seen).sum())} of {seen.numel()} held nowhere")
    return whole
