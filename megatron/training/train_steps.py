# SPDX-License-Identifier: Apache-2.0
"""The steps and evaluations of a session: batches on the device, schedules and the train step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Literal

import torch

from megatron.core.datasets.samplers import GPTBatch, PrefetchedBatches
from megatron.core.device import pin
from megatron.core.models.gpt import MTPTargets, shift_targets
from megatron.training.core_configs import (
    decoupled_schedule,
    learning_rate_schedule,
    weight_decay_schedule,
)
from megatron.training.data.data_sets import read_ahead, training_batches, validation_batches
from megatron.training.hooks import StepReport
from megatron.training.layouts import Layouts, layouts_of
from megatron.training.monitoring.flops import mean_square, window_shares
from megatron.training.session import Session
from megatron.training.step import Microbatch


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


def squared_lengths(batch: GPTBatch, shares: Mapping[int | None, float] | None = None) -> float:
    """Return the sum of squared document lengths; 0 if each sample is one document.

    Args:
        shares: share of the attention blocks with each window, from `window_shares`; None means
            that no block has a window.
    """
    if batch.cu_seqlens is None:
        return 0
    return float(mean_square(batch.cu_seqlens.long().diff().numpy(), shares or {None: 1.0}).sum())


def take(
    batches: Iterable[GPTBatch],
    device: torch.device,
    *,
    layouts: Layouts,
    mtp_num_layers: int = 0,
    step_samples: int | None = None,
) -> list[Microbatch]:
    """Return the training microbatches of this data-parallel rank.

    Args:
        step_samples: samples of a step on all data-parallel ranks if they are not divided evenly.
    """
    return [
        microbatch(
            batch,
            device,
            layouts=layouts,
            mtp_num_layers=mtp_num_layers,
            share=None if step_samples is None else batch.num_samples / step_samples,
        )
        for batch in batches
    ]


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
        self._window_shares = window_shares(model.config)
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
        counted = [batch for batch in batches if not batch.is_padding]
        squares = sum(squared_lengths(batch, self._window_shares) for batch in counted)
        local_samples = sum(batch.num_samples for batch in counted)
        self._session.window.add_squares(squares * samples / local_samples)
        microbatches = take(
            batches,
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
