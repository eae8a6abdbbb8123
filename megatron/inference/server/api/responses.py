# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/responses`.

The server stores nothing: every request holds the whole conversation. A response can be cancelled
while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.responses import ResponseBody, ResponseFormatter
from megatron.inference.server.serving import Route, Server, begin_answer
from megatron.inference.server.streaming import respond


async def create_response(server: Server, request: Request) -> Response:
    """Answer `POST /v1/responses`."""
    body = await server.read(request, ResponseBody)
    server.check_model(body.model)
    if body.store:
        raise ApiError(400, "store: this server stores nothing: set it to false", param="store")
    if body.previous_response_id is not None:
        raise ApiError(
            400,
            "previous_response_id: this server stores nothing: send the whole conversation "
            "as input",
            param="previous_response_id",
        )
    generation = await begin_answer(
        server,
        body.conversation(),
        body.generation(),
        max_new_tokens=body.max_output_tokens,
        names={
            "prompt": "input",
            "max_new_tokens": "max_output_tokens",
            "response_format": "text",
        },
    )
    formatter = ResponseFormatter(server.card.name, generation, body.request_fields())

    def cancel() -> dict[str, Any]:
        generation.cancel()
        return formatter.response("cancelled")

    if body.stream:  # without a stream the client does not know the id in time
        server.running[formatter.id] = cancel
    return await respond(
        request,
        generation,
        formatter,
        server.limits,
        stream=bool(body.stream),
        ended=lambda: server.running.pop(formatter.id),
    )


async def cancel_response(server: Server, request: Request) -> Response:
    """Answer `POST /v1/responses/{response_id}/cancel`: end a response and its stream."""
    response_id = request.path_params["response_id"]
    cancel = server.running.get(response_id)
    if cancel is None:
        raise ApiError(404, "there is no running response with this id")
    return JSONResponse(cancel())


ROUTES: Sequence[Route] = (
    ("POST", "/v1/responses", create_response, ResponseBody),
    ("POST", "/v1/responses/{response_id}/cancel", cancel_response, None),
)
