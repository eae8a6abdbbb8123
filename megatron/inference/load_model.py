# SPDX-License-Identifier: Apache-2.0
"""Load a model and its tokenizer from a checkpoint or a Hugging Face folder, in any layout."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.cli.error_reports import ErrorReports
from megatron.cli.launch import Launch
from megatron.cli.rank_agreement import StartFacts, check_same_start
from megatron.cli.tokenizers import (
    choose_tokenizer,
    guess_type,
)
from megatron.core.device import choose_device
from megatron.core.dist_checkpointing import (
    load_checkpoint,
    weight_chunks,
)
from megatron.core.ops.backend_choice import explain_compilers
from megatron.hf.folder import end_tokens, is_folder
from megatron.hf.read_weights import read_weights
from megatron.inference.checkpoint_model import CheckpointModel
from megatron.inference.config import ModelSource, Speculation, start_facts
from megatron.inference.rank_context import RankContext, join_ranks
from megatron.training.checkpointing.find import load_newest, read_together
from megatron.training.checkpointing.hf_export import carried_folder
from megatron.training.checkpointing.hf_import import open_model
from megatron.training.checkpointing.stored_model import stored_model


@contextlib.contextmanager
def load_checkpoint_model(
    source: ModelSource,
    launch: Launch,
    *,
    speculation: Speculation | None = None,
    facts: StartFacts | None = None,
    reports: ErrorReports | None = None,
    allow_classifier: bool = False,
) -> Iterator[CheckpointModel]:
    """Build the model of a checkpoint or a Hugging Face folder and load its weights, sharded over
    the processes.

    Args:
        source: path and layout of the model.
        launch: rank and world size of this process.
        speculation: options of speculative decoding; None for no drafts.
        facts: values that must be equal on all ranks, besides the model; None for `source` alone.
        reports: agrees with the other ranks on errors, once the store exists.
        allow_classifier: accept a model with a classification head, which cannot generate.

    Raises:
        ValueError: the checkpoint is missing or corrupt, there is no tokenizer, the layout is
            impossible, the model cannot draft, or the ranks were started with different options.
    """
    speculation, facts = speculation or Speculation(), facts or start_facts(source)
    device = choose_device(source.device, launch.local_rank)
    keep_mtp = speculation.speculative_method == "mtp"
    with join_ranks(source, launch, device, keep_mtp=keep_mtp, reports=reports) as context:
        check_same_start(context.coordinator, facts)
        loaded = dataclasses.replace(_from_source(source, context), speculation=speculation)
        if not allow_classifier or speculation.speculative_method is not None:
            _check_generates(loaded, f"--load {source.load}")
        if speculation.speculative_draft_model is not None:
            draft_name = speculation.speculative_draft_model
            draft_source = dataclasses.replace(context.single_stage_source, load=draft_name)
            draft = _from_source(draft_source, context.single_stage_context())
            _check_generates(draft, f"--speculative-draft-model {draft_name}")
            _check_draft(loaded, draft, draft_name)
            if loaded.model.groups["pp"].rank == 0:  # it sends the drafts to the other stages
                loaded = dataclasses.replace(loaded, draft=draft)
        compilers = explain_compilers(device)
        if compilers is not None and launch.rank == 0:
            print(f"kernels: {compilers}", file=sys.stderr)
        yield loaded


def _from_source(source: ModelSource, context: RankContext) -> CheckpointModel:
    return (_from_folder if is_folder(source.load) else _from_checkpoint)(source, context)


def _check_generates(loaded: CheckpointModel, name: str) -> None:
    """Raise ValueError for a model with a classification head."""
    if loaded.model.config.num_labels is not None:
        raise ValueError(
            f"{name} has a classification head, not a language-model head: it cannot generate; "
            "megatron.inference.serve serves its scores, without --speculative-method"
        )


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


def _token_multiple(source: ModelSource) -> int:
    """Return the multiple of tokens of a step that sequence parallelism needs."""
    return source.tensor_model_parallel_size if source.sequence_parallel else 1


def _from_folder(source: ModelSource, context: RankContext) -> CheckpointModel:
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
        hf_folder=None if folder.is_gguf else folder.path,
        chat_folder=folder.path if source.tokenizer_model is None else source.tokenizer_model,
        token_multiple=_token_multiple(source),
        optimized=source.optimized,
        nvls=source.nvls,
        nvls_tries=source.nvls_tries,
        weights_dtype=source.weights_dtype,
        tokenizer_choice=tokenizer_choice,
        coordinator=context.coordinator,
        timeout_seconds=context.timeout_seconds,
    )


def _from_checkpoint(source: ModelSource, context: RankContext) -> CheckpointModel:
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


def _load(folder: Path, source: ModelSource, context: RankContext) -> CheckpointModel:
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
        hf_folder=hf_folder,
        chat_folder=source.tokenizer_model or hf_folder or recorded.get("model"),
        token_multiple=_token_multiple(source),
        optimized=source.optimized,
        nvls=source.nvls,
        nvls_tries=source.nvls_tries,
        weights_dtype=source.weights_dtype,
        tokenizer_choice=tokenizer_choice,
        coordinator=context.coordinator,
        timeout_seconds=context.timeout_seconds,
    )


def weight_dtype(options: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the weights of a run with these options, by flag name."""
    if options.get("bf16"):
        return torch.bfloat16
    return torch.float16 if options.get("fp16") else torch.float32
