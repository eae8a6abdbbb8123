# SPDX-License-Identifier: Apache-2.0
"""An open shard: positioned reads of whole blocks, verified before they are used; without torch.

Memory mapping is avoided on purpose: a file that is truncated under a mapping kills the process
with SIGBUS, a short read is an error that can be named.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron.core.dist_checkpointing.errors import DamagedCheckpointError
from megatron.core.dist_checkpointing.manifest import StoredChunk, StoredFile
from megatron.core.dist_checkpointing.shard_format import (
    LENGTH_BYTES,
    decode_length,
    kind_of,
    new_hasher,
    text_of,
)
from megatron.core.untrusted_files import regular_fd, regular_size

#: Small enough to stay in a core's cache between its arrival and its digest.
PIECE_BYTES = 1 << 19


class ShardFile:
    """An open shard, its size and header checked; counts what it reads and verifies.

    Args:
        path: the shard.
        file: what the manifest states about it.
        block_bytes: bytes under one digest.
        verify: whether to compare digests.
        header_verified: whether the header's digest has been compared before.

    Raises:
        DamagedCheckpointError: the file is missing, of another size, or its header is damaged.
    """

    def __init__(
        self,
        path: Path,
        file: StoredFile,
        *,
        block_bytes: int,
        verify: bool,
        header_verified: bool = False,
    ) -> None:
        self.bytes_read = 0
        self.bytes_verified = 0
        self.block_bytes = block_bytes
        self.verifies = verify
        self._path = path
        self._file = file
        check_size(path, file)
        try:
            self._fd = regular_fd(path)
        except OSError as error:
            raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
        try:
            self._check_header(verify=verify and not header_verified)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def verify(self, name: str, chunk: StoredChunk, scratch: memoryview) -> None:
        """Read a whole stored chunk and compare its digests.

        Args:
            scratch: of any size; `PIECE_BYTES` are fast.
        """
        whole = chunk.end - chunk.begin
        for begin in range(0, whole, self.block_bytes):
            end = min(begin + self.block_bytes, whole)
            for _ in self.stream(name, chunk, (begin, end), scratch):
                pass

    def read_bytes(self, name: str, chunk: StoredChunk, begin: int, target: memoryview) -> None:
        """Read a chunk's bytes from `begin` into `target` and compare the block's digest.

        When verifying, they must be a whole block, or a chunk's last one.
        """
        step = PIECE_BYTES if self.verifies else len(target)
        pieces = (target[at : at + step] for at in range(0, len(target), step))
        for _ in self._read(name, chunk, begin, pieces):
            pass

    def stream(
        self, name: str, chunk: StoredChunk, span: tuple[int, int], scratch: memoryview
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield a chunk's bytes [begin, end) piece by piece, and where in the chunk each begins.

        A piece is valid until the next, and is verified when the last one has been taken. When
        verifying, the bytes must be a whole block, or a chunk's last one.
        """
        step = len(scratch)
        begin, end = span
        pieces = (scratch[: min(step, end - at)] for at in range(begin, end, step))
        return self._read(name, chunk, begin, pieces)

    def _read(
        self, name: str, chunk: StoredChunk, begin: int, pieces: Iterable[memoryview]
    ) -> Iterator[tuple[int, memoryview]]:
        """Fill pieces with the bytes that follow `begin`, yield each, and compare the digest."""
        wanted = chunk.xxh3[begin // self.block_bytes] if self.verifies else ""
        hasher = new_hasher(kind_of(wanted)) if self.verifies else None
        at = begin
        for piece in pieces:
            self._fill(piece, chunk.begin + at, name)
            if hasher is not None:
                hasher.update(piece)
            yield at, piece
            at += len(piece)
        self.bytes_read += at - begin
        if hasher is not None:
            if text_of(hasher, kind_of(wanted)) != wanted:
                raise DamagedCheckpointError(
                    f"{self._path} is damaged: {name}{chunk.box} does not match its digest in "
                    f"bytes [{chunk.begin + begin}, {chunk.begin + at}); use another checkpoint"
                )
            self.bytes_verified += at - begin

    def _fill(self, target: memoryview, offset: int, name: str) -> None:
        """Read the file's bytes from `offset` on."""
        position = 0
        while position < len(target):
            try:
                count = os.preadv(self._fd, [target[position:]], offset + position)
            except OSError as error:
                raise DamagedCheckpointError(
                    f"cannot read {name} from {self._path}: {error.strerror}"
                ) from error
            if not count:
                raise DamagedCheckpointError(
                    f"{self._path} ends at byte {offset + position}, inside {name}"
                )
            position += count

    def _check_header(self, *, verify: bool) -> None:
        """Compare the announced header length, and when verifying the header's digest."""
        first = memoryview(bytearray(LENGTH_BYTES))
        self._fill(first, 0, "the header")
        self.bytes_read += LENGTH_BYTES
        announced, size = decode_length(bytes(first)), self._file.header_bytes
        if announced != size:
            raise DamagedCheckpointError(
                f"{self._path} is damaged: it announces a header of {announced} bytes, the "
                f"manifest says {size}"
            )
        if not verify:
            return
        wanted = self._file.header_xxh3
        hasher = new_hasher(kind_of(wanted))
        hasher.update(first)
        scratch = memoryview(bytearray(min(PIECE_BYTES, size)))
        for at in range(LENGTH_BYTES, size, PIECE_BYTES):
            piece = scratch[: size - at]
            self._fill(piece, at, "the header")
            hasher.update(piece)
        self.bytes_read += size - LENGTH_BYTES
        if text_of(hasher, kind_of(wanted)) != wanted:
            raise DamagedCheckpointError(f"{self._path} is damaged: its header has changed")


def check_size(path: Path, file: StoredFile) -> None:
    """Raise DamagedCheckpointError unless `path` is a file of the size in the manifest."""
    try:
        size = regular_size(path)
    except OSError as error:
        raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
    if size != file.bytes:
        raise DamagedCheckpointError(
            f"{path} has {size} bytes, the manifest says {file.bytes}: it was cut short "
            "or replaced; use another checkpoint"
        )
