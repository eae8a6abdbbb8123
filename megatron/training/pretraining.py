# SPDX-License-Identifier: Apache-2.0
"""One training run from its resolved options to its last checkpoint: everything is put together
here.

Order: save folder → data → model → engine and optimizer → checkpoint → loop.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from megatron.core.comm import all_reduce
from megatron.core.datasets.samplers import GPTBatch, GPTBatches
from megatron.core.device import peak_memory_bytes
from megatron.core.dist_checkpointing import CheckpointError, Coordinator, SaveFolderClaim
from megatron.core.distributed import DataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import Optimizer
from megatron.training.checkpoint_io import RunFacts, find_checkpoint, load_run, save_run
from megatron.training.config import Config
from megatron.training.data_sets import (
    DataSets,
    build_data_sets,
    training_batches,
    validation_batches,
)
from megatron.training.flops import peak_flops
from megatron.training.gpt_options import (
    data_parallel_config,
    gpt_config,
    learning_rate_schedule,
    loss_scaler,
    optimizer_config,
    weight_decay_schedule,
    weight_dtype,
)
from megatron.training.loop import LoopParts, train
from megatron.training.metrics import open_metrics
from megatron.training.progress import Display, open_display
from megatron.training.progress_state import Progress
from megatron.training.resolve import Run, padded_vocab_size
from megatron.training.run_groups import RunGroups
from megatron.training.schema import flatten
from megatron.training.step import Microbatch, StepReport, TrainStep, evaluate
from megatron.training.step_window import Speedometer, StepWindow
from megatron.training.vocabulary import Vocabulary, read_vocabulary


@dataclass(frozen=True, eq=False, kw_only=True)
class Session:
    """The parts of a run that live as long as it does."""

    run: Run
    place: RunGroups
    vocabulary: Vocabulary
    data: DataSets
    model: GPTModel
    optimizer: Optimizer
    step: TrainStep
    window: StepWindow
    facts: RunFacts


@contextlib.contextmanager
def claimed_folder(save: str | None, coordinator: Coordinator) -> Iterator[None]:
    """Hold the save folder for this run alone, and know before the first step that it can be
    written.

    Raises:
        ValueError: it cannot be written, or another run has it.
    """
    claims: list[SaveFolderClaim] = []

    def claim() -> None:
        if coordinator.rank == 0 and save is not None:
            claims.append(SaveFolderClaim(save))

    if save is not None:
        coordinator.begin("claiming the save folder")
        try:
            coordinator.agree("claim", claim, lambda answers: None)
        except CheckpointError as error:
            raise ValueError(f"--save {save}: {error}") from error
    try:
        yield
    finally:
        for held in claims:
            held.close()


def build_session(run: Run, place: RunGroups, vocabulary: Vocabulary, data: DataSets) -> Session:
    """Build model, engine and optimizer on this rank's part of the grid."""
    config = run.config
    shape = gpt_config(config, vocabulary.size)
    bucket = config.parallel.ddp_bucket_size
    assert bucket is not None, "the run must be resolved"
    model = GPTModel(
        shape,
        place.groups,
        sequence_parallel=config.parallel.sequence_parallel,
        seed=config.training.seed,
        dtype=weight_dtype(config),
        device=place.device,
        vocab_multiple=config.tokenizer.make_vocab_size_divisible_by,
        bucket_bytes=4 * bucket,
    )
    engine = DataParallel(model.store, place.groups, config=data_parallel_config(config))
    optimizer = Optimizer(
        engine.owned(), place.groups, config=optimizer_config(config), scaler=loss_scaler(config)
    )
    name = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else None
    padded = padded_vocab_size(config, vocabulary.size)
    options = {k: list(v) if isinstance(v, tuple) else v for k, v in flatten(config).items()}
    if config.tokenizer.tokenizer_model is not None:
        options["tokenizer-model"] = str(Path(config.tokenizer.tokenizer_model).resolve())
    return Session(
        run=run,
        place=place,
        vocabulary=vocabulary,
        data=data,
        model=model,
        optimizer=optimizer,
        step=TrainStep(
            model,
            engine,
            optimizer=optimizer,
            groups=place.groups,
            per_token_loss=config.training.calculate_per_token_loss,
        ),
        window=StepWindow(
            run, Speedometer.of(run, padded_vocab_size=padded, peak_flops=peak_flops(name))
        ),
        facts=RunFacts(
            model=shape.to_json(),
            config=options,
            tokenizer=vocabulary.tokenizer,
            data=data.identity,
        ),
    )


def restore(session: Session) -> tuple[Progress, str]:
    """Load the checkpoint that the options name, if there is one.

    Returns where the run starts, and a line that says so.

    Raises:
        ValueError: the checkpoint cannot be used.
    """
    chosen, place = session.run.config.checkpoint, session.place
    if chosen.load is None:
        return Progress(), "starting at iteration 0"
    folder = find_checkpoint(chosen.load, place.coordinator)
    if folder is None:
        return Progress(), f"starting at iteration 0: no checkpoint in {chosen.load}"
    progress = load_run(
        folder,
        store=session.model.store,
        optimizer=session.optimizer,
        window=session.window,
        facts=session.facts,
        coordinator=place.coordinator,
        with_optimizer=chosen.load_optim and not chosen.finetune,
        with_progress=not chosen.finetune,
    )
    return progress, f"loaded {folder}; going on at iteration {progress.iteration}"


def microbatch(batch: GPTBatch, device: torch.device) -> Microbatch:
    """Put a batch on the device."""
    tokens = batch.tokens.to(device, non_blocking=True)  # [b, s + 1]
    return Microbatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=batch.loss_mask.to(device, non_blocking=True),
        sample_ids=batch.sample_ids.to(device, non_blocking=True),
    )


def take(batches: GPTBatches, count: int, device: torch.device) -> list[Microbatch]:
    """Return the next microbatches of this lane."""
    return [microbatch(next(batches), device) for _ in range(count)]


def pretrain(run: Run, place: RunGroups) -> None:
    """Carry out a run.

    Raises:
        ValueError: an option, a data file or a checkpoint that the user can mend.
        RunStopped: it had to stop; the text says why.
    """
    with claimed_folder(run.config.checkpoint.save, place.coordinator):
        vocabulary = read_vocabulary(run.config.tokenizer, _prefixes(run.config))
        data = build_data_sets(run, vocabulary)
        session = build_session(run, place, vocabulary, data)
        progress, start = restore(session)
        run_loop(session, progress, start)


def _prefixes(config: Config) -> tuple[str, ...]:
    from megatron.core.datasets.splits import parse_data_path

    return parse_data_path(config.data.data_path).prefixes


class SessionSteps:
    """What the loop does with a session: step, validate, save.

    Args:
        batches: this lane's training data from the run's position on.
        display: is told what was saved.
    """

    def __init__(self, session: Session, batches: GPTBatches, display: Display) -> None:
        self._session, self._batches, self._display = session, batches, display

    def take_step(self, lr: float, weight_decay: float) -> StepReport:
        """Train on the next global batch."""
        run, device = self._session.run, self._session.place.device
        microbatches = take(self._batches, run.num_microbatches, device)
        return self._session.step(microbatches, lr=lr, weight_decay=weight_decay)

    def validation_loss(self) -> float:
        """Return the mean loss per token over the validation samples, the same every time."""
        run, place = self._session.run, self._session.place
        fresh = validation_batches(self._session.data, run, lanes=place.groups["lanes"])
        count = run.config.training.eval_iters * run.num_microbatches
        microbatches = (microbatch(batch, place.device) for batch in islice(fresh, count))
        return evaluate(self._session.model, microbatches, place.groups)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint."""
        session = self._session
        root = session.run.config.checkpoint.save
        assert root is not None
        folder = save_run(
            root,
            store=session.model.store,
            optimizer=session.optimizer,
            progress=progress,
            window=session.window,
            facts=session.facts,
            coordinator=session.place.coordinator,
        )
        self._display.log(f"saved {folder}")

    def on_iteration(self, iteration: int) -> None:
        """Let the other ranks know where this one is."""
        if self._session.place.watch is not None:
            self._session.place.watch.iteration = iteration


def run_loop(session: Session, progress: Progress, start: str) -> None:
    """Train from `progress` to the end and record how much memory it took."""
    run, place, logging = session.run, session.place, session.run.config.logging
    # The last rank shows and records, as readers of Megatron's logs expect.
    shows = place.groups.rank == run.world_size - 1
    display = open_display(
        logging.progress, shows=shows, total=run.train_iters, done=progress.iteration
    )
    metrics = open_metrics(
        metrics_file=logging.metrics_file if shows else None,
        tensorboard_dir=logging.tensorboard_dir if shows else None,
        resume_iteration=progress.iteration,
        warn=lambda text: print(text, file=sys.stderr, flush=True),
    )
    batches = training_batches(
        session.data,
        run,
        lanes=place.groups["lanes"],
        consumed_samples=progress.consumed_samples,
    )
    steps = SessionSteps(session, batches, display)
    with contextlib.closing(metrics), display:
        display.log(describe(session))
        display.log(start)
        parts = LoopParts(
            run=run,
            take_step=steps.take_step,
            evaluate=steps.validation_loss if session.data.validation is not None else None,
            save=steps.save if run.config.checkpoint.save is not None else None,
            lr=learning_rate_schedule(run),
            weight_decay=weight_decay_schedule(run),
            scaler=session.optimizer.scaler,
            window=session.window,
            params_norm=session.optimizer.params_norm if logging.log_params_norm else None,
            display=display,
            metrics=metrics,
            on_iteration=steps.on_iteration,
        )
        train(parts, progress)
        peak = torch.tensor(
            peak_memory_bytes(place.device), dtype=torch.float64, device=place.device
        )
        most = all_reduce(peak, place.groups["world"], op="max")
        metrics.write("end", progress.iteration, {"peak_memory_bytes": float(most)})


def describe(session: Session) -> str:
    """Return one line on model, layout and data."""
    run, config = session.run, session.run.config
    return (
        f"{session.model.store.num_parameters:,} parameters in "
        f"{str(weight_dtype(config)).removeprefix('torch.')}, vocabulary "
        f"{session.vocabulary.size:,}; {run.world_size} processes: tensor parallel "
        f"{config.parallel.tensor_model_parallel_size}"
        f"{' with sequence parallel' if config.parallel.sequence_parallel else ''}, data parallel "
        f"{run.data_parallel_size} ({config.parallel.data_parallel_sharding_strategy}); global "
        f"batch {config.training.global_batch_size} = {run.data_parallel_size} x "
        f"{config.training.micro_batch_size} x {run.num_microbatches} microbatches; "
        f"{run.train_iters:,} iterations"
    )
