# SPDX-License-Identifier: Apache-2.0
"""Enforced answers: calls parse and follow their schemas, whatever the model prefers."""

from __future__ import annotations

import json
import random
import re
from typing import Any, NamedTuple

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.cli.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from megatron.inference.server.chat_template import Conversation, Tool
from megatron.inference.server.guided_decoding.grammars import BadGrammar, Grammars
from megatron.inference.server.guided_decoding.tool_grammar import (
    enforced,
    json_after_reasoning,
    tool_grammar,
)
from megatron.inference.server.tool_parsers.formats import (
    HARMONY_MARKS,
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormats,
    decode_with_marks,
    formats_of,
)
from megatron.inference.server.tool_parsers.output_parser import OutputParser
from megatron.inference.server.tool_parsers.tool_calls import OutputSegment
from tests.support.call_templates import PARSERS, render
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
CLOSING_CHARS = '"}],<>/'
#: The reasoning of each tool format's models; "qwen3" for the formats that are not listed.
REASONING = {"mistral": "mistral", "gpt_oss": "gpt_oss"}
#: Every mark of every format, as special tokens.
MARKS = {
    text.strip()
    for name in TOOL_FORMATS
    for text in [
        *TOOL_FORMATS[name].literals,
        *HARMONY_MARKS,
        *(mark for f in REASONING_FORMATS.values() for mark in (f.begin, f.end)),
    ]
    if re.fullmatch(r"<[^<>]+>|\[\w+\]", text.strip())
}


class Model(NamedTuple):
    """A tokenizer, its grammars, its stop token, and the tokens that close open values."""

    tokenizer: Any
    grammars: Grammars
    end: int
    closing: set[int]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ByteTokenizer(), [END], END + 1)


@pytest.fixture(scope="module", params=["bytes", "special tokens"])
def model(
    request: pytest.FixtureRequest, grammars: Grammars, tmp_path_factory: pytest.TempPathFactory
) -> Model:
    """A model whose tokenizer has a token per byte, without or with special tokens for marks."""
    if request.param == "bytes":
        return Model(ByteTokenizer(), grammars, END, {*CLOSING_CHARS.encode(), END})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<end>", *sorted(MARKS)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe.save(str(path))
    vocabulary = bpe.get_vocab()
    closing = {vocabulary[text] for text in [*CLOSING_CHARS, "<end>", *MARKS]}
    end, tokenizer = vocabulary["<end>"], HuggingFaceTokenizer(path)
    return Model(tokenizer, Grammars(tokenizer, [end], len(vocabulary)), end, closing)


def answer_of(
    model: Model,
    formats: AnswerFormats,
    grammar: str,
    begin: str = "",
    seed: int = 0,
    *,
    haste: float = 0.6,
) -> str:
    """Return a random answer of a grammar with a given beginning; `haste` is the share of tokens
    that close a value if one may close."""
    mask, source = model.grammars.mask(grammar), random.Random(seed)
    tokens = model.tokenizer.tokenize(begin, add_special_tokens=False)
    while len(tokens) < 4000:
        allowed_tokens = mask(tokens).nonzero().flatten().tolist()
        assert allowed_tokens, decode_with_marks(model.tokenizer, formats.marks, tokens)
        closing = [token for token in allowed_tokens if token in model.closing]
        token = source.choice(closing if closing and source.random() < haste else allowed_tokens)
        if token == model.end:
            return decode_with_marks(model.tokenizer, formats.marks, tokens)
        tokens.append(token)
    raise AssertionError(f"never ends: {tokens[:200]!r}")


def random_answer(grammars: Grammars, grammar: str, begin: str = "", seed: int = 0) -> str:
    """Return a random answer in bytes."""
    model = Model(ByteTokenizer(), grammars, END, {*CLOSING_CHARS.encode(), END})
    return answer_of(model, AnswerFormats(), grammar, begin, seed)


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
def test_required_calls_validate_against_their_schemas(model: Model, name: str) -> None:
    formats = formats_of(name, None, model.tokenizer)
    assert bool(formats.marks) == isinstance(model.tokenizer, HuggingFaceTokenizer)
    names: set[str] = set()
    for restriction in ({}, {"forced_tool": "now"}, {"parallel": False}):
        conversation = Conversation(turns=[], tools=[BOOK, NOW], choice="required", **restriction)
        grammar = tool_grammar(conversation, formats)
        for seed in range(3 if restriction else 20):
            parser = OutputParser(
                formats, {t.name: t.parameters for t in conversation.callable_tools}
            )
            begin = ""
            if formats.channels:
                begin = ("<|channel|>commentary to=", " to=functions.")[seed % 2]
            text = answer_of(model, formats, grammar, begin, seed)
            segments = parser.push(text, finished=True)
            assert {segment.kind for segment in segments} <= {"call", "arguments", "end"}
            answer_calls = calls(segments)
            assert len(answer_calls) == 1 if restriction else answer_calls
            assert not conversation.forced_tool or answer_calls[0][0] == "now"
            names |= {name for name, _ in answer_calls}
    assert names == {"book", "now"}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_required_answers_may_have_several_calls(model: Model, name: str) -> None:
    formats = formats_of(name, None, model.tokenizer)
    begin = "<|channel|>commentary to=" if formats.channels else ""
    for parallel in (True, False):
        conversation = Conversation(turns=[], tools=[NOW], choice="required", parallel=parallel)
        grammar = tool_grammar(conversation, formats)
        counts = set()
        for seed in range(20):
            text = answer_of(model, formats, grammar, begin, seed, haste=0.2)
            segments = OutputParser(formats, {"now": {}}).push(text, finished=True)
            counts.add([segment.kind for segment in segments].count("call"))
        # A message of gpt-oss has one call.
        assert 0 not in counts
        assert (max(counts) > 1) == (parallel and not formats.channels)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("in_reasoning", [False, True])
def test_strict_calls_follow_text_and_reasoning(
    model: Model, name: str, in_reasoning: bool
) -> None:
    formats = formats_of(name, REASONING.get(name, "qwen3"), model.tokenizer)
    assert formats.tools is not None
    assert formats.reasoning is not None
    conversation = Conversation(turns=[], tools=[BOOK])
    grammar = tool_grammar(conversation, formats, in_reasoning=in_reasoning)
    bare = formats.tools.bare
    reasoning = ("" if in_reasoning else formats.reasoning.begin) + f"Hm{formats.reasoning.end}"
    if formats.channels:
        reasoning += "<|start|>assistant<|channel|>"
        opens = "commentary<|message|>So<|end|><|start|>assistant<|channel|>commentary to="
        plain_text = "final<|message|>No."
    else:
        reasoning += "\n"
        opens = "{" if bare else "So " + formats.tools.begin[0].strip()
        plain_text = "No."
    parser = OutputParser(formats, {"book": BOOK.parameters}, in_reasoning=in_reasoning)
    text = answer_of(model, formats, grammar, reasoning + opens)
    segments = parser.push(text, finished=True)
    assert segments[0] == OutputSegment("reasoning", "Hm")
    assert segments[1] == (OutputSegment("call", "book") if bare else OutputSegment("text", "So"))
    assert calls(segments)
    plain = OutputParser(formats, {"book": BOOK.parameters}, in_reasoning=in_reasoning)
    text = answer_of(model, formats, grammar, reasoning + plain_text)
    segments = plain.push(text, finished=True)
    assert segments[0] == OutputSegment("reasoning", "Hm")
    assert segments[1].text.startswith("No.")


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


def test_json_follows_the_reasoning_of_harmony(model: Model) -> None:
    formats = formats_of(None, "gpt_oss", model.tokenizer)
    header = "<|channel|>final <|constrain|>json<|message|>"
    for begin, in_reasoning in (
        (f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{header}", False),
        (f"Hm<|end|><|start|>assistant{header}", True),
        (header, False),
    ):
        grammar = json_after_reasoning(BOOK.parameters, formats, in_reasoning=in_reasoning)
        parser = OutputParser(formats, {}, in_reasoning=in_reasoning)
        segments = parser.push(answer_of(model, formats, grammar, begin), finished=True)
        assert [segment.text for segment in segments[:-1]] == ["Hm"] * (begin != header)
        assert calls([OutputSegment("call", "book"), OutputSegment("arguments", segments[-1].text)])


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


@pytest.mark.parametrize("template", sorted(set(PARSERS) - {"mistral_v3"}))
def test_calls_of_templates_are_in_the_grammar(grammars: Grammars, template: str) -> None:
    """A model may write calls as its template does, white space included."""
    formats = formats_of(PARSERS[template][0], None, ByteTokenizer())
    calls_of_answer = [("now", {})] * (1 if formats.channels else 2)
    text = render(template, calls_of_answer).text.rpartition("</think>")[2].lstrip("\n")
    conversation = Conversation(turns=[], tools=[BOOK, NOW], choice="required")
    grammar = tool_grammar(conversation, formats)
    assert allowed_length(grammars, grammar, text) == len(text.encode())
