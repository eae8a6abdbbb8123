# SPDX-License-Identifier: Apache-2.0
"""The answer to a conversation, whichever route it came by."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.answer_formats import reasoning_limit
from megatron.inference.server.answer_grammar import enforced, json_after_reasoning, tool_grammar
from megatron.inference.server.answer_parser import AnswerParser
from megatron.inference.server.conversation import Conversation, Prompt
from megatron.inference.server.engine_client import ReaderStalled
from megatron.inference.server.fields import GenerationBody
from megatron.inference.server.generation import Delta, Generation
from megatron.inference.server.guard import ApiError, EventStream, internal_error
from megatron.inference.server.log_lines import LOG
from megatron.inference.server.request_handling import (
    GrammarMaker,
    Server,
    checked,
    grammar_makers,
    too_slow,
)


class AnswerView(Protocol):
    """What a route of named events makes of one answer."""

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the events that show a delta; the last one of an answer ends it."""
        ...

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the answer from all of its deltas."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error that ends a stream."""
        ...


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
    """Ask the engine to answer a conversation; the deltas have parts.

    Args:
        server: that answers.
        conversation: so far.
        body: how tokens are chosen, what ends and what shapes the answer.
        max_new_tokens: of the answer; None is what the model has room for.
        logprobs: alternatives of each token to report.
        thinking_budget: tokens of reasoning at most; None for any number.
        names: what the route calls `prompt`, `max_new_tokens` and, where it has another name for
            it, `response_format`.

    Raises:
        ApiError: the model cannot answer it, or not now.
    """
    if thinking_budget is not None:
        _check_budget(server)
    prompt = await server.conversations.prompt(conversation)
    shapes = [(names.get(name, name), make) for name, make in grammar_makers(body)]
    longest = server.card.max_length
    if max_new_tokens is None and longest is None:
        raise ApiError(
            400,
            f"the model has no longest text: give {names['max_new_tokens']}",
            param=names["max_new_tokens"],
        )
    if max_new_tokens is None and len(prompt.tokens) >= (longest or 0):
        raise ApiError(
            400,
            f"the conversation has {len(prompt.tokens)} tokens, the model takes {longest}",
            param=names["prompt"],
            code="context_length_exceeded",
        )
    wanted = body.wanted(
        [prompt.tokens],
        ends=server.card.stop_tokens,
        max_new_tokens=max_new_tokens,
        sampling=body.sampling(seed=secrets.randbits(63), logprobs=logprobs),
        names=names,
        grammar=await server.grammar(body, _makers(server, conversation, body, prompt, shapes)),
    )
    if thinking_budget is not None:
        limit = reasoning_limit(
            server.formats, server.tokenizer, thinking_budget, in_reasoning=prompt.in_reasoning
        )
        wanted = dataclasses.replace(wanted, reasoning_limit=limit)
    tools = {tool.name: tool.parameters for tool in conversation.callable_tools}
    parsers = [
        AnswerParser(server.formats, tools, in_reasoning=prompt.in_reasoning)
        for _ in range(wanted.n)
    ]
    return server.generate(wanted, parsers)


def _check_budget(server: Server) -> None:
    """Raise ApiError where reasoning cannot be closed."""
    if server.formats.reasoning is None:
        raise ApiError(
            400,
            "thinking: this server reads no reasoning: start it with --reasoning-parser, or leave "
            "the budget out",
            param="thinking",
        )
    if server.grammars is None:
        raise ApiError(
            400,
            "thinking: a budget needs a model with a tokenizer of texts and a token that ends one",
            param="thinking",
        )


def _makers(
    server: Server,
    conversation: Conversation,
    body: GenerationBody,
    prompt: Prompt,
    found: list[GrammarMaker],
) -> list[GrammarMaker]:
    """Return what makes the grammar of an answer, from those that its body asks for. Raises
    ApiError for more than one."""
    begun = prompt.in_reasoning
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


async def respond_with_events(
    server: Server,
    request: Request,
    generation: Generation,
    view: AnswerView,
    *,
    stream: bool,
    ended: Callable[[], object] = lambda: None,
) -> Response:
    """Return an answer, whole or as a stream of named events, which calls `ended` at its end."""
    if stream:
        events = _events(server, request.state.request_id, generation, view, ended)
        return EventStream(events, generation.stalled)

    async def collected() -> list[Delta]:
        return [delta async for delta in checked(generation)]

    deltas = await server.waited(request, collected())
    if deltas is None:
        return Response(status_code=499)  # nobody reads it
    return JSONResponse(view.whole(deltas))


async def _events(
    server: Server,
    request_id: str,
    generation: Generation,
    view: AnswerView,
    ended: Callable[[], object],
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a stream."""
    try:
        async with asyncio.timeout(server.limits.request_seconds):
            async for delta in checked(generation):
                for event in view.events(delta):
                    yield event
    except TimeoutError:
        yield view.error(too_slow(server.limits))
    except ReaderStalled:
        LOG.warning("request %s: its reader stalled, and was dropped", request_id)
    except ApiError as error:
        yield view.error(error)
    except Exception:
        LOG.exception("request %s failed in its stream", request_id)
        yield view.error(internal_error())
    finally:
        generation.close()
        ended()
