# SPDX-License-Identifier: Apache-2.0
"""Detect the end of the launcher: the process that started this one, or the store it serves.

torchrun ends its processes when it receives a signal to end, but not when it is killed. They would
then run forever without anything to restart them. A process without a launcher is not affected: the
end of its shell does not end it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.cli.launch import Launch

#: Polling interval if no event wakes the thread, in seconds.
POLL_SECONDS = 0.5

#: Seconds to wait for the end of the launcher's process after its store is gone.
EXIT_SECONDS = 0.5

#: Environment variables that identify the processes of one launcher.
_LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "RANK")


def launcher_of(
    environment: Mapping[str, str], pid: int, *, proc: Path = Path("/proc")
) -> int | None:
    """Return the process id of the launcher; None if no launcher has started this process.

    The launcher sets environment variables for its children. So it is the nearest ancestor without
    them; a script between the launcher and this process inherits them.

    Args:
        environment: this process's environment variables.
        pid: the parent's process id.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    variables = {
        f"{name}={environment[name]}".encode()
        for name in _LAUNCHER_VARIABLES
        if name in environment
    }
    try:
        while pid > 1 and variables <= set((proc / str(pid) / "environ").read_bytes().split(b"\0")):
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):  # another user's process, or no /proc: take the current pid
        pass
    return pid


class LauncherWatch:
    """Waits for the end of the launcher on a thread.

    Args:
        launch: this process's launch.
        pid: the launcher's process id, None without a launcher.
        lose: called with a description of the lost process, and again for a lost store.
    """

    def __init__(self, launch: Launch, pid: int | None, lose: Callable[[str], None]) -> None:
        self._launch, self._pid, self._lose = launch, pid, lose
        self._pidfd: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        if pid is None:
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._lose(self._process_text)
            return
        except (AttributeError, OSError):  # not Linux, or an old kernel
            self._pidfd = None
        self._thread = threading.Thread(target=self._watch, name="launcher-watch", daemon=True)
        self._thread.start()

    @property
    def _process_text(self) -> str:
        return f"the launcher (process {self._pid} on {socket.gethostname()}) is gone"

    def watch_store(self, connection: socket.socket) -> None:
        """Also wait for the end of the launcher's store.

        Args:
            connection: a connection to the store's server, which carries no data.
        """
        # A crashed machine closes no connection, so TCP keepalive probes its kernel. A stopped
        # process is not lost: its kernel still answers.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 2)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setblocking(False)
        self._launch.link.connection = connection

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._launch.link.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _watch(self) -> None:
        alive, link = True, self._launch.link
        while alive or link.connection is not None:
            poller = select.poll()
            for descriptor in (self._pidfd if alive else None, link.connection):
                if descriptor is not None:
                    poller.register(descriptor, select.POLLIN)
            poller.poll(1000.0 * POLL_SECONDS)
            if self._closed.is_set():
                return
            lost = link.connection is not None and link.is_lost()
            # Report the process before its store, which other machines see as well. A killed
            # process closes its connections before it is gone.
            if alive and self._process_is_gone(EXIT_SECONDS if lost else 0.0):
                alive = False
                self._lose(self._process_text)
            if lost:
                link.close()
                address = f"{self._launch.address}:{self._launch.port}"
                self._lose(f"the launcher that serves the store at {address} is gone")

    def _process_is_gone(self, within_seconds: float) -> bool:
        assert self._pid is not None
        if self._pidfd is None:
            return process_state(self._pid) == "dead"
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(1000.0 * within_seconds))


def process_state(pid: int) -> str:
    """Return `running`, `stopped` or `dead` for a process of this machine."""
    try:
        # The state is the first word after the command's closing parenthesis.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return "dead"
        return _state_by_signal(pid)
    except (OSError, IndexError):
        return "running"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(state, "running")


def _state_by_signal(pid: int) -> str:
    """Return the state of a process on a system without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        pass
    return "running"
