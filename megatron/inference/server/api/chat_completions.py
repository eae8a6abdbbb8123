# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.chat_completions import ChatBody, ChatFormatter
from megatron.inference.server.serving import Route, Server, answer_request
from megatron.inference.server.streaming import respond


async def chat(server: Server, request: Request) -> Response:
    """Answer `POST /v1/chat/completions`."""
    body = await server.read(request, ChatBody)
    server.check_model(body.model)
    body.check_stream()
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    beam_search = body.beam_search_params()
    generation_request, parsers = await answer_request(
        server,
        body.conversation(),
        body,
        max_new_tokens=body.token_limit,
        logprobs=body.top_logprobs,
        names={
            "prompt": "messages",
            "max_new_tokens": "max_completion_tokens" if body.max_tokens is None else "max_tokens",
        },
    )
    generation = server.begin(generation_request, beam_search, parsers=parsers)
    formatter = ChatFormatter(
        body,
        generation.usage,
        model=server.card.name,
        tokenizer=server.tokenizer,
        prompt=generation.request.requests[0].prompt,
        request_id=request.state.request_id,
    )
    return await respond(request, generation, formatter, server.limits, stream=bool(body.stream))


ROUTES: Sequence[Route] = (("POST", "/v1/chat/completions", chat, ChatBody),)
