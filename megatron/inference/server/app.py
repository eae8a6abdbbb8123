# SPDX-License-Identifier: Apache-2.0
"""The application: the routes, their OpenAPI document, and the answer to an exception."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from megatron.inference.server.api import (
    chat_completions,
    completions,
    embeddings,
    messages,
    operations,
    responses,
    scores,
)
from megatron.inference.server.middleware import LOG, RequestGuard
from megatron.inference.server.protocol.api_error import ApiError, internal_error
from megatron.inference.server.protocol.body import Body, parse_body
from megatron.inference.server.serving import Handler, Route, Server

#: Template of schema references in the OpenAPI document.
SCHEMA_REFERENCE = "#/components/schemas/{model}"


async def invocations(server: Server, request: Request) -> Response:
    """Answer `POST /invocations`: the route whose main field the body has."""
    handlers = {
        "messages": chat_completions.chat,
        "prompt": completions.completions,
        "input": embeddings.embeddings if server.classifier is None else scores.classify,
        "text_1": scores.score,
        "queries": scores.score,
        "query": scores.rerank,
    }
    try:
        fields = await request.json()
    except (ValueError, RecursionError):
        parse_body(Body, await request.body())
        raise
    for name, handler in handlers.items():
        if isinstance(fields, dict) and fields.get(name) is not None:
            return await handler(server, request)
    raise ApiError(400, f"give one of {', '.join(handlers)}", param="messages")


API_ROUTES: Sequence[Route] = (
    ("POST", "/invocations", invocations, None),
    *completions.ROUTES,
    *operations.ROUTES,
    *chat_completions.ROUTES,
    *embeddings.ROUTES,
    *scores.ROUTES,
    *responses.ROUTES,
    *messages.ROUTES,
)
#: Routes of the administration, on a separate address with a separate key.
ADMIN_ROUTES = operations.ADMIN_ROUTES


def create_app(server: Server, key: str | None, *, routes: Sequence[Route]) -> ASGIApp:
    """Return the application.

    Args:
        server: state of the server.
        key: API key; None without authentication.
        routes: routes of the application.
    """
    # No documentation pages: FastAPI's load scripts from other hosts.
    app = FastAPI(title="megatron.inference", docs_url=None, redoc_url=None)
    bodies: list[tuple[type[Body], JsonSchemaMode]]
    bodies = [(body, "validation") for *_, body in routes if body is not None]
    schemas, definitions = models_json_schema(bodies, ref_template=SCHEMA_REFERENCE)

    def add(method: str, path: str, handler: Handler, body: type[Body] | None) -> None:
        async def endpoint(request: Request) -> Response:
            request_id = request.state.request_id
            try:
                return await handler(server, request)
            except ApiError as error:
                return error.response(request_id, path)
            except ClientDisconnect:
                return Response(status_code=499)  # the client has disconnected within its body
            except Exception:
                LOG.exception("request %s failed", request_id)
                return internal_error().response(request_id, path)

        schema: dict[str, Any] = {}
        if names := re.findall(r"{(\w+)", path):
            parameter = {"in": "path", "required": True, "schema": {"type": "string"}}
            schema["parameters"] = [{"name": name, **parameter} for name in names]
        if body is not None:
            content = {"application/json": {"schema": schemas[body, "validation"]}}
            schema["requestBody"] = {"required": True, "content": content}
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=handler.__name__,
            description=handler.__doc__,
            openapi_extra=schema,
            response_model=None,
        )

    for route in routes:
        add(*route)
    # FastAPI caches the document, so this change is permanent.
    app.openapi()["components"] = {"schemas": definitions.get("$defs", {})}

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: "there is no such route", 405: ("this route does not support the method")}
        api_error = ApiError(
            error.status_code, messages.get(error.status_code, "the request is not valid")
        )
        return api_error.response(request.state.request_id, request.url.path)

    app.add_exception_handler(HTTPException, no_route)
    guarded = RequestGuard(app, server.limits, key, server.metrics.note_answer)
    return with_origins(guarded, server.allowed_origins) if server.allowed_origins else guarded


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return an application with CORS headers for web pages of some origins."""
    # Outermost: the browser's preflight requests have no key.
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-ignored-fields"],
    )
