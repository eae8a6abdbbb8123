# SPDX-License-Identifier: Apache-2.0
"""Shard files: writing and reading their tensors.

A read of boxes of tensors reads the blocks that it needs, straight to their destination. A shard is
written as a stream of small chunks, digested as they pass, synced at the end, without a second copy
of the tensors: a contiguous CPU tensor is written from its own memory, any other goes through one
scratch buffer chunk by chunk.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.boxes import Box, boxes_of_range, flat_index, intersect
from megatron.core.dist_checkpointing.dtypes import DTYPES
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import StoredChunk, StoredFile
from megatron.core.dist_checkpointing.planner import ShardPlan
from megatron.core.dist_checkpointing.shard_file import ShardFile
from megatron.core.dist_checkpointing.shard_format import PIECE_BYTES, BlockDigester, Output
from megatron.core.untrusted_files import open_to_write


def write_shard(path: Path, plan: ShardPlan, *, block_bytes: int, digests: bool) -> list[list[str]]:
    """Write a new file at `path` and return the digests of each chunk's blocks.

    Raises:
        CheckpointError: the file exists, or the disk is full, read-only or broken.
    """
    try:
        with open_to_write(path, "x", root=path.parent.parent) as file:
            output = Output(file.fileno())
            output.write(memoryview(plan.header))
            found = []
            scratch = torch.empty(0, dtype=torch.uint8)
            for chunk, planned in zip(plan.held, plan.chunks, strict=True):
                tensor = chunk.tensor.detach()
                if chunk.pieces is None and not _is_plain(tensor) and not scratch.numel():
                    scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)
                digester = BlockDigester(block_bytes)
                for piece in chunk.pieces() if chunk.pieces else _pieces(tensor, scratch):
                    if digests:
                        digester.update(piece)
                    output.write(piece)
                found.append(digester.finish())
                if output.position != planned.end:
                    raise CheckpointError(
                        f"{planned.name} ends at byte {output.position} of {path}, not at "
                        f"{planned.end}: its pieces do not fit its shape"
                    )
            os.fsync(file.fileno())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"cannot create {path}: its folder is gone, or is not on a file system that all ranks "
            "share"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path} ({plan.total_bytes} bytes): {error.strerror}; nothing was "
            "saved, earlier checkpoints are intact"
        ) from error
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, writable."""
    # A tensor of one element is contiguous whatever its strides; a byte view wants stride 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _pieces(tensor: torch.Tensor, scratch: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's elements in row-major order; each chunk is valid until the next."""
    if not tensor.numel():
        return
    if _is_plain(tensor):
        data = as_bytes(tensor)
        for begin in range(0, len(data), PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES]
        return
    for band in _bands(tensor, PIECE_BYTES // tensor.itemsize):
        target = scratch[: band.numel() * band.itemsize]
        target.view(band.dtype).view(band.shape).copy_(band)
        yield as_bytes(target)


def _bands(tensor: torch.Tensor, max_elements: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into views of at most `max_elements`, in row-major order."""
    if tensor.numel() <= max_elements:
        yield tensor
        return
    rows = max_elements // math.prod(tensor.shape[1:])
    if rows:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from _bands(row, max_elements)


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkPart:
    """A box, in the coordinates of a stored chunk, and the view that its elements go to."""

    box: Box
    target: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkRead:
    """A stored chunk of a named tensor, and everything that is wanted from it."""

    name: str
    dtype: str
    chunk: StoredChunk
    parts: Sequence[ChunkPart]


class Scratch:
    """One CPU buffer that all reads reuse, grown to the largest block seen."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, valid until the next call."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size]


class ShardReader(ShardFile):
    """An open shard whose boxes are read into tensors; see `ShardFile`.

    Args:
        path: the shard.
        file: what the manifest states about it.
        block_bytes: bytes under one digest.
        verify: whether to compare digests.
        scratch: buffer shared by the readers of one load.

    Raises:
        CheckpointError: the file is missing, of another size, or its header is damaged.
    """

    def __init__(
        self, path: Path, file: StoredFile, *, block_bytes: int, verify: bool, scratch: Scratch
    ) -> None:
        super().__init__(path, file, block_bytes=block_bytes, verify=verify)
        self._scratch = scratch

    def read(self, request: ChunkRead) -> None:
        """Fill every target of `request`. Raises CheckpointError for a damaged or short file."""
        itemsize = DTYPES[request.dtype].itemsize
        spans = [_span(request.chunk.box.sizes, part.box) for part in request.parts]
        first = min(begin for begin, _ in spans) * itemsize // self.block_bytes
        last = max(end for _, end in spans) * itemsize
        direct = [
            _direct_bytes(part, span, request.dtype)
            for part, span in zip(request.parts, spans, strict=True)
        ]
        whole = request.chunk.end - request.chunk.begin
        start, stop = (position * itemsize for position in spans[0])
        for begin in range(first * self.block_bytes, last, self.block_bytes):
            end = min(begin + self.block_bytes, whole)
            if len(spans) == 1 and direct[0] is not None and start <= begin and end <= stop:
                # The common case, without looking for who else wants a part of this block.
                target = direct[0][begin - start : end - start]
                self.read_bytes(request.name, request.chunk, begin, target)
            else:
                self._read_block(request, begin, end, spans, direct)

    def _read_block(
        self,
        request: ChunkRead,
        begin: int,
        end: int,
        spans: Sequence[tuple[int, int]],
        direct: Sequence[memoryview | None],
    ) -> None:
        """Read the bytes [begin, end) of a stored chunk to where they are wanted."""
        itemsize = DTYPES[request.dtype].itemsize
        touching = [
            i for i, (a, b) in enumerate(spans) if a * itemsize < end and begin < b * itemsize
        ]
        if len(touching) == 1:
            start, stop = (position * itemsize for position in spans[touching[0]])
            target = direct[touching[0]]
            if not self.verifies:  # nothing forces whole blocks
                begin, end = max(begin, start), min(end, stop)
            if target is not None and start <= begin and end <= stop:
                self.read_bytes(
                    request.name, request.chunk, begin, target[begin - start : end - start]
                )
                return
        copies = []
        for box in boxes_of_range(request.chunk.box.sizes, begin // itemsize, end // itemsize):
            for i in touching:
                if common := intersect(box, request.parts[i].box):
                    copies.append((box, common, request.parts[i]))
        if not copies:
            return  # this block lies between the wanted columns
        raw = self._scratch.take(end - begin)
        self.read_bytes(request.name, request.chunk, begin, as_bytes(raw))
        elements = raw.view(DTYPES[request.dtype])
        for box, common, part in copies:
            start = flat_index(request.chunk.box.sizes, box.offsets) - begin // itemsize
            source = elements[start : start + box.numel].view(box.sizes)
            part.target[common.seen_from(part.box.offsets).slices].copy_(
                source[common.seen_from(box.offsets).slices]
            )


def _span(sizes: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return the smallest row-major element range of a tensor of `sizes` that contains `box`."""
    last = tuple(o + n - 1 for o, n in zip(*box, strict=True))
    return flat_index(sizes, box.offsets), flat_index(sizes, last) + 1


def _direct_bytes(part: ChunkPart, span: tuple[int, int], dtype: str) -> memoryview | None:
    """Return the target's memory if the stored bytes can be read straight into it."""
    target = part.target
    in_one_piece = span[1] - span[0] == math.prod(part.box.sizes)
    plain = target.is_contiguous() and target.device.type == "cpu"
    if in_one_piece and plain and target.dtype == DTYPES[dtype]:
        return as_bytes(target)
    return None
