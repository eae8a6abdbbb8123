# SPDX-License-Identifier: Apache-2.0
"""The formats in which model families write tool calls and reasoning.

The parser of answers and the grammar of enforced calls both use this table.
"""

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

    All fields except names are sequences of literals. The grammar writes the literals verbatim; the
    parser accepts white space around each. If a call is an object, the parser accepts its members
    in any order.

    Args:
        begin: literals that start a section; the parser searches the answer for the first.
        bare: whether an answer may start with a section without `begin`.
        head_begins: whether a section may start with `head` anywhere in an answer, as models
            sometimes omit the mark before it.
        head: literals before the name of the tool.
        name_end: literal after the name.
        middle: literals before the arguments; of alternatives the grammar writes the first.
        layout: "object" is a call that is a JSON object with the name and the arguments, "json" has
            arguments that are a JSON object, "xml" has `<parameter=KEY>` VALUE `</parameter>` for
            each.
        tail: literals after the arguments.
        separator: literal between the calls of a section; None if a section has one call.
        end: literals that end a section.
        text_arguments: whether the chat template takes the arguments of earlier calls as JSON text,
            not as objects.
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
    """Start and end mark of reasoning. After a prompt that ends with `begin`, the answer starts
    inside reasoning."""

    begin: str
    end: str


_OBJECT_HEAD = ("{", '"name"', ": ", '"')
_ARGUMENTS = (", ", ('"arguments"', '"parameters"'), ": ")

#: Formats by the values of `--tool-call-parser`.
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

#: Formats by the values of `--reasoning-parser`.
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
    """The answer formats of the served model.

    Args:
        tools: format of tool calls; None without tool calls.
        reasoning: format of reasoning; None without reasoning.
        marks: texts of the marks that are special tokens, by token id; the tokenizer would drop
            them in decoding.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    marks: Mapping[int, str] = field(default_factory=dict)


def formats_of(tools: str | None, reasoning: str | None, tokenizer: Tokenizer) -> AnswerFormats:
    """Return the formats with the names `tools` and `reasoning`; None means no such format."""
    tool_format = None if tools is None else TOOL_FORMATS[tools]
    reasoning_format = None if reasoning is None else REASONING_FORMATS[reasoning]
    texts = [reasoning_format.begin, reasoning_format.end] if reasoning_format else []
    if tool_format is not None:
        texts += [
            *tool_format.begin,
            *tool_format.head,
            tool_format.name_end,
            *tool_format.tail,
            *tool_format.end,
        ]
    marks = {}
    for text in {t.strip() for t in texts if t.strip()}:
        ids = tokenizer.tokenize(text, add_special_tokens=False)
        if len(ids) == 1 and not tokenizer.detokenize(ids):
            marks[ids[0]] = text
    return AnswerFormats(tools=tool_format, reasoning=reasoning_format, marks=marks)


def reasoning_limit(
    formats: AnswerFormats, tokenizer: Tokenizer, budget: int, *, in_reasoning: bool
) -> dict[str, Any]:
    """Return the arguments of `ReasoningLimit` that end reasoning after `budget` tokens.

    Args:
        formats: answer formats of the model, with reasoning.
        tokenizer: tokenizer of the model.
        budget: most tokens of reasoning, without its marks.
        in_reasoning: whether the prompt ends inside reasoning.
    """
    reasoning_format = formats.reasoning
    assert reasoning_format is not None
    begin = "" if in_reasoning else reasoning_format.begin
    return {
        "begin": begin,
        "end": reasoning_format.end,
        "end_tokens": tokenizer.tokenize(reasoning_format.end, add_special_tokens=False),
        "after": budget + len(tokenizer.tokenize(begin, add_special_tokens=False) if begin else ()),
    }


def decode_with_marks(tokenizer: Tokenizer, marks: Mapping[int, str], ids: Sequence[int]) -> str:
    """Return the text of token ids, including special tokens that are marks."""
    texts: list[str] = []
    start = 0
    for index, token in enumerate(ids):
        if token in marks:
            texts += [tokenizer.detokenize(ids[start:index]), marks[token]]
            start = index + 1
    return "".join([*texts, tokenizer.detokenize(ids[start:])])
