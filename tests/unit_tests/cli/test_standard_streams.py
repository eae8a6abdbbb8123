# SPDX-License-Identifier: Apache-2.0
"""Broken stdout and stderr: reported once, then dropped or raised."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from megatron.cli.errors import ExitCode, OutputLost, run_entry_point
from megatron.cli.standard_streams import errors_of_streams, guarded


@pytest.fixture
def full():
    fd = os.open("/dev/full", os.O_WRONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def pipe():
    """The write end of a pipe without a reader."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    yield write_end
    os.close(write_end)


def _stream(fd, reports, *, closed=False):
    def broken(name, error):
        reports.append((name, error.errno))

    return guarded(fd, "stdout", broken, closed=closed, like=sys.__stdout__)


def test_full_disk_is_reported_once_and_writing_resumes(full, tmp_path):
    reports = []
    stream = _stream(full, reports)
    for _ in range(3):
        print("x" * 10_000, file=stream, flush=True)
    assert reports == [("stdout", errno.ENOSPC)]
    with (tmp_path / "file").open("w") as file:
        os.dup2(file.fileno(), full)
        print("room", file=stream, flush=True)
    assert (tmp_path / "file").read_text() == "room\n"


def test_closed_reader_is_reported_once(pipe, monkeypatch):
    reports = []
    stream = _stream(pipe, reports)
    for _ in range(3):
        print("x", file=stream, flush=True)
    assert reports == [("stdout", errno.EPIPE)]
    monkeypatch.setattr("sys.stdout", stream)
    assert {name: error.errno for name, error in errors_of_streams().items()} == {
        "stdout": errno.EPIPE
    }


@pytest.mark.parametrize(
    ("where", "code", "reported"),
    [("pipe", ExitCode.OUTPUT_CLOSED, False), ("full", ExitCode.USER_ERROR, True)],
)
def test_command_ends_without_traceback_when_stdout_breaks(
    where, code, reported, request, monkeypatch, capsys
):
    def broken(name, error):
        raise OutputLost(error)

    stream = guarded(
        request.getfixturevalue(where), "stdout", broken, closed=False, like=sys.__stdout__
    )
    monkeypatch.setattr("sys.stdout", stream)
    exit_code = run_entry_point(lambda: print("numbers"), prog="tool")
    monkeypatch.undo()
    assert exit_code == code
    err = capsys.readouterr().err
    assert bool(err) == reported
    assert "Traceback" not in err
    if reported:
        assert "stdout" in err


CLOSED = """
import os, sys
from megatron.cli.standard_streams import go_on_without_streams
go_on_without_streams("tool")
opened = os.open({path!r}, os.O_WRONLY | os.O_CREAT)
print("a", flush=True)
print("b", flush=True)
os.write(opened, b"file")
os._exit(opened)
"""


def test_opened_file_does_not_replace_a_closed_stdout(tmp_path):
    program = CLOSED.format(path=str(tmp_path / "file"))
    shell = 'exec "$0" -c "$1" >&-'
    completed = subprocess.run(
        ["sh", "-c", shell, sys.executable, program], stderr=subprocess.PIPE, text=True, check=False
    )
    assert completed.returncode > 2
    assert (tmp_path / "file").read_text() == "file"
    assert completed.stderr.count("\n") == 1
    assert completed.stderr.startswith("tool: stdout ")


NO_WRITABLE_FILE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from megatron.cli.standard_streams import go_on_without_streams, run_command
import tempfile
{start}
"""


@pytest.mark.parametrize(
    "start",
    [
        "go_on_without_streams('tool'); tempfile.gettempdir(); sys.exit(7)",
        "run_command(lambda: 7 if tempfile.gettempdir() else 1)",
    ],
)
def test_program_starts_when_no_file_can_be_written(start, tmp_path):
    """torch needs a temporary folder when it imports its compiler."""
    with (tmp_path / "log").open("wb") as log:
        completed = subprocess.run(
            [sys.executable, "-c", NO_WRITABLE_FILE.format(start=start)], stderr=log, check=False
        )
    assert completed.returncode == 7
