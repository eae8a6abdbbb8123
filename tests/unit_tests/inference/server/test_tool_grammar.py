# SPDX-License-Identifier: Apache-2.0
"""Enforced answers: calls parse and follow their schemas, whatever the model prefers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megatron.cli.tokenizers import ByteTokenizer
from megatron.inference.server.chat_template import Conversation, Tool
from megatron.inference.server.guided_decoding.grammars import BadGrammar, Grammars
from megatron.inference.server.guided_decoding.tool_grammar import (
    enforced,
    json_after_reasoning,
    tool_grammar,
)
from megatron.inference.server.tool_parsers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormats,
)
from megatron.inference.server.tool_parsers.output_parser import OutputParser
from megatron.inference.server.tool_parsers.tool_calls import OutputSegment
from tests.support.http_server import END

BOOK = Tool(
    name="book",
    parameters={
        "type": "object",
        "properties": {
            "who": {"type": "string", "minLength": 1, "maxLength": 5},
            "nights": {"type": ["integer", "null"]},
            "room": {"enum": ["single", "two < beds"]},
            "extra": {
                "type": "object",
                "properties": {"late": {"type": "boolean"}},
                "required": ["late"],
                "additionalProperties": False,
            },
        },
        "required": ["who", "room", "extra"],
        "additionalProperties": False,
    },
    strict=True,
)
NOW = Tool(name="now")
#: Tokens that close open values.
CLOSING_TOKENS = {*b'"}],<>/', END}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ByteTokenizer(), [END], END + 1)


def random_answer(grammars: Grammars, grammar: str, begin: str = "", seed: int = 0) -> str:
    """Return a random text of a grammar with a given beginning."""
    mask, source = grammars.mask(grammar), random.Random(seed)
    tokens = list(begin.encode())
    while len(tokens) < 4000:
        allowed_tokens = mask(tokens).nonzero().flatten().tolist()
        assert allowed_tokens, bytes(tokens)
        closing = [token for token in allowed_tokens if token in CLOSING_TOKENS]
        token = source.choice(closing if closing and source.random() < 0.6 else allowed_tokens)
        if token == END:
            return bytes(tokens).decode()
        tokens.append(token)
    raise AssertionError(f"never ends: {bytes(tokens[:200])!r}")


def calls(segments: list[OutputSegment]) -> list[tuple[str, Any]]:
    """Check the calls of an answer; return their names and arguments."""
    pairs: list[list[str]] = []
    for segment in segments:
        if segment.kind == "call":
            pairs.append([segment.text, ""])
        elif segment.kind == "arguments":
            pairs[-1][1] += segment.text
    checked = [(name, json.loads(arguments)) for name, arguments in pairs]
    for name, arguments_of_call in checked:
        if name == "now":
            assert arguments_of_call == {}
            continue
        assert (
            {"who", "room", "extra"}
            <= arguments_of_call.keys()
            <= {"who", "room", "extra", "nights"}
        )
        assert 1 <= len(arguments_of_call["who"]) <= 5
        assert arguments_of_call["room"] in ("single", "two < beds")
        assert arguments_of_call["extra"].keys() == {"late"}
        assert isinstance(arguments_of_call["extra"]["late"], bool)
        assert type(arguments_of_call.get("nights")) in (int, type(None))
    return checked


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_required_calls_validate_against_their_schemas(grammars: Grammars, name: str) -> None:
    formats = AnswerFormats(tools=TOOL_FORMATS[name])
    names: set[str] = set()
    counts = set()
    for restriction in ({}, {"forced_tool": "now"}, {"parallel": False}):
        conversation = Conversation(turns=[], tools=[BOOK, NOW], choice="required", **restriction)
        grammar = tool_grammar(conversation, formats)
        for seed in range(4 if restriction else 10):
            parser = OutputParser(
                formats, {t.name: t.parameters for t in conversation.callable_tools}
            )
            segments = parser.push(random_answer(grammars, grammar, seed=seed), finished=True)
            assert {segment.kind for segment in segments} <= {"call", "arguments", "end"}
            answer_calls = calls(segments)
            assert len(answer_calls) == 1 if restriction else answer_calls
            assert not conversation.forced_tool or answer_calls[0][0] == "now"
            names |= {name for name, _ in answer_calls}
            counts.add(len(answer_calls))
    assert names == {"book", "now"}
    assert len(counts) > 1


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_strict_calls_follow_text_and_reasoning(
    grammars: Grammars, name: str, in_reasoning: bool
) -> None:
    formats = AnswerFormats(tools=TOOL_FORMATS[name], reasoning=REASONING_FORMATS["qwen3"])
    conversation = Conversation(turns=[], tools=[BOOK])
    grammar = tool_grammar(conversation, formats, in_reasoning=in_reasoning)
    bare = TOOL_FORMATS[name].bare
    opens = "{" if bare else "So " + TOOL_FORMATS[name].begin[0].strip()
    begin = ("" if in_reasoning else "<think>") + f"Hm</think>\n{opens}"
    parser = OutputParser(formats, {"book": BOOK.parameters}, in_reasoning=in_reasoning)
    segments = parser.push(random_answer(grammars, grammar, begin), finished=True)
    assert segments[0] == OutputSegment("reasoning", "Hm")
    assert segments[1] == (OutputSegment("call", "book") if bare else OutputSegment("text", "So"))
    assert calls(segments)
    plain = OutputParser(formats, {"book": BOOK.parameters}, in_reasoning=in_reasoning)
    text = random_answer(grammars, grammar, begin.removesuffix(opens) + "No.")
    assert plain.push(text, finished=True)[0] == OutputSegment("reasoning", "Hm")


def test_grammar_refers_to_special_tokens_by_id() -> None:
    hermes = TOOL_FORMATS["hermes"]
    think = REASONING_FORMATS["qwen3"]
    marks = {70: "<tool_call>", 71: "</tool_call>", 72: "<think>", 73: "</think>"}
    formats = AnswerFormats(tools=hermes, reasoning=think, marks=marks)
    for choice in ("required", "auto"):
        text = tool_grammar(Conversation(turns=[], tools=[BOOK], choice=choice), formats)
        for number, mark in marks.items():
            assert f"<[{number}]>" in text
            assert mark not in text.split("start:")[1]


def test_json_may_follow_reasoning(grammars: Grammars) -> None:
    formats = AnswerFormats(reasoning=REASONING_FORMATS["qwen3"])
    schema = BOOK.parameters
    grammar = json_after_reasoning(schema, formats, in_reasoning=True)
    text = random_answer(grammars, grammar, "Hm {</think>\n\n")
    assert calls(
        [OutputSegment("call", "book"), OutputSegment("arguments", text.split("</think>")[1])]
    )
    grammar = json_after_reasoning(schema, formats)
    assert calls(
        [
            OutputSegment("call", "book"),
            OutputSegment("arguments", random_answer(grammars, grammar, "{")),
        ]
    )


def test_strict_and_required_tools_are_enforced() -> None:
    turns: list[Any] = []
    assert not enforced(Conversation(turns=turns, tools=[NOW]))
    assert enforced(Conversation(turns=turns, tools=[NOW, BOOK]))
    assert enforced(Conversation(turns=turns, tools=[NOW], choice="required"))
    assert not enforced(Conversation(turns=turns, tools=[BOOK], choice="none"))
    assert not enforced(Conversation(turns=turns))


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "array"},
        {"anyOf": [{"required": ["a"]}]},
        {"properties": {"a": {"type": "string", "pattern": "a+"}}},
        {"properties": {"a>b": {"type": "string"}}},
        {"properties": {"a": False}},
        {"properties": {"a": {"enum": ["b", "</parameter>"]}}},
        {"properties": {"a": {"const": "</function> </tool_call>"}}},
    ],
)
def test_schemas_that_xml_cannot_follow_are_refused(parameters: dict[str, Any]) -> None:
    formats = AnswerFormats(tools=TOOL_FORMATS["qwen3_coder"])
    tool = Tool(name="f", parameters=parameters)
    with pytest.raises(BadGrammar):
        tool_grammar(Conversation(turns=[], tools=[tool], choice="required"), formats)


def allowed_length(grammars: Grammars, grammar: str, text: str) -> int:
    """Return the length of the prefix of a text that a grammar allows."""
    mask, tokens = grammars.mask(grammar), list(text.encode())
    for index, token in enumerate(tokens):
        if not mask(tokens[:index])[token]:
            return index
    return len(tokens)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_text_cannot_contain_an_unenforced_call(grammars: Grammars, choice: Any) -> None:
    """The parser accepts calls with missing marks, an enforced answer's grammar excludes them."""
    formats = AnswerFormats(tools=TOOL_FORMATS["qwen3_coder"])
    conversation = Conversation(turns=[], tools=[BOOK], choice=choice)
    grammar = tool_grammar(conversation, formats)
    begin = "<tool_call>\n<function=book>\n<parameter=who>\n"
    if choice == "auto":
        for text_with_call in ("<function=book>", "So. <function=book>\n<tool_call>\n<function="):
            assert (
                allowed_length(grammars, grammar, text_with_call)
                == text_with_call.index("<function=") + 9
            )
        begin = "So <functions. " + begin
    unbounded = Tool(
        name="book", parameters={"properties": {"who": {"type": "string"}}}, strict=True
    )
    grammar = tool_grammar(Conversation(turns=[], tools=[unbounded], choice=choice), formats)
    for ending in ("<parameter=who>", "</function>\n<t", "</tool_call><", "</parameter>x"):
        text = begin + "a" + ending
        assert allowed_length(grammars, grammar, text) < len(text)
    text = (
        begin + "a </function> b <tool_call> c </function>\n</parameter>\n</function>\n</tool_call>"
    )
    assert allowed_length(grammars, grammar, text) == len(text)
    parser = OutputParser(formats, {"book": unbounded.parameters})
    arguments = [p.text for p in parser.push(text, finished=True) if p.kind == "arguments"]
    assert json.loads("".join(arguments)) == {"who": "a </function> b <tool_call> c </function>"}
