# SPDX-License-Identifier: Apache-2.0
"""The engine of a loaded model, with its drafts, its cache memory and its recorded steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatron.core.cpu_graph import CpuGraph
from megatron.core.device import CudaRecorder, GraphMemory, Recorder
from megatron.core.inference import EngineConfig
from megatron.core.inference.engine import Engine
from megatron.core.inference.model_runner import EngineFeatures, LanguageModel
from megatron.core.inference.speculation import (
    DraftModel,
    MultiTokenHeads,
    MultiTokenModel,
    NGramLookup,
    Proposer,
)
from megatron.core.process_groups import Group
from megatron.core.transformer import CacheShapes
from megatron.inference.config import Inference

if TYPE_CHECKING:
    from megatron.inference.checkpoint_model import CheckpointModel


#: Draft tokens per step, if neither an option nor the model specifies a number.
DEFAULT_NUM_DRAFTS = 4


def weights_of_level(loaded: CheckpointModel, level: int) -> list[torch.Tensor]:
    """Return the weights that leave device memory at a level of sleep.

    Raises:
        ValueError: the level is neither 1 nor 2, or it is 2 and the weights are on the host.
    """
    if level not in (1, 2):
        raise ValueError(f"sleep level {level}: use 1 (the cache) or 2 (weights too)")
    if level == 2 and torch.device(loaded.device).type == "cpu":
        raise ValueError(
            "sleep level 2 moves weights to the host, where they already are: use level 1"
        )
    return loaded.model.store.tensors() if level == 2 else []


def speculating_engine(
    loaded: CheckpointModel,
    config: EngineConfig,
    *,
    check_plans: Group | None = None,
    make_recorder: Callable[[], Recorder] | None = None,
) -> Engine:
    """Return an engine for a model, with the speculative decoding of its `speculation`.

    Args:
        loaded: the model.
        config: config of the engine; `memory_bytes` is for the caches of both models.
        check_plans, make_recorder: as for `Engine`.

    Raises:
        ValueError: there are more drafts than the model predicts, or than a step or the cache
            can hold.
    """
    speculation = loaded.speculation
    method, num_drafts = speculation.speculative_method, speculation.num_speculative_tokens
    generator = loaded.generator(config.max_num_batched_tokens)
    options = {"check_plans": check_plans, "make_recorder": make_recorder}
    if method is None:
        return _engine(loaded, generator, config, **options)
    if method != "ngram" and loaded.shares_experts:
        raise ValueError(
            f"--speculative-method {method} cannot be combined with experts over several "
            "data-parallel replicas, because the draft model's steps do not run on all "
            "replicas together: use ngram"
        )
    if method == "mtp":
        assert isinstance(generator, MultiTokenModel)
        mtp_layers = loaded.model.config.mtp_num_layers
        num_drafts = num_drafts or mtp_layers
        if num_drafts > mtp_layers:
            raise ValueError(
                f"--num-speculative-tokens is {num_drafts}, but the model predicts "
                f"{mtp_layers} more tokens (--mtp-num-layers in training): use at most "
                f"{mtp_layers}"
            )
        proposer: Proposer = MultiTokenHeads(generator, num_layers=num_drafts)
    elif method == "ngram":
        proposer = NGramLookup()
    else:
        proposer = DraftModel(None, tuple)
        config = dataclasses.replace(
            config, num_speculative_tokens=num_drafts or DEFAULT_NUM_DRAFTS
        )
        if (draft := loaded.draft) is not None:  # on the first pipeline stage
            config, draft_config = split_cache_memory(
                config, loaded.model.cache_shapes, draft.model.cache_shapes
            )
            make_draft_recorder = (
                make_recorder if make_recorder is CpuGraph and draft.optimized else None
            )
            engine = _engine(
                draft,
                draft.generator(draft_config.max_num_batched_tokens),
                draft_config,
                make_recorder=make_draft_recorder,
            )
            proposer = DraftModel(engine, draft.model.store.tensors)
    config = dataclasses.replace(config, num_speculative_tokens=num_drafts or DEFAULT_NUM_DRAFTS)
    return _engine(loaded, generator, config, proposer=proposer, **options)


def split_cache_memory(
    config: EngineConfig, shapes: CacheShapes, draft_shapes: CacheShapes
) -> tuple[EngineConfig, EngineConfig]:
    """Split the cache memory between a model and its draft model; return both engine configs.

    Both caches have the same number of blocks. The recurrent states of all rows are allocated
    first. The remaining bytes are split in proportion to the bytes per token. A model with states
    but without a KV cache gets a quarter of the remaining bytes for snapshots of its states.

    Args:
        config: config of the model's engine; its memory is for both models.
        shapes: shapes of the model's cache on this rank.
        draft_shapes: shapes of the draft model's cache on this rank.

    Raises:
        ValueError: the memory does not hold the states and one block of each model.
    """
    draft_config = dataclasses.replace(config, num_speculative_tokens=0)
    memory_bytes = config.memory_bytes
    if memory_bytes is None:
        return config, draft_config
    state_bytes = config.min_state_bytes(shapes), draft_config.min_state_bytes(draft_shapes)
    token_bytes = shapes.token_bytes, draft_shapes.token_bytes
    block_bytes = config.min_blocks * config.block_size * sum(token_bytes)
    free_bytes = memory_bytes - sum(state_bytes)
    if free_bytes < block_bytes:
        raise ValueError(
            f"{memory_bytes:,} bytes of memory do not fit the states of {config.max_num_seqs} "
            f"sequences and {config.min_blocks_text} of the model and the draft model: give "
            f"at least {sum(state_bytes) + block_bytes:,}"
        )
    snapshot_bytes = [0, 0]
    for index, (model_state_bytes, model_token_bytes) in enumerate(
        zip(state_bytes, token_bytes, strict=True)
    ):
        if model_state_bytes and not model_token_bytes:
            snapshot_bytes[index] = min(free_bytes // 4, free_bytes - block_bytes) // (
                1 if block_bytes else 2
            )
    free_bytes -= sum(snapshot_bytes)
    draft_cache_bytes = free_bytes * token_bytes[1] // max(1, sum(token_bytes))
    draft_bytes = state_bytes[1] + snapshot_bytes[1] + draft_cache_bytes
    return (
        dataclasses.replace(config, memory_bytes=memory_bytes - draft_bytes),
        dataclasses.replace(draft_config, memory_bytes=draft_bytes),
    )


def _engine(
    loaded: CheckpointModel,
    generator: LanguageModel,
    config: EngineConfig,
    *,
    proposer: Proposer | None = None,
    check_plans: Group | None = None,
    make_recorder: Callable[[], Recorder] | None = None,
) -> Engine:
    return Engine(
        generator,
        dataclasses.replace(config, max_model_len=loaded.max_length),
        features=EngineFeatures(
            proposer=proposer,
            pipeline=loaded.pipeline,
            make_recorder=make_recorder,
            check_plans=check_plans,
            expert_peers=loaded.host_group("etp_ep") if loaded.shares_experts else None,
        ),
    )


def graph_recorder(loaded: CheckpointModel, options: Inference) -> Callable[[], Recorder] | None:
    """Return the factory of recorders of decode steps; None if the steps run eagerly.

    On a CPU, decode steps of the optimized forward pass are recorded by default if the model is on
    one rank: collectives cannot be recorded.

    Raises:
        ValueError: CUDA graphs without a GPU, or --enforce-eager where steps are eager anyway.
    """
    if not options.inference_cuda_graphs:
        on_cpu = torch.device(loaded.device).type == "cpu"
        if options.enforce_eager and not on_cpu:
            raise ValueError(
                "--enforce-eager has no effect on a GPU without --inference-cuda-graphs, "
                "because steps are eager anyway: drop it"
            )
        if options.enforce_eager or not (loaded.optimized and on_cpu):
            return None
        ranks = loaded.pipeline.stages.size * loaded.model.region.group.size
        return CpuGraph if ranks == 1 and not loaded.shares_experts else None
    make = functools.partial(
        CudaRecorder, loaded.device, "--inference-cuda-graphs", memory=GraphMemory()
    )
    make()  # raises without a GPU
    return make
