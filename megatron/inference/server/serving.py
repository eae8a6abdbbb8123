# SPDX-License-Identifier: Apache-2.0
"""The state that all APIs share, and the common steps of a request: read, check and admit it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron.cli.tokenizers import Tokenizer
from megatron.core.inference.requests import EngineRequest, RequestError, check_request
from megatron.inference.server.chat_template import Conversations
from megatron.inference.server.engine.client import Draining, EngineClient, EngineLost, QueueFull
from megatron.inference.server.guided_decoding.grammars import Grammars
from megatron.inference.server.metrics import ServerMetrics
from megatron.inference.server.middleware.api_error import ApiError
from megatron.inference.server.middleware.request_guard import Limits
from megatron.inference.server.output_processor import Generation, GenerationRequest, ModelCard
from megatron.inference.server.protocol.body import (
    MAX_REQUEST_OUTPUTS,
    B,
    Body,
    Prompts,
    parse_body,
)
from megatron.inference.server.tool_parsers.formats import AnswerFormats, decode_with_marks
from megatron.inference.server.tool_parsers.output_parser import OutputParser

#: Texts up to this many characters are tokenized on the event loop, in about a millisecond: a
#: switch to a thread takes as long.
SHORT_TEXTS = 4096


@dataclass(frozen=True, kw_only=True)
class Server:
    """State that all routes share."""

    client: EngineClient
    tokenizer: Tokenizer
    conversations: Conversations
    formats: AnswerFormats
    no_embeddings: str | None = None
    """Why the model has no embeddings; None if it has them."""
    running: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    """By response id: a function that cancels the running response and returns it."""
    card: ModelCard
    limits: Limits
    metrics: ServerMetrics
    grammars: Grammars | None = None

    def generate(
        self, request: GenerationRequest, parsers: Sequence[OutputParser] = ()
    ) -> Generation:
        """Send a request to the engine.

        Args:
            request: the request.
            parsers: see `Generation`.

        Raises:
            ApiError: the request is invalid, or the engine is unavailable.
        """
        self.check_awake()
        num_outputs = len(request.requests)
        max_outputs = min(MAX_REQUEST_OUTPUTS, self.client.max_outputs)
        if num_outputs > max_outputs:
            raise ApiError(
                400, f"{num_outputs} outputs in one request: the limit is {max_outputs}", param="n"
            )
        for engine_request in request.requests[:: request.n]:
            self._check(engine_request, request)
        with admission():
            decode = self.tokenizer.detokenize
            if parsers and self.formats.marks:
                decode = partial(decode_with_marks, self.tokenizer, self.formats.marks)
            return Generation(self.client, decode, self.metrics, request, parsers=parsers)

    def _check(self, request: EngineRequest, generation_request: GenerationRequest) -> None:
        """Raise ApiError for a request that the model cannot serve."""
        max_length = self.card.max_length
        try:
            check_request(request, max_length=max_length, vocab_size=self.card.vocab_size)
        except RequestError as error:
            length = len(request.prompt) + request.max_new_tokens
            is_too_long = max_length is not None and length > max_length
            raise ApiError(
                400,
                str(error),
                param=generation_request.name(error.field),
                code="context_length_exceeded" if is_too_long else None,
            ) from None

    def check_awake(self) -> None:
        """Raise ApiError if the engine is asleep."""
        if self.client.stats.get("asleep"):
            raise ApiError(503, "the engine is asleep", code="asleep", retry_seconds=10)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that this server does not serve."""
        if name is not None and name != self.card.name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r}: this server serves {self.card.name!r}",
                param="model",
                code="model_not_found",
            )

    async def read(self, request: Request, body: type[B]) -> B:
        """Return the validated body of a request. Raises ApiError for invalid fields."""
        return parse_body(body, await request.body())


Handler = Callable[[Server, Request], Awaitable[Response]]

#: Method, path, handler, and body class.
Route = tuple[str, str, Handler, type[Body] | None]


@contextlib.contextmanager
def admission() -> Iterator[None]:
    """Turn the engine client's admission errors into ApiErrors."""
    try:
        yield
    except QueueFull:
        raise ApiError(
            429, "the queue is full: try again later", code="queue_full", retry_seconds=1
        ) from None
    except Draining:
        raise ApiError(503, "the server is shutting down", retry_seconds=10) from None
    except EngineLost:
        raise engine_lost() from None


def engine_lost() -> ApiError:
    """Return the error after the engine process has exited."""
    return ApiError(503, "the engine has stopped: the server is shutting down", retry_seconds=10)


async def text_tokens(server: Server, prompts: Prompts) -> list[list[int]]:
    """Return the token ids of each prompt; prompts may be texts or token ids."""
    texts = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]

    def tokens(text: Any) -> list[int]:
        return server.tokenizer.tokenize(text) if isinstance(text, str) else list(text)

    if sum(len(text) for text in texts if isinstance(text, str)) <= SHORT_TEXTS:
        return [tokens(text) for text in texts]
    # In a thread: a long text would block the event loop.
    return await asyncio.to_thread(lambda: [tokens(text) for text in texts])
