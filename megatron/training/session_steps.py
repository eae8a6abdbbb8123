# SPDX-License-Identifier: Apache-2.0
"""The steps and evaluations of a session: its batches on the device, through its train step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import torch

from megatron.core.datasets.samplers import GPTBatch, PrefetchedBatches
from megatron.core.device import pin
from megatron.core.models.gpt import Ahead, shifted
from megatron.training.core_configs import (
    decoupled_schedule,
    learning_rate_schedule,
    weight_decay_schedule,
)
from megatron.training.data.data_sets import read_ahead, training_batches, validation_batches
from megatron.training.layouts import Layouts, layouts_of
from megatron.training.monitoring.flops import visible_square
from megatron.training.session import Session
from megatron.training.step import Microbatch, StepReport


def microbatch(
    batch: GPTBatch,
    device: torch.device,
    *,
    layouts: Layouts,
    depths: int = 0,
    share: float | None = None,
) -> Microbatch:
    """Put a batch on the device.

    Args:
        layouts: say which tokens this rank has of the batch's rows.
        depths: of multi-token prediction, whose tokens are found in whole rows.
        share: of the step's samples, see `Microbatch`.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        # Only from pinned memory does a copy let the host go on.
        return pin(tensor, device).to(device, non_blocking=True)

    layout = layouts.of(batch)
    ahead = None
    if depths:
        found = shifted(
            batch.input_ids,
            batch.labels,
            batch.loss_mask,
            depths=depths,
            document_ids=batch.document_ids,
        )
        whole = vars(found).values()  # [D, b, s] each
        ahead = Ahead(*(moved(torch.stack([layout.local(x) for x in rows])) for rows in whole))
    rows = (batch.input_ids, batch.labels, batch.loss_mask)
    tokens, labels, loss_mask = (moved(layout.local(x)) for x in rows)  # [b, s/cp]
    layout = layout.with_samples(moved(batch.sample_ids))
    return Microbatch(tokens, labels, loss_mask, layout, ahead=ahead, share=share)


def squared_lengths(batch: GPTBatch, window: int | None = None) -> int:
    """Return the sum of squared document lengths, less what a window hides of them; 0 if each
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
    depths: int = 0,
    step_samples: int | None = None,
) -> list[Microbatch]:
    """Return the next microbatches of this lane, to be trained on.

    Args:
        step_samples: of a step on all lanes, where it is not divided evenly.
    """
    found = []
    for batch in islice(batches, count):
        share = None if step_samples is None else batch.num_samples / step_samples
        found.append(microbatch(batch, device, layouts=layouts, depths=depths, share=share))
    return found


class SessionSteps:
    """Takes the steps of a session, and evaluates its model.

    Args:
        batches: the training data of this data-parallel rank from the run's position on.

    Attributes:
        lr, weight_decay: schedules over the samples of applied updates.
        decoupled_lr: the learning rate of embedding and head, if they have their own.
        scaler: of the loss.
        window: gathers what is logged.
    """

    def __init__(self, session: Session, batches: Iterator[GPTBatch]) -> None:
        self._session, self._batches, model = session, batches, session.model
        self._layouts = layouts_of(session.run, session.place, model.config)
        self._depths = 0 if model.multi_token is None else model.config.mtp_num_layers
        self.lr = learning_rate_schedule(session.run)
        self.decoupled_lr = decoupled_schedule(session.run)
        self.weight_decay = weight_decay_schedule(session.run)
        self.scaler, self.window = session.optimizer.scaler, session.window

    def take_step(self, samples: int, *, update_samples: int, loss_limit: float) -> StepReport:
        """Train on the next global batch, unless its loss is above the limit.

        Args:
            samples: of this batch, as `Run.batch_sizes` has it at this place in the data.
            update_samples: of the applied updates so far, which the schedules follow.
        """
        run, device = self._session.run, self._session.place.device
        division = run.division(samples)
        batches = [next(self._batches) for _ in range(division.rounds)]
        # An estimate where lanes differ: this lane's documents stand for all.
        window = run.config.attention.window_size
        counted = [batch for batch in batches if not batch.filler]
        squares = sum(squared_lengths(batch, window) for batch in counted)
        own_samples = sum(batch.num_samples for batch in counted)
        self._session.window.add_squares(squares * samples // own_samples)
        microbatches = take(
            iter(batches),
            len(batches),
            device,
            layouts=self._layouts,
            depths=self._depths,
            step_samples=None if division.is_even else samples,
        )
        own, state = self.decoupled_lr, self._session.model.step_state
        if state is not None:
            state.begin()
        report = self._session.step(
            microbatches,
            lr=self.lr.lr(update_samples),
            weight_decay=self.weight_decay.weight_decay(update_samples),
            decoupled_lr=None if own is None else own.lr(update_samples),
            votes=self._session.place.stop.votes(),
            loss_limit=loss_limit,
        )
        if self._session.balance is not None:
            self._session.balance.finish(applied=report.applied)
        if state is not None:
            state.finish(self._session.place.groups)
        return report

    def params_norm(self) -> float | None:
        """Return the norm of all weights; None without --log-params-norm. Every rank calls
        this."""
        logged = self._session.run.config.logging.log_params_norm
        return self._session.optimizer.params_norm() if logged else None

    def loss_on(self, split: Literal["validation", "test"]) -> float | None:
        """Return the mean loss per token over the samples of a split, the same every time; None
        without any."""
        run, place, data = self._session.run, self._session.place, self._session.data
        if (data.validation if split == "validation" else data.test) is None:
            return None
        lanes = place.groups["samples"]
        fresh = validation_batches(data, run, lanes=lanes, split=split)
        at_a_time = run.evaluation.rounds  # as a step of a pipeline has
        count = run.config.evaluation.eval_iters * at_a_time
        microbatches = (
            microbatch(batch, place.device, layouts=self._layouts) for batch in islice(fresh, count)
        )
        return self._session.step.evaluate(microbatches, at_a_time=at_a_time)


@contextlib.contextmanager
def open_steps(session: Session, *, consumed_samples: int) -> Iterator[SessionSteps]:
    """Open the steps of a session from a position in its data on; reading ahead ends with the
    block."""
    run = session.run
    batches = read_ahead(
        training_batches(
            session.data,
            run,
            lanes=session.place.groups["samples"],
            consumed_samples=consumed_samples,
        ),
        run,
    )
    try:
        yield SessionSteps(session, batches)
    finally:
        if isinstance(batches, PrefetchedBatches):
            batches.close()
