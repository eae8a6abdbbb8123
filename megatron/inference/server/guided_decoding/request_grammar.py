# SPDX-License-Identifier: Apache-2.0
"""The grammar that a request asks for, by its body or by its tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.inference.server.chat_template import Conversation
from megatron.inference.server.guided_decoding.grammars import (
    Grammars,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from megatron.inference.server.guided_decoding.tool_grammar import (
    enforced,
    json_after_reasoning,
    tool_grammar,
)
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.generation import (
    GenerationBody,
    JsonFormat,
    JsonSchemaFormat,
)
from megatron.inference.server.tool_parsers.formats import AnswerFormats

#: Time limit for checking a grammar.
GRAMMAR_SECONDS = 5.0


#: The field that requests a grammar, and the function that returns the grammar.
GrammarMaker = tuple[str, Callable[[], str]]


def _param(name: str) -> str:
    """Return the field of the body with the path `name`."""
    return name.split(".")[0]


def grammar_makers(body: GenerationBody) -> list[GrammarMaker]:
    """Return the maker of each grammar that a body requests."""
    all_makers: list[GrammarMaker] = []
    structured, response_format = body.structured_outputs, body.response_format
    if isinstance(response_format, JsonFormat):
        all_makers.append(("response_format", partial(json_grammar, {"type": "object"})))
    elif isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.json_schema
        all_makers.append(("response_format", partial(json_grammar, schema)))
    if structured is not None:
        json_maker = partial(json_grammar, whitespace=structured.whitespace_pattern)
        makers: tuple[tuple[str, Any, Callable[..., str]], ...] = (
            ("json", structured.json_schema, json_maker),
            ("regex", structured.regex, regex_grammar),
            ("choice", structured.choice, choice_grammar),
            ("grammar", structured.grammar, lark_grammar),
        )
        for kind, value, make in makers:
            if value is not None:
                all_makers.append((body.grammar_field(kind), partial(make, value)))
    return all_makers


def chat_grammar_makers(
    body: GenerationBody,
    body_makers: list[GrammarMaker],
    conversation: Conversation,
    formats: AnswerFormats,
    *,
    in_reasoning: bool,
) -> list[GrammarMaker]:
    """Return the grammar makers of the answer to a conversation, from its body and its tools.

    Args:
        body: body of the request.
        body_makers: makers of the grammars that the body requests.
        conversation: the conversation to answer.
        formats: answer formats of the model.
        in_reasoning: whether the prompt ends inside reasoning.

    Raises:
        ApiError: the body and the tools conflict.
    """
    if body_makers and conversation.callable_tools:
        name = body_makers[0][0]
        raise ApiError(
            400,
            f"{name} cannot be combined with tools: drop one of them, or set tool_choice to none",
            param=_param(name),
        )
    if enforced(conversation):
        make = partial(tool_grammar, conversation, formats, in_reasoning=in_reasoning)
        return [("tools", make)]
    schema = body.json_schema
    if formats.reasoning is None or not body_makers:
        return body_makers
    if schema is not None:
        make = partial(json_after_reasoning, schema, formats, in_reasoning=in_reasoning)
        return [(name, make) for name, _ in body_makers]
    if in_reasoning:
        name = body_makers[0][0]
        raise ApiError(
            400,
            f"{name}: the chat template opens the reasoning, and only JSON can follow it: use "
            "json, or set chat_template_kwargs so that the template does not open it",
            param=_param(name),
        )
    return body_makers


async def compiled_grammar(
    grammars: Grammars | None, body: GenerationBody, makers: Sequence[GrammarMaker]
) -> str | None:
    """Return the grammar of the outputs, which is known to compile; None for any text.

    Args:
        grammars: cache of compiled grammars; None if the model does not support them.
        body: body of the request.
        makers: makers of the requested grammars.

    Raises:
        ApiError: more than one grammar is requested, or the grammar is invalid.
    """
    if not makers:
        if body.structured_outputs is not None:
            name = body.grammar_field("whitespace_pattern").removesuffix(".whitespace_pattern")
            raise ApiError(400, f"{name}: give json, regex, choice or grammar", param=name)
        return None
    name, make = makers[0]
    param = _param(name)
    if len(makers) > 1:
        names = ", ".join(name for name, _ in makers)
        raise ApiError(400, f"{names}: give one constraint of the output", param=param)
    if body.ignore_eos:
        raise ApiError(400, f"ignore_eos cannot be combined with {name}", param="ignore_eos")
    if grammars is None:
        raise ApiError(
            400,
            f"{name} needs a model with a text tokenizer and a stop token",
            param=param,
        )

    def compile_grammar() -> str:
        grammar = make()
        grammars.compile(grammar)
        return grammar

    try:
        # After a timeout the thread still ends, by the limits of llguidance.
        return await asyncio.wait_for(asyncio.to_thread(compile_grammar), GRAMMAR_SECONDS)
    except TimeoutError:
        raise ApiError(400, f"{name} takes too long to compile", param=param) from None
    except ValueError as error:
        raise ApiError(400, f"{name} cannot be used: {error}", param=param) from None
