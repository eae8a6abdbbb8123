# SPDX-License-Identifier: Apache-2.0
"""The generation of an answer to a conversation, for the chat, messages and responses APIs."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.inference.server.chat_template import Conversation
from megatron.inference.server.guided_decoding.request_grammar import (
    chat_grammar_makers,
    compiled_grammar,
    grammar_makers,
)
from megatron.inference.server.middleware.api_error import ApiError
from megatron.inference.server.output_processor import Generation
from megatron.inference.server.protocol.generation import GenerationBody
from megatron.inference.server.serving import Server
from megatron.inference.server.tool_parsers.formats import reasoning_limit
from megatron.inference.server.tool_parsers.output_parser import OutputParser


async def begin_answer(
    server: Server,
    conversation: Conversation,
    body: GenerationBody,
    *,
    max_new_tokens: int | None = None,
    logprobs: int | None = None,
    thinking_budget: int | None = None,
    names: Mapping[str, str],
) -> Generation:
    """Send the request for an answer to the engine; its deltas have `segments`.

    Args:
        server: the server.
        conversation: the conversation to answer.
        body: sampling, stop and grammar fields of the request.
        max_new_tokens: most tokens of the answer; None for the remaining length of the model.
        logprobs: number of alternatives to report per token.
        thinking_budget: most tokens of reasoning; None for no limit.
        names: the route's names of `prompt`, `max_new_tokens` and, if it differs,
            `response_format`.

    Raises:
        ApiError: the model cannot answer the conversation, or is unavailable.
    """
    if thinking_budget is not None:
        _check_budget(server)
    prompt = await server.conversations.prompt(conversation)
    if max_new_tokens is None:
        max_new_tokens = _remaining_tokens(server, len(prompt.tokens), names)
    makers = chat_grammar_makers(
        body,
        [(names.get(name, name), make) for name, make in grammar_makers(body)],
        conversation,
        server.formats,
        in_reasoning=prompt.in_reasoning,
    )
    grammar = await compiled_grammar(server.grammars, body, makers)
    limit = None
    if thinking_budget is not None:
        limit = reasoning_limit(
            server.formats, server.tokenizer, thinking_budget, in_reasoning=prompt.in_reasoning
        )
    generation_request = body.generation_request(
        [prompt.tokens],
        default_stop_tokens=server.card.stop_tokens,
        max_new_tokens=max_new_tokens,
        logprobs=logprobs,
        names=names,
        grammar=grammar,
        reasoning_limit=limit,
    )
    tools = {tool.name: tool.parameters for tool in conversation.callable_tools}
    parsers = [
        OutputParser(server.formats, tools, in_reasoning=prompt.in_reasoning)
        for _ in range(generation_request.n)
    ]
    return server.generate(generation_request, parsers)


def _remaining_tokens(server: Server, num_prompt_tokens: int, names: Mapping[str, str]) -> int:
    """Return the tokens that fit after a prompt. Raises ApiError if there are none."""
    max_length = server.card.max_length
    if max_length is None:
        name = names["max_new_tokens"]
        raise ApiError(400, f"the model has no maximum length: give {name}", param=name)
    if num_prompt_tokens >= max_length:
        raise ApiError(
            400,
            f"the conversation has {num_prompt_tokens} tokens, but the model takes at most "
            f"{max_length}",
            param=names["prompt"],
            code="context_length_exceeded",
        )
    return max_length - num_prompt_tokens


def _check_budget(server: Server) -> None:
    """Raise ApiError if the server cannot limit reasoning."""
    if server.formats.reasoning is None:
        raise ApiError(
            400,
            "thinking: this server does not parse reasoning: start it with "
            "--reasoning-parser, or leave the budget out",
            param="thinking",
        )
    if server.grammars is None:
        raise ApiError(
            400,
            "thinking: a budget needs a model with a text tokenizer and a stop token",
            param="thinking",
        )
