# SPDX-License-Identifier: Apache-2.0
"""The HTTP process: `python -m megatron.inference.server.http_process LINK LISTENER [ADMIN]`.

`megatron.inference.serve` starts it with the file descriptors of open sockets: the link to the
engine, the listening socket, and optionally a listening socket for administration. The first frame
on the link holds the settings, including the keys, which never appear in a command line or in the
environment. The process exits with the engine process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from megatron.cli.standard_streams import go_on_without_streams
from megatron.cli.tokenizers import PairTokens, choose_tokenizer
from megatron.hf.classifier import Classifier
from megatron.inference.server.app import ADMIN_ROUTES, API_ROUTES, create_app
from megatron.inference.server.chat_template import Conversations
from megatron.inference.server.engine.client import EngineClient
from megatron.inference.server.engine.link import LENGTH
from megatron.inference.server.guided_decoding.grammars import grammars_of
from megatron.inference.server.metrics import ServerMetrics
from megatron.inference.server.middleware import (
    MAX_HEADER_BYTES,
    Limits,
    timed_protocol,
)
from megatron.inference.server.middleware import set_up as set_up_log
from megatron.inference.server.output_processor import ModelCard
from megatron.inference.server.response_store import ResponseStore
from megatron.inference.server.serving import Server
from megatron.inference.server.tool_parsers.formats import formats_of
from megatron.training.data.chat import ChatTemplate

# Seconds between two checks whether the last answer has been sent.
_POLL_SECONDS = 0.05
# Seconds for the last answers to be sent after the last request has ended.
_FLUSH_SECONDS = 5


class _HttpServer(uvicorn.Server):
    """A uvicorn server without signal handlers: the engine process ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


def build(settings: Mapping[str, Any], client: EngineClient) -> Server:
    """Return the server with the given settings."""
    tokenizer = choose_tokenizer(**settings["tokenizer"])
    template, card = settings["template"], settings["card"]
    formats = formats_of(**settings["formats"], tokenizer=tokenizer)
    stop_tokens = tuple(sorted({*card["stop_tokens"], *formats.stop_tokens}))
    return Server(
        client=client,
        tokenizer=tokenizer,
        conversations=Conversations(
            None if template is None else ChatTemplate(**template),
            tokenizer,
            formats,
            variables=settings["template_variables"],
        ),
        formats=formats,
        no_embeddings=settings["no_embeddings"],
        **_classification(settings["classifier"]),
        card=ModelCard(
            **{**card, "aliases": tuple(card.get("aliases", ())), "stop_tokens": stop_tokens}
        ),
        limits=Limits(**settings["limits"]),
        metrics=ServerMetrics(lambda: client.stats),
        allowed_origins=settings["allowed_origins"],
        strict_fields=settings["strict_fields"],
        responses=ResponseStore(settings["response_store_bytes"]),
        grammars=grammars_of(tokenizer, card["stop_tokens"], card["vocab_size"]),
    )


def _classification(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of `Server` about a classification head."""
    if settings is None:
        return {}
    pair_tokens = {name: tuple(tokens) for name, tokens in settings["pair_tokens"].items()}
    return {
        "classifier": Classifier(**settings["head"]),
        "pair_tokens": PairTokens(**pair_tokens),
        "has_score_template": settings["has_score_template"],
    }


def _http_server(server: Server, app: ASGIApp) -> _HttpServer:
    """Return the HTTP server of an application."""
    return _HttpServer(
        uvicorn.Config(
            app,
            http=timed_protocol(server.limits.body_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=4 * MAX_HEADER_BYTES,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )
    )


async def serve(
    link: socket.socket,
    listener: socket.socket,
    settings: Mapping[str, Any],
    *,
    admin: socket.socket | None = None,
) -> None:
    """Serve until the engine process exits, or until all requests are answered after a drain.

    Args:
        link: socket to the engine process.
        listener: listening socket of the API.
        settings: settings of the server.
        admin: listening socket of administration; None without administration.
    """
    reader, writer = await asyncio.open_connection(sock=link)
    client = EngineClient(reader, writer, **settings["client"])
    server = build(settings, client)
    servers = [
        (_http_server(server, create_app(server, settings["key"], routes=API_ROUTES)), listener)
    ]
    if admin is not None:
        app = create_app(server, settings["admin_key"], routes=ADMIN_ROUTES)
        servers.append((_http_server(server, app), admin))
    listening = asyncio.ensure_future(client.listen())
    serving = asyncio.gather(*(http_server.serve(sockets=[sock]) for http_server, sock in servers))
    ending = [asyncio.ensure_future(event.wait()) for event in (client.lost, client.draining)]
    await asyncio.wait([serving, listening, *ending], return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(settings["drain_seconds"]):
            while client.active and not client.lost.is_set():
                await asyncio.sleep(_POLL_SECONDS)
    for http_server, _ in servers:
        http_server.should_exit = True
    await serving
    for task in (listening, *ending):
        task.cancel()
    writer.close()


def first_message(link: socket.socket) -> dict[str, Any] | None:
    """Return the settings; None if the engine process exited before it sent them."""
    # Read exactly one frame: the event loop reads the following bytes.
    head = link.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(head) < LENGTH.size:
        return None
    return json.loads(link.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL))


def main() -> None:
    """Read the settings and serve."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    go_on_without_streams("serve")  # a full log disk must not fail an answer or a drain
    link, listener, *admin_listeners = (
        socket.socket(fileno=int(number)) for number in sys.argv[1:]
    )
    settings = first_message(link)
    if settings is not None:
        set_up_log(settings["log_format"], settings["log_level"])
        asyncio.run(serve(link, listener, settings, admin=next(iter(admin_listeners), None)))


if __name__ == "__main__":
    main()
