# SPDX-License-Identifier: Apache-2.0
"""Python's cyclic garbage collector on a schedule: all ranks pause in the same iterations.

Left alone it runs at another moment on each rank, and all others wait for that rank at the next
collective.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


def _leave(iteration: int) -> None:
    """Leave the collector to itself."""


@contextlib.contextmanager
def scheduled_collection(scheduled: bool, interval: int) -> Iterator[Callable[[int], None]]:
    """Turn the automatic collector off for a run, and collect at its iterations instead.

    Args:
        scheduled: whether to do so at all.
        interval: iterations between collections; 0 = none.

    Yields a function to be told the iteration that begins.
    """
    if not scheduled:
        yield _leave
        return

    def begin(iteration: int) -> None:
        if interval and iteration % interval == 0:
            gc.collect()

    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield begin
    finally:
        if was_on:
            gc.enable()
