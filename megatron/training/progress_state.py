# SPDX-License-Identifier: Apache-2.0
"""How far a run is: the few numbers that, with the tensors, make it resume exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


@dataclass(kw_only=True)
class Progress:
    """Counters of a run; the loop moves them, a checkpoint keeps them.

    Args:
        iteration: steps done, skipped ones included.
        consumed_samples: samples read, which is the position in the data.
        update_samples: samples of applied updates, which the learning rate is a function of.
        skipped_iterations: steps that changed nothing because a number was not finite.
        nan_iterations: those of them with a NaN or Inf loss.
        consecutive_bad_steps: bad steps since the last good one.
    """

    iteration: int = 0
    consumed_samples: int = 0
    update_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    consecutive_bad_steps: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)

    @staticmethod
    def from_json(saved: Mapping[str, int]) -> Progress:
        """Return the counters of a checkpoint.

        Raises:
            ValueError: a counter is missing or not a count.
        """
        names = [field.name for field in fields(Progress)]
        wrong = [n for n in names if not isinstance(saved.get(n), int) or saved[n] < 0]
        if wrong:
            raise ValueError(f"the checkpoint's progress lacks {', '.join(wrong)}")
        return Progress(**{name: saved[name] for name in names})
