# SPDX-License-Identifier: Apache-2.0
"""How an entry point ends: exit codes, and one line for an error that the user can fix.

User errors are ValueErrors with a one-line message, printed once by the first rank that reports it
(`error_reports`). Any other exception is a bug and keeps its traceback.

Each rank exits with its own code; torchrun itself exits with 1 whenever any rank did not exit with
0, and shows the rank's code in its summary.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import TextIO

from megatron.cli.flags import HelpRequested

#: Takes the text of an error; its context states whether this process prints the text.
Report = Callable[[str], AbstractContextManager[bool]]


class ExitCode(IntEnum):
    """Why a process ended."""

    OK = 0
    """The run reached its end or an exit condition."""
    CRASH = 1
    """An unexpected error; a traceback was printed."""
    USER_ERROR = 2
    """Bad flag, file, layout or checkpoint; one line says what is wrong and how to fix it."""
    BAD_STEPS = 3
    """Too many consecutive steps had a NaN or Inf loss or gradient norm
    (--max-consecutive-bad-steps)."""
    PEER_LOST = 4
    """Another rank died, stopped, stopped responding or never connected; one line names it."""
    SAVE_FAILED = 5
    """A checkpoint could not be written; earlier checkpoints are untouched."""
    COLLECTIVES_DIFFER = 6
    """Ranks entered different collectives (--check-collectives); one line names both."""
    REPLICAS_DIFFER = 7
    """Replicas of weights or optimizer state differ
    (--check-weight-hash-across-dp-replicas-interval); one line names ranks and tensors, and nothing
    was saved."""
    LAUNCHER_LOST = 8
    """The launcher that started the processes, or its store, is gone (torchrun was killed): all
    ranks saved a checkpoint, if they could, and stopped. Run the same command again."""
    RESTART_ELSEWHERE = 16
    """A step was suspicious twice (--on-reproduced-fault restart): restart on other machines, where
    the same step shows whether the machine or the data is to blame. Or a rank is on a machine that
    is recorded as faulty."""
    FAILED_VALIDATION = 17
    """The recorded step is suspicious on other machines too: the data or the settings are to
    blame."""
    HUNG_UP = 129
    """SIGHUP ended the process immediately."""
    INTERRUPTED = 130
    """Ctrl-C ended the process immediately."""
    USER_SIGNAL_1 = 138
    """SIGUSR1 (--exit-signal) ended the process immediately."""
    USER_SIGNAL_2 = 140
    """SIGUSR2 (--exit-signal) ended the process immediately."""
    OUTPUT_CLOSED = 141
    """The reader of a command's stdout exited before the command was done, as in a pipe to head."""
    TERMINATED = 143
    """SIGTERM ended the process immediately."""


class RunStopped(Exception):
    """The run cannot continue, for a reason with its own exit code; the message is one line."""

    def __init__(self, code: ExitCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class PeerLost(RunStopped):
    """Another rank is lost; the message names it.

    Args:
        text: one line.
        is_reported: whether that rank has printed what happened, so that this rank need not.
    """

    def __init__(self, text: str, *, is_reported: bool = False) -> None:
        super().__init__(ExitCode.PEER_LOST, text)
        self.is_reported = is_reported


class OutputLost(RunStopped):
    """stdout cannot be written, and the program is run for its output.

    Args:
        error: error of the write. If the reader has closed the pipe, nothing is printed.
    """

    def __init__(self, error: OSError) -> None:
        self.quiet = error.errno == errno.EPIPE
        code = ExitCode.OUTPUT_CLOSED if self.quiet else ExitCode.USER_ERROR
        super().__init__(code, f"error: stdout cannot be written: {error.strerror}")


def is_communication_error(error: RuntimeError) -> bool:
    """Return whether an error comes from a collective or the store, not from a computation."""
    import torch.distributed as dist

    text = str(error).lower()
    signs = ("gloo", "nccl", "timed out", "timeout", "connection", "socket", "broken pipe")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)


_HEAD, _TAIL = 1400, 400  # characters kept of a message that is too long


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, without control characters, as an error may quote
    a file. A long message loses its middle: its end contains the fix."""
    text = "".join(c if c.isprintable() else " " for c in str(error))
    line = " ".join(text.split()) or type(error).__name__
    if len(line) > _HEAD + _TAIL:
        line = f"{line[:_HEAD]} [...] {line[-_TAIL:]}"
    return line


def run_entry_point(
    main: Callable[[], None],
    *,
    prog: str,
    report: Report = lambda text: contextlib.nullcontext(True),
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Run an entry point and return the exit code of this process.

    Args:
        main: the program.
        prog: prefix of error lines.
        report: decides whether this process prints an error; see `ErrorReports.report`.
        out, err: output streams; stdout and stderr if None.
    """
    stdout: TextIO = out or sys.stdout
    err = err or sys.stderr

    def say(text: str) -> None:
        with report(text) as prints:
            if prints:
                print(f"{prog}: {text}", file=err, flush=True)

    try:
        try:
            main()
        except HelpRequested as request:
            print(request.text, file=stdout, end="")
        stdout.flush()
    except OutputLost as lost:
        if not lost.quiet:
            say(one_line(lost))
        return lost.code
    except PeerLost as lost:
        if not lost.is_reported:
            say(one_line(lost))
        return lost.code
    except RunStopped as stop:
        say(one_line(stop))
        return stop.code
    except ValueError as error:
        say(f"error: {one_line(error)}")
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        say("interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:
        with report(one_line(error)) as prints:  # print the same error of many ranks once
            if prints:
                traceback.print_exc(file=err)
        return ExitCode.CRASH
    return ExitCode.OK
