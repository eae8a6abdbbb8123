# SPDX-License-Identifier: Apache-2.0
"""The device of a rank: choice, streams, events, graphs, pinned memory, memory; no-ops on a CPU.

Code above this file never asks "is there CUDA?": on a CPU a stream is a `NullStream`, everything is
already in order, and an event only keeps the time.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

_Result = TypeVar("_Result")


class NullStream:
    """Stand in for a CUDA stream where work runs in program order: every wait is already over."""

    def wait_stream(self, stream: Stream) -> None:
        """Wait for nothing."""

    def wait_event(self, event: Event) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""


class NullEvent:
    """Stand in for a CUDA event: done as soon as it is recorded."""

    _seconds: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Note the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Return True: work on a CPU has always completed."""
        return True

    def elapsed_time(self, end: NullEvent) -> float:
        """Return the milliseconds from this record to `end`'s; RuntimeError if one is missing."""
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("elapsed_time needs both events recorded")
        return (end._seconds - self._seconds) * 1e3


# On one device all streams and events are of one kind, which a union would not say.
Stream: TypeAlias = "torch.cuda.Stream"
Event: TypeAlias = "torch.cuda.Event"


class WorkQueue:
    """Run functions one after another while the caller continues; each enqueues work on a device.

    On a GPU the stream is the queue: functions run in the caller and return before the device is
    done. On a CPU a thread runs them; torch releases the GIL while an operation computes.

    Args:
        device: the device that the functions use.
        in_thread: on a CPU, run in a thread; otherwise a function is done when `submit` returns.
    """

    def __init__(self, device: torch.device, *, in_thread: bool) -> None:
        self._device, self._pool = device, None
        self._runs_ahead = runs_ahead(device)
        if in_thread and not self._runs_ahead:
            self._pool = ThreadPoolExecutor(1, "work-queue")

    def submit(self, function: Callable[[], _Result]) -> Work[_Result]:
        """Run a function after those before it."""
        if self._pool is not None:
            # With the caller's number of threads: a new thread would use torch's default.
            threads = torch.get_num_threads()
            return Work(self._pool.submit(_on_threads, threads, function), None)
        future: Future[_Result] = Future()
        future.set_result(function())
        if not self._runs_ahead:
            return Work(future, None)
        event = new_event(self._device)
        event.record()
        return Work(future, event)


def _on_threads(threads: int, function: Callable[[], _Result]) -> _Result:
    torch.set_num_threads(threads)
    return function()


class Work(Generic[_Result]):
    """A handle of a function that a `WorkQueue` runs.

    Args:
        future: result of the function.
        event: end of the work that the function enqueues; None if it enqueues none.
    """

    def __init__(self, future: Future[_Result], event: Event | None) -> None:
        self._future, self._event = future, event

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._future.done() and (self._event is None or self._event.query())

    def result(self) -> _Result:
        """Wait for the function and the device; return the function's result or raise its error."""
        value = self._future.result()
        if self._event is not None:
            self._event.synchronize()
        return value


class Recorder(Protocol):
    """Records work and replays it on the same addresses."""

    def capture(self, run: Callable[[], None]) -> None:
        """Record the work that `run` enqueues; a GPU does not execute it during the recording."""

    def replay(self) -> None:
        """Replay the recorded work on the current stream."""


class GraphMemory:
    """A memory pool that several CUDA graphs share: each graph overwrites the memory of the others.

    So two graphs must not run at the same time, and the outputs of a replay must be read or copied
    before another replay. torch frees a pool with its last graph; graphs that are captured later
    get a new pool.

    The graphs are also captured on one stream, because torch keeps a cuBLAS workspace for every
    stream with a matmul, 32 MiB on Hopper.
    """

    def __init__(self) -> None:
        self._pool: tuple[int, int] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._recorders: weakref.WeakSet[CudaRecorder] = weakref.WeakSet()

    def pool_for(self, recorder: CudaRecorder) -> Any:
        """Return the pool that a recorder captures in; its type is private to torch."""
        if self._pool is None or not self._recorders:
            self._pool = torch.cuda.graph_pool_handle()
        self._recorders.add(recorder)
        return self._pool

    def stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream that recorders capture on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


class CudaRecorder:
    """Capture GPU work once as a CUDA graph and launch it again in one call.

    Other threads, which read data or watch NCCL, continue to call the driver, so capture restricts
    only this thread. A graph whose recording failed cannot be used again.

    Args:
        device: a GPU.
        option: the option that enables graphs, for errors.
        memory: the pool shared with other graphs; None: a pool of its own.

    Raises:
        ValueError: the device is no GPU.
    """

    def __init__(
        self, device: torch.device, option: str, *, memory: GraphMemory | None = None
    ) -> None:
        if device.type != "cuda":
            raise ValueError(f"{option} needs a GPU, but this run uses {device.type}: leave it out")
        self._graph = torch.cuda.CUDAGraph()
        self._memory = memory or GraphMemory()
        self._stream = self._memory.stream_on(device)

    def capture(self, run: Callable[[], None]) -> None:
        """Record the work that `run` enqueues, without executing it."""
        failures: list[BaseException] = []
        context = torch.cuda.graph(
            self._graph,
            pool=self._memory.pool_for(self),
            stream=self._stream,
            capture_error_mode="thread_local",
        )
        try:
            with context:
                try:
                    run()
                except BaseException as error:
                    failures.append(error)
                    raise
        except Exception as error:
            # Ending a failed capture raises a second, less specific error.
            if failures and failures[0] is not error:
                raise failures[0] from error
            raise

    def replay(self) -> None:
        """Replay the recorded work on the current stream."""
        self._graph.replay()


def choose_device(name: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> torch.device:
    """Return the device of this rank and make it current.

    Args:
        name: "auto" takes a GPU if torch sees one.
        local_rank: index of this rank on its machine, and of its GPU.

    Raises:
        ValueError: an unknown name, or a GPU that does not exist.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}: use auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device cuda was requested, but torch sees no GPU: use cpu or auto")
    count = torch.cuda.device_count()
    if not 0 <= local_rank < count:
        raise ValueError(
            f"local rank {local_rank} needs GPU {local_rank}, but this machine has {count}: "
            f"start at most {count} processes per machine"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def runs_ahead(device: torch.device) -> bool:
    """Return whether the host continues before the device has completed enqueued work."""
    return device.type == "cuda"


def new_stream(device: torch.device, *, priority: int = 0) -> Stream:
    """Create a stream in addition to the default stream; a lower `priority` number runs earlier."""
    if device.type == "cuda":
        return torch.cuda.Stream(device, priority)
    return cast("Stream", NullStream())


def current_stream(device: torch.device) -> Stream:
    """Return the stream on which work is enqueued now."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    return cast("Stream", NullStream())


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Enqueue the work of the block on `stream`."""
    if isinstance(stream, NullStream):
        yield
    else:
        with torch.cuda.stream(stream):
            yield


def new_event(device: torch.device, *, timing: bool = False) -> Event:
    """Make an event; with `timing`, `start.elapsed_time(end)` gives milliseconds."""
    if device.type == "cuda":
        return torch.cuda.Event(enable_timing=timing)
    return cast("Event", NullEvent())


def record_use(tensor: Tensor, stream: Stream) -> None:
    """Prevent the allocator from reusing a freed tensor's memory before `stream` has run its
    current work; needed for a tensor that was allocated on another stream."""
    if not isinstance(stream, NullStream):
        tensor.record_stream(stream)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor in pinned memory, for asynchronous copies to `device`."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_host(tensor: Tensor) -> Tensor:
    """Return a pinned host copy, valid after the device's current stream is synchronized; a host
    tensor is returned unchanged."""
    if tensor.device.type == "cpu":
        return tensor
    host_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host_tensor.copy_(tensor, non_blocking=True)


class HostCopy:
    """Host copies of tensors, whose device memory is freed until `restore`.

    Args:
        tensors: the tensors; other references to them remain valid, but must not be used before
            `restore`, after which their memory has another address.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): (t.untyped_storage(), t) for t in tensors}
        self._copies = []
        for storage, tensor in storages.values():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            copy = whole.clone() if tensor.device.type == "cpu" else to_host(whole)
            self._copies.append((storage, tensor.device, copy))
        for device in {device for _, device, _ in self._copies if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        for storage, _, _ in self._copies:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.numel() for _, _, copy in self._copies)

    def restore(self) -> None:
        """Allocate the tensors' memory again and restore their content."""
        for storage, device, copy in self._copies:
            storage.resize_(copy.numel())
            whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            whole.copy_(copy, non_blocking=True)


def give_back_memory(device: torch.device) -> None:
    """Release unused GPU memory from torch's cache, so that other processes can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def pin_in_place(tensor: Tensor) -> None:
    """Pin a CPU tensor's existing memory, so that GPUs can copy to it asynchronously."""
    size = tensor.numel() * tensor.itemsize
    cudart = torch.cuda.cudart()
    assert cudart is not None
    error = cudart.cudaHostRegister(tensor.data_ptr(), size, 0)
    if int(error) != 0:
        raise RuntimeError(f"CUDA refuses to pin {size} bytes of memory (error {int(error)})")


def unpin_in_place(tensor: Tensor) -> None:
    """Undo `pin_in_place`; call it before the memory is freed."""
    cudart = torch.cuda.cudart()
    assert cudart is not None
    cudart.cudaHostUnregister(tensor.data_ptr())


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held so far: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not ru_maxrss: on Linux a new program inherits the peak of the process that started it.
    peak = _process_bytes("VmHWM")
    if peak is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_bytes(device: torch.device) -> int:
    """Return the memory held now: allocated on a GPU, resident in this process on a CPU (the
    peak, where the current size is unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _process_bytes("VmRSS") or peak_memory_bytes(device)


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the host memory that new allocations can use on Linux; None elsewhere.

    Args:
        meminfo: the kernel's estimate for the machine.
        cgroup: folder of the limit and the usage of this process' control group.
    """
    available = _field_bytes(meminfo, "MemAvailable")
    try:
        limit, usage = (
            int((cgroup / name).read_text(encoding="utf-8"))
            for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # no control group, or "max"
        return available
    return max(limit - usage, 0) if available is None else max(min(available, limit - usage), 0)


def _process_bytes(field: str) -> int | None:
    """Return a field of Linux's /proc/self/status, in bytes; None on other systems."""
    return _field_bytes(Path("/proc/self/status"), field)


def _field_bytes(path: Path, field: str) -> int | None:
    """Return a field that Linux states in kB, in bytes; None without the file or the field."""
    if not path.exists():
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def cpu_vendor(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the vendor of the CPU as Linux names it, such as AuthenticAMD; "" elsewhere."""
    if not info.exists():
        return ""
    _, _, text_after = info.read_text(encoding="utf-8").partition("vendor_id")
    return text_after.split("\n")[0].partition(":")[2].strip()
