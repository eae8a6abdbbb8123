# SPDX-License-Identifier: Apache-2.0
"""The formats in which model families write tool calls and reasoning.

The parser of answers and the grammar of enforced calls both use this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from megatron.cli.tokenizers import Tokenizer

#: Marks of harmony, the message format of gpt-oss, and the marks that end an answer.
HARMONY_STOPS = ("<|return|>", "<|call|>")
HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
    *HARMONY_STOPS,
)


@dataclass(frozen=True, kw_only=True)
class ParameterFormat:
    """Arguments as marked texts: `begin KEY key_end value_begin VALUE end` for each argument.

    A string is written without quotes, another value as JSON. The grammar writes white space in the
    literals verbatim; the parser accepts any white space around them. A newline at the start of
    `end` means that the value has its own lines.
    """

    begin: str
    key_end: str
    value_begin: str = ""
    end: str

    @property
    def separate_lines(self) -> bool:
        """Whether a newline before and after a value is part of the marks."""
        return self.end.startswith("\n")


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
        ends_reasoning: whether a section may start within reasoning, and ends it.
        head: literals before the name of the tool; of alternatives the grammar writes the first.
        name_suffix: literal and pattern of an optional index or id after the name.
        name_end: literal after the name. If it is white space or empty, the next mark also ends the
            name.
        middle: literals before the arguments; alternatives as in `head`.
        layout: "object" is a call that is a JSON object with the name and the arguments, "json" has
            arguments that are a JSON object, "parameters" has arguments in the format `parameters`,
            "channels" is a message in the format of `harmony`, which uses no other field.
        parameters: format of the arguments of the layout "parameters".
        tail: literals after the arguments.
        separator: literal between the calls of a section; None if a section has one call. It must
            not start like `end`, as the lexer of grammars does not backtrack.
        end: literals that end a section.
        section_separator: literal between sections, if a section has one call.
        variants: further formats of the family's models.
        text_arguments: whether the chat template takes the arguments of earlier calls as JSON text,
            not as objects.
        call_ids: the ids of earlier calls that the chat template requires: "alphanumeric" has 9
            letters or digits, "indexed" is `functions.NAME:INDEX`; None for any id.
    """

    begin: Sequence[str] = ()
    bare: bool = False
    head_begins: bool = False
    ends_reasoning: bool = False
    head: Sequence[str | tuple[str, ...]] = ()
    name_suffix: tuple[str, str] | None = None
    name_end: str = ""
    middle: Sequence[str | tuple[str, ...]] = ()
    layout: Literal["object", "json", "parameters", "channels"] = "object"
    parameters: ParameterFormat | None = None
    tail: Sequence[str] = ()
    separator: str | None = None
    end: Sequence[str] = ()
    section_separator: str = "\n"
    variants: Sequence[ToolFormat] = ()
    text_arguments: bool = False
    call_ids: Literal["alphanumeric", "indexed"] | None = None

    @property
    def literals(self) -> list[str]:
        """All literals of the format and its variants that may be special tokens."""
        parameters, suffix = self.parameters, self.name_suffix
        literals = [self.name_end, *self.begin, *self.tail, *self.end]
        literals += [text for text in self.head if isinstance(text, str)]
        literals += [] if suffix is None else [suffix[0]]
        if parameters is not None:
            literals += [parameters.begin, parameters.key_end]
            literals += [parameters.value_begin, parameters.end]
        return literals + [text for variant in self.variants for text in variant.literals]


@dataclass(frozen=True)
class ReasoningFormat:
    """Start and end mark of reasoning. After a prompt that ends with `begin`, the answer starts
    inside reasoning.

    Args:
        begin, end: the marks.
        anywhere: whether reasoning may start after the beginning of an answer.
        channels: whether the answer consists of messages in the format of `harmony`.
        message_key: key of the reasoning of earlier turns in the messages for the chat template.
    """

    begin: str
    end: str
    anywhere: bool = True
    channels: bool = False
    message_key: str = "reasoning_content"


_OBJECT_HEAD = ("{", '"name"', ": ", '"')
_ARGUMENTS = (", ", ('"arguments"', '"parameters"'), ": ")
_OBJECT: Mapping[str, Any] = MappingProxyType(
    {"head": _OBJECT_HEAD, "name_end": '"', "middle": _ARGUMENTS, "tail": ("}",)}
)
_GLM = ToolFormat(
    begin=("<tool_call>",),
    name_end="\n",
    layout="parameters",
    parameters=ParameterFormat(
        begin="<arg_key>",
        key_end="</arg_key>",
        value_begin="\n<arg_value>",
        end="</arg_value>\n",
    ),
    end=("</tool_call>",),
)
_DEEPSEEK = ToolFormat(
    begin=("<｜tool▁calls▁begin｜>",),
    head=("<｜tool▁call▁begin｜>",),
    name_end="<｜tool▁sep｜>",
    layout="json",
    tail=("<｜tool▁call▁end｜>",),
    separator="",
    end=("<｜tool▁calls▁end｜>",),
    text_arguments=True,
)
# The format of newer Mistral models; some write an id between the name and the arguments.
_MISTRAL_ARGS = ToolFormat(
    begin=("[TOOL_CALLS]",),
    name_suffix=("[CALL_ID]", "[a-zA-Z0-9]{9}"),
    name_end="[ARGS]",
    layout="json",
    section_separator="",
)

#: Formats by the values of `--tool-call-parser`.
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat(begin=("<tool_call>\n",), end=("\n</tool_call>",), **_OBJECT),
        "qwen3_coder": ToolFormat(
            begin=("<tool_call>\n",),
            head_begins=True,
            head=("<function=",),
            name_end=">",
            middle=("\n",),
            layout="parameters",
            parameters=ParameterFormat(
                begin="<parameter=", key_end=">", value_begin="\n", end="\n</parameter>\n"
            ),
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
        ),
        "deepseek_v3": replace(
            _DEEPSEEK,
            head=("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"),
            name_end="\n",
            middle=("```json\n",),
            tail=("\n```", "<｜tool▁call▁end｜>"),
            separator="\n",
        ),
        "deepseek_v31": _DEEPSEEK,
        "nemotron": ToolFormat(
            begin=("<TOOLCALL>", "["), separator=", ", end=("]", "</TOOLCALL>"), **_OBJECT
        ),
        "mistral": ToolFormat(
            begin=("[TOOL_CALLS]", "["),
            separator=", ",
            end=("]",),
            variants=(_MISTRAL_ARGS,),
            call_ids="alphanumeric",
            **_OBJECT,
        ),
        "kimi_k2": ToolFormat(
            begin=("<|tool_calls_section_begin|>",),
            ends_reasoning=True,
            head=("<|tool_call_begin|>", ("functions.", "")),
            name_suffix=(":", "[0-9]{1,9}"),
            name_end="<|tool_call_argument_begin|>",
            layout="json",
            tail=("<|tool_call_end|>",),
            separator="",
            end=("<|tool_calls_section_end|>",),
            call_ids="indexed",
        ),
        "glm45": _GLM,
        "glm47": replace(
            _GLM,
            name_end="",
            parameters=ParameterFormat(
                begin="<arg_key>",
                key_end="</arg_key>",
                value_begin="<arg_value>",
                end="</arg_value>",
            ),
            section_separator="",
        ),
        "gpt_oss": ToolFormat(layout="channels"),
        "minimax": ToolFormat(
            begin=("<tool_calls>\n",),
            separator="",
            end=("</tool_calls>",),
            **{**_OBJECT, "tail": ("}\n",)},
        ),
        "minimax_m2": ToolFormat(
            begin=("<minimax:tool_call>\n",),
            head=('<invoke name="',),
            name_end='">',
            middle=("\n",),
            layout="parameters",
            parameters=ParameterFormat(
                begin='<parameter name="', key_end='">', end="</parameter>\n"
            ),
            tail=("</invoke>\n",),
            separator="",
            end=("</minimax:tool_call>",),
        ),
    }
)

_THINK = ReasoningFormat("<think>", "</think>")

#: Formats by the values of `--reasoning-parser`.
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "nemotron"), _THINK),
        **dict.fromkeys(("glm45", "kimi_k2", "minimax_m2"), _THINK),
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
        "granite": ReasoningFormat(
            "Here is my thought process:", "Here is my response:", anywhere=False
        ),
        "gpt_oss": ReasoningFormat(
            "<|channel|>analysis<|message|>", "<|end|>", channels=True, message_key="thinking"
        ),
    }
)

#: Other names of parsers, as vLLM calls them.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "qwen3_xml": "qwen3_coder",
        "glm4_5": "glm45",
        "openai": "gpt_oss",
        "openai_gptoss": "gpt_oss",
    }
)

#: The parser that "auto" selects: the first whose texts the chat template contains.
_TOOL_PARSER_TEXTS: Sequence[tuple[str, Sequence[str]]] = (
    ("gpt_oss", ["<|channel|>", "functions."]),
    ("kimi_k2", ["<|tool_calls_section_begin|>"]),
    ("deepseek_v3", ["<｜tool▁calls▁begin｜>", "```json"]),
    ("deepseek_v31", ["<｜tool▁calls▁begin｜>"]),
    ("minimax_m2", ["<minimax:tool_call>"]),
    ("mistral", ["[TOOL_CALLS]"]),
    ("nemotron", ["<TOOLCALL>"]),
    ("glm47", ["</arg_key><arg_value>"]),
    ("glm45", ["<arg_key>"]),
    ("qwen3_coder", ["<function="]),
    ("minimax", ["<tool_calls>"]),
    ("llama3_json", ["<|python_tag|>"]),
    ("hermes", ["<tool_call>"]),
)
_REASONING_PARSER_TEXTS: Sequence[tuple[str, Sequence[str]]] = (
    ("gpt_oss", ["<|channel|>analysis"]),
    ("mistral", ["[THINK]"]),
    ("granite", ["Here is my thought process:"]),
    ("qwen3", ["<think>"]),
)

#: Values of `--tool-call-parser` and `--reasoning-parser`; a test compares them with the tables.
ToolParserName = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "qwen3_xml",
    "llama3_json",
    "deepseek_v3",
    "deepseek_v31",
    "nemotron",
    "mistral",
    "kimi_k2",
    "glm45",
    "glm4_5",
    "glm47",
    "gpt_oss",
    "openai",
    "minimax",
    "minimax_m2",
]
ReasoningParserName = Literal[
    "auto",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "nemotron",
    "mistral",
    "kimi_k2",
    "glm45",
    "gpt_oss",
    "openai_gptoss",
    "minimax_m2",
    "granite",
]


@dataclass(frozen=True, kw_only=True)
class AnswerFormats:
    """The answer formats of the served model.

    Args:
        tools: format of tool calls; None without tool calls.
        reasoning: format of reasoning; None without reasoning.
        marks: texts of the marks that are special tokens, by token id; the tokenizer would drop
            them in decoding.
        stop_tokens: ids of marks that end an answer.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    stop_tokens: frozenset[int] = frozenset()

    @property
    def channels(self) -> bool:
        """Whether an answer consists of messages in the format of `harmony`."""
        tools, reasoning = self.tools, self.reasoning
        return (tools is not None and tools.layout == "channels") or (
            reasoning is not None and reasoning.channels
        )


def check_parsers(tools: str | None, reasoning: str | None) -> None:
    """Raise ValueError for parsers of two formats that exclude each other."""
    names = {ALIASES.get(name, name) for name in (tools, reasoning) if name is not None}
    names.discard("auto")
    if len(names) > 1 and "gpt_oss" in names:
        raise ValueError(
            f"--tool-call-parser {tools} and --reasoning-parser {reasoning}: gpt_oss parses the "
            "whole answer: give it for both, or leave the other one out"
        )


def select_parsers(
    tools: str | None, reasoning: str | None, source: str | None
) -> tuple[str | None, str | None]:
    """Return the names of parsers, with "auto" replaced by the parser of the chat template.

    Args:
        tools, reasoning: values of `--tool-call-parser` and `--reasoning-parser`.
        source: Jinja text of the chat template; None without a template.

    Raises:
        ValueError: the template has the texts of no parser, or the parsers exclude each other.
    """
    names = []
    for flag, name, table in (
        ("--tool-call-parser", tools, _TOOL_PARSER_TEXTS),
        ("--reasoning-parser", reasoning, _REASONING_PARSER_TEXTS),
    ):
        selected = name
        if name == "auto":
            text = source or ""
            matches = (parser for parser, texts in table if all(t in text for t in texts))
            selected = next(matches, None)
            if selected is None:
                raise ValueError(
                    f"{flag} auto: the chat template has the marks of no known format: give the "
                    "parser's name, or leave the option out"
                )
        names.append(selected)
    check_parsers(*names)
    return names[0], names[1]


def formats_of(tools: str | None, reasoning: str | None, tokenizer: Tokenizer) -> AnswerFormats:
    """Return the formats with the names `tools` and `reasoning`; None means no such format.

    Messages of gpt_oss have reasoning, so its tool format implies its reasoning format.
    """
    tools, reasoning = (None if n is None else ALIASES.get(n, n) for n in (tools, reasoning))
    if tools == "gpt_oss":
        reasoning = tools
    tool_format = None if tools is None else TOOL_FORMATS[tools]
    reasoning_format = None if reasoning is None else REASONING_FORMATS[reasoning]
    texts = [] if tool_format is None else tool_format.literals
    if reasoning_format is not None:
        texts += [reasoning_format.begin, reasoning_format.end]
        texts += HARMONY_MARKS if reasoning_format.channels else []
    marks = {}
    for text in {t.strip() for t in texts if t.strip()}:
        ids = tokenizer.tokenize(text, add_special_tokens=False)
        if len(ids) == 1 and not tokenizer.detokenize(ids):
            marks[ids[0]] = text
    stop_tokens = {token for token, text in marks.items() if text in HARMONY_STOPS}
    return AnswerFormats(
        tools=tool_format,
        reasoning=reasoning_format,
        marks=marks,
        stop_tokens=frozenset(stop_tokens),
    )


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
