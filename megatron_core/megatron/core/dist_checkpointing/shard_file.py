# SPDX-License-Identifier: Apache-2.0
"""An open shard: positioned reads of whole blocks, verified before use; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.manifest import StoredChunk, StoredFile
from megatron.core.dist_checkpointing.shard_format import (
    LENGTH_BYTES,
    DamagedCheckpointError,
    decode_length,
    digest_algorithm,
    format_digest,
    new_hasher,
)
from megatron.core.untrusted_files import PositionedFile, regular_size

#: Bytes per read. A buffer of this size stays in a core's cache until it is digested.
READ_BUFFER_BYTES = 1 << 19


class ShardFile(PositionedFile):
    """An open shard with checked size and header; counts bytes read and bytes verified.

    Args:
        path: the shard.
        file: the shard's entry in the manifest.
        block_bytes: bytes per digest.
        verify: whether to compare digests.
        header_verified: whether the header's digest has already been compared.

    Raises:
        DamagedCheckpointError: the file is missing, has another size, or its header is damaged.
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
        self.bytes_verified = 0
        self.block_bytes = block_bytes
        self.verifies = verify
        self._file = file
        check_size(path, file)
        try:
            super().__init__(path)
        except OSError as error:
            raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
        try:
            self._check_header(verify=verify and not header_verified)
        except BaseException:
            self.close()
            raise

    def verify(self, name: str, chunk: StoredChunk, scratch: memoryview) -> None:
        """Read a whole stored chunk and compare its digests.

        Args:
            scratch: read buffer of any size; `READ_BUFFER_BYTES` is fast.
        """
        size = chunk.end - chunk.begin
        for begin in range(0, size, self.block_bytes):
            end = min(begin + self.block_bytes, size)
            for _ in self.stream(name, chunk, (begin, end), scratch):
                pass

    def read_bytes(self, name: str, chunk: StoredChunk, begin: int, target: memoryview) -> None:
        """Read a chunk's bytes from `begin` into `target` and compare the block's digest.

        When verifying, the range must be a whole block, or the chunk's last block.
        """
        step = READ_BUFFER_BYTES if self.verifies else len(target)
        buffers = (target[position : position + step] for position in range(0, len(target), step))
        for _ in self._read(name, chunk, begin, buffers):
            pass

    def stream(
        self, name: str, chunk: StoredChunk, span: tuple[int, int], scratch: memoryview
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield (position in the chunk, buffer) for a chunk's bytes [begin, end).

        A buffer is valid until the next one is yielded. All buffers are verified only when the
        iterator is exhausted. When verifying, the range must be a whole block, or the chunk's last
        block.
        """
        step = len(scratch)
        begin, end = span
        buffers = (scratch[: min(step, end - position)] for position in range(begin, end, step))
        return self._read(name, chunk, begin, buffers)

    def _read(
        self, name: str, chunk: StoredChunk, begin: int, buffers: Iterable[memoryview]
    ) -> Iterator[tuple[int, memoryview]]:
        """Fill buffers with the bytes from `begin` on, yield each, then compare the digest."""
        expected_digest = chunk.xxh3[begin // self.block_bytes] if self.verifies else ""
        hasher = new_hasher(digest_algorithm(expected_digest)) if self.verifies else None
        position = begin
        for buffer in buffers:
            self._fill(buffer, chunk.begin + position, name)
            if hasher is not None:
                hasher.update(buffer)
            yield position, buffer
            position += len(buffer)
        if hasher is not None:
            if format_digest(hasher, digest_algorithm(expected_digest)) != expected_digest:
                raise DamagedCheckpointError(
                    f"{self.path} is damaged: {name}{chunk.box} does not match its digest in "
                    f"bytes [{chunk.begin + begin}, {chunk.begin + position}); "
                    "use another checkpoint"
                )
            self.bytes_verified += position - begin

    def _fill(self, target: memoryview, offset: int, name: str) -> None:
        """Read the file's bytes from `offset` on."""
        try:
            count = self.read_into(target, offset)
        except OSError as error:
            raise DamagedCheckpointError(
                f"cannot read {name} from {self.path}: {error.strerror}"
            ) from error
        if count < len(target):
            raise DamagedCheckpointError(
                f"{self.path} ends at byte {offset + count}, inside {name}"
            )

    def _check_header(self, *, verify: bool) -> None:
        """Compare the header's length and, when verifying, its digest with the manifest."""
        length_field = memoryview(bytearray(LENGTH_BYTES))
        self._fill(length_field, 0, "the header")
        announced, size = decode_length(bytes(length_field)), self._file.header_bytes
        if announced != size:
            raise DamagedCheckpointError(
                f"{self.path} is damaged: it announces a header of {announced} bytes, but "
                f"the manifest says {size}"
            )
        if not verify:
            return
        expected_digest = self._file.header_xxh3
        hasher = new_hasher(digest_algorithm(expected_digest))
        hasher.update(length_field)
        scratch = memoryview(bytearray(min(READ_BUFFER_BYTES, size)))
        for position in range(LENGTH_BYTES, size, READ_BUFFER_BYTES):
            buffer = scratch[: size - position]
            self._fill(buffer, position, "the header")
            hasher.update(buffer)
        if format_digest(hasher, digest_algorithm(expected_digest)) != expected_digest:
            raise DamagedCheckpointError(f"{self.path} is damaged: its header has changed")


def check_size(path: Path, file: StoredFile) -> None:
    """Raise DamagedCheckpointError unless `path` is a file of the size in the manifest."""
    try:
        size = regular_size(path)
    except OSError as error:
        raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
    if size != file.bytes:
        raise DamagedCheckpointError(
            f"{path} has {size} bytes, but the manifest says {file.bytes}: it was truncated "
            "or replaced; use another checkpoint"
        )
