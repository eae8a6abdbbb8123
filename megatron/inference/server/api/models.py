# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.output_processor import ModelCard
from megatron.inference.server.serving import Route, Server


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


ROUTES: Sequence[Route] = (
    ("GET", "/v1/models", models, None),
    ("GET", "/v1/models/{model:path}", model, None),
)
