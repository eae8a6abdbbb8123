# SPDX-License-Identifier: Apache-2.0
"""Grammars of enforced answers: tool calls that follow their schemas, and JSON after reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.inference.server.chat_template import Conversation, Tool
from megatron.inference.server.guided_decoding.grammars import WHITE_SPACE, BadGrammar, lark_grammar
from megatron.inference.server.tool_parsers.arguments import value_types
from megatron.inference.server.tool_parsers.formats import AnswerFormats, ToolFormat

# Keywords of schemas that the grammar of XML parameters can enforce. Annotations are ignored.
_ANNOTATIONS = {"title", "description", "$schema", "$comment", "examples", "default", "deprecated"}
_XML_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_XML_STRING = {"type", "enum", "const", "minLength", "maxLength"}
_SPACE = r"/[ \n\t]{1,8}/"
# Texts that end, or may end, a string parameter in the parser.
_XML_ENDS = r"</parameter>|<parameter=|(</function>|</tool_call>|<tool_call>)\s*<"


def enforced(conversation: Conversation) -> bool:
    """Return whether the calls of an answer have to follow a grammar."""
    tools = conversation.callable_tools
    return bool(tools) and (conversation.choice == "required" or any(tool.strict for tool in tools))


def tool_grammar(
    conversation: Conversation, formats: AnswerFormats, *, in_reasoning: bool = False
) -> str:
    """Return the grammar of the answers to a conversation.

    Args:
        conversation: conversation with callable tools.
        formats: answer formats of the model.
        in_reasoning: whether the prompt ends inside reasoning.

    Raises:
        BadGrammar: the format cannot enforce a keyword of a parameter schema.
    """
    return lark_grammar(_Rules(formats).text(conversation, in_reasoning=in_reasoning))


def json_after_reasoning(
    schema: Mapping[str, Any], formats: AnswerFormats, *, in_reasoning: bool = False
) -> str:
    """Return the grammar of optional reasoning followed by JSON of a schema.

    Args:
        schema: schema of the JSON.
        formats, in_reasoning: see `tool_grammar`.
    """
    return lark_grammar(_Rules(formats).json_text(schema, in_reasoning=in_reasoning))


class _Rules:
    """Builder of rules in the Lark syntax of llguidance."""

    def __init__(self, formats: AnswerFormats) -> None:
        self._formats = formats
        self._ids = {text: number for number, text in formats.marks.items()}
        self._lines: list[str] = []

    def json_text(self, schema: Mapping[str, Any], *, in_reasoning: bool) -> str:
        """Return the rules of answers in JSON."""
        answer = self._json("answer", schema)
        self._rule("start", f"{self._reasoning(in_reasoning)} {answer}")
        return "\n".join(self._lines)

    def text(self, conversation: Conversation, *, in_reasoning: bool) -> str:
        """Return the rules of answers with calls."""
        tool_format, required = self._formats.tools, conversation.choice == "required"
        assert tool_format is not None
        tools = enumerate(conversation.callable_tools)
        calls = [self._call(number, tool, tool_format) for number, tool in tools]
        self._rule("call", " | ".join(calls))
        many_calls = conversation.parallel and conversation.forced_tool is None
        repeated_calls = ""
        if many_calls and tool_format.separator is not None:
            repeated_calls = f" ({self._literals([tool_format.separator])} call)*"
        tail = f"call{repeated_calls} {self._literals(tool_format.end)}"
        section = f"{self._literals(tool_format.begin)} {tail}"
        repeated_sections = (
            f' ("\\n" {section})*' if many_calls and tool_format.separator is None else ""
        )
        if required:
            answer = f"{tail if tool_format.bare else section}{repeated_sections}"
        elif tool_format.bare:
            reasoning_format = self._formats.reasoning
            exclusion = (
                ""
                if reasoning_format is None
                else f" & {_without(re.escape(reasoning_format.begin))}"
            )
            self._lines.append(rf"PLAIN: /[^{{ \n\t](?s:.)*/{exclusion}")
            answer = f"({tail} | PLAIN)?"
        else:
            mark = tool_format.begin[0].strip()
            inner = self._literals([_space_after(tool_format.begin[0]), *tool_format.begin[1:]])
            head = re.escape(tool_format.head[0]) if tool_format.head_begins else ""
            marks = [re.escape(mark), *([head] if head else [])]
            self._lines.append(f"PLAIN: {_without('|'.join(marks))}")
            quantifier = "*" if many_calls else "?"
            prefix = self._until("before", mark, without=head)
            answer = f"({prefix} {inner} {tail}){quantifier} PLAIN?"
        self._rule("start", f"{self._reasoning(in_reasoning)} {answer}")
        return "\n".join(self._lines)

    def _rule(self, name: str, body: str) -> str:
        self._lines.append(f"{name}: {body}")
        return name

    def _literals(self, literals: Sequence[str | tuple[str, ...]]) -> str:
        """Return literals as a rule body; special tokens are written as ids."""
        texts = [literal if isinstance(literal, str) else literal[0] for literal in literals]
        if not self._ids:
            return _quoted("".join(texts))
        marks = "|".join(map(re.escape, self._ids))
        segments = re.split(f"({marks})", "".join(texts))
        return " ".join(
            f"<[{self._ids[segment]}]>" if segment in self._ids else _quoted(segment)
            for segment in segments
            if segment
        )

    def _until(self, name: str, mark: str, *, without: str = "") -> str:
        """Return a rule body that matches text up to a mark, and the mark. The text contains no
        match of the pattern `without`, if there is one."""
        exclusion = f" & {_without(without)}" if without else ""
        if mark in self._ids:
            self._lines.append(f"{name.upper()}: /(?s:.)+/{exclusion}")
            return f"{name.upper()}? {self._literals([mark])}"
        self._lines.append(f"{name}[lazy]: /(?s:.*){_slashed(re.escape(mark))}/{exclusion}")
        return name

    def _reasoning(self, in_reasoning: bool) -> str:
        reasoning_format = self._formats.reasoning
        if reasoning_format is None:
            return ""
        self._lines.append(f"SPACE: {_SPACE}")
        thought = f"{self._until('thought', reasoning_format.end)} SPACE?"
        return (
            thought if in_reasoning else f"({self._literals([reasoning_format.begin])} {thought})?"
        )

    def _call(self, index: int, tool: Tool, tool_format: ToolFormat) -> str:
        """Add the rule of a tool's calls; return its name."""
        head = self._literals(
            [*tool_format.head, tool.name, tool_format.name_end, *tool_format.middle]
        )
        schema = {**tool.parameters, "type": "object"}
        if tool.parameters.get("type", "object") != "object":
            raise BadGrammar(f"the parameters of {tool.name} are not an object")
        if tool_format.layout != "xml":
            arguments = self._json(f"arguments{index}", schema)
        else:
            arguments = self._xml(f"arguments{index}", tool.name, schema)
        return self._rule(f"call{index}", f"{head} {arguments} {self._literals(tool_format.tail)}")

    def _json(self, name: str, schema: Mapping[str, Any]) -> str:
        guided_schema = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        return self._rule(name, f"%json {json.dumps(guided_schema)}")

    def _xml(self, name: str, tool: str, schema: Mapping[str, Any]) -> str:
        """Add the rule of XML parameters, in the order of their schema; return its name."""
        _check_keywords(schema, _XML_OBJECT, f"the parameters of {tool}")
        properties = dict(schema.get("properties", {}))
        required = schema.get("required", [])
        for key in required:
            properties.setdefault(key, {})
        parameters = []
        for index, (key, value_schema) in enumerate(properties.items()):
            if re.search(r"[<>\n]", key):
                raise BadGrammar(f"the parameter {key!r:.100} of {tool} cannot be written in XML")
            value = self._xml_value(f"{name}_{index}", f"{key} of {tool}", value_schema, schema)
            parameter = f"({_quoted(f'<parameter={key}>' + chr(10))} {value})"
            parameters.append(parameter if key in required else f"{parameter}?")
        return self._rule(name, " ".join(['"\\n"', *parameters]))

    def _xml_value(
        self, name: str, subject: str, schema: Any, root_schema: Mapping[str, Any]
    ) -> str:
        end = "\n</parameter>\n"
        if value_types(schema) != {"string"}:
            defined = {k: root_schema[k] for k in ("$defs", "definitions") if k in root_schema}
            schema = {**schema, **defined} if isinstance(schema, Mapping) else schema
            return f"{self._json(name, _as_object(schema))} {_quoted(end)}"
        _check_keywords(schema, _XML_STRING, subject)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            if any(re.search(_XML_ENDS, value) for value in values):
                raise BadGrammar(f"{subject}: a value contains a delimiter of this model's format")
            texts = " | ".join(_quoted(value + end) for value in values)
            return self._rule(name, texts)
        min_length, max_length = schema.get("minLength", 0), schema.get("maxLength", "")
        text = f"/(?s:.){{{min_length},{max_length}}}/ & {_without(_XML_ENDS)}"
        terminal = name.upper()
        self._lines.append(f"{terminal}: ({text}) {_quoted(end)}")
        return terminal


def _as_object(schema: Any) -> Mapping[str, Any]:
    if schema is False:
        raise BadGrammar("a parameter whose schema is false")
    return schema if isinstance(schema, Mapping) else {}


def _space_after(text: str) -> str:
    """Return the trailing white space of a text."""
    return text[len(text.rstrip()) :]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _slashed(pattern: str) -> str:
    """Return a pattern escaped for use between slashes."""
    return pattern.replace("/", r"\/")


def _without(pattern: str) -> str:
    """Return a rule body that matches text without a match of a pattern.

    `~` alone complements over bytes, so the intersection restricts it to valid text.
    """
    return f"(/(?s:.*)/ & ~/(?s:.*)({_slashed(pattern)})(?s:.*)/)"


def _check_keywords(schema: Mapping[str, Any], supported: set[str], subject: str) -> None:
    """Raise BadGrammar for a keyword of a schema that the XML grammar cannot enforce."""
    for keyword in schema:
        if keyword not in supported and keyword not in _ANNOTATIONS:
            raise BadGrammar(
                f"{subject}: {keyword!r:.100} cannot be enforced in this model's format"
            )
