# SPDX-License-Identifier: Apache-2.0
"""The memory of tensors as bytes: dtypes of the format, views, and streams in row-major order.

A tensor is never copied as a whole: a contiguous CPU tensor is streamed from its own memory, any
other tensor passes through one scratch buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from megatron.core.dist_checkpointing.shard_format import TORCH_NAMES, WRITE_BUFFER_BYTES

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
