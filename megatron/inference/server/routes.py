# SPDX-License-Identifier: Apache-2.0
"""The routes: a request becomes a `Generation`, and its answer is a view of that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from megatron.cli.tokenizers import Tokenizer
from megatron.core.inference.engine import Request as EngineRequest
from megatron.core.inference.requests import RequestError, check_request
from megatron.core.inference.sampling import SamplingParams
from megatron.inference.server.answer_formats import AnswerFormats, decode_with_marks
from megatron.inference.server.answer_parser import AnswerParser
from megatron.inference.server.chat_page import chat_page
from megatron.inference.server.conversation import Conversation, Conversations
from megatron.inference.server.engine_client import (
    Cancelled,
    Draining,
    EngineClient,
    EngineLost,
    QueueFull,
    ReaderStalled,
)
from megatron.inference.server.fields import (
    MAX_REQUEST_OUTPUTS,
    Body,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    JsonFormat,
    JsonSchemaFormat,
    Prompts,
    TokenizeBody,
)
from megatron.inference.server.generation import (
    Delta,
    Generation,
    ModelCard,
    NotFinite,
    Refused,
    Wanted,
)
from megatron.inference.server.guard import (
    ApiError,
    EventStream,
    Guard,
    Limits,
    check_keys,
    disconnected,
    internal_error,
    validation_error,
)
from megatron.inference.server.log_lines import LOG
from megatron.inference.server.metrics import ServerMetrics
from megatron.inference.server.structured import (
    Grammars,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from megatron.inference.server.views import CompletionView, View

#: An engine that says nothing for so long is not well; its heart beats twice a second.
SILENT_SECONDS = 60.0
#: For a grammar to be checked.
GRAMMAR_SECONDS = 5.0
#: Tokens of a completion for which the request sets no limit, as OpenAI's route has it.
COMPLETION_TOKENS = 16

#: Characters whose tokens are found at once, in about a millisecond: a thread takes as long.
SHORT_TEXTS = 4096

DONE = "[DONE]"

#: How the OpenAPI document refers to a schema: as in a file, `#` is the whole document.
SCHEMA_REFERENCE = "#/components/schemas/{model}"

#: The field that asks for a grammar, and what makes it.
GrammarMaker = tuple[str, Callable[[], str]]

B = TypeVar("B", bound=Body)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Server:
    """What the routes stand on."""

    client: EngineClient
    tokenizer: Tokenizer
    conversations: Conversations
    formats: AnswerFormats
    no_embeddings: str | None = None
    """Why the model embeds no texts; None if it does."""
    running: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    """What cancels a response that is not finished and returns it, by its id."""
    card: ModelCard
    limits: Limits
    metrics: ServerMetrics
    grammars: Grammars | None = None

    async def grammar(
        self, body: GenerationBody, makers: Sequence[GrammarMaker] | None = None
    ) -> str | None:
        """Return the grammar that outputs have to follow, checked; None for any text.

        Args:
            body: of the request.
            makers: of the grammars that are asked for; derived: of its fields.

        Raises:
            ApiError: there is more than one, or it cannot be used.
        """
        found = grammar_makers(body) if makers is None else makers
        if not found:
            if body.structured_outputs is not None:
                raise ApiError(
                    400,
                    "structured_outputs: give json, regex, choice or grammar",
                    param="structured_outputs",
                )
            return None
        name, make = found[0]
        if len(found) > 1:
            raise ApiError(
                400,
                "one of response_format and structured_outputs, and one of its kinds",
                param=name,
            )
        if body.ignore_eos:
            raise ApiError(400, f"ignore_eos does not go with {name}", param="ignore_eos")
        if self.grammars is None:
            raise ApiError(
                400,
                f"{name} needs a model with a tokenizer of texts and a token that ends one",
                param=name,
            )
        grammars = self.grammars

        def checked() -> str:
            grammar = make()
            grammars.compile(grammar)
            return grammar

        try:
            # A thread that takes too long ends by llguidance's own limits.
            return await asyncio.wait_for(asyncio.to_thread(checked), GRAMMAR_SECONDS)
        except TimeoutError:
            raise ApiError(400, f"{name} takes too long to compile", param=name) from None
        except ValueError as error:
            raise ApiError(400, f"{name} cannot be used: {error}", param=name) from None

    def generate(self, wanted: Wanted, parsers: Sequence[AnswerParser] = ()) -> Generation:
        """Ask the engine for what is wanted.

        Args:
            wanted: by a request.
            parsers: see `Generation`.

        Raises:
            ApiError: the model cannot serve it, or not now.
        """
        self.check_awake()
        outputs = len(wanted.prompts) * wanted.n
        most = min(MAX_REQUEST_OUTPUTS, self.client.max_outputs)
        if outputs > most:
            raise ApiError(400, f"{outputs} outputs of one request: {most} are the most", param="n")
        for prompt in wanted.prompts:
            self._check(prompt, wanted)
        with admission():
            decode = self.tokenizer.detokenize
            if parsers and self.formats.marks:
                decode = partial(decode_with_marks, self.tokenizer, self.formats.marks)
            return Generation(self.client, decode, self.metrics, self.card, wanted, parsers=parsers)

    def _check(self, prompt: Sequence[int], wanted: Wanted) -> None:
        try:
            request = EngineRequest(
                prompt=tuple(prompt),
                max_new_tokens=wanted.max_new_tokens or 1,
                sampling=SamplingParams(**wanted.sampling),
            )
            check_request(request, max_length=self.card.max_length, vocab_size=self.card.vocab_size)
        except RequestError as error:
            longest = self.card.max_length
            long = longest is not None and len(prompt) + request.max_new_tokens > longest
            raise ApiError(
                400,
                str(error),
                param=wanted.name(error.field),
                code="context_length_exceeded" if long else None,
            ) from None
        except ValueError as error:  # one line for the user
            raise ApiError(400, str(error)) from None

    def check_awake(self) -> None:
        """Raise ApiError if the engine is asleep."""
        if self.client.stats.get("asleep"):
            raise ApiError(503, "the engine is asleep", code="asleep", retry_seconds=10)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served here."""
        if name is not None and name != self.card.name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r}: this server has {self.card.name!r}",
                param="model",
                code="model_not_found",
            )

    def token_text(self, token: int) -> str:
        """Return the text of one token by itself."""
        return self.tokenizer.detokenize([token])

    async def read(self, request: Request, body: type[B]) -> B:
        """Return the body of a request, checked. Raises ApiError for one with wrong fields."""
        data = await request.body()
        check_keys(data)
        try:
            return body.model_validate_json(data)
        except ValidationError as error:
            raise validation_error(
                error.errors(include_url=False, include_context=False, include_input=False)
            ) from None

    async def waited(self, request: Request, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what some work comes to; None if the client has gone away before.

        Raises:
            ApiError: it took too long, or failed.
        """
        doing = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(disconnected(request.receive))
        try:
            await asyncio.wait(
                [doing, leaving],
                timeout=self.limits.request_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if doing.done():
                return doing.result()
            if leaving.done():
                return None
            raise too_slow(self.limits)
        finally:
            doing.cancel()
            leaving.cancel()
            await asyncio.gather(doing, leaving, return_exceptions=True)


def grammar_makers(body: GenerationBody) -> list[GrammarMaker]:
    """Return what makes each grammar that a body asks for."""
    found: list[GrammarMaker] = []
    wanted, shape = body.structured_outputs, body.response_format
    if isinstance(shape, JsonFormat):
        found.append(("response_format", partial(json_grammar, {"type": "object"})))
    elif isinstance(shape, JsonSchemaFormat):
        found.append(("response_format", partial(json_grammar, shape.json_schema.json_schema)))
    if wanted is not None:
        makers = (
            (wanted.json_schema, json_grammar),
            (wanted.regex, regex_grammar),
            (wanted.choice, choice_grammar),
            (wanted.grammar, lark_grammar),
        )
        given = [partial(make, value) for value, make in makers if value is not None]
        found += [("structured_outputs", make) for make in given]
    return found


@contextlib.contextmanager
def admission() -> Iterator[None]:
    """Say by an ApiError why the engine is not asked now."""
    try:
        yield
    except QueueFull:
        raise ApiError(
            429, "the queue is full: try again later", code="queue_full", retry_seconds=1
        ) from None
    except Draining:
        raise ApiError(503, "the server is ending", retry_seconds=10) from None
    except EngineLost:
        raise engine_lost() from None


def too_slow(limits: Limits) -> ApiError:
    """Return the answer to a request that takes too long."""
    return ApiError(504, f"no answer within {limits.request_seconds:g} s: ask for fewer tokens")


def engine_lost() -> ApiError:
    """Return the answer where the engine is gone."""
    return ApiError(503, "the engine has stopped: the server is ending", retry_seconds=10)


async def checked(generation: Generation) -> AsyncIterator[Delta]:
    """Yield the deltas of a request; what ends it early is an ApiError."""
    try:
        async for delta in generation.deltas():
            yield delta
    except Refused as error:
        raise ApiError(400, str(error), param=error.field) from None
    except NotFinite:
        raise ApiError(
            500, "the model's logits are not finite, or nothing may follow", code="not_finite"
        ) from None
    except Cancelled:
        raise ApiError(409, "the response was cancelled") from None
    except EngineLost:
        raise engine_lost() from None


async def answer(server: Server, request: Request, generation: Generation, view: View) -> Response:
    """Return a whole answer."""

    async def collected() -> list[dict[str, Any]]:
        found: list[list[Delta]] = [[] for _ in range(view.outputs)]
        async for delta in checked(generation):
            found[delta.index].append(delta)
        return [view.choice(deltas) for deltas in found]

    choices = await server.waited(request, collected())
    if choices is None:
        return Response(status_code=499)  # nobody reads it
    return JSONResponse({**view.head(), "choices": choices, "usage": generation.usage.to_json()})


async def events(
    server: Server, request_id: str, generation: Generation, view: View, *, include_usage: bool
) -> AsyncGenerator[str, None]:
    """Yield the data of the events of a stream."""

    def chunk(choices: Sequence[dict[str, Any]], **more: Any) -> str:
        usage = {"usage": None, **more} if include_usage else {}
        return json.dumps({**view.head(chunk=True), "choices": choices, **usage})

    try:
        async with asyncio.timeout(server.limits.request_seconds):
            async for delta in checked(generation):
                for choice in view.chunk_choices(delta):
                    yield chunk([choice])
        if include_usage:
            yield chunk([], usage=generation.usage.to_json())
        yield DONE
    except TimeoutError:
        yield json.dumps(too_slow(server.limits).to_json(request_id))
    except ReaderStalled:
        LOG.warning("request %s: its reader stalled, and was dropped", request_id)
    except ApiError as error:
        yield json.dumps(error.to_json(request_id))
    except Exception:
        LOG.exception("request %s failed in its stream", request_id)
        yield json.dumps(internal_error().to_json(request_id))
    finally:
        generation.close()


async def respond(
    server: Server, request: Request, body: GenerationBody, generation: Generation, view: View
) -> Response:
    """Return the answer to a request, whole or as a stream."""
    if not body.stream:
        return await answer(server, request, generation, view)
    usage = body.stream_options is not None and body.stream_options.include_usage
    stream = events(server, request.state.request_id, generation, view, include_usage=usage)
    return EventStream(stream, generation.stalled)


async def text_tokens(server: Server, given: Prompts) -> list[list[int]]:
    """Return the tokens of each text, which may be tokens already."""
    texts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]

    def tokens(text: Any) -> list[int]:
        return server.tokenizer.tokenize(text) if isinstance(text, str) else list(text)

    if sum(len(text) for text in texts if isinstance(text, str)) <= SHORT_TEXTS:
        return [tokens(text) for text in texts]
    # Off the loop: a long text takes a while.
    return await asyncio.to_thread(lambda: [tokens(text) for text in texts])


async def completions(server: Server, request: Request) -> Response:
    """Answer `POST /v1/completions`."""
    body = await server.read(request, CompletionBody)
    server.check_model(body.model)
    check_stream_options(body)
    eod = server.tokenizer.eod
    begun = [] if eod is None else [eod]  # an empty text starts a document, as in training
    prompts = [tokens or begun for tokens in await text_tokens(server, body.prompt)]
    echo = bool(body.echo)
    wanted = body.wanted(
        prompts,
        ends=server.card.stop_tokens,
        max_new_tokens=body.max_tokens or COMPLETION_TOKENS,
        sampling=body.sampling(seed=secrets.randbits(63), logprobs=body.logprobs),
        names={"max_new_tokens": "max_tokens"},
        prompt_logprobs=echo and body.logprobs is not None,
        grammar=await server.grammar(body),
    )
    view = CompletionView(
        server.card.name,
        server.token_text,
        outputs=len(prompts) * wanted.n,
        logprobs=body.logprobs is not None,
        prefixes=[server.tokenizer.detokenize(p) for p in prompts] if echo else None,
    )
    generation = server.generate(wanted)
    return await respond(server, request, body, generation, view)


def check_stream_options(body: GenerationBody) -> None:
    """Raise ApiError for options of a stream where there is none."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


async def tokenize(server: Server, request: Request) -> Response:
    """Answer `POST /tokenize`."""
    body = await server.read(request, TokenizeBody)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
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
    wrong = [token for token in body.tokens if token >= server.card.vocab_size]
    if wrong:
        raise ApiError(
            400,
            f"token id {wrong[0]} is outside the vocabulary of {server.card.vocab_size}",
            param="tokens",
        )
    text = await asyncio.to_thread(server.tokenizer.detokenize, body.tokens)
    return JSONResponse({"prompt": text})


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


async def health(server: Server, request: Request) -> Response:
    """Answer `GET /health`: 200 while requests are admitted, else 503; `engine` explains it."""
    client = server.client
    live = not client.lost.is_set() and client.silent_seconds < SILENT_SECONDS
    asleep = bool(client.stats.get("asleep"))
    ready = live and bool(client.facts) and not asleep and not client.draining.is_set()
    found = {
        "live": live,
        "ready": ready,
        "heartbeat_seconds": round(client.silent_seconds, 3),
        "active": client.active,
        "paused": bool(client.stats.get("paused")),
        "asleep": asleep,
        "weight_epoch": client.stats.get("epoch", 0),
        "engine": client.facts,
    }
    return JSONResponse(found, 200 if ready else 503)


async def metrics(server: Server, request: Request) -> Response:
    """Answer `GET /metrics`."""
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")


Handler = Callable[[Server, Request], Awaitable[Response]]

#: Method, path, what answers, and the body that it takes.
Route = tuple[str, str, Handler, type[Body] | None]
ROUTES: Sequence[Route] = (
    ("POST", "/v1/completions", completions, CompletionBody),
    ("GET", "/v1/models", models, None),
    ("GET", "/v1/models/{model:path}", model, None),
    ("POST", "/tokenize", tokenize, TokenizeBody),
    ("POST", "/detokenize", detokenize, DetokenizeBody),
    ("GET", "/", chat_page, None),
    ("GET", "/health", health, None),
    ("GET", "/metrics", metrics, None),
)


def create_app(server: Server, key: str | None, *, routes: Sequence[Route]) -> ASGIApp:
    """Return the application.

    Args:
        server: what answers.
        key: that clients must give; None lets everybody in.
        routes: what it answers.
    """
    # No pages of documentation: theirs load scripts from elsewhere.
    app = FastAPI(title="megatron.inference", docs_url=None, redoc_url=None)
    bodies: list[tuple[type[Body], JsonSchemaMode]]
    bodies = [(body, "validation") for *_, body in routes if body is not None]
    schemas, definitions = models_json_schema(bodies, ref_template=SCHEMA_REFERENCE)

    def add(method: str, path: str, handler: Handler, body: type[Body] | None) -> None:
        async def endpoint(request: Request) -> Response:
            request_id = request.state.request_id
            try:
                return await handler(server, request)
            except ApiError as error:
                return error.response(request_id, path)
            except ClientDisconnect:
                return Response(status_code=499)  # its body is not whole, and nobody reads this
            except Exception:
                LOG.exception("request %s failed", request_id)
                return internal_error().response(request_id, path)

        schema: dict[str, Any] = {}
        if names := re.findall(r"{(\w+)", path):
            where = {"in": "path", "required": True, "schema": {"type": "string"}}
            schema["parameters"] = [{"name": name, **where} for name in names]
        if body is not None:
            content = {"application/json": {"schema": schemas[body, "validation"]}}
            schema["requestBody"] = {"required": True, "content": content}
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=handler.__name__,
            description=handler.__doc__,
            openapi_extra=schema,
            response_model=None,
        )

    for route in routes:
        add(*route)
    # FastAPI keeps the document that it returns.
    app.openapi()["components"] = {"schemas": definitions.get("$defs", {})}

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = {404: "there is no such route", 405: "this route takes another method"}
        found = ApiError(error.status_code, said.get(error.status_code, "the request is not valid"))
        return found.response(request.state.request_id, request.url.path)

    app.add_exception_handler(HTTPException, no_route)
    return Guard(app, server.limits, key, server.metrics.note_answer)
