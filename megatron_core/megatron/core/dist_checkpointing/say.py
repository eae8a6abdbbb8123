# SPDX-License-Identifier: Apache-2.0
"""Where the few lines meant for people go if nobody says otherwise."""

from __future__ import annotations

import sys


def print_to_stderr(line: str) -> None:
    """Print a line where a user sees it although the log goes elsewhere."""
    print(line, file=sys.stderr, flush=True)
