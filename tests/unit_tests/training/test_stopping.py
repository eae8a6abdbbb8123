# SPDX-License-Identifier: Apache-2.0
"""When a process wants to stop and what it does about signals, with a clock that the test moves."""

from __future__ import annotations

import signal

import pytest

from megatron.cli.errors import ExitCode
from megatron.training.failures.peers import Diagnosis
from megatron.training.failures.stopping import LAUNCHER_LOST, StopRequests

TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)


class Ended(Exception):
    """The process would have ended."""


class Watch:
    """Peers as the test wants them."""

    found: Diagnosis | None = None
    stacks = pointer = ""

    def diagnose(self, limit_seconds: float) -> Diagnosis | None:
        return self.found

    def write_diagnostics(self, reason: str, *, is_reported: bool) -> None:
        self.stacks = reason


class Process:
    """A process whose clock, peers and end the test sees."""

    def __init__(self, *, grace: float | None = 20.0, limit: float | None = None) -> None:
        self.time, self.said, self.watch = 100.0, [], Watch()
        self.stop = StopRequests(self.said.append, end=self._end, now=lambda: self.time)
        self.stop.watch = self.watch
        self.stop.wake = self.stop.react
        self.stop.arm(grace_seconds=grace, limit_seconds=limit)

    def _end(self, code: int) -> None:
        raise Ended(code)

    def ends(self, number: int | None) -> int:
        """Return the code with which the process ends on a signal."""
        with pytest.raises(Ended) as caught:
            self.stop.react(number)
        return caught.value.args[0]


def test_one_vote_of_any_rank_stops_and_says_why():
    assert StopRequests.reason(()) is None
    assert StopRequests.reason((0.0, 0.0, 0.0)) is None
    assert StopRequests.reason((1.0, 0.0, 0.0)) == "a signal asks"
    assert StopRequests.reason((3.0, 1.0, 0.0)) == "a signal asks"
    assert StopRequests.reason((0.0, 2.0, 0.0)) == "--exit-duration-in-mins asks"
    assert StopRequests.reason((2.0, 1.0, 1.0)) == "the launcher is gone"


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_signal_is_voted_for_and_a_second_one_ends_at_once(number):
    process = Process()
    assert process.stop.control_flags() == (0.0, 0.0, 0.0)
    assert process.stop.react(number) is not None
    assert process.stop.control_flags() == (1.0, 0.0, 0.0)
    assert len(process.said) == 1
    assert "a second one ends at once" in process.said[0]
    process.time += 0.9
    assert process.stop.react(TERM) is not None, "the launcher passes on what it got too"
    process.time += 0.2
    # Whatever the second one is, the first one was the reason.
    assert process.ends(TERM) == (ExitCode.TERMINATED if number == TERM else ExitCode.INTERRUPTED)


def test_grace_period_is_enforced():
    process = Process(grace=20.0)
    process.stop.react(TERM)
    process.time += 19.0
    assert process.stop.react(None) is not None
    process.time += 2.0
    assert process.ends(None) == ExitCode.TERMINATED
    assert "no end within --exit-grace-seconds 20" in process.said[-1]


def test_without_orderly_stopping_sigterm_ends_at_once():
    process = Process(grace=None)
    assert process.ends(TERM) == ExitCode.TERMINATED
    assert process.said == ["ended by SIGTERM"]


@pytest.mark.parametrize("told", [False, True])
def test_a_job_that_has_failed_is_not_saved(told):
    process = Process()
    process.watch.found = Diagnosis("rank 3 is dead", is_reported=told)
    assert process.ends(TERM) == ExitCode.TERMINATED
    assert process.said == ([] if told else ["rank 3 is dead; this run cannot go on"])
    assert process.watch.stacks == "rank 3 is dead"


def test_a_rank_that_dies_while_a_step_is_finished_ends_the_wait():
    process = Process()
    process.stop.react(TERM)
    process.watch.found = Diagnosis("rank 3 is dead")
    assert process.ends(None) == ExitCode.TERMINATED


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


def test_the_longest_step_fades():
    process = Process(limit=1000.0)
    process.stop.note("save", 0.0)
    process.stop.note("step", 100.0)
    for _ in range(50):
        process.stop.note("step", 1.0)
    process.time = 100.0 + 990.0
    assert process.stop.control_flags() == (0.0, 0.0, 0.0)


def test_without_a_limit_time_is_never_up():
    process = Process()
    process.time += 1e9
    assert process.stop.control_flags() == (0.0, 0.0, 0.0)


def test_a_lost_rank_ends_the_process_without_a_signal():
    process = Process()
    with pytest.raises(Ended):
        process.stop.lose(Diagnosis("rank 3 is dead"))
    assert process.said == ["rank 3 is dead; this run cannot go on"]


def test_lost_launcher_sets_stop_flag_and_is_reported_once():
    process = Process()
    process.stop.on_launcher_lost("process 7 is gone")
    process.stop.on_launcher_lost("its store is gone")
    assert process.stop.control_flags() == (1.0, 0.0, 1.0)
    (line,) = process.said
    assert line.startswith("process 7 is gone")
    process.stop.stopped((2.0, 0.0, 1.0))
    assert process.stop.code == ExitCode.LAUNCHER_LOST


def test_a_lost_launcher_ends_what_has_nothing_to_save():
    process = Process(grace=None)
    with pytest.raises(Ended) as caught:
        process.stop.on_launcher_lost("process 7 is gone")
    assert caught.value.args == (ExitCode.LAUNCHER_LOST,)


def test_a_signal_after_the_launchers_end_asks_for_the_same_stop():
    process = Process()
    process.stop.on_launcher_lost("process 7 is gone")
    process.time += 5.0
    assert process.stop.react(TERM) is not None, "a scheduler ends what is left"
    assert process.stop.control_flags() == (1.0, 0.0, 1.0)
    process.time += 5.0
    assert process.ends(TERM) == ExitCode.LAUNCHER_LOST


def test_launcher_death_during_shutdown_changes_nothing():
    process = Process()
    process.stop.react(TERM)
    process.time += 5.0
    process.stop.on_launcher_lost("process 7 is gone")
    assert process.stop.react(LAUNCHER_LOST) is not None
    assert process.stop.control_flags() == (1.0, 0.0, 0.0)
    assert process.ends(TERM) == ExitCode.TERMINATED


def test_a_save_without_a_launcher_that_takes_too_long_ends():
    process = Process(grace=20.0)
    process.stop.on_launcher_lost("process 7 is gone")
    process.time += 21.0
    assert process.ends(None) == ExitCode.LAUNCHER_LOST
