# SPDX-License-Identifier: Apache-2.0
"""Routes of completions, models, tokens and operations, and the application with all routes."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import (
    Awaitable,
    Callable,
    Sequence,
)
from typing import Any

from fastapi import FastAPI, Request
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from megatron.inference.server.api.chat_page import chat_page
from megatron.inference.server.chat_template import Conversation
from megatron.inference.server.middleware.request_guard import (
    ApiError,
    RequestGuard,
    internal_error,
)
from megatron.inference.server.middleware.request_log import LOG
from megatron.inference.server.output_processor import (
    ModelCard,
)
from megatron.inference.server.protocol.completions import CompletionView
from megatron.inference.server.protocol.generation import (
    Body,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from megatron.inference.server.serving import (
    Server,
    check_stream_options,
    respond,
    text_tokens,
)

#: An engine without a message for this long is unhealthy; heartbeats come twice a second.
SILENT_SECONDS = 60.0
#: Default `max_tokens` of a completion, as in OpenAI's route.
COMPLETION_TOKENS = 16

#: Template of schema references in the OpenAPI document.
SCHEMA_REFERENCE = "#/components/schemas/{model}"


async def completions(server: Server, request: Request) -> Response:
    """Answer `POST /v1/completions`."""
    body = await server.read(request, CompletionBody)
    server.check_model(body.model)
    check_stream_options(body)
    eod = server.tokenizer.eod
    # An empty text becomes the end-of-document token, as in training.
    empty_prompt = [] if eod is None else [eod]
    prompts = [tokens or empty_prompt for tokens in await text_tokens(server, body.prompt)]
    echo = bool(body.echo)
    generation_request = body.generation_request(
        prompts,
        default_stop_tokens=server.card.stop_tokens,
        max_new_tokens=body.max_tokens or COMPLETION_TOKENS,
        sampling=body.sampling(seed=secrets.randbits(63), logprobs=body.logprobs),
        names={"max_new_tokens": "max_tokens"},
        prompt_logprobs=echo and body.logprobs is not None,
        grammar=await server.grammar(body),
    )
    view = CompletionView(
        server.card.name,
        server.tokenizer,
        prompts=prompts,
        n=generation_request.n,
        logprobs=body.logprobs is not None,
        echo=echo,
    )
    generation = server.generate(generation_request)
    return await respond(server, request, body, generation, view)


async def tokenize(server: Server, request: Request) -> Response:
    """Answer `POST /tokenize`."""
    body = await server.read(request, TokenizeBody)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages", param="prompt")
    if body.messages is not None:
        turns = [message.turn() for message in body.messages]
        tokens = (await server.conversations.prompt(Conversation(turns=turns))).tokens
    else:
        tokens = await asyncio.to_thread(
            server.tokenizer.tokenize, body.prompt, add_special_tokens=body.add_special_tokens
        )
    return JSONResponse(
        {"tokens": list(tokens), "count": len(tokens), "max_model_len": server.card.max_length}
    )


async def detokenize(server: Server, request: Request) -> Response:
    """Answer `POST /detokenize`."""
    body = await server.read(request, DetokenizeBody)
    server.check_model(body.model)
    invalid = [token for token in body.tokens if token >= server.card.vocab_size]
    if invalid:
        raise ApiError(
            400,
            f"token id {invalid[0]} is outside the vocabulary of {server.card.vocab_size}",
            param="tokens",
        )
    text = await asyncio.to_thread(server.tokenizer.detokenize, body.tokens)
    return JSONResponse({"prompt": text})


async def models(server: Server, request: Request) -> Response:
    """Answer `GET /v1/models`."""
    return JSONResponse({"object": "list", "data": [_model_object(server.card)]})


async def model(server: Server, request: Request) -> Response:
    """Answer `GET /v1/models/{model}`."""
    server.check_model(request.path_params["model"])
    return JSONResponse(_model_object(server.card))


def _model_object(card: ModelCard) -> dict[str, Any]:
    """Return OpenAI's description of a model."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "megatron",
        "max_model_len": card.max_length,
    }


async def health(server: Server, request: Request) -> Response:
    """Answer `GET /health`: 200 while requests are admitted, else 503; `engine` explains it."""
    client = server.client
    live = not client.lost.is_set() and client.silent_seconds < SILENT_SECONDS
    asleep = bool(client.stats.get("asleep"))
    ready = live and bool(client.facts) and not asleep and not client.draining.is_set()
    status = {
        "live": live,
        "ready": ready,
        "heartbeat_seconds": round(client.silent_seconds, 3),
        "active": client.active,
        "paused": bool(client.stats.get("paused")),
        "asleep": asleep,
        "weight_epoch": client.stats.get("epoch", 0),
        "engine": client.facts,
    }
    return JSONResponse(status, 200 if ready else 503)


async def metrics(server: Server, request: Request) -> Response:
    """Answer `GET /metrics`."""
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")


Handler = Callable[[Server, Request], Awaitable[Response]]

#: Method, path, handler, and body class.
Route = tuple[str, str, Handler, type[Body] | None]
ROUTES: Sequence[Route] = (
    ("POST", "/v1/completions", completions, CompletionBody),
    ("GET", "/v1/models", models, None),
    ("GET", "/v1/models/{model:path}", model, None),
    ("POST", "/tokenize", tokenize, TokenizeBody),
    ("POST", "/detokenize", detokenize, DetokenizeBody),
    ("GET", "/", chat_page, None),
    ("GET", "/health", health, None),
    ("GET", "/metrics", metrics, None),
)


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
    return RequestGuard(app, server.limits, key, server.metrics.note_answer)
