# SPDX-License-Identifier: Apache-2.0
"""OpenAI's chat route `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from megatron.inference.server.chat_serving import begin_answer
from megatron.inference.server.chat_template import Conversation, Tool
from megatron.inference.server.middleware.request_guard import ApiError
from megatron.inference.server.protocol.completions import ChatView
from megatron.inference.server.protocol.generation import ChatBody, NamedChoice
from megatron.inference.server.serving import Server, check_stream_options, respond


async def chat(server: Server, request: Request) -> Response:
    """Answer `POST /v1/chat/completions`."""
    body = await server.read(request, ChatBody)
    server.check_model(body.model)
    check_stream_options(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens are the same limit: give one of them",
            param="max_tokens",
        )
    generation = await begin_answer(
        server,
        _conversation(body),
        body,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=body.top_logprobs,
        names={
            "prompt": "messages",
            "max_new_tokens": "max_completion_tokens" if body.max_tokens is None else "max_tokens",
        },
    )
    view = ChatView(
        server.card.name, server.tokenizer, outputs=body.n or 1, logprobs=bool(body.logprobs)
    )
    return await respond(server, request, body, generation, view)


def _conversation(body: ChatBody) -> Conversation:
    """Return the conversation of a request. Raises ApiError for invalid tools."""
    tools = [tool.function.tool() for tool in body.tools or ()]
    choice, forced_tool = body.tool_choice or "auto", None
    if isinstance(choice, NamedChoice):
        choice, forced_tool = "required", choice.function.name
    check_tools(tools, forced_tool=forced_tool, required=choice == "required")
    if not tools and body.parallel_tool_calls is not None:
        raise ApiError(400, "parallel_tool_calls needs tools", param="parallel_tool_calls")
    return Conversation(
        turns=[message.turn() for message in body.messages],
        tools=tools,
        choice=choice,
        forced_tool=forced_tool,
        parallel=body.parallel_tool_calls is not False,
        variables=body.chat_template_kwargs or {},
    )


def check_tools(tools: Sequence[Tool], *, forced_tool: str | None, required: bool) -> None:
    """Raise ApiError for two tools of the same name, or a choice of a tool that is not listed."""
    names = [tool.name for tool in tools]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ApiError(400, f"tools: two tools have the name {duplicate}", param="tools")
    if forced_tool is not None and forced_tool not in names:
        raise ApiError(400, f"tool_choice: there is no tool {forced_tool}", param="tool_choice")
    if required and not names:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
