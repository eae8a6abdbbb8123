# SPDX-License-Identifier: Apache-2.0
"""Answers are read into parts, the same ones whichever way their text comes."""

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
from megatron.core.inference.text_stream import TextStream
from megatron.inference.config import Service
from megatron.inference.server.answer_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormats,
    decode_with_marks,
    formats_of,
)
from megatron.inference.server.answer_parser import AnswerParser, AnswerPart

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
    AnswerPart("reasoning", "Hm é"),
    AnswerPart("text", "Wait…"),
    AnswerPart("call", "weather"),
    AnswerPart("arguments", ARGUMENTS),
    AnswerPart("end"),
    AnswerPart("call", "now"),
    AnswerPart("arguments", "{}"),
    AnswerPart("end"),
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
    '<tool_call>{"arguments": {}, "name": "other"}</tool_call>',
    '<tool_call>{"name": "now", "arguments": "3"}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"a": 1]}</tool_call>'.replace("now", "other"),
    '<TOOLCALL>[{"name": "other", "arguments": {}}, {"name": "now"}]</TOOLCALL>',
    '{"name": "other", "parameters": {}}; {"result": 3}',
    "<tool_call><function=other></function></tool_call>",
    "<TOOLCALL>[3]</TOOLCALL>",
    '<|python_tag|>{"name": "now"}',
    "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
    "<" * 40,
    '{"name": "' + "n" * 300,
    "\n \t\n",
)


def read(
    name: str, pieces: Iterable[str], *, in_reasoning: bool = False, tools: Any = TOOLS
) -> list[AnswerPart]:
    """Return the parts of a text that comes in pieces, adjacent ones of a kind as one."""
    formats = AnswerFormats(tools=TOOL_FORMATS[name], reasoning=REASONING_FORMATS["qwen3"])
    parser = AnswerParser(formats, tools, in_reasoning=in_reasoning)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.push("", finished=True)
    assert parser.has_calls == any(part.kind == "call" for part in parts)
    found: list[AnswerPart] = []
    for part in parts:
        if (
            found
            and found[-1].kind == part.kind
            and part.kind in ("text", "reasoning", "arguments")
        ):
            found[-1] = AnswerPart(part.kind, found[-1].text + part.text)
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
    + ['"name": "other"', '"arguments": "{}"', '"arguments": [', '"', "<parameter=days>", "[1, {}]"]
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


ANY_PLACE = {
    "hermes": ("<tool_call>{}</tool_call>", 1),
    "llama3_json": ("<|python_tag|>{}; {}; {}", 3),
    "nemotron": ("<TOOLCALL>[{}, {}, {}]</TOOLCALL>", 3),
}
#: Values of a parameter, with the types of its schema: JSON has them, and XML has them as Python
#: prints them.
VALUES: list[tuple[Any, Any]] = [
    ("Bern", "string"),
    ("", "string"),
    ('Zür"i}ch{', "string"),
    ("two\nlines\n", "string"),
    ("  padded\t", "string"),
    ("C:\\new\\u0041", "string"),
    ("日本 🦙", "string"),
    ("True", "string"),
    ("None", "string"),
    ("[1]", "string"),
    ("a < b </param> </function> c", "string"),
    ("<tool_call> and <parameter=x>", "string"),
    (True, "boolean"),
    (False, ["boolean", "null"]),
    (None, "null"),
    (None, ["integer", "null"]),
    (7, "integer"),
    (-10, "int"),
    (2.5, "number"),
    (1e-05, "number"),
    ([1, "it's", None, [True]], "array"),
    ([], "list"),
    ({"a": {"b": [False, 'say "no"']}, "c": 1.5}, "object"),
    ({"k": "tab\t, é, back\\slash"}, "dict"),
    ({}, None),
]
ORDERS = (("first", "value", "last"), ("value", "last", "first"), ("last", "first", "value"))
OTHERS = {"first": 1, "last": "x y"}


def schema(types: Any) -> dict[str, Any]:
    shape = {} if types is None else {"type": types}
    shapes = {"first": {"type": "integer"}, "value": shape, "last": {"type": "string"}}
    return {"take": {"type": "object", "properties": shapes}}


def call_text(name: str, arguments: dict[str, Any], order: int) -> str:
    """Return a call of "take" as a model of a family writes it; members of a call come in three
    orders, too, where it is an object."""
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
    return ANY_PLACE[name][0].partition("{}")[0] + text + ANY_PLACE[name][0].rpartition("{}")[2]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_arguments_are_the_values_that_were_written(name: str) -> None:
    """Every value in every order: whole, by character and in 20 random cuts."""
    source = random.Random(name)
    for (value, types), order in itertools.product(VALUES, range(3)):
        arguments = {key: OTHERS.get(key, value) for key in ORDERS[order]}
        text = "So.\n" + call_text(name, arguments, order)
        splits: list[Sequence[str]] = [[text], text]
        for _ in range(20):
            places = sorted(source.sample(range(len(text)), source.randint(1, 6)))
            splits.append([text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])])
        for pieces in splits:
            content, call, arguments_part, end = read(name, pieces, tools=schema(types))
            assert (content, call, end) == (
                AnswerPart("text", "So."),
                AnswerPart("call", "take"),
                AnswerPart("end"),
            )
            parsed = json.loads(arguments_part.text)
            assert parsed == arguments, pieces
            assert type(parsed["value"]) is type(value), pieces


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
        ("{1: 'a', None: 'b',}", "object", {"1": "a", "null": "b"}),
        ("('a', \"b\")", "array", ["a", "b"]),
        (r"['\'\x41\u00e9\101\d\\', '\U0001f999']", "array", ["'AéA\\d\\", "🦙"]),
        ("[__import__('os')]", "array", "[__import__('os')]"),
        ("[" * 5000 + "]" * 5000, "array", "[" * 5000 + "]" * 5000),
        ("{'a': [1, 2}", "object", "{'a': [1, 2}"),
        ("{'a', 'b'}", "object", "{'a', 'b'}"),
    ],
)
def test_xml_values_in_other_spellings(written: str, types: Any, value: Any) -> None:
    text = f"<tool_call><function=take><parameter=value>\n{written}\n</parameter></function>"
    _, arguments, _ = read("qwen3_coder", [text], tools=schema(types))
    assert json.loads(arguments.text) == {"value": value}


@pytest.mark.parametrize("types", ["string", None])
@pytest.mark.parametrize(
    "lost",
    [
        "<tool_call>",
        "\n</parameter>",
        "</function>",
        "\n</tool_call>",
        "\n</parameter>\n</function>",
        "\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_calls_outlive_lost_marks(lost: str, types: str | None) -> None:
    text = (
        "<tool_call>\n<function=take>\n<parameter=first>\n1\n</parameter>\n<parameter=value>\n"
        "Bern\n</parameter>\n</function>\n</tool_call>\n"
    )
    calls = [
        AnswerPart("call", "take"),
        AnswerPart("arguments", '{"first": 1, "value": "Bern"}'),
        AnswerPart("end"),
    ]
    for whole in (text.replace(lost, ""), text + text.replace(lost, "") + text):
        count = whole.count("<function=")
        assert read("qwen3_coder", [whole], tools=schema(types)) == calls * count
        assert read("qwen3_coder", whole, tools=schema(types)) == calls * count


def test_the_next_parameter_ends_one_without_its_mark() -> None:
    text = "<function=weather><parameter=city>\nUlm\n<parameter=days>\n3\n</parameter>"
    parts = [
        AnswerPart("call", "weather"),
        AnswerPart("arguments", '{"city": "Ulm", "days": 3}'),
        AnswerPart("end"),
    ]
    for split in ([text], text):
        assert read("qwen3_coder", split) == parts
    # A mark of no other parameter is a part of the value.
    text = "<function=weather><parameter=city>\n<parameter=x> <parameter=city>\n</parameter>"
    assert json.loads(read("qwen3_coder", text)[1].text) == {
        "city": "<parameter=x> <parameter=city>"
    }


def test_arguments_that_are_cut_off_stay_open() -> None:
    """Else a client would act on half of a value."""
    text = (
        "<tool_call><function=weather><parameter=days>\n3\n</parameter><parameter=city>\nrm -rf /"
    )
    for cut_off in (True, False):
        parser = AnswerParser(AnswerFormats(tools=TOOL_FORMATS["qwen3_coder"]), TOOLS)
        parts = parser.push(text, finished=True, cut_off=cut_off)
        arguments = "".join(part.text for part in parts if part.kind == "arguments")
        assert arguments == '{"days": 3, "city": "rm -rf /' + ("" if cut_off else '"}')


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_that_is_cut_off_leaves_no_text(name: str) -> None:
    """Wherever the answer ends, marks of a call that has begun are not shown."""
    text = call_text(name, {"first": 1, "value": "é", "last": "x"}, 0)
    formats, ends = AnswerFormats(tools=TOOL_FORMATS[name]), []
    for end in range(1, len(text) + 1):
        parser = AnswerParser(formats, schema("string"))
        parts = [*parser.push(text[:end]), *parser.push("", finished=True, cut_off=True)]
        if parser.has_calls:
            assert "text" not in {part.kind for part in parts}, text[:end]
            ends.append("".join(part.text for part in parts if part.kind == "arguments"))
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
@pytest.mark.parametrize("places", [(0,), (1,), (2,), (0, 1), (0, 2)])
def test_tool_calls_next_to_an_unknown_tool_are_parsed(name: str, places: Sequence[int]) -> None:
    """Of three calls of a section some name no tool: the others are calls, and nothing is text."""
    begin, separator, end = SECTIONS[name]
    valid = UNKNOWN[name].replace("other", "now")
    written = [UNKNOWN[name] if place in places else valid for place in range(3)]
    text = f"Hm.{begin}{separator.join(written)}{end}"
    for pieces in ([text], text):
        content, *calls = read(name, pieces)
        assert content == AnswerPart("text", "Hm.")
        assert [part.kind for part in calls] == ["call", "arguments", "end"] * (3 - len(places))
        assert {part.text for part in calls if part.kind == "call"} == {"now"}


def test_a_call_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    read("nemotron", [f'<TOOLCALL>[{UNKNOWN["nemotron"]}, {{"name": "now", "arguments": {{}}}}]'])
    (record,) = caplog.records
    assert record.levelname == "WARNING"


@pytest.mark.parametrize("name", ["hermes", "nemotron"])
@pytest.mark.parametrize("written", ["{}", '""', '" {}"', "null"])
def test_no_arguments_are_an_empty_object(name: str, written: str) -> None:
    before, _, after = ANY_PLACE[name][0].partition("{}" if name == "hermes" else "{}, {}, {}")
    for members in (
        f'"name": "now", "arguments": {written}',
        f'"arguments": {written}, "name": "now"',
    ):
        parts = read(name, [f"{before}{{{members}}}{after}"])
        assert [part.kind for part in parts] == ["call", "arguments", "end"]
        assert json.loads(parts[1].text) == {}


def test_members_after_the_arguments_are_no_text() -> None:
    call = '{"name": "now", "arguments": {}, "id": "c", "more": [1, {"a": "}"}]}'
    parts = read("hermes", f"<tool_call>{call}</tool_call>Yes")
    assert parts[2:] == [AnswerPart("end"), AnswerPart("text", "Yes")]


def test_json_answer_is_streamed_incrementally() -> None:
    """Where a call may open an answer, an object is soon seen to be none."""
    parser = AnswerParser(AnswerFormats(tools=TOOL_FORMATS["llama3_json"]), TOOLS)
    assert parser.push('{"result": [') == [AnswerPart("text", '{"result": [')]
    parser = AnswerParser(AnswerFormats(tools=TOOL_FORMATS["llama3_json"]), TOOLS)
    assert parser.push('{"name": "Ann", "age": 3') == [
        AnswerPart("text", '{"name": "Ann", "age": 3')
    ]


@pytest.mark.parametrize(
    "unit",
    [
        '<TOOLCALL>[{"name":"x","arguments":{"a":[',
        '<TOOLCALL>[{"name":"x","arguments":{"<',
        '<TOOLCALL>[{"name":"x","arguments":"{',
        '<TOOLCALL>[{"arguments":{"a": "',
    ],
)
def test_text_is_read_again_a_few_times_at_most(unit: str) -> None:
    """The steps of the machine grow as the text does: sections that never end are no trap."""
    steps = []
    for count in (100, 400):
        parser = AnswerParser(AnswerFormats(tools=TOOL_FORMATS["nemotron"]), TOOLS)
        taken = itertools.count()
        step = parser._advance

        def counted(step: Any = step, taken: Any = taken) -> Any:
            next(taken)
            return step()

        parser._advance = counted  # type: ignore[method-assign]
        assert "".join(p.text for p in parser.push(unit * count, finished=True)) == unit * count
        steps.append(next(taken))
    assert steps[1] <= 4.1 * steps[0]
    assert steps[1] <= 8 * 400 * len(unit)


def test_arguments_come_before_their_call_has_ended() -> None:
    formats = AnswerFormats(tools=TOOL_FORMATS["hermes"])
    parser = AnswerParser(formats, TOOLS)
    shown = parser.push('<tool_call>{"name": "now", "arguments": {"a": "lon')
    assert shown == [AnswerPart("call", "now"), AnswerPart("arguments", '{"a": "lon')]
    parser = AnswerParser(AnswerFormats(tools=TOOL_FORMATS["qwen3_coder"]), TOOLS)
    shown = parser.push("<tool_call><function=weather><parameter=city>\nlon")
    assert shown == [AnswerPart("call", "weather"), AnswerPart("arguments", '{"city": "lon')]


def test_reasoning_that_the_prompt_has_begun() -> None:
    for text in ("\nfirst\n</think>\n\nthen", "first</think>then"):
        assert read("hermes", text, in_reasoning=True) == [
            AnswerPart("reasoning", "first"),
            AnswerPart("text", "then"),
        ]
    assert read("hermes", "never ends \n", in_reasoning=True) == [
        AnswerPart("reasoning", "never ends")
    ]


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
    assert parser.push(" <tool_call> \n") == [AnswerPart("text", " <tool_call> \n")]


def test_special_token_markers_are_preserved() -> None:
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
