# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C reach a thread at once, even while the main thread waits inside a collective.

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
ENDING = {signal.SIGTERM: ExitCode.TERMINATED, signal.SIGINT: ExitCode.INTERRUPTED}

#: Told a signal's number, or None when the time is up that it asked for; returns that time in
#: seconds, None for no end.
React = Callable[[int | None], float | None]


@contextlib.contextmanager
def signals_to_thread(react: React, on_main: Callable[[], None]) -> Iterator[None]:
    """Let a thread react to SIGTERM and Ctrl-C while the context is open.

    Outside of the main thread, where signals cannot be had, the context does nothing.

    Args:
        react: called on the thread. If it raises, the process ends with the signal's code: a
            reaction that fails must not make a process immortal.
        on_main: called on the main thread after a signal, as soon as that thread runs Python; may
            raise there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    # Systems calls of libraries that know nothing of signals go on (siginterrupt).
    before = {number: signal.signal(number, lambda *_: on_main()) for number in ENDING}
    for number in ENDING:
        signal.siginterrupt(number, False)
    old = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(ours, react), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        theirs.close()
        thread.join(timeout=5.0)
        ours.close()


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
                if number in ENDING:
                    limit = react(number)
    except BaseException:
        os._exit(ENDING[signal.Signals(number)])
