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
from collections.abc import Callable, Iterable
from itertools import islice

from megatron.core.context_parallel.sequence_sharding import AttentionWork, documents_of
from megatron.core.datasets.samplers import GPTBatch
from megatron.core.distributed import DataParallel
from megatron.training.config import Config
from megatron.training.config.resolve import ResolvedRun
from megatron.training.core_configs import early_gather, weight_dtype
from megatron.training.data.data_sets import training_batches
from megatron.training.hooks import Progress, StepReport, TrainingHooks
from megatron.training.layouts import PackedCuts, packed_cuts
from megatron.training.session import Session
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


def batch_words(run: ResolvedRun) -> str:
    """Return how a step's samples are divided into microbatches, for the run line."""
    division = run.final_division
    num_ranks = division.data_parallel_size
    if division.is_even:
        return (
            f"global batch {division.samples} = {num_ranks} x {division.micro_batch_size} x "
            f"{division.rounds} microbatches"
        )
    return (
        f"global batch {division.samples} in {division.blocks} microbatches of "
        f"{division.micro_batch_size}"
    )


def batch_sizes_line(run: ResolvedRun) -> str | None:
    """Return the sizes of a global batch that ramps up; None if the size is constant."""
    stages = run.batch_sizes.stages
    if len(stages) == 1:
        return None
    sizes = [f"{size} from sample {threshold:,} on" for threshold, size in stages]
    if len(sizes) > 8:
        sizes = [*sizes[:3], f"... {len(sizes) - 4} more", sizes[-1]]
    return f"global batch by samples: {', '.join(sizes)}"


def batch_line(run: ResolvedRun) -> str | None:
    """Return the padding microbatches of each data-parallel rank in a step, and the share of time
    that padding and a smaller last microbatch waste; None if the batch divides evenly."""
    division = run.final_division
    if division.is_even:
        return None
    padding = "no padding microbatch"
    num_ranks = division.data_parallel_size
    ranks = f"{num_ranks} data-parallel rank{'s' if num_ranks > 1 else ''}"
    if division.padding_microbatches:
        padded_from = num_ranks - division.padding_microbatches
        padded = (
            f"rank {padded_from}"
            if division.padding_microbatches == 1
            else f"ranks {padded_from}-{num_ranks - 1}"
        )
        padding = f"1 padding microbatch on {padded}"
    remainder = division.samples % division.micro_batch_size
    remainder_text = f", the last one of {remainder}" if remainder else ""
    return (
        f"uneven batch: {division.blocks} microbatches of {division.micro_batch_size}"
        f"{remainder_text}, on {ranks}, {division.rounds} each, {padding}; "
        f"{100.0 * division.wasted:.1f} % of their time is wasted"
    )


def loss_weight_line(run: ResolvedRun) -> str | None:
    """Return how microbatches of conversations are weighted in the loss, and the flag that weights
    all tokens equally; None if tokens are weighted equally, or without --sft."""
    training, blocks = run.config.training, run.final_division.blocks
    if not run.config.data.sft or training.calculate_per_token_loss or blocks == 1:
        return None
    return (
        f"--sft without --calculate-per-token-loss: each of the {blocks} microbatches of a "
        "step has the same weight, however few of its tokens have a loss, so tokens of short "
        "responses count more; with the flag all tokens with a loss have the same weight"
    )


def cut_line(cuts: PackedCuts, batches: Iterable[GPTBatch]) -> str | None:
    """Return the load balance of attention for both ways to split packed rows, and the selected
    one; None without packed rows.

    Args:
        batches: the first batches of the run.
    """
    document_ids = (batch.document_ids for batch in batches)
    choices = [cuts.choice(documents_of(ids.numpy())) for ids in document_ids if ids is not None]
    if not choices:
        return None
    by_documents, num_batches = [choice.by_document for choice in choices], len(choices)
    padding = sum(work.padding for work in by_documents)
    tokens = sum(work.tokens for work in by_documents) * cuts.size - padding
    num_cut = sum(choice.cut is not None for choice in choices)
    selected = f"{num_cut} of them are split by documents"
    if num_cut in (0, num_batches):
        selected = "documents" if num_cut else "row"
    reason = "auto" if cuts.kind == "auto" else "by --context-parallel-cut"
    return (
        f"context parallel cut: in the first {num_batches} microbatches the slowest rank has "
        f"{_pairs_imbalance([choice.row for choice in choices]):.2f} x the mean attention pairs by "
        f"row, {_pairs_imbalance(by_documents):.2f} x by documents, with "
        f"{padding / tokens:.1%} padding; {reason}: {selected}"
    )


def _pairs_imbalance(work_per_batch: list[AttentionWork]) -> float:
    """Return the attention pairs of the slowest rank over the mean; 1 is perfectly balanced."""
    mean = sum(sum(work.pairs) / len(work.pairs) for work in work_per_batch)
    return sum(max(work.pairs) for work in work_per_batch) / max(mean, 1.0)
