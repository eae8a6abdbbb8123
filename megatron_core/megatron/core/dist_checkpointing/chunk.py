# SPDX-License-Identifier: Apache-2.0
"""TensorChunk: a box of a logical tensor that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.boxes import Box

if TYPE_CHECKING:
    import torch

#: Separates the logical name from the offsets in a file's keys.
OFFSET_MARK = "@"


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorChunk:
    """Say which elements of which logical tensor a local tensor holds.

    Names, shapes and offsets are those of the logical, unpadded, unfused tensor, so that a
    checkpoint says nothing about the grid it was saved on. Padding is no chunk.

    Args:
        name: logical name, without "@" and control characters.
        shape: shape of the whole logical tensor.
        offsets: where the box starts in it.
        tensor: the box itself, [*sizes]: any strides, dtype and device. Loading writes into it.
        replica_ranks: ascending global ranks that hold an identical copy, this one included.
        pieces: for saving what is too large for memory: called once, it yields the box's bytes in
            row-major order, each piece valid until the next; `tensor` then lies on the meta device
            and says shape and dtype only.

    Attribute `box` is the box in logical coordinates.

    Raises:
        ValueError: the box does not lie inside `shape`, or a name or a rank is impossible.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    replica_ranks: tuple[int, ...]
    pieces: Callable[[], Iterator[memoryview]] | None = None
    box: Box = field(init=False)

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or OFFSET_MARK in self.name:
            raise ValueError(
                f"tensor name {self.name!r} must be printable, not empty and without "
                f"{OFFSET_MARK!r}: rename the parameter"
            )
        sizes = tuple(self.tensor.shape)
        inside = len(self.shape) == len(self.offsets) == len(sizes) and all(
            offset >= 0 and offset + size <= whole
            for offset, size, whole in zip(self.offsets, sizes, self.shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"chunk of {self.name}: a box of sizes {list(sizes)} at {list(self.offsets)} does "
                f"not lie inside the logical shape {list(self.shape)}"
            )
        ranks = self.replica_ranks
        if not ranks or ranks[0] < 0 or list(ranks) != sorted(set(ranks)):
            raise ValueError(
                f"chunk of {self.name}: replica_ranks {list(ranks)} must be ascending, distinct "
                "global ranks, this rank included"
            )
        object.__setattr__(self, "box", Box(tuple(self.offsets), sizes))


def chunk_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the key of a chunk in its safetensors file: the name, and the offsets of a part.

    A tensor stored whole has its plain name, so any safetensors reader finds it under that.
    """
    if box.sizes == shape:
        return name
    return name + OFFSET_MARK + ",".join(map(str, box.offsets))
