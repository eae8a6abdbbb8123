# SPDX-License-Identifier: Apache-2.0
"""Limits on the cost of reading a file: CPU seconds and memory as functions of the file's size.

A read is a call of an entry point in a forked process, which measures CPU time and peak memory,
including child processes. A read ends with exit code 0, or with a refusal: exactly one printable
line on stderr and another exit code. For any file content it takes at most
`10 s + size / 50 MB/s` of CPU time, and `64 MB + 8 x (headers and metadata)` more memory than the
same reader takes for a trivial file.

    trivial = measure_read(partial(checkpoint.main, ["verify", str(small)], {}))
    check_read(
        partial(checkpoint.main, ["verify", str(folder)], {}),
        limits=ReadLimits.of(stored_bytes(folder), metadata_bytes=manifest.stat().st_size),
        trivial=trivial,
        refused=("iter_0000002", "dimensions"),
    )

Modules that a reader imports on first use belong to both reads; `measure_read` of the trivial file
runs in a forked process too, so that nothing stays imported in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import json
import math
import os
import resource
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

BASE_CPU_SECONDS = 10.0
BYTES_PER_CPU_SECOND = 50_000_000
BASE_MEMORY_BYTES = 64_000_000
MEMORY_PER_METADATA_BYTE = 8
# A read that exceeds its limits is stopped, but not before the excess has been measured.
_CPU_SECONDS_TO_STOP = 2
_ADDRESS_SPACE_TO_STOP = 1 << 30
#: A pipe that is waited for takes no CPU time; a busy machine takes its time for what does.
SECONDS = 120.0
LONGEST_LINE = 2000
_NO_ARENAS = -8, 1  # M_ARENA_MAX of <malloc.h>: memory that threads reserve adds up


@dataclass(frozen=True, kw_only=True)
class ReadLimits:
    """The limits of a read.

    Args:
        cpu_seconds: CPU time, including child processes.
        memory_bytes: peak resident memory above the same reader's peak on a trivial file.
        file_bytes: size of the files; a memory mapping of a file does not count as memory.
    """

    cpu_seconds: float
    memory_bytes: int
    file_bytes: int

    @staticmethod
    def of(file_bytes: int, *, metadata_bytes: int) -> ReadLimits:
        """Return the limits for files.

        Args:
            file_bytes: size of all files that are read.
            metadata_bytes: size of all parsed content: headers, manifests, indices and
                configurations.
        """
        return ReadLimits(
            cpu_seconds=BASE_CPU_SECONDS + file_bytes / BYTES_PER_CPU_SECOND,
            memory_bytes=BASE_MEMORY_BYTES + MEMORY_PER_METADATA_BYTE * metadata_bytes,
            file_bytes=file_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class ReadCost:
    """The result of a read and its cost.

    Args:
        code: exit code; None for a traceback, a signal, or output that is not one line.
        text: the line of a refusal, or a description of a fault.
        cpu_seconds: CPU time, including child processes.
        peak_bytes: peak resident memory of the process or of a child process.
    """

    code: int | None
    text: str
    cpu_seconds: float
    peak_bytes: int


def stored_bytes(path: Path) -> int:
    """Return the bytes on disk of a file or of all files in a folder: a hole takes none."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(min(s.st_size, 512 * s.st_blocks) for s in (file.lstat() for file in files))


def measure_read(
    read: Callable[[], int], limits: ReadLimits | None = None, *, libraries_print: bool = False
) -> ReadCost:
    """Run a read in a forked process.

    Args:
        read: calls an entry point and returns its exit code.
        limits: the process is stopped slightly above the limits; None: a trivial file's limits.
        libraries_print: whether libraries may print past Python's streams.
    """
    limits = limits or ReadLimits.of(0, metadata_bytes=0)
    with tempfile.TemporaryFile() as output:
        end, child_end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other threads of the tests are idle
            pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(end)
                _serve(read, limits, output, child_end)
                code = 0
            finally:
                os._exit(code)
        os.close(child_end)
        with os.fdopen(end, "rb") as answers:
            answer = answers.read()
        _, status, usage = os.wait4(pid, 0)
        output.seek(0)
        printed = output.read().decode(errors="replace")[-3000:]
    code, text = json.loads(answer) if answer else (None, "")
    if os.WIFSIGNALED(status):
        code, text = None, f"ended by {signal.Signals(os.WTERMSIG(status)).name}: {printed}"
    elif os.WEXITSTATUS(status) or not answer:
        code, text = None, f"ended with exit code {os.WEXITSTATUS(status)}: {printed}"
    elif printed and not libraries_print:
        code, text = None, f"printed past Python's streams: {printed}"
    return ReadCost(
        code=code,
        text=text,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=1024 * usage.ru_maxrss,
    )


def _serve(read: Callable[[], int], limits: ReadLimits, output: BinaryIO, answers: int) -> None:
    """Run the read in the forked process and write the verdict to a pipe."""
    with open(os.devnull, "rb") as nothing:
        for number, stream in ((0, nothing), (1, output), (2, output)):
            os.dup2(stream.fileno(), number)
    faulthandler.disable()  # it would print the tests' stack where pytest's stderr is
    gc.freeze()  # a collection would copy the memory of all objects of the parent
    libc = ctypes.CDLL(None)
    libc.mallopt(*_NO_ARENAS)
    libc.malloc_trim(0)  # free memory of the parent would hide what the read allocates
    with contextlib.suppress(OSError):  # the peak begins at the parent's memory: reset it
        Path("/proc/self/clear_refs").write_text("5")
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    space = used + limits.memory_bytes + limits.file_bytes + _ADDRESS_SPACE_TO_STOP
    seconds = math.ceil(limits.cpu_seconds) + _CPU_SECONDS_TO_STOP
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)  # a pipe that is waited for takes no CPU time
    warnings.simplefilter("ignore")  # outside tests warnings are no errors
    os.write(answers, json.dumps(judge(read)).encode())


def judge(read: Callable[[], int]) -> tuple[int | None, str]:
    """Run a read here; return its exit code and last line, or None and the fault.

    A fault is an exception, a traceback, text that cannot be printed, or a refusal that is not
    exactly one line.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = read()
    except BaseException:
        return (None, traceback.format_exc()[-3000:])
    output = err.getvalue()
    if "Traceback (most recent call last)" in output:
        return (None, output[-3000:])
    lines = [line for line in output.split("\n") if line]
    for line in output.split("\n"):
        if not line.isprintable():
            return (None, f"what cannot be printed: {line[:500]!r}")
        if len(line) > LONGEST_LINE:
            return (None, f"a line of {len(line)} characters: {line[:500]}")
    if code == 2 and sum(": error: " in line for line in lines) != 1:
        return (None, f"no one line of an error: {output[-3000:]}")
    return (code, lines[-1] if lines else "")


def read_faults(cost: ReadCost, limits: ReadLimits, trivial: ReadCost) -> list[str]:
    """List the violations of a read, whether the file was read or refused.

    Args:
        cost: cost of the read.
        limits: of the file.
        trivial: the same reader on a trivial file.
    """
    faults = []
    if cost.code is None:
        faults.append(f"no exit code and one line: {cost.text}")
    if cost.cpu_seconds > limits.cpu_seconds:
        faults.append(f"{cost.cpu_seconds:.1f} s of CPU time, limit {limits.cpu_seconds:.1f}")
    grown = cost.peak_bytes - trivial.peak_bytes
    if grown > limits.memory_bytes:
        faults.append(f"{grown:,} bytes above a trivial file's, limit {limits.memory_bytes:,}")
    return faults


def check_read(
    read: Callable[[], int],
    *,
    limits: ReadLimits,
    trivial: ReadCost,
    refused: Sequence[str] | None = None,
    code: int = 2,
) -> ReadCost:
    """Run a read; assert its cost, and that the file is read, or refused in one line.

    Args:
        read: calls an entry point and returns its exit code.
        limits: of the file.
        trivial: the same reader on a trivial file.
        refused: texts that the line of a refusal holds; None: the file must be read.
        code: exit code of a refusal.
    """
    cost = measure_read(read, limits)
    faults = read_faults(cost, limits, trivial)
    assert not faults, "; ".join(faults)
    if refused is None:
        assert cost.code == 0, cost.text
    else:
        assert cost.code == code, f"exit code {cost.code} instead of {code}: {cost.text}"
        missing = [text for text in refused if text not in cost.text]
        assert not missing, f"{missing} not in: {cost.text}"
    return cost
