# SPDX-License-Identifier: Apache-2.0
"""The header of an untrusted GGUF file: metadata and tensors, within bounds of its size.

Format (github.com/ggml-org/ggml, docs/gguf.md), little-endian: the magic number, a version, the
numbers of tensors and of metadata entries; the entries, each a name, a type and a value; the
tensors, each a name, its dimensions from the innermost to the outermost, its type and its offset;
then the data, whose begin is aligned.

Every length is compared with the bytes that follow before it is used, so that time and memory are
bounded by the size of the header, and that by `MAX_HEADER_BYTES`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from megatron.core.untrusted_files import PositionedFile

SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)

#: Largest header. A vocabulary of 256,000 tokens with its merges takes 12 MB.
MAX_HEADER_BYTES = 32 << 20
MAX_DIMENSIONS, _MAX_NAME_BYTES = 4, 1 << 10

_READ_BYTES = 1 << 20
_STRING, _ARRAY = 8, 9
#: Types of metadata values, as numpy dtypes.
_SCALARS: Mapping[int, str] = MappingProxyType(
    {
        0: "u1",
        1: "i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }
)


class TensorType(NamedTuple):
    """A type of tensors: its name, elements per block, bytes per block."""

    name: str
    block_size: int
    block_bytes: int


#: Supported types of tensors, by their numbers in the files.
TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4),
        1: TensorType("F16", 1, 2),
        8: TensorType("Q8_0", 32, 34),
        12: TensorType("Q4_K", 256, 144),
        13: TensorType("Q5_K", 256, 176),
        14: TensorType("Q6_K", 256, 210),
        30: TensorType("BF16", 1, 2),
    }
)


class GGUFTensor(NamedTuple):
    """A tensor of a file: its type, its shape (outermost dimension first), its bytes."""

    type: TensorType
    shape: tuple[int, ...]
    begin: int
    end: int


class GGUFFile(PositionedFile):
    """An open GGUF file with a valid header.

    Args:
        path: the file.
        follow_links: follow a symbolic link to any target.

    Attributes:
        metadata: the values by their names: numbers, texts, lists of texts, and numpy arrays.
        tensors: the tensors by their names.

    Raises:
        ValueError: the file cannot be read, or its header is invalid.
    """

    def __init__(self, path: Path, *, follow_links: bool = False) -> None:
        try:
            super().__init__(path, follow_links=follow_links)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        try:
            self._header, self._position = bytearray(), 0
            self.metadata: Mapping[str, Any] = {}
            self.tensors: Mapping[str, GGUFTensor] = {}
            self._read_header()
            self._header = bytearray()
        except BaseException:
            self.close()
            raise

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self.path} is not a valid GGUF file: {why}")

    def _take(self, count: int, what: str) -> memoryview:
        """Return the next bytes of the header. Raises ValueError if there are not so many."""
        begin, end = self._position, self._position + count
        self._load(end, what)
        self._position = end
        return memoryview(bytes(self._header[begin:end]))

    def _load(self, end: int, what: str) -> None:
        """Read the header up to a byte. Raises ValueError if there are not so many."""
        if end > self.size:
            self._refuse(
                f"{what} ends at byte {end}, but the file has {self.size}: it was truncated, or a "
                "length is wrong"
            )
        if end > MAX_HEADER_BYTES:
            self._refuse(f"{what} exceeds the limit of {MAX_HEADER_BYTES} bytes for a header")
        while len(self._header) < end:
            block = bytearray(min(_READ_BYTES, self.size - len(self._header)))
            if self.read_into(memoryview(block), len(self._header)) < len(block):
                self._refuse("it was truncated while it was read")
            self._header += block

    def _integer(self, size: int, what: str) -> int:
        return int.from_bytes(self._take(size, what), "little")

    def _text(self, what: str, *, max_bytes: int = MAX_HEADER_BYTES) -> str:
        size = self._integer(8, what)
        if size > max_bytes:
            self._refuse(f"{what} has {size} bytes, more than the limit of {max_bytes}")
        try:
            return str(self._take(size, what), "utf-8")
        except UnicodeDecodeError:
            self._refuse(f"{what} is not UTF-8 text")

    def _read_header(self) -> None:
        """Read and check the header. Raises ValueError."""
        if bytes(self._take(4, "the magic number")) != _MAGIC:
            self._refuse("it does not begin with GGUF")
        version = self._integer(4, "the version")
        if version not in _VERSIONS:
            self._refuse(f"its version is {version}: supported are 2 and 3, little-endian")
        num_tensors = self._integer(8, "the number of tensors")
        num_values = self._integer(8, "the number of metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):  # each one takes bytes, which `_take` bounds
            name = self._text("a metadata name", max_bytes=_MAX_NAME_BYTES)
            if name in metadata:
                self._refuse(f"its metadata has {name!r:.80} twice")
            kind = self._integer(4, f"the type of {name!r:.80}")
            metadata[name] = self._value(kind, f"the value of {name!r:.80}")
        self.metadata = MappingProxyType(metadata)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
            self._refuse(f"general.alignment is {alignment!r:.80}")
        unplaced: dict[str, tuple[TensorType, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = self._text("the name of a tensor", max_bytes=_MAX_NAME_BYTES)
            if name in unplaced:
                self._refuse(f"it has the tensor {name!r:.80} twice")
            unplaced[name] = self._tensor(f"{name!r:.80}")
        data_begin = -(-self._position // alignment) * alignment
        tensors = {
            name: self._locate(f"{name!r:.80}", *tensor, data_begin, alignment)
            for name, tensor in unplaced.items()
        }
        self._check_overlaps(tensors)
        self.tensors = MappingProxyType(tensors)

    def _value(self, kind: int, what: str) -> Any:
        """Return a metadata value."""
        if kind == _STRING:
            return self._text(what)
        if kind in _SCALARS:
            return self._numbers(kind, 1, what)[0].item()
        if kind != _ARRAY:
            self._refuse(f"{what} has the unknown type {kind}")
        element_kind = self._integer(4, what)
        count = self._integer(8, what)
        if element_kind in _SCALARS:
            return self._numbers(element_kind, count, what)
        if element_kind != _STRING:
            self._refuse(f"{what} is a list of the unsupported type {element_kind}")
        if count > (self.size - self._position) // 8:  # before a loop of so many steps
            self._refuse(f"{what} has {count} texts, but the file has {self.size} bytes")
        return self._texts(count, what)

    def _texts(self, count: int, what: str) -> list[str]:
        """Return the texts of a list, such as the tokens of a vocabulary."""
        header, position, texts = self._header, self._position, []
        for _ in range(count):
            end = position + 8
            if end > len(header):
                self._load(end, what)
            end += int.from_bytes(header[position:end], "little")
            if end > len(header):
                self._load(end, what)
            texts.append(header[position + 8 : end])
            position = end
        self._position = position
        try:
            return [str(text, "utf-8") for text in texts]
        except UnicodeDecodeError:
            self._refuse(f"{what} is not UTF-8 text")

    def _numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize, what), dtype)

    def _tensor(self, name: str) -> tuple[TensorType, tuple[int, ...], int]:
        """Return type, shape and offset of the next tensor."""
        num_dims = self._integer(4, f"the number of dimensions of {name}")
        if not 0 < num_dims <= MAX_DIMENSIONS:
            self._refuse(f"{name} has {num_dims} dimensions")
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, f"the shape of {name}"))
        number = self._integer(4, f"the type of {name}")
        if number not in TENSOR_TYPES:
            names = ", ".join(tensor_type.name for tensor_type in TENSOR_TYPES.values())
            raise ValueError(
                f"{self.path}: {name} has the tensor type {number}: supported are {names}; convert "
                "the model to one of them"
            )
        return TENSOR_TYPES[number], dims[::-1], self._integer(8, f"the offset of {name}")

    def _locate(
        self,
        name: str,
        tensor_type: TensorType,
        shape: tuple[int, ...],
        offset: int,
        data_begin: int,
        alignment: int,
    ) -> GGUFTensor:
        """Return a tensor with its bytes in the file."""
        if shape[-1] % tensor_type.block_size:
            self._refuse(
                f"{name} has rows of {shape[-1]} elements, not a multiple of the "
                f"{tensor_type.block_size} of a block of {tensor_type.name}"
            )
        size = math.prod(shape) // tensor_type.block_size * tensor_type.block_bytes
        if offset % alignment or data_begin + offset + size > self.size:
            self._refuse(
                f"{name} {list(shape)} of {tensor_type.name} takes {size} bytes at offset {offset} "
                f"of the data, but the file ends {max(0, self.size - data_begin)} bytes into them"
            )
        return GGUFTensor(tensor_type, shape, data_begin + offset, data_begin + offset + size)

    def _check_overlaps(self, tensors: Mapping[str, GGUFTensor]) -> None:
        position, previous = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda entry: entry[1][2:]):
            if tensor.begin < position:
                self._refuse(f"{name!r:.80} overlaps {previous!r:.80}")
            position, previous = tensor.end, name


def gguf_path(path: Path) -> Path | None:
    """Return the GGUF file that a path names: the file, or the only one in a folder without
    config.json; None for any other path."""
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists() or any(path.glob("iter_*")):
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    return files[0] if len(files) == 1 else None
