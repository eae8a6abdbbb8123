# SPDX-License-Identifier: Apache-2.0
"""The answer parser yields the same segments for every split of an answer's text."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.cli.tokenizers import ByteTokenizer
from megatron.inference.serve import Service
from megatron.inference.server.tool_parsers.char_reader import CharReader
from megatron.inference.server.tool_parsers.formats import (
    ALIASES,
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormats,
    check_parsers,
    decode_with_marks,
    formats_of,
)
from megatron.inference.server.tool_parsers.output_parser import OutputParser
from megatron.inference.server.tool_parsers.tool_calls import OutputSegment
from tests.support.call_templates import render

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}},
    },
    "now": {"type": "object"},
}
#: Each model family's answer with reasoning, text and two calls; "weather" has ARGUMENTS.
ARGUMENTS = '{"city": "Zür\\"i}ch", "days": 3}'
ANSWERS = {
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
PARSED = [
    OutputSegment("reasoning", "Hm é"),
    OutputSegment("text", "Wait…"),
    OutputSegment("call", "weather"),
    OutputSegment("arguments", ARGUMENTS),
    OutputSegment("end"),
    OutputSegment("call", "now"),
    OutputSegment("arguments", "{}"),
    OutputSegment("end"),
]
NO_CALLS = (
    "a <tool_call> b\n", "", "  <thin", "x < y <think", "<tool_call>\n", '{"a": 1}',
    ' {"name": "other", "parameters": {}} \n',
    '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}, "name": "other"}</tool_call>',
    '<tool_call>{"name": "now", "arguments": "3"}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"a": 1]}</tool_call>'.replace("now", "other"),
    '<TOOLCALL>[{"name": "other", "arguments": {}}, {"name": "now"}]</TOOLCALL>',
    '{"name": "other", "parameters": {}}; {"result": 3}',
    "<tool_call><function=other></function></tool_call>", "<TOOLCALL>[3]</TOOLCALL>",
    '<|python_tag|>{"name": "now"}', "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "<" * 40,
    '{"name": "' + "n" * 300, "\n \t\n",
)  # fmt: skip


def parse(
    name: str, chunks: Iterable[str], *, in_reasoning: bool = False, tools: Any = TOOLS
) -> list[OutputSegment]:
    """Parse the chunks of an answer; return its segments, adjacent segments of a kind merged."""
    formats = AnswerFormats(tools=TOOL_FORMATS[name], reasoning=REASONING_FORMATS["qwen3"])
    parser = OutputParser(formats, tools, in_reasoning=in_reasoning)
    segments = [segment for chunk in chunks for segment in parser.push(chunk)]
    segments += parser.push("", finished=True)
    assert parser.has_calls == any(segment.kind == "call" for segment in segments)
    merged: list[OutputSegment] = []
    for segment in segments:
        if (
            merged
            and merged[-1].kind == segment.kind
            and segment.kind in ("text", "reasoning", "arguments")
        ):
            merged[-1] = OutputSegment(segment.kind, merged[-1].text + segment.text)
        else:
            merged.append(segment)
    return merged


@pytest.mark.parametrize("name", ANSWERS)
def test_every_split_of_an_answer_parses_the_same(name: str) -> None:
    text = ANSWERS[name]
    assert parse(name, [text]) == PARSED
    assert parse(name, text) == PARSED
    for cut in range(len(text)):
        assert parse(name, [text[:cut], text[cut:]]) == PARSED, cut


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_text_without_a_valid_call_is_unchanged(name: str) -> None:
    for text in NO_CALLS:
        assert "".join(p.text for p in parse(name, [text])) == text
        assert {p.kind for p in parse(name, [text])} <= {"text"}
        assert parse(name, text) == parse(name, [text])


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "\n", " ", "é", "{", "}", '"name": "now"', ", ", '"arguments": {}', "<"]
    + ['"name": "other"', '"arguments": "{}"', '"arguments": [', '"', "<parameter=days>", "[1, {}]"]
    + ["<tool_call>", "</tool_call>", "<TOOLCALL>[", "]", "; ", "<function=now>", "</function>"]
    + ["<parameter=city>", "</parameter>", '{"name": "now", "parameters": {"a": [1]}}', "x"]
)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(FRAGMENTS, max_size=12), name=st.sampled_from(sorted(TOOL_FORMATS)))
def test_random_marks_parse_the_same_in_any_split(texts: list[str], name: str) -> None:
    text = "".join(texts)
    whole = parse(name, [text])
    assert parse(name, texts) == whole == parse(name, text)
    call_kinds = [p.kind for p in whole if p.kind in ("call", "end")]
    assert call_kinds == ["call", "end"] * (len(call_kinds) // 2)  # each call ends before the next


CALL_TEMPLATES = {
    "hermes": ("<tool_call>{}</tool_call>", 1),
    "llama3_json": ("<|python_tag|>{}; {}; {}", 3),
    "nemotron": ("<TOOLCALL>[{}, {}, {}]</TOOLCALL>", 3),
}
#: Values of a parameter and the types of its schema. JSON writes a value as JSON, XML as Python
#: prints it.
VALUES: list[tuple[Any, Any]] = [
    ("Bern", "string"), ("", "string"), ('Zür"i}ch{', "string"), ("two\nlines\n", "string"),
    ("  padded\t", "string"), ("C:\\new\\u0041", "string"), ("日本 🦙", "string"),
    ("True", "string"), ("None", "string"), ("[1]", "string"),
    ("a < b </param> </function> c", "string"),
    ("<tool_call> and <parameter=x>", "string"), (True, "boolean"), (False, ["boolean", "null"]),
    (None, "null"), (None, ["integer", "null"]), (7, "integer"), (-10, "int"), (2.5, "number"),
    (1e-05, "number"), ([1, "it's", None, [True]], "array"), ([], "list"),
    ({"a": {"b": [False, 'say "no"']}, "c": 1.5}, "object"),
    ({"k": "tab\t, é, back\\slash"}, "dict"), ({}, None),
]  # fmt: skip
#: Templates that write the calls of other formats.
TEMPLATES = {
    "mistral": "mistral_v3",
    "kimi_k2": "kimi_k2",
    "glm45": "glm45",
    "glm47": "glm47",
    "minimax": "minimax_m1",
    "minimax_m2": "minimax_m2",
    "deepseek_v31": "deepseek_v31",
}
ORDERS = (("first", "value", "last"), ("value", "last", "first"), ("last", "first", "value"))
OTHER_ARGUMENTS = {"first": 1, "last": "x y"}


def schema(types: Any) -> dict[str, Any]:
    value_schema = {} if types is None else {"type": types}
    properties = {"first": {"type": "integer"}, "value": value_schema, "last": {"type": "string"}}
    return {"take": {"type": "object", "properties": properties}}


def call_text(name: str, arguments: dict[str, Any], order: int) -> str:
    """Return a call of "take" as a model family writes it.

    If the call is a JSON object, `order` also selects the order of its members."""
    if name in TEMPLATES:
        text = render(TEMPLATES[name], [("take", arguments)]).text
        return text.rpartition("</think>")[2].strip("\n")
    if name == "qwen3_coder":
        parameters = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function=take>\n{parameters}</function>\n</tool_call>"
    if name == "deepseek_v3":
        return (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>take\n```json\n"
            f"{json.dumps(arguments)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        )
    word = "parameters" if name == "llama3_json" else "arguments"
    call = (
        {"name": "take", word: arguments},
        {word: arguments, "name": "take"},
        {"id": "c1", word: json.dumps(arguments), "type": "function", "name": "take"},
    )[order]
    text = json.dumps(call, ensure_ascii=order == 0)
    return (
        CALL_TEMPLATES[name][0].partition("{}")[0]
        + text
        + CALL_TEMPLATES[name][0].rpartition("{}")[2]
    )


@pytest.mark.parametrize("name", [*ANSWERS, *TEMPLATES])
def test_arguments_keep_their_values_and_types(name: str) -> None:
    """Parse every value in every order: whole, by character, and in 6 random splits."""
    source = random.Random(name)
    for (value, types), order in itertools.product(VALUES, range(3)):
        arguments = {key: OTHER_ARGUMENTS.get(key, value) for key in ORDERS[order]}
        text = "So.\n" + call_text(name, arguments, order)
        splits: list[Sequence[str]] = [[text], text]
        for _ in range(6):
            cuts = sorted(source.sample(range(len(text)), source.randint(1, 6)))
            splits.append([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])])
        for split in splits:
            content, call, arguments_segment, end = parse(name, split, tools=schema(types))
            assert (content, call, end) == (
                OutputSegment("text", "So."),
                OutputSegment("call", "take"),
                OutputSegment("end"),
            )
            parsed = json.loads(arguments_segment.text)
            assert parsed == arguments, split
            assert type(parsed["value"]) is type(value), split


@pytest.mark.parametrize(
    ("written", "types", "value"),
    [
        ("true", "boolean", True),
        ("FALSE", "boolean", False),
        ("NULL", "integer", None),
        ("None", ["string", "null"], None),
        ("None", ["string", "integer"], "None"),
        ("yes", "boolean", "yes"),
        ("+7", "integer", 7),
        ("007", "integer", 7),
        (".5", "number", 0.5),
        ("inf", "number", "inf"),
        ("7.5", "integer", "7.5"),
        ("'3'", None, "'3'"),
        ('"3"', None, "3"),
        ('"3"', "integer", '"3"'),
        ("3", None, 3),
        ("NaN", None, "NaN"),
        ("{1: 'a', None: 'b',}", "object", {"1": "a", "null": "b"}),
        ("('a', \"b\")", "array", ["a", "b"]),
        (r"['\'\x41\u00e9\101\d\\', '\U0001f999']", "array", ["'AéA\\d\\", "🦙"]),
        ("[__import__('os')]", "array", "[__import__('os')]"),
        ("[" * 5000 + "]" * 5000, "array", "[" * 5000 + "]" * 5000),
        ("{'a': [1, 2}", "object", "{'a': [1, 2}"),
        ("{'a', 'b'}", "object", "{'a', 'b'}"),
    ],
)
def test_xml_values_in_other_spellings_are_converted(written: str, types: Any, value: Any) -> None:
    text = f"<tool_call><function=take><parameter=value>\n{written}\n</parameter></function>"
    _, arguments, _ = parse("qwen3_coder", [text], tools=schema(types))
    assert json.loads(arguments.text) == {"value": value}


@pytest.mark.parametrize("types", ["string", None])
@pytest.mark.parametrize(
    "mark",
    [
        "<tool_call>",
        "\n</parameter>",
        "</function>",
        "\n</tool_call>",
        "\n</parameter>\n</function>",
        "\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_calls_are_parsed_with_missing_marks(mark: str, types: str | None) -> None:
    text = (
        "<tool_call>\n<function=take>\n<parameter=first>\n1\n</parameter>\n<parameter=value>\n"
        "Bern\n</parameter>\n</function>\n</tool_call>\n"
    )
    calls = [
        OutputSegment("call", "take"),
        OutputSegment("arguments", '{"first": 1, "value": "Bern"}'),
        OutputSegment("end"),
    ]
    for answer in (text.replace(mark, ""), text + text.replace(mark, "") + text):
        count = answer.count("<function=")
        assert parse("qwen3_coder", [answer], tools=schema(types)) == calls * count
        assert parse("qwen3_coder", answer, tools=schema(types)) == calls * count


def test_next_parameter_ends_a_parameter_without_end_mark() -> None:
    text = "<function=weather><parameter=city>\nUlm\n<parameter=days>\n3\n</parameter>"
    segments = [
        OutputSegment("call", "weather"),
        OutputSegment("arguments", '{"city": "Ulm", "days": 3}'),
        OutputSegment("end"),
    ]
    for split in ([text], text):
        assert parse("qwen3_coder", split) == segments
    # A mark of an unknown or repeated parameter belongs to the value.
    text = "<function=weather><parameter=city>\n<parameter=x> <parameter=city>\n</parameter>"
    assert json.loads(parse("qwen3_coder", text)[1].text) == {
        "city": "<parameter=x> <parameter=city>"
    }


@pytest.mark.parametrize("name", [*ANSWERS, *TEMPLATES])
def test_truncated_call_leaves_no_text(name: str) -> None:
    """Wherever the answer ends, the marks of a call that has begun are not text."""
    text = call_text(name, {"first": 1, "value": "é", "last": "x"}, 0)
    formats, ends = AnswerFormats(tools=TOOL_FORMATS[name]), []
    for end in range(1, len(text) + 1):
        parser = OutputParser(formats, schema("string"))
        segments = [*parser.push(text[:end]), *parser.push("", finished=True, cut_off=True)]
        if parser.has_calls:
            assert "text" not in {segment.kind for segment in segments}, text[:end]
            ends.append(
                "".join(segment.text for segment in segments if segment.kind == "arguments")
            )
    assert all(ends[-1].startswith(arguments) for arguments in ends)
    assert json.loads(ends[-1]) == {"first": 1, "value": "é", "last": "x"}


UNKNOWN = {
    "llama3_json": '{"name": "other", "parameters": {"a": "}; <|python_tag|>"}}',
    "nemotron": '{"name": "other", "arguments": {"a": ["]</TOOLCALL>"]}}',
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>other\n```json\n"
    '{"a": {}}\n```<｜tool▁call▁end｜>',
}
SECTIONS = {
    "llama3_json": ("<|python_tag|>", "; ", ""),
    "nemotron": ("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("unknown", [(0,), (1,), (2,), (0, 1), (0, 2)])
def test_tool_calls_next_to_an_unknown_tool_are_parsed(
    name: str, unknown: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Some of a section's three calls name unknown tools: the others are parsed, none is text."""
    begin, separator, end = SECTIONS[name]
    valid = UNKNOWN[name].replace("other", "now")
    written = [UNKNOWN[name] if index in unknown else valid for index in range(3)]
    text = f"Hm.{begin}{separator.join(written)}{end}"
    for split in ([text], text):
        content, *calls = parse(name, split)
        assert content == OutputSegment("text", "Hm.")
        assert [segment.kind for segment in calls] == ["call", "arguments", "end"] * (
            3 - len(unknown)
        )
        assert {segment.text for segment in calls if segment.kind == "call"} == {"now"}
    assert {record.levelname for record in caplog.records} == {"WARNING"}


@pytest.mark.parametrize("name", ["hermes", "nemotron"])
@pytest.mark.parametrize("written", ["{}", '""', '" {}"', "null"])
def test_missing_arguments_are_an_empty_object(name: str, written: str) -> None:
    before, _, after = CALL_TEMPLATES[name][0].partition("{}" if name == "hermes" else "{}, {}, {}")
    for members in (
        f'"name": "now", "arguments": {written}',
        f'"arguments": {written}, "name": "now"',
    ):
        segments = parse(name, [f"{before}{{{members}}}{after}"])
        assert [segment.kind for segment in segments] == ["call", "arguments", "end"]
        assert json.loads(segments[1].text) == {}


def test_members_after_the_arguments_are_not_text() -> None:
    call = '{"name": "now", "arguments": {}, "id": "c", "more": [1, {"a": "}"}]}'
    segments = parse("hermes", f"<tool_call>{call}</tool_call>Yes")
    assert segments[2:] == [OutputSegment("end"), OutputSegment("text", "Yes")]


@pytest.mark.parametrize(
    ("name", "written", "segments"),
    [
        # An answer may begin with a call; an object that cannot be a call is not held back.
        ("llama3_json", '{"result": [', [("text", '{"result": [')]),
        ("llama3_json", '{"name": "Ann", "age": 3', [("text", '{"name": "Ann", "age": 3')]),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": {"a": "lon',
            [("call", "now"), ("arguments", '{"a": "lon')],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=weather><parameter=city>\nlon",
            [("call", "weather"), ("arguments", '{"city": "lon')],
        ),
    ],
)
def test_unfinished_answer_is_streamed(
    name: str, written: str, segments: list[tuple[str, str]]
) -> None:
    parser = OutputParser(AnswerFormats(tools=TOOL_FORMATS[name]), TOOLS)
    assert parser.push(written) == [OutputSegment(*segment) for segment in segments]


@pytest.mark.parametrize(
    "unit",
    [
        '<TOOLCALL>[{"name":"x","arguments":{"a":[',
        '<TOOLCALL>[{"name":"x","arguments":{"<',
        '<TOOLCALL>[{"name":"x","arguments":"{',
        '<TOOLCALL>[{"arguments":{"a": "',
    ],
)
def test_parser_steps_grow_linearly_with_the_text(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections that never end do not make the parser quadratic."""
    advance, counter = CharReader.advance, itertools.count()

    def counted_advance(reader: CharReader) -> Any:
        next(counter)
        return advance(reader)

    monkeypatch.setattr(CharReader, "advance", counted_advance)
    steps = []
    for count in (100, 400):
        parser = OutputParser(AnswerFormats(tools=TOOL_FORMATS["nemotron"]), TOOLS)
        begin = next(counter)
        assert "".join(p.text for p in parser.push(unit * count, finished=True)) == unit * count
        steps.append(next(counter) - begin)
    assert steps[1] <= 4.1 * steps[0]
    assert steps[1] <= 8 * 400 * len(unit)


def test_reasoning_begun_by_the_prompt_is_parsed() -> None:
    for text in ("\nfirst\n</think>\n\nthen", "first</think>then"):
        assert parse("hermes", text, in_reasoning=True) == [
            OutputSegment("reasoning", "first"),
            OutputSegment("text", "then"),
        ]
    assert parse("hermes", "never ends \n", in_reasoning=True) == [
        OutputSegment("reasoning", "never ends")
    ]


def test_text_is_unchanged_without_tools_and_reasoning() -> None:
    parser = OutputParser(AnswerFormats(tools=TOOL_FORMATS["hermes"]), {})
    assert parser.push(" <tool_call> \n") == [OutputSegment("text", " <tool_call> \n")]


def test_special_token_markers_are_preserved() -> None:
    class Special(ByteTokenizer):
        """A tokenizer with a special token for a mark, which decoding drops."""

        def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [300] if text == "<think>" else super().tokenize(text)

        def detokenize(self, ids: Sequence[int]) -> str:
            return super().detokenize([i for i in ids if i != 300])

    tokenizer = Special()
    formats = formats_of("hermes", "qwen3", tokenizer)
    assert formats.marks == {300: "<think>"}
    assert decode_with_marks(tokenizer, formats.marks, [97, 300, 98]) == "a<think>b"


def test_parser_options_match_the_format_tables() -> None:
    hints = get_type_hints(Service)
    for field, table in (
        ("tool_call_parser", TOOL_FORMATS),
        ("reasoning_parser", REASONING_FORMATS),
    ):
        names = {n for choices in get_args(hints[field]) for n in get_args(choices)}
        aliases = {alias for alias in names if ALIASES.get(alias) in table}
        assert names - aliases == {*table, "auto"}
    assert set(ALIASES.values()) <= {*TOOL_FORMATS, *REASONING_FORMATS}


@pytest.mark.parametrize(("tools", "reasoning"), [("openai", "qwen3"), ("hermes", "openai_gptoss")])
def test_harmony_is_not_combined_with_another_parser(tools: str, reasoning: str) -> None:
    with pytest.raises(ValueError, match=f"{tools}.*{reasoning}"):
        check_parsers(tools, reasoning)
    check_parsers("openai", "gpt_oss")
    check_parsers("hermes", reasoning="deepseek_r1")
    assert formats_of("openai", None, ByteTokenizer()).channels
