# SPDX-License-Identifier: Apache-2.0
"""How far a run is: the few numbers that, with the tensors, make it resume exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: Counters that checkpoints of earlier programs lack: they start at 0.
LATER = ("spiked_iterations", "rollbacks", "validation_pending", "failed_saves")


@dataclass(kw_only=True)
class Progress:
    """Counters of a run; the loop moves them, a checkpoint keeps them.

    Args:
        iteration: steps done, skipped ones included.
        consumed_samples: samples read, which is the position in the data.
        update_samples: samples of applied updates, which the learning rate is a function of.
        skipped_iterations: steps that changed nothing because a number was not finite or the loss
            was a spike.
        nan_iterations: those of them with a NaN or Inf loss.
        consecutive_bad_steps: bad steps since the last good one.
        spiked_iterations: those skipped because of a spike of the loss.
        rollbacks: how often weights were taken back to a checkpoint.
        validation_pending: 1 if the run stopped before a validation that was due, else 0.
        failed_saves: saves that failed and did not end the run.
        recent_losses: of the last applied steps, which define a spike.
        order_lengths: samples that the order of each split ("train", "valid", "test") was made for
            when the run began; a run that gets longer or shorter keeps that order. A split without
            one is ordered for the samples that it has now.
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
