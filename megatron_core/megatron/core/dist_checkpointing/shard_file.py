# SPDX-License-Identifier: Apache-2.0
"""An open shard: positioned reads of whole blocks, verified before they are used; without torch.

Memory mapping is avoided on purpose: a file that is truncated under a mapping kills the process
with SIGBUS, a short read is an error that can be named.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron.core.dist_checkpointing.errors import DamagedCheckpointError
from megatron.core.dist_checkpointing.manifest import StoredChunk, StoredFile
from megatron.core.dist_checkpointing.shard_format import (
    LENGTH_BYTES,
    decode_length,
    digest,
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

    Raises:
        DamagedCheckpointError: the file is missing, of another size, or its header is damaged.
    """

    def __init__(self, path: Path, file: StoredFile, *, block_bytes: int, verify: bool) -> None:
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
            self._check_header()
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
        os.close(self._fd)

    def verify(self, name: str, chunk: StoredChunk, scratch: memoryview) -> None:
        """Read a whole stored chunk and compare its digests.

        Args:
            scratch: as large as a block, or as the chunk if that is smaller.
        """
        whole = chunk.end - chunk.begin
        for begin in range(0, whole, self.block_bytes):
            size = min(self.block_bytes, whole - begin)
            self.read_bytes(name, chunk, begin, scratch[:size])

    def read_bytes(self, name: str, chunk: StoredChunk, begin: int, target: memoryview) -> None:
        """Read a chunk's bytes from `begin` into `target` and compare the block's digest.

        When verifying, they must be a whole block, or a chunk's last one.
        """
        size = len(target)
        offset = chunk.begin + begin
        wanted = chunk.xxh3[begin // self.block_bytes] if self.verifies else ""
        hasher = new_hasher(kind_of(wanted)) if self.verifies else None
        step = PIECE_BYTES if self.verifies else size
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
                raise DamagedCheckpointError(
                    f"{self._path} is damaged: {name}{chunk.box} does not match its digest in "
                    f"bytes [{offset}, {offset + size}); use another checkpoint"
                )
            self.bytes_verified += size

    def _pread(self, target: memoryview, offset: int, name: str) -> int:
        try:
            got = os.preadv(self._fd, [target], offset)
        except OSError as error:
            raise DamagedCheckpointError(
                f"cannot read {name} from {self._path}: {error.strerror}"
            ) from error
        if not got:
            raise DamagedCheckpointError(f"{self._path} ends at byte {offset}, inside {name}")
        return got

    def _check_header(self) -> None:
        """Compare the announced header length, and when verifying the header's digest."""
        size = self._file.header_bytes if self.verifies else LENGTH_BYTES
        header = memoryview(bytearray(size))
        position = 0
        while position < size:
            position += self._pread(header[position:], position, "the header")
        self.bytes_read += size
        announced = decode_length(bytes(header[:LENGTH_BYTES]))
        if announced != self._file.header_bytes:
            raise DamagedCheckpointError(
                f"{self._path} is damaged: it announces a header of {announced} bytes, the "
                f"manifest says {self._file.header_bytes}"
            )
        wanted = self._file.header_xxh3
        if self.verifies and digest(header, kind_of(wanted)) != wanted:
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
