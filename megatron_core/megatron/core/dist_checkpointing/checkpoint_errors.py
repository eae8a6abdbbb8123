# SPDX-License-Identifier: Apache-2.0
"""The exceptions that saving, loading and verifying raise, and one-line error descriptions."""

from __future__ import annotations

import sys


def print_to_stderr(line: str) -> None:
    """Print a line for the user to standard error, wherever the log goes."""
    print(line, file=sys.stderr, flush=True)


class CheckpointError(Exception):
    """A checkpoint could not be saved, loaded or found.

    The text is one line that names the file and the tensor, and the rank if another rank failed.
    A failed save loses nothing: earlier checkpoints are intact, and no partial folder has a
    checkpoint's name.
    """


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, corrupt, unreadable or removed; an older checkpoint may load.

    Any other CheckpointError of a load, for example a checkpoint of another model, would be raised
    for the older checkpoints as well.
    """


class RemovedCheckpointError(DamagedCheckpointError):
    """A checkpoint no longer exists, for instance because retention removed it meanwhile."""


def describe(error: Exception) -> str:
    """Return an error as one line without a traceback."""
    if isinstance(error, CheckpointError | ValueError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
