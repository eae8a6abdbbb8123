# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process and the engine process tell each other over a Unix socket.

A frame is its length in four bytes and JSON; nothing is pickled. Each is an object with a `kind`:

    to the engine    settings of nothing: "add" (an `Ask`), "abort" {"id"},
                     "control" {"id", "action", its fields} (see `EngineControl`)
    to HTTP          "settings" first (see `http_process`), "facts" {"facts"} once the engine is
                     there, then "step" {"news": [`News`], "stats"},
                     "done" {"id", "told", "refused"} (the answer to "control"),
                     "drain" (admit nothing more, and end when all have their answers)

The engine knows tokens only. Texts, stop strings and the shapes of answers are the HTTP process's,
so their cost does not delay a step.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LENGTH = struct.Struct("<I")
#: The longest frame: a prompt of a million tokens, or their log-probabilities.
MAX_FRAME_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One output to generate.

    Args:
        id: chosen by the HTTP process, never used twice.
        prompt: token ids.
        max_new_tokens: tokens to generate at most.
        sampling: fields of `SamplingParams`.
        stop_tokens: ids that end the output.
        sequence: identity in random draws.
        prompt_logprobs: report log-probabilities of the prompt's tokens.
        grammar: that the output follows, see `structured`; None for any text.
        priority: as in `Request`.
        reasoning_limit: arguments of `structured.ReasoningLimit`; None for no limit.
        embed: generate nothing, but embed the prompt.
        counts_prompt: count the prompt's tokens in the metrics of the prefix cache: True for one of
            the outputs of a prompt.
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
        """Return the order of kind "add"."""
        return {"kind": "add", **vars(self)}

    @classmethod
    def from_json(cls, order: Mapping[str, Any]) -> Ask:
        """Return what `to_json` was made of."""
        return cls(**{name: order[name] for name in order if name != "kind"})


@dataclass(frozen=True, kw_only=True)
class News:
    """What a step added to one output.

    Args:
        id: of the `Ask`.
        tokens: new ones.
        logprobs: of each.
        top_logprobs: of each the most probable tokens, [id, log-probability]; empty if not asked.
        epochs: of each, as in `Completion`.
        finish_reason: as in `Completion`; "" while it goes on.
        refused: why the engine cannot serve it at all; it has ended then.
        refused_field: of `Request`, that it is refused for; "" if for none.
        cached_tokens: of the prompt, found in the prefix cache; in the first news.
        prompt_logprobs, prompt_top_logprobs: of each token of the prompt but the first; in the
            first news, None if not asked.
        embedding: of the prompt; empty if not asked.
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
        """Return the fields that say something."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {k: v for k, v in vars(self).items() if v != defaults[k]}


def frame(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent.

    Raises:
        ValueError: it is longer than a frame may be.
    """
    data = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(data)} bytes: {MAX_FRAME_BYTES} are the most")
    return LENGTH.pack(len(data)) + data


class FrameReader:
    """Put messages together from bytes as they come."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that are complete with these bytes.

        Raises:
            ValueError: what came is no frame.
        """
        self._data += data
        found = []
        while len(self._data) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._data)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes: {MAX_FRAME_BYTES} are the most")
            end = LENGTH.size + length
            if len(self._data) < end:
                break
            found.append(json.loads(self._data[LENGTH.size : end]))
            del self._data[:end]
        return found
