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
from megatron.inference.server.tool_parsers.formats import (
    HARMONY_MARKS,
    AnswerFormats,
    ParameterFormat,
    ToolFormat,
)

# Keywords of schemas that the grammar of marked parameters can enforce. Annotations are ignored.
_ANNOTATIONS = {"title", "description", "$schema", "$comment", "examples", "default", "deprecated"}
_OBJECT_KEYWORDS = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
}
_STRING_KEYWORDS = {"type", "enum", "const", "minLength", "maxLength"}
_SPACE = r"/[ \n\t]{1,8}/"
_HARMONY_MARK = "|".join(map(re.escape, HARMONY_MARKS))


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
        if self._formats.channels:
            header = ["<|channel|>final", " <|constrain|>json", "<|message|>"]
            begin, constraint, message = (self._literals([text]) for text in header)
            answer = f"{begin} ({constraint})? {message} {answer}"
        self._rule("start", f"{self._reasoning(in_reasoning)} {answer}")
        return "\n".join(self._lines)

    def text(self, conversation: Conversation, *, in_reasoning: bool) -> str:
        """Return the rules of answers with calls."""
        tool_format, required = self._formats.tools, conversation.choice == "required"
        assert tool_format is not None
        if self._formats.channels:
            answer = self._messages(conversation.callable_tools, required=required)
        else:
            many_calls = conversation.parallel and conversation.forced_tool is None
            formats = (tool_format, *tool_format.variants)
            tails = [
                self._calls(index, conversation.callable_tools, variant, many_calls)
                for index, variant in enumerate(formats)
            ]
            if required:
                answer = self._required(formats, tails, many_calls=many_calls)
            else:
                answer = self._optional(formats, tails, many_calls=many_calls)
        self._rule("start", f"{self._reasoning(in_reasoning)} {answer}")
        return "\n".join(self._lines)

    def _calls(
        self, index: int, tools: Sequence[Tool], tool_format: ToolFormat, many_calls: bool
    ) -> str:
        """Add the rules of the calls of a section; return the body of a section after its start.

        Args:
            index: index of the format, which makes names of rules unique.
            tools: tools that may be called.
            tool_format: the format.
            many_calls: whether an answer may have several calls.
        """
        suffix = f"_{index}" if index else ""
        calls = [
            self._call(f"{number}{suffix}", tool, tool_format) for number, tool in enumerate(tools)
        ]
        call = self._rule(f"call{suffix}", " | ".join(calls))
        repeated_calls = ""
        if many_calls and tool_format.separator is not None:
            repeated_calls = f" ({self._literals([tool_format.separator])} {call})*"
        return f"{call}{repeated_calls} {self._literals(tool_format.end)}"

    def _required(
        self, formats: Sequence[ToolFormat], tails: Sequence[str], *, many_calls: bool
    ) -> str:
        """Return the body of answers that consist of calls in one of several formats."""
        answers = []
        for tool_format, tail in zip(formats, tails, strict=True):
            section = f"{self._literals(tool_format.begin)} {tail}"
            repeated_sections = ""
            if many_calls and tool_format.separator is None:
                separator = self._literals([tool_format.section_separator])
                repeated_sections = f" ({separator} {section})*"
            answers.append(f"{tail if tool_format.bare else section}{repeated_sections}")
        return f"({' | '.join(answers)})"

    def _optional(
        self, formats: Sequence[ToolFormat], tails: Sequence[str], *, many_calls: bool
    ) -> str:
        """Return the body of answers of text and calls."""
        tool_format = formats[0]
        if tool_format.bare:
            reasoning_format = self._formats.reasoning
            exclusion = (
                ""
                if reasoning_format is None
                else f" & {_without(re.escape(reasoning_format.begin))}"
            )
            self._lines.append(rf"PLAIN: /[^{{ \n\t](?s:.)*/{exclusion}")
            return f"({tails[0]} | PLAIN)?"
        mark = tool_format.begin[0].strip()
        bodies = []
        for variant, tail in zip(formats, tails, strict=True):
            inner = self._literals([_space_after(variant.begin[0]), *variant.begin[1:]])
            bodies.append(f"{inner} {tail}")
        head = tool_format.head[0] if tool_format.head_begins else ""
        assert isinstance(head, str)
        marks = [re.escape(text) for text in (mark, head) if text]
        self._lines.append(f"PLAIN: {_without('|'.join(marks))}")
        quantifier = "*" if many_calls else "?"
        prefix = self._until("before", mark, without=re.escape(head))
        return f"({prefix} ({' | '.join(bodies)})){quantifier} PLAIN?"

    def _messages(self, tools: Sequence[Tool], *, required: bool) -> str:
        """Return the body of answers of harmony messages, which have at most one call."""
        calls = []
        for number, tool in enumerate(tools):
            recipient = f"to=functions.{tool.name}"
            headers = (
                f"<|channel|>commentary {recipient} <|constrain|>json<|message|>",
                f" {recipient}<|channel|>commentary <|constrain|>json<|message|>",
                f" {recipient}<|channel|>commentary json<|message|>",
            )
            header = " | ".join(self._literals([text]) for text in headers)
            arguments = self._json(f"arguments{number}", _parameters(tool))
            calls.append(self._rule(f"call{number}", f"({header}) {arguments}"))
        call = self._rule("call", " | ".join(calls))
        if required:
            return call
        self._lines.append(f"PLAIN: /(?s:.)+/ & {_without(_HARMONY_MARK)}")
        final = f"{self._literals(['<|channel|>final<|message|>'])} PLAIN?"
        preamble = self._literals(["<|channel|>commentary<|message|>"])
        end = self._until("preamble", "<|end|>", without=_HARMONY_MARK)
        restart = self._literals(["<|start|>assistant"])
        messages = f"({preamble} {end} {restart} thoughts)*"
        return f"{messages} ({call} | {final})"

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
        match of the pattern `without`, if there is one, except for the mark at its end."""
        exclusion = f" & {_without(without)}" if without else ""
        if mark in self._ids:
            self._lines.append(f"{name.upper()}: /(?s:.)+/{exclusion}")
            return f"{name.upper()}? {self._literals([mark])}"
        if without:
            text = f"/(?s:.*)/ & {_without(f'{re.escape(mark)}|{without}')}"
            self._lines.append(f"{name.upper()}: ({text}) {_quoted(mark)}")
            return name.upper()
        self._lines.append(f"{name}[lazy]: /(?s:.*){_slashed(re.escape(mark))}/")
        return name

    def _reasoning(self, in_reasoning: bool) -> str:
        """Return the body of the reasoning at the start of an answer."""
        reasoning_format, tool_format = self._formats.reasoning, self._formats.tools
        if self._formats.channels:
            end = self._until("thought", "<|end|>", without=_HARMONY_MARK)
            begin = self._literals(["<|channel|>analysis<|message|>"])
            restart = self._literals(["<|start|>assistant"])
            self._rule("thoughts", f"({begin} {end} {restart})*")
            return f"{end} {restart} thoughts" if in_reasoning else "thoughts"
        if reasoning_format is None:
            return ""
        without = ""
        if tool_format is not None and tool_format.ends_reasoning:
            without = re.escape(tool_format.begin[0].strip())
        self._lines.append(f"SPACE: {_SPACE}")
        thought = f"{self._until('thought', reasoning_format.end, without=without)} SPACE?"
        return (
            thought if in_reasoning else f"({self._literals([reasoning_format.begin])} {thought})?"
        )

    def _call(self, index: str, tool: Tool, tool_format: ToolFormat) -> str:
        """Add the rule of a tool's calls; return its name."""
        head = self._literals([*tool_format.head, tool.name])
        suffix = ""
        if tool_format.name_suffix is not None:
            literal, pattern = tool_format.name_suffix
            suffix = f"({self._literals([literal])} /{pattern}/)?"
        middle = self._literals([tool_format.name_end, *tool_format.middle])
        schema = _parameters(tool)
        if tool_format.parameters is None:
            arguments = self._json(f"arguments{index}", schema)
        else:
            arguments = self._marked(f"arguments{index}", tool.name, schema, tool_format)
        body = f"{head} {suffix} {middle} {arguments} {self._literals(tool_format.tail)}"
        return self._rule(f"call{index}", body)

    def _json(self, name: str, schema: Mapping[str, Any]) -> str:
        guided_schema = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        return self._rule(name, f"%json {json.dumps(guided_schema)}")

    def _marked(
        self, name: str, tool: str, schema: Mapping[str, Any], tool_format: ToolFormat
    ) -> str:
        """Add the rule of marked parameters, in the order of their schema; return its name."""
        _check_keywords(schema, _OBJECT_KEYWORDS, f"the parameters of {tool}")
        parameters = tool_format.parameters
        assert parameters is not None
        properties = dict(schema.get("properties", {}))
        required = schema.get("required", [])
        for key in required:
            properties.setdefault(key, {})
        ends = _value_ends(tool_format, parameters)
        rules = []
        for index, (key, value_schema) in enumerate(properties.items()):
            if re.search(r"[<>\n\"]", key):
                raise BadGrammar(f"the parameter {key!r:.100} of {tool} cannot be written in XML")
            begin = [parameters.begin, key, parameters.key_end, parameters.value_begin]
            value = f"{name}_{index}"
            subject = f"{key} of {tool}"
            if value_types(value_schema) == {"string"}:
                text = self._string(value, subject, value_schema, parameters.end, ends)
            else:
                defined = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
                text = self._json(value, {**_as_object(value_schema), **defined})
                text = f"{text} {self._literals([parameters.end])}"
            rule = f"({self._literals(begin)} {text})"
            rules.append(rule if key in required else f"{rule}?")
        return self._rule(name, " ".join(rules))

    def _string(
        self, name: str, subject: str, schema: Mapping[str, Any], end: str, ends: str
    ) -> str:
        """Add the terminal of a string parameter; return the body of the string and its end.

        Args:
            name: name of the parameter's rule.
            subject: the parameter in error messages.
            schema: schema of the string.
            end: literal that the grammar writes after the string.
            ends: pattern of the texts that may end the string in the parser.
        """
        _check_keywords(schema, _STRING_KEYWORDS, subject)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            if any(re.search(ends, value) for value in values):
                raise BadGrammar(f"{subject}: a value contains a delimiter of this model's format")
            tail = self._literals([end])
            return f"({' | '.join(f'{_quoted(value)} {tail}' for value in values)})"
        min_length, max_length = schema.get("minLength", 0), schema.get("maxLength", "")
        text = f"/(?s:.){{{min_length},{max_length}}}/ & {_without(ends)}"
        terminal = name.upper()
        if end.strip() not in self._ids:
            # One terminal: the lexer would not end a separate text before its end mark.
            self._lines.append(f"{terminal}: ({text}) {_quoted(end)}")
            return terminal
        self._lines.append(f"{terminal}: {text} & /(?s:.)+/")
        return f"{terminal}{'' if min_length else '?'} {self._literals([end.lstrip()])}"


def _parameters(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments. Raises BadGrammar if they are not an object."""
    if tool.parameters.get("type", "object") != "object":
        raise BadGrammar(f"the parameters of {tool.name} are not an object")
    return {**tool.parameters, "type": "object"}


def _value_ends(tool_format: ToolFormat, parameters: ParameterFormat) -> str:
    """Return the pattern of texts that end, or may end, a string parameter in the parser."""
    literals = (*tool_format.tail, *tool_format.end, *tool_format.begin)
    marks = "|".join(re.escape(literal.strip()) for literal in literals)
    ends = [re.escape(parameters.end.strip()), re.escape(parameters.begin)]
    return "|".join([*ends, rf"({marks})\s*<"])


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
