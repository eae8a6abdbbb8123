# SPDX-License-Identifier: Apache-2.0
"""The streaming parser of a model's output: text, reasoning, tool calls and their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.inference.server.tool_parsers.char_reader import CharReader, Reads, Step
from megatron.inference.server.tool_parsers.formats import AnswerFormats
from megatron.inference.server.tool_parsers.harmony import HarmonyParser
from megatron.inference.server.tool_parsers.tool_calls import (
    OutputSegment,
    Segments,
    ToolCallParser,
)


class OutputParser:
    """Splits the text of an answer into segments.

    The result does not depend on how the text is split over `push` calls: a state machine reads
    one character at a time. White space next to a mark is dropped. A call must name a tool of the
    request; other text with the syntax of a call stays text.

    Args:
        formats: answer formats of the model.
        tools: JSON schema of the parameters of each tool, by name; without tools no calls are
            parsed.
        in_reasoning: whether the prompt ends inside reasoning.
    """

    def __init__(
        self,
        formats: AnswerFormats,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        in_reasoning: bool = False,
    ) -> None:
        self._reader, self._segments = CharReader(), Segments()
        self._tool_calls: list[ToolCallParser] = []
        if formats.tools is not None and tools:
            self._tool_calls = [
                ToolCallParser(self._reader, self._segments, tool_format, tools)
                for tool_format in (formats.tools, *formats.tools.variants)
            ]
        self._reasoning, self._in_reasoning = formats.reasoning, in_reasoning
        self._space, self._after_mark = list[str](), in_reasoning
        if formats.channels:
            tool_calls = next(iter(self._tool_calls), None)
            messages = HarmonyParser(self._reader, self._segments, tool_calls)
            self._machine = messages.answer(in_reasoning=in_reasoning)
        else:
            self._machine = self._answer()
        next(self._machine)

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return any(tool_calls.has_calls for tool_calls in self._tool_calls)

    def push(
        self, text: str, *, finished: bool = False, cut_off: bool = False
    ) -> list[OutputSegment]:
        """Return the segments of new text.

        Args:
            text: text that follows the text of earlier `push` calls.
            finished: whether the answer has ended.
            cut_off: whether the answer ended at a limit; incomplete arguments then stay open.
        """
        reader = self._reader
        if not self._tool_calls and self._reasoning is None:
            return [OutputSegment("text", text)] if text else []
        for char in text:
            self._machine.send(char)
        if finished:
            reader.finished, reader.cut_off = True, cut_off
            for _ in self._machine:
                pass
        return self._segments.take()

    def _emit_char(self, kind: str) -> Step:
        """Emit the current character; white space is buffered until the next character."""
        reader = self._reader
        if reader.char.isspace():
            self._space.append(reader.char)
        else:
            space = "" if self._after_mark else "".join(self._space)
            self._segments.add(kind, space + reader.char)
            self._space, self._after_mark = [], False
        yield from reader.advance()

    def _mark(self) -> None:
        """Record that a mark was parsed."""
        self._space, self._after_mark = [], True

    def _answer(self) -> Step:
        reader = self._reader
        yield from reader.begin()
        if self._in_reasoning:
            yield from self._reason()
        elif self._reasoning is not None:
            yield from reader.blank()
            if (yield from reader.match(self._reasoning.begin)):
                yield from self._reason()
            else:
                reader.unread(reader.consumed[:])
        if self._tool_calls and self._tool_calls[0].format.bare:
            yield from reader.blank()
            if not (yield from self._section(self._tool_calls[0], marked=False)):
                reader.unread(reader.consumed[:])
        marks = []
        if self._reasoning is not None and self._reasoning.anywhere:
            marks.append(self._reasoning.begin)
        for tool_calls in self._tool_calls:
            marks.append(tool_calls.format.begin[0].strip())
            marks += tool_calls.format.head[:1] if tool_calls.format.head_begins else []
        first_chars = {mark[0] for mark in marks}
        while reader.char:
            if reader.char in first_chars and (yield from self._marked()):
                continue
            yield from self._emit_char("text")
            reader.consumed.clear()
        if not self._after_mark and self._space:
            self._segments.add("text", "".join(self._space))

    def _marked(self) -> Reads:
        """Parse a marked section; return whether there was one, else consume nothing."""
        reader = self._reader
        reasoning_format = self._reasoning
        begin = reasoning_format.begin if reasoning_format and reasoning_format.anywhere else ""
        if begin and (yield from reader.match(begin)):
            yield from self._reason()
            return True
        return (yield from self._marked_calls())

    def _marked_calls(self) -> Reads:
        """Parse a section of tool calls; return whether there was one, else consume nothing."""
        reader = self._reader
        for tool_calls in self._tool_calls:
            tool_format = tool_calls.format
            begins = yield from reader.match_all(tool_format.begin)
            if begins and (yield from self._section(tool_calls)):
                return True
            reader.unread(reader.consumed[:])
            if tool_format.head_begins and (yield from self._section(tool_calls)):
                return True
            reader.unread(reader.consumed[:])
        return False

    def _section(self, tool_calls: ToolCallParser, *, marked: bool = True) -> Reads:
        """Parse the calls of a section; return whether there was a call."""
        has_call = yield from tool_calls.section(marked=marked)
        if has_call:
            self._mark()
        return has_call

    def _reason(self) -> Step:
        """Parse reasoning and its end mark, or a section of tool calls that ends it."""
        reader = self._reader
        assert self._reasoning is not None
        self._mark()
        calls_end = bool(self._tool_calls) and self._tool_calls[0].format.ends_reasoning
        while reader.char:
            may_end = reader.char == self._reasoning.end[0]
            if may_end and (yield from reader.match(self._reasoning.end)):
                break
            if calls_end and reader.char == "<" and (yield from self._marked_calls()):
                break
            yield from self._emit_char("reasoning")
            reader.consumed.clear()
        self._mark()
        reader.consumed.clear()
