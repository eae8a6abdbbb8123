# SPDX-License-Identifier: Apache-2.0
"""Saving: plan, write, commit, each agreed on by all ranks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron.core.dist_checkpointing.chunk import TensorChunk
from megatron.core.dist_checkpointing.commit import (
    checkpoint_folder,
    open_temporary,
    publish,
    sync_folder,
    write_tracker,
)
from megatron.core.dist_checkpointing.coordinator import Coordinator
from megatron.core.dist_checkpointing.manifest import (
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    check_json,
    digest,
)
from megatron.core.dist_checkpointing.planner import (
    ShardPlan,
    check_coverage,
    decode_chunks,
    encode_plan,
    group_by_tensor,
    plan_shard,
)
from megatron.core.dist_checkpointing.shard_writer import write_shard

#: Bytes under one digest: what a partial read must read at least to be verified.
BLOCK_BYTES = 1 << 20


def save_checkpoint(
    root: Path | str,
    iteration: int,
    chunks: Sequence[TensorChunk],
    extra: Mapping[str, Any],
    *,
    coordinator: Coordinator,
    digests: bool = True,
    existing: Literal["error", "skip"] = "error",
    block_bytes: int = BLOCK_BYTES,
) -> Path:
    """Write `root/iter_0000100/` and make the tracker name it. Every rank calls this.

    Replicas are written once. Before anything is written, every element of every logical tensor
    is known to be written exactly once. The tensors must not change until this returns.

    Args:
        root: folder of all checkpoints of a run, on a file system that all ranks share.
        iteration: the step that the state belongs to.
        chunks: what this rank holds.
        extra: JSON to keep beside the tensors; rank 0's is stored.
        coordinator: connects the ranks; `Solo()` for one process.
        digests: whether to store xxh3-64 digests, which loading verifies.
        existing: what to do if this step has been saved already: raise, or say so in one line
            and leave folder and tracker as they are.
        block_bytes: bytes under one digest, a multiple of 16.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: `block_bytes`, `iteration` or `existing` is impossible.
        CheckpointError: on all ranks alike; earlier checkpoints are intact.
    """
    if block_bytes < 16 or block_bytes % 16:
        raise ValueError(f"block_bytes must be a positive multiple of 16, got {block_bytes}")
    if existing not in ("error", "skip"):
        raise ValueError(f"existing must be 'error' or 'skip', got {existing!r}")
    root = Path(root)
    folder = checkpoint_folder(root, iteration)
    plans: list[ShardPlan] = []
    planned: list[dict[str, Any]] = []
    temporary: Path | None = None

    def plan() -> dict[str, Any]:
        if coordinator.rank == 0:
            check_json(dict(extra), "extra")
        plans.append(plan_shard(chunks, coordinator.rank))
        return encode_plan(plans[0])

    def open_folder(messages: list[dict[str, Any]]) -> str | None:
        nonlocal temporary
        if existing == "skip" and folder.is_dir():
            return None
        planned.extend(messages)
        check_coverage(group_by_tensor([c for m in messages for c in decode_chunks(m)]))
        temporary = open_temporary(root, iteration)
        return temporary.name

    def write() -> dict[str, Any]:
        return write_planned(root / name, plans[0], block_bytes=block_bytes, digests=digests)

    def commit(written: list[dict[str, Any]]) -> None:
        assert temporary is not None
        files, tensors = _stored(planned, written)
        manifest = Manifest(
            iteration=iteration,
            world_size=coordinator.world_size,
            block_bytes=block_bytes,
            digests=digests,
            files=files,
            tensors=tensors,
            extra=extra,
        )
        publish(temporary, manifest)
        write_tracker(root, iteration)

    coordinator.begin(f"saving {folder.name}")
    try:
        name = coordinator.agree("plan", plan, open_folder)
        if name is None:
            coordinator.say(f"{folder} exists already: it is kept and this step is not saved again")
            return folder
        coordinator.agree("write", write, commit)
    except BaseException:
        if temporary is not None:
            # Already renamed if only the tracker failed: then there is nothing of this name.
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def write_planned(
    folder: Path, plan: ShardPlan, *, block_bytes: int, digests: bool
) -> dict[str, Any]:
    """Write one rank's shard into `folder`, durably, and return what the manifest needs of it."""
    if not plan.chunks:
        return {"header_xxh3": "", "xxh3": []}
    found = write_shard(folder / plan.file, plan, block_bytes=block_bytes, digests=digests)
    sync_folder(folder)
    return {"header_xxh3": digest(plan.header) if digests else "", "xxh3": found}


def _stored(
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
