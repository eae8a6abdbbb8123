# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: the counters that, with the tensors, make it resume exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: Counters that older checkpoints lack; they start at 0.
LATER = ("spiked_iterations", "rollbacks", "validation_pending", "failed_saves")


@dataclass(kw_only=True)
class Progress:
    """Counters of a run, updated by the loop and stored in checkpoints.

    Args:
        iteration: number of steps, skipped ones included.
        consumed_samples: samples read, the position in the data.
        update_samples: samples of applied updates, the position in the learning rate schedule.
        skipped_iterations: steps without an update because of a non-finite number or a loss spike.
        nan_iterations: skipped steps with a NaN or Inf loss.
        consecutive_bad_steps: bad steps since the last good one.
        spiked_iterations: steps skipped because of a loss spike.
        rollbacks: number of rollbacks to a checkpoint.
        validation_pending: 1 if the run stopped before a validation that was due, else 0.
        failed_saves: failed saves that did not end the run.
        recent_losses: losses of the last applied steps, whose median defines a spike.
        order_lengths: number of samples for which each split ("train", "valid", "test") was
            shuffled when the run started; a run that gets longer or shorter keeps that order.
            Splits without an entry are shuffled for their current number of samples.
    """

    iteration: int = 0
    consumed_samples: int = 0
    update_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    consecutive_bad_steps: int = 0
    spiked_iterations: int = 0
    rollbacks: int = 0
    validation_pending: int = 0
    failed_saves: int = 0
    recent_losses: list[float] = field(default_factory=list)
    order_lengths: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the counters by name."""
        return asdict(self)

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Progress:
        """Return the counters of a checkpoint.

        Raises:
            ValueError: a counter is missing or not a count.
        """
        saved = {**dict.fromkeys(LATER, 0), **saved}
        names = [field.name for field in fields(Progress) if field.type == "int"]
        wrong = [n for n in names if not isinstance(saved.get(n), int) or saved[n] < 0]
        losses = saved.get("recent_losses", [])
        if not isinstance(losses, list) or not all(isinstance(x, float) for x in losses):
            wrong.append("recent_losses")
        lengths = saved.get("order_lengths", {})
        if not isinstance(lengths, dict) or not all(
            type(n) is int and n >= 0 for n in lengths.values()
        ):
            wrong.append("order_lengths")
        if wrong:
            raise ValueError(f"the checkpoint's progress lacks {', '.join(wrong)}")
        return Progress(
            **{name: saved[name] for name in names},
            recent_losses=list(losses),
            order_lengths=dict(lengths),
        )
