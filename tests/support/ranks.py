# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests, forked from a server that has imported torch already.

A fresh interpreter needs seconds to import torch; a fork of a server that has done so needs
milliseconds. So every test gets fresh ranks, tests that kill a rank included, and nothing leaks
from one test to the next.

    def check(rank, world, size):         # a module-level function
        ...
        return {"loss": loss}             # plain data or tensors, copied to the parent

    losses = run_ranks(check, 4, 16)      # one value per rank, or RankFailure with the traceback

`start_ranks` is the same with the processes in the test's hands: `kill`, `wait_for_line`,
`outcomes`.

With pytest's `--device cuda` each rank has its own GPU and the group uses NCCL: a rank puts its
tensors on `rank_device()`, and returned tensors arrive on the host.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from tests.support import status_record

#: Modules that the server imports once. multiprocessing skips a name that cannot be imported.
#: `pytest` is here because the modules that define rank functions import it, in every rank.
PRELOAD = (
    "torch",
    "torch.distributed",
    "numpy",
    "pytest",
    "tests.support.ranks",
    "megatron.core.models.gpt",
    # torch imports its compiler when it is told to be deterministic, or not to be.
    "torch._dynamo",
    "torch._inductor",
    "megatron.training.pretrain_gpt",
    "megatron.training.pretraining",
    "megatron.training.distributed_context",
    "megatron.cli.flags",
    "megatron.training.fault_tolerance.restart",
    "megatron.training.fault_tolerance.hang_files",
    "megatron.core.datasets.indexed_dataset",
    "tests.functional_tests.small_run",
    "tests.parity.training",
)

Device: TypeAlias = Literal["cpu", "cuda"]

#: The default device of ranks: the value of pytest's `--device`.
DEVICES: list[Device] = ["cpu"]
#: The device of this process if it is a rank; the test's own process uses the CPU.
_RANK_DEVICES: list[torch.device] = [torch.device("cpu")]

#: The environment variable with the folder of the ranks' logs.
FOLDER = "RANKS_FOLDER"

#: How long after the first failure the other ranks may still report theirs, in seconds.
GRACE_SECONDS = 0.3


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message holds its traceback, or the stacks of all ranks."""


@dataclass(frozen=True)
class Outcome:
    """The end of one rank: with a `value`, an `error` (a traceback) or, if it died, neither.

    `at` is the time of its report; `exit_code` is negative for a signal and None while it runs.
    """

    rank: int
    value: Any = None
    error: str | None = None
    returned: bool = False
    at: float = 0.0
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The arguments of one rank process."""

    fn: Callable[..., Any]
    rank: int
    world: int
    args: tuple[Any, ...]
    folder: str
    env: Mapping[str, str]
    timeout_seconds: float
    init: bool
    device: Device


def _recorder_environment() -> dict[str, str]:
    """Return the variable that enables the layout recorder in ranks, if this process has it.

    The fork server keeps the environment of its start, so ranks do not inherit the variable.
    """
    return {k: v for k, v in os.environ.items() if k == status_record.VARIABLE}


def rank_device() -> torch.device:
    """Return the device of this rank; the CPU in the test's own process."""
    return _RANK_DEVICES[-1]


def gpu_count() -> int:
    """Return the number of GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _join(job: _Job) -> None:
    """Take this rank's device, and form the default group over the backend of such devices."""
    on_gpu = job.device == "cuda"
    if on_gpu:
        _RANK_DEVICES.append(torch.device("cuda", job.rank))
        torch.cuda.set_device(rank_device())
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(str(Path(job.folder, "store")), job.world),
        rank=job.rank,
        world_size=job.world,
        timeout=datetime.timedelta(seconds=job.timeout_seconds),
        device_id=rank_device() if on_gpu else None,
    )


class _HostPickler(pickle.Pickler):
    """Pickles GPU tensors as CPU tensors.

    Plain pickle copies tensors; multiprocessing's own pickler would share their memory with a
    process that is about to end.
    """

    def reducer_override(self, value: Any) -> Any:
        """Reduce a GPU tensor to its CPU copy."""
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            return value.detach().cpu().__reduce_ex__(2)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _HostPickler(file).dump(value)
    return file.getvalue()


def _log_path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.log")


def _leave_with_parent(conn: Connection) -> threading.Thread:
    """Return a thread that waits for the parent's goodbye, and ends this process if it is gone."""

    def listen() -> None:
        try:
            conn.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)

    thread = threading.Thread(target=listen, daemon=True, name="goodbye")
    thread.start()
    return thread


def _rank_main(job: _Job, conn: Connection) -> None:
    """Run `job.fn` as one rank and send its value or traceback to the parent."""
    log = os.open(_log_path(job.folder, job.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(log, fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    goodbye = _leave_with_parent(conn)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name need not resolve
    os.environ.update({"RANK": str(job.rank), "WORLD_SIZE": str(job.world), FOLDER: job.folder})
    os.environ.update(job.env)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    if status_record.VARIABLE in os.environ:
        status_record.install()
    try:
        if job.init:
            _join(job)
        message = _pickled((True, job.fn(job.rank, job.world, *job.args)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    conn.send_bytes(message)
    goodbye.join()  # no rank closes its sockets while another may still be reading from them
    os._exit(0)


@contextlib.contextmanager
def _anonymous_main() -> Iterator[None]:
    """Keep multiprocessing from importing the test runner's main module into every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class RankSet:
    """Running ranks, as `start_ranks` hands them out."""

    def __init__(self, jobs: list[_Job], folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self.folder = folder
        self.processes = []
        self._connections: list[Connection] = []
        self._messages: dict[int, tuple[float, bool, Any]] = {}
        with _anonymous_main():
            for job in jobs:
                parent_end, child_end = context.Pipe(duplex=True)
                process = context.Process(target=_rank_main, args=(job, child_end), daemon=True)
                process.start()
                child_end.close()
                self.processes.append(process)
                self._connections.append(parent_end)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal (SIGKILL, SIGSTOP, SIGCONT, SIGTERM …) to one rank."""
        os.kill(self.processes[rank].pid, number)

    def log(self, rank: int) -> str:
        """Return the stdout and stderr of `rank` so far."""
        path = _log_path(self.folder, rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_line(self, rank: int, text: str, *, timeout: float = 30.0) -> None:
        """Block until `rank` has printed `text`. Raises RankFailure after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while text not in self.log(rank):
            if time.monotonic() > deadline or not self.processes[rank].is_alive():
                raise RankFailure(f"rank {rank} never printed {text!r}; its log:\n{self.log(rank)}")
            time.sleep(0.01)

    def outcomes(self, *, timeout: float, stop_at_failure: bool = False) -> list[Outcome]:
        """Wait until every rank has returned, raised or died, `timeout` seconds at most.

        With `stop_at_failure` the wait ends shortly after the first rank that raised or died.
        """
        deadline = time.monotonic() + timeout
        failed = False
        while (open_ranks := self._open_ranks()) and (left := deadline - time.monotonic()) > 0:
            for ready in wait([self._connections[r] for r in open_ranks], timeout=left):
                failed |= not self._receive(self._connections.index(ready))
            if failed and stop_at_failure:
                deadline, stop_at_failure = time.monotonic() + GRACE_SECONDS, False
        outcomes = []
        for rank, process in enumerate(self.processes):
            at, returned, value = self._messages.get(rank, (time.monotonic(), False, None))
            died = rank in self._messages and not returned and value is None
            process.join(5 if died else 0)
            payload = {"value": value} if returned else {"error": value}
            outcomes.append(
                Outcome(rank, returned=returned, at=at, exit_code=process.exitcode, **payload)
            )
        return outcomes

    def values(self, *, timeout: float) -> list[Any]:
        """Return every rank's value. Raises RankFailure if one raised, died or was too slow."""
        outcomes = self.outcomes(timeout=timeout, stop_at_failure=True)
        if all(outcome.returned for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        raise RankFailure(self._explain(outcomes, timeout))

    def close(self) -> None:
        """End every rank: a goodbye message to finished ranks, SIGKILL to the others."""
        for rank, (process, conn) in enumerate(zip(self.processes, self._connections, strict=True)):
            if self._messages.get(rank, (0, False, None))[1]:
                with contextlib.suppress(OSError):
                    conn.send_bytes(b"goodbye")
            else:
                process.kill()
        for process, conn in zip(self.processes, self._connections, strict=True):
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            conn.close()
            process.close()

    def _open_ranks(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in self._messages]

    def _receive(self, rank: int) -> bool:
        """Store the message of a rank that has become readable; return whether it is a result."""
        now = time.monotonic()
        try:
            returned, value = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            returned, value = False, None
        self._messages[rank] = (now, returned, value)
        return returned

    def _explain(self, outcomes: list[Outcome], timeout: float) -> str:
        """Describe the first failure, or the stacks of all ranks if no rank failed."""
        failed = sorted(
            (o for o in outcomes if o.rank in self._messages and not o.returned), key=_blame
        )
        if not failed:
            stacks = self._stacks([o.rank for o in outcomes if not o.returned])
            return f"no end after {timeout} s; where the ranks stood:\n{stacks}"
        first_failure = failed[0]
        lines = [
            f"rank {first_failure.rank} of {len(outcomes)} failed first:",
            _described(first_failure),
        ]
        lines += [f"rank {o.rank}: {_described(o).strip().splitlines()[-1]}" for o in failed[1:]]
        if log := self.log(first_failure.rank).strip():
            lines.append(f"log of rank {first_failure.rank}:\n{log[-4000:]}")
        return "\n".join(lines)

    def _stacks(self, ranks: list[int]) -> str:
        """Make every rank write the stacks of its threads, and collect them."""
        before = {rank: len(self.log(rank)) for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                self.kill(rank, signal.SIGUSR1)
        time.sleep(0.3)
        return "\n".join(f"--- rank {rank}\n{self.log(rank)[before[rank] :]}" for rank in ranks)


def _blame(outcome: Outcome) -> tuple[bool, float]:
    """Sort key of failures: a silent death causes the errors of its peers; then by time."""
    return (outcome.error is not None, outcome.at)


def _described(outcome: Outcome) -> str:
    return outcome.error or f"died with exit code {outcome.exit_code} and no traceback"


@contextlib.contextmanager
def start_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    collective_timeout: float = 60.0,
    init: bool = True,
    device: Device | None = None,
) -> Iterator[RankSet]:
    """Start `fn(rank, world, *args)` on fresh ranks and yield them; they are ended on exit.

    Args:
        fn: a module-level function; it is found by name in the rank.
        world_size: number of ranks.
        args: pickled to every rank.
        env: environment variables of the ranks.
        collective_timeout: seconds that a collective waits for a peer before it raises.
        init: whether to form the default group.
        device: of the ranks, one GPU each; what `--device` says if None.

    Raises:
        ValueError: more ranks than GPUs.
    """
    device = device or DEVICES[-1]
    if device == "cuda" and world_size > gpu_count():
        raise ValueError(
            f"{world_size} ranks need {world_size} GPUs, and torch sees {gpu_count()}: mark the "
            f"test gpus({world_size})"
        )
    folder = tempfile.mkdtemp(prefix="ranks-")
    jobs = [
        _Job(
            fn=fn,
            rank=rank,
            world=world_size,
            args=args,
            folder=folder,
            env={**_recorder_environment(), **(env or {})},
            timeout_seconds=collective_timeout,
            init=init,
            device=device,
        )
        for rank in range(world_size)
    ]
    try:
        ranks = RankSet(jobs, folder)
        try:
            yield ranks
        finally:
            ranks.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(rank, world, *args)` on fresh ranks and return the value of each.

    Each rank has one thread, and warnings are errors in it. Raises RankFailure with the traceback
    of the rank that failed first, or with the stacks of all ranks if there is no end after
    `timeout` seconds.
    """
    with start_ranks(fn, world_size, *args, env=env, collective_timeout=2 * timeout) as ranks:
        return ranks.values(timeout=timeout)
