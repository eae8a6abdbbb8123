# SPDX-License-Identifier: Apache-2.0
"""Launchers that a test can kill.

Like torchrun, a launcher serves or joins a store and has ranks as child processes, but it starts
them in milliseconds.

    with launched(process, *args, nodes=2, ranks=1) as job:   # process(rank, world, port, *args)
        job.wait_for_line("...")
        job.kill(1)                                           # the launcher of the second machine
        codes = job.codes(timeout=60)                         # of the ranks, None if one stays
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tests.support.ranks import FOLDER, Outcome, RankSet, start_ranks

Process = Callable[..., NoReturn]


def serve_store(ranks: int) -> tuple[dist.TCPStore, dict[str, str]]:
    """Return a store, which the caller must keep alive, and torchrun's environment for it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


#: The program's exit code for the end of its launcher.
LAUNCHER_LOST = 8


def _written(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _read(path: Path, *, unless: Callable[[], bool] = lambda: False) -> str:
    """Wait for a file and return its text. Raises TimeoutError if it does not appear."""
    deadline = time.monotonic() + 60.0
    while not path.exists():
        if unless() or time.monotonic() > deadline:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.002)
    return path.read_text()


def _be_rank(rank: int, world: int, folder: str, process: Process, args: tuple[Any, ...]) -> None:
    """Run as a child of a launcher; write the exit code to a file: the launcher may be dead."""
    os.closerange(3, 256)  # an inherited descriptor would hide the launcher's death
    log = os.open(Path(folder, f"log_{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(log, fd)
    end = os._exit

    def leave(code: int) -> NoReturn:
        with contextlib.suppress(OSError):
            _written(Path(folder, f"code_{rank}"), str(int(code)))
        end(code)

    os._exit = leave
    try:
        parent = os.getppid()
        port = _read(Path(folder, "port"), unless=lambda: os.getppid() != parent)
        process(rank, world, int(port), *args)
    except TimeoutError:  # killed before it served a store: as the program itself would end
        leave(LAUNCHER_LOST)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    leave(1)


def _launcher(node: int, nodes: int, ranks: int, process: Process, args: tuple[Any, ...]) -> None:
    """Start the ranks of one machine and wait for them; the first one serves the store."""
    folder, started = os.environ[FOLDER], {}
    for local in range(ranks):
        rank = node * ranks + local
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: they wait for this process's goodbye
            pid = os.fork()
        if not pid:
            # torch replaces the thread pool that did not survive the fork at its next use, and two
            # threads may not do so at once.
            torch.set_num_threads(torch.get_num_threads())
            _be_rank(rank, nodes * ranks, folder, process, args)
        started[pid] = rank
        _written(Path(folder, f"pid_{rank}"), str(pid))
    server = None
    if node == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _written(Path(folder, "port"), str(server.port))
    for _ in range(ranks):
        pid, status = os.wait()
        if os.WIFSIGNALED(status):
            rank = started[pid]
            _written(Path(folder, f"code_{rank}"), str(-os.WTERMSIG(status)))
    del server


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class RankProcess:
    """One rank, with the attributes of a multiprocessing process that tests use.

    Args:
        job: the job of the rank.
        rank: number of the rank.
    """

    def __init__(self, job: Launched, rank: int) -> None:
        self._job, self._rank = job, rank

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._job.pid(self._rank)

    @property
    def exitcode(self) -> int | None:
        """Return the exit code, or None if the rank runs."""
        return self._job.code(self._rank)

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        deadline = time.monotonic() + seconds
        while self.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.002)


class Launched:
    """Launchers and their ranks.

    Args:
        launchers: the processes.
        folder: folder of the ranks' logs, pids and exit codes.
        world: number of ranks.
    """

    def __init__(self, launchers: RankSet, folder: Path, world: int) -> None:
        self.launchers, self._folder, self.world = launchers, folder, world
        self.processes = [RankProcess(self, rank) for rank in range(world)]

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return int(_read(self._folder / f"pid_{rank}"))

    def kill(self, node: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the launcher of a machine."""
        self.launchers.kill(node, number)

    def log(self, rank: int) -> str:
        """Return the output of a rank so far."""
        path = self._folder / f"log_{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_line(self, rank: int, text: str, *, timeout: float = 60.0) -> None:
        """Block until a rank has printed `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.log(rank):
            assert time.monotonic() < deadline, f"never printed {text!r}:\n{self.log(rank)}"
            assert is_alive(self.pid(rank)), f"rank {rank} ended:\n{self.log(rank)}"
            time.sleep(0.005)

    def code(self, rank: int) -> int | None:
        """Return the exit code of a rank, None if it runs, -9 if its launcher died before it."""
        if is_alive(self.pid(rank)):
            return None
        node = rank * len(self.launchers.processes) // self.world
        path, process = self._folder / f"code_{rank}", self.launchers.processes[node]
        if path.exists():
            return int(path.read_text())
        if process.exitcode is None and is_alive(process.pid):
            return None  # its launcher is about to write the code
        return int(path.read_text()) if path.exists() else -signal.SIGKILL

    def outcomes(self, *, timeout: float) -> list[Outcome]:
        """Wait until all ranks have ended and return their outcomes, like `RankSet`."""
        codes = self.codes(timeout=timeout)
        return [Outcome(rank, exit_code=code) for rank, code in enumerate(codes)]

    def codes(self, *, timeout: float) -> list[int | None]:
        """Wait until all ranks have ended and return their exit codes."""
        deadline = time.monotonic() + timeout
        while None in (exit_codes := [self.code(r) for r in range(self.world)]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        return exit_codes

    def end(self) -> None:
        """Kill the remaining ranks."""
        for rank in range(self.world):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pid = int((self._folder / f"pid_{rank}").read_text())
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def launched(process: Process, *args: Any, nodes: int = 1, ranks: int = 2) -> Iterator[Launched]:
    """Start launchers with ranks; both are killed on exit.

    Args:
        process: function of each rank, called with rank, world size, the store's port and `args`;
            a module-level function that ends the process itself.
        nodes: number of launchers.
        ranks: ranks per launcher.
    """
    with start_ranks(_launcher, nodes, ranks, process, args, init=False) as launchers:
        job = Launched(launchers, Path(launchers.folder), nodes * ranks)
        try:
            yield job
        finally:
            job.end()
