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
    vectors = await pooled_vectors(server, request, texts, param="input")
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


async def pooled_vectors(
    server: Server, request: Request, texts: Sequence[Sequence[int]], *, param: str
) -> list[list[float]]:
    """Return the vectors of texts: embeddings, or outputs of the classification head.

    Args:
        server: the server.
        request: the HTTP request.
        texts: token ids of each text.
        param: field that errors name.

    Raises:
        ApiError: a text is invalid for the model, or the engine does not admit it.
        ClientDisconnect: the client has disconnected.
    """
    server.check_awake()
    for tokens in texts:
        _check(server, tokens, param)

    async def in_batches() -> list[list[float]]:
        size = min(MAX_TEXTS_IN_FLIGHT, server.client.max_outputs)
        vectors: list[list[float]] = []
        for start in range(0, len(texts), size):
            batch = texts[start : start + size]
            with admission():
                embeddings = server.client.embed(batch)
            server.metrics.note_prompts(sum(map(len, batch)))
            vectors += await _collected(embeddings, param)
        return vectors

    vectors = await run_until_disconnect(request, in_batches(), server.limits)
    if vectors is None:
        raise ClientDisconnect
    return vectors


def _check(server: Server, tokens: Sequence[int], param: str) -> None:
    """Raise ApiError for a text that is invalid for the model."""
    max_length, size = server.card.max_length, server.card.vocab_size
    invalid = [token for token in tokens if token >= size]
    if not tokens:
        raise ApiError(400, f"{param}: a text has no tokens", param=param)
    if invalid:
        raise ApiError(
            400, f"token id {invalid[0]} is outside the vocabulary of {size}", param=param
        )
    if max_length is not None and len(tokens) > max_length:
        raise ApiError(
            400,
            f"a text has {len(tokens)} tokens, but the model takes at most {max_length}",
            param=param,
            code="context_length_exceeded",
        )


async def _collected(
    embeddings: Sequence[asyncio.Future[list[float]]], param: str
) -> list[list[float]]:
    """Return the vectors of all texts. Raises ApiError if the engine rejects a text."""
    try:
        return await asyncio.gather(*embeddings)
    except Refused as error:
        raise ApiError(400, str(error), param=param) from None
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
