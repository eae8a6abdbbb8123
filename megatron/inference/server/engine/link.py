# SPDX-License-Identifier: Apache-2.0
"""The protocol between the HTTP process and the engine process, over a Unix socket.

A frame is a length of four bytes and a JSON object; nothing is pickled. The field `kind` of the
object is the type of the message:

    to the engine    "add" {"request"} (a core `EngineRequest`), "abort" {"id"},
                     "embed" {"id", "prompt"},
                     "control" {"id", "action", fields of the action} (see `EngineControl`)
    to HTTP          "settings" first (see `http_process`), "facts" {"facts"} once the engine
                     runs, then "step" {"deltas": [core `OutputDelta`], "stats"},
                     "refused" {"id", "error", "field"} (the engine rejects the request),
                     "done" {"id", "result", "error"} (the reply to "control" and "embed"),
                     "drain" (admit no requests, and exit when all have their answers)

`id` is the request id, which the HTTP process chooses. The messages of the engine's requests and
deltas are derived from the fields of their classes, so a new field needs no code here.

The engine handles token ids only. The HTTP process handles texts, stop strings and the formats of
answers, so that their cost does not delay a step.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

LENGTH = struct.Struct("<I")
#: Largest frame in bytes: a prompt of a million tokens with log-probabilities fits.
MAX_FRAME_BYTES = 256 << 20

T = TypeVar("T")


def to_message(value: Any) -> Any:
    """Return the JSON of a dataclass: its fields that differ from their defaults."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = {}
    for field in dataclasses.fields(value):
        field_value = getattr(value, field.name)
        if field.default_factory is not dataclasses.MISSING:
            default: Any = field.default_factory()
        else:
            default = field.default
        if field_value != default:
            fields[field.name] = to_message(field_value)
    return fields


def from_message(cls: type[T], message: Mapping[str, Any]) -> T:
    """Return the dataclass of a message; JSON arrays become tuples.

    Args:
        cls: the dataclass.
        message: return value of `to_message`.
    """

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    types, values = _field_types(cls), {}
    for name, value in message.items():
        if isinstance(value, list):
            values[name] = tuples(value)
        elif dataclasses.is_dataclass(types[name]):
            values[name] = from_message(types[name], value)
        else:
            values[name] = value
    return cls(**values)


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def frame(message: Mapping[str, Any]) -> bytes:
    """Return the frame of a message.

    Raises:
        ValueError: the message exceeds `MAX_FRAME_BYTES`.
    """
    data = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(data)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(data)) + data


class FrameReader:
    """Parse messages from a stream of bytes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add bytes; return the messages that are now complete.

        Raises:
            ValueError: a frame exceeds `MAX_FRAME_BYTES`.
        """
        self._data += data
        messages = []
        while len(self._data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data)
            if length > MAX_FRAME_BYTES:
                raise ValueError(
                    f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}"
                )
            end = LENGTH.size + length
            if len(self._data) < end:
                break
            messages.append(json.loads(self._data[LENGTH.size : end]))
            del self._data[:end]
        return messages
