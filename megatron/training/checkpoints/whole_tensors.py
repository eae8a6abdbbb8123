# SPDX-License-Identifier: Apache-2.0
"""Whole tensors on their way into a file or a checkpoint: made when they are written, in pieces."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing import CheckpointReader, TensorChunk
from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.commit import sync_folder
from megatron.core.dist_checkpointing.dtypes import DTYPES
from megatron.core.dist_checkpointing.shard_header import ITEM_BYTES, encode_header
from megatron.core.dist_checkpointing.shard_writer import as_bytes
from megatron.core.dist_checkpointing.stream import Output
from megatron.core.untrusted_files import open_to_write
from megatron.hf.parts import MappedTensor, Part
from megatron.hf.safetensors_file import bands
from megatron.training.checkpoints.dcp_folder import DcpFolder
from megatron.training.checkpoints.reading import read_box, row_boxes

#: Fills a tensor with a box of another.
ReadBox = Callable[[Box, torch.Tensor], None]


class WholeTensor(NamedTuple):
    """A tensor: dtype by the safetensors format's name, and what yields its bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[memoryview]]


def of_checkpoint(reader: CheckpointReader, name: str) -> WholeTensor:
    """Return a tensor of one of our checkpoints."""
    stored = reader.manifest.tensors[name]

    def pieces() -> Iterator[memoryview]:
        for box in row_boxes(stored.shape, stored.dtype, reader.manifest):
            yield as_bytes(read_box(reader, name, box))

    return WholeTensor(name, stored.dtype, stored.shape, pieces)


def of_folder(folder: DcpFolder, name: str) -> WholeTensor:
    """Return a tensor of a foreign folder under its own name. Raises ValueError."""
    stored = folder.find(name)
    pieces = partial(_bands, stored.shape, stored.dtype, partial(folder.read_box, name))
    return WholeTensor(name, stored.dtype, stored.shape, pieces)


def of_parts(folder: DcpFolder, mapped: MappedTensor) -> WholeTensor:
    """Return a tensor of ours that is made of parts of those of a foreign folder."""
    dtypes = {folder.tensors[part.theirs].dtype for part in mapped.parts}
    dtype = "F32" if mapped.fp32 or len(dtypes) > 1 else dtypes.pop()

    def pieces() -> Iterator[memoryview]:
        for part in mapped.parts:
            yield from _bands(part.sizes, dtype, partial(_read_part, folder, part))

    return WholeTensor(mapped.name, dtype, mapped.shape, pieces)


def _read_part(folder: DcpFolder, part: Part, box: Box, piece: torch.Tensor) -> None:
    """Read a box that counts from the first element of a part."""
    inner = part.in_theirs(box)
    folder.read_box(part.theirs, inner, piece.view(inner.sizes))


def as_chunk(tensor: WholeTensor) -> TensorChunk:
    """Return a tensor for a checkpoint that one process writes."""
    return TensorChunk(
        name=tensor.name,
        shape=tensor.shape,
        offsets=(0,) * len(tensor.shape),
        tensor=torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta"),
        replica_ranks=(0,),
        pieces=tensor.pieces,
    )


def write_file(target: Path, tensors: Sequence[WholeTensor]) -> int:
    """Write a new safetensors file, there whole or not at all, and return its size.

    Raises:
        OSError: it cannot be written.
    """
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    header = encode_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered])
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(8)}")
    try:
        with open_to_write(temporary, "x") as file:
            output = Output(file.fileno())
            output.write(memoryview(header))
            for tensor in ordered:
                for piece in tensor.pieces():
                    output.write(piece)
            os.fsync(file.fileno())
        os.rename(temporary, target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return output.position


def _bands(shape: tuple[int, ...], dtype: str, read: ReadBox) -> Iterator[memoryview]:
    """Yield the bytes of a box of this shape in bands of rows, each valid until the next."""
    if not math.prod(shape):
        return
    for box in bands(shape, ITEM_BYTES[dtype]):
        piece = torch.empty(box.sizes, dtype=DTYPES[dtype])
        read(box, piece)
        yield as_bytes(piece)
