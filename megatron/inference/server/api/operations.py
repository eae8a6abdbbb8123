# SPDX-License-Identifier: Apache-2.0
"""Routes for operators and tools: models, tokens, chat page, health, metrics, administration."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import importlib.metadata
import pkgutil
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from megatron.inference.server.chat_template import Conversation
from megatron.inference.server.engine.client import EngineLost, Refused
from megatron.inference.server.output_processor import ModelCard
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.body import Body, Text, Token
from megatron.inference.server.protocol.chat_completions import Messages
from megatron.inference.server.protocol.validation_error import short_json
from megatron.inference.server.serving import Route, Server, engine_lost

#: An engine without a message for this long is unhealthy; heartbeats come twice a second.
SILENT_SECONDS = 60.0
MAX_PROFILE_STEPS = 1000
MAX_PATH = 4096
MAX_SENDERS = 1 << 16


async def models(server: Server, request: Request) -> Response:
    """Answer `GET /v1/models`."""
    names = (server.card.name, *server.card.aliases)
    models = [_model_object(server.card, name) for name in names]
    return JSONResponse({"object": "list", "data": models})


async def model(server: Server, request: Request) -> Response:
    """Answer `GET /v1/models/{model}`."""
    name = request.path_params["model"]
    server.check_model(name)
    return JSONResponse(_model_object(server.card, name))


def _model_object(card: ModelCard, name: str) -> dict[str, Any]:
    """Return OpenAI's description of a model under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "megatron",
        "max_model_len": card.max_length,
    }


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a conversation that the chat template renders."""

    model: str | None = None
    """A served model name; another name is answered with 404."""
    prompt: Text | None = None
    """A text."""
    messages: Messages | None = None
    """A conversation, which the chat template renders, in place of `prompt`."""
    add_special_tokens: bool = True
    """false: the tokenizer adds no special tokens to a text."""


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    """A served model name; another name is answered with 404."""
    tokens: list[Token]
    """Token ids."""


async def tokenize(server: Server, request: Request) -> Response:
    """Answer `POST /tokenize`."""
    body = await server.read(request, TokenizeBody)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages", param="prompt")
    if body.prompt is not None:
        tokens = await asyncio.to_thread(
            server.tokenizer.tokenize, body.prompt, add_special_tokens=body.add_special_tokens
        )
    else:
        assert body.messages is not None
        turns = [message.turn() for message in body.messages]
        tokens = (await server.conversations.prompt(Conversation(turns=turns))).tokens
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


# --- chat page -----------------------------------------------------------------------------------


def content_policy(page: str) -> str:
    """Return the content security policy of a page: its own style and script, by digest, and
    requests to its own server."""

    def digests(tag: str) -> str:
        contents = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(p.encode()).digest()).decode() for p in contents]
        return " ".join(f"'sha256-{digest}'" for digest in hashes)

    rules = {
        "default-src": "'none'",
        "script-src": digests("script"),
        "style-src": digests("style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@functools.cache
def _page() -> tuple[str, str]:
    """Return the page and its policy."""
    data = pkgutil.get_data("megatron.inference.server.api", "chat_page.html")
    assert data is not None
    text = data.decode()
    return text, content_policy(text)


async def chat_page(server: object, request: Request) -> Response:
    """Answer `GET /`."""
    text, policy = _page()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(text, headers=headers)


# --- health --------------------------------------------------------------------------------------


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


async def ping(server: Server, request: Request) -> Response:
    """Answer `GET /ping` and `POST /ping`: the status of `/health` without a body."""
    return Response(status_code=(await health(server, request)).status_code)


async def version(server: Server, request: Request) -> Response:
    """Answer `GET /version`."""
    return JSONResponse({"version": importlib.metadata.version("megatron-lm")})


async def load(server: Server, request: Request) -> Response:
    """Answer `GET /load`: the number of unfinished outputs."""
    return JSONResponse({"server_load": server.client.active})


async def metrics(server: Server, request: Request) -> Response:
    """Answer `GET /metrics`."""
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")


# --- administration ------------------------------------------------------------------------------


class AdminBody(Body):
    """A body of the administration, which has no field without an effect."""

    ignores_unknown_fields = False


class PauseBody(AdminBody):
    """How running outputs are handled: they continue from their cache, are recomputed from their
    tokens, or end with `finish_reason` "abort"."""

    mode: Literal["keep", "recompute", "abort"] = "keep"
    """What becomes of running outputs: they continue from their cache, are recomputed from their
    tokens, or end with `finish_reason` `abort`."""


class NothingBody(AdminBody):
    """No field."""


class SleepBody(AdminBody):
    """Which device memory is released: 1 the cache, 2 also the weights, which move to the host."""

    level: Literal[1, 2] = 1
    """Device memory that is released: 1 the cache, 2 also the weights, which move to the host."""


def _without_null(text: str) -> str:
    """Check a path or an address: the operating system takes no null character."""
    if "\0" in text:
        raise PydanticCustomError(
            "null_character",
            "{value} has a null character: leave it out",
            {"value": short_json(text)},
        )
    return text


_Location = Annotated[str, Field(min_length=1, max_length=MAX_PATH), AfterValidator(_without_null)]


class WeightsBody(AdminBody):
    """Source of new weights of the same model: a path as for `--load`, or the address at which the
    ranks of a training run send them."""

    load: _Location | None = None
    """Path of weights of the same model, as for --load."""
    address: _Location | None = None
    """Address at which the ranks of a training run send the weights."""
    senders: Annotated[int, Field(ge=1, le=MAX_SENDERS)] = 1
    """Number of ranks that send."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """How long to wait for the ranks."""


class ProfileBody(AdminBody):
    """Steps to measure."""

    steps: Annotated[int, Field(ge=1, le=MAX_PROFILE_STEPS)] = 10
    """Number of steps to measure."""


async def _order(server: Server, request: Request, action: str, body: type[Body]) -> Response:
    """Execute an administration command; answer with the new state of the engine."""
    options = await server.read(request, body) if await request.body() else body()
    if isinstance(options, WeightsBody) and (options.load is None) == (options.address is None):
        raise ApiError(400, "give exactly one of load and address", param="load")
    try:
        return JSONResponse(await server.client.control(action, **vars(options)))
    except Refused as error:
        raise ApiError(409, str(error)) from None
    except EngineLost:
        raise engine_lost() from None


async def pause(server: Server, request: Request) -> Response:
    """Answer `POST /pause`: run no steps until `/resume`; requests wait in the queue."""
    return await _order(server, request, "pause", PauseBody)


async def resume(server: Server, request: Request) -> Response:
    """Answer `POST /resume`."""
    return await _order(server, request, "resume", NothingBody)


async def sleep(server: Server, request: Request) -> Response:
    """Answer `POST /sleep`: release device memory until `/wake`; new requests are refused."""
    return await _order(server, request, "sleep", SleepBody)


async def wake(server: Server, request: Request) -> Response:
    """Answer `POST /wake`."""
    return await _order(server, request, "wake", NothingBody)


async def weights(server: Server, request: Request) -> Response:
    """Answer `POST /weights`: replace the weights between steps; an error keeps the old ones."""
    return await _order(server, request, "weights", WeightsBody)


async def profile(server: Server, request: Request) -> Response:
    """Answer `POST /profile`: profile the operations of the next steps."""
    return await _order(server, request, "profile", ProfileBody)


ROUTES: Sequence[Route] = (
    ("GET", "/v1/models", models, None),
    ("GET", "/v1/models/{model:path}", model, None),
    ("POST", "/tokenize", tokenize, TokenizeBody),
    ("POST", "/detokenize", detokenize, DetokenizeBody),
    ("GET", "/", chat_page, None),
    ("GET", "/health", health, None),
    ("GET", "/ping", ping, None),
    ("POST", "/ping", ping, None),
    ("GET", "/version", version, None),
    ("GET", "/load", load, None),
    ("GET", "/metrics", metrics, None),
)
#: On a separate address, with a separate key.
ADMIN_ROUTES: Sequence[Route] = (
    ("POST", "/pause", pause, PauseBody),
    ("POST", "/resume", resume, NothingBody),
    ("POST", "/sleep", sleep, SleepBody),
    ("POST", "/wake", wake, NothingBody),
    ("POST", "/weights", weights, WeightsBody),
    ("POST", "/profile", profile, ProfileBody),
)
