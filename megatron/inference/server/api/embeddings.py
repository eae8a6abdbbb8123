# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/embeddings`."""

from __future__ import annotations

import array
import asyncio
import base64
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.engine.client import EngineLost, Refused
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.body import Body, NoEffect, Prompts, ServedValues
from megatron.inference.server.serving import Route, Server, admission, engine_lost, text_tokens
from megatron.inference.server.streaming import run_until_disconnect


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: str | None = None
    """A served model name; another name is answered with 404."""
    input: Prompts
    """One text or several, or token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """JSON numbers, or base64 of little-endian fp32."""
    dimensions: Annotated[Any, ServedValues(fix="cut the vectors")] = None
    user: NoEffect = None


async def embeddings(server: Server, request: Request) -> Response:
    """Answer `POST /v1/embeddings`."""
    body = await server.read(request, EmbeddingBody)
    server.check_model(body.model)
    if server.no_embeddings is not None:
        raise ApiError(400, f"this model does not compute embeddings: {server.no_embeddings}")
    texts = await text_tokens(server, body.input)
    names = text_names("input", body.input, len(texts))
    vectors = await pooled_vectors(server, request, texts, names=names, param="input")
    num_tokens = sum(map(len, texts))
    entries = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encoded(vector, body.encoding_format),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JSONResponse(
        {"object": "list", "data": entries, "model": server.card.name, "usage": usage}
    )


#: Most texts of a request that the engine has at a time; one request must not fill the queue.
MAX_TEXTS_IN_FLIGHT = 32


def text_names(field: str, value: Any, count: int) -> list[str]:
    """Return the paths of the `count` texts of a field, which has one text or a list of texts."""
    has_items = isinstance(value, list) and not isinstance(value[0], int)
    return [f"{field}.{index}" for index in range(count)] if has_items else [field]


async def pooled_vectors(
    server: Server,
    request: Request,
    texts: Sequence[Sequence[int]],
    *,
    names: Sequence[str],
    param: str,
    can_truncate: bool = False,
) -> list[list[float]]:
    """Return the vectors of texts: embeddings, or outputs of the classification head.

    Args:
        server: the server.
        request: the HTTP request.
        texts: token ids of each text.
        names: path of each text in the request, for errors.
        param: field that errors name.
        can_truncate: whether the route has the field `truncate_prompt_tokens`.

    Raises:
        ApiError: a text is invalid for the model, or the engine does not admit it.
        ClientDisconnect: the client has disconnected.
    """
    server.check_awake()
    for name, tokens in zip(names, texts, strict=True):
        _check(server, tokens, name=name, param=param, can_truncate=can_truncate)

    async def in_batches() -> list[list[float]]:
        size = min(MAX_TEXTS_IN_FLIGHT, server.client.max_outputs)
        vectors: list[list[float]] = []
        for start in range(0, len(texts), size):
            batch = texts[start : start + size]
            with admission():
                embeddings = server.client.embed(batch)
            server.metrics.note_prompts(sum(map(len, batch)))
            vectors += await _collected(embeddings, names[start : start + size], param)
        return vectors

    vectors = await run_until_disconnect(request, in_batches(), server.limits)
    if vectors is None:
        raise ClientDisconnect
    return vectors


def _check(
    server: Server, tokens: Sequence[int], *, name: str, param: str, can_truncate: bool
) -> None:
    """Raise ApiError for a text that is invalid for the model; see `pooled_vectors`."""
    max_length, size = server.card.max_length, server.card.vocab_size
    invalid = [token for token in tokens if token >= size]
    if not tokens:
        raise ApiError(400, f"{name} has no tokens: give some text", param=param)
    if invalid:
        raise ApiError(
            400,
            f"{name} has token id {invalid[0]}, outside the vocabulary of {size}: use ids of the "
            "model's own tokenizer",
            param=param,
        )
    if max_length is not None and len(tokens) > max_length:
        fix = "shorten it, or set truncate_prompt_tokens to -1" if can_truncate else "shorten it"
        raise ApiError(
            400,
            f"{name} has {len(tokens)} tokens, but the model takes at most {max_length}: {fix}",
            param=param,
            code="context_length_exceeded",
        )


async def _collected(
    embeddings: Sequence[asyncio.Future[list[float]]], names: Sequence[str], param: str
) -> list[list[float]]:
    """Return the vectors of all texts. Raises ApiError if the engine rejects a text."""
    try:
        return await asyncio.gather(*embeddings)
    except Refused as error:
        pairs = zip(names, embeddings, strict=True)
        name = next(name for name, e in pairs if e.done() and e.exception() is error)
        raise ApiError(400, f"{name}: {error}", param=param) from None
    except EngineLost:
        raise engine_lost() from None
    finally:
        for embedding in embeddings:
            embedding.cancel()


def _encoded(vector: Sequence[float], encoding_format: str | None) -> Any:
    """Return a vector as JSON numbers, or as base64 of little-endian fp32."""
    if encoding_format != "base64":
        return list(vector)
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


ROUTES: Sequence[Route] = (("POST", "/v1/embeddings", embeddings, EmbeddingBody),)
