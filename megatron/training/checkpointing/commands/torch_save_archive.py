# SPDX-License-Identifier: Apache-2.0
"""Locate the elements of a tensor in an archive of torch.save, without unpickling.

An archive is a zip file of uncompressed members, `data.pkl` with dtype, shape and strides, and
`data/0` with the elements. Format: PKWARE's APPNOTE 4.3, with the 64-bit records that torch always
writes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from megatron.core.dist_checkpointing.manifest import MAX_DIMENSIONS
from megatron.core.dist_checkpointing.shard_format import ITEM_BYTES, TORCH_NAMES
from megatron.training.checkpointing.commands.plain_pickle import (
    Name,
    Persistent,
    PickledObject,
    read_pickle,
)

#: Reads (offset, count) bytes; the offset is relative to the start of the archive.
Read = Callable[[int, int], bytes]

#: Limits on the size of a tensor's description and of an archive's directory.
MAX_DESCRIPTION_BYTES = 1 << 16
MAX_DIRECTORY_BYTES = 1 << 16
MAX_MEMBERS = 64

_STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "torch.DoubleStorage": "F64",
        "torch.FloatStorage": "F32",
        "torch.HalfStorage": "F16",
        "torch.BFloat16Storage": "BF16",
        "torch.LongStorage": "I64",
        "torch.IntStorage": "I32",
        "torch.ShortStorage": "I16",
        "torch.CharStorage": "I8",
        "torch.ByteStorage": "U8",
        "torch.BoolStorage": "BOOL",
    }
)
_UNTYPED = "torch.storage.UntypedStorage"
_REBUILD_V2, _REBUILD_V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_TENSOR_DTYPES: Mapping[str, str] = MappingProxyType(
    {f"torch.{torch_name}": name for name, torch_name in TORCH_NAMES.items()}
)
TENSOR_GLOBALS = frozenset(
    {
        _REBUILD_V2,
        _REBUILD_V3,
        _UNTYPED,
        "collections.OrderedDict",
        *_STORAGES,
        *_TENSOR_DTYPES,
    }
)

_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_MEMBER, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"


class SavedTensor(NamedTuple):
    """Location of a tensor in an archive.

    Args:
        dtype: dtype by its safetensors name.
        shape: shape of the tensor.
        strides: strides in elements.
        begin: offset in the archive, in bytes, of element 0 of the tensor.
        member: byte range [first, last) of the stored elements.
        crc32: checksum of the member.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    member: tuple[int, int]
    crc32: int


class _Member(NamedTuple):
    begin: int
    size: int
    crc32: int


def find_tensor(read: Read, length: int, where: str, *, checksums: bool) -> SavedTensor:
    """Locate the elements of a tensor in an archive of `length` bytes.

    Args:
        checksums: whether to verify the checksums of the members that are read here, which are all
            but the elements.

    Raises:
        ValueError: this is not such an archive, contains something else than one plain tensor, or
            does not match a checksum.
    """
    members = _members(read, length, where)
    inside = {name.partition("/")[2]: member for name, member in members.items()}
    if len(inside) != len(members) or "data.pkl" not in inside:
        _refuse(where, "it is not a tensor written by torch.save")
    members_bytes = {name: b"" for name in ("byteorder", "data.pkl") if name in inside}
    for name in members_bytes:
        member = inside[name]
        if member.size > MAX_DESCRIPTION_BYTES:
            _refuse(where, f"its {name} has {member.size} bytes, more than a tensor's")
        members_bytes[name] = read(member.begin, member.size)
    if members_bytes.get("byteorder", b"little") != b"little":
        _refuse(where, "its bytes are not in little-endian order")
    tensor = _saved_tensor(
        read_pickle(members_bytes["data.pkl"], TENSOR_GLOBALS, where), inside, where
    )
    # After parsing: a description that asks to run code must be reported as such.
    for name, data in members_bytes.items():
        if checksums and zlib.crc32(data) != inside[name].crc32:
            raise ValueError(
                f"{where} is damaged: its {name} does not match its checksum; if torch wrote "
                "none, give --no-checksums"
            )
    return tensor


def _saved_tensor(value: Any, members: Mapping[str, _Member], where: str) -> SavedTensor:
    """Return the tensor that the pickle of an archive describes."""
    if not isinstance(value, PickledObject) or value.name not in (_REBUILD_V2, _REBUILD_V3):
        _refuse(where, "it contains an object that is not a tensor")
    is_v3 = value.name == _REBUILD_V3
    try:
        storage, offset, shape, strides = value.args[:4]
        tag, kind, key, _, count = storage.value
        dtype = _TENSOR_DTYPES[value.args[6].text] if is_v3 else _STORAGES[kind.text]
        is_valid = isinstance(storage, Persistent) and isinstance(kind, Name) and tag == "storage"
        member = members["data/" + key]
        numbers = (offset, count, *shape, *strides)
        # Before any multiplication: integers with thousands of digits take time.
        is_valid = is_valid and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
        is_valid = is_valid and len(shape) == len(strides) <= MAX_DIMENSIONS
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        _refuse(where, "it does not describe a tensor")
    if not is_valid:
        _refuse(where, "it does not describe a tensor")
    itemsize = ITEM_BYTES[dtype]
    last_element = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    needed = (offset + last_element + 1) * itemsize if math.prod(shape) else 0
    stored = count if is_v3 else count * itemsize
    if stored != member.size or needed > member.size:
        _refuse(where, f"a tensor of {dtype} {list(shape)} does not fit in {member.size} bytes")
    return SavedTensor(
        dtype,
        tuple(shape),
        tuple(strides),
        member.begin + offset * itemsize,
        (member.begin, member.begin + member.size),
        member.crc32,
    )


def _members(read: Read, length: int, where: str) -> dict[str, _Member]:
    """Return the members of an archive by name."""
    try:
        count, size, offset = _directory(read, length)
        if count > MAX_MEMBERS or size > MAX_DIRECTORY_BYTES or offset + size > length:
            raise ValueError
        directory = read(offset, size)
        members: dict[str, _Member] = {}
        position = 0
        for _ in range(count):
            name, member, position = _entry(directory, position)
            header = read(member.begin, 30)
            if header[:4] != _LOCAL:
                raise ValueError
            # The local header has its own lengths; the data follow it.
            begin = member.begin + 30 + sum(struct.unpack_from("<HH", header, 26))
            if begin + member.size > length:
                raise ValueError
            members[name] = member._replace(begin=begin)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        if str(error).startswith("cannot read"):
            raise
        _refuse(where, "it is not a valid archive of torch.save")
    return members


def _directory(read: Read, length: int) -> tuple[int, int, int]:
    """Return number of members, size and offset of the directory at the end. Raises ValueError."""
    end = read(length - 22, 22)
    if end[:4] != _END:
        raise ValueError
    count, size, offset = struct.unpack_from("<HII", end, 10)
    if count != 0xFFFF and size != 0xFFFFFFFF and offset != 0xFFFFFFFF:
        return count, size, offset
    locator = read(length - 42, 20)
    if locator[:4] != _LOCATOR:
        raise ValueError
    (position,) = struct.unpack_from("<Q", locator, 8)
    record = read(position, 56)
    if record[:4] != _END64:
        raise ValueError
    count, size, offset = struct.unpack_from("<QQQ", record, 32)
    return count, size, offset


def _entry(directory: bytes, position: int) -> tuple[str, _Member, int]:
    """Return name, member (`begin` is its header's offset) and the position after a directory
    entry."""
    if directory[position : position + 4] != _MEMBER:
        raise ValueError
    method, crc32, packed, size, name_bytes, extra_bytes, comment_bytes = struct.unpack_from(
        "<H4xIIIHHH", directory, position + 10
    )
    (offset,) = struct.unpack_from("<I", directory, position + 42)
    name_at = position + 46
    extra_at = name_at + name_bytes
    name = directory[name_at:extra_at].decode()
    sizes = [size, packed, offset]
    zip64 = _zip64_sizes(directory[extra_at : extra_at + extra_bytes])
    for i, value in enumerate(sizes):
        if value == 0xFFFFFFFF:
            (sizes[i],) = struct.unpack_from("<Q", zip64)
            zip64 = zip64[8:]
    if method != 0 or sizes[0] != sizes[1]:  # compressed members could expand without limit
        raise ValueError
    end = extra_at + extra_bytes + comment_bytes
    return name, _Member(sizes[2], sizes[0], crc32), end


def _zip64_sizes(extra: bytes) -> bytes:
    """Return the 64-bit sizes in an entry's extra fields."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            return extra[position + 4 : position + 4 + size]
        position += 4 + size
    return b""


def _refuse(where: str, why: str) -> NoReturn:
    raise ValueError(f"{where} is refused: {why}")
