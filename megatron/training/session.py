# SPDX-License-Identifier: Apache-2.0
"""The components of a training run, built from its options: model, engine, optimizer, state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.cli.schema import flatten
from megatron.core.backend import Backend, with_cpu_dtype
from megatron.core.device import CudaRecorder, memory_bytes, peak_memory_bytes
from megatron.core.dist_checkpointing import CheckpointError, TensorChunk, compare_architecture
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTConfig, GPTModel, logical_weights
from megatron.core.moe import CapacityCheck, capacities_of
from megatron.core.moe.router import Balance, routers_of
from megatron.core.optimizer import Optimizer
from megatron.core.optimizer.optimizer_config import check_patterns
from megatron.hf.config_json import function_of
from megatron.training.checkpointing.state import CheckpointMetadata
from megatron.training.checkpointing.stored_model import saved_options, stored_model
from megatron.training.config import Config
from megatron.training.config.model_table import gpt_config, options_problem
from megatron.training.config.resolve import ResolvedRun, padded_vocab_size
from megatron.training.config.values import require_all
from megatron.training.core_configs import (
    CpuMatmul,
    backend,
    data_parallel_config,
    loss_scaler,
    optimizer_config,
    pipeline_order,
    recompute,
    split,
    weight_dtype,
)
from megatron.training.data.data_sets import DataSets
from megatron.training.data.vocabulary import Vocabulary
from megatron.training.distributed_context import DistributedContext
from megatron.training.experiments import Experiment, load_experiments
from megatron.training.fault_tolerance.replay import RerunPolicy, StageChecksums
from megatron.training.hooks import TrainingHooks
from megatron.training.monitoring.flops import peak_flops
from megatron.training.monitoring.log_line import ModelLog, Speedometer, StepWindow, layer_name
from megatron.training.step import (
    ForwardBackward,
    FullIterationGraph,
    PipelineForwardBackward,
    StepRunner,
    TrainStep,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Session:
    """The components of a run, alive for its whole duration.

    Args:
        hooks: hooks of the model and the experiments.
    """

    run: ResolvedRun
    context: DistributedContext
    vocabulary: Vocabulary
    data: DataSets
    model: GPTModel
    optimizer: Optimizer
    balance: Balance | None
    step: TrainStep
    window: StepWindow
    metadata: CheckpointMetadata
    cpu_matmul: CpuMatmul | None
    hooks: tuple[TrainingHooks, ...]


def build_session(
    run: ResolvedRun, context: DistributedContext, vocabulary: Vocabulary, data: DataSets
) -> Session:
    """Build this rank's shard of the model, its engine and its optimizer."""
    config = run.config
    model_config, experiments = gpt_config(config, vocabulary.size), load_experiments(run)
    if config.checkpoint.use_checkpoint_args:
        _check_checkpoint_model(config, model_config, say=context.coordinator.say)
    bucket = config.data_parallel.ddp_bucket_size
    buckets = {} if bucket is None else {"bucket_bytes": 4 * bucket}
    data_parallel = data_parallel_config(config)
    matmul = CpuMatmul.choose(
        config.execution.cpu_matmul_dtype,
        weights=weight_dtype(config),
        device=context.device,
        coordinator=context.coordinator,
    )
    model = GPTModel(
        model_config,
        context.groups,
        sequence_parallel=config.parallel.sequence_parallel,
        seed=config.training.seed,
        dtype=weight_dtype(config),
        device=context.device,
        vocab_multiple=config.tokenizer.make_vocab_size_divisible_by,
        storage=data_parallel.storage(**buckets),
        backend=_backend(config, experiments, matmul),
        split=split(config),
    )
    model.set_recompute(recompute(config))
    _check_patterns(config, logical_weights(model_config))
    engine = DataParallel(model.store, context.groups, config=data_parallel)
    optimizer = Optimizer(
        engine.owned(),
        context.groups,
        config=optimizer_config(config),
        scaler=loss_scaler(config),
        weights=[handle.sharding for handle in model.store.handles.values()],
    )
    gpu = torch.cuda.get_device_name(context.device) if context.device.type == "cuda" else None
    padded, balance = padded_vocab_size(config, vocabulary.size), _balance(model, context)
    step = _train_step(run, context, model, engine=engine, optimizer=optimizer)
    return Session(
        run=run,
        context=context,
        vocabulary=vocabulary,
        data=data,
        model=model,
        optimizer=optimizer,
        balance=balance,
        step=step,
        window=StepWindow(
            run,
            Speedometer.of(run, padded_vocab_size=padded, peak_flops=peak_flops(gpu)),
            memory=lambda: (memory_bytes(context.device), peak_memory_bytes(context.device)),
        ),
        metadata=_metadata(run, vocabulary, data, model_config, matmul),
        cpu_matmul=matmul,
        hooks=(ModelLog(model, balance), *(e.hooks(model, step) for e in experiments if e.hooks)),
    )


def _metadata(
    run: ResolvedRun,
    vocabulary: Vocabulary,
    data_sets: DataSets,
    model: GPTConfig,
    matmul: CpuMatmul | None,
) -> CheckpointMetadata:
    """Return the description of the run that its checkpoints store."""
    return CheckpointMetadata(
        model=model.to_json(),
        config=_saved_options(run.config),
        tokenizer=vocabulary.tokenizer,
        data=data_sets.identity,
        allow_other_data=run.config.data.allow_data_change,
        batch_follows_world=run.batch_follows_world,
        cpu_matmul=None if matmul is None else matmul.name,
    )


def _backend(
    config: Config, experiments: Sequence[Experiment], matmul: CpuMatmul | None
) -> Backend:
    """Return the backend of the model, with the changes of experiments."""
    chosen = with_cpu_dtype(backend(config), None if matmul is None else matmul.dtype)
    for experiment in experiments:
        if experiment.blocks is not None:
            chosen = experiment.blocks(chosen)
    return chosen


def _check_checkpoint_model(
    config: Config, model_config: GPTConfig, *, say: Callable[[str], None]
) -> None:
    """Check, before allocating memory, that options read from a checkpoint describe the model whose
    weights it contains. Raises ValueError."""
    chosen = config.checkpoint
    roots = [root for root in (chosen.load, chosen.pretrained_checkpoint) if root]
    checkpoint = saved_options(roots)
    if checkpoint is None:
        say(f"--use-checkpoint-args: no checkpoint in {' or '.join(roots)}: options are unchanged")
        return
    folder, _, manifest = checkpoint
    try:
        stored = stored_model(folder, manifest)
    except CheckpointError as error:
        raise ValueError(f"--use-checkpoint-args: {error}") from error
    if problem := options_problem(stored):
        raise ValueError(f"--use-checkpoint-args: {folder}: {problem}")
    architectures = (function_of(model).to_json() for model in (stored, model_config))
    if differences := compare_architecture(*architectures):
        raise ValueError(
            f"--use-checkpoint-args: {folder} contains another model: {'; '.join(differences)}"
        )


def _train_step(
    run: ResolvedRun,
    context: DistributedContext,
    model: GPTModel,
    *,
    engine: DataParallel,
    optimizer: Optimizer,
) -> TrainStep:
    """Return the train step."""
    reruns = _reruns(run.config, model)
    return TrainStep(
        model,
        engine,
        optimizer=optimizer,
        groups=context.groups,
        forward_backward=_step_runner(run, context, model, engine, reruns=reruns),
        per_token_loss=run.config.training.calculate_per_token_loss,
        reruns=reruns,
        capacities=_capacities(run.config, model, context),
    )


def _capacities(
    config: Config, model: GPTModel, context: DistributedContext
) -> CapacityCheck | None:
    """Return the check for tokens beyond expert capacity; None if expert ranks accept all
    tokens."""
    if config.parallel.moe_expert_rank_capacity_factor is None:
        return None
    layer_capacities = [(layer_name(router), capacity) for router, capacity in capacities_of(model)]
    names = [layer_name(router) for router in model.config.router_names]
    return CapacityCheck(
        layer_capacities, names, world=context.groups["world"], device=context.device
    )


def _reruns(config: Config, model: GPTModel) -> RerunPolicy:
    """Return when steps are recomputed, and the counters their forward passes update."""
    counters = [router.counted for router in routers_of(model)]
    if model.multi_token is not None:
        counters.append(model.multi_token.sums)
    mode, stage = config.failures.rerun_mode, None
    if mode != "disabled" and model.groups["pp"].size > 1:
        stage = StageChecksums(model.store.device, model.num_chunks)
    reruns = RerunPolicy(mode, config.failures.rerun_interval, counters, stage)
    state = model.step_state
    return reruns if state is None else replace(reruns, forget=state.begin)


def _balance(model: GPTModel, context: DistributedContext) -> Balance | None:
    """Return the balance of expert loads; None without experts."""
    if model.config.moe is None:
        return None
    return Balance(
        routers_of(model),
        model.config.router_names,
        config=model.config.moe,
        world=context.groups["world"],
        device=context.device,
    )


def _check_patterns(config: Config, names: Collection[str]) -> None:
    """Check that every pattern of the options matches at least one weight.

    Raises:
        ValueError: a pattern matches no weight; the message names each option with such patterns.
    """
    chosen = optimizer_config(config)
    adam = tuple((pattern, 1.0) for pattern in chosen.muon.adam_names)
    require_all(
        lambda: check_patterns(chosen.lr_factors, names, what="--lr-group"),
        lambda: check_patterns(chosen.decay_factors, names, what="--weight-decay-group"),
        lambda: check_patterns(adam, names, what="--muon-adam-weights"),
    )


def _saved_options(config: Config) -> dict[str, object]:
    """Return the options as stored in a checkpoint."""
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in flatten(config).items()}
    for name in ("tokenizer-model", "load-hf"):
        if options[name] is not None:
            options[name] = str(Path(options[name]).resolve())
    return options


def _step_runner(
    run: ResolvedRun,
    context: DistributedContext,
    model: GPTModel,
    engine: DataParallel,
    *,
    reruns: RerunPolicy,
) -> StepRunner:
    """Return the function that runs forward and backward of a step."""
    if context.groups["pp"].size > 1:
        order = pipeline_order(run.config)
        return PipelineForwardBackward(
            model, engine, groups=context.groups, stage_checksums=reruns.stage, **order
        )
    eager, chosen = ForwardBackward(model, engine), run.config.execution
    if chosen.cuda_graph_impl == "none":
        return eager
    return FullIterationGraph(
        eager,
        recorder=CudaRecorder(context.device, "--cuda-graph-impl full_iteration"),
        warmup_steps=chosen.cuda_graph_warmup_steps,
        say=context.coordinator.say,
    )


def hook_chunks(session: Session) -> list[TensorChunk]:
    """Return this rank's chunks of hook state."""
    return [chunk for hooks in session.hooks for chunk in hooks.state_chunks()]
