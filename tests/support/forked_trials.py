# SPDX-License-Identifier: Apache-2.0
"""Trials in forked processes with limits on memory and time, each with a verdict.

A trial is a call of an entry point. It must end with an exit code, and with one printable line if
that is an error; a traceback, a signal, a limit that is met are faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 10.0
#: A pipe that is waited for takes no CPU time; a busy machine takes its time for what does.
SECONDS = 120.0
LONGEST_LINE = 2000
_TRIALS_EACH = 200  # of one process: memory that threads reserve adds up
_NO_ARENAS = -8, 1  # M_ARENA_MAX of <malloc.h>


@dataclass(frozen=True)
class Verdict:
    """How a trial ended.

    Args:
        code: exit code; None for a fault.
        text: the error line; of a fault, all that is known.
    """

    code: int | None
    text: str


def run_trials(
    trials: Sequence[Callable[[], int]], log: Path, *, processes: int = 2
) -> list[Verdict]:
    """Run every trial and return its verdict, in order.

    Args:
        trials: each returns an exit code.
        log: a file for what the processes print past Python.
        processes: at once.
    """
    verdicts: dict[int, Verdict] = {}
    waiting = [list(range(i, len(trials), processes))[::-1] for i in range(processes)]
    running: dict[int, _Worker] = {}
    while running or any(waiting):
        for i, left in enumerate(waiting):
            if left and i not in running:
                batch = [left.pop() for _ in range(min(len(left), _TRIALS_EACH))]
                running[i] = _Worker(trials, batch, log.with_suffix(f".{i}"))
        for i in list(running):
            if not running[i].step(verdicts):
                waiting[i] += running.pop(i).finish(verdicts)[::-1]
    return [verdicts[i] for i in range(len(trials))]


class _Worker:
    """A forked process that runs a batch of trials."""

    def __init__(self, trials: Sequence[Callable[[], int]], batch: list[int], log: Path) -> None:
        self._batch, self._log = batch, log
        end, child_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other threads of the tests are idle
            self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.close(end)
                _serve(trials, batch, child_end, log)
                code = 0
            finally:
                os._exit(code)
        os.close(child_end)
        self._lines = os.fdopen(end, "r", encoding="utf-8")

    def step(self, verdicts: dict[int, Verdict]) -> bool:
        """Take the next verdict; False if there is none."""
        line = self._lines.readline()
        if line.endswith("\n"):
            verdicts[self._batch.pop(0)] = Verdict(*json.loads(line))
        return line.endswith("\n")

    def finish(self, verdicts: dict[int, Verdict]) -> list[int]:
        """Return the trials that are left; the one that ended the process has failed."""
        self._lines.close()
        status = os.waitpid(self._pid, 0)[1]
        if self._batch:
            output = self._log.read_text(errors="replace")[-3000:]
            how = f"exit code {os.waitstatus_to_exitcode(status)}"
            if os.WIFSIGNALED(status):
                how = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
            verdicts[self._batch.pop(0)] = Verdict(None, f"{how}: {output}")
        return self._batch


def _serve(
    trials: Sequence[Callable[[], int]], batch: Sequence[int], answers: int, log: Path
) -> None:
    with log.open("wb") as file, open(os.devnull, "rb") as nothing:
        for number, stream in ((0, nothing), (1, file), (2, file)):
            os.dup2(stream.fileno(), number)
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    ctypes.CDLL(None).mallopt(*_NO_ARENAS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # those of users are no errors
    for index in batch:
        os.truncate(2, 0)
        begin = _cpu_seconds()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        verdict = judge(trials[index])
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        if (spent := _cpu_seconds() - begin) > CPU_SECONDS:
            verdict = Verdict(None, f"{spent:.1f} s of CPU time")
        os.write(answers, json.dumps([verdict.code, verdict.text]).encode() + b"\n")


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    return sum(os.times()[:4])


def judge(trial: Callable[[], int]) -> Verdict:
    """Run a trial here."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = trial()
    except BaseException:
        return Verdict(None, traceback.format_exc()[-3000:])
    output = err.getvalue()
    if "Traceback (most recent call last)" in output:
        return Verdict(None, output[-3000:])
    lines = [line for line in output.split("\n") if line]
    for line in output.split("\n"):
        if not line.isprintable():
            return Verdict(None, f"what cannot be printed: {line[:500]!r}")
        if len(line) > LONGEST_LINE:
            return Verdict(None, f"a line of {len(line)} characters: {line[:500]}")
    if code == 2 and sum(": error: " in line for line in lines) != 1:
        return Verdict(None, f"no one line of an error: {output[-3000:]}")
    return Verdict(code, lines[-1] if lines else "")
