# SPDX-License-Identifier: Apache-2.0
"""What a killed run had finished: lines of JSON, each whole on the disk before the next is begun.

The first line says what is being made, of what; every further one how far it is. A line that a
kill cut short does not count. The journal is locked while a run writes it, and gone when the run's
result is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from megatron.core.untrusted_files import open_to_write, parse_json

#: Of a line; it names every input file.
MAX_LINE_BYTES = 64 << 20


class Journal:
    """A journal in a run's hands.

    Args:
        path: of the file; made if there is none.

    Raises:
        ValueError: another run has it.
        OSError: the file system refuses the file or a lock on it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = _locked(path)
        self._end = 0
        self.header: Mapping[str, Any] | None = None
        self.latest: Mapping[str, Any] | None = None
        for line in iter(lambda: self._stream.readline(MAX_LINE_BYTES), b""):
            try:
                found = parse_json(line) if line.endswith(b"\n") else None
            except ValueError:
                break
            if not isinstance(found, dict):
                break
            if self.header is None:
                self.header = found
            else:
                self.latest = found
            self._end += len(line)

    def begin(self, header: Mapping[str, Any]) -> None:
        """Forget everything and write a first line."""
        self._end = 0
        self.append(header)
        self.header, self.latest = header, None

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line and wait until the disk has it."""
        line = json.dumps(entry).encode() + b"\n"
        self._stream.seek(self._end)
        self._stream.truncate()
        self._stream.write(line)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._end += len(line)
        self.latest = entry

    def close(self) -> None:
        """Let go of the journal; it stays for another run."""
        self._stream.close()

    def remove(self) -> None:
        """Remove the journal."""
        self.path.unlink(missing_ok=True)
        self.close()


def _locked(path: Path) -> BinaryIO:
    while True:
        stream = open_to_write(path, "a+")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            raise ValueError(
                f"{path} is in use: another run is writing this data set; wait for it, or give "
                "another --output-prefix"
            ) from None
        # The run that had it before may have removed the file that was opened here.
        if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            stream.seek(0)
            return stream
        stream.close()
