# SPDX-License-Identifier: Apache-2.0
"""The calls, text and reasoning that a family's chat template writes are parsed back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from megatron.cli.tokenizers import ByteTokenizer
from megatron.inference.server.chat_template import Conversation, Conversations, ToolCall, Turn
from megatron.inference.server.tool_parsers.char_reader import CharReader
from megatron.inference.server.tool_parsers.formats import (
    HARMONY_MARKS,
    formats_of,
    select_parsers,
)
from megatron.inference.server.tool_parsers.output_parser import OutputParser
from megatron.inference.server.tool_parsers.tool_calls import OutputSegment
from megatron.training.data.chat import ChatTemplate
from tests.support.call_templates import FOLDER, PARSERS, Answer, formats, render

TOOLS = {
    "mcp__files.find-all": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "filters": {"type": "object"},
            "paths": {"type": "array"},
            "code": {"type": "string"},
            "any": {},
        },
    },
    "now": {"type": "object", "properties": {}},
}
FIND = (
    "mcp__files.find-all",
    {
        "query": '5 "quoted" \\ {[<b>日本 🦙</b>]}',
        "limit": -3,
        "filters": {"a": {"b": [None, True, 1.5e-7, "x\ny"]}, "": []},
        "paths": ["C:\\new", {"k": "]}"}, ["é"], "<|x|>"],
        "code": "  if a < b:\n\treturn '</p>'\n",
        "any": ["7", 7],
    },
)
NUMBER_TEXTS = ("mcp__files.find-all", {"query": "42", "code": "true", "any": {"n": "1"}})
NOW = ("now", {})


class Case(NamedTuple):
    """The calls, the text and the reasoning of an answer."""

    calls: Sequence[tuple[str, dict[str, Any]]]
    text: str = ""
    reasoning: str = ""


CASES = (
    Case([NOW]),
    Case([FIND], text="Let me look: a < b."),
    Case([FIND, NOW, NUMBER_TEXTS], reasoning="Which?\n\nBoth {1}."),
    Case([NUMBER_TEXTS, FIND], text="Wait…", reasoning="Hm é <b>"),
    Case([], text='No call: {"name": "now"} [1]', reasoning="Easy."),
    Case([], text="Only text"),
)


class Parsed(NamedTuple):
    """The parts of an answer; the arguments of a call are text."""

    calls: list[tuple[str, str]]
    text: str
    reasoning: str


def parse(
    template: str,
    chunks: Iterable[str],
    *,
    in_reasoning: bool,
    tools: Any = TOOLS,
    cut_off: bool = False,
) -> Parsed:
    """Parse the chunks of an answer, and join its segments."""
    parser = OutputParser(formats(template), tools, in_reasoning=in_reasoning)
    segments: list[OutputSegment] = []
    for chunk in chunks:
        segments += parser.push(chunk)
    segments += parser.push("", finished=True, cut_off=cut_off)
    calls: list[tuple[str, str]] = []
    texts = {"text": "", "reasoning": ""}
    for segment in segments:
        if segment.kind == "call":
            calls.append((segment.text, ""))
        elif segment.kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + segment.text)
        elif segment.kind != "end":
            texts[segment.kind] += segment.text
    return Parsed(calls, texts["text"], texts["reasoning"])


def splits(text: str, name: str) -> list[Sequence[str]]:
    """Return the text as a whole, by character, in two at many positions, and at random."""
    source = random.Random(name)
    cuts = [[cut] for cut in range(1, len(text), 1 + len(text) // 120)]
    cuts += [
        sorted(source.sample(range(len(text)), min(len(text), source.randint(2, 9))))
        for _ in range(20)
    ]
    chunks: list[Sequence[str]] = [[text], text]
    for positions in cuts:
        chunks.append([text[a:b] for a, b in itertools.pairwise([0, *positions, len(text)])])
    return chunks


@pytest.mark.parametrize("template", PARSERS)
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_answers_of_templates_are_parsed_in_any_split(template: str, case: Case) -> None:
    answer = render(template, case.calls, text=case.text, reasoning=case.reasoning)
    whole = parse(template, [answer.text], in_reasoning=answer.in_reasoning)
    calls = [(name, json.loads(arguments)) for name, arguments in whole.calls]
    assert calls == list(case.calls)
    assert json.dumps(calls) == json.dumps(case.calls)  # also the types and the order
    assert (whole.text, whole.reasoning) == (case.text, case.reasoning)
    for chunks in splits(answer.text, template):
        assert parse(template, chunks, in_reasoning=answer.in_reasoning) == whole, chunks


@pytest.mark.parametrize("template", PARSERS)
def test_answer_cut_off_anywhere_has_a_prefix_of_the_arguments(template: str) -> None:
    case = CASES[3]
    answer = render(template, case.calls, text=case.text, reasoning=case.reasoning)
    arguments = [text for _, text in parse(template, [answer.text], in_reasoning=True).calls]
    if not answer.in_reasoning:
        arguments = [text for _, text in parse(template, [answer.text], in_reasoning=False).calls]
    for end in range(len(answer.text)):
        parsed = parse(
            template, [answer.text[:end]], in_reasoning=answer.in_reasoning, cut_off=True
        )
        assert case.reasoning.startswith(parsed.reasoning) or "<" in parsed.reasoning
        for (name, text), (whole_name, whole_arguments), written in zip(
            parsed.calls, case.calls, arguments, strict=False
        ):
            assert name == whole_name
            assert written.startswith(text)
            assert whole_arguments
        if parsed.calls:
            assert (parsed.text, parsed.reasoning) == (case.text, case.reasoning), end


#: Templates whose calls share a section, in which a call to an unknown tool is dropped.
SECTIONS = ("mistral_v3", "kimi_k2", "minimax_m1", "minimax_m2", "deepseek_v31")


@pytest.mark.parametrize("template", PARSERS)
def test_calls_to_unknown_tools_are_not_made(template: str) -> None:
    unknown = ("other", FIND[1])
    answer = render(template, [unknown], text="So.")
    parsed = parse(template, answer.text, in_reasoning=answer.in_reasoning)
    assert parsed.calls == []
    assert parsed.text.startswith("So.")
    assert "other" in parsed.text
    assert "日本" in parsed.text
    answer = render(template, [NOW, unknown, NOW])
    parsed = parse(template, answer.text, in_reasoning=answer.in_reasoning)
    assert parsed.calls == [("now", "{}")] * 2
    assert ("other" in parsed.text) == (template not in SECTIONS)


@pytest.mark.parametrize("template", PARSERS)
def test_parser_steps_are_linear_in_hostile_text(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeat every beginning of an answer that ends at a mark, with known and unknown tools."""
    advance, counter = CharReader.advance, itertools.count()

    def counted_advance(reader: CharReader) -> Any:
        next(counter)
        return advance(reader)

    monkeypatch.setattr(CharReader, "advance", counted_advance)
    units: set[str] = set()
    for name in ("now", "other"):
        answer = render(template, [(name, {"a": ["b", {"c": '"'}]}), NOW], text="x")
        ends = [index for index, char in enumerate(answer.text) if char in '<>[]{}":|\n']
        units |= {answer.text[:end] for end in ends}
    for unit in sorted(units)[::4]:
        steps = []
        for count in (20, 80):
            parser = OutputParser(formats(template), TOOLS)
            begin = next(counter)
            parser.push(unit * count, finished=True)
            steps.append(next(counter) - begin)
        assert steps[1] <= 4.2 * steps[0] + 4096, unit
        assert steps[1] <= 12 * 80 * len(unit) + 4096, unit


def test_kimi_calls_within_reasoning_end_it() -> None:
    answer = render("kimi_k2", [NOW], reasoning="Hm")
    text = answer.text.replace("</think>", "")
    parsed = parse("kimi_k2", text, in_reasoning=answer.in_reasoning)
    assert parsed == Parsed([("now", "{}")], "", "Hm")
    text = text.replace("now", "other")
    assert parse("kimi_k2", text, in_reasoning=False).calls == []


HARMONY: list[tuple[str, Parsed]] = [
    # Forms that the model writes besides those of its template.
    (
        "<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}<|call|>",
        Parsed([("now", "{}")], "", ""),
    ),
    (
        "<|channel|>analysis to=functions.now code<|message|> {} ",
        Parsed([("now", "{}")], "", ""),
    ),
    (" to=functions.now<|channel|>commentary<|message|>", Parsed([("now", "{}")], "", "")),
    ("<|channel|>commentaryto=functions.now<|message|>{}", Parsed([("now", "{}")], "", "")),
    (
        '<|channel|>commentary to=functions.now <|message|>"{\\"a\\": 1}"',
        Parsed([("now", '{"a": 1}')], "", ""),
    ),
    (
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        Parsed([], "", "1+1"),
    ),
    (
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B"
        "<|channel|>final<|message|>C\n<|end|>",
        Parsed([], "C\n", "A\nB"),
    ),
    ("No header <|at|> all\n", Parsed([], "No header <|at|> all\n", "")),
    ("<|channel|>final<|message|>a <|start|> b", Parsed([], "a <|start|> b", "")),
    (
        "<|channel|>final<|message|>a<|start|>b<|end|>c<|message|>d",
        Parsed([], "a<|start|>b\nc<|message|>d", ""),
    ),
    ("<|channel|>final<|message|>", Parsed([], "", "")),
    (
        "<|channel|>commentary to=functions.now<|message|>now!",
        Parsed([], "<|channel|>commentary to=functions.now<|message|>now!", ""),
    ),
]


@pytest.mark.parametrize(("text", "parsed"), HARMONY)
def test_harmony_headers_are_parsed_in_all_forms(text: str, parsed: Parsed) -> None:
    for chunks in ([text], text):
        assert parse("gpt_oss", chunks, in_reasoning=False) == parsed
    assert parse("gpt_oss", ["A<|end|>" + text], in_reasoning=True).reasoning.startswith("A")


def test_cut_off_harmony_header_is_not_text() -> None:
    text = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>fin"
    assert parse("gpt_oss", [text], in_reasoning=False, cut_off=True) == Parsed([], "", "A")


def test_answers_without_tools_of_the_request_have_no_calls() -> None:
    for template in PARSERS:
        answer = render(template, [NOW], text="x", reasoning="Hm")
        parsed = parse(template, answer.text, in_reasoning=answer.in_reasoning, tools={})
        assert parsed.calls == []
        assert parsed.reasoning == "Hm"


def test_parsers_are_selected_by_the_texts_of_the_template() -> None:
    for template, names in PARSERS.items():
        file = FOLDER / f"{template.removesuffix('_role')}.jinja"
        selected = select_parsers("auto", "auto", file.read_text(encoding="utf-8"))
        expected = formats_of(*names, tokenizer=ByteTokenizer())
        assert formats_of(*selected, tokenizer=ByteTokenizer()) == expected, template
    assert select_parsers("hermes", None, "<function=") == ("hermes", None)
    assert select_parsers(None, "auto", "<think>") == (None, "qwen3")
    for source in (None, "{{ messages }}"):
        with pytest.raises(ValueError, match="--tool-call-parser auto"):
            select_parsers("auto", None, source)
    with pytest.raises(ValueError, match=r"hermes.*gpt_oss"):
        select_parsers("hermes", "auto", "<|channel|>analysis")


def test_answer_type_is_the_one_of_the_template() -> None:
    assert render("minimax_m2", [], text="a") == Answer("\n</think>\n\na", True)


def prompts(template: str, turns: Sequence[Turn]) -> str:
    """Return the prompt of a conversation that a template of this folder renders."""
    file = FOLDER / f"{template}.jinja"
    chat_template = ChatTemplate(file.read_text(encoding="utf-8") + "{# tools tool_calls #}")
    conversations = Conversations(chat_template, ByteTokenizer(), formats(template))
    with contextlib.closing(chat_template):
        prompt = asyncio.run(conversations.prompt(Conversation(turns=turns)))
    return ByteTokenizer().detokenize(prompt.tokens)


def test_ids_of_earlier_calls_have_the_form_of_the_template() -> None:
    """Kimi K2 numbers the calls of a conversation; Mistral's templates refuse other ids."""

    def turn(call_id: str, name: str) -> list[Turn]:
        call = ToolCall(id=call_id, name=name, arguments="{}")
        return [
            Turn(role="assistant", text="", calls=[call]),
            Turn(role="tool", text="1", call_id=call_id),
        ]

    turns = [Turn(role="user", text="Hi"), *turn("call_a-b", "now"), *turn("call_a-b", "then")]
    text = prompts("kimi_k2", turns)
    for mark in ("<|tool_call_begin|>", "## Return of "):
        assert f"{mark}functions.now:0" in text
        assert f"{mark}functions.then:1" in text
    calls = [turns[0], turns[1]]
    assert re.search(r'"id": "[0-9a-z]{9}"', prompts("mistral_v3", calls))
    calls = [turns[0], *turn("aB3456789", "now")[:1]]
    assert '"id": "aB3456789"' in prompts("mistral_v3", calls)


def test_earlier_reasoning_of_gpt_oss_is_passed_as_thinking() -> None:
    call = ToolCall(id="c", name="now", arguments="{}")
    assistant = Turn(role="assistant", text="So.", reasoning="Hm", calls=[call])
    text = prompts("gpt_oss", [Turn(role="user", text="Hi"), assistant])
    # Its published template refuses a call with both a text and reasoning.
    assert "<|channel|>analysis<|message|>Hm\nSo.<|end|>" in text
    assert text.count("So.") == 1


def test_call_mark_of_gpt_oss_ends_an_answer() -> None:
    class Special(ByteTokenizer):
        """A tokenizer with special tokens for the marks of harmony."""

        def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            ids = [300 + n for n, mark in enumerate(HARMONY_MARKS) if mark == text]
            return ids or super().tokenize(text)

        def detokenize(self, ids: Sequence[int]) -> str:
            return super().detokenize([i for i in ids if i < 300])

    answer_formats = formats_of("openai", None, Special())
    stops = {answer_formats.marks[token] for token in answer_formats.stop_tokens}
    assert stops == {"<|call|>", "<|return|>"}
    assert set(answer_formats.marks.values()) == set(HARMONY_MARKS)
    assert not formats_of("hermes", "qwen3", Special()).stop_tokens
