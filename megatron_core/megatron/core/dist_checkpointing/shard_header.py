# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: dtype names, and the header that says where each tensor lies.

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

import torch

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({d: n for n, d in DTYPES.items()})

#: The safetensors library refuses longer headers (its MAX_HEADER_SIZE); so do we, on both sides.
MAX_HEADER_BYTES = 100_000_000

LENGTH_BYTES = 8


def dtype_name(dtype: torch.dtype, tensor_name: str) -> str:
    """Return the format's name of `dtype`. Raises ValueError if it has none."""
    if dtype not in DTYPE_NAMES:
        raise ValueError(
            f"{tensor_name} has dtype {dtype}, which a checkpoint cannot hold; "
            f"convert it to one of {', '.join(DTYPES)}"
        )
    return DTYPE_NAMES[dtype]


def tensor_bytes(dtype: str, sizes: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(sizes) * DTYPES[dtype].itemsize


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
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8, as the library does
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(entries)} tensors on one rank need a header of {len(text)} bytes, more than the "
            f"{MAX_HEADER_BYTES} that safetensors allows; save from more ranks"
        )
    return struct.pack("<Q", len(text)) + text


def decode_length(first_bytes: bytes) -> int:
    """Return how many bytes of header, the length itself included, a file announces."""
    return LENGTH_BYTES + struct.unpack("<Q", first_bytes)[0]
