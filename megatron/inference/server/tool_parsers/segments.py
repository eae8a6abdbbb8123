# SPDX-License-Identifier: Apache-2.0
"""Segments of the output of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class OutputSegment:
    """A piece of the output of a model.

    Args:
        kind: "call" starts a tool call, "arguments" appends to the arguments of the current call,
            "end" ends the call.
        text: the text; for "call" the name of the tool.
    """

    kind: Literal["text", "reasoning", "call", "arguments", "end"]
    text: str = ""


class Segments:
    """Segments that were parsed since the last `take`."""

    def __init__(self) -> None:
        self._segments: list[OutputSegment] = []

    def add(self, kind: Any, text: str = "") -> None:
        """Append text; text of the same kind as the last segment extends it."""
        previous = self._segments[-1] if self._segments else None
        if previous is not None and previous.kind == kind and kind != "call":
            self._segments[-1] = OutputSegment(kind, previous.text + text)
        else:
            self._segments.append(OutputSegment(kind, text))

    def take(self) -> list[OutputSegment]:
        """Return and forget the segments."""
        segments, self._segments = self._segments, []
        return segments
