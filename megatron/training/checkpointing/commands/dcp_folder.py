# SPDX-License-Identifier: Apache-2.0
"""Read boxes of tensors from a folder of torch.distributed.checkpoint, without unpickling.

Reads are positioned, of the required bytes only, into reused memory. The folder's `.metadata` lists
the tensors and their locations. It is a pickle of dataclasses, parsed as data (`plain_pickle.py`)
and checked field by field. Each chunk of a tensor is an archive (`torch_save_archive.py`).
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch

from megatron.core.boxes import Box, BoxIndex, tiles
from megatron.core.dist_checkpointing.manifest import MAX_DIMENSIONS
from megatron.core.dist_checkpointing.safetensors_file import DTYPES, Scratch, as_bytes
from megatron.core.dist_checkpointing.shard_format import TORCH_NAMES
from megatron.core.untrusted_files import PositionedFile, read_regular
from megatron.training.checkpointing.commands.plain_pickle import (
    Finish,
    Name,
    Pairs,
    PickledObject,
    read_pickle,
)
from megatron.training.checkpointing.commands.torch_save_archive import SavedTensor, find_tensor
from megatron.training.checkpointing.find import METADATA_NAME

#: Size limit of `.metadata`, enough for some 200,000 chunks.
MAX_METADATA_BYTES = 40 << 20

_METADATA = "torch.distributed.checkpoint.metadata"
#: Module of a tensor's properties in older versions of torch.
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_METADATA_DTYPES = {f"torch.{torch_name}": name for name, torch_name in TORCH_NAMES.items()}
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PROPERTIES = frozenset({f"{_METADATA}.TensorProperties", f"{_SHARDED}.TensorProperties"})

#: Dtypes that this project does not support: tensors with them are rejected, not the whole folder.
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
    """A box of a tensor, stored as one torch.save archive in `length` bytes of a file."""

    box: Box
    file: str
    begin: int
    length: int


class DcpTensor(NamedTuple):
    """A tensor: dtype by its safetensors name (or torch's, if there is none), shape, and the boxes
    in which it was saved."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredBytes, ...]


class Metadata(NamedTuple):
    """The tensors of a folder by name, the names of other items, and the total bytes of tensor
    chunks in each file."""

    tensors: dict[str, DcpTensor]
    others: tuple[str, ...]
    lengths: dict[str, int]


def read_metadata(folder: Path) -> Metadata:
    """Read the contents of a torch.distributed.checkpoint folder's `.metadata`.

    Raises:
        ValueError: the file is missing or damaged, or its pickle refers to more than tensors.
    """
    path = folder / METADATA_NAME
    try:
        data = read_regular(path, MAX_METADATA_BYTES)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    try:
        return _metadata(read_pickle(data, METADATA_GLOBALS, str(path), finish=_FINISH))
    except _MetadataError as error:
        raise ValueError(f"{path} is refused: {error}") from None


def _metadata(root: Any) -> Metadata:
    """Return the contents of the pickle in `.metadata`. Raises _MetadataError."""
    fields = _fields(root, f"{_METADATA}.Metadata", "state_dict_metadata", "storage_data")
    items, stored = fields
    if not isinstance(items, Pairs) or not isinstance(stored, Pairs):
        raise _MetadataError("its tensors and their locations are not dicts")
    del root, fields
    locations: dict[str, list[tuple[tuple[int, ...], _ChunkLocation]]] = {}
    lengths: dict[str, int] = {}
    for index, location in stored.items():
        if not isinstance(index, _Index) or not isinstance(location, _ChunkLocation):
            raise _MetadataError("a location in a file is not described as torch does")
        if index.offsets is not None:  # None for items that are not tensors
            _check_location(index.name, location)
            locations.setdefault(index.name, []).append((index.offsets, location))
            lengths[location.file] = lengths.get(location.file, 0) + location.length
    stored.flat.clear()
    tensors: dict[str, DcpTensor] = {}
    non_tensors = []
    for key, item in items.items():
        name = _text(key)
        if isinstance(item, _Described):
            tensors[name] = _tensor(name, item, locations.pop(name, []))
        elif _is_a(item, f"{_METADATA}.BytesStorageMetadata"):
            non_tensors.append(name)
        else:
            raise _MetadataError(f"{name} is not described as torch does")
    return Metadata(tensors, tuple(non_tensors), lengths)


class _MetadataError(Exception):
    """Invalid `.metadata`; the caller adds the path to the message."""


class _Index(NamedTuple):
    """Name and offsets of a chunk; the offsets are None for an item that is not a tensor."""

    name: str
    offsets: tuple[int, ...] | None


class _ChunkLocation(NamedTuple):
    """File and byte range of a chunk; `transformed` if it is compressed or encoded."""

    file: str
    begin: int
    length: int
    transformed: bool


class _Described(NamedTuple):
    """The description of a tensor in `.metadata`."""

    dtype: Name
    shape: tuple[int, ...]
    boxes: list[Box]


def _index(pickled: PickledObject) -> _Index:
    name, offsets = _fields(pickled, pickled.name, "fqn", optional="offset")
    return _Index(_text(name), None if offsets is None else _sizes(offsets))


def _location(pickled: PickledObject) -> _ChunkLocation:
    fields = ("relative_path", "offset", "length")
    file, begin, length, transforms = _fields(
        pickled, pickled.name, *fields, optional="transform_descriptors"
    )
    return _ChunkLocation(_text(file), _count(begin), _count(length), bool(transforms))


def _check_location(name: str, location: _ChunkLocation) -> None:
    if Path(location.file).name != location.file or location.file in ("", ".", "..", METADATA_NAME):
        raise _MetadataError(f"{name} is stored in {location.file!r}, not in a plain file name")
    if location.transformed:
        raise _MetadataError(f"{name} is compressed or otherwise transformed")


def _box(pickled: PickledObject) -> Box:
    offsets, sizes = _fields(pickled, pickled.name, "offsets", "sizes")
    return Box(_sizes(offsets), _sizes(sizes))


def _dtype(pickled: PickledObject) -> Name:
    """Return the dtype, the first property of a tensor."""
    state = pickled.state
    if not isinstance(state, tuple) or not state or not isinstance(state[0], Name):
        raise _MetadataError("the properties of a tensor do not begin with a dtype")
    if not state[0].text.startswith("torch."):
        raise _MetadataError(f"a tensor has the dtype {state[0].text}")
    return state[0]


def _described_tensor(pickled: PickledObject) -> _Described:
    dtype, shape, boxes = _fields(pickled, pickled.name, "properties", "size", "chunks")
    if not isinstance(dtype, Name) or not isinstance(boxes, list):
        raise _MetadataError("the properties or chunks of a tensor are not described as torch does")
    if not all(isinstance(box, Box) for box in boxes):
        raise _MetadataError("a chunk of a tensor is not described as torch does")
    return _Described(dtype, _sizes(shape), boxes)


_FINISH: Mapping[str, Finish] = MappingProxyType(
    {
        "torch.Size": lambda pickled: _sizes(pickled),
        f"{_METADATA}.ChunkStorageMetadata": _box,
        f"{_METADATA}.MetadataIndex": _index,
        f"{_METADATA}.TensorStorageMetadata": _described_tensor,
        _STORED: _location,
        **dict.fromkeys(_PROPERTIES, _dtype),
    }
)


def _tensor(
    name: str, item: _Described, locations: list[tuple[tuple[int, ...], _ChunkLocation]]
) -> DcpTensor:
    shape, chunks = item.shape, []
    locations.sort()  # not hashed: a crafted folder could make hashes collide
    for box in item.boxes:
        if not len(shape) == len(box.offsets) == len(box.sizes) or any(
            o + n > whole for o, n, whole in zip(*box, shape, strict=True)
        ):
            raise _MetadataError(f"{name} has a box {box} outside its shape {list(shape)}")
        index = bisect_left(locations, (box.offsets,))
        if index == len(locations) or locations[index][0] != box.offsets:
            raise _MetadataError(f"it does not state where {name}{box} is stored")
        location = locations[index][1]
        chunks.append(StoredBytes(box, location.file, location.begin, location.length))
    dtype = _METADATA_DTYPES.get(item.dtype.text, item.dtype.text)
    return DcpTensor(dtype, shape, tuple(chunks))


def _is_a(value: Any, name: str) -> bool:
    return isinstance(value, PickledObject) and value.name == name


def _fields(value: Any, name: str, *fields: str, optional: str | None = None) -> list[Any]:
    """Return fields of a pickled dataclass; the optional one comes last, None if it is missing."""
    if not _is_a(value, name) or not isinstance(value.state, Pairs):
        raise _MetadataError(f"it contains no {name}, or one without fields")
    state = {key: inner for key, inner in value.state.items() if isinstance(key, str)}
    for field in fields:
        if field not in state:
            raise _MetadataError(f"a {name} has no {field}")
    values = [state[field] for field in fields]
    return values if optional is None else [*values, state.get(optional)]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise _MetadataError("a name is not printable text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _MetadataError("a number of bytes or elements is not an integer below 2^63")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the dimensions of a torch.Size."""
    if _is_a(value, "torch.Size") and len(value.args) == 1:
        (value,) = value.args
    if type(value) is not tuple:
        raise _MetadataError("a shape is not a torch.Size")
    if len(value) > MAX_DIMENSIONS:
        raise _MetadataError(f"a shape has {len(value)} dimensions, more than {MAX_DIMENSIONS}")
    return tuple(_count(item) for item in value)


#: Bytes read at a time for a checksum.
PIECE_BYTES = 1 << 20

#: Limit on open files; a large run has more files than a process may open.
MAX_OPEN = 64

#: Archives up to this size are read with one call.
SMALL_ARCHIVE_BYTES = 1 << 16

#: Limit on the span of a file read at once for strided elements, and the stride from which on
#: elements are read one by one, in bytes.
MAX_SPAN_BYTES, APART_BYTES = 16 << 20, 1 << 13

#: Limit on the reads of a folder: a constant, plus one per so many bytes of its files.
MAX_READS, BYTES_PER_READ = 1 << 20, 512
#: Chunks of a tensor searched in about the time of one read.
CHUNKS_PER_READ = 16


class DcpFolder:
    """An open folder, which counts the bytes read.

    Args:
        path: the folder that contains `.metadata`.
        checksums: whether to verify torch.save's checksums before data are used.

    Attributes:
        tensors: tensors by name.
        others: names of items that are not tensors, which are never read.

    Raises:
        ValueError: this is not such a folder, or it refers to more than tensors.
    """

    def __init__(self, path: Path, *, checksums: bool = True) -> None:
        self.path, self.bytes_read = path, 0
        self._checksums = checksums
        self.tensors, self.others, self._lengths = read_metadata(path)
        self._files: dict[str, PositionedFile] = {}
        self._sizes: dict[str, int] = {}
        self._reads = 0
        self._open_tensors: dict[tuple[str, int], SavedTensor] = {}  # by name and chunk number
        self._indices: dict[str, BoxIndex] = {}
        self._scratch = Scratch()

    def __enter__(self) -> DcpFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()

    def find(self, name: str) -> DcpTensor:
        """Return a tensor after checking that it can be read completely. Raises ValueError."""
        tensor = self.tensors[name]
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{self.path}: {name} has the unsupported dtype {tensor.dtype}")
        if not tiles([stored.box for stored in tensor.chunks], tensor.shape):
            raise ValueError(f"{self.path} does not contain every element of {name} exactly once")
        for stored in tensor.chunks:
            self._check_size(name, tensor, stored)
        return tensor

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Read a box of a tensor into `target`, converting the dtype.

        Raises:
            ValueError: a file is truncated or missing, does not match its checksum, or contains
                something else than the tensor.
        """
        if not box.numel:
            return
        tensor = self.tensors[name]
        if name not in self._indices:
            self._indices[name] = BoxIndex([stored.box for stored in tensor.chunks])
        self._count_reads(len(tensor.chunks) // CHUNKS_PER_READ)
        for number, common in self._indices[name].overlaps(box):
            stored = tensor.chunks[number]
            saved = self._open(name, tensor, number)
            inner = common.seen_from(stored.box.offsets)
            target_view = target[common.seen_from(box.offsets).slices]
            self._read_elements(name, stored, saved, inner, target_view)

    def _read_elements(
        self, name: str, stored: StoredBytes, saved: SavedTensor, box: Box, target: torch.Tensor
    ) -> None:
        """Read a box of a chunk in file spans of limited size.

        If elements of the box are far apart in the file, each run of elements is read separately.
        """
        itemsize = DTYPES[saved.dtype].itemsize
        reach = [(n - 1) * stride for n, stride in zip(box.sizes, saved.strides, strict=True)]
        if (1 + sum(reach)) * itemsize <= MAX_SPAN_BYTES:
            first_element = sum(
                o * stride for o, stride in zip(box.offsets, saved.strides, strict=True)
            )
            raw = self._scratch.take((1 + sum(reach)) * itemsize)
            begin = stored.begin + saved.begin + first_element * itemsize
            self._read(stored.file, begin, as_bytes(raw), name=name)
            source = raw.view(DTYPES[saved.dtype]).as_strided(box.sizes, saved.strides)
            target.copy_(source)
            return
        dim = max(range(len(reach)), key=lambda d: reach[d])
        stride_bytes = saved.strides[dim] * itemsize
        inner_bytes = (1 + sum(reach) - reach[dim]) * itemsize
        together = 1
        if stride_bytes < APART_BYTES:
            together = max(1, (MAX_SPAN_BYTES - inner_bytes) // stride_bytes)
        for begin in range(0, box.sizes[dim], together):
            count = min(together, box.sizes[dim] - begin)
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + begin, count
            inner = Box(tuple(offsets), tuple(sizes))
            target_view = target.narrow(dim, begin, count)
            self._read_elements(name, stored, saved, inner, target_view)

    def _open(self, name: str, tensor: DcpTensor, number: int) -> SavedTensor:
        """Return the location of a chunk's elements, which is checked once."""
        if (name, number) in self._open_tensors:
            return self._open_tensors[name, number]
        stored = tensor.chunks[number]
        where = f"{self.path / stored.file}: {name}{stored.box}"

        def read(position: int, count: int) -> bytes:
            if position < 0 or position + count > stored.length:
                raise ValueError("outside the archive")
            if is_small:
                return whole[position : position + count]
            return self._read_bytes(stored.file, stored.begin + position, count, name=name)

        is_small = stored.length <= SMALL_ARCHIVE_BYTES
        whole = (
            self._read_bytes(stored.file, stored.begin, stored.length, name=name)
            if is_small
            else b""
        )
        saved = find_tensor(read, stored.length, where, checksums=self._checksums)
        strides = _strides(saved, stored.box.sizes)
        if saved.dtype != tensor.dtype or strides is None:
            raise ValueError(
                f"{where} is refused: it contains {saved.dtype} {list(saved.shape)}, but "
                f".metadata specifies {tensor.dtype} {list(stored.box.sizes)}"
            )
        if self._checksums:
            self._check(stored, saved, name=name, where=where)
        saved = saved._replace(shape=stored.box.sizes, strides=strides)
        self._open_tensors[name, number] = saved
        return saved

    def _check_size(self, name: str, tensor: DcpTensor, stored: StoredBytes) -> None:
        """Check that the file is large enough for the claimed elements, before allocating memory.

        Raises:
            ValueError: the file is too small.
        """
        needed = stored.box.numel * DTYPES[tensor.dtype].itemsize
        size = self._file(stored.file).size
        if stored.begin + stored.length > size or stored.length < needed:
            raise ValueError(
                f"{self.path / stored.file}: {name}{stored.box} of {needed} bytes does not fit in "
                f"bytes [{stored.begin}, {stored.begin + stored.length}) of a file of {size}: it "
                "was truncated"
            )

    def _check(self, stored: StoredBytes, saved: SavedTensor, *, name: str, where: str) -> None:
        checksum, (member_begin, member_end) = 0, saved.member
        buffer = memoryview(bytearray(PIECE_BYTES))
        for begin in range(member_begin, member_end, PIECE_BYTES):
            block = buffer[: min(PIECE_BYTES, member_end - begin)]
            self._read(stored.file, stored.begin + begin, block, name=name)
            checksum = zlib.crc32(block, checksum)
        if checksum != saved.crc32:
            raise ValueError(
                f"{where} is damaged: bytes [{stored.begin + member_begin}, "
                f"{stored.begin + member_end}) do not "
                "match their checksum; if torch wrote none, give --no-checksums"
            )

    def _file(self, name: str) -> PositionedFile:
        """Return an open file. Raises ValueError."""
        if name not in self._files:
            while len(self._files) >= MAX_OPEN:
                self._files.pop(next(iter(self._files))).close()
            path = self.path / name
            try:
                file = PositionedFile(path)
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from None
            self._files[name] = file
            self._sizes[name] = file.size
            if (claimed := self._lengths.get(name, 0)) > file.size:
                raise ValueError(
                    f"{path} has {file.size} bytes, its tensors take {claimed} by {METADATA_NAME}: "
                    "it was truncated"
                )
        return self._files[name]

    def _count_reads(self, number: int = 1) -> None:
        """Limit the number of reads by the size of the files. Raises ValueError."""
        self._reads += number
        if self._reads > MAX_READS + sum(self._sizes.values()) // BYTES_PER_READ:
            raise ValueError(
                f"{self.path} is refused: its tensors are stored in so many or such scattered "
                "pieces that reading them would take far longer than their size justifies; "
                "save contiguous tensors in fewer pieces"
            )

    def _read_bytes(self, file: str, offset: int, count: int, *, name: str) -> bytes:
        block = bytearray(count)
        self._read(file, offset, memoryview(block), name=name)
        return bytes(block)

    def _read(self, file: str, offset: int, target: memoryview, *, name: str) -> None:
        self._count_reads()
        opened = self._file(file)
        try:
            count = opened.read_into(target, offset)
        except OSError as error:
            raise ValueError(f"cannot read {name} from {opened.path}: {error.strerror}") from None
        if count < len(target):
            raise ValueError(f"cannot read {name} from {opened.path}: it was truncated")
        self.bytes_read += count


def _strides(saved: SavedTensor, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a tensor viewed with these sizes, which may add or drop dimensions of
    size 1; None if the sizes differ otherwise."""
    dimensions = [
        (size, stride) for size, stride in zip(saved.shape, saved.strides, strict=True) if size != 1
    ]
    if [size for size, _ in dimensions] != [size for size in sizes if size != 1]:
        return None
    remaining = iter(dimensions)
    return tuple(0 if size == 1 else next(remaining)[1] for size in sizes)
