# SPDX-License-Identifier: Apache-2.0
"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.protocol.messages import CountBody, MessageFormatter, MessagesBody
from megatron.inference.server.serving import Route, Server, begin_answer
from megatron.inference.server.streaming import respond


async def messages(server: Server, request: Request) -> Response:
    """Answer `POST /v1/messages`."""
    body = await server.read(request, MessagesBody)
    server.check_model(body.model)
    generation = await begin_answer(
        server,
        body.conversation(body.max_tokens),
        body.generation(),
        max_new_tokens=body.max_tokens,
        thinking_budget=None if body.thinking is None else body.thinking.budget_tokens,
        ends_at_context=True,
        names={
            "prompt": "messages",
            "max_new_tokens": "max_tokens",
            "response_format": body.format_field,
        },
    )
    formatter = MessageFormatter(
        server.card.name,
        generation.usage,
        request.state.request_id,
        ends_at_context=generation.request.requests[0].max_new_tokens < body.max_tokens,
    )
    return await respond(request, generation, formatter, server.limits, stream=bool(body.stream))


async def count_tokens(server: Server, request: Request) -> Response:
    """Answer `POST /v1/messages/count_tokens`."""
    body = await server.read(request, CountBody)
    server.check_model(body.model)
    prompt = await server.conversations.prompt(body.conversation())
    return JSONResponse({"input_tokens": len(prompt.tokens)})


ROUTES: Sequence[Route] = (
    ("POST", "/v1/messages", messages, MessagesBody),
    ("POST", "/v1/messages/count_tokens", count_tokens, CountBody),
)
