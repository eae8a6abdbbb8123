# SPDX-License-Identifier: Apache-2.0
"""Measured durations, over which kills are distributed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Measured:
    """Measured durations in seconds of phases that no kill interrupted.

    Args:
        start: from the start of the processes to the first step.
        between: from the begin of a save to the begin of the next.
        save: from a save's folder to the tracker and the last removal.
        commit: the part of a save after its manifest.
    """

    start: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)

    def of(self, kind: str) -> float:
        """Return the median of the latest, or a guess."""
        guesses = {"start": 1.0, "between": 0.5, "save": 0.3, "commit": 0.1}
        latest: list[float] = vars(self)[kind][-15:]
        return statistics.median(latest) if latest else guesses[kind]


@dataclass
class SaveClock:
    """The saves of one start, as the folder shows them.

    Args:
        measured: durations, extended by this start.
        begins: start time of each save.
        commits: time of the manifest of each save so far.
    """

    measured: Measured
    begins: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    _seen_folders: frozenset[str] = frozenset()
    _committing: bool = False
    _busy: float = 0.0

    def observe(self, folders: frozenset[str], stage: str, now: float) -> None:
        """Record the stage of a save.

        Args:
            folders: folders of saves in progress.
            stage: see `under_way`.
            now: time in seconds.
        """
        if folders - self._seen_folders:
            if self._committing:  # the one before came to its end
                self.measured.between.append(now - self.begins[-1])
                self.measured.save.append(self._busy - self.begins[-1])
                self.measured.commit.append(self._busy - self.commits[-1])
            self._seen_folders |= folders
            self._committing = False
            self.begins.append(now)
        if self.begins and not self._committing and stage not in ("", "writing"):
            self._committing = True
            self.commits.append(now)
        if stage:
            self._busy = now
