# SPDX-License-Identifier: Apache-2.0
"""Reading a shard: positioned reads of the blocks that are needed, verified before they are used.

Memory mapping is avoided on purpose: a file that is cut short under a mapping kills the process
with SIGBUS, a short read is an error that can be named.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from megatron.core.dist_checkpointing.boxes import Box, boxes_of_range, flat_index, intersect
from megatron.core.dist_checkpointing.digests import digest, kind_of, new_hasher, text_of
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import StoredChunk, StoredFile
from megatron.core.dist_checkpointing.shard_header import DTYPES, LENGTH_BYTES, decode_length
from megatron.core.dist_checkpointing.shard_writer import as_bytes

#: Small enough to stay in a core's cache between its arrival and its digest.
PIECE_BYTES = 1 << 18


@dataclass(frozen=True, eq=False, kw_only=True)
class Want:
    """A box, in the coordinates of a stored chunk, and the view that its elements go to."""

    box: Box
    target: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class ChunkRead:
    """A stored chunk of a named tensor, and everything that is wanted from it."""

    name: str
    dtype: str
    chunk: StoredChunk
    wants: Sequence[Want]


class Scratch:
    """One CPU buffer that all reads reuse, grown to the largest block seen."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, valid until the next call."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size]


class ShardReader:
    """An open shard, its size and header checked; counts what it reads and verifies.

    Args:
        path: the shard.
        file: what the manifest says about it.
        block_bytes: bytes under one digest.
        verify: whether to compare digests.
        scratch: buffer shared by the readers of one load.

    Raises:
        CheckpointError: the file is missing, of another size, or its header is damaged.
    """

    def __init__(
        self, path: Path, file: StoredFile, *, block_bytes: int, verify: bool, scratch: Scratch
    ) -> None:
        self.bytes_read = 0
        self.bytes_verified = 0
        self._path = path
        self._file = file
        self._block_bytes = block_bytes
        self._verify = verify
        self._scratch = scratch
        check_size(path, file)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        try:
            self._check_header()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def read(self, request: ChunkRead) -> None:
        """Fill every target of `request`. Raises CheckpointError for a damaged or short file."""
        itemsize = DTYPES[request.dtype].itemsize
        spans = [_span(request.chunk.box.sizes, want.box) for want in request.wants]
        first = min(begin for begin, _ in spans) * itemsize // self._block_bytes
        last = max(end for _, end in spans) * itemsize
        direct = [
            _direct_bytes(want, span, request.dtype)
            for want, span in zip(request.wants, spans, strict=True)
        ]
        whole = request.chunk.end - request.chunk.begin
        start, stop = (position * itemsize for position in spans[0])
        for begin in range(first * self._block_bytes, last, self._block_bytes):
            end = min(begin + self._block_bytes, whole)
            if len(spans) == 1 and direct[0] is not None and start <= begin and end <= stop:
                # The common case, without looking for who else wants a part of this block.
                target = direct[0][begin - start : end - start]
                self._read_bytes(request.name, request.chunk, begin, target)
            else:
                self._read_block(request, begin, end, spans, direct)

    def verify(self, name: str, chunk: StoredChunk) -> None:
        """Read a whole stored chunk and compare its digests."""
        whole = chunk.end - chunk.begin
        for begin in range(0, whole, self._block_bytes):
            end = min(begin + self._block_bytes, whole)
            self._read_bytes(name, chunk, begin, as_bytes(self._scratch.take(end - begin)))

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
            if not self._verify:  # nothing forces whole blocks
                begin, end = max(begin, start), min(end, stop)
            if target is not None and start <= begin and end <= stop:
                self._read_bytes(
                    request.name, request.chunk, begin, target[begin - start : end - start]
                )
                return
        copies = []
        for box in boxes_of_range(request.chunk.box.sizes, begin // itemsize, end // itemsize):
            for i in touching:
                if common := intersect(box, request.wants[i].box):
                    copies.append((box, common, request.wants[i]))
        if not copies:
            return  # this block lies between the wanted columns
        raw = self._scratch.take(end - begin)
        self._read_bytes(request.name, request.chunk, begin, as_bytes(raw))
        elements = raw.view(DTYPES[request.dtype])
        for box, common, want in copies:
            start = flat_index(request.chunk.box.sizes, box.offsets) - begin // itemsize
            source = elements[start : start + box.numel].view(box.sizes)
            want.target[common.seen_from(want.box.offsets).slices].copy_(
                source[common.seen_from(box.offsets).slices]
            )

    def _read_bytes(self, name: str, chunk: StoredChunk, begin: int, target: memoryview) -> None:
        """Read a chunk's bytes from `begin` into `target` and compare the block's digest."""
        size = len(target)
        offset = chunk.begin + begin
        wanted = chunk.xxh3[begin // self._block_bytes] if self._verify else ""
        hasher = new_hasher(kind_of(wanted)) if self._verify else None
        step = PIECE_BYTES if self._verify else size
        position = 0
        while position < size:
            piece = target[position : position + step]
            got = self._pread(piece, offset + position, name)
            if hasher is not None:
                hasher.update(piece[:got])
            position += got
        self.bytes_read += size
        if hasher is not None:
            if text_of(hasher, kind_of(wanted)) != wanted:
                raise CheckpointError(
                    f"{self._path} is damaged: {name}{chunk.box} does not match its digest in "
                    f"bytes [{offset}, {offset + size}); use another checkpoint"
                )
            self.bytes_verified += size

    def _pread(self, target: memoryview, offset: int, name: str) -> int:
        try:
            got = os.preadv(self._fd, [target], offset)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {name} from {self._path}: {error.strerror}"
            ) from error
        if not got:
            raise CheckpointError(f"{self._path} ends at byte {offset}, inside {name}")
        return got

    def _check_header(self) -> None:
        """Compare the announced header length, and when verifying the header's digest."""
        size = self._file.header_bytes if self._verify else LENGTH_BYTES
        header = memoryview(bytearray(size))
        position = 0
        while position < size:
            position += self._pread(header[position:], position, "the header")
        self.bytes_read += size
        announced = decode_length(bytes(header[:LENGTH_BYTES]))
        if announced != self._file.header_bytes:
            raise CheckpointError(
                f"{self._path} is damaged: it announces a header of {announced} bytes, the "
                f"manifest says {self._file.header_bytes}"
            )
        wanted = self._file.header_xxh3
        if self._verify and digest(header, kind_of(wanted)) != wanted:
            raise CheckpointError(f"{self._path} is damaged: its header has changed")


def check_size(path: Path, file: StoredFile) -> None:
    """Raise CheckpointError unless `path` is a regular file of the size the manifest says."""
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    if found.st_size != file.bytes:
        raise CheckpointError(
            f"{path} has {found.st_size} bytes, the manifest says {file.bytes}: it was cut short "
            "or replaced; use another checkpoint"
        )


def _span(sizes: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return the smallest row-major element range of a tensor of `sizes` that contains `box`."""
    last = tuple(o + n - 1 for o, n in zip(*box, strict=True))
    return flat_index(sizes, box.offsets), flat_index(sizes, last) + 1


def _direct_bytes(want: Want, span: tuple[int, int], dtype: str) -> memoryview | None:
    """Return the target's memory if the stored bytes can be read straight into it."""
    target = want.target
    in_one_piece = span[1] - span[0] == math.prod(want.box.sizes)
    plain = target.is_contiguous() and target.device.type == "cpu"
    if in_one_piece and plain and target.dtype == DTYPES[dtype]:
        return as_bytes(target)
    return None
