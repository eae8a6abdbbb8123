# SPDX-License-Identifier: Apache-2.0
"""The protocol between the HTTP process and the engine process, over a Unix socket.

A frame is a length of four bytes and a JSON object; nothing is pickled. The field `kind` of the
object is the type of the message:

    to the engine    "add" (a `RequestMessage`), "abort" {"id"},
                     "control" {"id", "action", fields of the action} (see `EngineControl`)
    to HTTP          "settings" first (see `http_process`), "facts" {"facts"} once the engine
                     runs, then "step" {"news": [`DeltaMessage`], "stats"},
                     "done" {"id", "told", "refused"} (the reply to "control"),
                     "drain" (admit no requests, and exit when all have their answers)

The engine handles token ids only. The HTTP process handles texts, stop strings and the formats of
answers, so that their cost does not delay a step.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LENGTH = struct.Struct("<I")
#: Largest frame in bytes: a prompt of a million tokens with log-probabilities fits.
MAX_FRAME_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class RequestMessage:
    """A request for one output, sent to the engine.

    Args:
        id: unique id, assigned by the HTTP process.
        prompt: token ids.
        max_new_tokens: most tokens to generate.
        sampling: fields of `SamplingParams`.
        stop_tokens: ids of the tokens that end the output.
        sequence: number of the output in the random draws.
        prompt_logprobs: report log-probabilities of the prompt's tokens.
        grammar: grammar of the output, see `guided_decoding.grammars`; None for any text.
        priority: as in `EngineRequest`.
        reasoning_limit: arguments of `ReasoningLimit`; None for no limit.
        embed: embed the prompt and generate nothing.
        counts_prompt: count the prompt's tokens in the metrics of the prefix cache; True for one
            output per prompt.
    """

    id: int
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop_tokens: Sequence[int] = ()
    sequence: int = 0
    prompt_logprobs: bool = False
    grammar: str | None = None
    priority: int = 0
    reasoning_limit: Mapping[str, Any] | None = None
    embed: bool = False
    counts_prompt: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the message of kind "add"."""
        return {"kind": "add", **vars(self)}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RequestMessage:
        """Return the request of a message of kind "add"."""
        return cls(**{name: message[name] for name in message if name != "kind"})


@dataclass(frozen=True, kw_only=True)
class DeltaMessage:
    """The tokens that one step adds to one output.

    Args:
        id: id of the `RequestMessage`.
        tokens: ids of the new tokens.
        logprobs: log-probability of each new token.
        top_logprobs: most probable tokens [id, log-probability] at each new token; empty if not
            requested.
        epochs: weight epoch of each new token, as in `Completion`.
        finish_reason: as in `Completion`; "" for an unfinished output.
        refused: error message if the engine rejects the request, which ends the output; else "".
        refused_field: field of `EngineRequest` that the error is about; "" for no single field.
        cached_tokens: prompt tokens found in the prefix cache; in the first delta.
        prompt_logprobs, prompt_top_logprobs: log-probabilities of the prompt from its second token
            on; in the first delta, None if not requested.
        embedding: embedding of the prompt; empty if not requested.
    """

    id: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[Sequence[Sequence[Any]]] = ()
    epochs: Sequence[int] = ()
    finish_reason: str = ""
    refused: str = ""
    refused_field: str = ""
    cached_tokens: int = 0
    prompt_logprobs: Sequence[float] | None = None
    prompt_top_logprobs: Sequence[Sequence[Sequence[Any]]] | None = None
    embedding: Sequence[float] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {k: v for k, v in vars(self).items() if v != defaults[k]}


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
