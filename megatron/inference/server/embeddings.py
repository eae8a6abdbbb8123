# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/embeddings`."""

from __future__ import annotations

import array
import base64
import sys
from collections.abc import Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.engine_client import EngineLost, Outputs
from megatron.inference.server.fields import Body, Prompts
from megatron.inference.server.guard import ApiError
from megatron.inference.server.request_handling import Server, admission, engine_lost, text_tokens


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None


async def embeddings(server: Server, request: Request) -> Response:
    """Answer `POST /v1/embeddings`."""
    body = await server.read(request, EmbeddingBody)
    server.check_model(body.model)
    if server.no_embeddings is not None:
        raise ApiError(400, f"this model embeds no texts: {server.no_embeddings}")
    server.check_awake()
    texts = await text_tokens(server, body.input)
    for tokens in texts:
        _check(server, tokens)
    with admission():
        asks = [{"prompt": tokens, "max_new_tokens": 1, "embed": True} for tokens in texts]
        ids, outputs = server.client.ask(asks)
    count = sum(map(len, texts))
    server.metrics.note_prompts(count)
    found = await server.waited(request, _collected(outputs))
    if found is None:
        return Response(status_code=499)  # nobody reads it
    data = [
        {
            "object": "embedding",
            "index": place,
            "embedding": _encoded(found[number], body.encoding_format),
        }
        for place, number in enumerate(ids)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": server.card.name, "usage": usage})


def _check(server: Server, tokens: Sequence[int]) -> None:
    """Raise ApiError for a text that the model does not take."""
    longest, size = server.card.max_length, server.card.vocab_size
    wrong = [token for token in tokens if token >= size]
    if not tokens:
        raise ApiError(400, "input: a text without tokens", param="input")
    if wrong:
        raise ApiError(
            400, f"token id {wrong[0]} is outside the vocabulary of {size}", param="input"
        )
    if longest is not None and len(tokens) > longest:
        raise ApiError(
            400,
            f"a text of {len(tokens)} tokens: the model takes {longest}",
            param="input",
            code="context_length_exceeded",
        )


async def _collected(outputs: Outputs) -> dict[int, Sequence[float]]:
    """Return vectors by the ids of what was asked. Raises ApiError if there are none."""
    found: dict[int, Sequence[float]] = {}
    try:
        async for news in outputs.news():
            if news.refused:
                raise ApiError(400, news.refused, param="input")
            found[news.id] = news.embedding
    except EngineLost:
        raise engine_lost() from None
    finally:
        outputs.close()
    return found


def _encoded(vector: Sequence[float], form: str | None) -> Any:
    """Return a vector as it is sent; base64 is of little-endian fp32."""
    if form != "base64":
        return list(vector)
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
