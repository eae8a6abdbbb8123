# SPDX-License-Identifier: Apache-2.0
"""Stages: commands with time limits under one deadline; a failure does not stop the next."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: What a process prints last is what matters of it.
SHOWN_CHARACTERS = 6000
#: A driver may hold a killed process; the suite does not wait for it longer than this.
KILL_SECONDS = 10.0

#: A line of pytest's summary: the test and what it failed with.
FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Stage:
    """Commands that run together.

    Args:
        name: name of the stage.
        commands: argument lists by name; each runs as a process.
        seconds: time limit of the whole stage.
        jobs: number of concurrent commands.
    """

    name: str
    commands: Mapping[str, Sequence[str]]
    seconds: float
    jobs: int = 1


@dataclass
class Outcome:
    """How a stage ended.

    Args:
        name: name of the stage.
        seconds: duration.
        problems: one line for each command that failed or did not finish.
        last_lines: last output line of each command.
    """

    name: str
    seconds: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)
    last_lines: dict[str, str] = field(default_factory=dict)


class _Process:
    """A command that writes to a file, in a separate process group."""

    def __init__(
        self, command: Sequence[str], log: Path, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.log, self.started = log, time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the command and its children."""
        os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_SECONDS)

    def text(self) -> str:
        """Return its output."""
        return self.log.read_text("utf-8", "replace")


def run_stage(
    stage: Stage, *, folder: Path, environment: Mapping[str, str], deadline: float
) -> Outcome:
    """Run a stage; print the full output of failed commands, and one line for each other.

    Args:
        stage: the stage.
        folder: working folder of the commands.
        environment: environment of the commands.
        deadline: time of `time.monotonic` at which all commands are stopped.
    """
    with tempfile.TemporaryDirectory() as logs:
        return _run(stage, Path(logs), folder, environment, deadline)


def _run(
    stage: Stage, logs: Path, folder: Path, environment: Mapping[str, str], deadline: float
) -> Outcome:
    begun = time.monotonic()
    limit = min(begun + stage.seconds, deadline)
    outcome, waiting = Outcome(stage.name), dict(stage.commands)
    running: dict[str, _Process] = {}
    try:
        while waiting or running:
            late = time.monotonic() >= limit
            while waiting and (late or len(running) < stage.jobs):
                name = next(iter(waiting))
                command = waiting.pop(name)
                if late:
                    outcome.problems[name] = "not started: no time left"
                    print(f"gpu: {name}: {outcome.problems[name]}", flush=True)
                else:
                    log = logs / str(len(waiting))
                    running[name] = _Process(command, log, folder, environment)
            for name, process in list(running.items()):
                if late or process.process.poll() is not None:
                    del running[name]
                    _close(name, process, outcome)
            if running:
                time.sleep(0.05)
    finally:
        for process in running.values():  # an interrupt
            process.kill()
    outcome.seconds = time.monotonic() - begun
    return outcome


def _close(name: str, process: _Process, outcome: Outcome) -> None:
    """Note how a command ended, ending it if it has not."""
    code = process.process.poll()
    seconds = time.monotonic() - process.started
    if code is None:
        process.kill()
        outcome.problems[name] = f"not finished after {seconds:.0f} s"
    elif code:
        outcome.problems[name] = f"failed with exit code {code}"
    text = process.text()
    if code is None or code:
        outcome.problems |= {test: why or "failed" for test, why in FAILED_TEST.findall(text)}
    lines = text.strip().splitlines()
    outcome.last_lines[name] = lines[-1] if lines else ""
    problem = outcome.problems.get(name)
    print(f"gpu: {name}: {problem or outcome.last_lines[name]} [{seconds:.0f} s]", flush=True)
    if problem:
        print(text[-SHOWN_CHARACTERS:], flush=True)
