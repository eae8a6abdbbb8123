# SPDX-License-Identifier: Apache-2.0
"""Reads of boxes of stored chunks into tensors of any layout.

A read of a box reads only the blocks that overlap it, straight into the target if its layout
allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.boxes import Box, boxes_of_range, flat_index, intersect
from megatron.core.dist_checkpointing.manifest import StoredChunk, StoredFile
from megatron.core.dist_checkpointing.shard_file import ShardFile
from megatron.core.dist_checkpointing.tensor_memory import (
    DTYPES,
    Scratch,
    as_bytes,
    is_contiguous_cpu,
)

#: Scratch bytes for a block that is read in part: a multiple of every element size.
SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class ReadItem:
    """One copy of a load plan: a box in a stored chunk's coordinates, and its target view."""

    box: Box
    target: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkReadRequest:
    """A stored chunk of a named tensor, and the boxes to read from it."""

    name: str
    dtype: str
    chunk: StoredChunk
    read_items: Sequence[ReadItem]


def read_cost(request: ChunkReadRequest, block_bytes: int) -> float:
    """Return the cost of a request in blocks; a block that is read whole costs little."""
    itemsize = DTYPES[request.dtype].itemsize
    cost = 0.0
    for read_item in request.read_items:
        span = begin, end = _element_range(request.chunk.box.sizes, read_item.box)
        blocks = (end * itemsize - 1) // block_bytes - begin * itemsize // block_bytes + 1
        is_whole = _direct_bytes(read_item, span, request.dtype) is not None
        cost += 1 + blocks / (_WHOLE_BLOCKS if is_whole else 1)
    return cost


#: Number of whole blocks that are read in the time that one partial block takes.
_WHOLE_BLOCKS = 64


class ShardReader(ShardFile):
    """An open shard that reads boxes into tensors; see `ShardFile`.

    Args:
        path: the shard.
        file: the shard's entry in the manifest.
        block_bytes: bytes per digest.
        verify: whether to compare digests.
        scratch: buffer shared by the readers of one load.
        header_verified: whether the header's digest has already been compared.

    Raises:
        CheckpointError: the file is missing, has another size, or its header is damaged.
    """

    def __init__(
        self,
        path: Path,
        file: StoredFile,
        *,
        block_bytes: int,
        verify: bool,
        scratch: Scratch,
        header_verified: bool = False,
    ) -> None:
        super().__init__(
            path, file, block_bytes=block_bytes, verify=verify, header_verified=header_verified
        )
        self._scratch = scratch

    def read(self, request: ChunkReadRequest) -> None:
        """Fill all targets of `request`. Raises CheckpointError for a damaged or short file."""
        itemsize = DTYPES[request.dtype].itemsize
        spans = [
            _element_range(request.chunk.box.sizes, read_item.box)
            for read_item in request.read_items
        ]
        first_block = min(begin for begin, _ in spans) * itemsize // self.block_bytes
        last_byte = max(end for _, end in spans) * itemsize
        direct_targets = [
            _direct_bytes(read_item, span, request.dtype)
            for read_item, span in zip(request.read_items, spans, strict=True)
        ]
        chunk_bytes = request.chunk.end - request.chunk.begin
        start, stop = (element * itemsize for element in spans[0])
        for begin in range(first_block * self.block_bytes, last_byte, self.block_bytes):
            end = min(begin + self.block_bytes, chunk_bytes)
            if len(spans) == 1 and direct_targets[0] is not None and start <= begin and end <= stop:
                # The common case: one item covers the whole block, so read it in place.
                target = direct_targets[0][begin - start : end - start]
                self.read_bytes(request.name, request.chunk, begin, target)
            else:
                self._read_block(request, begin, end, spans, direct_targets)

    def _read_block(
        self,
        request: ChunkReadRequest,
        begin: int,
        end: int,
        spans: Sequence[tuple[int, int]],
        direct_targets: Sequence[memoryview | None],
    ) -> None:
        """Read the bytes [begin, end) of a stored chunk and copy them to the overlapping items."""
        itemsize = DTYPES[request.dtype].itemsize
        overlapping = [
            i for i, (a, b) in enumerate(spans) if a * itemsize < end and begin < b * itemsize
        ]
        if len(overlapping) == 1:
            start, stop = (element * itemsize for element in spans[overlapping[0]])
            target = direct_targets[overlapping[0]]
            if not self.verifies:  # nothing forces whole blocks
                begin, end = max(begin, start), min(end, stop)
            if target is not None and start <= begin and end <= stop:
                self.read_bytes(
                    request.name, request.chunk, begin, target[begin - start : end - start]
                )
                return
        if not self._has_overlap(request, begin, end, overlapping):
            return  # no item overlaps this block: it lies between the requested columns
        raw = self._scratch.take(min(SCRATCH_BYTES, end - begin))
        scratch = as_bytes(raw)
        for position, buffer in self.stream(request.name, request.chunk, (begin, end), scratch):
            elements = raw[: len(buffer)].view(DTYPES[request.dtype])
            begin_element = position // itemsize
            for box, common, read_item in _overlaps(
                request, begin_element, begin_element + len(elements), overlapping
            ):
                offset = flat_index(request.chunk.box.sizes, box.offsets) - begin_element
                source = elements[offset : offset + box.numel].view(box.sizes)
                read_item.target[common.seen_from(read_item.box.offsets).slices].copy_(
                    source[common.seen_from(box.offsets).slices]
                )

    def _has_overlap(
        self, request: ChunkReadRequest, begin: int, end: int, item_indices: Sequence[int]
    ) -> bool:
        """Return whether the bytes [begin, end) of a chunk overlap any item."""
        itemsize = DTYPES[request.dtype].itemsize
        return any(
            True for _ in _overlaps(request, begin // itemsize, end // itemsize, item_indices)
        )


def _overlaps(
    request: ChunkReadRequest, begin: int, end: int, item_indices: Sequence[int]
) -> Iterator[tuple[Box, Box, ReadItem]]:
    """Yield the overlaps of a request's items with the elements [begin, end) of its chunk.

    An overlap is (a contiguous box of the chunk, its intersection with an item, the item).
    """
    for box in boxes_of_range(request.chunk.box.sizes, begin, end):
        for i in item_indices:
            if common := intersect(box, request.read_items[i].box):
                yield box, common, request.read_items[i]


def _element_range(sizes: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return the smallest row-major element range of a tensor of `sizes` that covers `box`."""
    last_index = tuple(o + n - 1 for o, n in zip(*box, strict=True))
    return flat_index(sizes, box.offsets), flat_index(sizes, last_index) + 1


def _direct_bytes(read_item: ReadItem, span: tuple[int, int], dtype: str) -> memoryview | None:
    """Return the target's memory if stored bytes can be read straight into it, else None."""
    target = read_item.target
    is_contiguous_range = span[1] - span[0] == math.prod(read_item.box.sizes)
    if is_contiguous_range and is_contiguous_cpu(target) and target.dtype == DTYPES[dtype]:
        return as_bytes(target)
    return None
