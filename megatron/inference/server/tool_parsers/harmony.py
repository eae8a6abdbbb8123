# SPDX-License-Identifier: Apache-2.0
"""The parser of harmony, the message format of gpt-oss.

An answer is a sequence of messages: `HEADER <|message|> BODY <|end|>`. The header is
`<|start|>assistant to=RECIPIENT<|channel|>CHANNEL to=RECIPIENT <|constrain|>TYPE`, in which every
part is optional and the recipient stands at one of the two places. Reasoning is in the channel
"analysis"; a tool call has the recipient `functions.NAME`. The last message ends with `<|return|>`
or, after a tool call, with `<|call|>`. See https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

from megatron.inference.server.tool_parsers.char_reader import CharReader, Step
from megatron.inference.server.tool_parsers.formats import HARMONY_STOPS
from megatron.inference.server.tool_parsers.tool_calls import (
    SectionItem,
    Segments,
    ToolCallParser,
)

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", *HARMONY_STOPS)
_MAX_HEADER_CHARS = 512
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+?)(?:to=|\W|$)")
_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")


@dataclass(frozen=True)
class _Message:
    """The kind of a message, and the name of the tool that it calls; `header` is its text."""

    kind: Literal["text", "reasoning"]
    tool: str | None = None
    header: str = ""


class HarmonyParser:
    """Parses the messages of an answer and adds their segments.

    A call of a tool that the request does not define stays text, with its header.

    Args:
        reader: reader of the output.
        segments: segments of the output.
        tool_calls: parser of the arguments of calls; None if no calls are parsed.
    """

    def __init__(
        self, reader: CharReader, segments: Segments, tool_calls: ToolCallParser | None
    ) -> None:
        self._reader, self._segments, self._tool_calls = reader, segments, tool_calls
        self._texts: dict[str, _Message] = {}  # the last message with text of each kind

    def answer(self, *, in_reasoning: bool) -> Step:
        """Parse an answer.

        Args:
            in_reasoning: whether the prompt ends with the header of a message of reasoning.
        """
        reader = self._reader
        yield from reader.begin()
        message: _Message | None = _Message("reasoning")
        if not in_reasoning:
            message = yield from self._header()
        while message is not None or reader.char:
            message = yield from self._body(message or _Message("text"))

    def _header(self) -> Generator[None, str, _Message | None]:
        """Parse the header of a message; None if there is none."""
        reader = self._reader
        reader.consumed.clear()
        yield from reader.blank()
        if (yield from reader.match_any([_START, _CHANNEL, "to="])):
            has_channel = reader.consumed[-len(_CHANNEL) :] == list(_CHANNEL)
            stops = [_START, *_ENDS, *([_CHANNEL] if has_channel else [])]
            while reader.char and len(reader.consumed) <= _MAX_HEADER_CHARS:
                if (yield from reader.match(_MESSAGE)):
                    message = self._message("".join(reader.consumed))
                    reader.consumed.clear()
                    return message
                if (yield from reader.at_any(stops)):
                    break
                if (yield from reader.match(_CHANNEL)):
                    stops.append(_CHANNEL)
                else:
                    yield from reader.advance()
            if not reader.char and reader.cut_off:
                reader.rewind(0)  # drops the incomplete header
        reader.unread(reader.consumed[:])
        return None

    def _message(self, header: str) -> _Message:
        channel, function = _CHANNEL_NAME.search(header), _FUNCTION.search(header)
        if function is not None:
            name = function[1]
            if self._tool_calls is not None and name in self._tool_calls.tools:
                return _Message("text", tool=name, header=header)
            return _Message("text", header=header)
        is_reasoning = channel is not None and channel[1] == "analysis"
        return _Message("reasoning" if is_reasoning else "text")

    def _body(self, message: _Message) -> Generator[None, str, _Message | None]:
        """Parse a message after its header; return the next message."""
        reader = self._reader
        is_text = True
        if message.tool is not None:
            is_text = not (yield from self._call(message.tool))
        if is_text and message.header:
            self._add(message, message.header)
        while reader.char:
            reader.consumed.clear()
            if reader.char == "<":
                if (yield from reader.match_any(_ENDS)):
                    return (yield from self._header())
                if (yield from reader.at_any([_START, _CHANNEL])):
                    next_message = yield from self._header()
                    if next_message is not None or not reader.char:
                        return next_message
            if is_text:
                self._add(message, reader.char)
            yield from reader.advance()
        return None

    def _call(self, tool: str) -> Generator[None, str, bool]:
        """Parse the arguments of a call; return whether they are valid, else consume nothing.

        Arguments that were cut off before they began are no call.
        """
        reader = self._reader
        assert self._tool_calls is not None
        yield from reader.blank()
        if not reader.char or (yield from reader.at_any(_ENDS)):
            if not reader.cut_off:
                self._tool_calls.add_call(tool, "null")  # a call without arguments
            return True
        if (yield from self._tool_calls.json_call(tool)) is SectionItem.CALL:
            return True
        reader.unread(reader.consumed[:])
        return False

    def _add(self, message: _Message, text: str) -> None:
        """Add text of a message; a newline separates it from an earlier message of its kind."""
        previous = self._texts.get(message.kind)
        if previous is not None and previous is not message:
            self._segments.add(message.kind, "\n")
        self._texts[message.kind] = message
        self._segments.add(message.kind, text)
