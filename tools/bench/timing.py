# SPDX-License-Identifier: Apache-2.0
"""Calls that take turns on a GPU, timed by CUDA events with cold caches.

Before each call a buffer larger than the L2 cache is written, which evicts the inputs, and the
device is kept busy until the host has launched the call. So the events time the device, not the
host. The order rotates; a ratio is the median of the ratios of all rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]
#: More than the second-level cache of any current device.
FLUSH_BYTES = 256 << 20
#: What a spinning device counts in a second, about; too much only takes time.
CYCLES_PER_SECOND = 2e9
#: Of the host's time for a call: margin, and the least.
HOST_MARGIN, HOST_SECONDS = 1.5, 2e-4


class Stopwatch:
    """Times calls on a device; on a CPU by the wall clock, which shows that everything runs.

    Args:
        device: of the calls.
        rounds: timed turns of each call.
        warmup: untimed turns before, which compile.
    """

    def __init__(self, device: torch.device, *, rounds: int = 10, warmup: int = 3) -> None:
        self.device, self.rounds, self.warmup = device, rounds, warmup
        self.on_gpu = device.type == "cuda"
        size = FLUSH_BYTES if self.on_gpu else 1
        self._cache = torch.empty(size, dtype=torch.int8, device=device)

    def race(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Return the seconds of each round of each call."""
        host = {name: self._host_seconds(call) for name, call in calls.items()}
        names, timings = list(calls), {name: [] for name in calls}
        for index in range(self.rounds):
            turn = index % len(names)
            for name in (*names[turn:], *names[:turn]):
                timings[name].append(self._once(calls[name], host[name]))
        return {name: [self._seconds(mark) for mark in marks] for name, marks in timings.items()}

    def _host_seconds(self, call: Call) -> float:
        """Warm up; return how long the host takes to hand a call over."""
        elapsed = HOST_SECONDS
        for _ in range(self.warmup):
            self.wait()
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
        self.wait()
        return elapsed

    def _once(self, call: Call, host_seconds: float) -> tuple:
        """Run a call once; return what `_seconds` reads, when the device is done with it."""
        self._cache.zero_()
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return start, time.perf_counter()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        busy = HOST_MARGIN * max(host_seconds, HOST_SECONDS)
        torch.cuda._sleep(int(busy * CYCLES_PER_SECOND))
        begin.record()
        call()
        end.record()
        # What a call leaves behind would else be freed and taken again while others run.
        end.synchronize()
        return begin, end

    def _seconds(self, mark: tuple) -> float:
        begin, end = mark
        return begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def ratio_of(mcore: list[float], peer: list[float]) -> float:
    """Return how many times faster `mcore` is, in the median round."""
    return statistics.median(b / a for a, b in zip(mcore, peer, strict=True))


def measured_rates(watch: Stopwatch, dtype: torch.dtype) -> dict[str, float]:
    """Return the device's copy and matmul rates per second, which define the roofline."""
    tiny = watch.rounds == 1
    elements, side = (1 << 29, 8192) if watch.on_gpu else (1 << 12, 32) if tiny else (1 << 24, 1024)
    source = torch.empty(elements, dtype=dtype, device=watch.device).normal_()
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, device=watch.device).to(dtype) for _ in range(2))
    timings = watch.race({"copy": lambda: target.copy_(source), "product": lambda: left @ right})
    return {
        "copy_bytes_per_second": 2 * source.nbytes / statistics.median(timings["copy"]),
        "matmul_flops": 2 * side**3 / statistics.median(timings["product"]),
    }
