# SPDX-License-Identifier: Apache-2.0
"""Stop requests of a process and its reactions to signals, with a clock that the test moves."""

from __future__ import annotations

import signal

import pytest

from megatron.cli.errors import ExitCode
from megatron.training.fault_tolerance.peers import Diagnosis
from megatron.training.fault_tolerance.stopping import LAUNCHER_LOST, StopRequests

TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)


class ProcessExited(Exception):
    """Raised instead of ending the process."""


class FakePeerWatch:
    """A PeerWatch with a diagnosis set by the test."""

    diagnosis: Diagnosis | None = None
    stacks = pointer = ""

    def diagnose(self, limit_seconds: float) -> Diagnosis | None:
        return self.diagnosis

    def write_diagnostics(self, reason: str, *, is_reported: bool) -> None:
        self.stacks = reason


class Process:
    """A process whose clock, peers and exit the test controls."""

    def __init__(self, *, grace: float | None = 20.0, limit: float | None = None) -> None:
        self.time, self.messages, self.watch = 100.0, [], FakePeerWatch()
        self.stop = StopRequests(self.messages.append, end=self._end, now=lambda: self.time)
        self.stop.watch = self.watch
        self.stop.wake = self.stop.react
        self.stop.arm(grace_seconds=grace, limit_seconds=limit)

    def _end(self, code: int) -> None:
        raise ProcessExited(code)

    def exit_code(self, signal_number: int | None) -> int:
        """Return the exit code of the process after a signal."""
        with pytest.raises(ProcessExited) as caught:
            self.stop.react(signal_number)
        return caught.value.args[0]


def test_flag_of_any_rank_gives_the_stop_reason():
    assert StopRequests.reason(()) is None
    assert StopRequests.reason((0.0, 0.0, 0.0)) is None
    assert StopRequests.reason((1.0, 0.0, 0.0)) == "a signal asks"
    assert StopRequests.reason((3.0, 1.0, 0.0)) == "a signal asks"
    assert StopRequests.reason((0.0, 2.0, 0.0)) == "--exit-duration-in-mins asks"
    assert StopRequests.reason((2.0, 1.0, 1.0)) == "the launcher is gone"


@pytest.mark.parametrize("signal_number", [TERM, INT])
def test_signal_sets_stop_flag_and_second_signal_exits(signal_number):
    process = Process()
    assert process.stop.control_flags() == (0.0, 0.0, 0.0)
    assert process.stop.react(signal_number) is not None
    assert process.stop.control_flags() == (1.0, 0.0, 0.0)
    assert len(process.messages) == 1
    assert "a second signal ends the run at once" in process.messages[0]
    process.time += 0.9
    assert process.stop.react(TERM) is not None, "the launcher forwards its signal as well"
    process.time += 0.2
    # The exit code follows from the first signal, whatever the second signal is.
    assert process.exit_code(TERM) == (
        ExitCode.TERMINATED if signal_number == TERM else ExitCode.INTERRUPTED
    )


def test_grace_period_is_enforced():
    process = Process(grace=20.0)
    process.stop.react(TERM)
    process.time += 19.0
    assert process.stop.react(None) is not None
    process.time += 2.0
    assert process.exit_code(None) == ExitCode.TERMINATED
    assert "the run did not end within --exit-grace-seconds 20" in process.messages[-1]


def test_sigterm_exits_at_once_without_a_grace_period():
    process = Process(grace=None)
    assert process.exit_code(TERM) == ExitCode.TERMINATED
    assert process.messages == ["ended by SIGTERM"]


@pytest.mark.parametrize("is_reported", [False, True])
def test_failed_job_exits_without_saving(is_reported):
    process = Process()
    process.watch.diagnosis = Diagnosis("rank 3 is dead", is_reported=is_reported)
    assert process.exit_code(TERM) == ExitCode.TERMINATED
    assert process.messages == ([] if is_reported else ["rank 3 is dead; this run cannot continue"])
    assert process.watch.stacks == "rank 3 is dead"


def test_rank_death_during_the_last_step_ends_the_wait():
    process = Process()
    process.stop.react(TERM)
    process.watch.diagnosis = Diagnosis("rank 3 is dead")
    assert process.exit_code(None) == ExitCode.TERMINATED


def test_time_is_reserved_for_two_steps_saves_and_validation():
    process = Process(limit=1000.0)
    for kind, seconds in (("step", 10.0), ("save", 40.0), ("validation", 30.0)):
        process.stop.note(kind, seconds)
    reserve = 1.1 * (2 * 10.0 + 2 * 40.0 + 30.0)
    process.time = 100.0 + 1000.0 - reserve - 1.0
    assert process.stop.control_flags() == (0.0, 0.0, 0.0)
    process.time += 2.0
    assert process.stop.control_flags() == (0.0, 1.0, 0.0)


def test_time_is_reserved_for_the_first_save():
    process = Process(limit=1000.0)
    process.time = 100.0 + 940.0
    assert process.stop.control_flags() == (0.0, 0.0, 0.0)
    process.time += 10.0
    assert process.stop.control_flags() == (0.0, 1.0, 0.0)


def test_longest_step_estimate_decays():
    process = Process(limit=1000.0)
    process.stop.note("save", 0.0)
    process.stop.note("step", 100.0)
    for _ in range(50):
        process.stop.note("step", 1.0)
    process.time = 100.0 + 990.0
    assert process.stop.control_flags() == (0.0, 0.0, 0.0)


def test_run_without_a_time_limit_never_times_out():
    process = Process()
    process.time += 1e9
    assert process.stop.control_flags() == (0.0, 0.0, 0.0)


def test_a_lost_rank_ends_the_process_without_a_signal():
    process = Process()
    with pytest.raises(ProcessExited):
        process.stop.lose(Diagnosis("rank 3 is dead"))
    assert process.messages == ["rank 3 is dead; this run cannot continue"]


def test_lost_launcher_sets_stop_flag_and_is_reported_once():
    process = Process()
    process.stop.on_launcher_lost("process 7 is gone")
    process.stop.on_launcher_lost("its store is gone")
    assert process.stop.control_flags() == (1.0, 0.0, 1.0)
    (line,) = process.messages
    assert line.startswith("process 7 is gone")
    process.stop.stopped((2.0, 0.0, 1.0))
    assert process.stop.code == ExitCode.LAUNCHER_LOST


def test_lost_launcher_ends_a_process_without_grace_period():
    process = Process(grace=None)
    with pytest.raises(ProcessExited) as caught:
        process.stop.on_launcher_lost("process 7 is gone")
    assert caught.value.args == (ExitCode.LAUNCHER_LOST,)


def test_signal_after_launcher_loss_keeps_the_stop_reason():
    process = Process()
    process.stop.on_launcher_lost("process 7 is gone")
    process.time += 5.0
    assert process.stop.react(TERM) is not None, "a scheduler signals the remaining processes"
    assert process.stop.control_flags() == (1.0, 0.0, 1.0)
    process.time += 5.0
    assert process.exit_code(TERM) == ExitCode.LAUNCHER_LOST


def test_launcher_death_during_shutdown_changes_nothing():
    process = Process()
    process.stop.react(TERM)
    process.time += 5.0
    process.stop.on_launcher_lost("process 7 is gone")
    assert process.stop.react(LAUNCHER_LOST) is not None
    assert process.stop.control_flags() == (1.0, 0.0, 0.0)
    assert process.exit_code(TERM) == ExitCode.TERMINATED


def test_grace_period_limits_a_save_after_launcher_loss():
    process = Process(grace=20.0)
    process.stop.on_launcher_lost("process 7 is gone")
    process.time += 21.0
    assert process.exit_code(None) == ExitCode.LAUNCHER_LOST
