# SPDX-License-Identifier: Apache-2.0
"""The one error that saving, loading and checking a checkpoint raise; any error as one line.

Where the few lines meant for people go by default.
"""

from __future__ import annotations

import sys


def print_to_stderr(line: str) -> None:
    """Print a line where a user sees it although the log goes elsewhere."""
    print(line, file=sys.stderr, flush=True)


class CheckpointError(Exception):
    """A checkpoint could not be saved, loaded or found.

    The text is one line that names the file and the tensor concerned, and the rank when the
    error came from another one. On a save nothing has been lost: earlier checkpoints are intact
    and no partial folder carries a checkpoint's name.
    """


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, damaged, unreadable or gone: an older one may serve.

    Any other CheckpointError of a load, as for a checkpoint of another model, would meet the older
    ones just as well.
    """


class RemovedCheckpointError(DamagedCheckpointError):
    """A checkpoint was removed while it was looked at, as retention removes old ones."""


def describe(error: Exception) -> str:
    """Return an error as one line without a traceback."""
    if isinstance(error, CheckpointError | ValueError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
