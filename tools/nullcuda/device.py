# SPDX-License-Identifier: Apache-2.0
"""What the null device of this process has counted, and which Python lines the calls come from."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType

#: Frames of these files say nothing about who launches.
UNINTERESTING = ("/torch/", "/triton/", "/nullcuda/", "<", "/contextlib.py", "/functools.py")

_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)


@functools.cache
def library() -> ctypes.CDLL:
    """Return the fake CUDA library.

    Raises:
        RuntimeError: this process does not run over it.
    """
    path = os.environ.get("NULLCUDA_LIBRARY")
    if path is None:
        raise RuntimeError("this process runs over no null device: start it by tools.nullcuda")
    return ctypes.CDLL(path)


@functools.cache
def counter_names() -> tuple[str, ...]:
    """Return the names of the counters; see stand_in/nullcuda.h."""
    address = ctypes.addressof(ctypes.c_char_p.in_dll(library(), "nullcuda_counter_names"))
    names: list[str] = []
    while name := ctypes.c_char_p.from_address(address + 8 * len(names)).value:
        names.append(name.decode())
    return tuple(names)


def counters() -> Counter[str]:
    """Return how often each thing has happened so far."""
    names = counter_names()
    values = (ctypes.c_long * len(names)).in_dll(library(), "nullcuda_counters")
    return Counter(dict(zip(names, values, strict=True)))


def since(before: Counter[str]) -> Counter[str]:
    """Return the changes since a reading of the counters."""
    return Counter({name: count - before[name] for name, count in counters().items()})


@contextlib.contextmanager
def calls() -> Iterator[Counter[tuple[str, str, str]]]:
    """Count the calls of a block by (counter, kernel or call, Python line).

    In backward the line is the autograd Function's, or the name of torch's own node.
    """
    seen: Counter[tuple[str, str, str]] = Counter()

    @_HOOK
    def hook(counter: bytes, name: bytes) -> None:
        seen[counter.decode(), name.decode(), caller(sys._getframe())] += 1

    pointer = ctypes.c_void_p.in_dll(library(), "nullcuda_hook")
    pointer.value = ctypes.cast(hook, ctypes.c_void_p).value
    try:
        yield seen
    finally:
        pointer.value = None


def caller(frame: FrameType | None) -> str:
    """Return the innermost line of the project among a frame and its callers."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(pattern in path for pattern in UNINTERESTING):
            return f"{'/'.join(path.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    import torch

    node = torch._C._current_autograd_node()
    return "torch" if node is None else str(node.name())
