# SPDX-License-Identifier: Apache-2.0
"""Read limits: exceeding a limit, or refusing in more than one line, is a fault."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pytest

from tests.support.read_limits import (
    ReadCost,
    ReadLimits,
    check_read,
    measure_read,
    read_faults,
    stored_bytes,
)

LIMITS = ReadLimits(cpu_seconds=0.5, memory_bytes=64_000_000, file_bytes=0)


def _refuse() -> int:
    print("reader: error: x.bin has 9 dimensions", file=sys.stderr)
    return 2


def _compute() -> int:
    begin = time.process_time()
    while time.process_time() - begin < 0.6:
        pass
    return 0


def _allocate() -> int:
    return len(b"x" * 100_000_000) - 100_000_000


def _two_lines() -> int:
    return _refuse() and _refuse()


def _past_python() -> int:
    os.write(2, b"thread panicked\n")
    return _refuse()


def _raise() -> int:
    raise KeyError("x")


@pytest.fixture(scope="module")
def trivial() -> ReadCost:
    return measure_read(lambda: 0)


def test_limits_grow_with_the_file() -> None:
    limits = ReadLimits.of(100_000_000, metadata_bytes=1000)
    assert (limits.cpu_seconds, limits.memory_bytes) == (12.0, 64_008_000)


def test_read_and_refusal_are_within_limits(trivial: ReadCost) -> None:
    check_read(lambda: 0, limits=LIMITS, trivial=trivial)
    check_read(_refuse, limits=LIMITS, trivial=trivial, refused=("x.bin", "9"))
    with pytest.raises(AssertionError, match="instead of 2"):
        check_read(lambda: 0, limits=LIMITS, trivial=trivial, refused=())
    with pytest.raises(AssertionError, match="not in"):
        check_read(_refuse, limits=LIMITS, trivial=trivial, refused=("y.bin",))


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (_compute, "s of CPU time"),
        (_allocate, "bytes above a trivial file's"),
        (_two_lines, "no exit code and one line"),
        (_past_python, "panicked"),
        (_raise, "KeyError"),
        (lambda: os.kill(os.getpid(), 6), "SIGABRT"),
        (lambda: os._exit(0), "ended with exit code 0"),
    ],
    ids=["cpu", "memory", "two lines", "past Python", "traceback", "signal", "exit"],
)
def test_every_exceeded_limit_is_a_fault(read: Callable[[], int], fault: str) -> None:
    # A fork begins with the resident memory of this process, which tests before may have released
    # since a fixture measured it: compare with a trivial read measured now.
    trivial = measure_read(lambda: 0, LIMITS)
    (message,) = read_faults(measure_read(read, LIMITS), LIMITS, trivial)
    assert fault in message


def test_holes_of_sparse_files_are_not_counted(tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    with (tmp_path / "b").open("wb") as file:
        file.truncate(1 << 30)
    assert stored_bytes(tmp_path) == 10_000
