# SPDX-License-Identifier: Apache-2.0
"""What a tracking server is told of a run, and the id under which a resumed run goes on there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.untrusted_files import read_text, replace_file

_SECRET_NAME = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as a tracking server sees it.

    Args:
        options: the run's resolved options, by flag name.
        folder: where ids are kept, beside metrics.jsonl; None keeps none.
        resume_iteration: iteration the run goes on from; 0 is a new run.
    """

    options: Mapping[str, Any]
    folder: Path | None
    resume_iteration: int

    def known_id(self, tracker: str) -> str | None:
        """Return the id that a tracker gave the run which this one goes on with, if any."""
        path = self._path(tracker)
        if self.resume_iteration == 0 or path is None or not path.is_file():
            return None
        return read_text(path, 4096).strip() or None

    def remember(self, tracker: str, run_id: str) -> None:
        """Keep the id for when the run is resumed."""
        path = self._path(tracker)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, run_id + "\n")

    def _path(self, tracker: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{tracker}_run_id"


def redacted(text: str, environment: Mapping[str, str]) -> str:
    """Return a text without the secrets that the environment holds or an address carries."""
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return _USER_IN_ADDRESS.sub("***@", text)


def without_secrets(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return `say` for texts of foreign libraries, which may quote keys."""
    return lambda text: say(redacted(text, os.environ))
