# SPDX-License-Identifier: Apache-2.0
"""SIGTERM ends this process at once, even while it waits inside a collective, and says why.

torchrun sends it to the survivors when a rank has died. A Python signal handler would only run when
the main thread comes back from the collective, so a thread waits for the signal instead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from megatron.training.exit_codes import ExitCode


def block_sigterm() -> None:
    """Keep SIGTERM waiting until `exit_on_sigterm`; call it before any library starts threads.

    Threads inherit the mask, so the signal can then only reach the thread that waits for it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def exit_on_sigterm(explain: Callable[[], str | None]) -> None:
    """Start the thread that waits for SIGTERM and ends the process.

    Nothing is lost by ending at any moment: a checkpoint appears whole or not at all.

    Args:
        explain: returns the line to print, or None for no line.
    """
    block_sigterm()

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        try:
            text = explain()
            if text:
                print(text, file=sys.stderr, flush=True)
        finally:
            os._exit(ExitCode.TERMINATED)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
