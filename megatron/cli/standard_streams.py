# SPDX-License-Identifier: Apache-2.0
"""Handle broken stdout and stderr: a closed pipe (`| head`), a full disk, a closed stream (`>&-`).

Training and a server continue without them: their output is informational and decides no exit code.
A command that is run for its output exits when stdout breaks.
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
from typing import NoReturn, TextIO, cast

from megatron.cli.errors import OutputLost

#: Called with a stream's name and error, at its first failure.
Broken = Callable[[str, OSError], None]


class GuardedFile(io.RawIOBase):
    """A file descriptor whose writes do not fail: data that cannot be written are dropped.

    Every write is tried, as a full disk may have space later; a closed pipe is not retried.

    Args:
        fd: descriptor to write to; None for a stream that was closed before this process started.
        name: name of the stream.
        broken: called at the first failure; may raise, and the write then raises the same.
    """

    def __init__(self, fd: int | None, name: str, broken: Broken) -> None:
        super().__init__()
        self._fd, self._name, self._broken = fd, name, broken
        self.error: OSError | None = None
        """The first error of a write; None if there was none."""
        self._gone = False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Write as much as possible; return the number of bytes written or dropped."""
        if self._gone:
            return len(data)
        try:
            if self._fd is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return os.write(self._fd, data)
        except BlockingIOError:  # another process has made the terminal non-blocking
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
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor. Raises OSError if there is none."""
        if self._fd is None:
            raise io.UnsupportedOperation("fileno")
        return self._fd

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return self._fd is not None and os.isatty(self._fd)


def _hold_descriptors() -> set[int]:
    """Open the standard descriptors that are closed, and return them. Otherwise the next open file
    would get the descriptor of stdout, and libraries would print into it."""
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
    """Return a text stream on a descriptor, whose failures call `broken`.

    Args:
        closed: whether the descriptor was closed before this process started.
        like: stream whose encoding is used.
    """
    raw = GuardedFile(None if closed else fd, name, broken)
    return io.TextIOWrapper(
        io.BufferedWriter(cast("io.RawIOBase", raw)),
        encoding=like.encoding if like is not None else "utf-8",
        errors=(like.errors if like is not None else None) or "backslashreplace",
        line_buffering=fd == 2 or raw.isatty(),
    )


def _need_no_temporary_folder() -> None:
    """Let this process start where no file can be written, on a full disk or under a file size
    limit: torch looks for a temporary folder when it imports its compiler, and would fail."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        tempfile.tempdir = os.environ.get("TMPDIR", "/tmp")


def guard_streams(broken_stdout: Broken, broken_stderr: Broken) -> None:
    """Replace stdout and stderr by guarded streams that call the given functions when they
    break."""
    closed = _hold_descriptors()
    _need_no_temporary_folder()
    for fd, name, broken in ((1, "stdout", broken_stdout), (2, "stderr", broken_stderr)):
        like = getattr(sys, name)
        if like is not None:
            like.flush()
        setattr(sys, name, guarded(fd, name, broken, closed=fd in closed, like=like))


def errors_of_streams() -> dict[str, OSError]:
    """Return the errors of broken streams, by name."""
    errors = {}
    for name in ("stdout", "stderr"):
        raw = getattr(getattr(getattr(sys, name), "buffer", None), "raw", None)
        if isinstance(raw, GuardedFile) and raw.error is not None:
            errors[name] = raw.error
    return errors


def go_on_without_streams(prog: str) -> None:
    """Let this process continue when a stream breaks, and report it on the other one.

    Args:
        prog: prefix of the line.
    """

    def broken(name: str, error: OSError) -> None:
        # Not through the other Python stream: it may be the one whose write failed here.
        other_fd = 1 if name == "stderr" else 2
        text = f"{prog}: {name} cannot be written ({error.strerror}): continuing without it\n"
        with contextlib.suppress(OSError):
            os.write(other_fd, text.encode())

    guard_streams(broken, broken)


def run_command(command: Callable[[], int]) -> NoReturn:
    """Run a command that is useless without its stdout, and exit with its code.

    Args:
        command: runs an entry point with `run_entry_point`.
    """

    def broken(name: str, error: OSError) -> None:
        raise OutputLost(error)

    guard_streams(broken, lambda name, error: None)
    sys.exit(command())
