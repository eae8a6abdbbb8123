# SPDX-License-Identifier: Apache-2.0
"""One safetensors file from outside: its header checked before use, slices of tensors read.

Nothing is taken from the file but numbers. The header must describe the file exactly - every byte
of data in one tensor, none in two - and is bounded, so a malicious one costs neither memory nor a
read outside the file. Positioned reads, not a mapping: a file that shrinks under a mapping kills
the process.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch

from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing.shard_format import LENGTH_BYTES, decode_length, tensor_bytes
from megatron.core.dist_checkpointing.shards import DTYPES, as_bytes
from megatron.core.untrusted_files import MAX_JSON_DEPTH, check_depth, regular_fd

#: Some 60,000 tensors.
MAX_HEADER_BYTES = 8 << 20

#: More dimensions than any weight has.
MAX_DIMENSIONS = 8

_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})


class FoundTensor(NamedTuple):
    """A tensor of a file: dtype by the format's name, shape, and its bytes [begin, end)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open file whose header has been found sound; counts the bytes it reads.

    Args:
        path: the file.
        follow_links: follow a link wherever it leads.

    Attribute `tensors` describes its contents.

    Raises:
        ValueError: it cannot be read, or its header is not what the format allows.
    """

    def __init__(self, path: Path, *, follow_links: bool = False) -> None:
        self.path = path
        self.bytes_read = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)
        try:
            self._fd = regular_fd(path, follow_links=follow_links)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        try:
            size = os.fstat(self._fd).st_size
            self.tensors: Mapping[str, FoundTensor] = self._header(size)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def read_bytes(self, target: memoryview, offset: int, *, name: str) -> None:
        """Fill `target` from a position of the file. Raises ValueError if it ends before."""
        position = 0
        while position < len(target):
            try:
                got = os.preadv(self._fd, [target[position:]], offset + position)
            except OSError as error:
                raise ValueError(f"cannot read {name} from {self.path}: {error.strerror}") from None
            if not got:
                self._refuse(f"it ends inside {name}: it was cut short")
            position += got
        self.bytes_read += len(target)

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Read the elements of `box` of a tensor, and no others, into `target`.

        Args:
            name: of the tensor.
            box: which elements.
            target: [*box.sizes], any strides, device and dtype; values are converted to the latter.

        Raises:
            ValueError: the file has become shorter or cannot be read.
        """
        if not box.numel:
            return
        found = self.tensors[name]
        plain = target.is_contiguous() and target.device.type == "cpu"
        if plain and target.dtype == DTYPES[found.dtype]:
            self._read_runs(name, box, as_bytes(target))
            return
        dtype = DTYPES[found.dtype]
        for band in row_boxes(box.sizes, dtype.itemsize):
            offsets = tuple(a + b for a, b in zip(box.offsets, band.offsets, strict=True))
            scratch = self._take(dtype.itemsize * band.numel)
            self._read_runs(name, Box(offsets, band.sizes), as_bytes(scratch))
            target[band.slices].copy_(scratch.view(dtype).view(band.sizes))

    def _read_runs(self, name: str, box: Box, target: memoryview) -> None:
        """Read a box chunk by chunk, each a run of the file, into memory in row-major order."""
        found = self.tensors[name]
        itemsize = DTYPES[found.dtype].itemsize
        strides = [itemsize] * len(found.shape)
        for dim in range(len(strides) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * found.shape[dim + 1]
        # From dimension `cut` on the box is one run of bytes.
        cut = len(found.shape)
        while cut > 0 and box.sizes[cut:] == found.shape[cut:]:
            cut -= 1
        run_bytes = itemsize * math.prod(box.sizes[cut:])
        start = found.begin + sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        for number, position in enumerate(range(0, len(target), run_bytes)):
            offset, left = start, number
            for dim in range(cut - 1, -1, -1):
                left, index = divmod(left, box.sizes[dim])
                offset += index * strides[dim]
            self.read_bytes(target[position : position + run_bytes], offset, name=name)

    def _take(self, size: int) -> torch.Tensor:
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]

    def _header(self, file_bytes: int) -> dict[str, FoundTensor]:
        """Read and check the header. Raises ValueError."""
        if file_bytes < LENGTH_BYTES:
            self._refuse(f"it has {file_bytes} bytes, less than a header's length takes")
        first = bytearray(LENGTH_BYTES)
        self.read_bytes(memoryview(first), 0, name="the header")
        start = decode_length(bytes(first))
        if start > file_bytes:
            self._refuse(
                f"it announces a header of {start - LENGTH_BYTES} bytes but has {file_bytes}: it "
                "was cut short, or is no safetensors file"
            )
        if start - LENGTH_BYTES > MAX_HEADER_BYTES:
            self._refuse(
                f"its header of {start - LENGTH_BYTES} bytes is longer than the "
                f"{MAX_HEADER_BYTES} that are read"
            )
        text = bytearray(start - LENGTH_BYTES)
        self.read_bytes(memoryview(text), LENGTH_BYTES, name="the header")
        try:
            # Entries become tuples as they are parsed: as objects of JSON they would take twenty
            # times their text.
            table = json.loads(text.decode("utf-8"), object_pairs_hook=_entry_or_object)
            check_depth(table, max_depth=MAX_JSON_DEPTH)
        except (ValueError, RecursionError) as error:
            self._refuse(f"its header is no JSON object of distinct names: {error}")
        if not isinstance(table, dict):
            self._refuse("its header is no JSON object")
        table.pop("__metadata__", None)
        found = {name: self._entry(name, entry, start) for name, entry in table.items()}
        self._check_cover(found, start, file_bytes)
        return found

    def _entry(self, name: str, entry: Any, start: int) -> FoundTensor:
        if not isinstance(entry, _Entry):
            self._refuse(f"{_short(name)} must have dtype, shape and data_offsets, nothing else")
        dtype, shape, offsets = entry
        if dtype not in DTYPES:
            self._refuse(f"{_short(name)} has the unknown dtype {_short(dtype)}")
        if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
            self._refuse(f"{_short(name)} has the impossible shape {_short(shape)}")
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._refuse(f"{_short(name)} has the impossible data_offsets {_short(offsets)}")
        size = tensor_bytes(dtype, shape)
        if offsets[1] - offsets[0] != size:
            self._refuse(
                f"{_short(name)} of {dtype} {_short(shape)} takes {_short(size)} bytes, its "
                f"data_offsets {_short(offsets)} say otherwise"
            )
        return FoundTensor(dtype, shape, start + offsets[0], start + offsets[1])

    def _check_cover(self, found: Mapping[str, FoundTensor], start: int, end: int) -> None:
        """See that the tensors lie one after the other, up to the end of the file."""
        position, before = start, "the header"
        for name, tensor in sorted(found.items(), key=lambda item: item[1][2:]):
            if tensor.begin != position:
                verb = "overlaps" if tensor.begin < position else "leaves a gap after"
                self._refuse(f"{_short(name)} {verb} {_short(before)}")
            position, before = tensor.end, name
        if position != end:
            self._refuse(
                f"its tensors end at byte {_short(position)}, the file at {end}: it was cut short "
                "or has grown"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self.path} is not a sound safetensors file: {why}")


class _Entry(NamedTuple):
    """What a header states about a tensor; a list as a tuple, other values as they are."""

    dtype: str
    shape: Any
    data_offsets: Any


def _entry_or_object(pairs: Sequence[tuple[str, Any]]) -> _Entry | dict[str, Any]:
    """Make an entry or an object of JSON. Raises ValueError for a name that comes twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    if found.keys() == _ENTRY_KEYS and isinstance(found["dtype"], str):
        shape, offsets = found["shape"], found["data_offsets"]
        return _Entry(
            sys.intern(found["dtype"]),
            tuple(shape) if isinstance(shape, list) else shape,
            tuple(offsets) if isinstance(offsets, list) else offsets,
        )
    return found


def _counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)


def _short(value: Any) -> str:
    """Return a value of a file for an error, bounded."""
    value = list(value) if isinstance(value, tuple) else value
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
