# SPDX-License-Identifier: Apache-2.0
"""Load a model and its tokenizer from a checkpoint or a Hugging Face folder, in any layout."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.cli.error_reports import ErrorReports
from megatron.cli.errors import PeerLost, is_communication_error
from megatron.cli.launch import Launch
from megatron.cli.rank_agreement import StartFacts, check_same_start
from megatron.cli.tokenizers import (
    SpecialTokens,
    TiktokenOptions,
    Tokenizer,
    build_tokenizer,
    guess_type,
    is_tiktoken_file,
)
from megatron.core.backend import LOCAL, Backend, with_batch_invariance, with_cpu_dtype
from megatron.core.comm.symmetric_memory import Mode, SequenceParallelComm, TorchMemory
from megatron.core.device import choose_device
from megatron.core.dist_checkpointing import (
    Coordinator,
    Solo,
    StoreCoordinator,
    load_checkpoint,
    weight_chunks,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.inference.cache import CacheShapes
from megatron.core.inference.engine import LanguageModel
from megatron.core.inference.stages import PipelineGroups
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel, matrices
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.ops.compiler import explain as explain_compiler
from megatron.core.ops.matmul.low_bit import CopyDtype
from megatron.core.ops.matmul.packed import is_available
from megatron.core.ops.matmul.tiled import TILE_ROWS, check_tile_invariance
from megatron.core.ops.tiled_attention import KEY_TILE
from megatron.core.process_groups import GROUP_NAMES, Group, ProcessGroupCollection, RankGrid
from megatron.core.untrusted_files import open_regular
from megatron.core.weight_gather import Storage
from megatron.hf.folder import end_tokens, is_folder
from megatron.hf.read_weights import read_weights
from megatron.inference.config import ModelSource, Speculation, start_facts
from megatron.training.checkpointing.find import load_newest, read_together
from megatron.training.checkpointing.hf_export import carried_folder
from megatron.training.checkpointing.hf_options import open_model
from megatron.training.checkpointing.stored_model import stored_model
from megatron.training.cpu_matmul import CpuMatmul

# Bytes at the start and at the end of a weight file that its digest covers.
_SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class CheckpointModel:
    """A model that is loaded for generation, with its tokenizer.

    Args:
        model: this rank's shard of the model.
        tokenizer: the tokenizer of training, or the one of `--tokenizer-model`.
        max_length: longest sequence in tokens; None if the checkpoint does not specify it.
        vocab_size: size of the vocabulary; every token id is below it.
        device: device of the weights.
        folder: the `iter_` or Hugging Face folder that was loaded.
        stop_tokens: ids of the tokens that end a text.
        chat_folder: the tokenizer's folder, which may hold a chat template; None without a folder.
        token_multiple: the number of tokens of a step is padded to a multiple of this.
        optimized: run `InferenceOptimizedModel` instead of the layers that train.
        nvls, nvls_tries, weights_dtype: as in `ModelSource`.
        speculation: options of speculative decoding. The MTP layers are loaded only for method mtp.
        draft: the draft model, which is whole on the first pipeline stage; None on other stages and
            without a draft model.
        tokenizer_choice: arguments of `choose_tokenizer` that build the same tokenizer in another
            process.
        coordinator: reaches agreement between all ranks.
        timeout_seconds: how long a rank waits for another rank.
    """

    model: GPTModel
    tokenizer: Tokenizer
    max_length: int | None
    vocab_size: int
    device: torch.device
    folder: Path
    stop_tokens: frozenset[int]
    chat_folder: str | Path | None = None
    token_multiple: int = 1
    optimized: bool = False
    nvls: Mode = "auto"
    nvls_tries: int | None = None
    weights_dtype: CopyDtype | None = None
    speculation: Speculation = field(default_factory=Speculation)
    draft: CheckpointModel | None = None
    tokenizer_choice: Mapping[str, Any] = field(default_factory=dict)
    coordinator: Coordinator = field(default_factory=Solo)
    timeout_seconds: float = 600.0

    def generator(self, max_num_batched_tokens: int) -> LanguageModel:
        """Return the model that the engine runs; all ranks call it.

        Args:
            max_num_batched_tokens: most tokens of a step.

        Raises:
            ValueError: `--nvls require` without NVLink SHARP, or `--weights-dtype` if no weight
                can be copied.
        """
        if self.model.store.row_tiles:
            self._check_tile_invariance()
        if not self.optimized:
            return self.model
        generator = InferenceOptimizedModel(
            self.model, self._comm(max_num_batched_tokens), copies=self.weights_dtype
        )
        if self.model.region.group.rank == 0:
            if generator.copied is not None:
                print(generator.copied, file=sys.stderr)
            if self.model.config.norm.kind == "LayerNorm":
                print("LayerNorm runs as in training: only RMSNorm is fused", file=sys.stderr)
        return generator

    def _check_tile_invariance(self) -> None:
        """Log which matmuls --batch-invariant covers. Raises ValueError if a tile is not exact."""
        handles = matrices(self.model)
        packed = [handle for handle in handles if handle.min_invariant_rows is not None]
        tiled = [handle for handle in handles if handle not in packed]
        check_tile_invariance((handle.get() for handle in tiled), handles[0].product_dtype)
        nbytes = sum(handle.packed().nbytes for handle in packed)
        if self.model.region.group.rank == 0:
            fallback = f"{len(tiled)} matrices, " if tiled else ""
            print(
                f"batch-invariant: {len(packed)} matrices packed by oneDNN, {nbytes / 1e6:,.1f} MB "
                f"next to those stored; {fallback}routers and experts by tiles of {TILE_ROWS} "
                f"tokens, attention by tiles of {KEY_TILE} keys, recurrences token by token",
                file=sys.stderr,
            )
            if tiled:
                varying_order = "computes sums whose order depends on the number of rows"
                reason = varying_order if is_available() else "is not available"
                shapes = ", ".join(str(list(s)) for s in sorted({h.shape for h in tiled}))
                print(
                    f"batch-invariant: tiles of {shapes}, because the packed product of this "
                    f"torch {reason}",
                    file=sys.stderr,
                )

    def _comm(self, max_num_batched_tokens: int) -> SequenceParallelComm | None:
        """Return the collectives of sequence parallelism; None without it."""
        region = self.model.region
        if not region.scatters:
            return None
        tokens = -(-max_num_batched_tokens // self.token_multiple) * self.token_multiple
        element_size = torch.empty((), dtype=self.model.store.dtype).element_size()
        comm = SequenceParallelComm.create(
            region.group,
            TorchMemory(self.device),
            max_bytes=tokens * self.model.config.hidden_size * element_size,
            mode=self.nvls,
            limit=self.nvls_tries or 0,
        )
        if region.group.rank == 0:
            print(f"sequence parallel collectives: {comm.explain()}", file=sys.stderr)
            if self.nvls_tries is not None and comm.way == "torch.distributed":
                print(
                    "--nvls-tries has no effect on torch.distributed, whose waits "
                    "--distributed-timeout-minutes bounds",
                    file=sys.stderr,
                )
        return comm

    @property
    def cache_shapes(self) -> CacheShapes:
        """Shapes of this rank's KV cache and recurrent states."""
        return CacheShapes.from_modules(self.model.modules(), self.model.store.dtype)

    @property
    def data_parallel(self) -> Group:
        """The data-parallel group: one rank of each replica, with the same shard of the model."""
        return self.model.groups["dp"]

    @property
    def shares_experts(self) -> bool:
        """Whether the experts are sharded over several replicas (the group "etp_ep")."""
        groups = self.model.groups
        within_replica = set(groups["etp_ep"].ranks) <= set(groups["tp"].ranks)
        return self.model.config.moe is not None and not within_replica

    def host_group(self, name: str = "world") -> Group:
        """Create a group for messages between hosts; all ranks call this.

        See `ProcessGroupCollection.host_group`.
        """
        return self.model.groups.host_group(name, timeout_seconds=self.timeout_seconds)

    @property
    def pipeline(self) -> PipelineGroups:
        """The pipeline groups of this rank."""
        return PipelineGroups.from_groups(self.model.groups)


@contextlib.contextmanager
def load_checkpoint_model(
    source: ModelSource,
    launch: Launch,
    *,
    speculation: Speculation | None = None,
    facts: StartFacts | None = None,
    reports: ErrorReports | None = None,
) -> Iterator[CheckpointModel]:
    """Build the model of a checkpoint or a Hugging Face folder and load its weights, sharded over
    the processes.

    Args:
        source: path and layout of the model.
        launch: rank and world size of this process.
        speculation: options of speculative decoding; None for no drafts.
        facts: values that must be equal on all ranks, besides the model; None for `source` alone.
        reports: agrees with the other ranks on errors, once the store exists.

    Raises:
        ValueError: the checkpoint is missing or corrupt, there is no tokenizer, the layout is
            impossible, the model cannot draft, or the ranks were started with different options.
    """
    speculation, facts = speculation or Speculation(), facts or start_facts(source)
    device = choose_device(source.device, launch.local_rank)
    keep_mtp = speculation.speculative_method == "mtp"
    with _join_ranks(source, launch, device, keep_mtp=keep_mtp, reports=reports) as context:
        check_same_start(context.coordinator, facts)
        loaded = dataclasses.replace(_from_source(source, context), speculation=speculation)
        if speculation.speculative_draft_model is not None:
            draft_name = speculation.speculative_draft_model
            draft_source = dataclasses.replace(context.single_stage_source, load=draft_name)
            draft = _from_source(draft_source, context.single_stage_context())
            _check_draft(loaded, draft, draft_name)
            if loaded.model.groups["pp"].rank == 0:  # it sends the drafts to the other stages
                loaded = dataclasses.replace(loaded, draft=draft)
        compilers = explain_compiler(device)
        if compilers is not None and launch.rank == 0:
            print(f"kernels: {compilers}", file=sys.stderr)
        yield loaded


def _from_source(source: ModelSource, context: _RankContext) -> CheckpointModel:
    return (_from_folder if is_folder(source.load) else _from_checkpoint)(source, context)


def _check_draft(loaded: CheckpointModel, draft: CheckpointModel, name: str) -> None:
    """Raise ValueError unless both models have the same vocabulary, and each replica can run the
    draft model alone."""
    if draft.shares_experts:
        raise ValueError(
            f"--speculative-draft-model {name} shards its experts over several data-parallel "
            "replicas, which draft at different times: use a dense draft model, or "
            "--speculative-method ngram"
        )
    if loaded.vocab_size != draft.vocab_size:
        raise ValueError(
            f"--speculative-draft-model {name} has a vocabulary of {draft.vocab_size} tokens "
            f"and --load has {loaded.vocab_size}: use a draft model with the same tokenizer"
        )
    if loaded.tokenizer.fingerprint != draft.tokenizer.fingerprint:
        raise ValueError(
            f"--speculative-draft-model {name} has another tokenizer "
            f"({draft.tokenizer.fingerprint[:12]}) than --load "
            f"({loaded.tokenizer.fingerprint[:12]}): use a draft model with the same tokenizer"
        )


class _RankContext:
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

    def single_stage_context(self) -> _RankContext:
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
        if self._groups is None and self._store is None:
            self._groups = ProcessGroupCollection.single()
        elif self._groups is None:
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
    for path in sorted(folder.glob("*.safetensors")) if is_folder(folder) else ():
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
        return StageSplit.balanced(config.blocks, stages, blocks_of_layer=config.layer_blocks)
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


def _token_multiple(source: ModelSource) -> int:
    """Return the multiple of tokens of a step that sequence parallelism needs."""
    return source.tensor_model_parallel_size if source.sequence_parallel else 1


def _backend(dtype: torch.dtype, context: _RankContext, source: ModelSource) -> Backend:
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


def _from_folder(source: ModelSource, context: _RankContext) -> CheckpointModel:
    """Read this rank's slices of a Hugging Face folder."""
    folder, hf_model = open_model(source.load, flag="--load")
    if source.tokenizer_model is None and folder.tokenizer is None:
        raise ValueError(
            f"--load {source.load} contains no tokenizer: give its path with --tokenizer-model"
        )
    tokenizer_path = str(source.tokenizer_model or folder.tokenizer)
    tokenizer_choice = {
        "recorded": {"type": guess_type(tokenizer_path), "model": tokenizer_path},
        "model": None,
        "add_special_tokens": not source.tokenizer_hf_no_include_special_tokens,
    }
    tokenizer = choose_tokenizer(**tokenizer_choice)
    context.compare_files(folder.path, tokenizer)
    dtype = hf_model.dtype or torch.float32
    model = context.build(hf_model.config, dtype)
    read_weights(folder, hf_model, weight_chunks(model.store), coordinator=context.coordinator)
    stop_tokens = set(end_tokens(folder.path))
    if not stop_tokens and tokenizer.eod is not None:
        stop_tokens = {tokenizer.eod}
    return CheckpointModel(
        model=model,
        tokenizer=tokenizer,
        max_length=hf_model.max_length,
        vocab_size=hf_model.config.vocab_size,
        device=context.device,
        folder=folder.path,
        stop_tokens=frozenset(stop_tokens),
        chat_folder=folder.path if source.tokenizer_model is None else source.tokenizer_model,
        token_multiple=_token_multiple(source),
        optimized=source.transformer_impl == "inference_optimized",
        nvls=source.nvls,
        nvls_tries=source.nvls_tries,
        weights_dtype=source.weights_dtype,
        tokenizer_choice=tokenizer_choice,
        coordinator=context.coordinator,
        timeout_seconds=context.timeout_seconds,
    )


def _from_checkpoint(source: ModelSource, context: _RankContext) -> CheckpointModel:
    """Load this rank's shard of the newest intact checkpoint, which may have any layout."""
    newest = load_newest(
        source.load, lambda folder: _load(folder, source, context), context.coordinator
    )
    if newest is None:
        raise ValueError(
            f"--load {source.load}: there is no checkpoint: name the folder that --save "
            "wrote, one of its iter_ folders, or a Hugging Face folder"
        )
    return newest[1]


def _load(folder: Path, source: ModelSource, context: _RankContext) -> CheckpointModel:
    """Load this rank's shard of one checkpoint."""
    manifest = read_together(folder, context.coordinator)
    config, extra = stored_model(folder, manifest), manifest.extra
    options, recorded = extra["config"], extra.get("tokenizer", {})
    if extra.get("weights_only") is True:
        # Converted weights were trained elsewhere, with special tokens.
        recorded = {"special_tokens": None, **recorded}
    without_special_tokens = source.tokenizer_hf_no_include_special_tokens
    tokenizer_choice = {
        "recorded": recorded,
        "model": source.tokenizer_model,
        "add_special_tokens": None
        if without_special_tokens is None
        else not without_special_tokens,
    }
    tokenizer = choose_tokenizer(**tokenizer_choice)
    context.compare_files(folder, tokenizer)
    model = context.build(config, weight_dtype(options))
    chunks = weight_chunks(model.store)
    load_checkpoint(folder, chunks, coordinator=context.coordinator, convert_dtype=True)
    hf_folder = carried_folder(folder, extra, None)
    stop_tokens = set(end_tokens(hf_folder)) if hf_folder is not None else set()
    if tokenizer.eod is not None:
        stop_tokens.add(tokenizer.eod)
    return CheckpointModel(
        model=model,
        tokenizer=tokenizer,
        max_length=options.get("max-position-embeddings") or options.get("seq-length"),
        vocab_size=config.vocab_size,
        device=context.device,
        folder=folder,
        stop_tokens=frozenset(stop_tokens),
        chat_folder=source.tokenizer_model or hf_folder or recorded.get("model"),
        token_multiple=_token_multiple(source),
        optimized=source.transformer_impl == "inference_optimized",
        nvls=source.nvls,
        nvls_tries=source.nvls_tries,
        weights_dtype=source.weights_dtype,
        tokenizer_choice=tokenizer_choice,
        coordinator=context.coordinator,
        timeout_seconds=context.timeout_seconds,
    )


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


@contextlib.contextmanager
def _join_ranks(
    source: ModelSource,
    launch: Launch,
    device: torch.device,
    *,
    keep_mtp: bool,
    reports: ErrorReports | None,
) -> Iterator[_RankContext]:
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
    context = _RankContext(source, launch, device, store, keep_mtp=keep_mtp)
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


def weight_dtype(options: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the weights of a run with these options, by flag name."""
    if options.get("bf16"):
        return torch.bfloat16
    return torch.float16 if options.get("fp16") else torch.float32


def choose_tokenizer(
    recorded: Mapping[str, Any], model: str | None, *, add_special_tokens: bool | None = None
) -> Tokenizer:
    """Return the tokenizer that a checkpoint records, or the one in `model`.

    Args:
        recorded: type, model (path), vocab_size, fingerprint and special_tokens, as training saves
            them.
        model: path of a tokenizer.json, its folder, a SentencePiece .model or a vocabulary of
            tiktoken to use instead; None for the recorded one. A different file logs a warning.
        add_special_tokens: whether to add special tokens to a text; None for the recorded value.

    Raises:
        ValueError: no tokenizer is recorded, or its file is missing or has changed.
    """
    if model is None and recorded.get("type") is None:
        raise ValueError(
            "the checkpoint does not record the tokenizer it was trained with: give the path "
            "of a tokenizer.json or a SentencePiece .model with --tokenizer-model"
        )

    def build(*, add_special_tokens: bool) -> Tokenizer:
        if model is not None:
            kind, size = guess_type(model), None
            if recorded.get("type") == "tiktoken" and is_tiktoken_file(model):
                kind = "tiktoken"
        else:
            kind, size = recorded["type"], recorded.get("vocab_size")
        return build_tokenizer(
            kind,
            model=model or recorded.get("model"),
            vocab_size=size,
            add_special_tokens=add_special_tokens,
            tiktoken=TiktokenOptions.from_json(recorded.get("tiktoken")),
        )

    special = _recorded_special_tokens(recorded)
    with_special_tokens = special is None or bool(special)
    tokenizer = build(
        add_special_tokens=with_special_tokens if add_special_tokens is None else add_special_tokens
    )
    fingerprint = recorded.get("fingerprint")
    matches = fingerprint == tokenizer.fingerprint
    if matches and add_special_tokens is None and special is not None:
        matches = special == tokenizer.special_tokens
    if matches or fingerprint is None:
        return tokenizer
    if model is None:
        raise ValueError(
            f"the tokenizer {recorded.get('model')} has changed since the model was trained: "
            "give the original file with --tokenizer-model"
        )
    print(
        f"warning: --tokenizer-model {model} is not the file that the model was trained with",
        file=sys.stderr,
    )
    return build(add_special_tokens=add_special_tokens is not False)


def _recorded_special_tokens(recorded: Mapping[str, Any]) -> SpecialTokens | None:
    """Return the special tokens that training added to its texts; None if not recorded.

    Checkpoints older than this record were trained without special tokens.
    """
    if recorded.get("fingerprint") is None or recorded.get("special_tokens", {}) is None:
        return None
    return SpecialTokens.from_json(recorded.get("special_tokens"))
