# SPDX-License-Identifier: Apache-2.0
"""The ranks of a model for generation: rank grid, process groups, pipeline stages, agreement."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import math
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.cli.error_reports import ErrorReports
from megatron.cli.errors import PeerLost, is_communication_error
from megatron.cli.launch import Launch
from megatron.cli.rank_agreement import StartFacts, check_same_start
from megatron.cli.tokenizers import (
    Tokenizer,
)
from megatron.core.backend import LOCAL, Backend, with_batch_invariance, with_cpu_dtype
from megatron.core.dist_checkpointing import (
    Coordinator,
    Solo,
    StoreCoordinator,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.process_groups import GROUP_NAMES, ProcessGroupCollection, RankGrid
from megatron.core.untrusted_files import open_regular
from megatron.core.weight_gather import Storage
from megatron.hf.folder import is_folder
from megatron.inference.config import ModelSource
from megatron.training.core_configs import CpuMatmul


class RankContext:
    """The rank grid, the process groups and the device of this rank.

    Args:
        source: parallel sizes of the model.
        launch: rank and world size of this process.
        device: device of this rank.
        store: the run's key-value store; None for a single process.
        keep_mtp: keep the layers of multi-token prediction (MTP).

    Attributes:
        coordinator: reaches agreement between all ranks.
        timeout_seconds: how long a rank waits for another rank.
    """

    def __init__(
        self,
        source: ModelSource,
        launch: Launch,
        device: torch.device,
        store: dist.Store | None,
        *,
        keep_mtp: bool,
    ) -> None:
        self.grid = rank_grid(source, launch.world_size)
        self.device, self._source, self._launch, self._store = device, source, launch, store
        self._keep_mtp = keep_mtp
        self.timeout_seconds = source.distributed_timeout_minutes * 60
        self._groups: ProcessGroupCollection | None = None
        self.coordinator: Coordinator = Solo()
        if store is not None:
            self.coordinator = StoreCoordinator(
                store, launch.rank, launch.world_size, timeout_seconds=self.timeout_seconds
            )

    def build(self, config: GPTConfig, dtype: torch.dtype) -> GPTModel:
        """Return this rank's shard of a model, with uninitialized weights.

        Raises:
            ValueError: the model does not fit these ranks; no process group is created then.
        """
        config = inference_model_config(config, keep_mtp=self._keep_mtp)
        split = stage_split(config, self._source)
        grid = self.grid
        problems = config.problems(tp=grid.tp, etp=grid.size("etp"), ep=grid.ep)
        if problems:
            raise ValueError("; ".join(problems))
        return GPTModel(
            config,
            self._process_groups(),
            sequence_parallel=self._source.sequence_parallel,
            dtype=dtype,
            device=self.device,
            backend=_backend(dtype, self, self._source),
            storage=Storage(initialize=False),
            split=split,
        )

    @property
    def single_stage_source(self) -> ModelSource:
        """The model source without pipeline stages."""
        return dataclasses.replace(
            self._source, pipeline_model_parallel_size=1, pipeline_model_parallel_layout=None
        )

    def single_stage_context(self) -> RankContext:
        """Return the context of this rank in a grid without pipeline stages, in which the ranks of
        each stage hold a whole model."""
        if self.grid.pp == 1:
            return self
        context = copy.copy(self)
        context._source, context._groups = self.single_stage_source, None
        context.grid = rank_grid(context._source, self._launch.world_size)
        return context

    def _process_groups(self) -> ProcessGroupCollection:
        """Return the process groups, which the first call creates."""
        if self._groups is not None:
            return self._groups
        if self._store is None:
            self._groups = ProcessGroupCollection.single()
        else:
            if not dist.is_initialized():
                dist.init_process_group(
                    "nccl" if self.device.type == "cuda" else "gloo",
                    store=dist.PrefixStore("groups", self._store),
                    rank=self._launch.rank,
                    world_size=self._launch.world_size,
                    timeout=timedelta(seconds=self.timeout_seconds),
                    # With a device NCCL connects eagerly, so that a bad link fails here.
                    device_id=self.device if self.device.type == "cuda" else None,
                )
            self._groups = ProcessGroupCollection.create(
                self.grid,
                rank=self._launch.rank,
                timeout_seconds=self.timeout_seconds,
                names=GROUP_NAMES,
            )
        return self._groups

    def compare_files(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Check that all ranks read the same files; each host may have its own copy.

        Raises:
            ValueError: the files differ.
        """
        if self._store is not None:
            model_digest = {"the digest of the model's files": _folder_digest(folder)}
            tokenizer_digest = {"the tokenizer's digest": tokenizer.fingerprint[:16]}
            values = {**model_digest, **tokenizer_digest}
            check_same_start(self.coordinator, StartFacts(values=values))

    def leave(self) -> None:
        """Wait for all ranks and destroy the process groups."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


# Bytes at the start and at the end of a weight file that its digest covers.
_SAMPLE_BYTES = 64 << 10


def _folder_digest(folder: Path) -> str:
    """Return a digest of the folder of a model.

    It covers the manifest of a checkpoint, which holds the digests of all tensors. For a Hugging
    Face folder it covers config.json and the size, start and end of each weight file.
    """
    digest = hashlib.sha256()
    metadata_files = [folder / name for name in (MANIFEST_NAME, "config.json")]
    for path in filter(Path.is_file, metadata_files):
        with open_regular(path, follow_links=True) as file:
            while block := file.read(1 << 22):
                digest.update(block)
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    for path in paths if is_folder(folder) else ():
        with open_regular(path, follow_links=True) as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size}".encode())
            for offset in (0, max(0, size - _SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def rank_grid(source: ModelSource, world_size: int) -> RankGrid:
    """Return the rank grid: data-parallel replicas of the tensor- and pipeline-parallel ranks.

    Raises:
        ValueError: the world size is not a multiple of the product of the parallel sizes.
    """
    tp, pp = source.tensor_model_parallel_size, source.pipeline_model_parallel_size
    etp, ep = source.expert_tensor_parallel_size or tp, source.expert_model_parallel_size
    for sizes in (
        {"tensor": tp, "pipeline": pp},
        {"expert-tensor": etp, "expert": ep, "pipeline": pp},
    ):
        model_ranks = math.prod(sizes.values())
        if world_size % model_ranks:
            flags = (
                f"--{name}{'' if name == 'expert-tensor' else '-model'}-parallel-size {size}"
                for name, size in sizes.items()
            )
            raise ValueError(
                f"{' x '.join(flags)} does not fit {world_size} process(es): start {model_ranks} "
                "or a multiple with torchrun --nproc-per-node, or choose other sizes"
            )
    return RankGrid(world_size=world_size, tp=tp, pp=pp, etp=etp, ep=ep)


def stage_split(config: GPTConfig, source: ModelSource) -> StageSplit:
    """Return the blocks of every pipeline stage.

    Raises:
        ValueError: there are fewer layers than stages, or the layout does not fit this model.
    """
    stages, layout = source.pipeline_model_parallel_size, source.pipeline_model_parallel_layout
    if layout is None:
        blocks = config.block_pattern
        return StageSplit.balanced(blocks, stages, blocks_of_layer=config.layer_blocks)
    if config.pattern:
        raise ValueError(
            f"--pipeline-model-parallel-layout {layout} applies to GPT models, but the model "
            f"is a hybrid with the layer pattern {config.pattern}: drop it"
        )
    split = StageSplit.from_layout(layout, stages, num_layers=config.num_layers)
    if split.chunks > 1:
        raise ValueError(
            f"--pipeline-model-parallel-layout {layout} has {split.chunks} virtual stages per "
            f"rank, but generation runs one stage per rank: write {stages} stages"
        )
    return split


def _backend(dtype: torch.dtype, context: RankContext, source: ModelSource) -> Backend:
    """Return the backend; all ranks choose the same dtype of matmuls."""
    if source.batch_invariant:
        if context.device.type != "cpu":
            raise ValueError(
                f"--batch-invariant runs on CPUs only, not on {context.device}: give --device "
                "cpu, or drop it"
            )
        return with_batch_invariance(LOCAL)
    matmul = CpuMatmul.choose(
        "auto", weights=dtype, device=context.device, coordinator=context.coordinator
    )
    return with_cpu_dtype(LOCAL, None if matmul is None else matmul.dtype)


@contextlib.contextmanager
def join_ranks(
    source: ModelSource,
    launch: Launch,
    device: torch.device,
    *,
    keep_mtp: bool,
    reports: ErrorReports | None,
) -> Iterator[RankContext]:
    """Join the other ranks for the time of the block.

    Raises:
        PeerLost: a collective failed because another rank ended or hangs.
    """
    seconds = source.distributed_timeout_minutes * 60
    rank_grid(source, launch.world_size)  # raises before this rank waits for others
    store = None
    if launch.world_size > 1:
        if reports is not None:
            reports.join()
        store = launch.open_store(timeout_seconds=seconds, is_first_client=True)
        if reports is not None:
            client = launch.open_store(timeout_seconds=seconds)
            reports.share(client, world_size=launch.world_size)
    context = RankContext(source, launch, device, store, keep_mtp=keep_mtp)
    try:
        yield context
    except RuntimeError as error:
        if not is_communication_error(error):
            raise
        raise PeerLost(
            f"error: rank {launch.rank} lost contact with another rank, which ended or was "
            f"silent for {seconds:.0f} s: see the log of the other ranks, and restart all of "
            f"them ({error})"
        ) from error
    # Not in a `finally`: after an error on one rank the others may be gone, and the launcher ends
    # all of them.
    context.leave()


def inference_model_config(config: GPTConfig, *, keep_mtp: bool = False) -> GPTConfig:
    """Return the model config without expert capacity, and without MTP layers unless they draft.

    Expert capacity counts the tokens of a microbatch. In generation these are the tokens of a
    batch, so the output of a prompt would depend on the other prompts, on padding and on the ranks.
    """
    if not keep_mtp:
        config = config.without_further_prediction()
    elif not config.mtp_num_layers:
        raise ValueError(
            "--speculative-method mtp: the model has no multi-token prediction layers: train "
            "it with --mtp-num-layers, or use ngram or draft"
        )
    moe = config.moe and dataclasses.replace(config.moe, capacity_factor=None)
    return dataclasses.replace(config, moe=moe)
