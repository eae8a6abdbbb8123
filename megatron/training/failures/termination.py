# SPDX-License-Identifier: Apache-2.0
"""SIGTERM, SIGHUP and Ctrl-C reach a thread at once, even while the main thread waits inside a
collective; so does the news that the launcher is gone.

A Python signal handler only runs when the main thread comes back from such a call. But the
interpreter's own handler, in C, writes the signal's number to a file descriptor without delay, and
a thread reads that.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from megatron.training.exit_codes import ExitCode

#: Signals that ask a process to end, with the exit code of ending at once.
ENDING = {
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGUSR1: ExitCode.USER_SIGNAL_1,
    signal.SIGUSR2: ExitCode.USER_SIGNAL_2,
}

#: Those of them that are listened to without being asked for.
ALWAYS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: In the place of a signal's number: the launcher is gone.
LAUNCHER_GONE = 0

#: Told a signal's number, or None when the time is up that it asked for; returns that time in
#: seconds, None for no end.
React = Callable[[int | None], float | None]


class Listener:
    """Hears signals on a thread.

    Args:
        react: called on the thread. If it raises, the process ends with the signal's code: a
            reaction that fails must not make a process immortal.
        on_main: called on the main thread after a signal, as soon as that thread runs Python; may
            raise there.
    """

    def __init__(self, react: React, on_main: Callable[[], None]) -> None:
        self._on_main = on_main
        self._before: dict[int, signal._HANDLER] = {}
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self._thread = threading.Thread(
            target=_listen, args=(self._ours, react), name="signals", daemon=True
        )
        for number in ALWAYS:
            # Who starts a program with nohup wants it to outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self.listen_to(number)
        self._old = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def listen_to(self, number: signal.Signals) -> None:
        """Hear one more signal. The main thread calls this."""
        if number not in self._before:
            self._before[number] = signal.signal(number, lambda *_: self._on_main())
        # System calls of libraries that know nothing of signals go on.
        signal.siginterrupt(number, False)

    def tell(self, number: int) -> None:
        """Have the thread react to something that is no signal; any thread calls this."""
        with contextlib.suppress(OSError):  # it has been closed
            self._theirs.send(bytes([number]))

    def close(self) -> None:
        """Leave signals as they were."""
        signal.set_wakeup_fd(self._old)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._theirs.close()
        self._thread.join(timeout=5.0)
        self._ours.close()


@contextlib.contextmanager
def signals_to_thread(react: React, on_main: Callable[[], None]) -> Iterator[Listener | None]:
    """Let a thread react to signals while the context is open; see `Listener`.

    Outside of the main thread, where signals cannot be had, the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    listener = Listener(react, on_main)
    try:
        yield listener
    finally:
        listener.close()


def _listen(ours: socket.socket, react: React) -> None:
    """Pass every signal on until the other end is closed."""
    limit: float | None = None
    number = int(signal.SIGTERM)
    try:
        while True:
            ready, _, _ = select.select([ours], [], [], limit)
            if not ready:
                limit = react(None)
                continue
            numbers = ours.recv(64)
            if not numbers:
                return
            for number in numbers:
                if number == LAUNCHER_GONE or number in ENDING:
                    limit = react(number)
    except BaseException:
        os._exit(code_of(number))


def code_of(number: int) -> ExitCode:
    """Return the exit code of ending at once."""
    if number == LAUNCHER_GONE:
        return ExitCode.LAUNCHER_LOST
    return ENDING[signal.Signals(number)]
