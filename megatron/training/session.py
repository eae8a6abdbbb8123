# SPDX-License-Identifier: Apache-2.0
"""The components of a training run, built from its options: model, engine, optimizer, state.

Also its steps and evaluations, which move batches to the device and run the train step, and the
parts of log lines about experts and multi-token prediction.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch

from megatron.cli.schema import flatten
from megatron.core.backend import Backend, with_cpu_dtype
from megatron.core.datasets.samplers import GPTBatch, PrefetchedBatches
from megatron.core.device import CudaRecorder, memory_bytes, peak_memory_bytes, pin
from megatron.core.dist_checkpointing import (
    CheckpointError,
    TensorChunk,
    compare_architecture,
    load_checkpoint,
    weight_chunks,
)
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import (
    GPTConfig,
    GPTModel,
    MTPTargets,
    logical_weights,
    shift_targets,
    take_mean_mtp_losses,
)
from megatron.core.moe import CapacityCheck, MoEConfig, capacities_of
from megatron.core.moe.router import Balance, RouterLoad, routers_of
from megatron.core.optimizer import Optimizer
from megatron.core.optimizer.optimizer_config import check_patterns
from megatron.hf.config_json import differences, function_of
from megatron.hf.folder import is_folder
from megatron.hf.read_weights import read_weights, reading_lines
from megatron.training.checkpointing.find import (
    load_newest,
    read_together,
    reject_later_checkpoints,
)
from megatron.training.checkpointing.hf_options import open_model
from megatron.training.checkpointing.option_reader import saved_options
from megatron.training.checkpointing.state import CheckpointMetadata, load_run
from megatron.training.checkpointing.stored_model import stored_model
from megatron.training.config import Config
from megatron.training.config.model_table import gpt_config, options_problem
from megatron.training.config.resolve import ResolvedRun, padded_vocab_size
from megatron.training.config.values import require_all
from megatron.training.core_configs import (
    backend,
    data_parallel_config,
    decoupled_schedule,
    learning_rate_schedule,
    loss_scaler,
    optimizer_config,
    pipeline_order,
    recompute,
    split,
    weight_decay_schedule,
    weight_dtype,
)
from megatron.training.cpu_matmul import CpuMatmul
from megatron.training.cuda_graphs import FullIterationGraph
from megatron.training.data.data_sets import (
    DataSets,
    read_ahead,
    training_batches,
    validation_batches,
)
from megatron.training.data.vocabulary import Vocabulary
from megatron.training.distributed_context import DistributedContext
from megatron.training.experiments import Experiment, load_experiments
from megatron.training.fault_tolerance.replay import RerunPolicy, StageChecksums
from megatron.training.hooks import TrainingHooks
from megatron.training.layouts import Layouts, layouts_of
from megatron.training.monitoring.flops import peak_flops, visible_square
from megatron.training.monitoring.log_line import LogPart
from megatron.training.monitoring.metrics import EXPERT_LOAD
from megatron.training.monitoring.step_window import Speedometer, StepWindow
from megatron.training.progress_state import Progress
from megatron.training.step import (
    ForwardBackward,
    Microbatch,
    PipelineForwardBackward,
    StepReport,
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
    matmul = _cpu_matmul(config, context)
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
        metadata=_metadata(run, vocabulary, data, model=model_config, matmul=matmul),
        cpu_matmul=matmul,
        hooks=(ModelLog(model, balance), *(e.hooks(model, step) for e in experiments if e.hooks)),
    )


def _metadata(
    run: ResolvedRun,
    vocabulary: Vocabulary,
    data_sets: DataSets,
    *,
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


def _cpu_matmul(config: Config, context: DistributedContext) -> CpuMatmul | None:
    """Return the dtype of CPU matmuls, equal on all ranks; None if there is no choice."""
    return CpuMatmul.choose(
        config.execution.cpu_matmul_dtype,
        weights=weight_dtype(config),
        device=context.device,
        coordinator=context.coordinator,
    )


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


def restore(session: Session) -> tuple[Progress, str]:
    """Load the checkpoint that the options name, if there is one.

    Returns the progress to start from, and a line that describes it.

    Raises:
        ValueError: the checkpoint cannot be used.
    """
    chosen, context = session.run.config.checkpoint, session.context
    if chosen.load is not None and is_folder(chosen.load):
        raise ValueError(f"--load {chosen.load} is a Hugging Face folder: give it to --load-hf")
    # A run that starts from weights has no optimizer state to load.
    sources = [("--load", chosen.load, chosen.finetune)]
    sources.append(("--pretrained-checkpoint", chosen.pretrained_checkpoint, True))
    for flag, source, is_start in sources:
        if source is None:
            continue
        loaded = load_newest(
            source,
            lambda folder, is_start=is_start: load_session(
                session,
                folder,
                with_optimizer=chosen.load_optim and not is_start,
                with_progress=not is_start,
            ),
            context.coordinator,
            flag=flag,
            fall_back=chosen.load_fallback,
        )
        if loaded is not None:
            resumes_newest = flag == "--load" and not is_start and _is_saved_in(source, chosen.save)
            return _start_from(session, *loaded, resumes_newest=resumes_newest)
        if flag == "--pretrained-checkpoint":
            raise ValueError(f"{flag} {source}: there is no checkpoint: name another")
    if chosen.save is not None:
        reject_later_checkpoints(
            chosen.save, 0, resumes_newest=False, coordinator=context.coordinator
        )
    if chosen.load_hf is not None:
        dtype_note = _read_folder(chosen.load_hf, session)
        also = "" if dtype_note is None else f" ({dtype_note})"
        return Progress(), f"read the weights of {chosen.load_hf}{also}; starting at iteration 0"
    why = "" if chosen.load is None else f": no checkpoint in {chosen.load}"
    return Progress(), f"starting at iteration 0{why}"


def load_session(
    session: Session, folder: Path, *, with_optimizer: bool = True, with_progress: bool = True
) -> Progress | None:
    """Load a session's state by `load_run`, and the state of hooks with the progress. Every rank
    calls this."""
    coordinator = session.context.coordinator
    progress = load_run(
        folder,
        store=session.model.store,
        optimizer=session.optimizer,
        window=session.window,
        metadata=session.metadata,
        coordinator=coordinator,
        with_optimizer=with_optimizer,
        with_progress=with_progress,
    )
    if progress is None:
        return None
    manifest = read_together(folder, coordinator)
    stored = _experiments_in(manifest.tensors)
    if not (stored or session.run.config.experiments.experiment):
        return progress
    chunks = [(chunk.name.partition("/")[0], chunk) for chunk in hook_chunks(session)]

    def union(names_by_rank: list[list[str]]) -> list[str]:
        return sorted({name for names in names_by_rank for name in names})

    # A rank may hold no chunk of some state, and still takes part in the load.
    coordinator.begin(f"experiments in {folder.name}")
    local_names = sorted({name for name, _ in chunks})
    experiment_names = set(coordinator.agree("experiments", lambda: local_names, union))
    if experiment_names & stored:
        stored_chunks = [chunk for name, chunk in chunks if name in stored]
        load_checkpoint(folder, stored_chunks, coordinator=coordinator)
    for name in sorted(stored ^ experiment_names):
        flag = f"--{name.replace('.', ' ')}"
        if name in experiment_names:
            coordinator.say(f"{folder} has no state of {flag}: it starts from these weights")
        else:
            coordinator.say(f"{folder} was trained with {flag}: continuing without")
    return progress


def _experiments_in(tensors: Collection[str]) -> set[str]:
    """Return the `experiment.NAME` prefixes among the tensors of a checkpoint."""
    prefixes = {name.partition("/")[0] for name in tensors if "/" in name}
    return {name for name in prefixes if name.startswith("experiment.")}


def hook_chunks(session: Session) -> list[TensorChunk]:
    """Return this rank's chunks of hook state."""
    return [chunk for hooks in session.hooks for chunk in hooks.state_chunks()]


def _is_saved_in(source: str, save: str | None) -> bool:
    return save is not None and Path(source).resolve() == Path(save).resolve()


def _start_from(
    session: Session, folder: Path, progress: Progress | None, *, resumes_newest: bool
) -> tuple[Progress, str]:
    """Check that the save folder contains no later checkpoint; return the progress to start from,
    and a line that describes it. Raises ValueError."""
    save, start = session.run.config.checkpoint.save, progress or Progress()
    if save is not None:
        reject_later_checkpoints(
            save,
            start.iteration,
            resumes_newest=resumes_newest,
            coordinator=session.context.coordinator,
        )
    if progress is None:
        return start, f"loaded the weights of {folder}; starting at iteration 0"
    return start, f"loaded {folder}; {_resume_line(session.run.config, start)}"


def _resume_line(config: Config, progress: Progress) -> str:
    """Restart the schedules if the options say so, and return a line that states where the run
    resumes."""
    chosen, text = config.checkpoint, f"resuming at iteration {progress.iteration}"
    if not chosen.resumes_schedule:
        progress.update_samples = 0
    if chosen.load_optim and chosen.resumes_schedule:
        return text
    state = "with its optimizer state" if chosen.load_optim else "without its optimizer state"
    if chosen.resumes_schedule:
        return f"{text} {state}, in its schedule (--schedule-on-load restart restarts it)"
    text = f"{text} {state}, at the start of the schedule"
    return f"{text} (--schedule-on-load continue resumes it)"


def _read_folder(path: str, session: Session) -> str | None:
    """Load the model from a Hugging Face folder, and the optimizer's master weights from the model.

    Returns:
        A line about ignored and quantized tensors, if there are any.

    Raises:
        ValueError: the folder is damaged or contains another model.
    """
    folder, model = open_model(path, flag="--load-hf")
    if model_differences := differences(model.config, session.model.config):
        raise ValueError(f"--load-hf {path} contains another model: {'; '.join(model_differences)}")
    chunks = weight_chunks(session.model.store)
    read_weights(folder, model, chunks, coordinator=session.context.coordinator)
    session.optimizer.after_load(with_state=False)
    return "; ".join(reading_lines(folder, model)) or None


def microbatch(
    batch: GPTBatch,
    device: torch.device,
    *,
    layouts: Layouts,
    mtp_num_layers: int = 0,
    share: float | None = None,
) -> Microbatch:
    """Move a batch to the device.

    Args:
        layouts: determines this rank's tokens of the batch's rows.
        mtp_num_layers: number of multi-token prediction depths, whose targets are computed from
            whole rows.
        share: share of the step's samples, see `Microbatch`.
    """

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        # Only a copy from pinned memory is asynchronous.
        return pin(tensor, device).to(device, non_blocking=True)

    layout = layouts.of(batch)
    mtp_targets = None
    if mtp_num_layers:
        targets = shift_targets(
            batch.input_ids,
            batch.labels,
            batch.loss_mask,
            num_layers=mtp_num_layers,
            document_ids=batch.document_ids,
            padding=batch.padding,
        )
        local = {
            name: to_device(torch.stack([layout.local(x, fill=name == "padding") for x in rows]))
            for name, rows in vars(targets).items()  # [D, b, s] each
            if rows is not None
        }
        mtp_targets = MTPTargets(**local)
    rows = (batch.input_ids, batch.labels, batch.loss_mask)
    tokens, labels, loss_mask = (to_device(layout.local(x)) for x in rows)  # [b, s/cp]
    layout = layout.with_samples(to_device(batch.sample_ids))
    return Microbatch(tokens, labels, loss_mask, layout, mtp_targets=mtp_targets, share=share)


def squared_lengths(batch: GPTBatch, window: int | None = None) -> int:
    """Return the sum of squared document lengths, restricted to the attention window; 0 if each
    sample is one document."""
    if batch.cu_seqlens is None:
        return 0
    return int(visible_square(batch.cu_seqlens.long().diff().numpy(), window).sum())


def take(
    batches: Iterator[GPTBatch],
    count: int,
    device: torch.device,
    *,
    layouts: Layouts,
    mtp_num_layers: int = 0,
    step_samples: int | None = None,
) -> list[Microbatch]:
    """Return the next training microbatches of this data-parallel rank.

    Args:
        step_samples: samples of a step on all data-parallel ranks if they are not divided evenly.
    """
    microbatches = []
    for batch in islice(batches, count):
        share = None if step_samples is None else batch.num_samples / step_samples
        microbatches.append(
            microbatch(batch, device, layouts=layouts, mtp_num_layers=mtp_num_layers, share=share)
        )
    return microbatches


class SessionSteps:
    """Takes the steps of a session, and evaluates its model.

    Args:
        batches: the training data of this data-parallel rank, from the run's position on.

    Attributes:
        lr, weight_decay: schedules over samples of applied updates.
        decoupled_lr: learning rate schedule of embedding and head, if separate.
        scaler: the loss scaler.
        window: sums of the current logging interval.
    """

    def __init__(self, session: Session, batches: Iterator[GPTBatch]) -> None:
        self._session, self._batches, model = session, batches, session.model
        self._layouts = layouts_of(session.run, session.context, model.config)
        self._mtp_num_layers = 0 if model.multi_token is None else model.config.mtp_num_layers
        self.lr = learning_rate_schedule(session.run)
        self.decoupled_lr = decoupled_schedule(session.run)
        self.weight_decay = weight_decay_schedule(session.run)
        self.scaler, self.window = session.optimizer.scaler, session.window

    def take_step(self, samples: int, *, update_samples: int, loss_limit: float) -> StepReport:
        """Train on the next global batch, unless its loss is above the limit.

        Args:
            samples: samples of this batch, from `ResolvedRun.batch_sizes`.
            update_samples: samples of all applied updates so far, the position in the schedules.
        """
        run, device = self._session.run, self._session.context.device
        division = run.division(samples)
        batches = [next(self._batches) for _ in range(division.rounds)]
        # An estimate if data-parallel ranks differ: this rank's documents are extrapolated to all.
        window = run.config.attention.window_size
        counted = [batch for batch in batches if not batch.is_padding]
        squares = sum(squared_lengths(batch, window) for batch in counted)
        local_samples = sum(batch.num_samples for batch in counted)
        self._session.window.add_squares(squares * samples // local_samples)
        microbatches = take(
            iter(batches),
            len(batches),
            device,
            layouts=self._layouts,
            mtp_num_layers=self._mtp_num_layers,
            step_samples=None if division.is_even else samples,
        )
        decoupled_lr, state = self.decoupled_lr, self._session.model.step_state
        if state is not None:
            state.begin()
        report = self._session.step(
            microbatches,
            lr=self.lr.lr(update_samples),
            weight_decay=self.weight_decay.weight_decay(update_samples),
            decoupled_lr=None if decoupled_lr is None else decoupled_lr.lr(update_samples),
            control_flags=self._session.context.stop.control_flags(),
            loss_limit=loss_limit,
        )
        if self._session.balance is not None:
            self._session.balance.finish(applied=report.applied)
        if state is not None:
            state.finish(self._session.context.groups)
        return report

    def params_norm(self) -> float | None:
        """Return the norm of all weights; None without --log-params-norm. Every rank calls this."""
        logged = self._session.run.config.logging.log_params_norm
        return self._session.optimizer.params_norm() if logged else None

    def loss_on(self, split: Literal["validation", "test"]) -> float | None:
        """Return the mean loss per token over the samples of a split, the same samples in every
        call; None if the run has no such data."""
        run, context, data = self._session.run, self._session.context, self._session.data
        if (data.validation if split == "validation" else data.test) is None:
            return None
        dp_group = context.groups["samples"]
        batches = validation_batches(data, run, dp_group=dp_group, split=split)
        at_a_time = run.evaluation.rounds  # the microbatches of one pipeline step
        count = run.config.evaluation.eval_iters * at_a_time
        microbatches = (
            microbatch(batch, context.device, layouts=self._layouts)
            for batch in islice(batches, count)
        )
        return self._session.step.evaluate(microbatches, at_a_time=at_a_time)


@contextlib.contextmanager
def open_steps(session: Session, *, consumed_samples: int) -> Iterator[SessionSteps]:
    """Open the steps of a session from a position in its data; prefetching ends on exit."""
    run = session.run
    batches = read_ahead(
        training_batches(
            session.data,
            run,
            dp_group=session.context.groups["samples"],
            consumed_samples=consumed_samples,
        ),
        run,
    )
    try:
        yield SessionSteps(session, batches)
    finally:
        if isinstance(batches, PrefetchedBatches):
            batches.close()


class ModelLog(TrainingHooks):
    """Adds the model's counters to log lines.

    Args:
        model: may have multi-token prediction depths.
        balance: the balance of expert loads; None without experts.
    """

    def __init__(self, model: GPTModel, balance: Balance | None) -> None:
        self._model, self._balance = model, balance

    def log_parts(self) -> list[LogPart]:
        """Return the losses of MTP depths and the expert loads; every rank calls this."""
        log_parts = []
        if self._model.config.mtp_num_layers:
            log_parts.append(mtp_losses(self._model))
        if self._balance is not None:
            log_parts.append(load_balance(self._balance.report(), self._balance.config))
        return log_parts


def mtp_losses(model: GPTModel) -> LogPart:
    """Return the log part of multi-token prediction losses since the previous line; depths count
    from 1.

    Every rank calls this.
    """
    losses = dict(enumerate(take_mean_mtp_losses(model), start=1))
    words = " | ".join(f"mtp {depth} loss: {loss:.6E}" for depth, loss in losses.items())
    return LogPart(words, {f"mtp_{depth}_loss": loss for depth, loss in losses.items()})


def load_balance(loads: Sequence[RouterLoad], config: MoEConfig) -> LogPart:
    """Return the log part of the load of all routers since the previous line.

    Args:
        loads: the load of every router, in the model's order.
        config: of the experts; quantities of disabled features are left out.
    """
    worst = max(loads, key=lambda load: load.imbalance)
    busiest = worst.tokens.index(max(worst.tokens))
    router = config.router
    numbers = {
        "expert_load_max": worst.imbalance,
        "router_entropy": fmean(load.entropy for load in loads),
    }
    words = [
        f"load balance: worst {worst.imbalance:.2f} ({layer_name(worst.name)}, expert {busiest})",
        f"router entropy {numbers['router_entropy']:.3f}",
    ]
    if config.capacity_factor is not None:
        numbers["tokens_dropped"] = fmean(load.dropped for load in loads)
        words.insert(1, f"dropped {numbers['tokens_dropped']:.2%}")
    if router.balance != "none":
        numbers["aux_loss"] = fmean(load.balance_loss for load in loads)
        words.append(f"aux loss {numbers['aux_loss']:.4f}")
    if router.z_loss_coeff > 0.0:
        numbers["z_loss"] = fmean(load.z_loss for load in loads)
        words.append(f"z loss {numbers['z_loss']:.4f}")
    table = {layer_name(load.name): relative(load.tokens) for load in loads}
    return LogPart(" | ".join(words), numbers, {EXPERT_LOAD: table})


def relative(tokens: Sequence[int]) -> list[float]:
    """Return the tokens of each expert divided by their mean: 1 is an even load."""
    mean = sum(tokens) / len(tokens)
    return [round(count / mean, 4) if mean else 0.0 for count in tokens]


def layer_name(router: str) -> str:
    """Return the display name of a router: "layer 2", counted from 0, for
    `decoder.blocks.5.moe.router`; "mtp 1", counted from 1 like its loss, for `mtp.0.`."""
    mtp_match = re.match(r"mtp\.([0-9]+)\.", router)
    if mtp_match is not None:
        return f"mtp {int(mtp_match[1]) + 1}"
    block_match = re.match(r"decoder\.blocks\.([0-9]+)\.", router)
    return router if block_match is None else f"layer {int(block_match[1]) // 2}"
