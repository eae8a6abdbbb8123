# SPDX-License-Identifier: Apache-2.0
"""The trainer's end of a writer process: start it, give it orders, notice its death."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.writer_process import receive, send

#: How long a new writer may take to say that it is there, in seconds: it imports little.
START_SECONDS = 60.0


class WriterProcess:
    """A child that writes shards (`writer_process`), started again after it has died.

    A kernel ends the child together with the thread that started it, so all calls come from one
    thread, that of the saver, but for `kill`.

    Args:
        memory_fd: shared memory that holds the shard.
        root: folder of all checkpoints.
        timeout_seconds: after which a writer that gives no sign of life is killed.
        niceness: how far it steps back behind the trainer, 0 to 19.
    """

    def __init__(
        self, memory_fd: int, root: Path, *, timeout_seconds: float, niceness: int
    ) -> None:
        self._memory_fd, self._root = memory_fd, root
        self._timeout_seconds, self._niceness = timeout_seconds, niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._ended = False
        self.starts = 0
        """How many have been started."""

    @property
    def pid(self) -> int | None:
        """The child's process, None if there is none."""
        return None if self._process is None else self._process.pid

    def ensure(self) -> bool:
        """Start a writer if there is none. Returns whether one was started.

        Raises:
            CheckpointError: it cannot be started, or shall not be.
        """
        if self._ended:
            raise CheckpointError("the run is ending: nothing is saved any more")
        if self._process is not None and self._process.poll() is None:
            return False
        self.close()
        ours, theirs = socket.socketpair()
        # Its modules are found where this process has found them, without its main module.
        call = (
            f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
            "from megatron.core.dist_checkpointing.writer_process import main; "
            f"main({theirs.fileno()}, {self._memory_fd}, {str(self._root)!r}, "
            f"niceness={self._niceness})"
        )
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", call],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self._memory_fd),
                )
            self._end = ours
            self.starts += 1
            self._answer(START_SECONDS, "start")
        except OSError as error:
            raise CheckpointError(f"cannot start a writer process: {error.strerror}") from error
        return True

    def call(self, do: str, **arguments: Any) -> Any:
        """Return what an order results in.

        Raises:
            CheckpointError: it failed, or the writer died or gave no answer.
        """
        assert self._end is not None, "ensure() comes first"
        try:
            send(self._end, {"do": do, "with": arguments})
        except OSError:
            raise CheckpointError(self._death(do)) from None
        return self._answer(self._timeout_seconds, do)

    def _answer(self, seconds: float, do: str) -> Any:
        assert self._end is not None
        self._end.settimeout(seconds)
        try:
            while "beat" in (answer := receive(self._end)):
                pass  # a slow disk is no dead one
        except TimeoutError:
            pid = self.pid
            self.close()
            raise CheckpointError(
                f"the writer process {pid} gave no sign of life for {seconds:g} s in {do!r} and "
                "was ended"
            ) from None
        except (OSError, EOFError):
            raise CheckpointError(self._death(do)) from None
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return answer["value"]

    def end_of_last(self) -> str | None:
        """Say how the writer ended if it has since its last order; None if it has not."""
        if self._process is None or self._process.poll() is None:
            return None
        return self._death(None)

    def _death(self, do: str | None) -> str:
        """Say how the writer ended, during an order or between two."""
        assert self._process is not None
        pid, code = self._process.pid, self._process.wait()
        self.close()
        how = f"with code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-code).name}"
        when = "between saves" if do is None else f"during {do!r}"
        return f"the writer process {pid} was ended {how} {when}"

    def kill(self) -> None:
        """End the writer at once and for good, from any thread: the order under way fails."""
        self._ended = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the writer, whatever it is doing."""
        if self._end is not None:
            self._end.close()
            self._end = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.0 if self._process.poll() is not None else 1.0)
            if self._process.poll() is None:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5.0)  # one that hangs in the kernel ends when that lets go
            self._process = None
