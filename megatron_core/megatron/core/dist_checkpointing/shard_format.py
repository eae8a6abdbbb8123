# SPDX-License-Identifier: Apache-2.0
"""The format of shard files: safetensors header, digests, streams.

Safetensors (huggingface.co/docs/safetensors): 8 bytes, the little-endian length of a JSON object;
the object, `{key: {"dtype", "shape", "data_offsets": [begin, end]}}` with offsets from its end;
then the row-major, little-endian tensors without gaps.

Digests are xxh3-64, or BLAKE2b-64 where xxhash is not installed. The text of a digest names its
algorithm: 16 hexadecimal digits are xxh3-64; `blake2b:` and 16 digits are BLAKE2b, which every
Python has but which takes about ten times as long. Either is read wherever its algorithm is
available.

A file is written as a stream, digested in blocks as it passes, with the disk kept busy.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from megatron.core.dist_checkpointing.errors import CheckpointError

XXH3, BLAKE2B = "xxh3", "blake2b"


class Hasher(Protocol):
    """Digests a stream of chunks."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take in a chunk."""

    def hexdigest(self) -> str:
        """Return 16 hexadecimal digits over all chunks so far."""


def written_kind() -> str:
    """Return the kind of digest that this machine writes."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return BLAKE2B
    return XXH3


def new_hasher(kind: str) -> Hasher:
    """Start a digest. Raises CheckpointError if its package is not installed."""
    if kind == BLAKE2B:
        return hashlib.blake2b(digest_size=8)
    try:
        import xxhash
    except ImportError:
        raise CheckpointError(
            "the checkpoint's digests are xxh3, which needs the package xxhash: pip install xxhash"
        ) from None
    return xxhash.xxh3_64()


def kind_of(text: str) -> str:
    """Return the kind of a digest by its text."""
    return BLAKE2B if text.startswith(f"{BLAKE2B}:") else XXH3


def text_of(hasher: Hasher, kind: str) -> str:
    """Return the text of a finished digest."""
    return hasher.hexdigest() if kind == XXH3 else f"{kind}:{hasher.hexdigest()}"


def digest(data: bytes | memoryview, kind: str | None = None) -> str:
    """Return the digest of `data`: of a kind, or of the one that this machine writes."""
    kind = kind or written_kind()
    hasher = new_hasher(kind)
    hasher.update(data)
    return text_of(hasher, kind)


#: Small enough to stay in a core's cache between its digest and its copy to the page cache.
PIECE_BYTES = 1 << 20

#: The disk is set to work whenever this much waits for it. It then writes while the next chunks
#: are digested and copied, not all at the end: 0.27 against 0.38 s for 500 MB with the sync.
WRITEBACK_BYTES = 8 << 20


class BlockDigester:
    """Digests a stream in blocks of fixed size, however it is chunked."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._left = block_bytes
        self._kind = written_kind()
        self._hash = new_hasher(self._kind)
        self._found: list[str] = []

    def update(self, piece: memoryview) -> None:
        """Take in a chunk of any length."""
        while len(piece):
            part = piece[: self._left]
            self._hash.update(part)
            self._left -= len(part)
            piece = piece[len(part) :]
            if not self._left:
                self._close_block()

    def finish(self) -> list[str]:
        """Return the digests of all blocks, the last of which may be short."""
        if self._left != self._block_bytes:
            self._close_block()
        return self._found

    def _close_block(self) -> None:
        self._found.append(text_of(self._hash, self._kind))
        self._hash = new_hasher(self._kind)
        self._left = self._block_bytes


class Output:
    """A file written from its start, that keeps the disk busy meanwhile."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.position = 0
        self._started = 0

    def write(self, data: memoryview) -> None:
        """Write all of `data`: one call may take less, most of all when the disk is nearly full."""
        while len(data):
            count = os.write(self._fd, data)
            data = data[count:]
            self.position += count
        waiting = self.position - self._started
        if waiting >= WRITEBACK_BYTES:
            # On Linux this starts to write dirty pages and drops clean ones; the pages of this
            # range are on their way to the disk and stay in memory.
            os.posix_fadvise(self._fd, self._started, waiting, os.POSIX_FADV_DONTNEED)
            self._started = self.position


#: Bytes of an element, by the format's name of its dtype.
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U64": 8,
        "U32": 4,
        "U16": 2,
        "U8": 1,
        "BOOL": 1,
    }
)

MAX_ITEM_BYTES = max(ITEM_BYTES.values())

#: The safetensors library refuses longer headers (its MAX_HEADER_SIZE); so do we, on both sides.
MAX_HEADER_BYTES = 100_000_000

LENGTH_BYTES = 8

#: Tensors start at a multiple of this, a cache line, as their memory does: the kernel copies from
#: there a quarter faster. The library starts them at a multiple of 8.
ALIGNMENT = 64


def tensor_bytes(dtype: str, sizes: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(sizes) * ITEM_BYTES[dtype]


def encode_header(entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the file's first bytes for tensors of these (key, dtype, sizes), in file order.

    Raises ValueError for more tensors than one file can describe.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for key, dtype, sizes in entries:
        end = begin + tensor_bytes(dtype, sizes)
        table[key] = {"dtype": dtype, "shape": list(sizes), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(entries)} tensors on one rank need a header of {len(text)} bytes, more than the "
            f"{MAX_HEADER_BYTES} that safetensors allows; save from more ranks"
        )
    return struct.pack("<Q", len(text)) + text


def decode_length(first_bytes: bytes) -> int:
    """Return how many bytes of header, the length itself included, a file announces."""
    return LENGTH_BYTES + struct.unpack("<Q", first_bytes)[0]
