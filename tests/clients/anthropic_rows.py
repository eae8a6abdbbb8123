# SPDX-License-Identifier: Apache-2.0
"""Rows of Anthropic's client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.clients.conftest import NAME, Clients
from tests.clients.matrix import ANSWER, CALL, TEXT, THOUGHT, Row
from tests.clients.openai_rows import CITY, ULM, USER, WEATHER, Weather

TOOL: dict[str, Any] = {"name": "weather", "description": "Weather.", "input_schema": CITY}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def create(c: Clients, **fields: Any) -> Any:
    """Return a message."""
    fields = {"max_tokens": 100, "messages": [USER], **fields}
    return c.anthropic.messages.create(model=NAME, **fields)


def text_of(message: Any) -> str:
    """Return the joined texts of a message."""
    return "".join(block.text for block in message.content if block.type == "text")


def call_of(message: Any) -> tuple[str, str, Any]:
    """Return why a message has ended, and the name and the input of its last call."""
    return message.stop_reason, message.content[-1].name, message.content[-1].input


def stream_helper(c: Clients, **fields: Any) -> tuple[str, Any]:
    """Return the text of the helper's stream, and its final message."""
    with c.anthropic.messages.stream(
        model=NAME, max_tokens=100, messages=[USER], **fields
    ) as stream:
        text = "".join(stream.text_stream)
        return text, stream.get_final_message()


def tool_loop(c: Clients) -> str:
    """Return the answer after a call, with the blocks of the answer sent back."""
    message = create(c, tools=[TOOL])
    tool_result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "rain"}
    messages = [USER, {"role": "assistant", "content": message.content}]
    messages += [{"role": "user", "content": [tool_result, {"type": "text", "text": "So?"}]}]
    return text_of(create(c, tools=[TOOL], messages=messages))


def tool_runner(c: Clients) -> list[str]:
    """Return why the messages of the tool runner have ended."""
    import anthropic

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"rain in {city}"

    runner = c.anthropic.beta.messages.tool_runner(
        model=NAME, max_tokens=100, tools=[weather], messages=[USER]
    )
    return [message.stop_reason for message in runner]


async def async_create(c: Clients) -> tuple[str, str]:
    """Return an answer and a streamed answer of the asynchronous client."""
    fields: dict[str, Any] = {"model": NAME, "max_tokens": 100, "messages": [USER]}
    async with c.async_anthropic() as client:
        answer = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            return text_of(answer), await stream.get_final_text()


ROWS = (
    Row("messages.create", lambda c: text_of(create(c, system="Be brief."))),
    Row("messages: temperature, top_p, top_k, stop_sequences", lambda c: (
        (m := create(c, stop_sequences=[" in"], extra_body={
            "temperature": 0.5, "top_p": 0.9, "top_k": 5})).stop_reason,
        m.stop_sequence, text_of(m)), output=("stop_sequence", " in", "It rains")),
    Row("messages: stream=True", lambda c: [
        e.type for e in create(c, stream=True)][-2:], output=["message_delta", "message_stop"]),
    Row("messages.stream", lambda c: stream_helper(c)[0]),
    Row("messages.stream with tools", lambda c: call_of(stream_helper(c, tools=[TOOL])[1]),
        (CALL,), ("tool_use", "weather", ULM)),
    Row("messages.parse", lambda c: c.anthropic.messages.parse(
        model=NAME, max_tokens=100, messages=[USER], output_format=Weather).parsed_output,
        (ANSWER,), WEATHER),
    Row("messages: output_config.format", lambda c: json.loads(text_of(create(c, output_config={
        "format": {"type": "json_schema", "schema": {"type": "object"}}}))),
        (ANSWER,), WEATHER.model_dump()),
    Row("messages: tools", lambda c: call_of(create(c, tools=[TOOL])), (CALL,),
        ("tool_use", "weather", ULM)),
    Row("messages: tool_choice any, disable_parallel_tool_use", lambda c: call_of(create(
        c, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})),
        (CALL,), ("tool_use", "weather", ULM)),
    Row("messages: tool_choice tool", lambda c: call_of(create(
        c, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})), (CALL,),
        ("tool_use", "weather", ULM)),
    Row("messages: tool loop with thinking", tool_loop, (THOUGHT + CALL, TEXT)),
    Row("beta.messages.tool_runner", tool_runner, (CALL, TEXT), ["tool_use", "end_turn"]),
    Row("messages: thinking enabled", lambda c: [b.type for b in create(
        c, thinking={"type": "enabled", "budget_tokens": 50}).content], (THOUGHT + TEXT,),
        ["thinking", "text"]),
    Row("messages: prefill", lambda c: text_of(create(
        c, messages=[USER, {"role": "assistant", "content": "The answer is"}]))),
    Row("messages: cache_control", lambda c: text_of(create(
        c, system=[{"type": "text", "text": "Be brief.", **CACHED}], tools=[{**TOOL, **CACHED}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]}],
        cache_control={"type": "ephemeral"}))),
    Row("messages.count_tokens", lambda c: c.anthropic.messages.count_tokens(
        model=NAME, messages=[{"role": "user", "content": "hi"}]).input_tokens,
        output=len("[user hi][answer]")),
    Row("beta.messages.create with betas", lambda c: text_of(c.anthropic.beta.messages.create(
        model=NAME, max_tokens=100, messages=[USER], betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}))),
    Row("AsyncAnthropic: create, stream", lambda c: asyncio.run(async_create(c)), (TEXT, TEXT),
        (TEXT, TEXT)),
    Row("models.list", lambda c: [m.id for m in c.anthropic.models.list()], output=[NAME]),
    Row("messages: image", lambda c: create(c, messages=[{"role": "user", "content": [IMAGE]}]),
        refused="image"),
    Row("messages: web_search tool", lambda c: create(
        c, tools=[{"type": "web_search_20250305", "name": "web_search"}]), refused="web_search"),
    Row("messages: mcp_servers", lambda c: c.anthropic.beta.messages.create(
        model=NAME, max_tokens=9, messages=[USER],
        mcp_servers=[{"type": "url", "name": "m", "url": "https://example.org"}]),
        refused="mcp_servers"),
)  # fmt: skip
