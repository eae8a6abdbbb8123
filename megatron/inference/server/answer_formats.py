# SPDX-License-Identifier: Apache-2.0
"""How families of models write tool calls and reasoning: one table, which the parser of answers
reads them by and the grammar of enforced calls writes them by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from megatron.cli.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A section of tool calls: `begin call (separator call)* end`, where a call is
    `head NAME name_end middle ARGUMENTS tail`.

    All but names are sequences of texts. The grammar writes them as they are; the parser takes any
    white space around each. Of a call that is an object the parser takes the members in any order.

    Args:
        begin: the first of them is looked for in an answer.
        bare: a section may also open an answer without `begin`.
        head_begins: a section may also begin with `head`, anywhere in an answer: models lose the
            mark before it.
        head: before a tool's name.
        name_end: after it.
        middle: before its arguments; of alternatives the first is written.
        layout: "object" is a call that is a JSON object with the name and the arguments, "json" has
            arguments that are a JSON object, "xml" has `<parameter=KEY>` VALUE `</parameter>` for
            each.
        tail: after the arguments.
        separator: between calls of a section; None where a section has one call.
        end: of a section.
        text_arguments: the chat template takes arguments of former calls as texts, not as objects.
    """

    begin: Sequence[str]
    bare: bool = False
    head_begins: bool = False
    head: Sequence[str]
    name_end: str
    middle: Sequence[str | tuple[str, ...]] = ()
    layout: Literal["object", "json", "xml"] = "object"
    tail: Sequence[str]
    separator: str | None = None
    end: Sequence[str]
    text_arguments: bool = False


@dataclass(frozen=True)
class ReasoningFormat:
    """What reasoning stands between. A prompt that ends with `begin` has begun it."""

    begin: str
    end: str


_OBJECT_HEAD = ("{", '"name"', ": ", '"')
_ARGUMENTS = (", ", ('"arguments"', '"parameters"'), ": ")

#: By the names of `--tool-call-parser`.
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat(
            begin=("<tool_call>\n",),
            head=_OBJECT_HEAD,
            name_end='"',
            middle=_ARGUMENTS,
            tail=("}",),
            end=("\n</tool_call>",),
        ),
        "qwen3_coder": ToolFormat(
            begin=("<tool_call>\n",),
            head_begins=True,
            head=("<function=",),
            name_end=">",
            layout="xml",
            tail=("</function>",),
            end=("\n</tool_call>",),
        ),
        "llama3_json": ToolFormat(
            begin=("<|python_tag|>",),
            bare=True,
            head=_OBJECT_HEAD,
            name_end='"',
            middle=(", ", ('"parameters"', '"arguments"'), ": "),
            tail=("}",),
            separator="; ",
            end=(),
        ),
        "deepseek_v3": ToolFormat(
            begin=("<｜tool▁calls▁begin｜>",),
            head=("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"),
            name_end="\n",
            middle=("```json\n",),
            layout="json",
            tail=("\n```", "<｜tool▁call▁end｜>"),
            separator="\n",
            end=("<｜tool▁calls▁end｜>",),
            text_arguments=True,
        ),
        "nemotron": ToolFormat(
            begin=("<TOOLCALL>", "["),
            head=_OBJECT_HEAD,
            name_end='"',
            middle=_ARGUMENTS,
            tail=("}",),
            separator=", ",
            end=("]", "</TOOLCALL>"),
        ),
    }
)

_THINK = ReasoningFormat("<think>", "</think>")

#: By the names of `--reasoning-parser`.
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "qwen3": _THINK,
        "deepseek_r1": _THINK,
        "nemotron": _THINK,
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    }
)


@dataclass(frozen=True, kw_only=True)
class AnswerFormats:
    """How the served model writes its answers.

    Args:
        tools: None where it calls no tools.
        reasoning: None where it has none.
        marks: texts of the special tokens among the marks of both, by id: decoding drops these
            tokens otherwise.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    marks: Mapping[int, str] = field(default_factory=dict)


def formats_of(tools: str | None, reasoning: str | None, tokenizer: Tokenizer) -> AnswerFormats:
    """Return the formats of these names, None for no such format."""
    calls = None if tools is None else TOOL_FORMATS[tools]
    thinks = None if reasoning is None else REASONING_FORMATS[reasoning]
    texts = [thinks.begin, thinks.end] if thinks else []
    if calls is not None:
        texts += [*calls.begin, *calls.head, calls.name_end, *calls.tail, *calls.end]
    marks = {}
    for text in {t.strip() for t in texts if t.strip()}:
        ids = tokenizer.tokenize(text, add_special_tokens=False)
        if len(ids) == 1 and not tokenizer.detokenize(ids):
            marks[ids[0]] = text
    return AnswerFormats(tools=calls, reasoning=thinks, marks=marks)


def reasoning_limit(
    formats: AnswerFormats, tokenizer: Tokenizer, budget: int, *, in_reasoning: bool
) -> dict[str, Any]:
    """Return what closes reasoning after so many tokens: arguments of `ReasoningLimit`.

    Args:
        formats: of the model's answers, which have reasoning.
        tokenizer: of the model.
        budget: tokens of reasoning, without the marks that it stands between.
        in_reasoning: the prompt has begun it.
    """
    thinks = formats.reasoning
    assert thinks is not None
    begin = "" if in_reasoning else thinks.begin
    return {
        "begin": begin,
        "end": thinks.end,
        "end_tokens": tokenizer.tokenize(thinks.end, add_special_tokens=False),
        "after": budget + len(tokenizer.tokenize(begin, add_special_tokens=False) if begin else ()),
    }


def decode_with_marks(tokenizer: Tokenizer, marks: Mapping[int, str], ids: Sequence[int]) -> str:
    """Return the text of some ids, in which special tokens that are marks are kept."""
    parts: list[str] = []
    start = 0
    for place, number in enumerate(ids):
        if number in marks:
            parts += [tokenizer.detokenize(ids[start:place]), marks[number]]
            start = place + 1
    return "".join([*parts, tokenizer.detokenize(ids[start:])])
