# SPDX-License-Identifier: Apache-2.0
"""The text of an answer, as it comes, as parts: text, reasoning, tool calls and their arguments."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.inference.server.answer_formats import AnswerFormats

_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# Longest name of a tool or of a parameter, and most white space within the head of a call: what is
# read again as text when it turns out to be no call is bounded by them.
_LONGEST_NAME = 256
_MOST_SPACE = 64

_Step = Generator[None, str, None]
_Reads = Generator[None, str, bool]


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


def value_types(schema: Any) -> set[str] | None:
    """Return the JSON types that a schema allows; None where it does not say."""
    if not isinstance(schema, Mapping):
        return None
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {str(one) for one in named}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_type(value) for value in values}
    branches = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(branches, list):
        found = [value_types(branch) for branch in branches]
        return None if None in found else {t for types in found if types for t in types}
    return None


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _no_number(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _value(text: str, types: set[str] | None) -> str:
    """Return a parameter's text as JSON: as what it says if that type is allowed, else a string."""
    try:
        found = _type(json.loads(text, parse_constant=_no_number))
    except (ValueError, RecursionError):
        found = ""
    allowed = types is None or found in types or (found == "integer" and "number" in types)
    return text.strip() if found and allowed else json.dumps(text, ensure_ascii=False)


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
        self._ended = False
        self._space, self._after_mark = "", in_reasoning
        self._machine = self._answer()
        next(self._machine)

    def push(self, text: str, *, finished: bool = False) -> list[Part]:
        """Return the parts that a text adds; `finished` if no more will follow."""
        if self._format is None and self._reasoning is None:
            return [Part("text", text)] if text else []
        for char in text:
            self._machine.send(char)
        if finished:
            self._ended = True
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
            if not (yield from self._section()):
                self._unread(self._read[:])
        begins = [] if self._reasoning is None else [self._reasoning.begin]
        if self._format is not None:
            begins.append(self._format.begin[0].strip())
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
            for text in [piece] if isinstance(piece, str) else piece:
                if (yield from self._match(text.strip())):
                    break
            else:
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

    def _section(self) -> _Reads:
        """Read calls and the end of their section; say whether there was one at all."""
        assert self._format is not None
        if not (yield from self._call()):
            return False
        while True:
            self._read.clear()
            self._mark()
            if self._format.end and (yield from self._pieces(self._format.end)):
                break
            self._unread(self._read[:])
            if self._format.separator is None:
                break
            if not (yield from self._pieces([self._format.separator])) or not (
                yield from self._call()
            ):
                self._unread(self._read[:])
                break
        self._read.clear()
        return True

    def _call(self) -> _Reads:
        """Read a call; say whether there was one."""
        assert self._format is not None
        if not (yield from self._pieces(self._format.head)):
            return False
        name = yield from self._until(self._format.name_end)
        if name not in self._tools or not (yield from self._pieces(self._format.middle)):
            return False
        if self._format.arguments == "json" and self._char != "{":
            return False
        self._add("call", name)
        self.has_calls = True
        if self._format.arguments == "json":
            yield from self._json()
        else:
            yield from self._xml(self._tools[name].get("properties", {}))
        self._add("end")
        self._read.clear()
        if not (yield from self._pieces(self._format.tail)):
            self._unread(self._read[:])
        return True

    def _json(self) -> _Step:
        """Read a JSON object, up to the bracket that ends it."""
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
                return

    def _xml(self, properties: Mapping[str, Any]) -> _Step:
        """Read parameters as a JSON object."""
        self._add("arguments", "{")
        between = ""
        while True:
            yield from self._blank()
            if not (yield from self._match(_PARAMETER)):
                break
            key = yield from self._until(">")
            if key is None:
                return
            self._add("arguments", f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between = ", "
            types = value_types(properties.get(key))
            if types == {"string"}:
                yield from self._text_value()
            else:
                yield from self._other_value(types)
            if not self._char:
                return
        self._add("arguments", "}")

    def _text_value(self) -> _Step:
        """Read a parameter that is a string, piece by piece."""
        self._add("arguments", '"')
        if self._char == "\n":
            yield from self._advance()
        held = ""  # a line's end, which may be the one before the mark
        while self._char:
            self._read.clear()
            if self._char == "<" and (yield from self._match(_PARAMETER_END)):
                break
            if held:
                self._add("arguments", r"\n")
            held = "\n" if self._char == "\n" else ""
            if not held:
                self._add("arguments", json.dumps(self._char, ensure_ascii=False)[1:-1])
            yield from self._advance()
        else:
            return
        self._add("arguments", '"')

    def _other_value(self, types: set[str] | None) -> _Step:
        """Read a parameter whose type shows only when it is whole."""
        chars: list[str] = []
        while self._char:
            self._read.clear()
            if self._char == "<" and (yield from self._match(_PARAMETER_END)):
                text = "".join(chars).removeprefix("\n").removesuffix("\n")
                self._add("arguments", _value(text, types))
                return
            chars.append(self._char)
            yield from self._advance()
