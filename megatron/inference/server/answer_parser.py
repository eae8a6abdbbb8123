# SPDX-License-Identifier: Apache-2.0
"""The text of an answer, as it comes, as parts: text, reasoning, tool calls and their arguments."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

from megatron.inference.server.answer_formats import AnswerFormats
from megatron.inference.server.log_lines import LOG, REQUEST_ID
from megatron.inference.server.parameter_values import (
    arguments_json,
    parameter_json,
    value_types,
)

_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# Longest name of a tool or of a parameter, and most white space within the head of a call: what is
# read again as text when it turns out to be no call is bounded by them.
_LONGEST_NAME = 256
_MOST_SPACE = 64

# Members of a call that is an object, and characters of JSON outside of its strings.
_ARGUMENTS = ("arguments", "parameters")
_CALL_MEMBERS = ("name", *_ARGUMENTS, "type", "id")
_JSON_CHARS = frozenset("[]{},: \t\n\r+-.0123456789eEtrufalsn")


@dataclass(frozen=True)
class Part:
    """A piece of an answer.

    Args:
        kind: "call" begins a tool call, "arguments" adds to those of the last call begun, "end"
            ends it.
        text: of the piece; of "call" the tool's name.
    """

    kind: Literal["text", "reasoning", "call", "arguments", "end"]
    text: str = ""


class _Item(Enum):
    """What an item of a section of tool calls is."""

    CALL = auto()  # of a tool of the request; its parts were added
    OTHER = auto()  # written as a call is, of no tool of the request or without arguments
    NONE = auto()  # no item


_Step = Generator[None, str, None]
_Reads = Generator[None, str, bool]
_Items = Generator[None, str, _Item]


class AnswerParser:
    """Turn the text of an answer into parts.

    The parts add up to the same whichever way the text is split among calls: a machine reads
    character after character. White space next to a mark belongs to no part. A call names a tool
    of the request; what looks like one and is none is text.

    Args:
        formats: of the model.
        tools: schemas of the parameters of each tool by its name; without tools no call is read.
        in_reasoning: the prompt has begun reasoning.
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
        """A tool was called."""
        self._parts: list[Part] = []
        self._char = ""  # the next one; "" at the end
        self._again: deque[str] = deque()  # read, and to be read again
        self._read: list[str] = []  # since the head of a call began
        self._ended = self._cut_off = False
        self._space, self._after_mark = "", in_reasoning
        self._machine = self._answer()
        next(self._machine)

    def push(self, text: str, *, finished: bool = False, cut_off: bool = False) -> list[Part]:
        """Return the parts that a text adds.

        Args:
            text: that follows.
            finished: no more will follow.
            cut_off: the model has not ended it itself: arguments that are not whole stay open.
        """
        if self._format is None and self._reasoning is None:
            return [Part("text", text)] if text else []
        for char in text:
            self._machine.send(char)
        if finished:
            self._ended, self._cut_off = True, cut_off
            for _ in self._machine:
                pass
        found, self._parts = self._parts, []
        return found

    def _advance(self) -> _Step:
        self._read.append(self._char)
        if self._again:
            self._char = self._again.popleft()
        elif self._ended:
            self._char = ""
        else:
            self._char = (yield) or ""

    def _unread(self, text: Sequence[str]) -> None:
        """Have characters read again, and what follows them."""
        if text:
            rest = [self._char] if self._char else []
            self._again.extendleft(reversed([*text, *rest]))
            self._char = self._again.popleft()
            del self._read[len(self._read) - len(text) :]

    def _no_mark(self, place: int) -> None:
        """Have what was read since a place read again, as it is no mark. Half of one that follows
        parts of a call, at the end of an answer that was cut off, is dropped."""
        if self._cut_off and place == 0:
            self._again.clear()
            self._char = ""
            self._read.clear()
        else:
            self._unread(self._read[place:])

    def _add(self, kind: Any, text: str = "") -> None:
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind == kind and kind != "call":
            self._parts[-1] = Part(kind, last.text + text)
        else:
            self._parts.append(Part(kind, text))

    def _say(self, kind: str) -> _Step:
        """Add the next character; white space waits for what follows it."""
        if self._char.isspace():
            self._space += self._char
        else:
            self._add(kind, self._char if self._after_mark else self._space + self._char)
            self._space, self._after_mark = "", False
        yield from self._advance()

    def _mark(self) -> None:
        """Note that a mark was read."""
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
                self._unread(self._read[:])
        if self._format is not None and self._format.bare:
            yield from self._blank()
            if not (yield from self._section(marked=False)):
                self._unread(self._read[:])
        begins = [] if self._reasoning is None else [self._reasoning.begin]
        if self._format is not None:
            begins.append(self._format.begin[0].strip())
            begins += [self._format.head[0]] if self._format.head_begins else []
        firsts = {begin[0] for begin in begins}
        while self._char:
            if self._char in firsts and (yield from self._marked()):
                continue
            yield from self._say("text")
            self._read.clear()
        if not self._after_mark and self._space:
            self._add("text", self._space)

    def _marked(self) -> _Reads:
        """Read what a mark begins; say whether there was any, else nothing was read."""
        if self._reasoning is not None and (yield from self._match(self._reasoning.begin)):
            yield from self._reason()
            return True
        if self._format is None:
            return False
        if (yield from self._pieces(self._format.begin)) and (yield from self._section()):
            return True
        self._unread(self._read[:])
        if self._format.head_begins and (yield from self._section()):
            return True
        self._unread(self._read[:])
        return False

    def _reason(self) -> _Step:
        """Read reasoning and the mark that ends it."""
        assert self._reasoning is not None
        self._mark()
        while self._char:
            first = self._char == self._reasoning.end[0]
            if first and (yield from self._match(self._reasoning.end)):
                break
            yield from self._say("reasoning")
            self._read.clear()
        self._mark()
        self._read.clear()

    def _match(self, text: str) -> _Reads:
        """Read a text; say whether it was there, else nothing was read."""
        for place, char in enumerate(text):
            if self._char != char:
                self._unread(text[:place])
                return False
            yield from self._advance()
        return True

    def _blank(self) -> _Step:
        """Read white space."""
        for _ in range(_MOST_SPACE):
            if not self._char.isspace():
                break
            yield from self._advance()

    def _pieces(self, pieces: Sequence[str | tuple[str, ...]]) -> _Reads:
        """Read some texts with white space around them; say whether all were there."""
        for piece in pieces:
            yield from self._blank()
            texts = [piece] if isinstance(piece, str) else piece
            if not (yield from self._any([text.strip() for text in texts])):
                return False
        yield from self._blank()
        return True

    def _until(self, end: str) -> Generator[None, str, str | None]:
        """Read a name up to what ends it; None if it has no end."""
        name = ""
        while self._char and len(name) <= _LONGEST_NAME:
            if self._char == end[0] and (yield from self._match(end)):
                return name.strip()
            name += self._char
            yield from self._advance()
        return None

    def _section(self, *, marked: bool = True) -> _Reads:
        """Read calls and the end of their section; say whether there was one at all.

        What is written as a call and is none is left out if there are calls beside it; a section
        of nothing else is text.

        Args:
            marked: the section's begin was read: any object in it may be a call.
        """
        assert self._format is not None
        called, left_out = False, False
        while True:
            item = yield from self._call(marked=marked)
            if item is _Item.NONE:
                break
            called |= item is _Item.CALL
            left_out |= item is _Item.OTHER
            if called:
                self._read.clear()
                self._mark()
            place = len(self._read)
            if self._format.end and (yield from self._pieces(self._format.end)):
                break
            self._no_mark(place)
            if self._format.separator is None:
                break
            if not (yield from self._pieces([self._format.separator])):
                self._unread(self._read[place:])
                break
        if not called:
            return False
        if item is _Item.NONE:
            self._unread(self._read[:])  # from the separator on
        if left_out:
            request = REQUEST_ID.get()
            LOG.warning("request %s: dropped a tool call that names none of its tools", request)
        self._read.clear()
        return True

    def _call(self, *, marked: bool) -> _Items:
        """Read a call and add its parts."""
        assert self._format is not None
        if self._format.layout == "object":
            return (yield from self._object_call(any_member=marked))
        if not (yield from self._pieces(self._format.head)):
            return _Item.NONE
        name = yield from self._until(self._format.name_end)
        if name is None or not (yield from self._pieces(self._format.middle)):
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
        """Read the arguments of a call, which are JSON, and its tail."""
        if name in self._tools and self._char == "{":
            yield from self._arguments_of(name)
            yield from self._tail()
            return _Item.CALL
        text = yield from self._json_text()
        if text is None:
            return _Item.NONE
        yield from self._tail()
        return self._whole_call(name, text)

    def _object_call(self, *, any_member: bool) -> _Items:
        """Read a call that is an object; arguments that follow the name come piece by piece.

        Args:
            any_member: it may have others than those of calls. Without, an answer in JSON is soon
                seen to be no call.
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
                    yield from self._arguments_of(name)
                    yield from self._more_members()
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
        return self._whole_call(name, arguments)

    def _more_members(self) -> _Step:
        """Read the members of a call that follow its arguments, and the bracket that ends it."""
        while True:
            yield from self._blank()
            if (yield from self._match("}")):
                return
            if not (yield from self._match(",")):
                break
            yield from self._blank()
            if (yield from self._key()) is None or (yield from self._json_text()) is None:
                break
        self._no_mark(0)

    def _begin_call(self, name: str) -> None:
        self._add("call", name)
        self.has_calls = True

    def _end_call(self) -> None:
        self._add("end")
        self._read.clear()

    def _whole_call(self, name: str | None, arguments: str | None) -> _Item:
        """Add the parts of a call that was read as a whole, if it is one."""
        json_object = None if arguments is None else arguments_json(arguments)
        if name is None or name not in self._tools or json_object is None:
            return _Item.OTHER
        self._begin_call(name)
        self._add("arguments", json_object)
        self._end_call()
        return _Item.CALL

    def _tail(self) -> _Step:
        """Read what follows the arguments of a call, if it is there."""
        assert self._format is not None
        place = len(self._read)
        if not (yield from self._pieces(self._format.tail)):
            self._no_mark(place)

    def _arguments_of(self, name: str) -> _Step:
        """Read a call's arguments, a JSON object, up to the bracket that ends it."""
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
            self._read.clear()
            if depth == 0:
                break
        self._end_call()

    def _key(self) -> Generator[None, str, str | None]:
        """Read a member's name and the colon after it; None if it is none."""
        key = yield from self._string()
        yield from self._blank()
        if key is None or not (yield from self._match(":")):
            return None
        yield from self._blank()
        return key

    def _string(self) -> Generator[None, str, str | None]:
        """Read a JSON string that is a name; None if it is none."""
        text = (yield from self._quoted(_LONGEST_NAME)) if self._char == '"' else None
        try:
            return None if text is None else json.loads(text, strict=False)
        except ValueError:
            return None

    def _quoted(self, longest: float = math.inf) -> Generator[None, str, str | None]:
        """Read a JSON string; return it with its quotes, None if it has no end."""
        place, escaped = len(self._read), False
        yield from self._advance()
        while self._char and len(self._read) - place <= longest:
            ends = self._char == '"' and not escaped
            escaped = self._char == "\\" and not escaped
            yield from self._advance()
            if ends:
                return "".join(self._read[place:])
        return None

    def _json_text(self) -> Generator[None, str, str | None]:
        """Read a JSON value; return its text, None where a character is of no JSON.

        Brackets match, and only strings hold other characters than JSON has outside of them: of
        values that begin at different places of a text at most two go on for long.
        """
        place, brackets = len(self._read), list[str]()
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
            whole = char in '"]}' or self._char in ",]}" or self._char.isspace()
            if whole and not brackets:
                return "".join(self._read[place:])
        return None

    def _xml(self, properties: Mapping[str, Any]) -> _Step:
        """Read parameters as a JSON object."""
        self._add("arguments", "{")
        expected = set(properties) if properties else None
        between = ""
        while True:
            self._read.clear()
            yield from self._blank()
            if (yield from self._match(_PARAMETER_END)):
                continue  # one too many
            if not (yield from self._match(_PARAMETER)):
                break
            key = yield from self._until(">")
            if key is None:
                self._unread(self._read[:] if self._char else "")
                break
            self._add("arguments", f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between = ", "
            if expected is not None:
                expected.discard(key)
            types = value_types(properties.get(key))
            if types == {"string"}:
                yield from self._text_value(expected)
            else:
                yield from self._other_value(types, expected)
        if self._cut_off:
            self._no_mark(0)
        else:
            self._add("arguments", "}")

    def _text_value(self, expected: Collection[str] | None) -> _Step:
        """Read a parameter that is a string, piece by piece."""
        self._add("arguments", '"')
        if self._char == "\n":
            yield from self._advance()
        held = ""  # a line's end, which may be the one before the mark
        while self._char:
            self._read.clear()
            if self._char == "<" and (yield from self._ends_value(expected)):
                break
            if not self._char:
                return
            if held:
                self._add("arguments", r"\n")
            held = "\n" if self._char == "\n" else ""
            if not held:
                self._add("arguments", json.dumps(self._char, ensure_ascii=False)[1:-1])
            yield from self._advance()
        else:
            if self._cut_off:
                return
        self._add("arguments", '"')

    def _other_value(self, types: set[str] | None, expected: Collection[str] | None) -> _Step:
        """Read a parameter whose type shows only when it is whole."""
        chars: list[str] = []
        while self._char:
            self._read.clear()
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
        """Say whether a mark ends the value of a parameter. Its own mark is read, others are not:
        the next parameter, or what ends the call, where the model has lost the mark.

        Args:
            expected: parameters that the call has not had; None where the schema has none.
        """
        if (yield from self._match(_PARAMETER_END)):
            return True
        ends = False
        if (yield from self._match(_PARAMETER)):
            key = yield from self._until(">")
            ends = key is not None and (expected is None or key in expected)
        else:
            ends = yield from self._call_ends()
        self._no_mark(0)
        return ends

    def _call_ends(self) -> _Reads:
        """Say whether a mark ends a call: another one follows, or nothing. Else it is a value's."""
        assert self._format is not None
        pieces = (*self._format.tail, *self._format.end, *self._format.begin)
        marks = [piece.strip() for piece in pieces]
        if not (yield from self._any(marks)):
            return False
        yield from self._blank()
        return not self._char or (yield from self._any([*marks, self._format.head[0]]))

    def _any(self, texts: Sequence[str]) -> _Reads:
        """Read one of some texts; say whether there was one, else nothing was read."""
        for text in texts:
            if (yield from self._match(text)):
                return True
        return False
