# SPDX-License-Identifier: Apache-2.0
"""One tensor as torch.save writes it: where its elements lie, found without unpickling anything.

It is a zip archive of members that are stored as they are: `data.pkl`, which says dtype, shape and
strides, and `data/0`, the elements. Format: PKWARE's APPNOTE 4.3, with the 64-bit records that
torch always writes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from megatron.core.dist_checkpointing.dtypes import DTYPES
from megatron.training.checkpoints.pickle_data import Made, Name, Persistent, read_pickle

#: Reads so many bytes from a position, counted from the beginning of the archive.
Read = Callable[[int, int], bytes]

#: More than the description of a tensor takes.
MAX_DESCRIPTION_BYTES = 1 << 16
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
_DTYPE_NAMES: Mapping[str, str] = MappingProxyType({str(d): name for name, d in DTYPES.items()})
ALLOWED = frozenset(
    {
        _REBUILD_V2,
        _REBUILD_V3,
        _UNTYPED,
        "collections.OrderedDict",
        *_STORAGES,
        *_DTYPE_NAMES,
    }
)

_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_MEMBER, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"


class SavedTensor(NamedTuple):
    """A tensor in an archive.

    Args:
        dtype: by the safetensors format's name.
        shape: of the tensor.
        strides: in elements.
        begin: byte of the archive at which element 0 of the tensor lies.
        member: bytes [first, last) of all elements stored.
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
    """Find the elements of a tensor in an archive of `length` bytes.

    Args:
        checksums: whether to compare those of the members that are read here: of all but the
            elements.

    Raises:
        ValueError: it is no such archive, holds something else than one plain tensor, or does not
            match a checksum.
    """
    members = _members(read, length, where)
    inside = {name.partition("/")[2]: member for name, member in members.items()}
    if len(inside) != len(members) or "data.pkl" not in inside:
        _refuse(where, "it is no tensor that torch.save wrote")
    found = {name: b"" for name in ("byteorder", "data.pkl") if name in inside}
    for name in found:
        member = inside[name]
        if member.size > MAX_DESCRIPTION_BYTES:
            _refuse(where, f"its {name} has {member.size} bytes, more than a tensor's")
        found[name] = read(member.begin, member.size)
    if found.get("byteorder", b"little") != b"little":
        _refuse(where, "its bytes are not in little-endian order")
    tensor = _described(read_pickle(found["data.pkl"], ALLOWED, where), inside, where)
    # Last: of a description that asks for a program to be run, that is to be told.
    for name, data in found.items():
        if checksums and zlib.crc32(data) != inside[name].crc32:
            raise ValueError(
                f"{where} is damaged: its {name} does not match its checksum; if torch wrote "
                "none, give --no-checksums"
            )
    return tensor


def _described(value: Any, members: Mapping[str, _Member], where: str) -> SavedTensor:
    """Return the tensor that the pickle of an archive describes."""
    if not isinstance(value, Made) or value.name not in (_REBUILD_V2, _REBUILD_V3):
        _refuse(where, "it holds something else than a tensor")
    third = value.name == _REBUILD_V3
    try:
        storage, offset, shape, strides = value.args[:4]
        mark, kind, key, _, count = storage.value
        dtype = _DTYPE_NAMES[value.args[6].text] if third else _STORAGES[kind.text]
        known = isinstance(storage, Persistent) and isinstance(kind, Name) and mark == "storage"
        member = members["data/" + key]
        numbers = (offset, count, *shape, *strides)
        known = known and len(shape) == len(strides) and all(type(n) is int for n in numbers)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        _refuse(where, "its description is not that of a tensor")
    if not known:
        _refuse(where, "its description is not that of a tensor")
    itemsize = DTYPES[dtype].itemsize
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    needed = (offset + last + 1) * itemsize if math.prod(shape) else 0
    stored = count if third else count * itemsize
    if min(numbers) < 0 or stored != member.size or needed > member.size:
        _refuse(where, f"a tensor of {dtype} {list(shape)} does not lie in {member.size} bytes")
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
        if count > MAX_MEMBERS or offset + size > length:
            raise ValueError
        directory = read(offset, size)
        found: dict[str, _Member] = {}
        position = 0
        for _ in range(count):
            name, member, position = _entry(directory, position)
            header = read(member.begin, 30)
            if header[:4] != _LOCAL:
                raise ValueError
            # The data lie behind the header before them, whose lengths are its own.
            begin = member.begin + 30 + sum(struct.unpack_from("<HH", header, 26))
            if begin + member.size > length:
                raise ValueError
            found[name] = member._replace(begin=begin)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        if str(error).startswith("cannot read"):
            raise
        _refuse(where, "it is no sound archive of torch.save")
    return found


def _directory(read: Read, length: int) -> tuple[int, int, int]:
    """Return number of members, size and offset of the list at the end. Raises ValueError."""
    end = read(length - 22, 22)
    if end[:4] != _END:
        raise ValueError
    count, size, offset = struct.unpack_from("<HII", end, 10)
    if count != 0xFFFF and size != 0xFFFFFFFF and offset != 0xFFFFFFFF:
        return count, size, offset
    locator = read(length - 42, 20)
    if locator[:4] != _LOCATOR:
        raise ValueError
    (place,) = struct.unpack_from("<Q", locator, 8)
    record = read(place, 56)
    if record[:4] != _END64:
        raise ValueError
    count, size, offset = struct.unpack_from("<QQQ", record, 32)
    return count, size, offset


def _entry(directory: bytes, position: int) -> tuple[str, _Member, int]:
    """Return name, member (`begin` is that of its header) and the position behind an entry."""
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
    wide = _wide(directory[extra_at : extra_at + extra_bytes])
    for i, value in enumerate(sizes):
        if value == 0xFFFFFFFF:
            (sizes[i],) = struct.unpack_from("<Q", wide)
            wide = wide[8:]
    if method != 0 or sizes[0] != sizes[1]:  # packed: it could unpack to anything
        raise ValueError
    end = extra_at + extra_bytes + comment_bytes
    return name, _Member(sizes[2], sizes[0], crc32), end


def _wide(extra: bytes) -> bytes:
    """Return the 64-bit numbers of an entry's extra fields."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            return extra[position + 4 : position + 4 + size]
        position += 4 + size
    return b""


def _refuse(where: str, why: str) -> NoReturn:
    raise ValueError(f"{where} is refused: {why}")
