# SPDX-License-Identifier: Apache-2.0
"""stdout and stderr that break: a reader that leaves (`| head`), a full disk, closed (`>&-`).

Training and a server go on without them: no line of information decides an exit code. A command
that is only run for what it prints ends when stdout breaks.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import tempfile
from collections.abc import Callable
from typing import NoReturn, TextIO

from megatron.cli.errors import OutputLost

#: Told which stream has broken and why, at its first failure.
Broken = Callable[[str, OSError], None]


class GuardedFile(io.RawIOBase):
    """A file descriptor whose writes do not fail: what cannot be written is dropped.

    A disk that was full may have room later, so every write is tried; a reader does not come back.

    Args:
        fd: to write to; None for a stream that was closed before this process began.
        name: of the stream.
        broken: may raise, which is what the write then does.
    """

    def __init__(self, fd: int | None, name: str, broken: Broken) -> None:
        super().__init__()
        self._fd, self._name, self._broken = fd, name, broken
        self.error: OSError | None = None
        """Why the first write failed that did; None if none has."""
        self._gone = False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Write what can be written; return the size of what is done with."""
        if self._gone:
            return len(data)
        try:
            if self._fd is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return os.write(self._fd, data)
        except BlockingIOError:  # somebody else has made the terminal so
            assert self._fd is not None
            select.select([], [self._fd], [], 1.0)
            return 0
        except OSError as error:
            self._gone = error.errno in (errno.EPIPE, errno.EBADF)
            if self.error is None:
                self.error = error
                self._broken(self._name, error)
            return len(data)

    def writable(self) -> bool:
        """Return that it can be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor. Raises OSError if there is none."""
        if self._fd is None:
            raise io.UnsupportedOperation("fileno")
        return self._fd

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return self._fd is not None and os.isatty(self._fd)


def _hold_descriptors() -> set[int]:
    """Open what is closed of the three standard descriptors, and return which were: the next file
    to be opened would become stdout, and get what libraries print."""
    closed = set()
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != fd:
                os.dup2(nowhere, fd)
                os.close(nowhere)
            closed.add(fd)
    return closed


def guarded(fd: int, name: str, broken: Broken, *, closed: bool, like: TextIO | None) -> TextIO:
    """Return a stream of text on a descriptor that fails as `broken` does.

    Args:
        closed: it was, before this process began.
        like: whose encoding it takes.
    """
    raw = GuardedFile(None if closed else fd, name, broken)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=like.encoding if like is not None else "utf-8",
        errors=(like.errors if like is not None else None) or "backslashreplace",
        line_buffering=fd == 2 or raw.isatty(),
    )


def _need_no_temporary_folder() -> None:
    """Have this process start where no file can be written, on a full disk or under a limit of
    sizes: torch looks for a temporary folder when it imports its compiler, and finds none."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")


def guard_streams(broken_stdout: Broken, broken_stderr: Broken) -> None:
    """Put streams in the place of stdout and stderr that fail as one is told to."""
    closed = _hold_descriptors()
    _need_no_temporary_folder()
    for fd, name, broken in ((1, "stdout", broken_stdout), (2, "stderr", broken_stderr)):
        like = getattr(sys, name)
        if like is not None:
            like.flush()
        setattr(sys, name, guarded(fd, name, broken, closed=fd in closed, like=like))


def errors_of_streams() -> dict[str, OSError]:
    """Return why streams have broken, by name: those that have."""
    errors = {}
    for name in ("stdout", "stderr"):
        raw = getattr(getattr(getattr(sys, name), "buffer", None), "raw", None)
        if isinstance(raw, GuardedFile) and raw.error is not None:
            errors[name] = raw.error
    return errors


def go_on_without_streams(prog: str) -> None:
    """Have this process go on when a stream breaks, and say so on the other one.

    Args:
        prog: name in front of the line.
    """

    def broken(name: str, error: OSError) -> None:
        # Not by the other stream: it may be the one that waits for this write.
        other_fd = 1 if name == "stderr" else 2
        text = f"{prog}: {name} cannot be written ({error.strerror}): going on without it\n"
        with contextlib.suppress(OSError):
            os.write(other_fd, text.encode())

    guard_streams(broken, broken)


def run_command(command: Callable[[], int]) -> NoReturn:
    """Run a command that is of no use without its stdout, and end this process with its code.

    Args:
        command: runs an entry point with `run_entry_point`.
    """

    def broken(name: str, error: OSError) -> None:
        raise OutputLost(error)

    guard_streams(broken, lambda name, error: None)
    sys.exit(command())
