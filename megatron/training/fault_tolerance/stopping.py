# SPDX-License-Identifier: Apache-2.0
"""Early stops of a run: a signal, its time limit, or the end of its launcher.

All ranks stop after the same step. A rank with a stop request sets a control flag in its next step,
and the reduction of the loss also sums the control flags of all ranks. So all ranks learn of the
request in the same step, and a save starts on all of them. A signal handler never saves: the
launcher also sends SIGTERM to the surviving ranks when a rank has died, and a save by some of the
ranks would wait for the dead rank.

SIGTERM, SIGHUP and Ctrl-C reach a thread at once, even while the main thread waits inside a
collective; so does the loss of the launcher. A Python signal handler runs only when the main thread
returns from such a call. But the interpreter's C handler writes the signal's number to a file
descriptor without delay, and the thread reads this descriptor.
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
    from megatron.training.fault_tolerance.peers import Diagnosis, PeerWatch

#: Exit codes of ending at once, by the signal that asks a process to end.
EXIT_CODES = {
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGUSR1: ExitCode.USER_SIGNAL_1,
    signal.SIGUSR2: ExitCode.USER_SIGNAL_2,
}

#: Signals that are handled by default.
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: Pseudo signal number for the end of the launcher.
LAUNCHER_LOST = 0

#: Called with a signal's number, or with None after the timeout that its last call returned.
#: Returns the next timeout in seconds, None for no timeout.
React = Callable[[int | None], float | None]


class Listener:
    """Receives signals on a thread.

    Args:
        react: called on the thread. If it raises, the process ends with the signal's exit code, so
            that a failing reaction cannot keep the process alive.
        on_main: called on the main thread after a signal, as soon as the main thread runs Python;
            it may raise.
    """

    def __init__(self, react: React, on_main: Callable[[], None]) -> None:
        self._on_main = on_main
        self._old_handlers: dict[int, signal._HANDLER] = {}
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        self._thread = threading.Thread(
            target=_listen, args=(self._receiver, react), name="signals", daemon=True
        )
        for number in DEFAULT_SIGNALS:
            # nohup ignores SIGHUP, so that the program outlives the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self.listen_to(number)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def listen_to(self, number: signal.Signals) -> None:
        """Handle one more signal. Only the main thread may call this."""
        if number not in self._old_handlers:
            self._old_handlers[number] = signal.signal(number, lambda *_: self._on_main())
        # Restart interrupted system calls, because libraries may not handle EINTR.
        signal.siginterrupt(number, False)

    def notify(self, number: int) -> None:
        """Pass a pseudo signal number to the thread; any thread may call this."""
        with contextlib.suppress(OSError):  # the listener is closed
            self._sender.send(bytes([number]))

    def close(self) -> None:
        """Restore the previous signal handlers."""
        signal.set_wakeup_fd(self._old_wakeup_fd)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._sender.close()
        self._thread.join(timeout=5.0)
        self._receiver.close()


@contextlib.contextmanager
def signals_to_thread(react: React, on_main: Callable[[], None]) -> Iterator[Listener | None]:
    """Handle signals on a thread while the context is open; see `Listener`.

    Outside the main thread Python cannot install signal handlers, and the context does nothing.
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
    timeout: float | None = None
    number = int(signal.SIGTERM)
    try:
        while True:
            ready, _, _ = select.select([receiver], [], [], timeout)
            if not ready:
                timeout = react(None)
                continue
            numbers = receiver.recv(64)
            if not numbers:
                return
            for number in numbers:
                if number == LAUNCHER_LOST or number in EXIT_CODES:
                    timeout = react(number)
    except BaseException:
        os._exit(exit_code_of(number))


def exit_code_of(number: int) -> ExitCode:
    """Return the exit code of ending at once."""
    if number == LAUNCHER_LOST:
        return ExitCode.LAUNCHER_LOST
    return EXIT_CODES[signal.Signals(number)]


#: Seconds to look for a dead rank when a signal arrives. It distinguishes a launcher that ends a
#: failed job from a user or scheduler that ends a sound one.
DIAGNOSIS_SECONDS = 0.3

#: Signals within this many seconds of the first signal are the same request: a scheduler may send
#: SIGTERM to the launcher and to its processes, and the launcher forwards its signal to them.
REPEAT_SECONDS = 1.0

#: Seconds between two checks for a dead rank while the last step is in progress.
POLL_SECONDS = 1.0

#: Seconds that the main thread may take to unwind after Ctrl-C.
UNWIND_SECONDS = 1.0

#: Before any save has been timed, this fraction of --exit-duration-in-mins is reserved for one.
UNTIMED_SAVE = 0.05


class StopRequests:
    """Collects requests to stop the run and handles signals.

    Signals arrive on a thread (`react`); the main thread calls all other methods.

    Args:
        say: prints a line, once if several ranks print the same line.
        end: ends the process at once with an exit code.
        now: a monotonic clock, seconds; the time limit counts from this call.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        end: Callable[[int], object] = os._exit,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._end, self._now = say, end, now
        self._start_time = now()
        self.watch: PeerWatch | None = None
        """Monitors the other ranks; None for a single process, and before ranks have connected."""
        self._grace_seconds: float | None = None  # None: a signal ends the process at once
        self._limit: float | None = None
        self._signal: int | None = None  # the first signal
        self._signalled = False  # whether any signal, not only the launcher's end, arrived
        self._first_time = self._deadline = 0.0
        self._interrupts_main = self._echoed = False
        self._launcher: str | None = None  # text about the lost launcher
        self.wake: Callable[[int], object] = lambda number: None
        """Passes a pseudo signal number to the signal thread."""
        self.code = ExitCode.OK
        """Exit code of the process after an orderly stop."""
        self._max_seconds: dict[str, float] = {}

    # --- what the loop reports and asks -----------------------------------------------------------

    def arm(self, *, grace_seconds: float | None, limit_seconds: float | None) -> None:
        """Enable stopping with a save.

        Args:
            grace_seconds: time limit of a stop after a signal; None ends the process at once.
            limit_seconds: time limit of the run, from the start of the process; None: no limit.
        """
        self._grace_seconds, self._limit = grace_seconds, limit_seconds

    def note(self, kind: Literal["step", "save", "validation"], seconds: float) -> None:
        """Record a duration; the maximum decays by 10 % per call."""
        self._max_seconds[kind] = max(seconds, 0.9 * self._max_seconds.get(kind, 0.0))

    def control_flags(self) -> tuple[float, float, float]:
        """Return this rank's control flags, which are summed over all ranks: (signal received, time
        limit reached, launcher ended)."""
        is_signalled = (
            self._signal is not None and self._grace_seconds is not None
        )  # else the process ends at once
        launcher_lost = is_signalled and self._signal == LAUNCHER_LOST
        return float(is_signalled), float(self._time_is_up()), float(launcher_lost)

    def _time_is_up(self) -> bool:
        """Return whether the run might exceed its time limit if it continues after this step.

        It could then validate, save, take one more step and save again. The flag is evaluated
        during a step, so the remainder of that step counts as well.
        """
        if self._limit is None:
            return False
        save = self._max_seconds.get("save", 0.5 * UNTIMED_SAVE * self._limit)
        reserve = 2.0 * (self._max_seconds.get("step", 0.0) + save)
        reserve += self._max_seconds.get("validation", 0.0)
        return self._now() - self._start_time + 1.1 * reserve >= self._limit

    @staticmethod
    def reason(flags: Sequence[float]) -> str | None:
        """Return why the run stops after this step, equal on all ranks; None if it continues."""
        if not flags:
            return None
        signals, times, launchers = flags
        if launchers:
            return "the launcher is gone"
        if signals:
            return "a signal asks"
        return "--exit-duration-in-mins asks" if times else None

    def stopped(self, flags: Sequence[float]) -> None:
        """Set the exit code of an orderly stop from the summed control flags."""
        if flags and flags[2]:
            self.code = ExitCode.LAUNCHER_LOST

    # --- what a signal does -----------------------------------------------------------------------

    def react(self, number: int | None) -> float | None:
        """Handle a signal, or None after the timeout that the last call returned."""
        if number is None:
            return self._poll()
        if self._interrupts_main and not self._echoed:
            self._echoed = True  # the SIGINT that interrupt_main sent
            return UNWIND_SECONDS
        if number == LAUNCHER_LOST and self._signal is not None:
            return POLL_SECONDS  # the launcher was asked to end and then killed
        if self._signalled:
            if self._now() < self._first_time + REPEAT_SECONDS:
                return POLL_SECONDS
            return self._exit_now()
        self._first_time, self._signalled = self._now(), number != LAUNCHER_LOST
        if self._signal is not None:
            return POLL_SECONDS  # a stop is already in progress
        self._signal = number
        self._deadline = self._first_time + (self._grace_seconds or 0.0)
        if diagnosis := self._diagnose():
            return self._exit_for_peer(diagnosis)
        if number == LAUNCHER_LOST:
            return self._stop_without_launcher()
        name = signal.Signals(number).name
        if self._grace_seconds is not None:
            self._say(
                f"{name}: stopping after this step with a save; a second signal ends "
                "the run at once"
            )
            return POLL_SECONDS
        if number == signal.SIGINT:
            # The main thread restores the terminal while it unwinds.
            self._interrupts_main = True
            _thread.interrupt_main(signal.SIGINT)
            return UNWIND_SECONDS
        self._say(f"ended by {name}")
        return self._exit_now()

    def on_launcher_lost(self, text: str) -> None:
        """Record that the launcher has ended; any thread may call this.

        Args:
            text: a description of the lost launcher.
        """
        if self._launcher is None:
            self._launcher = text
            self.wake(LAUNCHER_LOST)

    def _stop_without_launcher(self) -> float | None:
        """Stop because no launcher could restart this process."""
        if self._grace_seconds is None:
            self._say(f"{self._launcher}: exiting at once, with nothing to save")
            return self._exit_now()
        self._say(f"{self._launcher}: stopping after this step with a save")
        return POLL_SECONDS

    def on_main(self) -> None:
        """Raise KeyboardInterrupt on the main thread if Ctrl-C ends the process."""
        if self._interrupts_main:
            raise KeyboardInterrupt

    def _poll(self) -> float | None:
        """End the process if stopping with a save can no longer succeed."""
        if self._interrupts_main:
            self._say("interrupted")
            return self._exit_now()
        if diagnosis := self._diagnose():
            return self._exit_for_peer(diagnosis)
        if self._now() < self._deadline:
            return POLL_SECONDS
        self._say(
            f"the run did not end within --exit-grace-seconds {self._grace_seconds:g}: "
            "exiting at once; earlier checkpoints are complete"
        )
        return self._exit_now()

    def _diagnose(self) -> Diagnosis | None:
        return None if self.watch is None else self.watch.diagnose(DIAGNOSIS_SECONDS)

    def _exit_for_peer(self, diagnosis: Diagnosis) -> None:
        """End the process because another rank is gone."""
        if self.watch is not None:
            self.watch.write_diagnostics(diagnosis.text, is_reported=diagnosis.is_reported)
        self._report(diagnosis)
        self._exit_now()

    def lose(self, diagnosis: Diagnosis) -> None:
        """End the process because another rank is gone, without a signal."""
        self._report(diagnosis)
        self._end(ExitCode.PEER_LOST)

    def _report(self, diagnosis: Diagnosis) -> None:
        """Report which rank is gone, unless that rank has reported it."""
        if not diagnosis.is_reported:
            pointer = "" if self.watch is None else self.watch.pointer
            self._say(f"{diagnosis.text}; this run cannot continue{pointer}")

    def _exit_now(self) -> None:
        assert self._signal is not None
        self._end(exit_code_of(self._signal))
