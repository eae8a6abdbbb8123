# SPDX-License-Identifier: Apache-2.0
"""The format of shard files (safetensors header, digests, sequential writes), and its errors.

Safetensors (huggingface.co/docs/safetensors): 8 bytes with the little-endian length of a JSON
object; the object, `{key: {"dtype", "shape", "data_offsets": [begin, end]}}` with offsets from its
end; then the row-major, little-endian tensors without gaps.

Digests are xxh3-64, or BLAKE2b-64 where xxhash is not installed. The text of a digest names its
algorithm: 16 hexadecimal digits are xxh3-64; `blake2b:` and 16 digits are BLAKE2b, which every
Python includes but which takes about ten times as long. A reader accepts both if the algorithm is
available.

A file is written sequentially. Blocks are digested as they are written, and write-back to disk
starts early.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol


def print_to_stderr(line: str) -> None:
    """Print a line for the user to standard error, wherever the log goes."""
    print(line, file=sys.stderr, flush=True)


class CheckpointError(Exception):
    """A checkpoint could not be saved, loaded or found.

    The text is one line that names the file and the tensor, and the rank if another rank failed.
    A failed save loses nothing: earlier checkpoints are intact, and no partial folder has a
    checkpoint's name.
    """


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, corrupt, unreadable or removed; an older checkpoint may load.

    Any other CheckpointError of a load, for example a checkpoint of another model, would be raised
    for the older checkpoints as well.
    """


class RemovedCheckpointError(DamagedCheckpointError):
    """A checkpoint no longer exists, for instance because retention removed it meanwhile."""


def describe(error: Exception) -> str:
    """Return an error as one line without a traceback."""
    if isinstance(error, CheckpointError | ValueError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


XXH3, BLAKE2B = "xxh3", "blake2b"


class Hasher(Protocol):
    """A streaming digest, as in hashlib."""

    def update(self, buffer: bytes | memoryview, /) -> None:
        """Add the buffer's bytes to the digest."""

    def hexdigest(self) -> str:
        """Return 16 hexadecimal digits over all bytes so far."""
        ...


def default_digest_algorithm() -> str:
    """Return the digest algorithm for new files: xxh3 if xxhash is installed, else BLAKE2b."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return BLAKE2B
    return XXH3


def new_hasher(algorithm: str) -> Hasher:
    """Start a digest. Raises CheckpointError if its package is not installed."""
    if algorithm == BLAKE2B:
        return hashlib.blake2b(digest_size=8)
    try:
        import xxhash
    except ImportError:
        raise CheckpointError(
            "the checkpoint's digests are xxh3, which need the package xxhash: pip install xxhash"
        ) from None
    return xxhash.xxh3_64()


def digest_algorithm(text: str) -> str:
    """Return the algorithm that a digest's text names."""
    return BLAKE2B if text.startswith(f"{BLAKE2B}:") else XXH3


def format_digest(hasher: Hasher, algorithm: str) -> str:
    """Return a finished digest as text."""
    return hasher.hexdigest() if algorithm == XXH3 else f"{algorithm}:{hasher.hexdigest()}"


def digest(buffer: bytes | memoryview, algorithm: str | None = None) -> str:
    """Return the digest of `buffer`, by the algorithm of new files if `algorithm` is None."""
    algorithm = algorithm or default_digest_algorithm()
    hasher = new_hasher(algorithm)
    hasher.update(buffer)
    return format_digest(hasher, algorithm)


#: Bytes per write. A buffer of this size stays in a core's cache between its digest and its copy to
#: the page cache.
WRITE_BUFFER_BYTES = 1 << 20

#: Write-back starts whenever this many bytes are pending. The disk then writes while the next
#: buffers are digested and copied: 0.27 against 0.38 s for 500 MB, the final sync included.
WRITEBACK_BYTES = 8 << 20


class BlockDigester:
    """Digests a stream in blocks of fixed size, whatever the sizes of its buffers."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._bytes_left = block_bytes
        self._algorithm = default_digest_algorithm()
        self._hasher = new_hasher(self._algorithm)
        self._digests: list[str] = []

    def update(self, buffer: memoryview) -> None:
        """Add a buffer of any length."""
        while len(buffer):
            block = buffer[: self._bytes_left]
            self._hasher.update(block)
            self._bytes_left -= len(block)
            buffer = buffer[len(block) :]
            if not self._bytes_left:
                self._close_block()

    def finish(self) -> list[str]:
        """Return the digests of all blocks; the last block may be short."""
        if self._bytes_left != self._block_bytes:
            self._close_block()
        return self._digests

    def _close_block(self) -> None:
        self._digests.append(format_digest(self._hasher, self._algorithm))
        self._hasher = new_hasher(self._algorithm)
        self._bytes_left = self._block_bytes


class ShardWriter:
    """Writes a shard file sequentially and starts its write-back early.

    Args:
        file: a new, empty file. Its own buffer joins the writes of small chunks.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = 0
        self._writeback_begin = 0

    def write(self, buffer: bytes | memoryview) -> None:
        """Write the whole buffer."""
        self.position += self._file.write(buffer)
        pending_bytes = self.position - self._writeback_begin
        if pending_bytes >= WRITEBACK_BYTES:
            # On Linux this starts write-back of dirty pages and drops clean pages. The pages of
            # this range are dirty, so they are written and stay in memory.
            fd = self._file.fileno()
            os.posix_fadvise(fd, self._writeback_begin, pending_bytes, os.POSIX_FADV_DONTNEED)
            self._writeback_begin = self.position

    def sync(self) -> None:
        """Make all writes durable."""
        self._file.flush()
        os.fsync(self._file.fileno())


# (dtype name of the format, name of the torch dtype, bytes per element)
_DTYPES = (
    ("F64", "float64", 8),
    ("F32", "float32", 4),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("I64", "int64", 8),
    ("I32", "int32", 4),
    ("I16", "int16", 2),
    ("I8", "int8", 1),
    ("U64", "uint64", 8),
    ("U32", "uint32", 4),
    ("U16", "uint16", 2),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
)

#: Names of torch dtypes, and bytes per element, by dtype name of the format.
TORCH_NAMES: Mapping[str, str] = MappingProxyType({name: torch for name, torch, _ in _DTYPES})
ITEM_BYTES: Mapping[str, int] = MappingProxyType({name: count for name, _, count in _DTYPES})

MAX_ITEM_BYTES = max(ITEM_BYTES.values())

#: The safetensors library refuses longer headers (its MAX_HEADER_SIZE). Readers and writers here do
#: the same.
MAX_HEADER_BYTES = 100_000_000

LENGTH_BYTES = 8

#: Encodes a value as compact JSON.
encode_json: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode

#: Tensors start at a multiple of a cache line, as their memory does, because the kernel then copies
#: a quarter faster. The safetensors library aligns them to 8 bytes.
ALIGNMENT = 64


def tensor_bytes(dtype: str, sizes: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(sizes) * ITEM_BYTES[dtype]


def encode_header(entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return length field and header for tensors (key, dtype, sizes), in file order.

    Raises ValueError if the header would exceed the format's limit.
    """
    members = ['"__metadata__":{"format":"pt"}']
    begin = 0
    for key, dtype, sizes in entries:
        end = begin + tensor_bytes(dtype, sizes)
        entry = {"dtype": dtype, "shape": sizes, "data_offsets": (begin, end)}
        members.append(f"{encode_json(key)}:{encode_json(entry)}")
        begin = end
    text = f"{{{','.join(members)}}}".encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(entries)} tensors on one rank need a header of {len(text)} bytes, more than the "
            f"{MAX_HEADER_BYTES} that safetensors allows; save from more ranks"
        )
    return struct.pack("<Q", len(text)) + text


def decode_length(first_bytes: bytes) -> int:
    """Return the header's size in bytes, length field included, from the file's first 8 bytes."""
    return LENGTH_BYTES + struct.unpack("<Q", first_bytes)[0]
