# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: sizes of dtypes, and the header that says where each tensor lies.

Format (huggingface.co/docs/safetensors): 8 bytes, the little-endian length of a JSON object; the
object, `{key: {"dtype", "shape", "data_offsets": [begin, end]}}` with offsets from its end; then
the row-major, little-endian tensors without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType

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
