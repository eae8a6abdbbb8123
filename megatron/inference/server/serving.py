# SPDX-License-Identifier: Apache-2.0
"""Request handling of all routes: read, validate and admit a request, then answer it, complete or
streamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from megatron.cli.tokenizers import Tokenizer
from megatron.core.inference.requests import EngineRequest, RequestError, check_request
from megatron.core.inference.sampling import SamplingParams
from megatron.inference.server.chat_template import Conversations
from megatron.inference.server.engine.client import (
    Cancelled,
    Draining,
    EngineClient,
    EngineLost,
    QueueFull,
    ReaderStalled,
)
from megatron.inference.server.guided_decoding.grammars import (
    Grammars,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from megatron.inference.server.metrics import ServerMetrics
from megatron.inference.server.middleware.request_guard import (
    ApiError,
    EventStream,
    Limits,
    check_keys,
    disconnected,
    internal_error,
    validation_error,
)
from megatron.inference.server.middleware.request_log import LOG
from megatron.inference.server.output_processor import (
    Delta,
    Generation,
    GenerationRequest,
    ModelCard,
    NotFinite,
    Refused,
)
from megatron.inference.server.protocol.completions import View
from megatron.inference.server.protocol.generation import (
    MAX_REQUEST_OUTPUTS,
    Body,
    GenerationBody,
    JsonFormat,
    JsonSchemaFormat,
    Prompts,
)
from megatron.inference.server.tool_parsers.formats import AnswerFormats, decode_with_marks
from megatron.inference.server.tool_parsers.output_parser import AnswerParser

#: Time limit for checking a grammar.
GRAMMAR_SECONDS = 5.0

#: Texts up to this many characters are tokenized on the event loop, in about a millisecond: a
#: switch to a thread takes as long.
SHORT_TEXTS = 4096

STREAM_END = "[DONE]"

#: The field that requests a grammar, and the function that returns the grammar.
GrammarMaker = tuple[str, Callable[[], str]]

B = TypeVar("B", bound=Body)
T = TypeVar("T")


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

    async def grammar(
        self, body: GenerationBody, makers: Sequence[GrammarMaker] | None = None
    ) -> str | None:
        """Return the grammar of the outputs, which is known to compile; None for any text.

        Args:
            body: body of the request.
            makers: makers of the requested grammars; None for the makers of `body`.

        Raises:
            ApiError: more than one grammar is requested, or the grammar is invalid.
        """
        candidates = grammar_makers(body) if makers is None else makers
        if not candidates:
            if body.structured_outputs is not None:
                raise ApiError(
                    400,
                    "structured_outputs: give json, regex, choice or grammar",
                    param="structured_outputs",
                )
            return None
        name, make = candidates[0]
        if len(candidates) > 1:
            raise ApiError(
                400,
                "give at most one of response_format and structured_outputs, and one kind of "
                "constraint",
                param=name,
            )
        if body.ignore_eos:
            raise ApiError(400, f"ignore_eos cannot be combined with {name}", param="ignore_eos")
        if self.grammars is None:
            raise ApiError(
                400,
                f"{name} needs a model with a text tokenizer and a stop token",
                param=name,
            )
        grammars = self.grammars

        def compile_grammar() -> str:
            grammar = make()
            grammars.compile(grammar)
            return grammar

        try:
            # After a timeout the thread still ends, by the limits of llguidance.
            return await asyncio.wait_for(asyncio.to_thread(compile_grammar), GRAMMAR_SECONDS)
        except TimeoutError:
            raise ApiError(400, f"{name} takes too long to compile", param=name) from None
        except ValueError as error:
            raise ApiError(400, f"{name} cannot be used: {error}", param=name) from None

    def generate(
        self, request: GenerationRequest, parsers: Sequence[AnswerParser] = ()
    ) -> Generation:
        """Send a request to the engine.

        Args:
            request: the request.
            parsers: see `Generation`.

        Raises:
            ApiError: the request is invalid, or the engine is unavailable.
        """
        self.check_awake()
        num_outputs = len(request.prompts) * request.n
        max_outputs = min(MAX_REQUEST_OUTPUTS, self.client.max_outputs)
        if num_outputs > max_outputs:
            raise ApiError(
                400, f"{num_outputs} outputs in one request: the limit is {max_outputs}", param="n"
            )
        for prompt in request.prompts:
            self._check(prompt, request)
        with admission():
            decode = self.tokenizer.detokenize
            if parsers and self.formats.marks:
                decode = partial(decode_with_marks, self.tokenizer, self.formats.marks)
            return Generation(
                self.client, decode, self.metrics, self.card, request, parsers=parsers
            )

    def _check(self, prompt: Sequence[int], generation_request: GenerationRequest) -> None:
        try:
            request = EngineRequest(
                prompt=tuple(prompt),
                max_new_tokens=generation_request.max_new_tokens or 1,
                sampling=SamplingParams(**generation_request.sampling),
            )
            check_request(request, max_length=self.card.max_length, vocab_size=self.card.vocab_size)
        except RequestError as error:
            max_length = self.card.max_length
            is_too_long = (
                max_length is not None and len(prompt) + request.max_new_tokens > max_length
            )
            raise ApiError(
                400,
                str(error),
                param=generation_request.name(error.field),
                code="context_length_exceeded" if is_too_long else None,
            ) from None
        except ValueError as error:  # one line for the user
            raise ApiError(400, str(error)) from None

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
        data = await request.body()
        check_keys(data)
        try:
            return body.model_validate_json(data)
        except ValidationError as error:
            raise validation_error(
                error.errors(include_url=False, include_context=False, include_input=False)
            ) from None

    async def run_until_disconnect(
        self, request: Request, work: Coroutine[Any, Any, T]
    ) -> T | None:
        """Return the result of a coroutine; None if the client disconnects before it ends.

        Raises:
            ApiError: the coroutine failed or exceeded the time limit.
        """
        task = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(disconnected(request.receive))
        try:
            await asyncio.wait(
                [task, disconnect],
                timeout=self.limits.request_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if task.done():
                return task.result()
            if disconnect.done():
                return None
            raise timeout_error(self.limits)
        finally:
            task.cancel()
            disconnect.cancel()
            await asyncio.gather(task, disconnect, return_exceptions=True)


def grammar_makers(body: GenerationBody) -> list[GrammarMaker]:
    """Return the maker of each grammar that a body requests."""
    all_makers: list[GrammarMaker] = []
    structured, response_format = body.structured_outputs, body.response_format
    if isinstance(response_format, JsonFormat):
        all_makers.append(("response_format", partial(json_grammar, {"type": "object"})))
    elif isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.json_schema
        all_makers.append(("response_format", partial(json_grammar, schema)))
    if structured is not None:
        makers = (
            (structured.json_schema, json_grammar),
            (structured.regex, regex_grammar),
            (structured.choice, choice_grammar),
            (structured.grammar, lark_grammar),
        )
        structured_makers = [partial(make, value) for value, make in makers if value is not None]
        all_makers += [("structured_outputs", make) for make in structured_makers]
    return all_makers


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


def timeout_error(limits: Limits) -> ApiError:
    """Return the answer to a request that exceeds the time limit."""
    return ApiError(504, f"no response within {limits.request_seconds:g} s: request fewer tokens")


def engine_lost() -> ApiError:
    """Return the answer after the engine process has exited."""
    return ApiError(503, "the engine has stopped: the server is shutting down", retry_seconds=10)


async def checked_deltas(generation: Generation) -> AsyncIterator[Delta]:
    """Yield the deltas of a request; errors of the engine are raised as ApiErrors."""
    try:
        async for delta in generation.deltas():
            yield delta
    except Refused as error:
        raise ApiError(400, str(error), param=error.field) from None
    except NotFinite:
        raise ApiError(
            500,
            "the model's logits are not finite, or the grammar allows no token",
            code="not_finite",
        ) from None
    except Cancelled:
        raise ApiError(409, "the response was cancelled") from None
    except EngineLost:
        raise engine_lost() from None


async def answer(server: Server, request: Request, generation: Generation, view: View) -> Response:
    """Return a complete answer."""

    async def collect() -> list[dict[str, Any]]:
        output_deltas: list[list[Delta]] = [[] for _ in range(view.outputs)]
        async for delta in checked_deltas(generation):
            output_deltas[delta.index].append(delta)
        return [view.choice(deltas) for deltas in output_deltas]

    choices = await server.run_until_disconnect(request, collect())
    if choices is None:
        return Response(status_code=499)  # the client has disconnected
    return JSONResponse({**view.head(), "choices": choices, "usage": generation.usage.to_json()})


async def events(
    server: Server, request_id: str, generation: Generation, view: View, *, include_usage: bool
) -> AsyncGenerator[str, None]:
    """Yield the data of the events of a streamed answer."""

    def chunk(choices: Sequence[dict[str, Any]], **fields: Any) -> str:
        usage = {"usage": None, **fields} if include_usage else {}
        return json.dumps({**view.head(chunk=True), "choices": choices, **usage})

    try:
        async with asyncio.timeout(server.limits.request_seconds):
            async for delta in checked_deltas(generation):
                for choice in view.chunk_choices(delta):
                    yield chunk([choice])
        if include_usage:
            yield chunk([], usage=generation.usage.to_json())
        yield STREAM_END
    except TimeoutError:
        yield json.dumps(timeout_error(server.limits).to_json(request_id))
    except ReaderStalled:
        LOG.warning("request %s: the client stopped reading, so its stream was closed", request_id)
    except ApiError as error:
        yield json.dumps(error.to_json(request_id))
    except Exception:
        LOG.exception("request %s failed while streaming", request_id)
        yield json.dumps(internal_error().to_json(request_id))
    finally:
        generation.close()


async def respond(
    server: Server, request: Request, body: GenerationBody, generation: Generation, view: View
) -> Response:
    """Return the answer to a request, complete or streamed."""
    if not body.stream:
        return await answer(server, request, generation, view)
    usage = body.stream_options is not None and body.stream_options.include_usage
    stream = events(server, request.state.request_id, generation, view, include_usage=usage)
    return EventStream(stream, generation.stalled)


async def text_tokens(server: Server, prompts: Prompts) -> list[list[int]]:
    """Return the token ids of each prompt; prompts may be texts or token ids."""
    texts = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]

    def tokens(text: Any) -> list[int]:
        return server.tokenizer.tokenize(text) if isinstance(text, str) else list(text)

    if sum(len(text) for text in texts if isinstance(text, str)) <= SHORT_TEXTS:
        return [tokens(text) for text in texts]
    # In a thread: a long text would block the event loop.
    return await asyncio.to_thread(lambda: [tokens(text) for text in texts])


def check_stream_options(body: GenerationBody) -> None:
    """Raise ApiError for stream options without `stream`."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
