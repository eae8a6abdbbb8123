# SPDX-License-Identifier: Apache-2.0
"""Administration routes, on a separate address with a separate key: pause, sleep, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.engine.client import EngineLost, Refused
from megatron.inference.server.middleware.api_error import ApiError
from megatron.inference.server.protocol.body import Body
from megatron.inference.server.serving import Route, Server, engine_lost

MAX_PROFILE_STEPS = 1000
MAX_PATH = 4096
MAX_SENDERS = 1 << 16


class PauseBody(Body):
    """How running outputs are handled: they continue from their cache, are recomputed from their
    tokens, or end with `finish_reason` "abort"."""

    mode: Literal["keep", "recompute", "abort"] = "keep"


class NothingBody(Body):
    """No field."""


class SleepBody(Body):
    """Which device memory is released: 1 the cache, 2 also the weights, which move to the host."""

    level: Literal[1, 2] = 1


class WeightsBody(Body):
    """Source of new weights of the same model: a path as for `--load`, or the address at which the
    ranks of a training run send them."""

    load: Annotated[str, Field(min_length=1, max_length=MAX_PATH)] | None = None
    address: Annotated[str, Field(min_length=1, max_length=MAX_PATH)] | None = None
    senders: Annotated[int, Field(ge=1, le=MAX_SENDERS)] = 1
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0


class ProfileBody(Body):
    """Steps to measure."""

    steps: Annotated[int, Field(ge=1, le=MAX_PROFILE_STEPS)] = 10


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
    ("POST", "/pause", pause, PauseBody),
    ("POST", "/resume", resume, NothingBody),
    ("POST", "/sleep", sleep, SleepBody),
    ("POST", "/wake", wake, NothingBody),
    ("POST", "/weights", weights, WeightsBody),
    ("POST", "/profile", profile, ProfileBody),
)
