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


def exit_on_sigterm(explain: Callable[[], str | None]) -> None:
    """Start the thread that waits for SIGTERM; call it in the main thread before any other thread.

    Nothing is lost by ending at any moment: a checkpoint appears whole or not at all.

    Args:
        explain: returns the line to print, or None for no line.
    """
    # Threads made later inherit the mask, so the signal can only reach the one that waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        try:
            text = explain()
            if text:
                print(text, file=sys.stderr, flush=True)
        finally:
            os._exit(ExitCode.TERMINATED)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()
