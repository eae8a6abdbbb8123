# SPDX-License-Identifier: Apache-2.0
"""Tensors as bytes of the safetensors format, and reads of slices from an untrusted file.

A tensor is never copied as a whole: a contiguous CPU tensor is streamed from its own memory, any
other tensor passes through one scratch buffer.

A file's header is validated first. It must describe the file exactly: every byte of data
belongs to one tensor. Its size is bounded, so that a malicious header can neither exhaust memory
nor cause a read outside the file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch

from megatron.core.boxes import Box, row_boxes
from megatron.core.dist_checkpointing.manifest import MAX_DIMENSIONS
from megatron.core.dist_checkpointing.shard_format import (
    LENGTH_BYTES,
    TORCH_NAMES,
    WRITE_BUFFER_BYTES,
    decode_length,
    tensor_bytes,
)
from megatron.core.untrusted_files import MAX_JSON_DEPTH, PositionedFile, check_depth

#: Upper bound on the header, enough for about 60,000 tensors.
MAX_HEADER_BYTES = 8 << 20

_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
)

DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({d: n for n, d in DTYPES.items()})


class Scratch:
    """One CPU buffer that all reads reuse; it grows to the largest requested size."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, valid until the next call."""
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size]


def is_contiguous_cpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's bytes are one range of host memory, in row-major order."""
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as a writable memoryview."""
    # A tensor of one element is contiguous whatever its strides; a byte view needs stride 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def stream_bytes(tensor: torch.Tensor, scratch: Scratch) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order; a buffer is valid until the next is yielded."""
    if not tensor.numel():
        return
    if is_contiguous_cpu(tensor):
        memory = as_bytes(tensor)
        for begin in range(0, len(memory), WRITE_BUFFER_BYTES):
            yield memory[begin : begin + WRITE_BUFFER_BYTES]
        return
    for block in _row_blocks(tensor, WRITE_BUFFER_BYTES // tensor.itemsize):
        target = scratch.take(block.numel() * block.itemsize)
        target.view(block.dtype).view(block.shape).copy_(block)
        yield as_bytes(target)


def _row_blocks(tensor: torch.Tensor, max_elements: int) -> Iterator[torch.Tensor]:
    """Split a tensor into views of at most `max_elements`, in row-major order."""
    if tensor.numel() <= max_elements:
        yield tensor
        return
    rows = max_elements // math.prod(tensor.shape[1:])
    if rows:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from _row_blocks(row, max_elements)


class TensorInfo(NamedTuple):
    """A tensor of a file: the format's name of its dtype, its shape, its bytes [begin, end)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(PositionedFile):
    """An open safetensors file with a valid header.

    Args:
        path: the file.
        follow_links: follow a symbolic link to any target.

    Attributes:
        tensors: the tensors of the file, by name.

    Raises:
        ValueError: the file cannot be read, or its header is invalid.
    """

    def __init__(self, path: Path, *, follow_links: bool = False) -> None:
        self._scratch = Scratch()
        try:
            super().__init__(path, follow_links=follow_links)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        try:
            self.tensors: Mapping[str, TensorInfo] = self._header(self.size)
        except BaseException:
            self.close()
            raise

    def read_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Read only the elements of a box of a tensor into `target`.

        Args:
            name: name of the tensor.
            box: the elements to read.
            target: [*box.sizes] of any strides and device; values are converted to its dtype.

        Raises:
            ValueError: the file was truncated or cannot be read.
        """
        if not box.numel:
            return
        tensor_info = self.tensors[name]
        if is_contiguous_cpu(target) and target.dtype == DTYPES[tensor_info.dtype]:
            self._read_runs(name, box, as_bytes(target))
            return
        dtype = DTYPES[tensor_info.dtype]
        for band in row_boxes(box.sizes, dtype.itemsize):
            offsets = tuple(a + b for a, b in zip(box.offsets, band.offsets, strict=True))
            scratch = self._scratch.take(dtype.itemsize * band.numel)
            self._read_runs(name, Box(offsets, band.sizes), as_bytes(scratch))
            target[band.slices].copy_(scratch.view(dtype).view(band.sizes))

    def _read_runs(self, name: str, box: Box, target: memoryview) -> None:
        """Read a box into row-major memory, one contiguous run of the file at a time."""
        tensor_info = self.tensors[name]
        itemsize = DTYPES[tensor_info.dtype].itemsize
        strides = [itemsize] * len(tensor_info.shape)
        for dim in range(len(strides) - 2, -1, -1):
            strides[dim] = strides[dim + 1] * tensor_info.shape[dim + 1]
        # From dimension `cut` on, the box is contiguous in the file.
        cut = len(tensor_info.shape)
        while cut > 0 and box.sizes[cut:] == tensor_info.shape[cut:]:
            cut -= 1
        run_bytes = itemsize * math.prod(box.sizes[cut:])
        start = tensor_info.begin + sum(o * s for o, s in zip(box.offsets, strides, strict=True))
        for run, position in enumerate(range(0, len(target), run_bytes)):
            offset, remainder = start, run
            for dim in range(cut - 1, -1, -1):
                remainder, index = divmod(remainder, box.sizes[dim])
                offset += index * strides[dim]
            self._fill(target[position : position + run_bytes], offset, name)

    def _fill(self, target: memoryview, offset: int, name: str) -> None:
        """Fill `target` from a byte offset. Raises ValueError if the file ends too early."""
        try:
            count = self.read_into(target, offset)
        except OSError as error:
            raise ValueError(f"cannot read {name} from {self.path}: {error.strerror}") from None
        if count < len(target):
            self._refuse(f"it ends inside {name}: it was truncated")

    def _header(self, file_bytes: int) -> dict[str, TensorInfo]:
        """Read and check the header. Raises ValueError."""
        if file_bytes < LENGTH_BYTES:
            self._refuse(f"it has {file_bytes} bytes, too few for a header's length")
        length_bytes = bytearray(LENGTH_BYTES)
        self._fill(memoryview(length_bytes), 0, "the header")
        start = decode_length(bytes(length_bytes))
        if start > file_bytes:
            self._refuse(
                f"it announces a header of {start - LENGTH_BYTES} bytes but has {file_bytes}: it "
                "was truncated, or is not a safetensors file"
            )
        if start - LENGTH_BYTES > MAX_HEADER_BYTES:
            self._refuse(
                f"its header of {start - LENGTH_BYTES} bytes is longer than the limit of "
                f"{MAX_HEADER_BYTES}"
            )
        text = bytearray(start - LENGTH_BYTES)
        self._fill(memoryview(text), LENGTH_BYTES, "the header")
        try:
            # Entries become tuples while they are parsed. As dicts they would take twenty times the
            # memory of their text.
            table = json.loads(text.decode("utf-8"), object_pairs_hook=_entry_or_object)
            check_depth(table, max_depth=MAX_JSON_DEPTH)
        except (ValueError, RecursionError) as error:
            self._refuse(f"its header is not a JSON object of distinct names: {error}")
        if not isinstance(table, dict):
            self._refuse("its header is not a JSON object")
        table.pop("__metadata__", None)
        tensors = {name: self._entry(name, entry, start) for name, entry in table.items()}
        self._check_cover(tensors, start, file_bytes)
        return tensors

    def _entry(self, name: str, entry: Any, start: int) -> TensorInfo:
        if not isinstance(entry, _Entry):
            self._refuse(f"{_short(name)} must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = entry
        if dtype not in DTYPES:
            self._refuse(f"{_short(name)} has an unknown dtype {_short(dtype)}")
        if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
            self._refuse(f"{_short(name)} has an impossible shape {_short(shape)}")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._refuse(f"{_short(name)} has an impossible data_offsets {_short(offsets)}")
        size = tensor_bytes(dtype, shape)
        if offsets[1] - offsets[0] != size:
            self._refuse(
                f"{_short(name)} of {dtype} {_short(shape)} takes {_short(size)} bytes, but its "
                f"data_offsets are {_short(offsets)}"
            )
        return TensorInfo(dtype, shape, start + offsets[0], start + offsets[1])

    def _check_cover(self, tensors: Mapping[str, TensorInfo], start: int, end: int) -> None:
        """Check that the tensors are adjacent and end where the file ends."""
        position, previous = start, "the header"
        for name, tensor in sorted(tensors.items(), key=lambda entry: entry[1][2:]):
            if tensor.begin != position:
                verb = "overlaps" if tensor.begin < position else "leaves a gap after"
                self._refuse(f"{_short(name)} {verb} {_short(previous)}")
            position, previous = tensor.end, name
        if position != end:
            self._refuse(
                f"its tensors end at byte {_short(position)}, the file at {end}: it was truncated "
                "or has grown"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self.path} is not a valid safetensors file: {why}")


class _Entry(NamedTuple):
    """A header's entry for a tensor, not yet validated. Lists are converted to tuples."""

    dtype: str
    shape: Any
    data_offsets: Any


def _entry_or_object(pairs: Sequence[tuple[str, Any]]) -> _Entry | dict[str, Any]:
    """Return a JSON object, as an `_Entry` if it has its keys. Rejects duplicate names."""
    entry = dict(pairs)
    if len(entry) != len(pairs):
        raise ValueError("a name occurs twice")
    if entry.keys() == _ENTRY_KEYS and isinstance(entry["dtype"], str):
        shape, offsets = entry["shape"], entry["data_offsets"]
        return _Entry(
            sys.intern(entry["dtype"]),
            tuple(shape) if isinstance(shape, list) else shape,
            tuple(offsets) if isinstance(offsets, list) else offsets,
        )
    return entry


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)


def _short(value: Any) -> str:
    """Return a value of the file as bounded text for an error."""
    value = list(value) if isinstance(value, tuple) else value
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
