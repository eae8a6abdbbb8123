# SPDX-License-Identifier: Apache-2.0
"""What a rank saves of a model, and which rank writes which chunk where.

A rank saves chunks of logical tensors, views of memory, of the model and of its optimizer:

    save_checkpoint(root, step, weight_chunks(model.store), {}, coordinator=Solo())
    load_checkpoint(latest_checkpoint(root), weight_chunks(other.store))

Tensors have logical names, a weight its own and optimizer state `optimizer.KIND/WEIGHT`, so any
layout loads what another has saved. After loading, call `Optimizer.after_load` of an optimizer over
the weights.

Planning is pure: no files, no messages. A rank lays out its own shard from its own chunks; rank 0
checks the layouts of all ranks together (`shard_records`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.core.boxes import TensorChunk, chunk_key
from megatron.core.dist_checkpointing.dtypes import dtype_name
from megatron.core.dist_checkpointing.manifest import PlannedChunk
from megatron.core.dist_checkpointing.shard_format import digest, encode_header, tensor_bytes
from megatron.core.weight_gather import OwnedRange, WeightStore


class StateRange(Protocol):
    """The state of an optimizer for one range of weights."""

    @property
    def owned(self) -> OwnedRange:
        """The range."""

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the flat tensors [k] of the range by kind."""


class RangedOptimizer(Protocol):
    """An optimizer over ranges, such as `megatron.core.optimizer.Optimizer`."""

    @property
    def ranges(self) -> Sequence[StateRange]:
        """Its state, a range at a time."""


def weight_chunks(store: WeightStore) -> list[TensorChunk]:
    """List the boxes of logical weights, and the states, that this rank holds, as views of its
    memory.

    Args:
        store: of a model. Under a sharded optimizer, call `DataParallel.complete_weights()` before
            saving: other ranks' updates may not have arrived.
    """
    states = [
        TensorChunk(
            name=name,
            shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            tensor=tensor,
            replica_ranks=store.state_ranks,
        )
        for name, tensor in store.states.items()
    ]
    return states + [c for handle in store.handles.values() for c in store.chunks(handle)]


def optimizer_chunks(optimizer: RangedOptimizer) -> list[TensorChunk]:
    """List the boxes of optimizer state that this rank holds, as views of its memory."""
    return [
        TensorChunk(
            name=f"optimizer.{kind}/{held.name}",
            shape=held.shape,
            offsets=held.box.offsets,
            tensor=held.of(flat),
            replica_ranks=held.replica_ranks,
        )
        for state in optimizer.ranges
        for kind, flat in state.named_tensors().items()
        for held in state.owned.boxes
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardPlan:
    """The file one rank writes: its header, then the data of `held`, which lies as `chunks` say.

    `total_bytes` is the file's size. A rank without anything to write has no chunks and no file.
    `shared` sums up what this rank declares to hold together with others.
    """

    file: str
    header: bytes
    total_bytes: int
    chunks: tuple[PlannedChunk, ...]
    held: tuple[TensorChunk, ...]
    shared: tuple[tuple[Any, ...], ...]


def replica_sets(
    chunks: Sequence[TensorChunk], rank: int
) -> dict[tuple[int, ...], list[TensorChunk]]:
    """Return this rank's chunks by the ranks that hold them, largest first, in one order for all.

    Raises:
        ValueError: a chunk does not name `rank` among its holders.
    """
    sets: dict[tuple[int, ...], list[TensorChunk]] = {}
    for chunk in chunks:
        if rank not in chunk.replica_ranks:
            raise ValueError(
                f"chunk of {chunk.name}: replica_ranks {list(chunk.replica_ranks)} does not "
                f"contain rank {rank}, which holds it"
            )
        sets.setdefault(tuple(chunk.replica_ranks), []).append(chunk)
    for members in sets.values():
        members.sort(key=lambda c: (-c.tensor.numel() * c.tensor.itemsize, c.name, c.box))
    return sets


def chunks_to_write(
    sets: Mapping[tuple[int, ...], Sequence[TensorChunk]], rank: int
) -> list[TensorChunk]:
    """Return the chunks that `rank` writes: every replica set shares its bytes out greedily.

    All members of a replica set declare the same chunks for it (`check_replicas`), so all compute
    the same assignment without a message: each chunk goes to the member with the fewest bytes, the
    first of several.
    """
    mine = []
    for ranks, members in sets.items():
        loads = [(0, r) for r in ranks]  # ascending, and so a heap
        for chunk in members:
            load, writer = loads[0]
            heapq.heapreplace(loads, (load + chunk.tensor.numel() * chunk.tensor.itemsize, writer))
            if writer == rank:
                mine.append(chunk)
    return mine


def _summary(ranks: tuple[int, ...], members: Sequence[TensorChunk]) -> tuple[Any, ...]:
    """Return (ranks, count, first name, digest) of a replica set as this rank declares it."""
    text = repr([(c.name, c.shape, c.box, c.tensor.dtype) for c in members])
    return ranks, len(members), members[0].name, digest(text.encode())


def plan_shard(chunks: Sequence[TensorChunk], rank: int) -> ShardPlan:
    """Lay out the file that `rank` writes.

    Wide dtypes come first, so that every tensor lies at a multiple of its own element size.

    Raises:
        ValueError: a dtype that cannot be stored, or one box declared twice on this rank.
    """
    file = f"shard-{rank:05d}.safetensors"
    sets = replica_sets(chunks, rank)
    mine = [chunk for chunk in chunks_to_write(sets, rank) if _is_stored(chunk)]
    mine.sort(key=lambda c: (-c.tensor.itemsize, c.name, c.box))
    entries = [
        (
            chunk_key(chunk.name, tuple(chunk.shape), chunk.box),
            dtype_name(chunk.tensor.dtype, chunk.name),
            chunk.box.sizes,
        )
        for chunk in mine
    ]
    for (key, _, _), (following, _, _) in itertools.pairwise(entries):
        if key == following:
            raise ValueError(f"rank {rank} declares {key} twice; give each chunk once")
    header = encode_header(entries)
    planned = []
    begin = len(header)
    for chunk, (_, dtype, sizes) in zip(mine, entries, strict=True):
        end = begin + tensor_bytes(dtype, sizes)
        planned.append(
            PlannedChunk(
                name=chunk.name,
                dtype=dtype,
                shape=tuple(chunk.shape),
                box=chunk.box,
                file=file,
                begin=begin,
                end=end,
            )
        )
        begin = end
    return ShardPlan(
        file=file,
        header=header,
        total_bytes=begin,
        chunks=tuple(planned),
        held=tuple(mine),
        shared=tuple(_summary(*item) for item in sets.items() if len(item[0]) > 1),
    )


def _is_stored(chunk: TensorChunk) -> bool:
    """Return whether a chunk has elements, or stands for a tensor that has none at all."""
    return chunk.tensor.numel() > 0 or chunk.box.sizes == tuple(chunk.shape)


def encode_plan(plan: ShardPlan) -> dict[str, Any]:
    """Return the message to rank 0 about a shard."""
    return {
        "file": plan.file,
        "total_bytes": plan.total_bytes,
        "header_bytes": len(plan.header),
        "shared": plan.shared,
        "chunks": [(c.name, c.dtype, c.shape, *c.box, c.begin, c.end) for c in plan.chunks],
    }
