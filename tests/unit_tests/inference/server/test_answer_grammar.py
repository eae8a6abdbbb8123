# SPDX-License-Identifier: Apache-2.0
"""Enforced answers: whatever the model would choose, calls parse and follow their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megatron.cli.tokenizers import ByteTokenizer
from megatron.inference.server.answer_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormats,
)
from megatron.inference.server.answer_grammar import (
    enforced,
    json_after_reasoning,
    tool_grammar,
)
from megatron.inference.server.answer_parser import AnswerParser, AnswerPart
from megatron.inference.server.conversation import Conversation, Tool
from megatron.inference.server.structured import BadGrammar, Grammars
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
#: Ends what is open.
LEANS = {*b'"}],<>/', END}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ByteTokenizer(), [END], END + 1)


def drawn(grammars: Grammars, grammar: str, begin: str = "", seed: int = 0) -> str:
    """Return a random text of a grammar that begins in a certain way."""
    mask, source = grammars.mask(grammar), random.Random(seed)
    tokens = list(begin.encode())
    while len(tokens) < 4000:
        allowed = mask(tokens).nonzero().flatten().tolist()
        assert allowed, bytes(tokens)
        leaning = [token for token in allowed if token in LEANS]
        token = source.choice(leaning if leaning and source.random() < 0.6 else allowed)
        if token == END:
            return bytes(tokens).decode()
        tokens.append(token)
    raise AssertionError(f"never ends: {bytes(tokens[:200])!r}")


def calls(parts: list[AnswerPart]) -> list[tuple[str, Any]]:
    """Return names and arguments of the calls of an answer, checked by hand."""
    found: list[list[str]] = []
    for part in parts:
        if part.kind == "call":
            found.append([part.text, ""])
        elif part.kind == "arguments":
            found[-1][1] += part.text
    named = [(name, json.loads(arguments)) for name, arguments in found]
    for name, given in named:
        if name == "now":
            assert given == {}
            continue
        assert {"who", "room", "extra"} <= given.keys() <= {"who", "room", "extra", "nights"}
        assert 1 <= len(given["who"]) <= 5
        assert given["room"] in ("single", "two < beds")
        assert given["extra"].keys() == {"late"}
        assert isinstance(given["extra"]["late"], bool)
        assert type(given.get("nights")) in (int, type(None))
    return named


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_required_calls_follow_their_schemas(grammars: Grammars, name: str) -> None:
    formats = AnswerFormats(tools=TOOL_FORMATS[name])
    seen: set[str] = set()
    counts = set()
    for more in ({}, {"forced_tool": "now"}, {"parallel": False}):
        asked = Conversation(turns=[], tools=[BOOK, NOW], choice="required", **more)
        grammar = tool_grammar(asked, formats)
        for seed in range(4 if more else 10):
            parser = AnswerParser(formats, {t.name: t.parameters for t in asked.callable_tools})
            parts = parser.push(drawn(grammars, grammar, seed=seed), finished=True)
            assert {part.kind for part in parts} <= {"call", "arguments", "end"}
            named = calls(parts)
            assert len(named) == 1 if more else named
            assert not asked.forced_tool or named[0][0] == "now"
            seen |= {name for name, _ in named}
            counts.add(len(named))
    assert seen == {"book", "now"}
    assert len(counts) > 1


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("begun", [False, True])
def test_strict_calls_come_after_text_and_reasoning(
    grammars: Grammars, name: str, begun: bool
) -> None:
    formats = AnswerFormats(tools=TOOL_FORMATS[name], reasoning=REASONING_FORMATS["qwen3"])
    asked = Conversation(turns=[], tools=[BOOK])
    grammar = tool_grammar(asked, formats, in_reasoning=begun)
    bare = TOOL_FORMATS[name].bare
    opens = "{" if bare else "So " + TOOL_FORMATS[name].begin[0].strip()
    begin = ("" if begun else "<think>") + f"Hm</think>\n{opens}"
    parser = AnswerParser(formats, {"book": BOOK.parameters}, in_reasoning=begun)
    parts = parser.push(drawn(grammars, grammar, begin), finished=True)
    assert parts[0] == AnswerPart("reasoning", "Hm")
    assert parts[1] == (AnswerPart("call", "book") if bare else AnswerPart("text", "So"))
    assert calls(parts)
    plain = AnswerParser(formats, {"book": BOOK.parameters}, in_reasoning=begun)
    text = drawn(grammars, grammar, begin.removesuffix(opens) + "No.")
    assert plain.push(text, finished=True)[0] == AnswerPart("reasoning", "Hm")


def test_special_tokens_are_written_by_their_ids() -> None:
    found = TOOL_FORMATS["hermes"]
    think = REASONING_FORMATS["qwen3"]
    marks = {70: "<tool_call>", 71: "</tool_call>", 72: "<think>", 73: "</think>"}
    formats = AnswerFormats(tools=found, reasoning=think, marks=marks)
    for choice in ("required", "auto"):
        text = tool_grammar(Conversation(turns=[], tools=[BOOK], choice=choice), formats)
        for number, mark in marks.items():
            assert f"<[{number}]>" in text
            assert mark not in text.split("start:")[1]


def test_json_may_follow_reasoning(grammars: Grammars) -> None:
    formats = AnswerFormats(reasoning=REASONING_FORMATS["qwen3"])
    schema = BOOK.parameters
    grammar = json_after_reasoning(schema, formats, in_reasoning=True)
    text = drawn(grammars, grammar, "Hm {</think>\n\n")
    assert calls([AnswerPart("call", "book"), AnswerPart("arguments", text.split("</think>")[1])])
    grammar = json_after_reasoning(schema, formats)
    assert calls(
        [AnswerPart("call", "book"), AnswerPart("arguments", drawn(grammars, grammar, "{"))]
    )


def test_what_is_enforced() -> None:
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


def allowed(grammars: Grammars, grammar: str, text: str) -> int:
    """Return how many characters of a text a grammar allows."""
    mask, tokens = grammars.mask(grammar), list(text.encode())
    for place, token in enumerate(tokens):
        if not mask(tokens[:place])[token]:
            return place
    return len(tokens)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_no_text_is_read_as_a_call_that_is_free(grammars: Grammars, choice: Any) -> None:
    """What the parser takes where a model has lost a mark, an enforced answer does not have."""
    formats = AnswerFormats(tools=TOOL_FORMATS["qwen3_coder"])
    asked = Conversation(turns=[], tools=[BOOK], choice=choice)
    grammar = tool_grammar(asked, formats)
    begin = "<tool_call>\n<function=book>\n<parameter=who>\n"
    if choice == "auto":
        for free in ("<function=book>", "So. <function=book>\n<tool_call>\n<function="):
            assert allowed(grammars, grammar, free) == free.index("<function=") + 9
        begin = "So <functions. " + begin
    long = Tool(name="book", parameters={"properties": {"who": {"type": "string"}}}, strict=True)
    grammar = tool_grammar(Conversation(turns=[], tools=[long], choice=choice), formats)
    for ending in ("<parameter=who>", "</function>\n<t", "</tool_call><", "</parameter>x"):
        text = begin + "a" + ending
        assert allowed(grammars, grammar, text) < len(text)
    text = (
        begin + "a </function> b <tool_call> c </function>\n</parameter>\n</function>\n</tool_call>"
    )
    assert allowed(grammars, grammar, text) == len(text)
    parser = AnswerParser(formats, {"book": long.parameters})
    arguments = [p.text for p in parser.push(text, finished=True) if p.kind == "arguments"]
    assert json.loads("".join(arguments)) == {"who": "a </function> b <tool_call> c </function>"}
