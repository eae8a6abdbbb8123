# SPDX-License-Identifier: Apache-2.0
"""The state that all APIs share, and the common steps of a request: read, check, admit it, and
begin the answer to a conversation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megatron.cli.tokenizers import PairTokens, Tokenizer
from megatron.core.inference.requests import EngineRequest, RequestError, check_request
from megatron.hf.classifier import Classifier
from megatron.inference.server.beam_search import BeamSearch, BeamSearchParams, check_beam_width
from megatron.inference.server.chat_template import Conversation, Conversations
from megatron.inference.server.engine.client import Draining, EngineClient, EngineLost, QueueFull
from megatron.inference.server.guided_decoding.grammars import Grammars
from megatron.inference.server.guided_decoding.request_grammar import (
    chat_grammar_makers,
    compiled_grammar,
    grammar_makers,
)
from megatron.inference.server.metrics import ServerMetrics
from megatron.inference.server.middleware import LOG, Limits
from megatron.inference.server.output_processor import Generation, GenerationRequest, ModelCard
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.body import (
    MAX_REQUEST_OUTPUTS,
    B,
    Body,
    Prompts,
    parse_body,
)
from megatron.inference.server.protocol.generation import GenerationBody
from megatron.inference.server.protocol.token_text import decode_with_special_tokens
from megatron.inference.server.response_store import ResponseStore
from megatron.inference.server.tool_parsers.formats import (
    AnswerFormats,
    decode_with_marks,
    reasoning_limit,
)
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
    classifier: Classifier | None = None
    """The classification head; None for a language model."""
    pair_tokens: PairTokens | None = None
    """Special tokens of a pair of texts, for the classification head."""
    has_score_template: bool = False
    """Render a pair with the chat template, for the classification head."""
    running: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    """By response id: a function that cancels the running response and returns it."""
    card: ModelCard
    limits: Limits
    metrics: ServerMetrics
    grammars: Grammars | None = None
    allowed_origins: Sequence[str] = ()
    """Origins of web pages that may send requests (CORS)."""
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(0))
    """Stored responses."""
    strict_fields: bool = False
    """Refuse unknown fields instead of ignoring them."""

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
        self._check_outputs(request, len(request.requests))
        with admission():
            decode = self._decode(request, parsers)
            return Generation(self.client, decode, self.metrics, request, parsers=parsers)

    def beam_search(
        self,
        request: GenerationRequest,
        params: BeamSearchParams,
        *,
        parsers: Sequence[OutputParser] = (),
    ) -> BeamSearch:
        """Begin a beam search.

        Args:
            request: the request.
            params: parameters of the search.
            parsers: see `Generation`.

        Raises:
            ApiError: the request is invalid, or the engine is unavailable.
        """
        engine_request = request.requests[0]
        if engine_request.grammar is not None:
            raise ApiError(
                400,
                "tools: a forced or strict tool cannot be combined with use_beam_search: set "
                "tool_choice to auto and leave strict out",
                param="tools",
            )
        problem = check_beam_width(params, engine_request, self.card.vocab_size)
        if problem is not None:
            raise ApiError(400, problem, param="n")
        self._check_outputs(request, len(request.requests) // request.n * params.beam_width)
        with admission():
            decode = self._decode(request, parsers)
            return BeamSearch(self.client, decode, self.metrics, request, params, parsers=parsers)

    def begin(
        self,
        request: GenerationRequest,
        beam_search: BeamSearchParams | None,
        *,
        parsers: Sequence[OutputParser] = (),
    ) -> Generation | BeamSearch:
        """Begin a beam search, or without its parameters a generation."""
        if beam_search is None:
            return self.generate(request, parsers)
        return self.beam_search(request, beam_search, parsers=parsers)

    def _decode(
        self, request: GenerationRequest, parsers: Sequence[OutputParser]
    ) -> Callable[[Sequence[int]], str]:
        """Return the function that converts token ids of a request to text."""
        if not request.skip_special_tokens:
            return partial(decode_with_special_tokens, self.tokenizer)
        if parsers and self.formats.marks:
            return partial(decode_with_marks, self.tokenizer, self.formats.marks)
        return self.tokenizer.detokenize

    def _check_outputs(self, request: GenerationRequest, num_outputs: int) -> None:
        """Raise ApiError for a request that the model or the engine cannot serve.

        Args:
            request: the request.
            num_outputs: number of outputs in flight.
        """
        self.check_awake()
        max_outputs = min(MAX_REQUEST_OUTPUTS, self.client.max_outputs)
        if num_outputs > max_outputs:
            raise ApiError(
                400, f"{num_outputs} outputs in one request: the limit is {max_outputs}", param="n"
            )
        for engine_request in request.requests[:: request.n]:
            self._check(engine_request, request)

    def _check(self, request: EngineRequest, generation_request: GenerationRequest) -> None:
        """Raise ApiError for a request that the model cannot serve."""
        max_length = self.card.max_length
        try:
            check_request(
                request,
                max_length=max_length,
                vocab_size=self.card.vocab_size,
                name_of=generation_request.name,
            )
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
        if name is not None and name not in (self.card.name, *self.card.aliases):
            raise ApiError(
                404,
                f"there is no model {name[:100]!r}: this server serves {self.card.name!r}",
                param="model",
                code="model_not_found",
            )

    async def read(self, request: Request, body: type[B]) -> B:
        """Return the validated body of a request, and report the fields that are ignored.

        Raises:
            ApiError: a field is invalid or cannot be served, or the model cannot generate.
        """
        if body.needs_language_model and self.classifier is not None:
            raise ApiError(
                400,
                "this model has a classification head, not a language-model head: use /score, "
                "/rerank or /classify",
            )
        parsed, ignored = parse_body(body, await request.body(), strict_fields=self.strict_fields)
        for path, (variable, _) in parsed.template_hints.items():
            if not self.conversations.reads(variable):
                ignored.append(path)
        if ignored:
            request.state.ignored_fields = ignored
            for path in self.metrics.note_ignored(ignored):
                LOG.info("request fields: %s is ignored: it has no effect on this server", path)
        return parsed


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


async def text_tokens(
    server: Server, prompts: Prompts, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each prompt; prompts may be texts or token ids.

    Args:
        server: the server.
        prompts: one prompt or several.
        add_special_tokens: whether texts get the special tokens of the tokenizer.
    """
    texts = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]

    def tokens(text: Any) -> list[int]:
        if not isinstance(text, str):
            return list(text)
        return server.tokenizer.tokenize(text, add_special_tokens=add_special_tokens)

    if sum(len(text) for text in texts if isinstance(text, str)) <= SHORT_TEXTS:
        return [tokens(text) for text in texts]
    # In a thread: a long text would block the event loop.
    return await asyncio.to_thread(lambda: [tokens(text) for text in texts])


async def begin_answer(
    server: Server, conversation: Conversation, body: GenerationBody, **fields: Any
) -> Generation:
    """Send the request for an answer to the engine; its deltas have `segments`.

    Args:
        server: the server.
        conversation: the conversation to answer.
        body: sampling, stop and grammar fields of the request.
        fields: other arguments of `answer_request`.

    Raises:
        ApiError: the model cannot answer the conversation, or is unavailable.
    """
    return server.generate(*await answer_request(server, conversation, body, **fields))


async def answer_request(
    server: Server,
    conversation: Conversation,
    body: GenerationBody,
    *,
    max_new_tokens: int | None = None,
    logprobs: int | None = None,
    thinking_budget: int | None = None,
    ends_at_context: bool = False,
    names: Mapping[str, str],
) -> tuple[GenerationRequest, list[OutputParser]]:
    """Return the request for the answers to a conversation, and the parser of each answer.

    Args:
        server: the server.
        conversation: the conversation to answer.
        body: sampling, stop and grammar fields of the request.
        max_new_tokens: most tokens of the answer; None for the remaining length of the model.
        logprobs: number of alternatives to report per token.
        thinking_budget: most tokens of reasoning; None for no limit.
        ends_at_context: end the answer where the model's context ends if it is shorter than
            `max_new_tokens`, instead of refusing the request.
        names: the route's names of `prompt`, `max_new_tokens` and, if it differs,
            `response_format`.

    Raises:
        ApiError: the model cannot answer the conversation.
    """
    if thinking_budget is not None:
        _check_budget(server)
    prompt = await server.conversations.prompt(conversation)
    prompt_tokens = body.truncate(prompt.tokens, server.card.max_length, max_new_tokens)
    if max_new_tokens is None:
        max_new_tokens = _remaining_tokens(server, len(prompt_tokens), names)
    elif ends_at_context and server.card.max_length is not None:
        remaining_tokens = _remaining_tokens(server, len(prompt_tokens), names)
        max_new_tokens = min(max_new_tokens, remaining_tokens)
    makers = chat_grammar_makers(
        body,
        [(names.get(name, name), make) for name, make in grammar_makers(body)],
        conversation,
        server.formats,
        in_reasoning=prompt.in_reasoning,
    )
    grammar = await compiled_grammar(server.grammars, body, makers)
    limit = None
    if thinking_budget is not None:
        limit = reasoning_limit(
            server.formats, server.tokenizer, thinking_budget, in_reasoning=prompt.in_reasoning
        )
    generation_request = body.generation_request(
        [prompt_tokens],
        default_stop_tokens=server.card.stop_tokens,
        max_new_tokens=max_new_tokens,
        logprobs=logprobs,
        names=names,
        grammar=grammar,
        reasoning_limit=limit,
        **body.token_constraints(server.tokenizer),
    )
    tools = {tool.name: tool.parameters for tool in conversation.callable_tools}
    parsers = [
        OutputParser(server.formats, tools, in_reasoning=prompt.in_reasoning)
        for _ in range(generation_request.n)
    ]
    return generation_request, parsers


def _remaining_tokens(server: Server, num_prompt_tokens: int, names: Mapping[str, str]) -> int:
    """Return the tokens that fit after a prompt. Raises ApiError if there are none."""
    max_length = server.card.max_length
    if max_length is None:
        name = names["max_new_tokens"]
        raise ApiError(400, f"the model has no maximum length: give {name}", param=name)
    if num_prompt_tokens >= max_length:
        raise ApiError(
            400,
            f"the conversation has {num_prompt_tokens} tokens, but the model takes at most "
            f"{max_length}",
            param=names["prompt"],
            code="context_length_exceeded",
        )
    return max_length - num_prompt_tokens


def _check_budget(server: Server) -> None:
    """Raise ApiError if the server cannot limit reasoning."""
    if server.formats.reasoning is None:
        raise ApiError(
            400,
            "thinking: this server does not parse reasoning: start it with "
            "--reasoning-parser, or leave the budget out",
            param="thinking",
        )
    if server.grammars is None:
        raise ApiError(
            400,
            "thinking: a budget needs a model with a text tokenizer and a stop token",
            param="thinking",
        )
