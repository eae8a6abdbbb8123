# SPDX-License-Identifier: Apache-2.0
"""What a run does after a faulty step: report, continue, roll back, or stop with an exit code.

Every rank calls it with the same outcome and the same numbers, so all take the same decision. A
loss that is not finite, or that spikes, must not change the weights.

Faults are recorded twice: as numbers in an event of kind `fault` in metrics.jsonl, which a resume
rewinds, and as a line in SAVE/faults.jsonl, which names machines and stays. A line of faults.jsonl
is one JSON object:

    time        when, UTC
    iteration   the step, counted from 1
    kind        nan, inf_norm, spike, determinism; replicas
    verdict     transient, reproduced, persistent, unchecked, undecided
    ranks       {rank: machine} where it showed, by rank
    values      of each computation, as decimal numbers or "nan", "inf", "-inf"
    bits        the same numbers, exact: Python's float.hex
    tensors     replicas: what differs

A step that is suspicious every time: is the machine faulty, or the data? The first time the run
notes step and machines in the save folder and exits with 16. If the step is suspicious on other
machines too, it is the data or the settings: exit 17. If it is sound there, the noted machines
compute wrongly, and no later start may use them. SAVE/faulty_hosts.json lists them:

    {"hosts": [{"host": "a", "rank": 1, "iteration": 3, "kind": "nan",
                "values": ["nan", "nan"], "sound": "0x1.8p+2", "sound_on": ["b"]}]}

`values` are the results on this host, `sound` the result elsewhere, as Python's float.hex. Remove
an entry to use its machine again.
"""

from __future__ import annotations

import datetime
import json
import math
import socket
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.cli.errors import ExitCode, RunStopped
from megatron.core.dist_checkpointing import Coordinator
from megatron.core.untrusted_files import read_json, replace_file, write_to
from megatron.training.config import Config
from megatron.training.failures.replay import Doubt
from megatron.training.hooks import TrainingHooks
from megatron.training.monitoring.step_window import StepOutcome
from megatron.training.progress_state import Progress


def spike_limit(config: Config, recent_losses: Sequence[float]) -> float:
    """Return the loss above which a step is skipped; Inf before half a window of losses is known.

    The median, because a mean would follow a slow divergence into it.
    """
    factor, window = config.failures.loss_spike_factor, config.failures.loss_spike_window
    if factor is None or len(recent_losses) < max(1, window // 2):
        return math.inf
    return factor * statistics.median(recent_losses)


def remember_loss(config: Config, recent_losses: list[float], loss: float) -> None:
    """Add the loss of an applied step to those that define a spike, where they are used."""
    if config.failures.loss_spike_factor is not None:
        recent_losses.append(loss)
        del recent_losses[: -config.failures.loss_spike_window]


def doubt_text(
    iteration: int, doubt: Doubt, where: str, *, limit: float, stops: bool = False
) -> str:
    """Describe an anomaly of a step and how it was handled.

    Args:
        where: the ranks and their machines, in words.
        limit: of the loss.
        stops: whether the run ends here; otherwise it skips a step that it cannot use.
    """
    what = {
        "nan": "NaN or Inf loss",
        "inf_norm": "NaN or Inf gradient norm",
        "spike": f"loss {doubt.values[0]:.4g} is above {limit:.4g}, the limit of "
        "--loss-spike-factor, with a part",
        "determinism": "one of three computations of the step has other bits: that",
    }[doubt.kind]
    again = "gives it again" + ("" if doubt.same else ", with other bits")
    end = {
        "transient": "the step computed once more is sound and was used: transient, watch that "
        "machine",
        "reproduced": f"the step computed once more {again}: reproduced"
        + ("" if stops else ", the step was skipped"),
        "unchecked": "the step was skipped",
        "undecided": "no two of three computations are equal, the last one was used: undecided; "
        "--deterministic-mode leaves out kernels that add in a changing order",
    }[doubt.verdict]
    if doubt.kind == "determinism" and doubt.verdict == "transient":
        end = "the two others are equal and were used: transient, watch that machine"
    elif doubt.verdict == "undecided":
        what = "the result of the step changes with every computation, that"
    return f"iteration {iteration}: {what} {where}; {end}"


def where_text(hosts: Mapping[int, str]) -> str:
    """Name ranks with their machines."""
    text = ", ".join(f"rank {rank} on {host}" for rank, host in list(hosts.items())[:8])
    text += f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    return f"of {text}"


#: In the save folder.
FAULT_LOG = "faults.jsonl"


@dataclass(frozen=True)
class FaultRecord:
    """One fault.

    Args:
        iteration: the step, counted from 1.
        kind, verdict: see above.
        hosts: the machine of every rank where it showed.
        values: what came out, once per computation.
        tensors: what differs, of replicas.
        numbers: more of it, for metrics.jsonl alone.
    """

    iteration: int
    kind: str
    verdict: str
    hosts: Mapping[int, str]
    values: Sequence[float] = ()
    tensors: Sequence[str] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)


class FaultLog:
    """Keeps faults.

    Args:
        save: the folder; None keeps no lines.
        record: writes numbers of an event, by kind.
        warn: shows one line, if a fault cannot be kept.
    """

    def __init__(
        self,
        save: str | None,
        *,
        record: Callable[[str, int, dict[str, float]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._path = None if save is None else Path(save, FAULT_LOG)
        self._record, self._warn = record, warn

    def event(self, iteration: int, numbers: dict[str, float]) -> None:
        """Keep the numbers of what was done about faults."""
        self._record("fault", iteration, numbers)

    def add(self, fault: FaultRecord) -> None:
        """Record a fault; a full disk does not stop the run."""
        first_rank = float(min(fault.hosts, default=-1))
        event = {fault.kind: 1.0, fault.verdict: 1.0, "first_rank": first_rank, **fault.numbers}
        self._record("fault", fault.iteration, event)
        if self._path is None:
            return
        try:
            with write_to(self._path, "a") as file:
                print(_line(fault), file=file)
        except OSError as error:
            self._warn(f"a fault cannot be noted in {self._path}: {error}")


def _line(fault: FaultRecord) -> str:
    now = datetime.datetime.now(datetime.UTC)
    values = [value if math.isfinite(value) else str(value) for value in fault.values]
    entry: dict[str, object] = {
        "time": now.isoformat(timespec="seconds"),
        "iteration": fault.iteration,
        "kind": fault.kind,
        "verdict": fault.verdict,
        "ranks": {str(rank): host for rank, host in fault.hosts.items()},
        "values": values,
        "bits": [value.hex() for value in fault.values],
    }
    if fault.tensors:
        entry["tensors"] = list(fault.tensors)
    return json.dumps(entry)


#: In the save folder.
FAULTY_HOSTS = "faulty_hosts.json"


def read_faulty(save: str) -> list[dict[str, Any]]:
    """Return the entries of a save folder; none if there is no file.

    Raises:
        ValueError: it cannot be read.
    """
    path = Path(save, FAULTY_HOSTS)
    try:
        entries = read_json(path)["hosts"]
        return [{**entry, "host": str(entry["host"])} for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): fix or remove it") from error


def add_faulty(save: str, entries: Collection[dict[str, Any]]) -> None:
    """Add machines to the list, atomically."""
    path = Path(save, FAULTY_HOSTS)
    document = {"hosts": [*read_faulty(save), *entries]}
    replace_file(path, json.dumps(document, indent=1))


def refuse_faulty_hosts(save: str | None, coordinator: Coordinator) -> None:
    """Check that no rank runs on a listed machine; every rank calls this.

    Raises:
        RunStopped: one does: restart elsewhere.
        ValueError: the file cannot be read.
    """
    if save is None:
        return

    def decide(hosts: list[Any]) -> dict[str, str]:
        try:
            faulty = {entry["host"]: entry for entry in read_faulty(save)}
        except ValueError as error:
            return {"damaged": str(error)}
        for rank, host in enumerate(hosts):
            if host in faulty:
                entry = faulty[host]
                return {
                    "refused": f"rank {rank} is on {host}, which gave a wrong iteration "
                    f"{entry.get('iteration')} ({entry.get('kind')}): start on other machines, or "
                    f"remove its entry from {Path(save, FAULTY_HOSTS)}"
                }
        return {}

    coordinator.begin("looking for faulty machines")
    decision = coordinator.agree("machines", socket.gethostname, decide)
    if "damaged" in decision:
        raise ValueError(decision["damaged"])
    if "refused" in decision:
        raise RunStopped(ExitCode.RESTART_ELSEWHERE, decision["refused"])


#: In the save folder.
SUSPECT_STEP = "suspect_step.json"

WORDS = {
    "nan": "the loss of iteration {0} is NaN or Inf",
    "inf_norm": "the gradient norm of iteration {0} is NaN or Inf",
    "spike": "the loss of iteration {0} is a spike",
}


@dataclass(frozen=True)
class Suspect:
    """A record of a suspect step.

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
        return Suspect.from_json(read_json(Path(save, SUSPECT_STEP)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_suspect(save: str, suspect: Suspect) -> None:
    """Write the record of a suspect step, atomically."""
    replace_file(Path(save, SUSPECT_STEP), json.dumps(suspect.to_json()))


def forget_suspect(save: str) -> None:
    """Remove the note."""
    Path(save, SUSPECT_STEP).unlink(missing_ok=True)


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
                f"{Path(self._save, FAULTY_HOSTS)}; no later start uses that machine until its "
                "entry is removed"
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
        """List machines that later starts must not use."""
        if self._coordinator.rank != 0:
            return
        entry = {
            "iteration": noted.iteration,
            "kind": noted.kind,
            "values": [value.hex() for value in noted.values],
            "sound": loss.hex(),
            "sound_on": sorted(set(self._hosts)),
        }
        add_faulty(self._save, [{"host": h, "rank": r, **entry} for r, h in hosts.items()])


@dataclass(frozen=True, kw_only=True)
class Faults(TrainingHooks):
    """Decisions about bad steps.

    Args:
        config: what the user wants done.
        say: shows one line.
        log: keeps faults.
        host_of: returns the machine of a rank.
        save: writes a checkpoint of the current progress; None without --save.
        judge: returns how a run with a suspect step ends, the same on every rank.
        acquit: called with every sound step and its loss.
        roll_back: loads the last checkpoint's weights and returns its progress; None if there is
            none.
    """

    config: Config
    say: Callable[[str], None]
    log: FaultLog
    host_of: Callable[[int], str]
    save: Callable[[Progress], object] | None = None
    judge: Callable[[Suspect], RunStopped] | None = None
    acquit: Callable[[int, float], None] = lambda iteration, loss: None
    roll_back: Callable[[], Progress | None] = lambda: None

    def on_step_computed(self, progress: Progress, outcome: StepOutcome, loss_limit: float) -> None:
        """Check a step before it is counted.

        Args:
            loss_limit: above which the step was skipped.

        Raises:
            RunStopped: it is suspicious every time, and other machines shall show why.
        """
        iteration, doubt = progress.iteration + 1, outcome.doubt
        if doubt is None:
            self.acquit(iteration, outcome.loss)
            return
        hosts = {rank: self.host_of(rank) for rank in doubt.ranks}
        restarts = self.config.failures.on_reproduced_fault == "restart"
        judge = self.judge if restarts and doubt.verdict == "reproduced" else None
        where, stops = where_text(hosts), judge is not None
        self.say(doubt_text(iteration, doubt, where, limit=loss_limit, stops=stops))
        numbers = {}
        if doubt.kind == "spike":
            numbers = {"loss": doubt.values[0], "limit": loss_limit}
        self.log.add(
            FaultRecord(
                iteration, doubt.kind, doubt.verdict, hosts, values=doubt.values, numbers=numbers
            )
        )
        if doubt.verdict == "transient":
            self.acquit(iteration, outcome.loss)
        if judge is None:
            return
        if self.save is not None:
            self.save(progress)  # of the state before this step
        named = {str(rank): host for rank, host in hosts.items()}
        raise judge(Suspect(iteration, named, doubt.kind, doubt.values))

    def on_step_end(self, progress: Progress, outcome: StepOutcome) -> None:
        """Check the number of consecutive bad steps.

        Raises:
            RunStopped: it is too high.
        """
        bad = progress.consecutive_bad_steps
        last = f"(last loss {outcome.loss}, gradient norm {outcome.grad_norm})"
        limit = self.config.training.max_consecutive_bad_steps
        if bad >= limit:
            what = "a NaN or Inf loss or gradient norm" + (" or a spike" if outcome.spiked else "")
            raise RunStopped(
                ExitCode.BAD_STEPS,
                f"stopped at iteration {progress.iteration}: {limit} steps in a row had {what} "
                f"{last}; none of them changed a weight; lower --lr or look at the data, and "
                "resume from the last checkpoint",
            )
        if bad and bad == self.config.failures.rollback_after_bad_steps:
            self._roll_back(progress, last)

    def _roll_back(self, progress: Progress, last: str) -> None:
        """Take weights and optimizer back; the position in the data stays after the bad steps.

        Raises:
            RunStopped: there is no checkpoint.
        """
        back = self.roll_back()
        if back is None:
            raise RunStopped(
                ExitCode.BAD_STEPS,
                f"stopped at iteration {progress.iteration}: {progress.consecutive_bad_steps} bad "
                f"steps in a row {last}, and there is no checkpoint to roll back to yet: lower "
                "--save-interval",
            )
        progress.update_samples = back.update_samples
        progress.recent_losses = list(back.recent_losses)
        progress.rollbacks += 1
        self.say(
            f"iteration {progress.iteration}: {progress.consecutive_bad_steps} bad steps in a row "
            f"{last}: rolled back to the weights of iteration {back.iteration}, going on with the "
            f"data behind sample {progress.consumed_samples:,}"
        )
        self.log.event(progress.iteration, {"rolled_back_to": float(back.iteration)})
