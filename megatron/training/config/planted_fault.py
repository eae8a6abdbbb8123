# SPDX-License-Identifier: Apache-2.0
"""A fault that a user plants in a run, as the words of --plant-fault say it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.training.config.values import require

KINDS = ("activation", "activation-always", "nan", "nan-always", "weight")


@dataclass(frozen=True)
class PlantedFault:
    """A fault.

    Args:
        kind: of KINDS.
        iteration: the first that it hits, counted from 1.
        rank: where.
    """

    kind: str
    iteration: int
    rank: int

    @property
    def text(self) -> str:
        """Return the words."""
        return f"{self.kind}@{self.iteration}:{self.rank}"

    @staticmethod
    def of(words: str | None) -> PlantedFault | None:
        """Return the fault of some words; None if there are none.

        Raises:
            ValueError: they name none.
        """
        if words is None:
            return None
        found = re.fullmatch(r"([a-z-]+)@([1-9]\d*):(\d+)", words)
        require(
            found is not None and found[1] in KINDS,
            f"--plant-fault {words}: give KIND@ITERATION:RANK, KIND of {', '.join(KINDS)}",
        )
        assert found is not None
        return PlantedFault(found[1], int(found[2]), int(found[3]))
