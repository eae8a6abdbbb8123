# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any structure, written without the library's own writer.

Every structure is valid by its digests: manifest, shard headers and elements agree. All elements
are zero, so that large shards are holes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from megatron.core.boxes import Box
from tests.support.edited_manifests import seal_manifest

ITEM_BYTES = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor as it is stored.

    Args:
        shape: of the whole tensor.
        boxes: in which it is stored; None: one box.
        dtype: by its name in safetensors.
    """

    shape: tuple[int, ...]
    boxes: Sequence[Box] | None = None
    dtype: str = "U8"


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The tensors and files of a checkpoint.

    Args:
        tensors: by name.
        extra: JSON in addition to the tensors.
        num_files: shards, which take the boxes in turn.
        block_bytes: bytes under one digest.
        header_padding: spaces at the end of each shard's header.
    """

    tensors: Mapping[str, Tensor]
    extra: Mapping[str, Any] = field(default_factory=dict)
    num_files: int = 1
    block_bytes: int = 16 << 20
    header_padding: int = 0


def write_structure(root: Path, structure: Structure, *, iteration: int = 1) -> Path:
    """Write a checkpoint and return its folder."""
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    names = [f"shard-{i:05d}.safetensors" for i in range(structure.num_files)]
    stored: dict[str, list[tuple[str, Box]]] = {name: [] for name in names}
    turn = 0
    for name, tensor in structure.tensors.items():
        whole = [Box((0,) * len(tensor.shape), tensor.shape)]
        for box in whole if tensor.boxes is None else tensor.boxes:
            stored[names[turn % len(names)]].append((name, box))
            turn += 1
    files: dict[str, Any] = {}
    chunks: dict[str, list[dict[str, Any]]] = {name: [] for name in structure.tensors}
    for file, boxes in stored.items():
        files[file] = _write_shard(folder / file, boxes, structure, chunks)
    fields = {
        "format": "megatron.core.dist_checkpointing",
        "version": 1,
        "iteration": iteration,
        "world_size": structure.num_files,
        "block_bytes": structure.block_bytes,
        "digests": True,
        "files": files,
        "tensors": {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks[name]}
            for name, tensor in structure.tensors.items()
        },
        "extra": structure.extra,
    }
    body = json.dumps(fields, separators=(",", ":")).encode()[1:]
    seal_manifest(folder / "manifest.json", body)
    return folder


def _write_shard(
    path: Path,
    boxes: Sequence[tuple[str, Box]],
    structure: Structure,
    chunks: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """Write a shard, append its chunks, and return the manifest entry of the file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    spans, begin = [], 0
    for number, (name, box) in enumerate(boxes):
        dtype = structure.tensors[name].dtype
        end = begin + math.prod(box.sizes) * ITEM_BYTES[dtype]
        table[f"{number}"] = {"dtype": dtype, "shape": box.sizes, "data_offsets": [begin, end]}
        spans.append((begin, end))
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode() + b" " * structure.header_padding
    header = len(text).to_bytes(8, "little") + text
    path.write_bytes(header)
    os.truncate(path, len(header) + begin)
    for (name, box), (start, stop) in zip(boxes, spans, strict=True):
        block = structure.block_bytes
        sizes = [min(block, stop - at) for at in range(start, stop, block)]
        chunks[name].append(
            {
                "file": path.name,
                "offsets": box.offsets,
                "sizes": box.sizes,
                "bytes": [len(header) + start, len(header) + stop],
                "xxh3": [_digest_of_zeros(size) for size in sizes],
            }
        )
    digest = xxhash.xxh3_64_hexdigest(header)
    size = len(header) + begin
    return {"bytes": size, "header_bytes": len(header), "header_xxh3": digest}


@cache
def _digest_of_zeros(size: int) -> str:
    return xxhash.xxh3_64_hexdigest(bytes(size))


def pinwheel(rings: int) -> tuple[tuple[int, int], list[Box]]:
    """Return a square and boxes that tile it, four a ring, which no plane separates."""
    side = 2 * rings + 1
    boxes = []
    for low in range(rings):
        size = side - 2 * low
        high = low + size - 1
        boxes += [
            Box((low, low), (1, size - 1)),
            Box((low, high), (size - 1, 1)),
            Box((high, low + 1), (1, size - 1)),
            Box((low + 1, low), (size - 1, 1)),
        ]
    return (side, side), [*boxes, Box((rings, rings), (1, 1))]


def grid(shape: Sequence[int], counts: Sequence[int]) -> list[Box]:
    """Cut a tensor into equal boxes, `counts` along each dimension."""
    boxes = [Box((), ())]
    for whole, count in zip(shape, counts, strict=True):
        size = whole // count
        boxes = [Box((*b.offsets, i * size), (*b.sizes, size)) for b in boxes for i in range(count)]
    return boxes


def nested(depth: int, fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return `depth` nested objects around an object with the given fields."""
    tree = dict(fields)
    for _ in range(depth):
        tree = {key: tree}
    return tree


def _one_tensor(shape: tuple[int, ...], boxes: Sequence[Box], **options: Any) -> Structure:
    return Structure(tensors={"w": Tensor(shape=shape, boxes=boxes)}, **options)


def _with_json(extra: Mapping[str, Any]) -> Structure:
    return Structure(tensors={"w": Tensor(shape=(1,))}, extra=extra)


def _many(count: int, shape: tuple[int, ...] = (1,), *, prefix: str = "") -> dict[str, Tensor]:
    return {f"{prefix}{i}": Tensor(shape=shape) for i in range(count)}


def _columns(count: int, rows: int, **options: Any) -> Structure:
    return _one_tensor((rows, count), grid((rows, count), (1, count)), **options)


def _cube(side: int) -> Structure:
    return _one_tensor((side,) * 8, grid((side,) * 8, (side,) * 8))


#: Valid structures by name: deep, wide, many, overlapping, sparse. Each takes a share of the
#: largest numbers that a checkpoint may have.
STRUCTURES: Mapping[str, Callable[[float], Structure]] = MappingProxyType(
    {
        "pinwheel": lambda size: _one_tensor(*pinwheel(int(25_000 * size))),
        "columns": lambda size: _columns(int(109_000 * size), 400),
        "many tensors": lambda size: Structure(tensors=_many(int(109_000 * size))),
        "empty tensors": lambda size: Structure(
            tensors=_many(int(109_000 * size), (0, 7)), num_files=7
        ),
        "long names": lambda size: Structure(tensors=_many(int(25_000 * size), prefix="n" * 1000)),
        "eight dimensions": lambda size: _cube(max(2, int(4 * size))),
        "many shards": lambda size: Structure(
            tensors=_many(int(20_000 * size)), num_files=int(20_000 * size)
        ),
        "columns in shards": lambda size: _columns(int(20_000 * size), 4000, num_files=400),
        "wide JSON": lambda size: _with_json({f"{i:x}": i for i in range(int(130_000 * size))}),
        "lists in JSON": lambda size: _with_json({"a": [[] for _ in range(int(130_000 * size))]}),
        "deep JSON": lambda size: _with_json(
            nested(60, {f"{i:x}": i for i in range(int(12_000 * size))}, "k" * 8)
        ),
        "long header": lambda size: Structure(
            tensors=_many(1), header_padding=int(90_000_000 * size)
        ),
        "sparse": lambda size: Structure(
            tensors={"w": Tensor(shape=(int(100_000_000 * size),), dtype="F32")}
        ),
        "two sparse rows": lambda size: Structure(
            tensors={"w": Tensor(shape=(2, int(50_000_000 * size)), dtype="F32")},
            block_bytes=256 << 20,
        ),
        "small blocks": lambda size: Structure(
            tensors={"w": Tensor(shape=(int(8_000_000 * size),))}, block_bytes=16
        ),
    }
)
