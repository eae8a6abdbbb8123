# SPDX-License-Identifier: Apache-2.0
"""The rows of the client matrix: a program that uses a client, and the value that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Texts of the scripted model.
TEXT = "It rains in Ulm."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
ANSWER = '{"city": "Ulm", "degrees": 7}'
THOUGHT = "<think>\nhm\n</think>\n"


@dataclass(frozen=True)
class Row:
    """An idiom of a client.

    Args:
        idiom: the methods and options, as the client's documentation names it.
        call: the program; it returns the value that it reads from the answers.
        script: texts of the model, one per request.
        output: the value that `call` returns.
        refused: the field that the server refuses instead; part of the error.
    """

    idiom: str
    call: Callable[[Any], Any]
    script: tuple[str, ...] = (TEXT,)
    output: Any = TEXT
    refused: str | None = None
