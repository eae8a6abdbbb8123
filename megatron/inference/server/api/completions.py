# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from megatron.inference.server.guided_decoding.request_grammar import (
    compiled_grammar,
    grammar_makers,
)
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.completions import CompletionBody, CompletionFormatter
from megatron.inference.server.serving import Route, Server, text_tokens
from megatron.inference.server.streaming import respond

#: Default `max_tokens` of a completion, as in OpenAI's route.
COMPLETION_TOKENS = 16


async def completions(server: Server, request: Request) -> Response:
    """Answer `POST /v1/completions`."""
    body = await server.read(request, CompletionBody)
    server.check_model(body.model)
    body.check_stream()
    beam_search = body.beam_search_params()
    eod = server.tokenizer.eod
    # An empty text becomes the end-of-document token, as in training.
    empty_prompt = [] if eod is None else [eod]
    max_new_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    texts = await text_tokens(server, body.prompt, add_special_tokens=body.add_special_tokens)
    prompts = [
        body.truncate(tokens or empty_prompt, server.card.max_length, max_new_tokens)
        for tokens in texts
    ]
    grammar = None
    if body.constrains_output:
        grammar = await compiled_grammar(server.grammars, body, grammar_makers(body))
    generation_request = body.generation_request(
        prompts,
        default_stop_tokens=server.card.stop_tokens,
        max_new_tokens=max_new_tokens,
        logprobs=body.logprobs,
        names={"max_new_tokens": "max_tokens"},
        prompt_logprobs=max_new_tokens == 0 or (bool(body.echo) and body.logprobs is not None),
        grammar=grammar,
        **body.token_constraints(server.tokenizer),
    )
    if max_new_tokens == 0 and beam_search is not None:
        raise ApiError(400, "max_tokens is 0: use_beam_search needs at least 1", param="max_tokens")
    generation = server.begin(generation_request, beam_search)
    formatter = CompletionFormatter(
        body,
        generation.usage,
        prompts=prompts,
        model=server.card.name,
        tokenizer=server.tokenizer,
        request_id=request.state.request_id,
    )
    return await respond(request, generation, formatter, server.limits, stream=bool(body.stream))


ROUTES: Sequence[Route] = (("POST", "/v1/completions", completions, CompletionBody),)
