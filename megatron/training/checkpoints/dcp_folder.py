# SPDX-License-Identifier: Apache-2.0
"""A folder of torch.distributed.checkpoint opened to read boxes of its tensors, without unpickling.

Reads are positioned, of the wanted bytes only, into memory that is reused.

The `.metadata` file lists the tensors and where they are. It is a pickle of dataclasses, read as
data and then checked field by field: nothing is imported, looked up or called, whatever the pickle
asks for. A pickle is a program for a small stack machine; this reader implements the instructions
that build plain values. Where the program would call something, the reader records the name, the
arguments and the state; a name that is not on the caller's list ends the reading.

One tensor is stored as torch.save writes it: a zip archive of uncompressed members, `data.pkl` with
dtype, shape and strides, and `data/0`, the elements. Format: PKWARE's APPNOTE 4.3, with the 64-bit
records that torch always writes.
"""

from __future__ import annotations

import math
import os
import pickletools
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, NoReturn

import torch

from megatron.core.boxes import Box, intersect, tiles
from megatron.core.dist_checkpointing.shards import DTYPES, Scratch, as_bytes
from megatron.core.untrusted_files import read_regular, regular_fd
from megatron.training.newest_checkpoint import METADATA_NAME


class Name(NamedTuple):
    """A thing of a module that a pickle refers to, as `torch.float32`."""

    text: str


class Persistent(NamedTuple):
    """What a pickle keeps outside of itself, by the value that says where."""

    value: Any


@dataclass(eq=False)
class Made:
    """What calling `name` with `args` would have made, and the state that it would have got."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(eq=False)
class Pairs:
    """A dict as its items in order: no key is hashed or compared, as a key may be anything."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


_MARK = object()
_CONSTANTS: Mapping[str, Any] = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False})
#: Instructions whose own argument is the value.
_VALUES = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE")
    + ("BINUNICODE8", "SHORT_BINBYTES", "BINBYTES")
)
_NO_EFFECT = frozenset({"PROTO", "FRAME"})


def read_pickle(data: bytes, allowed: Set[str], where: str) -> Any:
    """Return the value that a pickle describes, with `Made` and `Name` for what is no plain value.

    Args:
        data: the pickle.
        allowed: dotted names that it may refer to.
        where: what to name in an error.

    Raises:
        ValueError: it refers to another name, needs an instruction that plain values do not need,
            or is damaged.
    """
    return _Machine(allowed, where).run(data)


class _Machine:
    """The stack machine."""

    def __init__(self, allowed: Set[str], where: str) -> None:
        self._allowed, self._where = allowed, where
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._steps: Mapping[str, Callable[[Any], None]] = {
            "MARK": lambda _: self._stack.append(_MARK),
            "EMPTY_TUPLE": lambda _: self._stack.append(()),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "EMPTY_DICT": lambda _: self._stack.append(Pairs()),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "TUPLE": lambda _: self._stack.append(tuple(self._to_mark())),
            "APPEND": lambda _: self._extend([self._stack.pop()]),
            "APPENDS": lambda _: self._extend(self._to_mark()),
            "SETITEM": lambda _: self._update([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._update(self._to_mark()),
            "MEMOIZE": lambda _: self._memoize(len(self._memo)),
            "BINPUT": self._memoize,
            "LONG_BINPUT": self._memoize,
            "BINGET": self._recall,
            "LONG_BINGET": self._recall,
            "GLOBAL": lambda text: self._name(*text.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(self._stack.pop(-2), self._stack.pop()),
            "REDUCE": lambda _: self._make(),
            "NEWOBJ": lambda _: self._make(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self._stack.append(Persistent(self._stack.pop())),
        }

    def run(self, data: bytes) -> Any:
        """Carry out the program and return what it leaves."""
        try:
            # Names with odd escapes are none that is allowed; they need no warning before.
            with warnings.catch_warnings(action="ignore"):
                return self._run(data)
        except (IndexError, KeyError, TypeError) as error:
            self._refuse(f"it is damaged ({type(error).__name__})")
        except _Refusal:
            raise
        except ValueError as error:  # of the decoding of instructions, or no single value
            self._refuse(f"it is damaged ({error})")

    def _run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (found,) = self._stack
                return found
            self._carry_out(opcode.name, argument)
        raise ValueError("it has no end")

    def _carry_out(self, name: str, argument: Any) -> None:
        if name in _NO_EFFECT:
            return
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in self._steps:
            self._steps[name](argument)
        else:
            self._refuse(f"it holds the instruction {name}, which plain values do not need")

    def _tuple(self, size: int) -> None:
        values = tuple(self._stack[-size:])
        if len(values) != size or any(value is _MARK for value in values):
            raise IndexError
        self._stack[-size:] = [values]

    def _to_mark(self) -> list[Any]:
        """Take everything above the last mark, and the mark."""
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise TypeError
        self._stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        target = self._stack[-1]
        # Some dicts are made by calling their class.
        if isinstance(target, Made) and target.name == "collections.OrderedDict":
            return
        if not isinstance(target, Pairs):
            raise TypeError
        target.items.extend(zip(values[::2], values[1::2], strict=True))

    def _memoize(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _recall(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError
        text = f"{module}.{name}"
        if text not in self._allowed:
            shown = text if text.isprintable() and len(text) <= 100 else f"{text[:100]!r}..."
            self._refuse(f"it asks for {shown}, which no tensor needs; nothing was run")
        self._stack.append(Name(text))

    def _make(self) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise TypeError
        self._stack.append(Made(called.text, args))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if not isinstance(target, Made):
            raise TypeError
        target.state = state

    def _refuse(self, why: str) -> NoReturn:
        raise _Refusal(f"{self._where} is refused: {why}")


class _Refusal(ValueError):
    """A line for the user, already whole."""


#: Some million chunks. What is made of a pickle takes about ten times its size.
MAX_METADATA_BYTES = 256 << 20
MAX_DIMENSIONS = 8

_METADATA = "torch.distributed.checkpoint.metadata"
#: Where older versions of torch have the properties of a tensor.
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_METADATA_DTYPES = {str(dtype): name for name, dtype in DTYPES.items()}
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PROPERTIES = frozenset({f"{_METADATA}.TensorProperties", f"{_SHARDED}.TensorProperties"})

#: Dtypes that no checkpoint of this project has: their tensors are refused, not the whole folder.
_OTHER_DTYPES = ("complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz")
METADATA_GLOBALS = frozenset(
    {
        *(
            f"{_METADATA}.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_SHARDED}.TensorProperties",
        f"{_SHARDED}.MEM_FORMAT_ENCODING",
        _STORED,
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.strided",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
        "collections.OrderedDict",
        *_METADATA_DTYPES,
        *(f"torch.{name}" for name in _OTHER_DTYPES),
    }
)


class StoredBytes(NamedTuple):
    """A box of a tensor, saved as one archive of torch.save in `length` bytes of a file."""

    box: Box
    file: str
    begin: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor: dtype by the safetensors format's name (or torch's, if that has none), shape, and
    the boxes that it was saved in."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredBytes, ...]


class Metadata(NamedTuple):
    """The tensors of a folder by name, and the names of what is no tensor."""

    tensors: dict[str, StoredTensor]
    others: tuple[str, ...]


def read_metadata(folder: Path) -> Metadata:
    """Read what a folder of torch.distributed.checkpoint holds.

    Raises:
        ValueError: there is no such file, or it asks for more than tensors, is damaged or lies.
    """
    path = folder / METADATA_NAME
    try:
        data = read_regular(path, MAX_METADATA_BYTES)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    root = read_pickle(data, METADATA_GLOBALS, str(path))
    try:
        fields = _fields(root, f"{_METADATA}.Metadata")
        places = dict(_places(fields["storage_data"]))
        tensors: dict[str, StoredTensor] = {}
        others = []
        for name, item in _pairs(fields["state_dict_metadata"]):
            if _is_a(item, f"{_METADATA}.BytesStorageMetadata"):
                others.append(_text(name))
            else:
                tensors[_text(name)] = _tensor(_text(name), item, places)
    except _Odd as odd:
        raise ValueError(f"{path} is refused: {odd}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be understood ({type(error).__name__}: {error})") from None
    return Metadata(tensors, tuple(others))


def check_cover(name: str, tensor: StoredTensor, where: str) -> None:
    """Raise ValueError unless the boxes of a tensor cover it exactly once."""
    if not tiles([chunk.box for chunk in tensor.chunks], tensor.shape):
        raise ValueError(f"{where} does not hold every element of {name} exactly once")


class _Odd(Exception):
    """What is wrong, for a line that names the file."""


def _places(value: Any) -> Iterator[tuple[tuple[str, tuple[int, ...]], tuple[str, int, int]]]:
    """Yield where each chunk of a tensor is, by name and offsets."""
    for key, item in _pairs(value):
        index = _fields(key, f"{_METADATA}.MetadataIndex")
        if index.get("offset") is None:
            continue  # of what is no tensor
        stored = _fields(item, _STORED)
        name, file = _text(index["fqn"]), _text(stored["relative_path"])
        if Path(file).name != file or file in ("", ".", "..", METADATA_NAME):
            raise _Odd(f"{name} lies in {file!r}, which is no plain name of a file")
        if stored.get("transform_descriptors"):
            raise _Odd(f"{name} is compressed or otherwise transformed, which is not read")
        yield (
            (name, _sizes(index["offset"])),
            (file, _count(stored["offset"]), _count(stored["length"])),
        )


def _tensor(
    name: str, item: Any, places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]
) -> StoredTensor:
    fields = _fields(item, f"{_METADATA}.TensorStorageMetadata")
    properties = fields["properties"]
    if not isinstance(properties, Made) or properties.name not in _PROPERTIES:
        raise TypeError(f"the properties of {name}")
    dtype = properties.state[0]
    if not isinstance(dtype, Name) or not dtype.text.startswith("torch."):
        raise TypeError(f"the dtype of {name}")
    shape = _sizes(fields["size"])
    chunks = []
    for chunk in fields["chunks"]:
        inner = _fields(chunk, f"{_METADATA}.ChunkStorageMetadata")
        box = Box(_sizes(inner["offsets"]), _sizes(inner["sizes"]))
        if not len(shape) == len(box.offsets) == len(box.sizes) or any(
            o + n > whole for o, n, whole in zip(*box, shape, strict=True)
        ):
            raise _Odd(f"{name} has a box {box} outside its shape {list(shape)}")
        if (name, box.offsets) not in places:
            raise _Odd(f"it does not say where {name}{box} lies")
        chunks.append(StoredBytes(box, *places[name, box.offsets]))
    return StoredTensor(_METADATA_DTYPES.get(dtype.text, dtype.text), shape, tuple(chunks))


def _is_a(value: Any, name: str) -> bool:
    return isinstance(value, Made) and value.name == name


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the fields of what is a dataclass there."""
    if not _is_a(value, name):
        raise TypeError(f"no {name}")
    return {_text(key): inner for key, inner in _pairs(value.state)}


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise TypeError("no dict")
    return value.items


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise TypeError("no name")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError("no number of things")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    if not _is_a(value, "torch.Size") or len(value.args) != 1 or type(value.args[0]) is not tuple:
        raise TypeError("no torch.Size")
    if len(value.args[0]) > MAX_DIMENSIONS:
        raise TypeError("too many dimensions")
    return tuple(_count(item) for item in value.args[0])


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
_TENSOR_DTYPES: Mapping[str, str] = MappingProxyType({str(d): name for name, d in DTYPES.items()})
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
    tensor = _described(read_pickle(found["data.pkl"], TENSOR_GLOBALS, where), inside, where)
    # Last: of a description that asks for a program to be run, that is to be reported.
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
        dtype = _TENSOR_DTYPES[value.args[6].text] if third else _STORAGES[kind.text]
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
            # The data lie after the header before them, whose lengths are its own.
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
    """Return name, member (`begin` is that of its header) and the position after an entry."""
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
        """Return where the elements of a chunk are, which is checked once."""
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
