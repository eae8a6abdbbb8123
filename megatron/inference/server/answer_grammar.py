# SPDX-License-Identifier: Apache-2.0
"""The grammar of answers that are enforced: of tool calls, which parse and follow their schemas,
and of JSON after reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.inference.server.answer_formats import AnswerFormats, ToolFormat
from megatron.inference.server.conversation import Conversation, Tool
from megatron.inference.server.parameter_values import value_types
from megatron.inference.server.structured import WHITE_SPACE, BadGrammar, lark_grammar

# Of an object's schema, what XML parameters can be held to. Notes are of no consequence.
_NOTES = {"title", "description", "$schema", "$comment", "examples", "default", "deprecated"}
_XML_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_XML_STRING = {"type", "enum", "const", "minLength", "maxLength"}
_SPACE = r"/[ \n\t]{1,8}/"
# What ends a string, or may, as the parser reads them.
_XML_ENDS = r"</parameter>|<parameter=|(</function>|</tool_call>|<tool_call>)\s*<"


def enforced(conversation: Conversation) -> bool:
    """Say whether the calls of an answer have to follow a grammar."""
    tools = conversation.callable_tools
    return bool(tools) and (conversation.choice == "required" or any(tool.strict for tool in tools))


def tool_grammar(
    conversation: Conversation, formats: AnswerFormats, *, in_reasoning: bool = False
) -> str:
    """Return the grammar of the answers to a conversation.

    Args:
        conversation: with tools that may be called, or have to be.
        formats: of the model's answers.
        in_reasoning: the prompt has begun reasoning.

    Raises:
        BadGrammar: a schema of parameters has what the format cannot be held to.
    """
    return lark_grammar(_Rules(formats).text(conversation, in_reasoning=in_reasoning))


def json_after_reasoning(
    schema: Mapping[str, Any], formats: AnswerFormats, *, in_reasoning: bool = False
) -> str:
    """Return the grammar of reasoning, if there is any, and JSON that a schema describes.

    Args:
        schema: of the JSON.
        formats, in_reasoning: see `tool_grammar`.
    """
    return lark_grammar(_Rules(formats).json_text(schema, in_reasoning=in_reasoning))


class _Rules:
    """Rules in Lark's syntax, as llguidance reads it."""

    def __init__(self, formats: AnswerFormats) -> None:
        self._formats = formats
        self._ids = {text: number for number, text in formats.marks.items()}
        self._lines: list[str] = []

    def json_text(self, schema: Mapping[str, Any], *, in_reasoning: bool) -> str:
        """Return the rules of JSON."""
        answer = self._json("answer", schema)
        self._rule("start", f"{self._reasoning(in_reasoning)} {answer}")
        return "\n".join(self._lines)

    def text(self, conversation: Conversation, *, in_reasoning: bool) -> str:
        """Return the rules of answers with calls."""
        found, has_to = self._formats.tools, conversation.choice == "required"
        assert found is not None
        tools = enumerate(conversation.callable_tools)
        calls = [self._call(number, tool, found) for number, tool in tools]
        self._rule("call", " | ".join(calls))
        several = conversation.parallel and conversation.only is None
        more = ""
        if several and found.separator is not None:
            more = f" ({self._literals([found.separator])} call)*"
        tail = f"call{more} {self._literals(found.end)}"
        section = f"{self._literals(found.begin)} {tail}"
        again = f' ("\\n" {section})*' if several and found.separator is None else ""
        if has_to:
            answer = f"{tail if found.bare else section}{again}"
        elif found.bare:
            thinks = self._formats.reasoning
            unless = "" if thinks is None else f" & {_without(re.escape(thinks.begin))}"
            self._lines.append(rf"PLAIN: /[^{{ \n\t](?s:.)*/{unless}")
            answer = f"({tail} | PLAIN)?"
        else:
            mark = found.begin[0].strip()
            inner = self._literals([_space_after(found.begin[0]), *found.begin[1:]])
            head = re.escape(found.head[0]) if found.head_begins else ""
            marks = [re.escape(mark), *([head] if head else [])]
            self._lines.append(f"PLAIN: {_without('|'.join(marks))}")
            times = "*" if several else "?"
            before = self._until("before", mark, without=head)
            answer = f"({before} {inner} {tail}){times} PLAIN?"
        self._rule("start", f"{self._reasoning(in_reasoning)} {answer}")
        return "\n".join(self._lines)

    def _rule(self, name: str, body: str) -> str:
        self._lines.append(f"{name}: {body}")
        return name

    def _literals(self, pieces: Sequence[str | tuple[str, ...]]) -> str:
        """Return texts as they are written; special tokens by their ids."""
        texts = [piece if isinstance(piece, str) else piece[0] for piece in pieces]
        if not self._ids:
            return _quoted("".join(texts))
        marks = "|".join(map(re.escape, self._ids))
        parts = re.split(f"({marks})", "".join(texts))
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else _quoted(part)
            for part in parts
            if part
        )

    def _until(self, name: str, mark: str, *, without: str = "") -> str:
        """Return what matches any text up to a mark, and the mark; the text has no match of a
        pattern, if there is one."""
        unless = f" & {_without(without)}" if without else ""
        if mark in self._ids:
            self._lines.append(f"{name.upper()}: /(?s:.)+/{unless}")
            return f"{name.upper()}? {self._literals([mark])}"
        self._lines.append(f"{name}[lazy]: /(?s:.*){_slashed(re.escape(mark))}/{unless}")
        return name

    def _reasoning(self, begun: bool) -> str:
        thinks = self._formats.reasoning
        if thinks is None:
            return ""
        self._lines.append(f"SPACE: {_SPACE}")
        thought = f"{self._until('thought', thinks.end)} SPACE?"
        return thought if begun else f"({self._literals([thinks.begin])} {thought})?"

    def _call(self, number: int, tool: Tool, found: ToolFormat) -> str:
        """Return the name of the rule of a tool's calls."""
        head = self._literals([*found.head, tool.name, found.name_end, *found.middle])
        schema = {**tool.parameters, "type": "object"}
        if tool.parameters.get("type", "object") != "object":
            raise BadGrammar(f"the parameters of {tool.name} are no object")
        if found.layout != "xml":
            arguments = self._json(f"arguments{number}", schema)
        else:
            arguments = self._xml(f"arguments{number}", tool.name, schema)
        return self._rule(f"call{number}", f"{head} {arguments} {self._literals(found.tail)}")

    def _json(self, name: str, schema: Mapping[str, Any]) -> str:
        shape = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        return self._rule(name, f"%json {json.dumps(shape)}")

    def _xml(self, name: str, tool: str, schema: Mapping[str, Any]) -> str:
        """Return what matches an object's parameters, in the order of its schema."""
        _refuse_others(schema, _XML_OBJECT, f"the parameters of {tool}")
        properties = dict(schema.get("properties", {}))
        needed = schema.get("required", [])
        for key in needed:
            properties.setdefault(key, {})
        parts = []
        for number, (key, shape) in enumerate(properties.items()):
            if re.search(r"[<>\n]", key):
                raise BadGrammar(f"the parameter {key!r:.100} of {tool} cannot be written in XML")
            value = self._xml_value(f"{name}_{number}", f"{key} of {tool}", shape, schema)
            part = f"({_quoted(f'<parameter={key}>' + chr(10))} {value})"
            parts.append(part if key in needed else f"{part}?")
        return self._rule(name, " ".join(['"\\n"', *parts]))

    def _xml_value(self, name: str, what: str, shape: Any, whole: Mapping[str, Any]) -> str:
        end = "\n</parameter>\n"
        if value_types(shape) != {"string"}:
            defined = {k: whole[k] for k in ("$defs", "definitions") if k in whole}
            shape = {**shape, **defined} if isinstance(shape, Mapping) else shape
            return f"{self._json(name, _as_object(shape))} {_quoted(end)}"
        _refuse_others(shape, _XML_STRING, what)
        values = shape.get("enum", [shape["const"]] if "const" in shape else None)
        if values is not None:
            if any(re.search(_XML_ENDS, value) for value in values):
                raise BadGrammar(f"{what}: a value holds a mark of this model's format")
            texts = " | ".join(_quoted(value + end) for value in values)
            return self._rule(name, texts)
        least, most = shape.get("minLength", 0), shape.get("maxLength", "")
        text = f"/(?s:.){{{least},{most}}}/ & {_without(_XML_ENDS)}"
        terminal = name.upper()
        self._lines.append(f"{terminal}: ({text}) {_quoted(end)}")
        return terminal


def _as_object(schema: Any) -> Mapping[str, Any]:
    if schema is False:
        raise BadGrammar("a parameter that may have no value")
    return schema if isinstance(schema, Mapping) else {}


def _space_after(piece: str) -> str:
    """Return the white space that a text ends with."""
    return piece[len(piece.rstrip()) :]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _slashed(pattern: str) -> str:
    """Return a pattern as it stands between slashes."""
    return pattern.replace("/", r"\/")


def _without(pattern: str) -> str:
    """Return what matches any text without a match of a pattern. `~` alone is of bytes."""
    return f"(/(?s:.*)/ & ~/(?s:.*)({_slashed(pattern)})(?s:.*)/)"


def _refuse_others(schema: Mapping[str, Any], known: set[str], what: str) -> None:
    """Raise BadGrammar for a keyword of a schema that XML parameters are not held to."""
    for keyword in schema:
        if keyword not in known and keyword not in _NOTES:
            raise BadGrammar(f"{what}: {keyword!r:.100} cannot be enforced in this model's format")
