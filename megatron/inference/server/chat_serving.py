# SPDX-License-Identifier: Apache-2.0
"""Answers to conversations, shared by the chat, messages and responses routes."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.chat_template import Conversation, Prompt
from megatron.inference.server.engine.client import ReaderStalled
from megatron.inference.server.guided_decoding.tool_grammar import (
    enforced,
    json_after_reasoning,
    tool_grammar,
)
from megatron.inference.server.middleware.request_guard import ApiError, EventStream, internal_error
from megatron.inference.server.middleware.request_log import LOG
from megatron.inference.server.output_processor import Delta, Generation
from megatron.inference.server.protocol.generation import GenerationBody
from megatron.inference.server.serving import (
    GrammarMaker,
    Server,
    checked_deltas,
    grammar_makers,
    timeout_error,
)
from megatron.inference.server.tool_parsers.formats import reasoning_limit
from megatron.inference.server.tool_parsers.output_parser import AnswerParser


class AnswerView(Protocol):
    """The format of an answer in a route with named events."""

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the events of a delta."""
        ...

    def complete(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the complete answer from all of its deltas."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error, which ends the stream."""
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
    """Send the request for an answer to the engine; its deltas have `answer_parts`.

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
    makers = [(names.get(name, name), make) for name, make in grammar_makers(body)]
    max_length = server.card.max_length
    if max_new_tokens is None and max_length is None:
        raise ApiError(
            400,
            f"the model has no maximum length: give {names['max_new_tokens']}",
            param=names["max_new_tokens"],
        )
    if max_new_tokens is None and len(prompt.tokens) >= (max_length or 0):
        raise ApiError(
            400,
            f"the conversation has {len(prompt.tokens)} tokens, but the model takes at most "
            f"{max_length}",
            param=names["prompt"],
            code="context_length_exceeded",
        )
    generation_request = body.generation_request(
        [prompt.tokens],
        default_stop_tokens=server.card.stop_tokens,
        max_new_tokens=max_new_tokens,
        sampling=body.sampling(seed=secrets.randbits(63), logprobs=logprobs),
        names=names,
        grammar=await server.grammar(body, _makers(server, conversation, body, prompt, makers)),
    )
    if thinking_budget is not None:
        limit = reasoning_limit(
            server.formats, server.tokenizer, thinking_budget, in_reasoning=prompt.in_reasoning
        )
        generation_request = dataclasses.replace(generation_request, reasoning_limit=limit)
    tools = {tool.name: tool.parameters for tool in conversation.callable_tools}
    parsers = [
        AnswerParser(server.formats, tools, in_reasoning=prompt.in_reasoning)
        for _ in range(generation_request.n)
    ]
    return server.generate(generation_request, parsers)


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


def _makers(
    server: Server,
    conversation: Conversation,
    body: GenerationBody,
    prompt: Prompt,
    body_makers: list[GrammarMaker],
) -> list[GrammarMaker]:
    """Return the grammar makers of an answer, from its body and its tools. Raises ApiError if the
    body and the tools conflict."""
    in_reasoning = prompt.in_reasoning
    if body_makers and conversation.callable_tools:
        name = body_makers[0][0]
        raise ApiError(
            400,
            f"{name} cannot be combined with tools: drop one of them, or set tool_choice to none",
            param=name,
        )
    if enforced(conversation):
        make = partial(tool_grammar, conversation, server.formats, in_reasoning=in_reasoning)
        return [("tools", make)]
    schema = body.json_schema
    if server.formats.reasoning is None or not body_makers:
        return body_makers
    if schema is not None:
        make = partial(json_after_reasoning, schema, server.formats, in_reasoning=in_reasoning)
        return [(name, make) for name, _ in body_makers]
    if in_reasoning:
        raise ApiError(
            400,
            "structured_outputs: the chat template opens the reasoning, and only JSON can "
            "follow it: use json, or set chat_template_kwargs so that the template does not "
            "open it",
            param="structured_outputs",
        )
    return body_makers


async def respond_with_events(
    server: Server,
    request: Request,
    generation: Generation,
    view: AnswerView,
    *,
    stream: bool,
    ended: Callable[[], object] = lambda: None,
) -> Response:
    """Return a complete answer, or a stream of named events, which calls `ended` at its end."""
    if stream:
        events = _events(server, request.state.request_id, generation, view, ended)
        return EventStream(events, generation.stalled)

    async def collected() -> list[Delta]:
        return [delta async for delta in checked_deltas(generation)]

    deltas = await server.run_until_disconnect(request, collected())
    if deltas is None:
        return Response(status_code=499)  # the client has disconnected
    return JSONResponse(view.complete(deltas))


async def _events(
    server: Server,
    request_id: str,
    generation: Generation,
    view: AnswerView,
    ended: Callable[[], object],
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a streamed answer."""
    try:
        async with asyncio.timeout(server.limits.request_seconds):
            async for delta in checked_deltas(generation):
                for event in view.events(delta):
                    yield event
    except TimeoutError:
        yield view.error(timeout_error(server.limits))
    except ReaderStalled:
        LOG.warning("request %s: the client stopped reading, so its stream was closed", request_id)
    except ApiError as error:
        yield view.error(error)
    except Exception:
        LOG.exception("request %s failed while streaming", request_id)
        yield view.error(internal_error())
    finally:
        generation.close()
        ended()
