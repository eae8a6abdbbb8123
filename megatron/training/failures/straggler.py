# SPDX-License-Identifier: Apache-2.0
"""Which rank computes more slowly than the others (`--log-straggler`).

A step takes equally long on every rank, since each waits for the slowest in its collectives. So
what counts is the time of a step without that spent waiting, measured where the waiting is done:
by the clock on a CPU, by events of the stream on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from megatron.core.comm import all_gather
from megatron.core.process_groups import Group


class _Event:
    """A moment on a CPU, with the interface of a GPU's."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1000.0 * (end.at - self.at)


class WaitClock:
    """An observer of process groups, and the context that a rank waits in: it adds up the time.

    Args:
        device: where the run computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._device = device
        self._in_step = False
        self._waits: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any]] = []

    def _moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True) if self._gpu else _Event()
        event.record()
        return event

    def __call__(self, record: object) -> WaitClock | None:
        """Ask to be entered while the caller waits for a collective of a step."""
        return self if self._in_step else None

    def __enter__(self) -> None:
        self._begun = self._moment()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Note one wait."""
        self._waits.append((self._begun, self._moment()))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Note the step that is carried out inside."""
        self._in_step = True
        begun = self._moment()
        try:
            yield
        finally:
            self._in_step = False
        self._steps.append((begun, self._moment()))

    def compute_seconds(self) -> float:
        """Return the mean time that a step since the last call has computed; 0.0 without one."""
        if self._gpu:
            torch.cuda.synchronize(self._device)
        steps = sum(begin.elapsed_time(end) for begin, end in self._steps)
        waits = sum(begin.elapsed_time(end) for begin, end in self._waits)
        count = len(self._steps)
        self._steps.clear()
        self._waits.clear()
        return max(0.0, steps - waits) / 1000.0 / count if count else 0.0


def slow_ranks(
    seconds: Sequence[float], factor: float, *, alike: Sequence[Sequence[int]] | None = None
) -> dict[int, float]:
    """Return the medians of the ranks whose time is above `factor` of them, the slowest first.

    The lower median, so that of two ranks one can be slow.

    Args:
        alike: ranks that are to take the same time, each with its own median; None is all.
    """
    medians = {}
    for ranks in [range(len(seconds))] if alike is None else alike:
        middle = statistics.median_low([seconds[rank] for rank in ranks])
        medians.update({rank: middle for rank in ranks if 0.0 < factor * middle < seconds[rank]})
    slow = sorted(medians, key=lambda rank: -seconds[rank] / medians[rank])
    return {rank: medians[rank] for rank in slow}


def straggler_text(
    seconds: Sequence[float],
    factor: float,
    host_of: Callable[[int], str],
    *,
    alike: Sequence[Sequence[int]] | None = None,
) -> str | None:
    """Name the ranks that `slow_ranks` returns; None if there are none."""
    medians = slow_ranks(seconds, factor, alike=alike)
    if not medians:
        return None
    slow = list(medians)
    of = "of its stage " if alike is not None and len(alike) > 1 else ""
    shown = ", ".join(
        f"rank {rank} on {host_of(rank)} computes {seconds[rank] / medians[rank]:.1f} times as "
        f"long as the median {of}({1000.0 * seconds[rank]:.1f} ms a step, median "
        f"{1000.0 * medians[rank]:.1f} ms)"
        for rank in slow[:4]
    )
    return f"straggler: {shown}" + (f", and {len(slow) - 4} more" if len(slow) > 4 else "")


class StragglerReport:
    """Compare ranks at every log line: one gather of a number.

    Args:
        clock: of this rank.
        world: all ranks.
        device: where the run computes.
        factor: how many medians make a rank slow.
        host_of: returns a rank's machine.
        say: shows one line.
        record: keeps, by rank, its seconds a step and the median's.
        alike: ranks that compute the same; None is all.
    """

    def __init__(
        self,
        clock: WaitClock,
        world: Group,
        *,
        device: torch.device,
        factor: float,
        host_of: Callable[[int], str],
        say: Callable[[str], None],
        record: Callable[[dict[str, list[float]]], None],
        alike: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._alike, self._record = alike, record
        self._clock, self._world, self._device, self._factor = clock, world, device, factor
        self._host_of, self._say = host_of, say

    def __call__(self) -> None:
        """Compare the ranks' times since the last call; every rank calls it."""
        own = torch.tensor(
            [self._clock.compute_seconds()], dtype=torch.float64, device=self._device
        )
        seconds = all_gather(own, self._world).tolist()
        if text := straggler_text(seconds, self._factor, self._host_of, alike=self._alike):
            self._say(text)
            medians = slow_ranks(seconds, self._factor, alike=self._alike)
            self._record({str(rank): [seconds[rank], middle] for rank, middle in medians.items()})
