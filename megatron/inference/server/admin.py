# SPDX-License-Identifier: Apache-2.0
"""Routes of administration, on an address and with a key of their own: pause, sleep, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron.inference.server.engine_client import EngineLost, OrderRefused
from megatron.inference.server.fields import Body
from megatron.inference.server.guard import ApiError
from megatron.inference.server.request_handling import Server, engine_lost
from megatron.inference.server.routes import Route

MAX_PROFILE_STEPS = 1000
MAX_PATH = 4096
MAX_SENDERS = 1 << 16


class PauseBody(Body):
    """What becomes of outputs that run: they go on from their cache, are computed again from their
    tokens, or end with `finish_reason` "abort"."""

    mode: Literal["keep", "recompute", "abort"] = "keep"


class NothingBody(Body):
    """No field."""


class SleepBody(Body):
    """What memory is given back: 1 the cache's, 2 that of the weights as well, which the host's
    memory keeps."""

    level: Literal[1, 2] = 1


class WeightsBody(Body):
    """Where new weights of the same model are: what `--load` may be, or the address at which the
    ranks of a training run send them."""

    load: Annotated[str, Field(min_length=1, max_length=MAX_PATH)] | None = None
    address: Annotated[str, Field(min_length=1, max_length=MAX_PATH)] | None = None
    senders: Annotated[int, Field(ge=1, le=MAX_SENDERS)] = 1
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0


class ProfileBody(Body):
    """Steps to measure."""

    steps: Annotated[int, Field(ge=1, le=MAX_PROFILE_STEPS)] = 10


async def _order(server: Server, request: Request, action: str, body: type[Body]) -> Response:
    """Have the engine do something; answer with the state that it is in then."""
    given = await server.read(request, body) if await request.body() else body()
    if isinstance(given, WeightsBody) and (given.load is None) == (given.address is None):
        raise ApiError(400, "give load or address, one of them", param="load")
    try:
        return JSONResponse(await server.client.order(action, **vars(given)))
    except OrderRefused as error:
        raise ApiError(409, str(error)) from None
    except EngineLost:
        raise engine_lost() from None


async def pause(server: Server, request: Request) -> Response:
    """Answer `POST /pause`: compute nothing until `/resume`; requests wait meanwhile."""
    return await _order(server, request, "pause", PauseBody)


async def resume(server: Server, request: Request) -> Response:
    """Answer `POST /resume`."""
    return await _order(server, request, "resume", NothingBody)


async def sleep(server: Server, request: Request) -> Response:
    """Answer `POST /sleep`: give memory back until `/wake`; requests are refused meanwhile."""
    return await _order(server, request, "sleep", SleepBody)


async def wake(server: Server, request: Request) -> Response:
    """Answer `POST /wake`."""
    return await _order(server, request, "wake", NothingBody)


async def weights(server: Server, request: Request) -> Response:
    """Answer `POST /weights`: replace the weights between two steps, or leave the old ones."""
    return await _order(server, request, "weights", WeightsBody)


async def profile(server: Server, request: Request) -> Response:
    """Answer `POST /profile`: which operations the next steps spend their time on."""
    return await _order(server, request, "profile", ProfileBody)


ADMIN_ROUTES: Sequence[Route] = (
    ("POST", "/pause", pause, PauseBody),
    ("POST", "/resume", resume, NothingBody),
    ("POST", "/sleep", sleep, SleepBody),
    ("POST", "/wake", wake, NothingBody),
    ("POST", "/weights", weights, WeightsBody),
    ("POST", "/profile", profile, ProfileBody),
)
