# SPDX-License-Identifier: Apache-2.0
"""The answer to a conversation, whichever route it came by."""

from __future__ import annotations

import secrets
from functools import partial

from megatron.inference.server.answer_grammar import enforced, json_after_reasoning, tool_grammar
from megatron.inference.server.answer_parser import AnswerParser
from megatron.inference.server.conversation import Conversation, Prompt
from megatron.inference.server.fields import GenerationBody
from megatron.inference.server.generation import Generation
from megatron.inference.server.guard import ApiError
from megatron.inference.server.routes import GrammarMaker, Server, grammar_makers


async def begin_answer(
    server: Server,
    conversation: Conversation,
    body: GenerationBody,
    *,
    max_new_tokens: int | None = None,
    logprobs: int | None = None,
) -> Generation:
    """Ask the engine to answer a conversation; the deltas have parts.

    Args:
        server: that answers.
        conversation: so far.
        body: how tokens are chosen, what ends and what shapes the answer.
        max_new_tokens: of the answer; None is what the model has room for.
        logprobs: alternatives of each token to report.

    Raises:
        ApiError: the model cannot answer it, or not now.
    """
    prompt = await server.conversations.prompt(conversation)
    longest = server.card.max_length
    if max_new_tokens is None and longest is None:
        raise ApiError(
            400, "the model has no longest text: give max_completion_tokens", param="max_tokens"
        )
    if max_new_tokens is None and len(prompt.tokens) >= (longest or 0):
        raise ApiError(
            400,
            f"the conversation has {len(prompt.tokens)} tokens, the model takes {longest}",
            param="messages",
            code="context_length_exceeded",
        )
    wanted = body.wanted(
        [prompt.tokens],
        ends=server.card.stop_tokens,
        max_new_tokens=max_new_tokens,
        sampling=body.sampling(seed=secrets.randbits(63), logprobs=logprobs),
        grammar=await server.grammar(body, _makers(server, conversation, body, prompt)),
    )
    tools = {tool.name: tool.parameters for tool in conversation.callable_tools}
    parsers = [
        AnswerParser(server.formats, tools, in_reasoning=prompt.in_reasoning)
        for _ in range(wanted.n)
    ]
    return server.generate(wanted, parsers)


def _makers(
    server: Server, conversation: Conversation, body: GenerationBody, prompt: Prompt
) -> list[GrammarMaker]:
    """Return what makes the grammar of an answer. Raises ApiError for more than one."""
    found, begun = grammar_makers(body), prompt.in_reasoning
    if found and conversation.callable_tools:
        name = found[0][0]
        raise ApiError(
            400, f"{name} does not go with tools: drop one, or say tool_choice: none", param=name
        )
    if enforced(conversation):
        make = partial(tool_grammar, conversation, server.formats, in_reasoning=begun)
        return [("tools", make)]
    schema = body.json_schema
    if server.formats.reasoning is None or not found:
        return found
    if schema is not None:
        make = partial(json_after_reasoning, schema, server.formats, in_reasoning=begun)
        return [(name, make) for name, _ in found]
    if begun:
        raise ApiError(
            400,
            "structured_outputs: only JSON can follow reasoning, which the chat template begins: "
            "use json, or have the template begin none by chat_template_kwargs",
            param="structured_outputs",
        )
    return found
