# SPDX-License-Identifier: Apache-2.0
"""A model and its tokenizer out of a checkpoint or a Hugging Face folder, on any layout."""

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
from megatron.core.ops.packed_product import is_available
from megatron.core.ops.row_tiles import TILE_ROWS, check_tiles
from megatron.core.ops.tiled_attention import KEY_TILE
from megatron.core.ops.weight_copy import CopyDtype
from megatron.core.process_groups import GROUP_NAMES, Group, ProcessGroupCollection, RankGrid
from megatron.core.untrusted_files import open_regular
from megatron.core.weight_gather import Storage
from megatron.hf.folder import end_tokens, is_folder
from megatron.hf.read_weights import read_weights
from megatron.inference.config import ModelSource, Speculation, start_facts
from megatron.training.checkpoints.hf_export import carried_folder
from megatron.training.checkpoints.hf_options import open_model
from megatron.training.cpu_matmul import CpuMatmul
from megatron.training.newest_checkpoint import load_newest, read_together
from megatron.training.stored_model import stored_model

# Of the begin and the end of a file of weights, which its digest covers.
_PART_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class CheckpointModel:
    """What generation needs of a checkpoint or a Hugging Face folder.

    Args:
        model: this rank's part of it.
        tokenizer: the one it was trained with, or the one that was asked for.
        max_length: longest sequence it is meant for, in tokens; None if it does not specify it.
        vocab_size: token ids are below it.
        device: where it is.
        folder: the `iter_` or Hugging Face folder it came from.
        stop_tokens: ids that end a text.
        chat_folder: where a chat template may be: the tokenizer's folder; None if it has none.
        token_multiple: what the tokens of a step have to be a multiple of.
        optimized: generate by `InferenceOptimizedModel`.
        nvls, nvls_tries, weights_dtype: as in `ModelSource`.
        speculation: how drafts are made. The model has its depths of multi-token prediction only if
            they make them.
        draft: the model that makes them, all of it on the first pipeline stage; None on the others
            and if no other model makes any.
        tokenizer_choice: arguments of `choose_tokenizer`, with which another process makes the same
            tokenizer.
        coordinator: by which the ranks that hold the model agree.
        timeout_seconds: that a rank waits for another one.
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

    def generator(self, max_step_tokens: int) -> LanguageModel:
        """Return what the engine runs; all ranks call it.

        Args:
            max_step_tokens: tokens of a step at most.

        Raises:
            ValueError: `--nvls require` where NVLink SHARP cannot be had, or `--weights-dtype`
                where there is nothing to copy.
        """
        if self.model.store.row_tiles:
            self._check_tiles()
        if not self.optimized:
            return self.model
        generator = InferenceOptimizedModel(
            self.model, self._comm(max_step_tokens), copies=self.weights_dtype
        )
        if self.model.region.group.rank == 0:
            if generator.copied is not None:
                print(generator.copied, file=sys.stderr)
            if self.model.config.norm.kind == "LayerNorm":
                print("LayerNorm runs as in training: only RMSNorm is fused", file=sys.stderr)
        return generator

    def _check_tiles(self) -> None:
        """Say what --batch-invariant covers. Raises ValueError where products do not allow it."""
        handles = matrices(self.model)
        packed = [handle for handle in handles if handle.least_rows is not None]
        tiled = [handle for handle in handles if handle not in packed]
        check_tiles((handle.get() for handle in tiled), handles[0].product_dtype)
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
                why = "sums rows by how many there are" if is_available() else "is not there"
                shapes = ", ".join(str(list(s)) for s in sorted({h.shape for h in tiled}))
                print(
                    f"batch-invariant: tiles of {shapes}, as this torch's packed product {why}",
                    file=sys.stderr,
                )

    def _comm(self, max_step_tokens: int) -> SequenceParallelComm | None:
        """Return the collectives of sequence parallelism; None without it."""
        region = self.model.region
        if not region.scatters:
            return None
        tokens = -(-max_step_tokens // self.token_multiple) * self.token_multiple
        element = torch.empty((), dtype=self.model.store.dtype).element_size()
        comm = SequenceParallelComm.create(
            region.group,
            TorchMemory(self.device),
            max_bytes=tokens * self.model.config.hidden_size * element,
            mode=self.nvls,
            limit=self.nvls_tries or 0,
        )
        if region.group.rank == 0:
            print(f"sequence parallel collectives: {comm.explain()}", file=sys.stderr)
            if self.nvls_tries is not None and comm.way == "torch.distributed":
                print(
                    "--nvls-tries bounds no wait of torch.distributed: "
                    "--distributed-timeout-minutes does",
                    file=sys.stderr,
                )
        return comm

    @property
    def cache_shapes(self) -> CacheShapes:
        """What this rank keeps of tokens while generating."""
        return CacheShapes.of(self.model.modules(), self.model.store.dtype)

    @property
    def data_parallel(self) -> Group:
        """The ranks that have the same part of the model, each in a replica of its own."""
        return self.model.groups["dp"]

    @property
    def shares_experts(self) -> bool:
        """Whether ranks of several replicas share experts: those of the group "etp_ep"."""
        groups = self.model.groups
        inside = set(groups["etp_ep"].ranks) <= set(groups["tp"].ranks)
        return self.model.config.moe is not None and not inside

    def host_group(self, name: str = "world") -> Group:
        """Make a group for what the hosts of these ranks exchange; all ranks call this. See
        `ProcessGroupCollection.host_group`."""
        return self.model.groups.host_group(name, timeout_seconds=self.timeout_seconds)

    @property
    def pipeline(self) -> PipelineGroups:
        """The stages that generate together with this one."""
        return PipelineGroups.of(self.model.groups)


@contextlib.contextmanager
def load_checkpoint_model(
    source: ModelSource,
    launch: Launch,
    *,
    speculation: Speculation | None = None,
    facts: StartFacts | None = None,
    reports: ErrorReports | None = None,
) -> Iterator[CheckpointModel]:
    """Build the model that a checkpoint or a Hugging Face folder describes and load its weights,
    spread over the processes.

    Args:
        source: where it is.
        launch: this process.
        speculation: how drafts are made; None makes none.
        facts: what all ranks must have in common besides the model; None for `source` alone.
        reports: agrees with the other ranks on errors, as soon as there is a store.

    Raises:
        ValueError: no checkpoint or a damaged one, no tokenizer, an impossible layout, no model
            that makes the drafts, or ranks that were not started alike.
    """
    speculation, facts = speculation or Speculation(), facts or start_facts(source)
    device = choose_device(source.device, launch.local_rank)
    further = speculation.speculative_method == "mtp"
    with _joined(source, launch, device, further=further, reports=reports) as place:
        check_same_start(place.coordinator, facts)
        loaded = dataclasses.replace(_from_source(source, place), speculation=speculation)
        if speculation.speculative_draft_model is not None:
            name = speculation.speculative_draft_model
            smaller = dataclasses.replace(place.source_of_one_stage, load=name)
            draft = _from_source(smaller, place.of_one_stage())
            _check_draft(loaded, draft, name)
            if loaded.model.groups["pp"].rank == 0:  # the other stages are told its drafts
                loaded = dataclasses.replace(loaded, draft=draft)
        compilers = explain_compiler(device)
        if compilers is not None and launch.rank == 0:
            print(f"kernels: {compilers}", file=sys.stderr)
        yield loaded


def _from_source(source: ModelSource, place: _Place) -> CheckpointModel:
    return (_from_folder if is_folder(source.load) else _from_checkpoint)(source, place)


def _check_draft(loaded: CheckpointModel, draft: CheckpointModel, name: str) -> None:
    """Raise ValueError unless both models mean the same by a token id, and the draft model's ranks
    need no others."""
    if draft.shares_experts:
        raise ValueError(
            f"--speculative-draft-model {name} has experts over several data-parallel replicas, "
            "which draft at different times: use a dense one, or ngram"
        )
    if loaded.vocab_size != draft.vocab_size:
        raise ValueError(
            f"--speculative-draft-model {name} has a vocabulary of {draft.vocab_size} tokens, "
            f"--load one of {loaded.vocab_size}: use a draft model of the same tokenizer"
        )
    if loaded.tokenizer.fingerprint != draft.tokenizer.fingerprint:
        raise ValueError(
            f"--speculative-draft-model {name} has another tokenizer "
            f"({draft.tokenizer.fingerprint[:12]}) than --load "
            f"({loaded.tokenizer.fingerprint[:12]}): use a draft model of the same tokenizer"
        )


class _Place:
    """This process among those that generate together.

    Args:
        source: how they are arranged.
        launch: which of them this is.
        device: of this one.
        store: what all of them reach; None for a single process.
        further: keep the depths of multi-token prediction.

    Attributes:
        coordinator: by which they agree.
        seconds: that one waits for another.
    """

    def __init__(
        self,
        source: ModelSource,
        launch: Launch,
        device: torch.device,
        store: dist.Store | None,
        *,
        further: bool,
    ) -> None:
        self.grid = rank_grid(source, launch.world_size)
        self.device, self._source, self._launch, self._store = device, source, launch, store
        self._further = further
        self.seconds = source.distributed_timeout_minutes * 60
        self._groups: ProcessGroupCollection | None = None
        self.coordinator: Coordinator = Solo()
        if store is not None:
            self.coordinator = StoreCoordinator(
                store, launch.rank, launch.world_size, timeout_seconds=self.seconds
            )

    def build(self, config: GPTConfig, dtype: torch.dtype) -> GPTModel:
        """Return this rank's part of a model, without values.

        Raises:
            ValueError: the model cannot be on these ranks; no process group is made then.
        """
        config = generating(config, further=self._further)
        split = stage_split(config, self._source)
        grid = self.grid
        problems = config.problems(tp=grid.tp, etp=grid.size("etp"), ep=grid.ep)
        if problems:
            raise ValueError("; ".join(problems))
        return GPTModel(
            config,
            self._joined_groups(),
            sequence_parallel=self._source.sequence_parallel,
            dtype=dtype,
            device=self.device,
            backend=_backend(dtype, self, self._source),
            storage=Storage(initialize=False),
            split=split,
        )

    @property
    def source_of_one_stage(self) -> ModelSource:
        """How the processes are arranged without pipeline stages."""
        return dataclasses.replace(
            self._source, pipeline_model_parallel_size=1, pipeline_model_parallel_layout=None
        )

    def of_one_stage(self) -> _Place:
        """Return this process among the same ones without pipeline stages: the ranks of each stage
        hold all of a model."""
        if self.grid.pp == 1:
            return self
        place = copy.copy(self)
        place._source, place._groups = self.source_of_one_stage, None
        place.grid = rank_grid(place._source, self._launch.world_size)
        return place

    def _joined_groups(self) -> ProcessGroupCollection:
        """Return the groups of the processes, made the first time."""
        if self._groups is None and self._store is None:
            self._groups = ProcessGroupCollection.single()
        elif self._groups is None:
            if not dist.is_initialized():
                dist.init_process_group(
                    "nccl" if self.device.type == "cuda" else "gloo",
                    store=dist.PrefixStore("groups", self._store),
                    rank=self._launch.rank,
                    world_size=self._launch.world_size,
                    timeout=timedelta(seconds=self.seconds),
                    # NCCL then connects communicators as they are made, and fails there.
                    device_id=self.device if self.device.type == "cuda" else None,
                )
            self._groups = ProcessGroupCollection.create(
                self.grid,
                rank=self._launch.rank,
                timeout_seconds=self.seconds,
                names=GROUP_NAMES,
            )
        return self._groups

    def compare_files(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Compare a model's files with those of the other ranks, which may be other copies.

        Raises:
            ValueError: they differ.
        """
        if self._store is not None:
            files = {"the digest of the model's files": _digest_of(folder)}
            tokens = {"the tokenizer's digest": tokenizer.fingerprint[:16]}
            check_same_start(self.coordinator, StartFacts(values={**files, **tokens}))

    def leave(self) -> None:
        """Leave the other processes, once all of them are done."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def _digest_of(folder: Path) -> str:
    """Return a digest of a checkpoint's manifest, which has the digests of its tensors; of a
    Hugging Face folder, of its config.json and of the size, begin and end of each file of weights.
    """
    digest = hashlib.sha256()
    described = [folder / name for name in (MANIFEST_NAME, "config.json")]
    for path in filter(Path.is_file, described):
        with open_regular(path, follow_links=True) as file:
            while block := file.read(1 << 22):
                digest.update(block)
    for path in sorted(folder.glob("*.safetensors")) if is_folder(folder) else ():
        with open_regular(path, follow_links=True) as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size}".encode())
            for begin in (0, max(0, size - _PART_BYTES)):
                file.seek(begin)
                digest.update(file.read(_PART_BYTES))
    return digest.hexdigest()[:16]


def rank_grid(source: ModelSource, world_size: int) -> RankGrid:
    """Return how so many processes are arranged: as data-parallel replicas of the tensor and
    pipeline parallel ranks.

    Raises:
        ValueError: they are no multiple of what the sizes multiply to.
    """
    tp, pp = source.tensor_model_parallel_size, source.pipeline_model_parallel_size
    etp, ep = source.expert_tensor_parallel_size or tp, source.expert_model_parallel_size
    for sizes in (
        {"tensor": tp, "pipeline": pp},
        {"expert-tensor": etp, "expert": ep, "pipeline": pp},
    ):
        total = math.prod(sizes.values())
        if world_size % total:
            flags = (
                f"--{name}{'' if name == 'expert-tensor' else '-model'}-parallel-size {size}"
                for name, size in sizes.items()
            )
            raise ValueError(
                f"{' x '.join(flags)} does not fit {world_size} process(es): start {total} or a "
                "multiple with torchrun --nproc-per-node, or choose other sizes"
            )
    return RankGrid(world_size=world_size, tp=tp, pp=pp, etp=etp, ep=ep)


def stage_split(config: GPTConfig, source: ModelSource) -> StageSplit:
    """Return the blocks of every pipeline stage.

    Raises:
        ValueError: fewer layers than stages, or a layout that is none of this model.
    """
    stages, layout = source.pipeline_model_parallel_size, source.pipeline_model_parallel_layout
    if layout is None:
        return StageSplit.balanced(config.blocks, stages, blocks_of_layer=config.layer_blocks)
    if config.pattern:
        raise ValueError(
            f"--pipeline-model-parallel-layout {layout} is of a GPT, the model is a hybrid of the "
            f"blocks {config.pattern}: drop it"
        )
    split = StageSplit.from_layout(layout, stages, num_layers=config.num_layers)
    if split.chunks > 1:
        raise ValueError(
            f"--pipeline-model-parallel-layout {layout} has {split.chunks} virtual stages a rank: "
            f"write {stages} parts, as generation has one on each rank"
        )
    return split


def _token_multiple(source: ModelSource) -> int:
    """Return what ranks that share the tokens of a step need these to be a multiple of."""
    return source.tensor_model_parallel_size if source.sequence_parallel else 1


def _backend(dtype: torch.dtype, place: _Place, source: ModelSource) -> Backend:
    """Return the parts of a model whose ranks multiply alike."""
    if source.batch_invariant:
        if place.device.type != "cpu":
            raise ValueError(
                f"--batch-invariant is for a CPU, not {place.device}: give --device cpu, or drop it"
            )
        return with_batch_invariance(LOCAL)
    chosen = CpuMatmul.choose(
        "auto", weights=dtype, device=place.device, coordinator=place.coordinator
    )
    return with_cpu_dtype(LOCAL, None if chosen is None else chosen.dtype)


def _from_folder(source: ModelSource, place: _Place) -> CheckpointModel:
    """Read this rank's slices of a Hugging Face folder."""
    folder, described = open_model(source.load, flag="--load")
    if source.tokenizer_model is None and folder.tokenizer is None:
        raise ValueError(
            f"--load {source.load} holds no tokenizer: give --tokenizer-model PATH of one"
        )
    chosen = str(source.tokenizer_model or folder.tokenizer)
    choice = {
        "recorded": {"type": guess_type(chosen), "model": chosen},
        "model": None,
        "add_special_tokens": not source.tokenizer_hf_no_include_special_tokens,
    }
    tokenizer = choose_tokenizer(**choice)
    place.compare_files(folder.path, tokenizer)
    dtype = described.dtype or torch.float32
    model = place.build(described.config, dtype)
    read_weights(folder, described, weight_chunks(model.store), coordinator=place.coordinator)
    ends = set(end_tokens(folder.path))
    if not ends and tokenizer.eod is not None:
        ends = {tokenizer.eod}
    return CheckpointModel(
        model=model,
        tokenizer=tokenizer,
        max_length=described.max_length,
        vocab_size=described.config.vocab_size,
        device=place.device,
        folder=folder.path,
        stop_tokens=frozenset(ends),
        chat_folder=folder.path if source.tokenizer_model is None else source.tokenizer_model,
        token_multiple=_token_multiple(source),
        optimized=source.transformer_impl == "inference_optimized",
        nvls=source.nvls,
        nvls_tries=source.nvls_tries,
        weights_dtype=source.weights_dtype,
        tokenizer_choice=choice,
        coordinator=place.coordinator,
        timeout_seconds=place.seconds,
    )


def _from_checkpoint(source: ModelSource, place: _Place) -> CheckpointModel:
    """Load this rank's part of a checkpoint of any layout, if need be of an older one."""
    found = load_newest(source.load, lambda folder: _load(folder, source, place), place.coordinator)
    if found is None:
        raise ValueError(
            f"--load {source.load}: there is no checkpoint: name the folder that --save wrote "
            "to, one iter_ folder in it, or a Hugging Face folder"
        )
    return found[1]


def _load(folder: Path, source: ModelSource, place: _Place) -> CheckpointModel:
    """Load this rank's part of one checkpoint."""
    manifest = read_together(folder, place.coordinator)
    config, extra = stored_model(folder, manifest), manifest.extra
    options, recorded = extra["config"], extra.get("tokenizer", {})
    if extra.get("weights_only") is True:  # nothing was trained without special tokens here
        recorded = {"special_tokens": None, **recorded}
    left_out = source.tokenizer_hf_no_include_special_tokens
    choice = {
        "recorded": recorded,
        "model": source.tokenizer_model,
        "add_special_tokens": None if left_out is None else not left_out,
    }
    tokenizer = choose_tokenizer(**choice)
    place.compare_files(folder, tokenizer)
    model = place.build(config, weight_dtype(options))
    chunks = weight_chunks(model.store)
    load_checkpoint(folder, chunks, coordinator=place.coordinator, convert_dtype=True)
    origin = carried_folder(folder, extra, None)
    ends = set(end_tokens(origin)) if origin is not None else set()
    if tokenizer.eod is not None:
        ends.add(tokenizer.eod)
    return CheckpointModel(
        model=model,
        tokenizer=tokenizer,
        max_length=options.get("max-position-embeddings") or options.get("seq-length"),
        vocab_size=config.vocab_size,
        device=place.device,
        folder=folder,
        stop_tokens=frozenset(ends),
        chat_folder=source.tokenizer_model or origin or recorded.get("model"),
        token_multiple=_token_multiple(source),
        optimized=source.transformer_impl == "inference_optimized",
        nvls=source.nvls,
        nvls_tries=source.nvls_tries,
        weights_dtype=source.weights_dtype,
        tokenizer_choice=choice,
        coordinator=place.coordinator,
        timeout_seconds=place.seconds,
    )


def generating(config: GPTConfig, *, further: bool = False) -> GPTConfig:
    """Return the model without what only training has: expert capacity, and further predictions
    unless drafts are made by them.

    A capacity is of the tokens of a microbatch; here those are a batch's, so that what a prompt
    yields would depend on its neighbours, on their padding and on the ranks.
    """
    if not further:
        config = config.without_further_prediction()
    elif not config.mtp_num_layers:
        raise ValueError(
            "--speculative-method mtp: the model has no layers of multi-token prediction: train it "
            "with --mtp-num-layers, or use ngram or draft"
        )
    moe = config.moe and dataclasses.replace(config.moe, capacity_factor=None)
    return dataclasses.replace(config, moe=moe)


@contextlib.contextmanager
def _joined(
    source: ModelSource,
    launch: Launch,
    device: torch.device,
    *,
    further: bool,
    reports: ErrorReports | None,
) -> Iterator[_Place]:
    """Meet the other processes of the run, if there are any, and leave them at the end.

    Raises:
        PeerLost: a collective failed, as one of them is gone or silent.
    """
    seconds = source.distributed_timeout_minutes * 60
    rank_grid(source, launch.world_size)  # raises before anybody is waited for
    store = None
    if launch.world_size > 1:
        if reports is not None:
            reports.join()
        store = launch.open_store(timeout_seconds=seconds, is_first_client=True)
        if reports is not None:
            client = launch.open_store(timeout_seconds=seconds)
            reports.share(client, world_size=launch.world_size)
    place = _Place(source, launch, device, store, further=further)
    try:
        yield place
    except RuntimeError as error:
        if not is_communication_error(error):
            raise
        raise PeerLost(
            f"error: rank {launch.rank} lost another rank, which ended or was silent for "
            f"{seconds:.0f} s: see what that one said, and start all again ({error})"
        ) from error
    # Not in a `finally`: after an error on one rank the others may be gone, and the launcher ends
    # all of them.
    place.leave()


def weight_dtype(options: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a run with these options, by flag name, computes in."""
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
            tiktoken to use instead; None for the recorded one. One line warns if it is another.
        add_special_tokens: whether it adds special tokens to a text; None does as recorded.

    Raises:
        ValueError: none is recorded, or its file is gone or has changed.
    """
    if model is None and recorded.get("type") is None:
        raise ValueError(
            "the checkpoint does not say which tokenizer it was trained with: give "
            "--tokenizer-model PATH of a tokenizer.json or a SentencePiece .model"
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
    adds = special is None or bool(special)
    tokenizer = build(add_special_tokens=adds if add_special_tokens is None else add_special_tokens)
    fingerprint = recorded.get("fingerprint")
    same = fingerprint == tokenizer.fingerprint
    if same and add_special_tokens is None and special is not None:
        same = special == tokenizer.special_tokens
    if same or fingerprint is None:
        return tokenizer
    if model is None:
        raise ValueError(
            f"the tokenizer {recorded.get('model')} has changed since the model was trained with "
            "it: give the one of then with --tokenizer-model"
        )
    print(
        f"warning: --tokenizer-model {model} is not the file that the model was trained with",
        file=sys.stderr,
    )
    return build(add_special_tokens=add_special_tokens is not False)


def _recorded_special_tokens(recorded: Mapping[str, Any]) -> SpecialTokens | None:
    """Return what was added to the texts that a model was trained on; None if it is not said.

    A checkpoint of before there was a record was trained on texts without any.
    """
    if recorded.get("fingerprint") is None or recorded.get("special_tokens", {}) is None:
        return None
    return SpecialTokens.from_json(recorded.get("special_tokens"))
