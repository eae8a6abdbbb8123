# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: for every rank the list of what it does, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does with one chunk of layers and one microbatch."""

    FORWARD = "F"
    BACKWARD = "B"  # I and W at once
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"
    GATHER = "G"
    REDUCE = "R"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list.

    Args:
        chunk: the rank's own number of the chunk of layers, 0 the nearest to the embedding.
        microbatch: its number in the step.
    """

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The lists of all ranks.

    Args:
        stages: p, the ranks of the pipeline.
        chunks: v, the chunks of layers on each rank. Chunk c of rank r is virtual stage c · p + r.
        microbatches: m.
        ranks: by rank.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Return where in the model a rank's chunk lies, from 0 to p · v - 1."""
        return chunk * self.stages + rank

    def following(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Return (rank, chunk) that gets this chunk's output; None behind the last."""
        following = self.virtual_stage(rank, chunk) + 1
        if following == self.stages * self.chunks:
            return None
        return following % self.stages, following // self.stages

    def preceding(self, rank: int, chunk: int) -> tuple[int, int] | None:
        """Return (rank, chunk) whose output this chunk gets; None before the first."""
        preceding = self.virtual_stage(rank, chunk) - 1
        return None if preceding < 0 else (preceding % self.stages, preceding // self.stages)
