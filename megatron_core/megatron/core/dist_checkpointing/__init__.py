# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Checkpoints of logical tensors: safetensors shards, a JSON manifest with digests, atomic commit.

    save_checkpoint(root, step, chunks, extra, coordinator=...)    -> root/iter_0000100/
    load_checkpoint(latest_checkpoint(root), chunks)               on any other layout
    AsyncSaver(root, chunks, coordinator=...).save(step, extra)    training goes on meanwhile

A checkpoint speaks of logical tensors only, so any grid can load what any other saved. Nothing is
pickled, and the shards open with any safetensors reader.

Names are imported when they are first used: what knows the format only (manifest, commit, writer
process) starts in milliseconds, without torch.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.architecture import compare_architecture
    from megatron.core.dist_checkpointing.async_save import AsyncSaver, SaveReport
    from megatron.core.dist_checkpointing.checkpoint_reader import CheckpointReader
    from megatron.core.dist_checkpointing.chunk import TensorChunk
    from megatron.core.dist_checkpointing.claim import SaveFolderClaim
    from megatron.core.dist_checkpointing.commit import checkpoint_folder
    from megatron.core.dist_checkpointing.coordinator import Coordinator, Solo, StoreCoordinator
    from megatron.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
    from megatron.core.dist_checkpointing.inventory import latest_checkpoint, list_checkpoints
    from megatron.core.dist_checkpointing.load import LoadReport, load_checkpoint
    from megatron.core.dist_checkpointing.manifest import Manifest, read_extra, read_manifest
    from megatron.core.dist_checkpointing.model_chunks import optimizer_chunks, weight_chunks
    from megatron.core.dist_checkpointing.readers import reading
    from megatron.core.dist_checkpointing.retention import prune_checkpoints
    from megatron.core.dist_checkpointing.save import save_checkpoint
    from megatron.core.dist_checkpointing.verify import VerifyReport, verify_checkpoint

_MODULES = (
    ("architecture", ("compare_architecture",)),
    ("async_save", ("AsyncSaver", "SaveReport")),
    ("checkpoint_reader", ("CheckpointReader",)),
    ("chunk", ("TensorChunk",)),
    ("claim", ("SaveFolderClaim",)),
    ("commit", ("checkpoint_folder",)),
    ("coordinator", ("Coordinator", "Solo", "StoreCoordinator")),
    ("errors", ("CheckpointError", "DamagedCheckpointError")),
    ("inventory", ("latest_checkpoint", "list_checkpoints")),
    ("load", ("LoadReport", "load_checkpoint")),
    ("manifest", ("Manifest", "read_extra", "read_manifest")),
    ("model_chunks", ("optimizer_chunks", "weight_chunks")),
    ("readers", ("reading",)),
    ("retention", ("prune_checkpoints",)),
    ("save", ("save_checkpoint",)),
    ("verify", ("VerifyReport", "verify_checkpoint")),
)
_HOMES = MappingProxyType({name: module for module, names in _MODULES for name in names})

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import what was asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
