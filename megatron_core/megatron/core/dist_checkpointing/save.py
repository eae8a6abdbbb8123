# SPDX-License-Identifier: Apache-2.0
"""Saving: plan, write and commit; all ranks agree on the outcome of each stage."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.core.boxes import TensorChunk
from megatron.core.dist_checkpointing.coordinator import Coordinator
from megatron.core.dist_checkpointing.manifest import (
    MAX_BLOCK_BYTES,
    Manifest,
    check_extra,
    check_plans,
    stored_tables,
)
from megatron.core.dist_checkpointing.run_folder import (
    checkpoint_folder,
    existing_note,
    open_temporary,
    publish,
    sync_folder,
    write_tracker,
)
from megatron.core.dist_checkpointing.shard_format import digest
from megatron.core.dist_checkpointing.shards import (
    ShardPlan,
    check_updates_complete,
    encode_plan,
    plan_shard,
    write_shard,
)

#: Bytes per digest, and so the least that a verified read takes from a file.
BLOCK_BYTES = 16 << 20


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

    Replicas are written once. Before any write, rank 0 checks that every element of every logical
    tensor will be written exactly once. The tensors must not change until this returns.

    Args:
        root: folder of all checkpoints of a run, on a file system that all ranks share.
        iteration: the step that the state belongs to.
        chunks: this rank's boxes of the logical tensors.
        extra: JSON to store in addition to the tensors; rank 0's is stored.
        coordinator: connects the ranks; `Solo()` for one process.
        digests: whether to store digests, which loading verifies.
        existing: if this step has already been saved: "error" raises, "skip" reports it in one
            line and leaves folder and tracker unchanged.
        block_bytes: bytes per digest, a multiple of 16.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: `block_bytes`, `iteration` or `existing` is impossible.
        CheckpointError: on all ranks alike; earlier checkpoints are intact.
    """
    if not 16 <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % 16:
        raise ValueError(
            f"block_bytes must be a multiple of 16 up to {MAX_BLOCK_BYTES}, got {block_bytes}"
        )
    if existing not in ("error", "skip"):
        raise ValueError(f"existing must be 'error' or 'skip', got {existing!r}")
    save = _Save(
        root=Path(root),
        iteration=iteration,
        chunks=chunks,
        extra=extra,
        coordinator=coordinator,
        digests=digests,
        block_bytes=block_bytes,
        skip_existing=existing == "skip",
    )
    return save.run()


@dataclass(kw_only=True)
class _Save:
    """One save on one rank; only rank 0 calls `open` and `commit`."""

    root: Path
    iteration: int
    chunks: Sequence[TensorChunk]
    extra: Mapping[str, Any]
    coordinator: Coordinator
    digests: bool
    block_bytes: int
    skip_existing: bool
    shard: ShardPlan | None = None
    planned: list[dict[str, Any]] = field(default_factory=list)
    temporary: Path | None = None

    def run(self) -> Path:
        """Plan, write and commit; remove the temporary folder after any failure."""
        folder = checkpoint_folder(self.root, self.iteration)
        self.coordinator.begin(f"saving {folder.name}")
        try:
            name = self.coordinator.agree("plan", self.plan, self.open)
            if name is not None:
                self.coordinator.agree("write", lambda: self.write(name), self.commit)
        except BaseException:
            if self.temporary is not None:
                # If only the tracker failed, the folder has its final name by now and stays.
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise
        return folder

    def plan(self) -> dict[str, Any]:
        """Plan this rank's shard."""
        if self.coordinator.rank == 0:
            check_extra(self.extra)
        self.shard = plan_shard(self.chunks, self.coordinator.rank)
        check_updates_complete(self.shard)
        return encode_plan(self.shard)

    def open(self, plans: list[dict[str, Any]]) -> str | None:
        """Check all plans together and create the temporary folder; None means "skip"."""
        folder = checkpoint_folder(self.root, self.iteration)
        if self.skip_existing and folder.is_dir():
            self.coordinator.say(
                f"{folder} exists already{existing_note(folder)}; it is not saved again"
            )
            return None
        check_plans(plans)
        self.planned = plans
        self.temporary = open_temporary(self.root, self.iteration)
        return self.temporary.name

    def write(self, name: str) -> dict[str, Any]:
        """Write and sync this rank's shard, and return its digests for the manifest."""
        shard = self.shard
        assert shard is not None
        if not shard.chunks:
            return {"header_xxh3": "", "xxh3": []}
        folder = self.root / name
        digests = write_shard(
            folder / shard.file, shard, block_bytes=self.block_bytes, digests=self.digests
        )
        sync_folder(folder)
        return {"header_xxh3": digest(shard.header) if self.digests else "", "xxh3": digests}

    def commit(self, written: list[dict[str, Any]]) -> None:
        """Publish the checkpoint, then make the tracker name it."""
        assert self.temporary is not None
        files, tensors = stored_tables(self.planned, written)
        manifest = Manifest(
            iteration=self.iteration,
            world_size=self.coordinator.world_size,
            block_bytes=self.block_bytes,
            digests=self.digests,
            files=files,
            tensors=tensors,
            extra=self.extra,
        )
        publish(self.temporary, manifest)
        write_tracker(self.root, self.iteration)
