# SPDX-License-Identifier: Apache-2.0
"""SIGTERM while the main thread is inside a call that never returns to Python."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from megatron.training.exit_codes import ExitCode

PROGRAM = """
import ctypes, threading
from megatron.training.termination import block_sigterm, exit_on_sigterm
block_sigterm()
threading.Thread(target=lambda: ctypes.CDLL(None).sleep(60), daemon=True).start()
exit_on_sigterm(lambda: {text})
print("ready", flush=True)
while True:
    ctypes.CDLL(None).sleep(60)
"""


@pytest.mark.parametrize(("text", "said"), [("'rank 1 is dead'", "rank 1 is dead\n"), ("None", "")])
def test_the_process_ends_at_once_and_says_why(text, said):
    job = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(text=text)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout.readline() == "ready\n"
    start = time.monotonic()
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=20)
    assert time.monotonic() - start < 10
    assert (job.returncode, err) == (ExitCode.TERMINATED, said)


def test_an_explanation_that_fails_does_not_keep_the_process():
    program = PROGRAM.format(text="1 / 0")
    job = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=20)
    assert job.returncode == ExitCode.TERMINATED
