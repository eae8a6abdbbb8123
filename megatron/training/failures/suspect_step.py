# SPDX-License-Identifier: Apache-2.0
"""A step that is suspicious every time: is the machine to blame, or the data?

The first time the run notes step and machines in the save folder and exits with 16. If the step is
suspicious on other machines too, it is the data or the settings: exit 17. If it is sound there, the
noted machines compute wrongly, and no later start may use them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import Coordinator
from megatron.core.untrusted_files import read_json, replace_file
from megatron.training.errors import RunStopped
from megatron.training.exit_codes import ExitCode
from megatron.training.failures.faulty_hosts import FILE as FAULTY
from megatron.training.failures.faulty_hosts import add_faulty

#: In the save folder.
FILE = "suspect_step.json"

WORDS = {
    "nan": "the loss of iteration {0} is NaN or Inf",
    "inf_norm": "the gradient norm of iteration {0} is NaN or Inf",
    "spike": "the loss of iteration {0} is a spike",
}


@dataclass(frozen=True)
class Suspect:
    """What is noted about a step.

    Args:
        iteration: the step, counted from 1.
        hosts: machine of every rank where it showed, or that computed it as a stage of such a
            rank's pipeline, by rank.
        kind: what is suspicious: nan, spike or inf_norm.
        values: of both computations.
    """

    iteration: int
    hosts: Mapping[str, str]
    kind: str
    values: Sequence[float]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it, the values exact."""
        return {**asdict(self), "values": [value.hex() for value in self.values]}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Suspect:
        """Return what was noted.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is something else.
        """
        hosts = {str(rank): str(host) for rank, host in found["hosts"].items()}
        values = tuple(float.fromhex(value) for value in found["values"])
        if found["kind"] not in WORDS:
            raise ValueError(f"kind {found['kind']}")
        return Suspect(int(found["iteration"]), hosts, found["kind"], values)


def read_suspect(save: str) -> Suspect | None:
    """Return what is noted in a save folder; None if nothing is, or nothing readable."""
    try:
        return Suspect.from_json(read_json(Path(save, FILE)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_suspect(save: str, suspect: Suspect) -> None:
    """Note a step, whole or not at all."""
    replace_file(Path(save, FILE), json.dumps(suspect.to_json()))


def forget_suspect(save: str) -> None:
    """Remove the note."""
    Path(save, FILE).unlink(missing_ok=True)


def judge(noted: Suspect | None, now: Suspect) -> RunStopped:
    """Return how a run ends whose step is suspicious, given what an earlier start noted."""
    hosts = ", ".join(sorted(set(now.hosts.values())))
    step = f"{WORDS[now.kind].format(now.iteration)}, computed twice"
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
    same = [v.hex() for v in noted.values[-1:]] == [v.hex() for v in now.values[-1:]]
    return RunStopped(
        ExitCode.FAILED_VALIDATION,
        f"{step} on {hosts} and before that on {before}, {'with' if same else 'not with'} the same "
        "bits: the data or the settings are to blame; --on-reproduced-fault skip passes over it",
    )


class SuspectStep:
    """The note of a save folder, kept by rank 0 and known to all ranks; all of them make one.

    Args:
        save: the folder.
        coordinator: how ranks agree.
        say: shows one line.
        record: keeps what a noted step turned out to be: the note, the verdict, the machines to
            blame by rank, and `loss`, which is sound.
    """

    def __init__(
        self,
        save: str,
        coordinator: Coordinator,
        *,
        say: Callable[[str], None],
        record: Callable[..., None],
    ) -> None:
        self._save, self._coordinator, self._say, self._record = save, coordinator, say, record

        def decide(hosts: list[Any]) -> list[Any]:
            noted = read_suspect(save)
            return [hosts, None if noted is None else noted.to_json()]

        coordinator.begin("reading what is noted of a suspect step")
        self._hosts, noted = coordinator.agree("note", socket.gethostname, decide)
        self._noted = None if noted is None else Suspect.from_json(noted)

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

    def acquit(self, iteration: int, loss: float) -> None:
        """Say who is to blame if this sound step is the noted one, and forget it; every rank calls
        this with the same step."""
        noted = self._noted
        if noted is None or noted.iteration != iteration:
            return
        self._noted = None
        hosts = {int(rank): host for rank, host in noted.hosts.items()}
        away = {rank: host for rank, host in hosts.items() if host not in self._hosts}
        sound = f"iteration {iteration} is sound now, with loss {loss:.6g}; on "
        if away:
            self._list(noted, away, loss)
            named = ", ".join(sorted(set(away.values())))
            self._say(
                f"{sound}{named} it was not, twice ({noted.kind}): persistent, listed in "
                f"{Path(self._save, FAULTY)}; no later start uses that machine until its entry is "
                "removed"
            )
        else:
            self._say(
                f"{sound}the same machines it was not, twice ({noted.kind}): transient, watch "
                f"{', '.join(sorted(set(hosts.values())))}"
            )
        self._record(noted, "persistent" if away else "transient", away or hosts, loss=loss)
        if self._coordinator.rank == 0:
            forget_suspect(self._save)

    def _list(self, noted: Suspect, hosts: Mapping[int, str], loss: float) -> None:
        """Have later starts keep off machines."""
        if self._coordinator.rank != 0:
            return
        found = {
            "iteration": noted.iteration,
            "kind": noted.kind,
            "values": [value.hex() for value in noted.values],
            "sound": loss.hex(),
            "sound_on": sorted(set(self._hosts)),
        }
        add_faulty(self._save, [{"host": h, "rank": r, **found} for r, h in hosts.items()])
