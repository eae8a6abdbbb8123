# SPDX-License-Identifier: Apache-2.0
"""Answers are read into parts, the same ones whichever way their text comes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.cli.tokenizers import ByteTokenizer
from megatron.core.inference.text_stream import TextStream
from megatron.inference.config import Service
from megatron.inference.server.answer_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormats,
    decode_with_marks,
    formats_of,
)
from megatron.inference.server.answer_parser import AnswerParser, Part

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}},
    },
    "now": {"type": "object"},
}
#: What each family writes for: reasoning, a text, two calls. Arguments of "weather" are ARGUMENTS.
ARGUMENTS = '{"city": "Zür\\"i}ch", "days": 3}'
WRITTEN = {
    "hermes": "<think>\nHm é\n</think>\n\nWait…\n<tool_call>\n"
    '{"name": "weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>\n<tool_call>\n"
    '{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<think>Hm é</think>Wait…\n\n<tool_call>\n<function=weather>\n"
    '<parameter=city>\nZür"i}ch\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
    "</function>\n</tool_call><tool_call>\n<function=now>\n</function>\n</tool_call>\n",
    "llama3_json": "<think>Hm é</think>Wait… "
    '<|python_tag|>{"name": "weather", "parameters": '
    + ARGUMENTS
    + '}; {"name": "now", "parameters": {}}',
    "deepseek_v3": "<think>Hm é</think>Wait…<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>weather\n```json\n" + ARGUMENTS + "\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "nemotron": "<think>Hm é</think>Wait…<TOOLCALL>["
    '{"name": "weather", "arguments": ' + ARGUMENTS + '}, {"name": "now", "arguments": {}}'
    "]</TOOLCALL>",
}
READ = [
    Part("reasoning", "Hm é"),
    Part("text", "Wait…"),
    Part("call", "weather"),
    Part("arguments", ARGUMENTS),
    Part("end"),
    Part("call", "now"),
    Part("arguments", "{}"),
    Part("end"),
]
NO_CALLS = (
    "a <tool_call> b\n",
    "",
    "  <thin",
    "x < y <think",
    "<tool_call>\n",
    '{"a": 1}',
    ' {"name": "other", "parameters": {}} \n',
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}, "name": "now"}</tool_call>',
    "<tool_call><function=other></function></tool_call>",
    "<TOOLCALL>[3]</TOOLCALL>",
    '<|python_tag|>{"name": "now"}',
    "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    "<" * 40,
    '{"name": "' + "n" * 300,
    "\n \t\n",
)


def read(name: str, pieces: Iterable[str], *, in_reasoning: bool = False) -> list[Part]:
    """Return the parts of a text that comes in pieces, adjacent ones of a kind as one."""
    formats = AnswerFormats(tools=TOOL_FORMATS[name], reasoning=REASONING_FORMATS["qwen3"])
    parser = AnswerParser(formats, TOOLS, in_reasoning=in_reasoning)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.push("", finished=True)
    assert parser.has_calls == any(part.kind == "call" for part in parts)
    found: list[Part] = []
    for part in parts:
        if (
            found
            and found[-1].kind == part.kind
            and part.kind in ("text", "reasoning", "arguments")
        ):
            found[-1] = Part(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return found


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_split_of_an_answer_reads_the_same(name: str) -> None:
    text = WRITTEN[name]
    assert read(name, [text]) == READ
    assert read(name, text) == READ
    for place in range(len(text)):
        assert read(name, [text[:place], text[place:]]) == READ, place


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_split_of_its_bytes_reads_the_same(name: str) -> None:
    """Marks and characters of several bytes come in parts, as tokens of a model do."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.tokenize(WRITTEN[name])

    def pieces(*places: int) -> Iterable[str]:
        stream = TextStream(tokenizer.detokenize)
        bounds = [0, *places, len(tokens)]
        for start, end in itertools.pairwise(bounds):
            yield stream.push(tokens[start:end], finished=end == len(tokens))

    assert read(name, pieces(*range(1, len(tokens)))) == READ
    source = random.Random(1)
    for place in source.sample(range(len(tokens)), 40):
        assert read(name, pieces(place)) == READ


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_no_call_is_text_as_it_was(name: str) -> None:
    for text in NO_CALLS:
        assert "".join(p.text for p in read(name, [text])) == text
        assert {p.kind for p in read(name, [text])} <= {"text"}
        assert read(name, text) == read(name, [text])


PIECES = st.sampled_from(
    ["<think>", "</think>", "\n", " ", "é", "{", "}", '"name": "now"', ", ", '"arguments": {}', "<"]
    + ["<tool_call>", "</tool_call>", "<TOOLCALL>[", "]", "; ", "<function=now>", "</function>"]
    + ["<parameter=city>", "</parameter>", '{"name": "now", "parameters": {"a": [1]}}', "x"]
)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(PIECES, max_size=12), name=st.sampled_from(sorted(TOOL_FORMATS)))
def test_random_marks_read_the_same_in_any_split(texts: list[str], name: str) -> None:
    text = "".join(texts)
    whole = read(name, [text])
    assert read(name, texts) == whole == read(name, text)
    begun = [p.kind for p in whole if p.kind in ("call", "end")]
    assert begun == ["call", "end"] * (len(begun) // 2)  # each call ends before the next


def test_arguments_come_before_their_call_has_ended() -> None:
    formats = AnswerFormats(tools=TOOL_FORMATS["hermes"])
    parser = AnswerParser(formats, TOOLS)
    shown = parser.push('<tool_call>{"name": "now", "arguments": {"a": "lon')
    assert shown == [Part("call", "now"), Part("arguments", '{"a": "lon')]
    parser = AnswerParser(AnswerFormats(tools=TOOL_FORMATS["qwen3_coder"]), TOOLS)
    shown = parser.push("<tool_call><function=weather><parameter=city>\nlon")
    assert shown == [Part("call", "weather"), Part("arguments", '{"city": "lon')]


def test_reasoning_that_the_prompt_has_begun() -> None:
    for text in ("\nfirst\n</think>\n\nthen", "first</think>then"):
        assert read("hermes", text, in_reasoning=True) == [
            Part("reasoning", "first"),
            Part("text", "then"),
        ]
    assert read("hermes", "never ends \n", in_reasoning=True) == [Part("reasoning", "never ends")]


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("3", 3),
        ('"3"', '"3"'),
        ("NaN", "NaN"),
        ("[1, {}]", [1, {}]),
        ("two\nlines\n", "two\nlines\n"),
        ("é < 3 </param>", "é < 3 </param>"),
        ("", ""),
    ],
)
def test_xml_parameters_have_their_schemas_types(written: str, means: object) -> None:
    def of(key: str) -> object:
        text = f"<tool_call><function=weather><parameter={key}>\n{written}\n</parameter></function>"
        found = read("qwen3_coder", text)
        return json.loads("".join(p.text for p in found if p.kind == "arguments"))[key]

    assert of("city") == written
    assert of("days") == (means if isinstance(means, int) else written)
    assert of("any") == ("3" if written == '"3"' else means)


def test_without_tools_and_reasoning_text_is_left_alone() -> None:
    parser = AnswerParser(AnswerFormats(tools=TOOL_FORMATS["hermes"]), {})
    assert parser.push(" <tool_call> \n") == [Part("text", " <tool_call> \n")]


def test_marks_that_are_special_tokens_are_kept() -> None:
    class Special(ByteTokenizer):
        """Has a special token for a mark, which decoding drops."""

        def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [300] if text == "<think>" else super().tokenize(text)

        def detokenize(self, ids: Sequence[int]) -> str:
            return super().detokenize([i for i in ids if i != 300])

    tokenizer = Special()
    formats = formats_of("hermes", "qwen3", tokenizer)
    assert formats.marks == {300: "<think>"}
    assert decode_with_marks(tokenizer, formats.marks, [97, 300, 98]) == "a<think>b"


def test_the_options_name_what_the_tables_have() -> None:
    hints = get_type_hints(Service)
    for field, table in (
        ("tool_call_parser", TOOL_FORMATS),
        ("reasoning_parser", REASONING_FORMATS),
    ):
        names = {n for part in get_args(hints[field]) for n in get_args(part)}
        assert names == set(table)
