# SPDX-License-Identifier: Apache-2.0
"""What ranks tell rank 0 about their shards: the plans before they write, the digests after it.

Rank 0 sees from the plans that nothing is missing and nothing written twice, and joins them with
the digests into the manifest's tables. Nothing here needs torch: a writer process does it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.boxes import Box, first_overlap
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import StoredChunk, StoredFile, StoredTensor


class PlannedChunk(NamedTuple):
    """A box of a logical tensor that goes to `file` at bytes [begin, end)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: str
    begin: int
    end: int


def decode_chunks(message: dict[str, Any]) -> list[PlannedChunk]:
    """Return the chunks of a shard from the message about it."""
    return [
        PlannedChunk(
            name=name,
            dtype=dtype,
            shape=tuple(shape),
            box=Box(tuple(offsets), tuple(sizes)),
            file=message["file"],
            begin=begin,
            end=end,
        )
        for name, dtype, shape, offsets, sizes, begin, end in message["chunks"]
    ]


def check_replicas(messages: Sequence[dict[str, Any]]) -> None:
    """Check that all members of every replica set declare the same chunks for it.

    Otherwise a chunk could be left to a rank that does not know of it.

    Raises:
        CheckpointError: naming the set and two ranks that differ.
    """
    told = [{tuple(ranks): summary for ranks, *summary in m["shared"]} for m in messages]
    for rank, sets in enumerate(told):
        for ranks, summary in sets.items():
            for other in ranks:
                theirs = told[other].get(ranks) if other < len(told) else None
                if theirs != summary:
                    count, name, _ = summary
                    raise CheckpointError(
                        f"rank {rank} declares {count} chunks, {name} among them, with "
                        f"replica_ranks {list(ranks)}, but rank {other} declares "
                        f"{theirs[0] if theirs else 'none'}, or other ones, for these ranks"
                    )


def group_by_tensor(chunks: Sequence[PlannedChunk]) -> dict[str, list[PlannedChunk]]:
    """Return the chunks of every logical tensor, ascending by offsets."""
    tensors: dict[str, list[PlannedChunk]] = {}
    for chunk in chunks:
        tensors.setdefault(chunk.name, []).append(chunk)
    for group in tensors.values():
        group.sort(key=lambda c: c.box)
    return tensors


def check_coverage(tensors: dict[str, list[PlannedChunk]]) -> None:
    """Check that every element of every logical tensor is written exactly once.

    Raises:
        CheckpointError: naming the tensor and the files concerned.
    """
    for name, chunks in tensors.items():
        first = chunks[0]
        for chunk in chunks:
            if (chunk.shape, chunk.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{name} is {first.dtype} {list(first.shape)} in {first.file} but "
                    f"{chunk.dtype} {list(chunk.shape)} in {chunk.file}; ranks must agree"
                )
        if overlap := first_overlap([chunk.box for chunk in chunks]):
            a, b = (chunks[i] for i in overlap)
            raise CheckpointError(
                f"{name} would be written twice: {a.box} in {a.file} and {b.box} in {b.file}; "
                "name all ranks that hold the same box in its replica_ranks"
            )
        whole = Box((0,) * len(first.shape), first.shape).numel
        covered = sum(chunk.box.numel for chunk in chunks)
        if covered != whole:
            raise CheckpointError(
                f"{name} {list(first.shape)} has {whole} elements but the ranks declare only "
                f"{covered}: a chunk of it is missing on some rank"
            )


def stored_tables(
    planned: Sequence[dict[str, Any]], written: Sequence[dict[str, Any]]
) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Join every rank's plan with its digests into the manifest's two tables."""
    files: dict[str, StoredFile] = {}
    chunks: dict[str, list[StoredChunk]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for plan, result in zip(planned, written, strict=True):
        if not plan["chunks"]:
            continue
        files[plan["file"]] = StoredFile(
            bytes=plan["total_bytes"],
            header_bytes=plan["header_bytes"],
            header_xxh3=result["header_xxh3"],
        )
        for chunk, xxh3 in zip(decode_chunks(plan), result["xxh3"], strict=True):
            kinds[chunk.name] = (chunk.dtype, chunk.shape)
            chunks.setdefault(chunk.name, []).append(
                StoredChunk(
                    file=chunk.file,
                    box=chunk.box,
                    begin=chunk.begin,
                    end=chunk.end,
                    xxh3=tuple(xxh3),
                )
            )
    tensors = {
        name: StoredTensor(
            dtype=kinds[name][0],
            shape=kinds[name][1],
            chunks=tuple(sorted(group, key=lambda c: c.box)),
        )
        for name, group in chunks.items()
    }
    return files, tensors
