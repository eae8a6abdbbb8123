# SPDX-License-Identifier: Apache-2.0
"""Detection of the launcher of this process, and of the launcher's exit."""

from __future__ import annotations

import os
import socket
import subprocess
import threading

import pytest

from megatron.cli.launch import Launch
from megatron.training.fault_tolerance.launcher import LauncherWatch, launcher_of

ENVIRONMENT = {"TORCHELASTIC_RUN_ID": "run", "RANK": "1", "MASTER_PORT": "29500"}


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def on_lost():
    """Callback that records its texts and sets an event."""
    texts, event = [], threading.Event()

    def lose(message: str) -> None:
        texts.append(message)
        event.set()

    lose.texts, lose.event = texts, event
    return lose


def _write_process_table(proc, **parents):
    """Write a process table: the parent and the environment of each process id."""
    for name, (parent, environment) in parents.items():
        folder = proc / name.removeprefix("p")
        folder.mkdir()
        (folder / "stat").write_text(f"{folder.name} (a (b) c) S {parent} 1 1")
        text = "\0".join(f"{k}={v}" for k, v in environment.items())
        (folder / "environ").write_bytes(f"{text}\0".encode())


def test_launcher_is_the_ancestor_without_its_variables(tmp_path):
    outer = {**ENVIRONMENT, "MASTER_PORT": "1"}
    _write_process_table(tmp_path, p30=(20, ENVIRONMENT), p20=(10, outer), p10=(1, {}))
    assert launcher_of(ENVIRONMENT, 20, proc=tmp_path) == 20, (
        "a launcher within a run of another launcher"
    )
    assert launcher_of(ENVIRONMENT, 30, proc=tmp_path) == 20, "a script between the two"
    assert launcher_of(ENVIRONMENT, 40, proc=tmp_path) == 40, "no such file, as without /proc"


def test_shell_is_not_a_launcher():
    assert launcher_of({"RANK": "1", "MASTER_PORT": "29500"}, os.getppid()) is None


def test_launcher_process_exit_is_reported(sleeper, on_lost):
    watch = LauncherWatch(Launch(), sleeper.pid, on_lost)
    assert not on_lost.event.wait(0.7)
    sleeper.kill()
    assert on_lost.event.wait(10.0)
    assert f"process {sleeper.pid} " in on_lost.texts[0]
    watch.close()


def test_launcher_already_exited_is_reported(on_lost):
    gone = subprocess.Popen(["true"])
    gone.wait()
    LauncherWatch(Launch(), gone.pid, on_lost)
    assert on_lost.event.wait(10.0)


def test_store_shutdown_is_reported_and_remembered(sleeper, on_lost):
    launch = Launch(address="127.0.0.1", port=7)
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch = LauncherWatch(launch, sleeper.pid, on_lost)
        watch.watch_store(socket.create_connection(server.getsockname()))
        accepted, _ = server.accept()
        assert not on_lost.event.wait(0.7)
        assert not launch.link.is_lost()
        accepted.close()
        assert on_lost.event.wait(10.0)
    assert launch.link.is_lost()
    assert "127.0.0.1:7" in on_lost.texts[0]
    watch.close()
