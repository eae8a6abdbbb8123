# SPDX-License-Identifier: Apache-2.0
"""The result of a training step, equal on every rank, and its anomaly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AnomalyKind = Literal["nan", "spike", "inf_norm", "determinism"]
Verdict = Literal["transient", "reproduced", "unchecked", "undecided"]


@dataclass(frozen=True)
class StepAnomaly:
    """An anomaly of a step, equal on every rank.

    Args:
        kind: the first anomaly.
        verdict: `transient` (the rerun is sound and was used), `reproduced` (the rerun is
            anomalous), `unchecked` (no rerun) or `undecided` (sound, but no two of three
            computations are equal).
        ranks: ranks with the anomaly; all if it appears only in sums over ranks.
        values: the loss of each computation, or its gradient norm if that is not finite.
        same: whether the evidence of the last two computations is equal on every rank.
    """

    kind: AnomalyKind
    verdict: Verdict
    ranks: tuple[int, ...]
    values: tuple[float, ...]
    same: bool = False


@dataclass(frozen=True)
class StepReport:
    """The result of a step, equal on all ranks.

    Args:
        loss: mean loss of the step.
        applied: False if the loss or a gradient was not finite, or if the step `spiked`; weights
            and optimizer state are unchanged then.
        grad_norm: gradient norm before clipping.
        loss_scale: loss scale of the gradients.
        num_zeros: number of gradient elements that are exactly zero, if counted.
        control_flags: control flags, summed over all ranks.
        anomaly: the anomaly of the step's first computation; None if it was sound.
        spiked: whether the loss was above the limit, so that the step was skipped.
    """

    loss: float
    applied: bool
    grad_norm: float
    loss_scale: float
    num_zeros: int | None = None
    control_flags: tuple[float, ...] = ()
    anomaly: StepAnomaly | None = None
    spiked: bool = False
