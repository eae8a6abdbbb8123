# SPDX-License-Identifier: Apache-2.0
"""Folders of torch.distributed.checkpoint put together by hand: what torch would never write.

The pickle in `.metadata` is made of torch's own dataclasses, an archive of one tensor of the
instructions that torch.save writes (pickle protocol 2, torch._utils._rebuild_tensor_v2), in a zip
archive of Python's.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

FILE = "__0_0.distcp"
#: Of a chunk: offsets, sizes, first byte, number of bytes.
Chunk = tuple[Sequence[int], Sequence[int], int, int]


def number(value: int) -> bytes:
    """Return the instruction that pushes an integer."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    packed = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(packed)]) + packed


def description(shape: bytes, strides: bytes, *, count: int) -> bytes:
    """Return the pickle of a tensor of fp32.

    Args:
        shape, strides: instructions that push the numbers.
        count: elements of the storage.
    """
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + storage + number(count) + b"tQK\0(" + shape + b"t(" + strides
        + b"t\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


def numbers(values: Sequence[int]) -> bytes:
    """Return instructions that push integers."""
    return b"".join(map(number, values))


def archive(pickled: bytes, elements: bytes) -> bytes:
    """Return an archive as torch.save writes it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/data/0", elements)
    return stream.getvalue()


def sparse_archive(path: Path, pickled: bytes, size: int) -> None:
    """Write an archive whose elements are a hole of `size` bytes."""
    whole = bytearray(archive(pickled, b""))
    end = whole.index(b"PK\x01\x02")
    name_at = whole.rindex(b"archive/data/0")
    head, tail = whole[:end], whole[end:]
    name_at -= end
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    entry = name_at - 46
    tail[entry + 20 : entry + 28] = b"\xff" * 8  # sizes: in the extra field
    tail[entry + 30 : entry + 32] = struct.pack("<H", len(extra))
    after = name_at + len(b"archive/data/0")
    tail[after:after] = extra
    end_offset = tail.rindex(b"PK\x05\x06")
    directory = tail[:end_offset]
    directory_offset = len(head) + size
    end64 = struct.pack(
        "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 3, 3, len(directory), directory_offset
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, directory_offset + len(directory), 1)
    end32 = struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0
    )
    with path.open("wb") as file:
        file.write(head)
        file.truncate(directory_offset)
        file.seek(directory_offset)
        file.write(directory + end64 + locator + end32)


def metadata(
    tensors: Mapping[str, tuple[Sequence[int], Sequence[Chunk]]], *, file: str = FILE
) -> bytes:
    """Return the content of `.metadata`.

    Args:
        tensors: shape and chunks, by name; all of fp32.
        file: in which every chunk lies.
    """
    described, storage_infos = {}, {}
    for name, (shape, chunks) in tensors.items():
        boxes = []
        for i, (offsets, sizes, begin, length) in enumerate(chunks):
            boxes.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            index = MetadataIndex(name, torch.Size(offsets), i)
            storage_infos[index] = _StorageInfo(file, begin, length)
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size(shape), boxes
        )
    return pickle.dumps(Metadata(described, {name: (name,) for name in tensors}, storage_infos))


def write_folder(folder: Path, pickled: bytes, *, shape: Sequence[int] = (4,)) -> None:
    """Write a folder of one tensor `a`, 16 bytes of zeros, whose archive holds `pickled`."""
    folder.mkdir(parents=True)
    content = archive(pickled, bytes(16))
    (folder / FILE).write_bytes(content)
    chunk = ([0] * len(shape), shape, 0, len(content))
    (folder / ".metadata").write_bytes(metadata({"a": (shape, [chunk])}))
