# SPDX-License-Identifier: Apache-2.0
"""A run that is killed and started again, until it has come to its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.functional_tests import small_run
from tools.soak.checks import Ledger, Reference
from tools.soak.choices import Flavour, Kill, choose
from tools.soak.folder import iteration_of_temporary
from tools.soak.job import Job, SoakFailure, Struck, job
from tools.soak.pace import Measured


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of all chains of a soak.

    Args:
        seed: seed of all choices.
        ranks: processes of a run.
        iterations: length of a run.
        disk_seconds: added delay of every checkpoint file operation.
        plant: "module:function", called in every rank before it starts; None plants nothing.
        data: prefix of the token files.
        folder: folder of all written files.
    """

    seed: int
    ranks: int
    iterations: int
    disk_seconds: float
    plant: str | None
    data: Path
    folder: Path

    def argv(self, flavour: Flavour, root: Path, saving: str) -> list[str]:
        """Return the arguments of a run."""
        options = (
            f"{flavour.layout} {saving} --train-iters {self.iterations} --save {root} "
            f"--load {root} --exit-grace-seconds 25"
        )
        if "--eval-interval" not in options:
            options += " --eval-interval 0"
        return small_run.flags(self.data, options)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One kill and the state of the run at that time.

    Args:
        newest: iteration of the newest checkpoint, -1 if there is none.
    """

    chain: int
    number: int
    flavour: Flavour
    kill: Kill
    struck: Struck
    newest: int = -1


def measure(setting: Setting, flavour: Flavour, measured: Measured) -> Reference:
    """Let a run of a flavour be, saving at every iteration; its durations are the first measured.

    Raises:
        SoakFailure: it fails.
    """
    root = setting.folder / f"reference_{flavour.name.replace(' ', '_')}"
    saving = " ".join(word for word in flavour.saving.split() if word == "--async-save")
    argv = setting.argv(flavour, root, f"{saving} --save-interval 1")
    with job(
        argv,
        ranks=setting.ranks,
        root=root,
        measured=measured,
        disk_seconds=setting.disk_seconds,
        plant=None,
        logs=setting.folder / root.name,
    ) as started:
        started.finish()
    reference = Reference.of(root)
    if sorted(reference.tensors) != list(range(1, setting.iterations + 1)):
        raise SoakFailure("hung", f"the reference has saved at {sorted(reference.tensors)}")
    return reference


@dataclass(kw_only=True)
class Chain:
    """One save folder and all starts of a run on it.

    Args:
        setting: settings of the soak.
        number: number of this chain; with the seed it determines every choice.
        flavour: flavour of the run.
        reference: the uninterrupted run.
        measured: durations of this flavour.
    """

    setting: Setting
    number: int
    flavour: Flavour
    reference: Reference
    measured: Measured
    kills: int = 0
    starts: int = 0
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        root = self.setting.folder / f"chain_{self.number}"
        words = self.flavour.saving.split()
        keep = (
            int(words[words.index("--save-keep-last") + 1]) if "keep-last" in str(words) else None
        )
        self.ledger = Ledger(root=root, reference=self.reference, keep_last=keep)

    def run(self, max_jobs: int) -> Iterator[Result]:
        """Kill up to `max_jobs` times, then let the run come to its end.

        Raises:
            SoakFailure: something was lost, differs, or does not end.
        """
        argv = self.setting.argv(
            self.flavour, self.ledger.root, f"{self.flavour.saving} --save-interval 2"
        )
        ended = False
        while not ended:
            self.starts += 1
            with job(
                argv,
                ranks=self.setting.ranks,
                root=self.ledger.root,
                measured=self.measured,
                disk_seconds=self.setting.disk_seconds,
                plant=self.setting.plant,
                logs=self.setting.folder / f"chain_{self.number}_start_{self.starts}",
            ) as started:
                results = list(self._kills(started, max_jobs))
                ended = not results or results[-1].kill.of_writer
                if ended:
                    started.finish()
                log = started.log()
            if started.power_fails:
                self.ledger.forget_unsynced(started.start, log)
            else:
                self.ledger.check_start(started.start, log)
            now = self.ledger.check()
            yield from (replace(result, newest=now.newest) for result in results)
        self.ledger.check_end(self.setting.iterations, started.start)

    def _kills(self, started: Job, max_jobs: int) -> Iterator[Result]:
        """Kill writers until trainers are killed; end early if the run ends before."""
        while self.kills < max_jobs:
            kill = choose(
                f"{self.setting.seed}/{self.number}/{self.kills + 1}",
                ranks=self.setting.ranks,
                asynchronous=self.flavour.asynchronous,
            )
            if not started.wait_for(kill):
                return
            struck = started.strike(kill)
            if struck is None:
                return
            self.ledger.note(struck.before)
            self.kills += 1
            if kill.of_writer:
                self._see_retry(started, struck)
            yield Result(
                chain=self.number,
                number=self.kills,
                flavour=self.flavour,
                kill=kill,
                struck=struck,
            )
            if not kill.of_writer:
                return

    def _see_retry(self, started: Job, struck: Struck) -> None:
        """Check that trainers live, that a lost save is reported, and that the next save commits.

        Raises:
            SoakFailure: one of the checks fails.
        """
        newest = struck.after.newest
        if not started.wait(lambda: started.now.newest > newest, "a save by a new writer process"):
            return
        for name in struck.before.temporary - started.start.temporary:
            iteration = iteration_of_temporary(name)
            warning = f"WARNING: saving at iteration {iteration} failed"
            started.wait(
                lambda: iteration in self._seen(started) or warning in started.log(),  # noqa: B023
                f"the checkpoint of iteration {iteration}, or a line that it failed,",
            )

    def _seen(self, started: Job) -> set[int]:
        """Return which checkpoints have been there so far."""
        self.ledger.note(started.now)
        return self.ledger.committed
