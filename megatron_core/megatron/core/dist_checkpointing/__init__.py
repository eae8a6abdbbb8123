# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Checkpoints of logical tensors: safetensors shards, a JSON manifest with digests, atomic commit.

    save_checkpoint(root, step, chunks, extra, coordinator=...)    -> root/iter_0000100/
    load_checkpoint(latest_checkpoint(root), chunks)               on any other layout
    AsyncSaver(root, chunks, coordinator=...).save(step, extra)    training continues meanwhile

A checkpoint stores logical tensors only, so any parallel layout loads a checkpoint of any other
(resharding). Nothing is pickled, and the shards open with any safetensors reader.

Names are imported on first use. The modules that only handle the format (manifest, commit, writer
process) start in milliseconds because they do not import torch.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron.core.boxes import TensorChunk

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.async_save import AsyncSaver, SaveReport
    from megatron.core.dist_checkpointing.checkpoint_errors import (
        CheckpointError,
        DamagedCheckpointError,
        RemovedCheckpointError,
    )
    from megatron.core.dist_checkpointing.coordinator import Coordinator, Solo, StoreCoordinator
    from megatron.core.dist_checkpointing.load import CheckpointReader, LoadReport, load_checkpoint
    from megatron.core.dist_checkpointing.manifest import (
        Manifest,
        compare_architecture,
        read_extra,
        read_manifest,
    )
    from megatron.core.dist_checkpointing.run_folder import (
        SaveFolderLock,
        VerifyReport,
        checkpoint_folder,
        latest_checkpoint,
        list_checkpoints,
        prune_checkpoints,
        reading,
        verify_checkpoint,
    )
    from megatron.core.dist_checkpointing.save import save_checkpoint
    from megatron.core.dist_checkpointing.shards import optimizer_chunks, weight_chunks
    from megatron.core.dist_checkpointing.transfer import TransferGroup

_MODULES = (
    ("async_save", ("AsyncSaver", "SaveReport")),
    ("coordinator", ("Coordinator", "Solo", "StoreCoordinator")),
    ("checkpoint_errors", ("CheckpointError", "DamagedCheckpointError", "RemovedCheckpointError")),
    ("load", ("CheckpointReader", "LoadReport", "load_checkpoint")),
    ("manifest", ("Manifest", "compare_architecture", "read_extra", "read_manifest")),
    ("shards", ("optimizer_chunks", "weight_chunks")),
    ("run_folder", ("SaveFolderLock", "VerifyReport", "checkpoint_folder", "latest_checkpoint")),
    ("run_folder", ("list_checkpoints", "prune_checkpoints", "reading", "verify_checkpoint")),
    ("save", ("save_checkpoint",)),
    ("transfer", ("TransferGroup",)),
)
_HOMES = MappingProxyType({name: module for module, names in _MODULES for name in names})

__all__ = sorted([*_HOMES, "TensorChunk"])


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
