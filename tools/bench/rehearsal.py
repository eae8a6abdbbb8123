# SPDX-License-Identifier: Apache-2.0
"""A rehearsal starts its process again where Triton's interpreter is off.

Triton reads TRITON_INTERPRET as its first kernel is defined: to set it later is too late.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

#: The environment of a rehearsal. More threads than one only slow the interpreter down.
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def interpreter_problem() -> str | None:
    """Return why Triton's interpreter cannot run here, or None."""
    try:
        triton, numpy = (importlib.metadata.version(name) for name in ("triton", "numpy"))
    except importlib.metadata.PackageNotFoundError as missing:
        return f"a rehearsal needs {missing.name}: install it"
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        return (
            f"the interpreter of Triton {triton} fails with numpy {numpy}: install triton >= 3.7 "
            "or numpy < 2.4 for a rehearsal (a GPU needs neither)"
        )
    return None


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def be_interpreted() -> None:
    """Become this very command with the interpreter on, unless it is on.

    Raises:
        SystemExit: Triton's interpreter cannot run here.
    """
    if (problem := interpreter_problem()) is not None:
        raise SystemExit(f"error: {problem}")
    if os.environ.get("TRITON_INTERPRET") != "1":
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | INTERPRETED)
