# SPDX-License-Identifier: Apache-2.0
"""The APIs `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.chat_template import Conversation
from megatron.inference.server.middleware.api_error import ApiError
from megatron.inference.server.protocol.body import Body, Text, Token
from megatron.inference.server.protocol.chat_completions import Messages
from megatron.inference.server.serving import Route, Server


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a conversation that the chat template renders."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Token]


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


ROUTES: Sequence[Route] = (
    ("POST", "/tokenize", tokenize, TokenizeBody),
    ("POST", "/detokenize", detokenize, DetokenizeBody),
)
