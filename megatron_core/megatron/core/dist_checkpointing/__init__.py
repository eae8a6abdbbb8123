# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of logical tensors: safetensors shards, a JSON manifest with digests, atomic commit.

    save_checkpoint(root, step, chunks, extra, coordinator=...)    -> root/iter_0000100/
    load_checkpoint(latest_checkpoint(root), chunks)               on any other layout

A checkpoint speaks of logical tensors only, so any grid can load what any other saved. Nothing is
pickled, and the shards open with any safetensors reader.
"""

from megatron.core.dist_checkpointing.architecture import compare_architecture
from megatron.core.dist_checkpointing.checkpoint_reader import CheckpointReader
from megatron.core.dist_checkpointing.chunk import TensorChunk
from megatron.core.dist_checkpointing.claim import SaveFolderClaim
from megatron.core.dist_checkpointing.commit import checkpoint_folder
from megatron.core.dist_checkpointing.coordinator import Coordinator, Solo, StoreCoordinator
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.inventory import (
    latest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
)
from megatron.core.dist_checkpointing.load import LoadReport, load_checkpoint
from megatron.core.dist_checkpointing.manifest import Manifest, read_extra, read_manifest
from megatron.core.dist_checkpointing.save import save_checkpoint
from megatron.core.dist_checkpointing.verify import VerifyReport, verify_checkpoint

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "Coordinator",
    "LoadReport",
    "Manifest",
    "SaveFolderClaim",
    "Solo",
    "StoreCoordinator",
    "TensorChunk",
    "VerifyReport",
    "checkpoint_folder",
    "compare_architecture",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "prune_checkpoints",
    "read_extra",
    "read_manifest",
    "save_checkpoint",
    "verify_checkpoint",
]
