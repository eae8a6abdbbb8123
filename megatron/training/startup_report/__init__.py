# SPDX-License-Identifier: Apache-2.0
"""The lines that a run logs at its start, one for each feature in use.

They describe the pipeline (stages, schedule, bubble), context parallelism (how attention and
recurrences get the tokens of other ranks, how packed rows are split, and why), the experts
(placement, dispatcher, active parameters), an uneven global batch and its cost, the data-parallel
strategy with bytes per rank, and dropout (on by Megatron's defaults) and its cost. A separate line
follows if the first step needs more memory for gathered weights than estimated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice

from megatron.core.distributed import DataParallel
from megatron.training.config import Config
from megatron.training.core_configs import early_gather, weight_dtype
from megatron.training.data.data_sets import training_batches
from megatron.training.hooks import Progress, StepReport, TrainingHooks
from megatron.training.layouts import packed_cuts
from megatron.training.session import Session
from megatron.training.startup_report.batches import (
    batch_line,
    batch_sizes_line,
    batch_words,
    cut_line,
    loss_weight_line,
)
from megatron.training.startup_report.layers import (
    attention_line,
    capacity_line,
    delayed_scaling_line,
    dropout_line,
    expert_line,
    kernels_line,
    layers_line,
    recurrent_states_line,
)
from megatron.training.startup_report.parallelism import (
    communicators_line,
    context_line,
    context_words,
    data_parallel_line,
    linear_lines,
    megabytes,
    pipeline_line,
    pipeline_words,
    weight_shards_line,
)


def start_lines(session: Session, *, consumed_samples: int) -> list[str]:
    """Return the first lines of the log: layout, chosen implementations and why.

    Every rank calls this.

    Args:
        consumed_samples: position in the data.
    """
    run = session.run
    lines = (
        _run_line(session),
        pipeline_line(run),
        context_line(run),
        *linear_lines(run),
        recurrent_states_line(run, session.context.device),
        expert_line(run, session.model.config),
        capacity_line(run, session.model.config),
        batch_sizes_line(run),
        batch_line(run),
        data_parallel_line(session.step.engine, session.optimizer),
        communicators_line(session.context.groups, session.context.device, os.environ),
        weight_shards_line(session.step.engine),
        layers_line(run.config),
        delayed_scaling_line(run.config),
        attention_line(run.config, session.model.config, session.context.device),
        kernels_line(session.context.device),
        dropout_line(run.config, session.context.device),
        loss_weight_line(run),
        None if session.cpu_matmul is None else session.cpu_matmul.line(),
        *session.data.notes,
        _export_line(session),
        early_gather(run.config)[1],
        _experiment_line(run.config),
        _rows_line(session, consumed_samples),
    )
    return [line for line in lines if line is not None]


def _export_line(session: Session) -> str | None:
    """Return whether the model can be exported to Hugging Face; None without the check."""
    if not session.run.config.checkpoint.hf_export_check:
        return None
    from megatron.hf.config_json import architecture_of, check_exportable
    from megatron.training.config.model_table import model_options

    try:
        check_exportable(session.model.config, flags_of=model_options)
    except ValueError as error:
        return f"Hugging Face: {error}"
    name = architecture_of(session.model.config).class_name
    return f"Hugging Face: the model can be exported as {name}"


def _experiment_line(config: Config) -> str | None:
    """Return the enabled experiments with their options; None without any."""
    chosen = config.experiments
    words = [" ".join((name, *chosen.option_arguments(name))) for name in chosen.experiment or ()]
    return f"experiments: {', '.join(words)}" if words else None


#: Microbatches whose documents are inspected before the first step.
NUM_INSPECTED_MICROBATCHES = 16


def _rows_line(session: Session, consumed_samples: int) -> str | None:
    """Return how packed rows are split over ranks, see `cut_line`; None if they are not split."""
    run, dp_group = session.run, session.context.groups["samples"]
    cuts = packed_cuts(run, session.context, session.model.config)
    if cuts is None:
        return None
    batches = training_batches(
        session.data, run, dp_group=dp_group, consumed_samples=consumed_samples
    )
    return cut_line(cuts, islice(batches, NUM_INSPECTED_MICROBATCHES))


def _run_line(session: Session) -> str:
    """Return the run line: model, layout and data."""
    run, config = session.run, session.run.config
    return (
        f"{session.model.num_parameters:,} parameters in "
        f"{str(weight_dtype(config)).removeprefix('torch.')}, vocabulary "
        f"{session.vocabulary.size:,}; {run.world_size} processes: tensor parallel "
        f"{config.parallel.tensor_model_parallel_size}"
        f"{' with sequence parallel' if config.parallel.sequence_parallel else ''}, "
        f"{context_words(config)}{pipeline_words(config)}data parallel {run.data_parallel_size} "
        f"({config.data_parallel.strategy}); {batch_words(run)}; {run.train_iters:,} iterations"
    )


class GatheredBytes(TrainingHooks):
    """Log when the order of use in a step needs more gathered bytes than logged before, for this
    rank's pipeline stage.

    Args:
        log: writes a line to the log.
    """

    def __init__(self, engine: DataParallel, log: Callable[[str], None]) -> None:
        self._engine, self._log, self._reported_bytes = engine, log, engine.gathered_bytes

    def on_step_end(self, progress: Progress, outcome: StepReport) -> None:
        """Compare the gathered bytes with the logged ones."""
        if self._engine.gathered_bytes > self._reported_bytes:
            self._reported_bytes = self._engine.gathered_bytes
            self._log(
                f"weight shards: their order of use needs at most "
                f"{megabytes(self._reported_bytes)} of gathered weights"
            )
