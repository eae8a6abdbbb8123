# SPDX-License-Identifier: Apache-2.0
"""Writing a shard: a stream of small pieces, digested as they pass, synced at the end.

No second copy of the tensors is made: a contiguous CPU tensor is written from where it lies, any
other goes through one scratch buffer piece by piece.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.planner import ShardPlan
from megatron.core.dist_checkpointing.stream import PIECE_BYTES, BlockDigester, Output
from megatron.core.untrusted_files import open_to_write


def write_shard(path: Path, plan: ShardPlan, *, block_bytes: int, digests: bool) -> list[list[str]]:
    """Write a new file at `path` and return the digests of each chunk's blocks.

    Raises:
        CheckpointError: the file exists, or the disk is full, read-only or broken.
    """
    try:
        with open_to_write(path, "x", root=path.parent.parent) as file:
            output = Output(file.fileno())
            output.write(memoryview(plan.header))
            found = []
            scratch = torch.empty(0, dtype=torch.uint8)
            for chunk, planned in zip(plan.held, plan.chunks, strict=True):
                tensor = chunk.tensor.detach()
                if chunk.pieces is None and not _is_plain(tensor) and not scratch.numel():
                    scratch = torch.empty(PIECE_BYTES, dtype=torch.uint8)
                digester = BlockDigester(block_bytes)
                for piece in chunk.pieces() if chunk.pieces else _pieces(tensor, scratch):
                    if digests:
                        digester.update(piece)
                    output.write(piece)
                found.append(digester.finish())
                if output.position != planned.end:
                    raise CheckpointError(
                        f"{planned.name} ends at byte {output.position} of {path}, not at "
                        f"{planned.end}: its pieces do not fit its shape"
                    )
            os.fsync(file.fileno())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"cannot create {path}: its folder is gone, or is not on a file system that all ranks "
            "share"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path} ({plan.total_bytes} bytes): {error.strerror}; nothing was "
            "saved, earlier checkpoints are intact"
        ) from error
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, writable."""
    # A tensor of one element is contiguous whatever its strides; a byte view wants stride 1.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _pieces(tensor: torch.Tensor, scratch: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's elements in row-major order; each piece is valid until the next."""
    if not tensor.numel():
        return
    if _is_plain(tensor):
        data = as_bytes(tensor)
        for begin in range(0, len(data), PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES]
        return
    for band in _bands(tensor, PIECE_BYTES // tensor.itemsize):
        target = scratch[: band.numel() * band.itemsize]
        target.view(band.dtype).view(band.shape).copy_(band)
        yield as_bytes(target)


def _bands(tensor: torch.Tensor, max_elements: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into views of at most `max_elements`, in row-major order."""
    if tensor.numel() <= max_elements:
        yield tensor
        return
    rows = max_elements // math.prod(tensor.shape[1:])
    if rows:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from _bands(row, max_elements)
