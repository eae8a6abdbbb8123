# SPDX-License-Identifier: Apache-2.0
"""The parts of a training run, put together from its options: model, engine, optimizer, state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.cli.schema import flatten
from megatron.core.backend import Backend, with_cpu_dtype
from megatron.core.device import CudaRecorder, memory_bytes, peak_memory_bytes
from megatron.core.dist_checkpointing import (
    CheckpointError,
    TensorChunk,
    compare_architecture,
    load_checkpoint,
    weight_chunks,
)
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTConfig, GPTModel, logical_weights
from megatron.core.moe.balance import Balance, routers_of
from megatron.core.optimizer import Optimizer
from megatron.core.optimizer.config import check_patterns
from megatron.hf.config_json import differences, function_of
from megatron.hf.folder import is_folder
from megatron.hf.read_weights import read_weights, reading_lines
from megatron.training.checkpoint_io import RunFacts, load_run
from megatron.training.checkpoints.hf_options import open_model
from megatron.training.config import Config
from megatron.training.config.checkpoint_options import saved_options
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import Run, padded_vocab_size
from megatron.training.config.values import require_all
from megatron.training.core_configs import (
    backend,
    data_parallel_config,
    loss_scaler,
    optimizer_config,
    pipeline_order,
    recompute,
    split,
    weight_dtype,
)
from megatron.training.cpu_matmul import CpuMatmul
from megatron.training.cuda_graphs import FullIterationGraph
from megatron.training.data.data_sets import (
    DataSets,
)
from megatron.training.data.vocabulary import Vocabulary
from megatron.training.experiments import Experiment, load_experiments
from megatron.training.failures.replay import Reruns, StageBits
from megatron.training.hooks import TrainingHooks
from megatron.training.monitoring.flops import peak_flops
from megatron.training.monitoring.model_metrics import ModelLog
from megatron.training.monitoring.step_window import Speedometer, StepWindow
from megatron.training.newest_checkpoint import clear_the_way, load_newest, read_together
from megatron.training.progress_state import Progress
from megatron.training.run_groups import RunGroups
from megatron.training.step import ForwardBackward, PipelineForwardBackward, StepRunner, TrainStep
from megatron.training.stored_model import stored_model


@dataclass(frozen=True, eq=False, kw_only=True)
class Session:
    """The parts of a run that live as long as it does.

    Args:
        hooks: what the model and the experiments add to the loop.
    """

    run: Run
    place: RunGroups
    vocabulary: Vocabulary
    data: DataSets
    model: GPTModel
    optimizer: Optimizer
    balance: Balance | None
    step: TrainStep
    window: StepWindow
    facts: RunFacts
    cpu_matmul: CpuMatmul | None
    hooks: tuple[TrainingHooks, ...]


def build_session(run: Run, place: RunGroups, vocabulary: Vocabulary, data: DataSets) -> Session:
    """Build model, engine and optimizer on this rank's part of the grid."""
    config = run.config
    shape, experiments = gpt_config(config, vocabulary.size), load_experiments(run)
    if config.checkpoint.use_checkpoint_args:
        _check_options_of(config, shape)
    bucket = config.data_parallel.ddp_bucket_size
    buckets = {} if bucket is None else {"bucket_bytes": 4 * bucket}
    data_parallel = data_parallel_config(config)
    matmul = _cpu_matmul(config, place)
    model = GPTModel(
        shape,
        place.groups,
        sequence_parallel=config.parallel.sequence_parallel,
        seed=config.training.seed,
        dtype=weight_dtype(config),
        device=place.device,
        vocab_multiple=config.tokenizer.make_vocab_size_divisible_by,
        storage=data_parallel.storage(**buckets),
        backend=_backend(config, experiments, matmul),
        split=split(config),
    )
    model.set_recompute(recompute(config))
    _find_patterns(config, logical_weights(shape))
    engine = DataParallel(model.store, place.groups, config=data_parallel)
    optimizer = Optimizer(
        engine.owned(),
        place.groups,
        config=optimizer_config(config),
        scaler=loss_scaler(config),
        weights=[handle.sharding for handle in model.store.handles.values()],
    )
    gpu = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else None
    padded, balance = padded_vocab_size(config, vocabulary.size), _balance(model, place)
    step = _train_step(run, place, model, engine=engine, optimizer=optimizer)
    return Session(
        run=run,
        place=place,
        vocabulary=vocabulary,
        data=data,
        model=model,
        optimizer=optimizer,
        balance=balance,
        step=step,
        window=StepWindow(
            run,
            Speedometer.of(run, padded_vocab_size=padded, peak_flops=peak_flops(gpu)),
            memory=lambda: (memory_bytes(place.device), peak_memory_bytes(place.device)),
        ),
        facts=RunFacts(
            model=shape.to_json(),
            config=_saved_options(config),
            tokenizer=vocabulary.tokenizer,
            data=data.identity,
            other_data_is_fine=config.data.allow_data_change,
            batch_follows_world=run.batch_follows_world,
            cpu_matmul=None if matmul is None else matmul.name,
        ),
        cpu_matmul=matmul,
        hooks=(ModelLog(model, balance), *(e.hooks(model, step) for e in experiments if e.hooks)),
    )


def _backend(
    config: Config, experiments: Sequence[Experiment], matmul: CpuMatmul | None
) -> Backend:
    """Return the implementations that the model is built from, with those of experiments."""
    chosen = with_cpu_dtype(backend(config), None if matmul is None else matmul.dtype)
    for experiment in experiments:
        if experiment.blocks is not None:
            chosen = experiment.blocks(chosen)
    return chosen


def _cpu_matmul(config: Config, place: RunGroups) -> CpuMatmul | None:
    """Return what a CPU multiplies in, the same on all ranks; None where that is no choice."""
    return CpuMatmul.choose(
        config.execution.cpu_matmul_dtype,
        weights=weight_dtype(config),
        device=place.device,
        coordinator=place.coordinator,
    )


def _check_options_of(config: Config, shape: GPTConfig) -> None:
    """See that the options out of a checkpoint give the model whose weights it holds, before memory
    is taken for it. Raises ValueError."""
    chosen = config.checkpoint
    roots = [root for root in (chosen.load, chosen.pretrained_checkpoint) if root]
    folder, _, manifest = saved_options(roots)
    try:
        stored = stored_model(folder, manifest)
    except CheckpointError as error:
        raise ValueError(f"--use-checkpoint-args: {error}") from error
    shapes = (function_of(model).to_json() for model in (stored, shape))
    if odd := compare_architecture(*shapes):
        raise ValueError(f"--use-checkpoint-args: {folder} is of another model: {'; '.join(odd)}")


def _train_step(
    run: Run, place: RunGroups, model: GPTModel, *, engine: DataParallel, optimizer: Optimizer
) -> TrainStep:
    """Return what carries out steps."""
    reruns = _reruns(run.config, model)
    return TrainStep(
        model,
        engine,
        optimizer=optimizer,
        groups=place.groups,
        forward_backward=_step_runner(run, place, model, engine, reruns=reruns),
        per_token_loss=run.config.training.calculate_per_token_loss,
        reruns=reruns,
    )


def _reruns(config: Config, model: GPTModel) -> Reruns:
    """Return when steps are computed again, and what their forwards count."""
    counters = [router.counted for router in routers_of(model)]
    if model.multi_token is not None:
        counters.append(model.multi_token.sums)
    mode, stage = config.failures.rerun_mode, None
    if mode != "disabled" and model.groups["pp"].size > 1:
        stage = StageBits(model.store.device, model.num_chunks)
    made = Reruns(mode, config.failures.rerun_interval, counters, stage)
    state = model.step_state
    return made if state is None else replace(made, forget=state.begin)


def _balance(model: GPTModel, place: RunGroups) -> Balance | None:
    """Return what sums the loads of experts; None where there are none."""
    if model.config.moe is None:
        return None
    return Balance(
        routers_of(model),
        model.config.router_names,
        config=model.config.moe,
        world=place.groups["world"],
        device=place.device,
    )


def _find_patterns(config: Config, names: Collection[str]) -> None:
    """See that every pattern of the options is that of a weight.

    Raises:
        ValueError: some are of none; each option that has such ones is named.
    """
    chosen = optimizer_config(config)
    adam = tuple((pattern, 1.0) for pattern in chosen.muon.adam_names)
    require_all(
        lambda: check_patterns(chosen.lr_factors, names, what="--lr-group"),
        lambda: check_patterns(chosen.decay_factors, names, what="--weight-decay-group"),
        lambda: check_patterns(adam, names, what="--muon-adam-weights"),
    )


def _saved_options(config: Config) -> dict[str, object]:
    """Return what a checkpoint says of the options."""
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in flatten(config).items()}
    for name in ("tokenizer-model", "load-hf"):
        if options[name] is not None:
            options[name] = str(Path(options[name]).resolve())
    return options


def _step_runner(
    run: Run, place: RunGroups, model: GPTModel, engine: DataParallel, *, reruns: Reruns
) -> StepRunner:
    """Return what carries out the first part of a step."""
    if place.groups["pp"].size > 1:
        order = pipeline_order(run.config)
        return PipelineForwardBackward(
            model, engine, groups=place.groups, shown=reruns.stage, **order
        )
    eager, chosen = ForwardBackward(model, engine), run.config.execution
    if chosen.cuda_graph_impl == "none":
        return eager
    return FullIterationGraph(
        eager,
        recorder=CudaRecorder(place.device, "--cuda-graph-impl full_iteration"),
        warmup_steps=chosen.cuda_graph_warmup_steps,
        say=place.coordinator.say,
    )


def restore(session: Session) -> tuple[Progress, str]:
    """Load the checkpoint that the options name, if there is one.

    Returns where the run starts, and a line that says so.

    Raises:
        ValueError: the checkpoint cannot be used.
    """
    chosen, place = session.run.config.checkpoint, session.place
    if chosen.load is not None and is_folder(chosen.load):
        raise ValueError(f"--load {chosen.load} is a Hugging Face folder: give it to --load-hf")
    # Weights that a run starts from are no optimizer's.
    sources = [("--load", chosen.load, chosen.finetune)]
    sources.append(("--pretrained-checkpoint", chosen.pretrained_checkpoint, True))
    for flag, source, first in sources:
        if source is None:
            continue
        found = load_newest(
            source,
            lambda folder, first=first: load_session(
                session,
                folder,
                with_optimizer=chosen.load_optim and not first,
                with_progress=not first,
            ),
            place.coordinator,
            flag=flag,
            fall_back=chosen.load_fallback,
        )
        if found is not None:
            newest = flag == "--load" and not first and _is_saved_in(source, chosen.save)
            return _clear(session, *found, from_the_newest=newest)
        if flag == "--pretrained-checkpoint":
            raise ValueError(f"{flag} {source}: there is no checkpoint: name another")
    if chosen.save is not None:
        clear_the_way(chosen.save, 0, from_the_newest=False, coordinator=place.coordinator)
    if chosen.load_hf is not None:
        odd = _read_folder(chosen.load_hf, session)
        also = "" if odd is None else f" ({odd})"
        return Progress(), f"read the weights of {chosen.load_hf}{also}; starting at iteration 0"
    why = "" if chosen.load is None else f": no checkpoint in {chosen.load}"
    return Progress(), f"starting at iteration 0{why}"


def load_session(
    session: Session, folder: Path, *, with_optimizer: bool = True, with_progress: bool = True
) -> Progress | None:
    """Fill a session from a checkpoint as `load_run` does, and with its progress also the state of
    hooks. Every rank calls this."""
    coordinator = session.place.coordinator
    progress = load_run(
        folder,
        store=session.model.store,
        optimizer=session.optimizer,
        window=session.window,
        facts=session.facts,
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

    def union(names: list[list[str]]) -> list[str]:
        return sorted({name for found in names for name in found})

    # A rank may hold nothing of a state, and loads with the others all the same.
    coordinator.begin(f"experiments in {folder.name}")
    own = sorted({name for name, _ in chunks})
    wanted = set(coordinator.agree("experiments", lambda: own, union))
    if wanted & stored:
        found = [chunk for name, chunk in chunks if name in stored]
        load_checkpoint(folder, found, coordinator=coordinator)
    for name in sorted(stored ^ wanted):
        flag = f"--{name.replace('.', ' ')}"
        if name in wanted:
            coordinator.say(f"{folder} has no state of {flag}: it starts with these weights")
        else:
            coordinator.say(f"{folder} was trained with {flag}: going on without")
    return progress


def _experiments_in(tensors: Collection[str]) -> set[str]:
    """Return the `experiment.NAME` whose state is among the tensors of a checkpoint."""
    first = {name.partition("/")[0] for name in tensors if "/" in name}
    return {name for name in first if name.startswith("experiment.")}


def hook_chunks(session: Session) -> list[TensorChunk]:
    """Return what this rank holds of the state of hooks."""
    return [chunk for hooks in session.hooks for chunk in hooks.state_chunks()]


def _is_saved_in(source: str, save: str | None) -> bool:
    return save is not None and Path(source).resolve() == Path(save).resolve()


def _clear(
    session: Session, folder: Path, progress: Progress | None, *, from_the_newest: bool
) -> tuple[Progress, str]:
    """See that the save folder holds nothing later than what has been loaded, and return where the
    run starts, and a line that says so. Raises ValueError."""
    save, start = session.run.config.checkpoint.save, progress or Progress()
    if save is not None:
        clear_the_way(
            save,
            start.iteration,
            from_the_newest=from_the_newest,
            coordinator=session.place.coordinator,
        )
    if progress is None:
        return start, f"loaded the weights of {folder}; starting at iteration 0"
    return start, f"loaded {folder}; going on at iteration {start.iteration}"


def _read_folder(path: str, session: Session) -> str | None:
    """Fill the model from a Hugging Face folder, and the optimizer's masters from the model.

    Returns:
        A line about tensors that are passed over and about quantized ones, if there are any.

    Raises:
        ValueError: the folder is damaged or holds another model.
    """
    folder, model = open_model(path, flag="--load-hf")
    if found := differences(model.config, session.model.config):
        raise ValueError(f"--load-hf {path} holds another model: {'; '.join(found)}")
    chunks = weight_chunks(session.model.store)
    read_weights(folder, model, chunks, coordinator=session.place.coordinator)
    session.optimizer.after_load(with_state=False)
    return "; ".join(reading_lines(folder, model)) or None
