# SPDX-License-Identifier: Apache-2.0
"""Streaming parser of answers: splits them into text, reasoning, tool calls and arguments."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

from megatron.inference.server.middleware.request_log import LOG, REQUEST_ID
from megatron.inference.server.tool_parsers.arguments import (
    arguments_json,
    parameter_json,
    value_types,
)
from megatron.inference.server.tool_parsers.formats import AnswerFormats

_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# Limits on the name of a tool or parameter and on white space within the head of a call. They bound
# the characters that are parsed again as text if the head turns out to be no call.
_MAX_NAME_CHARS = 256
_MAX_WHITESPACE = 64

# Keys of a call that is a JSON object, and the characters of JSON outside of strings.
_ARGUMENTS = ("arguments", "parameters")
_CALL_MEMBERS = ("name", *_ARGUMENTS, "type", "id")
_JSON_CHARS = frozenset("[]{},: \t\n\r+-.0123456789eEtrufalsn")


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer.

    Args:
        kind: "call" starts a tool call, "arguments" appends to the arguments of the current call,
            "end" ends the call.
        text: the text; for "call" the name of the tool.
    """

    kind: Literal["text", "reasoning", "call", "arguments", "end"]
    text: str = ""


class _Item(Enum):
    """Result of parsing an item of a section of tool calls."""

    CALL = auto()  # a call of a tool of the request; its parts were added
    UNKNOWN = auto()  # the syntax of a call, but an unknown tool or no arguments
    NONE = auto()  # no item


_Step = Generator[None, str, None]
_Reads = Generator[None, str, bool]
_Items = Generator[None, str, _Item]


class AnswerParser:
    """Split the text of an answer into parts.

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
        self._tools, self._in_reasoning = tools, in_reasoning
        self._format = formats.tools if tools else None
        self._reasoning = formats.reasoning
        self.has_calls = False
        """Whether a tool was called."""
        self._new_parts: list[AnswerPart] = []
        self._char = ""  # the current character; "" at the end
        self._pushback: deque[str] = deque()  # characters to parse again
        self._consumed: list[str] = []  # characters since the head of a call
        self._finished = self._cut_off = False
        self._space, self._after_mark = "", in_reasoning
        self._machine = self._answer()
        next(self._machine)

    def push(self, text: str, *, finished: bool = False, cut_off: bool = False) -> list[AnswerPart]:
        """Return the parts of new text.

        Args:
            text: text that follows the text of earlier `push` calls.
            finished: whether the answer has ended.
            cut_off: whether the answer ended at a limit; incomplete arguments then stay open.
        """
        if self._format is None and self._reasoning is None:
            return [AnswerPart("text", text)] if text else []
        for char in text:
            self._machine.send(char)
        if finished:
            self._finished, self._cut_off = True, cut_off
            for _ in self._machine:
                pass
        new_parts, self._new_parts = self._new_parts, []
        return new_parts

    def _advance(self) -> _Step:
        self._consumed.append(self._char)
        if self._pushback:
            self._char = self._pushback.popleft()
        elif self._finished:
            self._char = ""
        else:
            self._char = (yield) or ""

    def _unread(self, text: Sequence[str]) -> None:
        """Push characters back, before the current character."""
        if text:
            current_char = [self._char] if self._char else []
            self._pushback.extendleft(reversed([*text, *current_char]))
            self._char = self._pushback.popleft()
            del self._consumed[len(self._consumed) - len(text) :]

    def _rewind(self, start: int) -> None:
        """Push the characters since `start` back, as they are no mark. At the end of an answer that
        was cut off, an incomplete mark after parts of a call is dropped."""
        if self._cut_off and start == 0:
            self._pushback.clear()
            self._char = ""
            self._consumed.clear()
        else:
            self._unread(self._consumed[start:])

    def _add(self, kind: Any, text: str = "") -> None:
        previous = self._new_parts[-1] if self._new_parts else None
        if previous is not None and previous.kind == kind and kind != "call":
            self._new_parts[-1] = AnswerPart(kind, previous.text + text)
        else:
            self._new_parts.append(AnswerPart(kind, text))

    def _emit_char(self, kind: str) -> _Step:
        """Emit the current character; white space is buffered until the next character."""
        if self._char.isspace():
            self._space += self._char
        else:
            self._add(kind, self._char if self._after_mark else self._space + self._char)
            self._space, self._after_mark = "", False
        yield from self._advance()

    def _mark(self) -> None:
        """Record that a mark was parsed."""
        self._space, self._after_mark = "", True

    def _answer(self) -> _Step:
        self._char = (yield) or ""
        if self._in_reasoning:
            yield from self._reason()
        elif self._reasoning is not None:
            yield from self._blank()
            if (yield from self._match(self._reasoning.begin)):
                yield from self._reason()
            else:
                self._unread(self._consumed[:])
        if self._format is not None and self._format.bare:
            yield from self._blank()
            if not (yield from self._section(marked=False)):
                self._unread(self._consumed[:])
        marks = [] if self._reasoning is None else [self._reasoning.begin]
        if self._format is not None:
            marks.append(self._format.begin[0].strip())
            marks += [self._format.head[0]] if self._format.head_begins else []
        first_chars = {mark[0] for mark in marks}
        while self._char:
            if self._char in first_chars and (yield from self._marked()):
                continue
            yield from self._emit_char("text")
            self._consumed.clear()
        if not self._after_mark and self._space:
            self._add("text", self._space)

    def _marked(self) -> _Reads:
        """Parse a marked section; return whether there was one, else consume nothing."""
        if self._reasoning is not None and (yield from self._match(self._reasoning.begin)):
            yield from self._reason()
            return True
        if self._format is None:
            return False
        if (yield from self._match_all(self._format.begin)) and (yield from self._section()):
            return True
        self._unread(self._consumed[:])
        if self._format.head_begins and (yield from self._section()):
            return True
        self._unread(self._consumed[:])
        return False

    def _reason(self) -> _Step:
        """Parse reasoning and its end mark."""
        assert self._reasoning is not None
        self._mark()
        while self._char:
            may_end = self._char == self._reasoning.end[0]
            if may_end and (yield from self._match(self._reasoning.end)):
                break
            yield from self._emit_char("reasoning")
            self._consumed.clear()
        self._mark()
        self._consumed.clear()

    def _match(self, text: str) -> _Reads:
        """Match a text; return whether it matched, else consume nothing."""
        for index, char in enumerate(text):
            if self._char != char:
                self._unread(text[:index])
                return False
            yield from self._advance()
        return True

    def _blank(self) -> _Step:
        """Skip white space."""
        for _ in range(_MAX_WHITESPACE):
            if not self._char.isspace():
                break
            yield from self._advance()

    def _match_all(self, patterns: Sequence[str | tuple[str, ...]]) -> _Reads:
        """Match texts with white space around them; return whether all matched."""
        for pattern in patterns:
            yield from self._blank()
            texts = [pattern] if isinstance(pattern, str) else pattern
            if not (yield from self._match_any([text.strip() for text in texts])):
                return False
        yield from self._blank()
        return True

    def _until(self, end: str) -> Generator[None, str, str | None]:
        """Parse a name up to `end`; None if `end` is missing."""
        name = ""
        while self._char and len(name) <= _MAX_NAME_CHARS:
            if self._char == end[0] and (yield from self._match(end)):
                return name.strip()
            name += self._char
            yield from self._advance()
        return None

    def _section(self, *, marked: bool = True) -> _Reads:
        """Parse the calls of a section and its end mark; return whether there was a call.

        In a section with calls, text with the syntax of a call but an unknown tool is dropped. A
        section without calls is text.

        Args:
            marked: whether the start mark was parsed; any object in the section may be a call then.
        """
        assert self._format is not None
        has_call, dropped_call = False, False
        while True:
            item = yield from self._call(marked=marked)
            if item is _Item.NONE:
                break
            has_call |= item is _Item.CALL
            dropped_call |= item is _Item.UNKNOWN
            if has_call:
                self._consumed.clear()
                self._mark()
            start = len(self._consumed)
            if self._format.end and (yield from self._match_all(self._format.end)):
                break
            self._rewind(start)
            if self._format.separator is None:
                break
            if not (yield from self._match_all([self._format.separator])):
                self._unread(self._consumed[start:])
                break
        if not has_call:
            return False
        if item is _Item.NONE:
            self._unread(self._consumed[:])  # from the separator on
        if dropped_call:
            request = REQUEST_ID.get()
            LOG.warning("request %s: dropped a tool call that names an unknown tool", request)
        self._consumed.clear()
        return True

    def _call(self, *, marked: bool) -> _Items:
        """Parse a call and add its parts."""
        assert self._format is not None
        if self._format.layout == "object":
            return (yield from self._object_call(any_member=marked))
        if not (yield from self._match_all(self._format.head)):
            return _Item.NONE
        name = yield from self._until(self._format.name_end)
        if name is None or not (yield from self._match_all(self._format.middle)):
            return _Item.NONE
        if self._format.layout == "json":
            return (yield from self._json_call(name))
        if name not in self._tools:
            return _Item.NONE
        self._begin_call(name)
        yield from self._xml(self._tools[name].get("properties") or {})
        self._end_call()
        yield from self._tail()
        return _Item.CALL

    def _json_call(self, name: str) -> _Items:
        """Parse the JSON arguments of a call and its tail."""
        if name in self._tools and self._char == "{":
            yield from self._stream_arguments(name)
            yield from self._tail()
            return _Item.CALL
        text = yield from self._json_text()
        if text is None:
            return _Item.NONE
        yield from self._tail()
        return self._add_call(name, text)

    def _object_call(self, *, any_member: bool) -> _Items:
        """Parse a call that is an object; arguments after the name are streamed.

        Args:
            any_member: accept keys that calls do not have. Without it, other JSON is rejected at
                its first key.
        """
        yield from self._blank()
        if not (yield from self._match("{")):
            return _Item.NONE
        name, arguments = None, None
        yield from self._blank()
        while self._char != "}":
            key = yield from self._key()
            if key is None or (key not in _CALL_MEMBERS and not any_member):
                return _Item.NONE
            if key == "name":
                name = yield from self._string()
                if name is None:
                    return _Item.NONE
            elif key in _ARGUMENTS and arguments is None:
                if name in self._tools and self._char == "{":
                    yield from self._stream_arguments(name)
                    yield from self._trailing_members()
                    return _Item.CALL
                arguments = yield from self._json_text()
                if arguments is None:
                    return _Item.NONE
            elif (yield from self._json_text()) is None:
                return _Item.NONE
            yield from self._blank()
            if not (yield from self._match(",")):
                break
            yield from self._blank()
        if not (yield from self._match("}")):
            return _Item.NONE
        return self._add_call(name, arguments)

    def _trailing_members(self) -> _Step:
        """Parse the members after the arguments of a call, and the closing bracket."""
        while True:
            yield from self._blank()
            if (yield from self._match("}")):
                return
            if not (yield from self._match(",")):
                break
            yield from self._blank()
            if (yield from self._key()) is None or (yield from self._json_text()) is None:
                break
        self._rewind(0)

    def _begin_call(self, name: str) -> None:
        self._add("call", name)
        self.has_calls = True

    def _end_call(self) -> None:
        self._add("end")
        self._consumed.clear()

    def _add_call(self, name: str | None, arguments: str | None) -> _Item:
        """Add the parts of a complete call, if it names a tool and has arguments."""
        json_object = None if arguments is None else arguments_json(arguments)
        if name is None or name not in self._tools or json_object is None:
            return _Item.UNKNOWN
        self._begin_call(name)
        self._add("arguments", json_object)
        self._end_call()
        return _Item.CALL

    def _tail(self) -> _Step:
        """Parse the tail of a call, if present."""
        assert self._format is not None
        start = len(self._consumed)
        if not (yield from self._match_all(self._format.tail)):
            self._rewind(start)

    def _stream_arguments(self, name: str) -> _Step:
        """Parse and emit the arguments of a call, a JSON object."""
        self._begin_call(name)
        depth, quoted, escaped = 0, False, False
        while self._char:
            char = self._char
            self._add("arguments", char)
            if quoted:
                quoted = char != '"' or escaped
                escaped = char == "\\" and not escaped
            elif char == '"':
                quoted = True
            else:
                depth += (char in "{[") - (char in "}]")
            yield from self._advance()
            self._consumed.clear()
            if depth == 0:
                break
        self._end_call()

    def _key(self) -> Generator[None, str, str | None]:
        """Parse a key and its colon; None on a mismatch."""
        key = yield from self._string()
        yield from self._blank()
        if key is None or not (yield from self._match(":")):
            return None
        yield from self._blank()
        return key

    def _string(self) -> Generator[None, str, str | None]:
        """Parse a JSON string of at most `_MAX_NAME_CHARS`; None on a mismatch."""
        text = (yield from self._quoted(_MAX_NAME_CHARS)) if self._char == '"' else None
        try:
            return None if text is None else json.loads(text, strict=False)
        except ValueError:
            return None

    def _quoted(self, max_chars: float = math.inf) -> Generator[None, str, str | None]:
        """Parse a JSON string; return it with its quotes, None if it is incomplete."""
        start, escaped = len(self._consumed), False
        yield from self._advance()
        while self._char and len(self._consumed) - start <= max_chars:
            closes = self._char == '"' and not escaped
            escaped = self._char == "\\" and not escaped
            yield from self._advance()
            if closes:
                return "".join(self._consumed[start:])
        return None

    def _json_text(self) -> Generator[None, str, str | None]:
        """Parse a JSON value; return its text, None at a character that cannot be JSON.

        It checks that brackets match and that only JSON characters occur outside of strings. At
        most two false starts in a text can therefore run on for long, which bounds the cost.
        """
        start, brackets = len(self._consumed), list[str]()
        while self._char:
            char = self._char
            if char == '"':
                if (yield from self._quoted()) is None:
                    return None
            elif char not in _JSON_CHARS:
                return None
            else:
                if char in "[{":
                    brackets.append("]" if char == "[" else "}")
                elif char in "]}" and (not brackets or brackets.pop() != char):
                    return None
                yield from self._advance()
            may_be_complete = char in '"]}' or self._char in ",]}" or self._char.isspace()
            if may_be_complete and not brackets:
                return "".join(self._consumed[start:])
        return None

    def _xml(self, properties: Mapping[str, Any]) -> _Step:
        """Parse XML parameters and emit them as a JSON object."""
        self._add("arguments", "{")
        expected = set(properties) if properties else None
        separator = ""
        while True:
            self._consumed.clear()
            yield from self._blank()
            if (yield from self._match(_PARAMETER_END)):
                continue  # a surplus end mark
            if not (yield from self._match(_PARAMETER)):
                break
            key = yield from self._until(">")
            if key is None:
                self._unread(self._consumed[:] if self._char else "")
                break
            self._add("arguments", f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            if expected is not None:
                expected.discard(key)
            types = value_types(properties.get(key))
            if types == {"string"}:
                yield from self._text_value(expected)
            else:
                yield from self._other_value(types, expected)
        if self._cut_off:
            self._rewind(0)
        else:
            self._add("arguments", "}")

    def _text_value(self, expected: Collection[str] | None) -> _Step:
        """Parse a string parameter and emit it character by character."""
        self._add("arguments", '"')
        if self._char == "\n":
            yield from self._advance()
        newline = ""  # held back: the newline before the end mark is not part of the value
        while self._char:
            self._consumed.clear()
            if self._char == "<" and (yield from self._ends_value(expected)):
                break
            if not self._char:
                return
            if newline:
                self._add("arguments", r"\n")
            newline = "\n" if self._char == "\n" else ""
            if not newline:
                self._add("arguments", json.dumps(self._char, ensure_ascii=False)[1:-1])
            yield from self._advance()
        else:
            if self._cut_off:
                return
        self._add("arguments", '"')

    def _other_value(self, types: set[str] | None, expected: Collection[str] | None) -> _Step:
        """Parse a parameter whose type is known only at its end."""
        chars: list[str] = []
        while self._char:
            self._consumed.clear()
            if self._char == "<" and (yield from self._ends_value(expected)):
                break
            chars.append(self._char)
            yield from self._advance()
        else:
            if self._cut_off:
                return
        text = "".join(chars).removeprefix("\n").removesuffix("\n")
        self._add("arguments", parameter_json(text, types))

    def _ends_value(self, expected: Collection[str] | None) -> _Reads:
        """Return whether the value of a parameter ends here.

        Only the end mark of the parameter is consumed. Models sometimes omit it; then the next
        parameter or the end of the call ends the value.

        Args:
            expected: parameters of the schema that the call has not set; None without a schema.
        """
        if (yield from self._match(_PARAMETER_END)):
            return True
        ends = False
        if (yield from self._match(_PARAMETER)):
            key = yield from self._until(">")
            ends = key is not None and (expected is None or key in expected)
        else:
            ends = yield from self._call_ends()
        self._rewind(0)
        return ends

    def _call_ends(self) -> _Reads:
        """Return whether a mark ends the call: another mark or the end of the answer follows it."""
        assert self._format is not None
        texts = (*self._format.tail, *self._format.end, *self._format.begin)
        marks = [text.strip() for text in texts]
        if not (yield from self._match_any(marks)):
            return False
        yield from self._blank()
        return not self._char or (yield from self._match_any([*marks, self._format.head[0]]))

    def _match_any(self, texts: Sequence[str]) -> _Reads:
        """Match one of the texts; return whether one matched, else consume nothing."""
        for text in texts:
            if (yield from self._match(text)):
                return True
        return False
