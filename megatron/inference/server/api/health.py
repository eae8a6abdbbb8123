# SPDX-License-Identifier: Apache-2.0
"""Health and metrics of the server."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.serving import Route, Server

#: An engine without a message for this long is unhealthy; heartbeats come twice a second.
SILENT_SECONDS = 60.0


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


ROUTES: Sequence[Route] = (
    ("GET", "/health", health, None),
    ("GET", "/metrics", metrics, None),
)
