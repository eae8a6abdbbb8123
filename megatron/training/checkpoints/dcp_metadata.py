# SPDX-License-Identifier: Apache-2.0
"""The `.metadata` file of torch.distributed.checkpoint: which tensors there are, and where.

It is a pickle of dataclasses, read as data (`pickle_data`) and then checked field by field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.boxes import Box, first_overlap
from megatron.core.dist_checkpointing.dtypes import DTYPES
from megatron.core.untrusted_files import read_regular
from megatron.training.checkpoints.pickle_data import Made, Name, Pairs, read_pickle
from megatron.training.foreign_checkpoint import METADATA_NAME

#: Some million chunks. What is made of a pickle takes about ten times its size.
MAX_METADATA_BYTES = 256 << 20
MAX_DIMENSIONS = 8

_METADATA = "torch.distributed.checkpoint.metadata"
#: Where older versions of torch have the properties of a tensor.
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_DTYPE_NAMES = {str(dtype): name for name, dtype in DTYPES.items()}
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PROPERTIES = frozenset({f"{_METADATA}.TensorProperties", f"{_SHARDED}.TensorProperties"})

#: Dtypes too that no checkpoint of ours holds: their tensors are refused, not the whole folder.
_OTHER_DTYPES = ("complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz")
ALLOWED = frozenset(
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
        *_DTYPE_NAMES,
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
    root = read_pickle(data, ALLOWED, str(path))
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
    boxes = [chunk.box for chunk in tensor.chunks]
    covered = sum(box.numel for box in boxes)
    if covered != math.prod(tensor.shape) or first_overlap([b for b in boxes if b.numel]):
        raise ValueError(f"{where} does not hold every element of {name} exactly once")


class _Odd(Exception):
    """What is wrong, for a line that names the file."""


def _places(value: Any) -> Iterator[tuple[tuple[str, tuple[int, ...]], tuple[str, int, int]]]:
    """Yield where each chunk of a tensor lies, by name and offsets."""
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
    return StoredTensor(_DTYPE_NAMES.get(dtype.text, dtype.text), shape, tuple(chunks))


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
