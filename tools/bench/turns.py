# SPDX-License-Identifier: Apache-2.0
"""Variants that take turns: one process each, a few steps at a time, all others idle.

A machine's speed drifts by 10-20 % within half an hour. Two figures are comparable only if they
come from the same minutes, so every round lets each variant run for a moment, in an order that
rotates, and a ratio is the median of the rounds' ratios. A process of its own gives each variant
its own peak memory.

On a machine that others use too, count CPU seconds of one thread (`clock="cpu"`): waiting for a
core is then not counted, though shared caches and memory still are.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

#: One timed unit of work; returns a figure that tells whether the work was right, e.g. the loss.
Step = Callable[[], float]


@dataclass
class Variant:
    """Hold what one variant measured.

    Args:
        name: the variant.
        rounds: seconds of each step, by round.
        values: what each timed step returned.
        peak_memory_bytes: the most memory that the process ever had resident.
        facts: other facts that its worker reported last.
    """

    name: str
    rounds: list[list[float]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0
    facts: dict = field(default_factory=dict)

    def seconds(self) -> float:
        """Return the median seconds of a step."""
        return statistics.median(second for steps in self.rounds for second in steps)


def ratio(mcore: Variant, peer: Variant) -> float:
    """Return how many times faster `mcore` is: the median over rounds of the ratio of medians."""
    return statistics.median(
        statistics.median(peer_round) / statistics.median(mcore_round)
        for mcore_round, peer_round in zip(mcore.rounds, peer.rounds, strict=True)
    )


def take_turns(
    commands: Mapping[str, Sequence[str]],
    *,
    rounds: int,
    steps: int,
    warmup: int,
    untimed: int = 0,
    clock: Literal["wall", "cpu"] = "wall",
) -> dict[str, Variant]:
    """Run one worker per command and let them take turns.

    A worker that dies ends only its own measurements.

    Args:
        commands: for each variant the arguments after `python`; the program must call `serve`.
        rounds: number of turns of each variant.
        steps: timed steps in a turn.
        warmup: untimed steps of each variant before the first round.
        untimed: untimed steps at the beginning of each turn, in which a worker reallocates the
            memory that it has released.
        clock: wall-clock seconds, or CPU seconds of all threads of the worker.

    Returns:
        The measurements by name; a variant whose worker dies, at its start or later, is left out,
        with one line on stderr.
    """
    workers: dict[str, subprocess.Popen[str]] = {}
    variants: dict[str, Variant] = {}
    try:
        for name, command in commands.items():
            workers[name] = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            # One at a time: builds and compilations would otherwise compete for memory and cores.
            if _ask(workers[name], name, warmup) is not None:
                variants[name] = Variant(name)
        for turn in range(rounds):
            names = list(variants)
            for name in names[turn % len(names) :] + names[: turn % len(names)] if names else []:
                answer = _ask(workers[name], name, steps, untimed=untimed)
                if answer is None:
                    del variants[name]
                    continue
                variants[name].rounds.append(answer[clock])
                variants[name].values.extend(answer["values"])
                variants[name].peak_memory_bytes = answer["peak_memory_bytes"]
                variants[name].facts = answer["facts"]
    finally:
        for worker in workers.values():
            worker.kill()
            worker.communicate()
    return variants


def _ask(worker: subprocess.Popen[str], name: str, steps: int, *, untimed: int = 0) -> dict | None:
    """Have a worker run `untimed` and then `steps` steps; return its answer, or None if it died."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(f"{untimed} {steps}\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        print(f"bench: {name} ended with exit code {worker.wait()}; left out", file=sys.stderr)
        return None
    return json.loads(line)


def serve(build: Callable[[], Step], facts: Callable[[], dict] = dict) -> None:
    """Be a worker: build the step, then answer each line of stdin, "untimed timed" numbers of
    steps, on stdout.

    Args:
        build: returns the step.
        facts: what else to answer after each turn.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not land among the answers
    step = build()
    for line in sys.stdin:
        answer: dict = {"wall": [], "cpu": [], "values": []}
        untimed, timed = map(int, line.split())
        for _ in range(untimed):
            step()
        for _ in range(timed):
            wall, cpu = time.perf_counter(), time.process_time()
            answer["values"].append(step())
            answer["wall"].append(time.perf_counter() - wall)
            answer["cpu"].append(time.process_time() - cpu)
        answer["peak_memory_bytes"] = _peak_memory_bytes()
        answer["facts"] = facts()
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


def _peak_memory_bytes() -> int:
    """Return this process's peak resident memory (Linux; a parent passes ru_maxrss on)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
