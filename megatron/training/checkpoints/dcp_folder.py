# SPDX-License-Identifier: Apache-2.0
"""A folder of torch.distributed.checkpoint held open, to read boxes of its tensors.

Positioned reads of what is wanted, into memory that is reused; nothing is unpickled.
"""

from __future__ import annotations

import os
import zlib
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from megatron.core.dist_checkpointing.boxes import Box, intersect
from megatron.core.dist_checkpointing.dtypes import DTYPES
from megatron.core.dist_checkpointing.shard_reader import Scratch
from megatron.core.dist_checkpointing.shard_writer import as_bytes
from megatron.core.untrusted_files import regular_fd
from megatron.training.checkpoints.dcp_metadata import (
    StoredBytes,
    StoredTensor,
    check_cover,
    read_metadata,
)
from megatron.training.checkpoints.saved_tensor import SavedTensor, find_tensor

#: Bytes that are read together for a checksum.
PIECE_BYTES = 1 << 20

#: Files that are held open; a large run has written more than a process may open.
MAX_OPEN = 64


class DcpFolder:
    """An open folder; counts the bytes it reads.

    Args:
        path: the folder that holds `.metadata`.
        checksums: whether to compare the checksum of what torch.save wrote before it is used.

    Attributes:
        tensors: by name.
        others: names of what is no tensor, which is never read.

    Raises:
        ValueError: it is no such folder, or asks for more than tensors.
    """

    def __init__(self, path: Path, *, checksums: bool = True) -> None:
        self.path, self.bytes_read = path, 0
        self._checksums = checksums
        self.tensors, self.others = read_metadata(path)
        self._fds: dict[str, tuple[int, int]] = {}
        self._found: dict[StoredBytes, SavedTensor] = {}
        self._scratch = Scratch()

    def __enter__(self) -> DcpFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fd, _ in self._fds.values():
            os.close(fd)

    def find(self, name: str) -> StoredTensor:
        """Return a tensor that can be read whole. Raises ValueError."""
        tensor = self.tensors[name]
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{self.path}: {name} has dtype {tensor.dtype}, which is not read")
        check_cover(name, tensor, str(self.path))
        for stored in tensor.chunks:
            self._check_size(name, tensor, stored)
        return tensor

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Read a box of a tensor into `target`, converting the dtype.

        Raises:
            ValueError: a file is short or absent, does not match its checksum, or holds something
                else than the tensor.
        """
        tensor = self.tensors[name]
        for stored in tensor.chunks:
            common = intersect(stored.box, box) if box.numel else None
            if common is None:
                continue
            found = self._open(name, tensor, stored)
            inner = common.seen_from(stored.box.offsets)
            itemsize = DTYPES[found.dtype].itemsize
            pairs = list(zip(*inner, found.strides, strict=True))
            first = sum(o * stride for o, _, stride in pairs)
            span = 1 + sum((n - 1) * stride for _, n, stride in pairs)
            raw = self._scratch.take(span * itemsize)
            self._read(
                stored.file, stored.begin + found.begin + first * itemsize, as_bytes(raw), name=name
            )
            source = raw.view(DTYPES[found.dtype]).as_strided(inner.sizes, found.strides)
            target[common.seen_from(box.offsets).slices].copy_(source)

    def _open(self, name: str, tensor: StoredTensor, stored: StoredBytes) -> SavedTensor:
        """Return where the elements of a chunk lie, which is checked once."""
        if stored in self._found:
            return self._found[stored]
        where = f"{self.path / stored.file}: {name}{stored.box}"

        def read(position: int, count: int) -> bytes:
            if position < 0 or position + count > stored.length:
                raise ValueError("outside the archive")
            piece = bytearray(count)
            self._read(stored.file, stored.begin + position, memoryview(piece), name=name)
            return bytes(piece)

        found = find_tensor(read, stored.length, where, checksums=self._checksums)
        strides = _strides(found, stored.box.sizes)
        if found.dtype != tensor.dtype or strides is None:
            raise ValueError(
                f"{where} is refused: it holds {found.dtype} {list(found.shape)}, .metadata says "
                f"{tensor.dtype} {list(stored.box.sizes)}"
            )
        if self._checksums:
            self._check(stored, found, name=name, where=where)
        self._found[stored] = found._replace(shape=stored.box.sizes, strides=strides)
        return self._found[stored]

    def _check_size(self, name: str, tensor: StoredTensor, stored: StoredBytes) -> None:
        """See that there can be as many elements as are claimed, before memory is taken for them.

        Raises:
            ValueError: there cannot.
        """
        needed = stored.box.numel * DTYPES[tensor.dtype].itemsize
        size = self._file(stored.file)[1]
        if stored.begin + stored.length > size or stored.length < needed:
            raise ValueError(
                f"{self.path / stored.file}: {name}{stored.box} of {needed} bytes cannot lie at "
                f"bytes [{stored.begin}, {stored.begin + stored.length}) of a file of {size}: it "
                "was cut short"
            )

    def _check(self, stored: StoredBytes, found: SavedTensor, *, name: str, where: str) -> None:
        checksum, (first, last) = 0, found.member
        buffer = memoryview(bytearray(PIECE_BYTES))
        for begin in range(first, last, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, last - begin)]
            self._read(stored.file, stored.begin + begin, piece, name=name)
            checksum = zlib.crc32(piece, checksum)
        if checksum != found.crc32:
            raise ValueError(
                f"{where} is damaged: bytes [{stored.begin + first}, {stored.begin + last}) do not "
                "match their checksum; if torch wrote none, give --no-checksums"
            )

    def _file(self, name: str) -> tuple[int, int]:
        """Return descriptor and size of a file. Raises ValueError."""
        if name not in self._fds:
            while len(self._fds) >= MAX_OPEN:
                os.close(self._fds.pop(next(iter(self._fds)))[0])
            path = self.path / name
            try:
                fd = regular_fd(path)
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from None
            self._fds[name] = (fd, os.fstat(fd).st_size)
        return self._fds[name]

    def _read(self, file: str, offset: int, target: memoryview, *, name: str) -> None:
        position = 0
        read = partial(os.preadv, self._file(file)[0])
        while position < len(target):
            try:
                got = read([target[position:]], offset + position)
            except OSError as error:
                raise ValueError(
                    f"cannot read {name} from {self.path / file}: {error.strerror}"
                ) from None
            if not got:
                raise ValueError(f"cannot read {name} from {self.path / file}: it was cut short")
            position += got
        self.bytes_read += len(target)


def _strides(found: SavedTensor, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a tensor seen with these sizes, which may have other dimensions of
    size 1; None if it cannot be."""
    kept = [
        (size, stride) for size, stride in zip(found.shape, found.strides, strict=True) if size != 1
    ]
    if [size for size, _ in kept] != [size for size in sizes if size != 1]:
        return None
    rest = iter(kept)
    return tuple(0 if size == 1 else next(rest)[1] for size in sizes)
