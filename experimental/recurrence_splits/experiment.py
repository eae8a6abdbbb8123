# SPDX-License-Identifier: Apache-2.0
"""`--experiment recurrence_splits`: trains recurrent blocks on parallel segments of sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from experimental.recurrence_splits.splits import SPLIT_CHUNK, recur_split
from megatron.core.backend import Backend
from megatron.core.models.gpt import GPTModel
from megatron.core.ops.recurrence import Recurrence, RecurrenceInputs
from megatron.core.ops.sequences import Sequences
from megatron.training.config.resolve import ResolvedRun
from megatron.training.experiments import Experiment
from megatron.training.hooks import LogPart, TrainingHooks
from megatron.training.step import TrainStep


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the experiment."""

    splits: int = 2
    """Segments of a sequence; a short one has fewer."""
    chunk: int = SPLIT_CHUNK
    """Segments are multiples of this number of tokens."""


class SplitRecurrence:
    """`ops.recurrence.recur` by segments, for `Backend.recurrence`.

    Attributes:
        cut: recurrences computed in more segments than sequences, since this was last set to 0.
    """

    def __init__(self, options: Options) -> None:
        self._options, self.cut = options, 0

    def __call__(
        self,
        recurrence: Recurrence,
        inputs: RecurrenceInputs,
        sequences: Sequences,
        *,
        initial: torch.Tensor | None = None,
        keep_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [t, H, V], last states [N, H, K, V])."""
        options = self._options
        self.cut += options.splits > 1 and any(x > options.chunk for x in sequences.lengths)
        return recur_split(
            recurrence,
            inputs,
            sequences,
            splits=options.splits,
            initial=initial,
            keep_states=keep_states,
            chunk=options.chunk,
        )


class SplitHooks(TrainingHooks):
    """Logs the number of split recurrences, which shows a run that splits none."""

    def __init__(self, recurrence: SplitRecurrence) -> None:
        self._recurrence = recurrence

    def log_parts(self) -> list[LogPart]:
        """Return the recurrences cut on this rank since the last log line."""
        cut, self._recurrence.cut = self._recurrence.cut, 0
        return [LogPart(f"recurrences cut: {cut}", {"recurrences_cut": float(cut)})]


def experiment(run: ResolvedRun, options: Options) -> Experiment:
    """Return the backend change of a run and its hooks.

    Raises:
        ValueError: options that are not positive, or a run in which nothing is cut.
    """
    flag = "--experiment recurrence_splits"
    if options.splits < 1 or options.chunk < 1:
        raise ValueError(
            f"{flag}: splits {options.splits} and chunk {options.chunk}: use positive numbers"
        )
    pattern = run.config.hybrid.hybrid_layer_pattern or ""
    if not set("GM") & set(pattern):
        raise ValueError(f"{flag}: the model has no recurrent block, M or G: drop it")
    parallel = run.config.parallel
    if parallel.context_parallel_size > 1 and parallel.linear_cp_mode != "headwise":
        raise ValueError(
            f"{flag}: with --linear-cp-mode {parallel.linear_cp_mode}, ranks may cut sequences "
            "themselves: choose headwise"
        )
    recurrence = SplitRecurrence(options)

    def blocks(backend: Backend) -> Backend:
        return replace(backend, recurrence=recurrence)

    def hooks(model: GPTModel, step: TrainStep) -> SplitHooks:
        return SplitHooks(recurrence)

    return Experiment(blocks=blocks, hooks=hooks)
