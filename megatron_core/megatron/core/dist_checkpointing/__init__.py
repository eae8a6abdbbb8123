# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of logical tensors: safetensors shards, a JSON manifest with digests, atomic commit.

    save_checkpoint(root, step, chunks, extra, coordinator=...)    -> root/iter_0000100/
    load_checkpoint(latest_checkpoint(root), chunks)               on any other layout
    AsyncSaver(root, chunks, coordinator=...).save(step, extra)    training continues meanwhile

A checkpoint stores logical tensors only, so any parallel layout loads a checkpoint of any other
(resharding). Nothing is pickled, and the shards open with any safetensors reader.

Names are imported on first use. The modules that only handle the format (manifest, commit, writer
process) start in milliseconds because they do not import torch.
"""

from typing import TYPE_CHECKING

from megatron.core.boxes import TensorChunk as TensorChunk
from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.async_save import AsyncSaver as AsyncSaver
    from megatron.core.dist_checkpointing.async_save import SaveReport as SaveReport
    from megatron.core.dist_checkpointing.coordinator import Coordinator as Coordinator
    from megatron.core.dist_checkpointing.coordinator import Solo as Solo
    from megatron.core.dist_checkpointing.coordinator import StoreCoordinator as StoreCoordinator
    from megatron.core.dist_checkpointing.load import CheckpointReader as CheckpointReader
    from megatron.core.dist_checkpointing.load import LoadReport as LoadReport
    from megatron.core.dist_checkpointing.load import load_checkpoint as load_checkpoint
    from megatron.core.dist_checkpointing.manifest import Manifest as Manifest
    from megatron.core.dist_checkpointing.manifest import (
        compare_architecture as compare_architecture,
    )
    from megatron.core.dist_checkpointing.manifest import read_extra as read_extra
    from megatron.core.dist_checkpointing.manifest import read_manifest as read_manifest
    from megatron.core.dist_checkpointing.run_folder import SaveFolderLock as SaveFolderLock
    from megatron.core.dist_checkpointing.run_folder import VerifyReport as VerifyReport
    from megatron.core.dist_checkpointing.run_folder import checkpoint_folder as checkpoint_folder
    from megatron.core.dist_checkpointing.run_folder import latest_checkpoint as latest_checkpoint
    from megatron.core.dist_checkpointing.run_folder import list_checkpoints as list_checkpoints
    from megatron.core.dist_checkpointing.run_folder import prune_checkpoints as prune_checkpoints
    from megatron.core.dist_checkpointing.run_folder import reading as reading
    from megatron.core.dist_checkpointing.run_folder import verify_checkpoint as verify_checkpoint
    from megatron.core.dist_checkpointing.save import optimizer_chunks as optimizer_chunks
    from megatron.core.dist_checkpointing.save import save_checkpoint as save_checkpoint
    from megatron.core.dist_checkpointing.save import weight_chunks as weight_chunks
    from megatron.core.dist_checkpointing.shard_format import (
        CheckpointError as CheckpointError,
    )
    from megatron.core.dist_checkpointing.shard_format import (
        DamagedCheckpointError as DamagedCheckpointError,
    )
    from megatron.core.dist_checkpointing.shard_format import (
        RemovedCheckpointError as RemovedCheckpointError,
    )
    from megatron.core.dist_checkpointing.transfer import TransferGroup as TransferGroup

__getattr__, __dir__, __all__ = lazy_exports(__name__)
