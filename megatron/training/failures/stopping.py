# SPDX-License-Identifier: Apache-2.0
"""When a run stops early: a signal, its time limit, or the end of its launcher.

All ranks stop after the same step. A rank that is asked to stop votes for it in its next step,
whose reduction of the loss carries the votes of all ranks. So every rank learns of it in the same
step, and a save only ever starts when all of them have. A signal handler saves nothing: the
launcher also sends SIGTERM to the survivors when a rank has died, and a save by some of the ranks
would wait for it.

SIGTERM, SIGHUP and Ctrl-C reach a thread at once, even while the main thread waits inside a
collective; so does the news that the launcher is gone. A Python signal handler only runs when the
main thread returns from such a call. But the interpreter's own handler, in C, writes the signal's
number to a file descriptor without delay, and a thread reads that.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from megatron.cli.errors import ExitCode

if TYPE_CHECKING:
    from megatron.training.failures.peers import Diagnosis, PeerWatch

#: Signals that ask a process to end, with the exit code of ending at once.
ENDING = {
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGUSR1: ExitCode.USER_SIGNAL_1,
    signal.SIGUSR2: ExitCode.USER_SIGNAL_2,
}

#: Signals that are handled by default.
ALWAYS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: Used instead of a signal number: the launcher has ended.
LAUNCHER_GONE = 0

#: Told a signal's number, or None when the time is up that it asked for; returns that time in
#: seconds, None for no end.
React = Callable[[int | None], float | None]


class Listener:
    """Receives signals on a thread.

    Args:
        react: called on the thread. If it raises, the process ends with the signal's code: a
            reaction that fails must not make a process immortal.
        on_main: called on the main thread after a signal, as soon as that thread runs Python; may
            raise there.
    """

    def __init__(self, react: React, on_main: Callable[[], None]) -> None:
        self._on_main = on_main
        self._before: dict[int, signal._HANDLER] = {}
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        self._thread = threading.Thread(
            target=_listen, args=(self._receiver, react), name="signals", daemon=True
        )
        for number in ALWAYS:
            # Who starts a program with nohup wants it to outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self.listen_to(number)
        self._old = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def listen_to(self, number: signal.Signals) -> None:
        """Handle one more signal. The main thread calls this."""
        if number not in self._before:
            self._before[number] = signal.signal(number, lambda *_: self._on_main())
        # Restart interrupted system calls, because libraries may not handle EINTR.
        signal.siginterrupt(number, False)

    def tell(self, number: int) -> None:
        """Have the thread react to something that is no signal; any thread calls this."""
        with contextlib.suppress(OSError):  # it has been closed
            self._sender.send(bytes([number]))

    def close(self) -> None:
        """Restore the previous signal handlers."""
        signal.set_wakeup_fd(self._old)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._sender.close()
        self._thread.join(timeout=5.0)
        self._receiver.close()


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


def _listen(receiver: socket.socket, react: React) -> None:
    """Pass every signal to `react` until the sender is closed."""
    limit: float | None = None
    number = int(signal.SIGTERM)
    try:
        while True:
            ready, _, _ = select.select([receiver], [], [], limit)
            if not ready:
                limit = react(None)
                continue
            numbers = receiver.recv(64)
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


#: How long to look for a rank that has died when a signal arrives, in seconds: it says whether the
#: launcher ends a job that has failed or somebody one that is well.
DIAGNOSIS_SECONDS = 0.3

#: Signals within this time of the first one are the same request, in seconds: a scheduler may send
#: SIGTERM to the launcher and to its processes, and the launcher passes its own on to them.
SAME_SECONDS = 1.0

#: Time between two such looks while a step is being finished, in seconds.
LOOK_SECONDS = 1.0

#: How long the main thread may take to unwind after Ctrl-C, in seconds.
UNWIND_SECONDS = 1.0

#: Before any save has been timed, this part of --exit-duration-in-mins is kept for one.
UNTIMED_SAVE = 0.05


class StopRequests:
    """Collects requests to stop the run and handles signals.

    Signals arrive on a thread (`react`), everything else is called by the main thread.

    Args:
        say: prints a line, once for all ranks that want to print it.
        end: ends the process with an exit code, at once.
        now: a monotonic clock, seconds; the process is taken to begin here.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        end: Callable[[int], object] = os._exit,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._end, self._now = say, end, now
        self._begun = now()
        self.watch: PeerWatch | None = None
        """Who of the other ranks lives; None for a single process, and before they have met."""
        self._grace: float | None = None  # None: a signal ends the process at once
        self._limit: float | None = None
        self._number: int | None = None  # of the first signal that has arrived
        self._signalled = False  # whether that, or one after it, is more than the launcher's end
        self._first = self._deadline = 0.0
        self._interrupts_main = self._echoed = False
        self._launcher: str | None = None  # what is gone of it
        self.wake: Callable[[int], object] = lambda number: None
        """Has the thread that reacts to signals react to a number."""
        self.code = ExitCode.OK
        """With what a process ends that has stopped in order."""
        self._longest: dict[str, float] = {}

    # --- what the loop reports and asks -----------------------------------------------------------

    def arm(self, *, grace_seconds: float | None, limit_seconds: float | None) -> None:
        """From here on the run can stop with a save.

        Args:
            grace_seconds: how long that may take after a signal; None ends it at once instead.
            limit_seconds: after the process began, when the run must have ended; None for no limit.
        """
        self._grace, self._limit = grace_seconds, limit_seconds

    def note(self, kind: Literal["step", "save", "validation"], seconds: float) -> None:
        """Record a duration; the maximum decays by 10 % per call."""
        self._longest[kind] = max(seconds, 0.9 * self._longest.get(kind, 0.0))

    def votes(self) -> tuple[float, float, float]:
        """Return this rank's control flags, which are summed over all ranks: (signal received, time
        limit reached, launcher ended)."""
        asks = self._number is not None and self._grace is not None  # else it ends at once
        gone = asks and self._number == LAUNCHER_GONE
        return float(asks), float(self._time_is_up()), float(gone)

    def _time_is_up(self) -> bool:
        """Return whether the run might end too late if it goes on after this step.

        It could then validate, save, take one more step and save again; and the vote is taken
        within a step, the rest of which is to come.
        """
        if self._limit is None:
            return False
        save = self._longest.get("save", 0.5 * UNTIMED_SAVE * self._limit)
        reserve = 2.0 * (self._longest.get("step", 0.0) + save)
        reserve += self._longest.get("validation", 0.0)
        return self._now() - self._begun + 1.1 * reserve >= self._limit

    @staticmethod
    def reason(sums: Sequence[float]) -> str | None:
        """Say why the run stops after this step, the same on every rank; None if it goes on."""
        if not sums:
            return None
        signals, times, launchers = sums
        if launchers:
            return "the launcher is gone"
        if signals:
            return "a signal asks"
        return "--exit-duration-in-mins asks" if times else None

    def stopped(self, sums: Sequence[float]) -> None:
        """Note for what reason the run has stopped in order."""
        if sums and sums[2]:
            self.code = ExitCode.LAUNCHER_LOST

    # --- what a signal does -----------------------------------------------------------------------

    def react(self, number: int | None) -> float | None:
        """React to a signal, or to the end of the time that the last call returned."""
        if number is None:
            return self._look()
        if self._interrupts_main and not self._echoed:
            self._echoed = True  # Ctrl-C as it was passed on to the main thread
            return UNWIND_SECONDS
        if number == LAUNCHER_GONE and self._number is not None:
            return LOOK_SECONDS  # it had been asked to end, and has been killed since
        if self._signalled:
            if self._now() < self._first + SAME_SECONDS:
                return LOOK_SECONDS
            return self._leave_at_once()
        self._first, self._signalled = self._now(), number != LAUNCHER_GONE
        if self._number is not None:
            return LOOK_SECONDS  # a signal asks for what is under way
        self._number = number
        self._deadline = self._first + (self._grace or 0.0)
        if diagnosis := self._diagnose():
            return self._give_up(diagnosis)
        if number == LAUNCHER_GONE:
            return self._outlive()
        name = signal.Signals(number).name
        if self._grace is not None:
            self._say(f"{name}: stopping after this step with a save; a second one ends at once")
            return LOOK_SECONDS
        if number == signal.SIGINT:
            # A terminal has to be restored, which the main thread does while it unwinds.
            self._interrupts_main = True
            _thread.interrupt_main(signal.SIGINT)
            return UNWIND_SECONDS
        self._say(f"ended by {name}")
        return self._leave_at_once()

    def lose_launcher(self, text: str) -> None:
        """Record that the launcher has ended; any thread may call this.

        Args:
            text: what is gone.
        """
        if self._launcher is None:
            self._launcher = text
            self.wake(LAUNCHER_GONE)

    def _outlive(self) -> float | None:
        """Stop because nobody is left who could start this process again."""
        if self._grace is None:
            self._say(f"{self._launcher}: ended at once, with nothing to save")
            return self._leave_at_once()
        self._say(f"{self._launcher}: stopping after this step with a save")
        return LOOK_SECONDS

    def on_main(self) -> None:
        """Raise KeyboardInterrupt on the main thread if that is how the process shall end."""
        if self._interrupts_main:
            raise KeyboardInterrupt

    def _look(self) -> float | None:
        """End the process if stopping with a save can no longer succeed."""
        if self._interrupts_main:
            self._say("interrupted")
            return self._leave_at_once()
        if diagnosis := self._diagnose():
            return self._give_up(diagnosis)
        if self._now() < self._deadline:
            return LOOK_SECONDS
        self._say(
            f"no end within --exit-grace-seconds {self._grace:g}: ended at once; "
            "earlier checkpoints are whole"
        )
        return self._leave_at_once()

    def _diagnose(self) -> Diagnosis | None:
        return None if self.watch is None else self.watch.diagnose(DIAGNOSIS_SECONDS)

    def _give_up(self, found: Diagnosis) -> None:
        """End the process because another rank is gone."""
        if self.watch is not None:
            self.watch.leave_evidence(found.text, is_reported=found.is_reported)
        self._tell(found)
        self._leave_at_once()

    def lose(self, found: Diagnosis) -> None:
        """End the process because another rank is gone, without a signal that asks for it."""
        self._tell(found)
        self._end(ExitCode.PEER_LOST)

    def _tell(self, found: Diagnosis) -> None:
        """Say which rank is gone, unless it has done so itself."""
        if not found.is_reported:
            pointer = "" if self.watch is None else self.watch.pointer
            self._say(f"{found.text}; this run cannot go on{pointer}")

    def _leave_at_once(self) -> None:
        assert self._number is not None
        self._end(code_of(self._number))
