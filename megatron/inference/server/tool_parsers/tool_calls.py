# SPDX-License-Identifier: Apache-2.0
"""The parser of sections of tool calls, in the formats of `formats`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

from megatron.inference.server.middleware import LOG, REQUEST_ID
from megatron.inference.server.tool_parsers.arguments import (
    arguments_json,
    parameter_json,
    value_types,
)
from megatron.inference.server.tool_parsers.char_reader import CharReader, Reads, Step
from megatron.inference.server.tool_parsers.formats import ParameterFormat, ToolFormat

# Keys of a call that is a JSON object.
_ARGUMENTS = ("arguments", "parameters")
_CALL_MEMBERS = ("name", *_ARGUMENTS, "type", "id")


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
        self._segments: list[tuple[Any, list[str]]] = []

    def add(self, kind: Any, text: str = "") -> None:
        """Append text; text of the same kind as the last segment extends it."""
        if self._segments and self._segments[-1][0] == kind and kind != "call":
            self._segments[-1][1].append(text)
        else:
            self._segments.append((kind, [text]))

    def take(self) -> list[OutputSegment]:
        """Return and forget the segments."""
        segments, self._segments = self._segments, []
        return [OutputSegment(kind, "".join(texts)) for kind, texts in segments]


class SectionItem(Enum):
    """Result of parsing an item of a section of tool calls."""

    CALL = auto()  # a call of a tool of the request; its segments were added
    UNKNOWN = auto()  # the syntax of a call, but an unknown tool or no arguments
    NONE = auto()  # no item


Items = Generator[None, str, SectionItem]


class ToolCallParser:
    """Parses sections of tool calls and adds their segments.

    A call must name a tool of the request; other text with the syntax of a call stays text.

    Args:
        reader: reader of the output.
        segments: segments of the output.
        tool_format: format of tool calls.
        tools: JSON schema of the parameters of each tool, by name.
    """

    def __init__(
        self,
        reader: CharReader,
        segments: Segments,
        tool_format: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._reader, self._segments = reader, segments
        self.format, self.tools = tool_format, tools
        self.has_calls = False
        """Whether a tool was called."""
        # Marks that begin a section or a call, and marks that end them.
        self._begins = _marks([*tool_format.begin[:1], *tool_format.head[:1]])
        self._ends = _marks([*tool_format.tail, *tool_format.end])
        self._name_stops = [*self._begins, *self._ends]
        if tool_format.parameters is not None:
            self._name_stops.append(tool_format.parameters.begin)

    def section(self, *, marked: bool = True) -> Reads:
        """Parse the calls of a section and its end mark; return whether there was a call.

        In a section with calls, text with the syntax of a call but an unknown tool is dropped. A
        section without calls is text.

        Args:
            marked: whether the start mark was parsed; any object in the section may be a call then.
        """
        reader = self._reader
        has_call, dropped_call = False, False
        while True:
            item = yield from self._call(marked=marked)
            if item is SectionItem.NONE:
                break
            has_call |= item is SectionItem.CALL
            dropped_call |= item is SectionItem.UNKNOWN
            if has_call:
                reader.consumed.clear()
            start = len(reader.consumed)
            if self.format.end and (yield from reader.match_all(self.format.end)):
                break
            reader.rewind(start)
            if self.format.separator is None:
                break
            if not (yield from reader.match_all([self.format.separator])):
                reader.unread(reader.consumed[start:])
                break
        if not has_call:
            return False
        if item is SectionItem.NONE:
            reader.unread(reader.consumed[:])  # from the separator on
        if dropped_call:
            request = REQUEST_ID.get()
            LOG.warning("request %s: dropped a tool call that names an unknown tool", request)
        reader.consumed.clear()
        return True

    def _call(self, *, marked: bool) -> Items:
        """Parse a call and add its parts."""
        reader = self._reader
        if self.format.layout == "object":
            return (yield from self._object_call(any_member=marked))
        if not (yield from reader.match_all(self.format.head)):
            return SectionItem.NONE
        text = yield from reader.until(self.format.name_end, self._name_stops)
        if text is None or not (yield from reader.match_all(self.format.middle)):
            return SectionItem.NONE
        name = self._tool_name(text)
        if self.format.parameters is None:
            return (yield from self.json_call(name))
        if name not in self.tools:
            return (yield from self._skip_call())
        self._begin_call(name)
        yield from self._arguments(self.format.parameters, self.tools[name])
        self._end_call()
        yield from self._tail()
        return SectionItem.CALL

    def _tool_name(self, text: str) -> str:
        """Return the name of a tool without the suffix of the format."""
        if text in self.tools or self.format.name_suffix is None:
            return text
        literal, pattern = self.format.name_suffix
        match = re.fullmatch(f"(.+?){re.escape(literal)}{pattern}", text)
        return text if match is None else match[1]

    def _skip_call(self) -> Items:
        """Parse the parameters of a call to an unknown tool, up to its tail."""
        reader = self._reader
        if self.format.separator is None:
            return SectionItem.NONE
        while reader.char and not (yield from reader.at_any(self._begins)):
            if (yield from reader.match_any(self._ends[:1])):
                return SectionItem.UNKNOWN
            yield from reader.advance()
        return SectionItem.NONE

    def json_call(self, name: str) -> Items:
        """Parse the JSON arguments of a call and its tail."""
        reader = self._reader
        if name in self.tools and reader.char == "{":
            yield from self._stream_arguments(name)
            yield from self._tail()
            return SectionItem.CALL
        if (yield from reader.at_any(self._ends[:1])):
            text: str | None = "null"  # a call without arguments
        else:
            text = yield from reader.json_text()
        if text is None:
            return SectionItem.NONE
        yield from self._tail()
        return self.add_call(name, text)

    def _object_call(self, *, any_member: bool) -> Items:
        """Parse a call that is an object; arguments after the name are streamed.

        Args:
            any_member: accept keys that calls do not have. Without it, other JSON is rejected at
                its first key.
        """
        reader = self._reader
        yield from reader.blank()
        if not (yield from reader.match("{")):
            return SectionItem.NONE
        name, arguments = None, None
        yield from reader.blank()
        while reader.char != "}":
            key = yield from reader.key()
            if key is None or (key not in _CALL_MEMBERS and not any_member):
                return SectionItem.NONE
            if key == "name":
                name = yield from reader.string()
                if name is None:
                    return SectionItem.NONE
            elif key in _ARGUMENTS and arguments is None:
                if name is not None and name in self.tools and reader.char == "{":
                    yield from self._stream_arguments(name)
                    yield from self._trailing_members()
                    return SectionItem.CALL
                arguments = yield from reader.json_text()
                if arguments is None:
                    return SectionItem.NONE
            elif (yield from reader.json_text()) is None:
                return SectionItem.NONE
            yield from reader.blank()
            if not (yield from reader.match(",")):
                break
            yield from reader.blank()
        if not (yield from reader.match("}")):
            return SectionItem.NONE
        return self.add_call(name, arguments)

    def _trailing_members(self) -> Step:
        """Parse the members after the arguments of a call, and the closing bracket."""
        reader = self._reader
        while True:
            yield from reader.blank()
            if (yield from reader.match("}")):
                return
            if not (yield from reader.match(",")):
                break
            yield from reader.blank()
            if (yield from reader.key()) is None or (yield from reader.json_text()) is None:
                break
        reader.rewind(0)

    def _begin_call(self, name: str) -> None:
        self._segments.add("call", name)
        self.has_calls = self._reader.after_call = True

    def _end_call(self) -> None:
        reader = self._reader
        self._segments.add("end")
        reader.consumed.clear()

    def add_call(self, name: str | None, arguments: str | None) -> SectionItem:
        """Add the parts of a complete call, if it names a tool and has arguments."""
        json_object = None if arguments is None else arguments_json(arguments)
        if name is None or name not in self.tools or json_object is None:
            return SectionItem.UNKNOWN
        self._begin_call(name)
        self._segments.add("arguments", json_object)
        self._end_call()
        return SectionItem.CALL

    def _tail(self) -> Step:
        """Parse the tail of a call, if present."""
        reader = self._reader
        start = len(reader.consumed)
        if not (yield from reader.match_all(self.format.tail)):
            reader.rewind(start)

    def _stream_arguments(self, name: str) -> Step:
        """Parse and emit the arguments of a call, a JSON object."""
        reader = self._reader
        self._begin_call(name)
        depth, quoted, escaped = 0, False, False
        while reader.char:
            char = reader.char
            self._segments.add("arguments", char)
            if quoted:
                quoted = char != '"' or escaped
                escaped = char == "\\" and not escaped
            elif char == '"':
                quoted = True
            else:
                depth += (char in "{[") - (char in "}]")
            yield from reader.advance()
            reader.consumed.clear()
            if depth == 0:
                break
        self._end_call()

    def _arguments(self, parameters: ParameterFormat, schema: Mapping[str, Any]) -> Step:
        """Parse marked parameters and emit them as a JSON object."""
        reader = self._reader
        self._segments.add("arguments", "{")
        properties = schema.get("properties") or {}
        expected = set(properties) if properties else None
        separator = ""
        while True:
            reader.consumed.clear()
            yield from reader.blank()
            if (yield from reader.match(parameters.end.strip())):
                continue  # a surplus end mark
            key = yield from self._key(parameters)
            if key is None:
                reader.unread(reader.consumed[:] if reader.char else "")
                break
            self._segments.add("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if expected is not None:
                expected.discard(key)
            types = value_types(properties.get(key))
            if types == {"string"}:
                yield from self._text_value(parameters, expected)
            else:
                yield from self._other_value(parameters, types, expected)
        if reader.cut_off:
            reader.rewind(0)
        else:
            self._segments.add("arguments", "}")

    def _key(self, parameters: ParameterFormat) -> Generator[None, str, str | None]:
        """Parse the marks and the key before a value; None if they are missing."""
        reader = self._reader
        if not (yield from reader.match(parameters.begin)):
            return None
        key = yield from reader.until(parameters.key_end, [parameters.begin])
        value_begin = parameters.value_begin.strip()
        if key is not None and value_begin:
            yield from reader.blank()
            if not (yield from reader.match(value_begin)):
                return None
        return key

    def _text_value(self, parameters: ParameterFormat, expected: Collection[str] | None) -> Step:
        """Parse a string parameter and emit it character by character."""
        reader, separate_lines = self._reader, parameters.separate_lines
        self._segments.add("arguments", '"')
        if separate_lines and reader.char == "\n":
            yield from reader.advance()
        newline = ""  # held back: the newline before the end mark is not part of the value
        while reader.char:
            reader.consumed.clear()
            if reader.char == "<" and (yield from self._ends_value(parameters, expected)):
                break
            if not reader.char:
                return
            if newline:
                self._segments.add("arguments", r"\n")
            newline = "\n" if separate_lines and reader.char == "\n" else ""
            if not newline:
                self._segments.add("arguments", json.dumps(reader.char, ensure_ascii=False)[1:-1])
            yield from reader.advance()
        else:
            if reader.cut_off:
                return
        self._segments.add("arguments", '"')

    def _other_value(
        self,
        parameters: ParameterFormat,
        types: set[str] | None,
        expected: Collection[str] | None,
    ) -> Step:
        """Parse a parameter whose type is known only at its end."""
        reader = self._reader
        chars: list[str] = []
        while reader.char:
            reader.consumed.clear()
            if reader.char == "<" and (yield from self._ends_value(parameters, expected)):
                break
            chars.append(reader.char)
            yield from reader.advance()
        else:
            if reader.cut_off:
                return
        text = "".join(chars)
        if parameters.separate_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        self._segments.add("arguments", parameter_json(text, types))

    def _ends_value(self, parameters: ParameterFormat, expected: Collection[str] | None) -> Reads:
        """Return whether the value of a parameter ends here.

        Only the end mark of the parameter is consumed. Models sometimes omit it; then the next
        parameter or the end of the call ends the value.

        Args:
            parameters: format of the parameters.
            expected: parameters of the schema that the call has not set; None without a schema.
        """
        reader = self._reader
        if (yield from reader.match(parameters.end.strip())):
            return True
        ends = False
        if (yield from reader.at_any([parameters.begin])):
            key = yield from self._key(parameters)
            ends = key is not None and (expected is None or key in expected)
        else:
            ends = yield from self._call_ends()
        reader.rewind(0)
        return ends

    def _call_ends(self) -> Reads:
        """Return whether a mark ends the call: another mark or the end of the answer follows it."""
        reader = self._reader
        if not (yield from reader.match_any([*self._ends, *_marks(self.format.begin)])):
            return False
        yield from reader.blank()
        return not reader.char or (yield from reader.match_any([*self._ends, *self._begins]))


def _marks(literals: Sequence[str | tuple[str, ...]]) -> list[str]:
    """Return literals without white space around them."""
    return [text.strip() for text in literals if isinstance(text, str) and text.strip()]
