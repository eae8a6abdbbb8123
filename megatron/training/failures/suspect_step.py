# SPDX-License-Identifier: Apache-2.0
"""A step whose loss is NaN or Inf every time: is the machine to blame, or the data?

The first time the run notes step and machines in the save folder and exits with 16. If the step
gives the same on other machines, it is the data or the settings: exit 17. If it is sound there, the
noted machine computes wrongly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.core.dist_checkpointing import Coordinator
from megatron.training.errors import RunStopped
from megatron.training.exit_codes import ExitCode

#: In the save folder.
FILE = "suspect_step.json"


@dataclass(frozen=True)
class Suspect:
    """What is noted about a step.

    Args:
        iteration: the step, counted from 1.
        hosts: machine of every rank whose loss was not finite, or that computed it as a stage of
            its pipeline, by rank.
    """

    iteration: int
    hosts: Mapping[str, str]


def read_suspect(save: str) -> Suspect | None:
    """Return what is noted in a save folder; None if nothing is, or nothing readable."""
    try:
        found = json.loads(Path(save, FILE).read_text(encoding="utf-8"))
        return Suspect(int(found["iteration"]), {str(r): str(h) for r, h in found["hosts"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_suspect(save: str, suspect: Suspect) -> None:
    """Note a step, whole or not at all."""
    path = Path(save, FILE)
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(asdict(suspect)), encoding="utf-8")
    os.replace(draft, path)


def forget_suspect(save: str) -> None:
    """Remove the note."""
    Path(save, FILE).unlink(missing_ok=True)


def judge(noted: Suspect | None, now: Suspect) -> RunStopped:
    """Return how a run ends whose step's loss is not finite, given what an earlier start noted."""
    hosts = ", ".join(sorted(set(now.hosts.values())))
    step = f"the loss of iteration {now.iteration} is NaN or Inf, computed twice"
    if noted is None or noted.iteration != now.iteration:
        return RunStopped(
            ExitCode.RESTART_ELSEWHERE,
            f"{step} on {hosts}: start again on other machines to tell data from machine",
        )
    if set(noted.hosts.values()) & set(now.hosts.values()):
        return RunStopped(
            ExitCode.RESTART_ELSEWHERE,
            f"{step}, as before, and again on {hosts}: keep the run off that machine to tell data "
            "from machine",
        )
    before = ", ".join(sorted(set(noted.hosts.values())))
    return RunStopped(
        ExitCode.FAILED_VALIDATION,
        f"{step} on {hosts} and before that on {before}: the data or the settings are to blame",
    )


class SuspectStep:
    """The note of a save folder, kept by rank 0 for all ranks.

    Args:
        save: the folder.
        coordinator: how ranks agree; also tells the user.
    """

    def __init__(self, save: str, coordinator: Coordinator) -> None:
        self._save, self._coordinator = save, coordinator
        self._noted = read_suspect(save) if coordinator.rank == 0 else None

    def judge(self, now: Suspect) -> RunStopped:
        """Return how the run ends, the same on every rank, and note the step for the next start."""

        def decide(_: object) -> list[object]:
            noted = read_suspect(self._save)
            verdict = judge(noted, now)
            if verdict.code == ExitCode.FAILED_VALIDATION:
                forget_suspect(self._save)
            else:
                write_suspect(self._save, now)
            return [int(verdict.code), str(verdict)]

        self._coordinator.begin("judging a suspect step")
        code, text = self._coordinator.agree("judge", lambda: None, decide)
        return RunStopped(ExitCode(code), text)

    def acquit(self, iteration: int) -> None:
        """Say who is to blame if this sound step is the noted one, and forget it."""
        noted = self._noted
        if noted is None or noted.iteration != iteration:
            return
        hosts = ", ".join(sorted(set(noted.hosts.values())))
        self._coordinator.say(
            f"iteration {iteration} is sound now; it gave a NaN or Inf loss twice on {hosts}: keep "
            "runs off that machine until it has been tested"
        )
        self._noted = None
        forget_suspect(self._save)
