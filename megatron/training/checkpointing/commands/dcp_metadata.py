# SPDX-License-Identifier: Apache-2.0
"""The contents of a torch.distributed.checkpoint folder, from its `.metadata`, without unpickling.

The `.metadata` file lists the tensors and their locations. It is a pickle of dataclasses, parsed as
data (`plain_pickle.py`) and checked field by field.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.core.boxes import Box
from megatron.core.dist_checkpointing.manifest import MAX_DIMENSIONS
from megatron.core.dist_checkpointing.shard_format import TORCH_NAMES
from megatron.core.untrusted_files import read_regular
from megatron.training.checkpointing.commands.plain_pickle import (
    Finish,
    Name,
    Pairs,
    PickledObject,
    read_pickle,
)
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
