# SPDX-License-Identifier: Apache-2.0
"""The one error that saving, loading and checking a checkpoint raise."""


class CheckpointError(Exception):
    """A checkpoint could not be saved, loaded or found.

    The text is one line that names the file and the tensor concerned, and the rank when the
    error came from another one. On a save nothing has been lost: earlier checkpoints are intact
    and no partial folder carries a checkpoint's name.
    """
