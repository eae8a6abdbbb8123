# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors read piece after piece, in pieces that suit its digests."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from megatron.core.dist_checkpointing import CheckpointReader, Manifest, TensorChunk
from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.dtypes import DTYPES
from megatron.core.dist_checkpointing.shard_header import ITEM_BYTES
from megatron.hf.safetensors_file import PIECE_BYTES


def row_boxes(shape: tuple[int, ...], dtype: str, *manifests: Manifest) -> Iterator[Box]:
    """Cut a tensor into boxes of whole rows that take two digested blocks each.

    A block is read whole, whatever is wanted of it: with smaller boxes most would be read more
    than twice.

    Args:
        shape, dtype: of the tensor.
        manifests: of the checkpoints that the boxes are read from.
    """
    if not math.prod(shape):
        return
    if not shape:
        yield Box((), ())
        return
    wanted = max(PIECE_BYTES, *(2 * manifest.block_bytes for manifest in manifests))
    rows = max(1, wanted // (ITEM_BYTES[dtype] * math.prod(shape[1:])))
    rest = (0,) * (len(shape) - 1)
    for first in range(0, shape[0], rows):
        yield Box((first, *rest), (min(rows, shape[0] - first), *shape[1:]))


def read_box(reader: CheckpointReader, name: str, box: Box) -> torch.Tensor:
    """Return a box of a tensor. Raises CheckpointError."""
    stored = reader.manifest.tensors[name]
    piece = torch.empty(box.sizes, dtype=DTYPES[stored.dtype])
    where = {"shape": stored.shape, "offsets": box.offsets, "replica_ranks": (0,)}
    reader.read([TensorChunk(name=name, tensor=piece, **where)])
    return piece
