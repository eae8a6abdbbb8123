# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/responses`: create, cancel, and the routes of stored responses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.middleware import LOG
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.responses import ResponseBody, ResponseFormatter
from megatron.inference.server.protocol.validation_error import printable
from megatron.inference.server.response_store import StoredResponse
from megatron.inference.server.serving import Route, Server, begin_answer
from megatron.inference.server.streaming import respond

#: Default and largest `limit` of a list of items, as in OpenAI's route.
LISTED_ITEMS, MAX_LISTED_ITEMS = 20, 100


async def create_response(server: Server, request: Request) -> Response:
    """Answer `POST /v1/responses`."""
    body = await server.read(request, ResponseBody)
    server.check_model(body.model)
    stores = _stores(server, body)
    items: list[dict[str, Any]] = []
    if stores or body.previous_response_id is not None:
        items = body.input_items()
    if body.previous_response_id is not None:
        previous = _stored(server, body.previous_response_id, param="previous_response_id")
        items = [*server.responses.context(previous), *items]
        body = body.with_items(items)
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

    def save(response: dict[str, Any]) -> bool:
        is_stored = server.responses.add(response, items)
        if not is_stored:
            LOG.warning("%s is larger than --response-store-mb: not stored", response["id"])
        return is_stored

    formatter = ResponseFormatter(
        server.card.name,
        generation,
        body.request_fields(stored=stores),
        save=save if stores else None,
    )

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


def _stores(server: Server, body: ResponseBody) -> bool:
    """Return whether a response will be stored. Raises ApiError if the server has no store."""
    if server.responses.max_bytes:
        return body.store is not False
    if body.store:
        raise ApiError(400, "store: this server stores nothing: set it to false", param="store")
    if body.previous_response_id is not None:
        raise ApiError(
            400,
            "previous_response_id: this server stores nothing: send the whole conversation "
            "as input",
            param="previous_response_id",
        )
    return False


def _stored(server: Server, response_id: str, *, param: str = "response_id") -> StoredResponse:
    """Return a stored response. Raises ApiError for an unknown or evicted id."""
    entry = server.responses.get(response_id)
    if entry is None:
        raise ApiError(
            404,
            f"there is no stored response {printable(response_id)}: it was deleted or evicted, "
            "or never stored",
            param=param,
            code="response_not_found",
        )
    return entry


async def get_response(server: Server, request: Request) -> Response:
    """Answer `GET /v1/responses/{response_id}`."""
    if request.query_params.get("stream") == "true":
        raise ApiError(
            400, "stream: a stored response is not streamed: leave it out", param="stream"
        )
    entry = _stored(server, request.path_params["response_id"])
    return Response(entry.response, media_type="application/json")


async def delete_response(server: Server, request: Request) -> Response:
    """Answer `DELETE /v1/responses/{response_id}`."""
    response_id = request.path_params["response_id"]
    _stored(server, response_id)
    server.responses.delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(server: Server, request: Request) -> Response:
    """Answer `GET /v1/responses/{response_id}/input_items`: a page of the items."""
    query = request.query_params
    stored = _stored(server, request.path_params["response_id"])
    limit, order = query.get("limit", str(LISTED_ITEMS)), query.get("order", "desc")
    if not (re.fullmatch(r"[0-9]{1,3}", limit) and 1 <= int(limit) <= MAX_LISTED_ITEMS):
        raise ApiError(
            400,
            f"limit is {printable(limit)}: use 1 to {MAX_LISTED_ITEMS}",
            param="limit",
        )
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {printable(order)}: use asc or desc", param="order")
    items = json.loads(stored.input_items)
    if order == "desc":
        items.reverse()
    ids = [entry["id"] for entry in items]
    after, start = query.get("after"), 0
    if after is not None:
        if after not in ids:
            raise ApiError(400, f"after is {printable(after)}: no item has this id", param="after")
        start = ids.index(after) + 1
    page = items[start : start + int(limit)]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + len(page) < len(items),
        }
    )


async def cancel_response(server: Server, request: Request) -> Response:
    """Answer `POST /v1/responses/{response_id}/cancel`: end a response and its stream."""
    response_id = request.path_params["response_id"]
    cancel = server.running.get(response_id)
    if cancel is None:
        raise ApiError(
            404,
            f"there is no running response {printable(response_id)}: it has ended or never began",
            param="response_id",
        )
    return JSONResponse(cancel())


ROUTES: Sequence[Route] = (
    ("POST", "/v1/responses", create_response, ResponseBody),
    ("GET", "/v1/responses/{response_id}", get_response, None),
    ("DELETE", "/v1/responses/{response_id}", delete_response, None),
    ("GET", "/v1/responses/{response_id}/input_items", list_input_items, None),
    ("POST", "/v1/responses/{response_id}/cancel", cancel_response, None),
)
