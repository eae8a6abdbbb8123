# SPDX-License-Identifier: Apache-2.0
"""What has to hold after every kill: nothing lost, and every bit as in a run that was let be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import CheckpointError, list_checkpoints, verify_checkpoint
from megatron.core.dist_checkpointing.manifest import iteration_of
from megatron.core.dist_checkpointing.run_folder import checkpoint_folder
from tests.functional_tests.small_run import digests, timeless
from tools.soak.folder import Snapshot, look
from tools.soak.job import SoakFailure

_SAVED = re.compile(r"^saved \S+/iter_(\d+)", re.MULTILINE)
_RESUMES = re.compile(r"(?:resuming|starting) at iteration (\d+)")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An undisturbed run.

    Args:
        tensors: the digest of every tensor, by iteration.
        events: events of metrics.jsonl, in order, without timing fields.
    """

    tensors: Mapping[int, Mapping[str, str]]
    events: list[dict[str, Any]]

    @staticmethod
    def of(root: Path) -> Reference:
        """Read it from its save folder."""
        tensors = {iteration_of(f) or 0: digests(f) for f in list_checkpoints(root)}
        return Reference(tensors=tensors, events=timeless(root / "metrics.jsonl"))


@dataclass(kw_only=True)
class Ledger:
    """The expected state of one save folder over all kills.

    Args:
        root: the folder.
        reference: the undisturbed run.
        keep_last: number of checkpoints that retention keeps; None removes none.
    """

    root: Path
    reference: Reference
    keep_last: int | None
    committed: set[int] = field(default_factory=set)
    compared: set[int] = field(default_factory=set)

    def note(self, seen: Snapshot) -> None:
        """Remember which checkpoints have been there."""
        self.committed |= seen.complete

    def forget_unsynced(self, start: Snapshot, log: str) -> None:
        """After a power cut, require only checkpoints that existed before this start or that the
        log reports as saved."""
        reported = {int(number) for number in _SAVED.findall(log)}
        must = (self.committed & start.complete) | reported
        self.committed = must | (self.committed & look(self.root).complete)
        self.compared.clear()

    def check(self) -> Snapshot:
        """Check the folder while no run is active, and return its snapshot.

        Raises:
            SoakFailure: a checkpoint is missing, damaged or different.
        """
        now = look(self.root)
        self._check_names(now)
        for iteration in sorted(now.complete):
            folder = checkpoint_folder(self.root, iteration)
            try:
                report = verify_checkpoint(folder)
            except CheckpointError as error:
                raise SoakFailure("lost", str(error)) from error
            if report.unexpected_files:
                raise SoakFailure("hung", f"{folder} holds {report.unexpected_files}")
            if iteration not in self.compared:
                self._check_tensors(iteration, digests(folder))
        self._check_events(now.newest)
        return now

    def _check_names(self, now: Snapshot) -> None:
        """Assert that committed checkpoints exist, unless retention may have removed them."""
        self.note(now)
        keep = len(self.committed) if self.keep_last is None else self.keep_last
        missing = sorted(set(sorted(self.committed)[-keep:]) - now.complete)
        if missing:
            raise SoakFailure("lost", f"of {sorted(self.committed)} those of {missing} are gone")
        if now.tracked is not None and now.tracked not in now.complete:
            raise SoakFailure("lost", f"the tracker names {now.tracked} of {sorted(now.complete)}")

    def _check_tensors(self, iteration: int, digests: Mapping[str, str]) -> None:
        expected = self.reference.tensors.get(iteration)
        if expected is None:
            raise SoakFailure("inexact", f"nothing else has saved at iteration {iteration}")
        differing = sorted(
            name for name in {*expected, *digests} if expected.get(name) != digests.get(name)
        )
        if differing:
            raise SoakFailure(
                "inexact",
                f"iteration {iteration}: {len(differing)} of {len(expected)} tensors differ, "
                f"such as {differing[0]}",
            )
        self.compared.add(iteration)

    def _check_events(self, newest: int) -> None:
        """See that the metrics are the beginning of the reference's, up to the newest checkpoint at
        least."""
        path = self.root / "metrics.jsonl"
        events = timeless(path) if path.exists() else []
        expected = self.reference.events
        for event, expected_event in zip_longest(events, expected[: len(events)]):
            if event != expected_event:
                raise SoakFailure(
                    "inexact", f"metrics.jsonl has {event}, expected {expected_event}"
                )
        reached = max((e["iteration"] for e in events), default=0)
        if reached < newest:
            raise SoakFailure("inexact", f"metrics end at {reached}, the checkpoint is of {newest}")

    def check_start(self, start: Snapshot, log: str) -> None:
        """See that processes went on from the newest checkpoint, with nothing left over.

        Raises:
            SoakFailure: they did not.
        """
        start_iterations = {int(number) for number in _RESUMES.findall(log)}
        if start_iterations and start_iterations != {max(start.newest, 0)}:
            raise SoakFailure(
                "inexact",
                f"the run went on at {sorted(start_iterations)}, the newest is {start.newest}",
            )
        if start_iterations and (left := look(self.root).temporary & start.temporary):
            raise SoakFailure("hung", f"{sorted(left)} were not swept")

    def check_end(self, iterations: int, snapshot: Snapshot) -> None:
        """Assert that the run ended like the reference.

        Args:
            iterations: length of the run.
            snapshot: the folder before the last start; if complete, the start had nothing to save.

        Raises:
            SoakFailure: if the run did not.
        """
        now = self.check()
        if now.newest != iterations:
            raise SoakFailure("lost", f"the run ended, the newest is {now.newest} of {iterations}")
        if now.tracked != iterations and snapshot.newest != iterations:
            raise SoakFailure("lost", f"the tracker names {now.tracked} of {iterations}")
        if timeless(self.root / "metrics.jsonl") != self.reference.events:
            raise SoakFailure("inexact", "metrics.jsonl lacks events")
        if now.temporary:
            raise SoakFailure("hung", f"{sorted(now.temporary)} were left behind")
