# SPDX-License-Identifier: Apache-2.0
"""A rehearsal starts its process again where Triton's interpreter is off.

Triton reads TRITON_INTERPRET as its first kernel is defined: to set it later is too late.
"""

from __future__ import annotations

import os
import sys

#: The environment of a rehearsal. More threads than one only slow the interpreter down.
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def be_interpreted() -> None:
    """Become this very command with the interpreter on, unless it is on."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, os.environ | INTERPRETED)
