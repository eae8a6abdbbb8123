# SPDX-License-Identifier: Apache-2.0
"""Memory from `torch.empty` that shows when it is read before it is written.

Fresh memory is often zero by luck, and code that forgets to write an element then passes its tests.
Inside `nan_memory()` every uninitialised tensor holds NaN (integers: the greatest value), whoever
asks for it: this is torch's own filling, which is a part of its deterministic mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.utils.deterministic


@contextlib.contextmanager
def nan_memory() -> Iterator[None]:
    """Poison uninitialised tensors, in this process and on all of its threads.

    Deterministic mode comes with it; an operator that has no deterministic form warns.
    """
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    # Not use_deterministic_algorithms: that imports the compiler, seconds in every process.
    torch.set_deterministic_debug_mode(max(mode, 1))
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)
