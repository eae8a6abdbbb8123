# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/embeddings`."""

from __future__ import annotations

import array
import asyncio
import base64
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.engine.client import EngineLost, Refused
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.body import Body, NoEffect, Prompts, ServedValues
from megatron.inference.server.serving import Route, Server, admission, engine_lost, text_tokens
from megatron.inference.server.streaming import run_until_disconnect


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Any, ServedValues(fix="cut the vectors")] = None
    user: NoEffect = None


async def embeddings(server: Server, request: Request) -> Response:
    """Answer `POST /v1/embeddings`."""
    body = await server.read(request, EmbeddingBody)
    server.check_model(body.model)
    if server.no_embeddings is not None:
        raise ApiError(400, f"this model does not compute embeddings: {server.no_embeddings}")
    server.check_awake()
    texts = await text_tokens(server, body.input)
    for tokens in texts:
        _check(server, tokens)
    with admission():
        embeddings = server.client.embed(texts)
    num_tokens = sum(map(len, texts))
    server.metrics.note_prompts(num_tokens)
    vectors = await run_until_disconnect(request, _collected(embeddings), server.limits)
    if vectors is None:
        return Response(status_code=499)  # the client has disconnected
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encoded(vector, body.encoding_format),
        }
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JSONResponse({"object": "list", "data": data, "model": server.card.name, "usage": usage})


def _check(server: Server, tokens: Sequence[int]) -> None:
    """Raise ApiError for a text that is invalid for the model."""
    max_length, size = server.card.max_length, server.card.vocab_size
    invalid = [token for token in tokens if token >= size]
    if not tokens:
        raise ApiError(400, "input: a text has no tokens", param="input")
    if invalid:
        raise ApiError(
            400, f"token id {invalid[0]} is outside the vocabulary of {size}", param="input"
        )
    if max_length is not None and len(tokens) > max_length:
        raise ApiError(
            400,
            f"a text has {len(tokens)} tokens, but the model takes at most {max_length}",
            param="input",
            code="context_length_exceeded",
        )


async def _collected(embeddings: Sequence[asyncio.Future[list[float]]]) -> list[list[float]]:
    """Return the vectors of all texts. Raises ApiError if the engine rejects a text."""
    try:
        return await asyncio.gather(*embeddings)
    except Refused as error:
        raise ApiError(400, str(error), param="input") from None
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
