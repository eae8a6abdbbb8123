# SPDX-License-Identifier: Apache-2.0
"""stdout and stderr that break: told once, and dropped or raised."""

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
    """The writing end of a pipe that nobody reads."""
    theirs, ours = os.pipe()
    os.close(theirs)
    yield ours
    os.close(ours)


def _stream(fd, told, *, closed=False):
    def broken(name, error):
        told.append((name, error.errno))

    return guarded(fd, "stdout", broken, closed=closed, like=sys.__stdout__)


def test_full_disk_is_reported_once_and_writing_resumes(full, tmp_path):
    told = []
    stream = _stream(full, told)
    for _ in range(3):
        print("x" * 10_000, file=stream, flush=True)
    assert told == [("stdout", errno.ENOSPC)]
    with (tmp_path / "file").open("w") as room:
        os.dup2(room.fileno(), full)
        print("room", file=stream, flush=True)
    assert (tmp_path / "file").read_text() == "room\n"


def test_closed_reader_is_reported_once(pipe, monkeypatch):
    told = []
    stream = _stream(pipe, told)
    for _ in range(3):
        print("x", file=stream, flush=True)
    assert told == [("stdout", errno.EPIPE)]
    monkeypatch.setattr("sys.stdout", stream)
    assert {name: error.errno for name, error in errors_of_streams().items()} == {
        "stdout": errno.EPIPE
    }


@pytest.mark.parametrize(
    ("where", "code", "says"),
    [("pipe", ExitCode.OUTPUT_CLOSED, False), ("full", ExitCode.USER_ERROR, True)],
)
def test_a_command_ends_without_a_traceback(where, code, says, request, monkeypatch, capsys):
    def broken(name, error):
        raise OutputLost(error)

    stream = guarded(
        request.getfixturevalue(where), "stdout", broken, closed=False, like=sys.__stdout__
    )
    monkeypatch.setattr("sys.stdout", stream)
    found = run_entry_point(lambda: print("numbers"), prog="tool")
    monkeypatch.undo()
    assert found == code
    err = capsys.readouterr().err
    assert bool(err) == says
    assert "Traceback" not in err
    if says:
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


def test_no_file_takes_the_place_of_a_closed_stdout(tmp_path):
    program = CLOSED.format(path=str(tmp_path / "file"))
    shell = 'exec "$0" -c "$1" >&-'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, program], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode > 2
    assert (tmp_path / "file").read_text() == "file"
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("tool: stdout ")


NOWHERE_TO_WRITE = """
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
def test_a_program_starts_where_no_file_can_be_written(start, tmp_path):
    """torch asks for a temporary folder when it imports its compiler."""
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-c", NOWHERE_TO_WRITE.format(start=start)], stderr=log, check=False
        )
    assert done.returncode == 7
