# SPDX-License-Identifier: Apache-2.0
"""Signals while the main thread is inside a call that never returns to Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron.cli.errors import ExitCode
from megatron.training.fault_tolerance.stopping import signals_to_thread

PROGRAM = """
import ctypes, os, time
from megatron.training.fault_tolerance.stopping import signals_to_thread
def react(number):
    {reaction}
free = ctypes.CDLL(None)
with signals_to_thread(react, lambda: None) as_listener:
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    free.pthread_mutex_lock(mutex)
    free.pthread_mutex_lock(mutex)  # never returns
"""


def _start(reaction: str, *, program: str = PROGRAM, **streams) -> subprocess.Popen:
    job = subprocess.Popen(
        [
            sys.executable,
            "-c",
            program.replace("as_listener", "as listener").format(reaction=reaction),
        ],
        stdout=subprocess.PIPE,
        text=True,
        **streams,
    )
    assert job.stdout.readline() == "ready\n"
    return job


@pytest.mark.parametrize("sent_signal", [signal.SIGTERM, signal.SIGINT])
def test_thread_reacts_while_the_main_thread_is_stuck(sent_signal):
    job = _start("print(number, flush=True); os._exit(7)")
    start = time.monotonic()
    job.send_signal(sent_signal)
    out, _ = job.communicate(timeout=20)
    assert time.monotonic() - start < 10
    assert (job.returncode, out) == (7, f"{int(sent_signal)}\n")


def test_termination_grace_applies_and_second_signal_preempts():
    job = _start("print(number, flush=True); return 0.2 if number else (os._exit(7) or None)")
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=20)
    assert (job.returncode, out) == (7, "15\nNone\n")
    job = _start("print(number, flush=True); return 60.0 if number == 15 else os._exit(7)")
    job.send_signal(signal.SIGTERM)
    assert job.stdout.readline() == "15\n"
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=20)
    assert (job.returncode, out) == (7, "2\n")


@pytest.mark.parametrize(
    ("sent_signal", "code"),
    [(signal.SIGTERM, ExitCode.TERMINATED), (signal.SIGINT, ExitCode.INTERRUPTED)],
)
def test_failing_reaction_still_ends_the_process(sent_signal, code):
    job = _start("1 / 0", stderr=subprocess.DEVNULL)
    job.send_signal(sent_signal)
    job.communicate(timeout=20)
    assert job.returncode == code


@pytest.mark.parametrize("extra_signal", [signal.SIGUSR1, signal.SIGUSR2])
def test_additional_signal_can_be_registered(extra_signal):
    program = PROGRAM.replace(
        "as_listener:", f"as listener:\n    listener.listen_to({int(extra_signal)})"
    )
    job = _start("os._exit(number)", program=program)
    job.send_signal(extra_signal)
    job.communicate(timeout=20)
    assert job.returncode == extra_signal


@pytest.mark.parametrize("ignored", [False, True])
def test_program_under_nohup_keeps_ignoring_sighup(ignored):
    def set_sighup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    job = _start("os._exit(number)", preexec_fn=set_sighup)
    job.send_signal(signal.SIGHUP)
    if ignored:
        job.send_signal(signal.SIGTERM)
    job.communicate(timeout=20)
    assert job.returncode == (signal.SIGTERM if ignored else signal.SIGHUP)


def test_signal_handlers_are_restored_on_exit():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    reactions = []

    def on_main() -> None:
        reactions.append("main")

    with signals_to_thread(reactions.append, on_main):
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while len(reactions) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sorted(map(str, reactions)) == ["15", "main"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
