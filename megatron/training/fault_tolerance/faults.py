# SPDX-License-Identifier: Apache-2.0
"""Handling of step anomalies: report, continue, roll back, or stop with an exit code.

Every rank calls these functions with the same outcome and the same numbers, so all ranks take the
same decision. A step whose loss is not finite, or spikes, must not change the weights.

Faults are recorded twice: as numbers in an event of kind `fault` in metrics.jsonl, which a resume
rewinds, and as a line in SAVE/faults.jsonl, which names machines and is never rewound. A line of
faults.jsonl is one JSON object:

    time        when, UTC
    iteration   the step, counted from 1
    kind        nan, inf_norm, spike, determinism; replicas
    verdict     transient, reproduced, persistent, unchecked, undecided
    ranks       {rank: machine} of the ranks with the anomaly
    values      loss or norm of each computation, as decimal numbers or "nan", "inf", "-inf"
    bits        the same values, exact: Python's float.hex
    tensors     replicas: names of the tensors that differ

If a step is anomalous in every computation, either a machine or the data is faulty. The run records
step and machines in the save folder and exits with 16. If the step is anomalous on other machines
too, the data or the settings are at fault: exit 17. If it is sound there, the recorded machines
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
from megatron.training.hooks import Progress, StepAnomaly, StepReport, TrainingHooks


def spike_limit(config: Config, recent_losses: Sequence[float]) -> float:
    """Return the loss above which a step is skipped; Inf until the window is half full.

    The limit is a multiple of the median, because a mean would follow a slow divergence.
    """
    factor, window = config.failures.loss_spike_factor, config.failures.loss_spike_window
    if factor is None or len(recent_losses) < max(1, window // 2):
        return math.inf
    return factor * statistics.median(recent_losses)


def record_loss(config: Config, recent_losses: list[float], loss: float) -> None:
    """Add the loss of an applied step to the window, if spike detection is enabled."""
    if config.failures.loss_spike_factor is not None:
        recent_losses.append(loss)
        del recent_losses[: -config.failures.loss_spike_window]


def anomaly_text(
    iteration: int, anomaly: StepAnomaly, ranks: str, *, limit: float, stops: bool = False
) -> str:
    """Describe an anomaly of a step and how it was handled.

    Args:
        ranks: the ranks and their machines, as text.
        limit: the loss limit.
        stops: whether the run stops here; otherwise it skips an unusable step.
    """
    description = {
        "nan": "NaN or Inf loss",
        "inf_norm": "NaN or Inf gradient norm",
        "spike": (
            f"loss {anomaly.values[0]:.4g} is above {limit:.4g}, the limit of "
            "--loss-spike-factor, with a large contribution"
        ),
        "determinism": "one of three computations of the step differs bitwise in the result",
    }[anomaly.kind]
    outcome_text = "yields it again" + ("" if anomaly.same else ", with other bits")
    ending = {
        "transient": (
            "the step computed once more is sound and was used: a transient fault; "
            "watch that machine"
        ),
        "reproduced": f"the step computed once more {outcome_text}: reproduced"
        + ("" if stops else ", the step was skipped"),
        "unchecked": "the step was skipped",
        "undecided": (
            "the last computation was used: undecided; "
            "--deterministic-mode avoids kernels that add in a varying order"
        ),
    }[anomaly.verdict]
    if anomaly.kind == "determinism" and anomaly.verdict == "transient":
        ending = "the other two are equal and were used: a transient fault; watch that machine"
    elif anomaly.verdict == "undecided":
        description = "all three computations of the step differ in the result"
    return f"iteration {iteration}: {description} {ranks}; {ending}"


def ranks_text(hosts: Mapping[int, str]) -> str:
    """Return a list of ranks with their machines as text."""
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
        kind, verdict: see the module's docstring.
        hosts: the machine of every rank with the anomaly.
        values: loss or gradient norm of each computation.
        tensors: names of replicated tensors that differ.
        numbers: further numbers, for metrics.jsonl only.
    """

    iteration: int
    kind: str
    verdict: str
    hosts: Mapping[int, str]
    values: Sequence[float] = ()
    tensors: Sequence[str] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)


class FaultLog:
    """Writes faults to metrics.jsonl and faults.jsonl.

    Args:
        save: the save folder; None writes no faults.jsonl.
        record: writes an event (kind, iteration, numbers) to metrics.jsonl.
        warn: prints one line if a fault cannot be written.
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
        """Record the numbers of an action after faults, such as a rollback."""
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
            self._warn(f"a fault cannot be recorded in {self._path}: {error}")


def _line(fault: FaultRecord) -> str:
    current = datetime.datetime.now(datetime.UTC)
    values = [value if math.isfinite(value) else str(value) for value in fault.values]
    entry: dict[str, object] = {
        "time": current.isoformat(timespec="seconds"),
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


def read_faulty_hosts(save: str) -> list[dict[str, Any]]:
    """Return the entries of a save folder's list; [] without the file.

    Raises:
        ValueError: the file cannot be read.
    """
    path = Path(save, FAULTY_HOSTS)
    try:
        entries = read_json(path)["hosts"]
        return [{**entry, "host": str(entry["host"])} for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): fix or remove it") from error


def add_faulty_hosts(save: str, entries: Collection[dict[str, Any]]) -> None:
    """Add machines to the list, atomically."""
    path = Path(save, FAULTY_HOSTS)
    document = {"hosts": [*read_faulty_hosts(save), *entries]}
    replace_file(path, json.dumps(document, indent=1))


def refuse_faulty_hosts(save: str | None, coordinator: Coordinator) -> None:
    """Check that no rank runs on a listed machine; every rank calls this.

    Raises:
        RunStopped: a rank runs on a listed machine; the exit code asks for other machines.
        ValueError: the file cannot be read.
    """
    if save is None:
        return

    def decide(hosts: list[Any]) -> dict[str, str]:
        try:
            faulty = {entry["host"]: entry for entry in read_faulty_hosts(save)}
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

ANOMALY_TEXTS = {
    "nan": "the loss of iteration {0} is NaN or Inf",
    "inf_norm": "the gradient norm of iteration {0} is NaN or Inf",
    "spike": "the loss of iteration {0} is a spike",
}


@dataclass(frozen=True)
class SuspectStep:
    """A step that was anomalous in two computations.

    Args:
        iteration: the step, counted from 1.
        hosts: machine by rank, of every rank with the anomaly; of a pipeline, every suspect stage.
        kind: the anomaly: nan, spike or inf_norm.
        values: loss or gradient norm of both computations.
    """

    iteration: int
    hosts: Mapping[str, str]
    kind: str
    values: Sequence[float]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, with exact values."""
        return {**asdict(self), "values": [value.hex() for value in self.values]}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> SuspectStep:
        """Parse the JSON form.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the document has another form.
        """
        hosts = {str(rank): str(host) for rank, host in document["hosts"].items()}
        values = tuple(float.fromhex(value) for value in document["values"])
        if document["kind"] not in ANOMALY_TEXTS:
            raise ValueError(f"kind {document['kind']}")
        return SuspectStep(int(document["iteration"]), hosts, document["kind"], values)


def read_suspect_step(save: str) -> SuspectStep | None:
    """Return the suspect step recorded in a save folder; None without a readable record."""
    try:
        return SuspectStep.from_json(read_json(Path(save, SUSPECT_STEP)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_suspect_step(save: str, suspect: SuspectStep) -> None:
    """Write the record of a suspect step, atomically."""
    replace_file(Path(save, SUSPECT_STEP), json.dumps(suspect.to_json()))


def delete_suspect_step(save: str) -> None:
    """Remove the record of a suspect step."""
    Path(save, SUSPECT_STEP).unlink(missing_ok=True)


def judge(recorded: SuspectStep | None, current: SuspectStep) -> RunStopped:
    """Return how a run with a suspect step ends, given the record of an earlier start."""
    hosts = ", ".join(sorted(set(current.hosts.values())))
    step = f"{ANOMALY_TEXTS[current.kind].format(current.iteration)}, computed twice"
    if recorded is None or recorded.iteration != current.iteration:
        return RunStopped(
            ExitCode.RESTART_ELSEWHERE,
            f"{step} on {hosts}: start again on other machines to tell data from machine",
        )
    if set(recorded.hosts.values()) & set(current.hosts.values()):
        return RunStopped(
            ExitCode.RESTART_ELSEWHERE,
            f"{step}, as before, and again on {hosts}: keep the run off that machine to tell data "
            "from machine",
        )
    before = ", ".join(sorted(set(recorded.hosts.values())))
    same = [v.hex() for v in recorded.values[-1:]] == [v.hex() for v in current.values[-1:]]
    return RunStopped(
        ExitCode.FAILED_VALIDATION,
        f"{step} on {hosts} and before that on {before}, {'with' if same else 'without'} the "
        "same bits: the data or the settings cause it; --on-reproduced-fault skip skips the "
        "step",
    )


class SuspectStepFile:
    """The suspect step recorded in a save folder; only rank 0 writes it, all ranks create one.

    Args:
        save: the save folder.
        coordinator: agreement of the ranks.
        say: prints one line.
        log: records the verdict about a recorded step.
    """

    def __init__(
        self,
        save: str,
        coordinator: Coordinator,
        *,
        say: Callable[[str], None],
        log: FaultLog,
    ) -> None:
        self._save, self._coordinator, self._say, self._log = save, coordinator, say, log

        def decide(hosts: list[Any]) -> list[Any]:
            recorded = read_suspect_step(save)
            return [hosts, None if recorded is None else recorded.to_json()]

        coordinator.begin("reading the record of a suspect step")
        self._hosts, recorded = coordinator.agree("note", socket.gethostname, decide)
        self._recorded = None if recorded is None else SuspectStep.from_json(recorded)

    def judge(self, current: SuspectStep) -> RunStopped:
        """Return how the run ends, equal on all ranks; record the step for the next start."""

        def decide(_: object) -> list[object]:
            recorded = read_suspect_step(self._save)
            verdict = judge(recorded, current)
            if verdict.code == ExitCode.FAILED_VALIDATION:
                delete_suspect_step(self._save)
            else:
                write_suspect_step(self._save, current)
            return [int(verdict.code), str(verdict)]

        self._coordinator.begin("judging a suspect step")
        code, text = self._coordinator.agree("judge", lambda: None, decide)
        return RunStopped(ExitCode(code), text)

    def clear(self, iteration: int, loss: float) -> None:
        """If this sound step is the recorded one, report who was at fault and delete the record.

        Every rank calls this with the same step.
        """
        recorded = self._recorded
        if recorded is None or recorded.iteration != iteration:
            return
        self._recorded = None
        hosts = {int(rank): host for rank, host in recorded.hosts.items()}
        blamed = {rank: host for rank, host in hosts.items() if host not in self._hosts}
        sound = f"iteration {iteration} is sound now, with loss {loss:.6g}; on "
        if blamed:
            self._list(recorded, blamed, loss)
            host_text = ", ".join(sorted(set(blamed.values())))
            self._say(
                f"{sound}{host_text} it was not, twice ({recorded.kind}): persistent, listed in "
                f"{Path(self._save, FAULTY_HOSTS)}; no later start uses that machine until its "
                "entry is removed"
            )
        else:
            self._say(
                f"{sound}the same machines it was not, twice ({recorded.kind}): transient, watch "
                f"{', '.join(sorted(set(hosts.values())))}"
            )
        self._log.add(
            FaultRecord(
                iteration,
                recorded.kind,
                "persistent" if blamed else "transient",
                blamed or hosts,
                values=(*recorded.values, loss),
            )
        )
        if self._coordinator.rank == 0:
            delete_suspect_step(self._save)

    def _list(self, recorded: SuspectStep, hosts: Mapping[int, str], loss: float) -> None:
        """Add machines to the list that later starts must not use."""
        if self._coordinator.rank != 0:
            return
        entry = {
            "iteration": recorded.iteration,
            "kind": recorded.kind,
            "values": [value.hex() for value in recorded.values],
            "sound": loss.hex(),
            "sound_on": sorted(set(self._hosts)),
        }
        add_faulty_hosts(self._save, [{"host": h, "rank": r, **entry} for r, h in hosts.items()])


@dataclass(frozen=True, kw_only=True)
class Faults(TrainingHooks):
    """Hooks that handle bad steps.

    Args:
        config: the run's options.
        say: prints one line.
        log: records faults.
        host_of: returns the machine of a rank.
        save: writes a checkpoint of the current progress; None without --save.
        suspect_file: judges suspect steps, and clears them by sound steps; None without --save.
        roll_back: loads the last checkpoint's weights and returns its progress; None without a
            checkpoint.
    """

    config: Config
    say: Callable[[str], None]
    log: FaultLog
    host_of: Callable[[int], str]
    save: Callable[[Progress], object] | None = None
    suspect_file: SuspectStepFile | None = None
    roll_back: Callable[[], Progress | None] = lambda: None

    def on_step_computed(self, progress: Progress, outcome: StepReport, loss_limit: float) -> None:
        """Check a step before it is counted.

        Args:
            loss_limit: a step with a higher loss was skipped.

        Raises:
            RunStopped: the anomaly is reproduced; a restart on other machines shows the cause.
        """
        iteration, anomaly = progress.iteration + 1, outcome.anomaly
        if anomaly is None:
            self._clear(iteration, outcome.loss)
            return
        hosts = {rank: self.host_of(rank) for rank in anomaly.ranks}
        restarts = self.config.failures.on_reproduced_fault == "restart"
        judges = restarts and anomaly.verdict == "reproduced"
        suspect_file = self.suspect_file if judges else None
        ranks, stops = ranks_text(hosts), suspect_file is not None
        self.say(anomaly_text(iteration, anomaly, ranks, limit=loss_limit, stops=stops))
        numbers = {}
        if anomaly.kind == "spike":
            numbers = {"loss": anomaly.values[0], "limit": loss_limit}
        self.log.add(
            FaultRecord(
                iteration,
                anomaly.kind,
                anomaly.verdict,
                hosts,
                values=anomaly.values,
                numbers=numbers,
            )
        )
        if anomaly.verdict == "transient":
            self._clear(iteration, outcome.loss)
        if suspect_file is None:
            return
        if self.save is not None:
            self.save(progress)  # of the state before this step
        host_text = {str(rank): host for rank, host in hosts.items()}
        raise suspect_file.judge(SuspectStep(iteration, host_text, anomaly.kind, anomaly.values))

    def _clear(self, iteration: int, loss: float) -> None:
        if self.suspect_file is not None:
            self.suspect_file.clear(iteration, loss)

    def on_step_end(self, progress: Progress, outcome: StepReport) -> None:
        """Check the number of consecutive bad steps.

        Raises:
            RunStopped: the number has reached its limit.
        """
        bad_steps = progress.consecutive_bad_steps
        last_values = f"(last loss {outcome.loss}, gradient norm {outcome.grad_norm})"
        limit = self.config.training.max_consecutive_bad_steps
        if bad_steps >= limit:
            description = "a NaN or Inf loss or gradient norm" + (
                " or a spike" if outcome.spiked else ""
            )
            raise RunStopped(
                ExitCode.BAD_STEPS,
                f"stopped at iteration {progress.iteration}: {limit} steps in a row had "
                f"{description} {last_values}; none of them changed a weight; lower --lr or look "
                "at the data, and resume from the last checkpoint",
            )
        if bad_steps and bad_steps == self.config.failures.rollback_after_bad_steps:
            self._roll_back(progress, last_values)

    def _roll_back(self, progress: Progress, last_values: str) -> None:
        """Restore weights and optimizer; the position in the data remains after the bad steps.

        Raises:
            RunStopped: there is no checkpoint.
        """
        loaded = self.roll_back()
        if loaded is None:
            raise RunStopped(
                ExitCode.BAD_STEPS,
                f"stopped at iteration {progress.iteration}: {progress.consecutive_bad_steps} "
                f"bad steps in a row {last_values}, and there is no checkpoint yet to roll "
                "back to: lower --save-interval",
            )
        progress.update_samples = loaded.update_samples
        progress.recent_losses = list(loaded.recent_losses)
        progress.rollbacks += 1
        self.say(
            f"iteration {progress.iteration}: {progress.consecutive_bad_steps} bad steps in a "
            f"row {last_values}: rolled back to the weights of iteration {loaded.iteration}, "
            f"continuing with the data after sample {progress.consumed_samples:,}"
        )
        self.log.event(progress.iteration, {"rolled_back_to": float(loaded.iteration)})
