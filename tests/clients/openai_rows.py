# SPDX-License-Identifier: Apache-2.0
"""Rows of OpenAI's client: chats, responses, completions and embeddings."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pydantic import BaseModel

from tests.clients.conftest import NAME, Clients
from tests.clients.matrix import ANSWER, CALL, TEXT, THOUGHT, Row

USER: dict[str, Any] = {"role": "user", "content": "How is the weather in Ulm?"}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city.", "parameters": CITY},
}
STRICT_TOOL = {**TOOL, "function": {**TOOL["function"], "strict": True}}
RESPONSE_TOOL = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
ULM = {"city": "Ulm"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


class weather(BaseModel):  # the name of the tool
    """Weather of a city."""

    city: str


WEATHER = Weather(city="Ulm", degrees=7)


def chat(c: Clients, **fields: Any) -> Any:
    """Return the first choice of a chat completion."""
    return c.openai.chat.completions.create(
        **{"model": NAME, "messages": [USER], **fields}
    ).choices[0]


def call_of(choice: Any) -> tuple[str, str, Any]:
    """Return why a choice has ended, and the name and the arguments of its call."""
    (call,) = choice.message.tool_calls
    return choice.finish_reason, call.function.name, json.loads(call.function.arguments)


def streamed(c: Clients, **fields: Any) -> tuple[str, int]:
    """Return the text of a stream and the tokens of the usage in its last chunk."""
    chunks = list(
        c.openai.chat.completions.create(
            model=NAME,
            messages=[USER],
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
    )
    text = "".join(x.choices[0].delta.content or "" for x in chunks if x.choices)
    return text, chunks[-1].usage.completion_tokens


def stream_helper(c: Clients) -> tuple[str, Any]:
    """Return an event's type and the parsed message of the stream helper."""
    with c.openai.chat.completions.stream(
        model=NAME, messages=[USER], response_format=Weather
    ) as stream:
        kinds = [event.type for event in stream]
    return kinds[-1], stream.get_final_completion().choices[0].message.parsed


def streamed_call(c: Clients) -> Any:
    """Return the parsed arguments of a call that the stream helper joins."""
    import openai

    with c.openai.chat.completions.stream(
        model=NAME, messages=[USER], tools=[openai.pydantic_function_tool(weather)]
    ) as stream:
        stream.until_done()
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    return call.function.parsed_arguments


def tool_loop(c: Clients) -> str:
    """Return the answer after a tool call, whose message object is sent back."""
    choice = chat(c, tools=[TOOL])
    (call,) = choice.message.tool_calls
    tool_message = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    return chat(c, tools=[TOOL], messages=[USER, choice.message, tool_message]).message.content


def parsed_tool(c: Clients) -> Any:
    """Return the arguments of a call that `parse` parses."""
    import openai

    completion = c.openai.chat.completions.parse(
        model=NAME, messages=[USER], tools=[openai.pydantic_function_tool(weather)]
    )
    return completion.choices[0].message.tool_calls[0].function.parsed_arguments


async def async_chat(c: Clients) -> tuple[str, str]:
    """Return an answer and a streamed answer of the asynchronous client."""
    async with c.async_openai() as client:
        answer = await client.chat.completions.create(model=NAME, messages=[USER])
        chunks = await client.chat.completions.create(model=NAME, messages=[USER], stream=True)
        texts = [x.choices[0].delta.content or "" async for x in chunks if x.choices]
    return answer.choices[0].message.content, "".join(texts)


def respond(c: Clients, **fields: Any) -> Any:
    """Return a response."""
    return c.openai.responses.create(**{"model": NAME, "input": "hi", **fields})


def response_events(c: Clients) -> tuple[str, str]:
    """Return the text of the stream's deltas and the type of its last event."""
    events = list(respond(c, stream=True))
    deltas = [x.delta for x in events if x.type == "response.output_text.delta"]
    return "".join(deltas), events[-1].type


def response_stream(c: Clients) -> Any:
    """Return the parsed output of the helper of streamed responses."""
    with c.openai.responses.stream(model=NAME, input="hi", text_format=Weather) as stream:
        for _ in stream:
            pass
        return stream.get_final_response().output_parsed


def response_call(c: Clients, **fields: Any) -> tuple[str, Any]:
    """Return the name and the arguments of a response's call."""
    (call,) = respond(c, tools=[RESPONSE_TOOL], **fields).output
    return call.name, json.loads(call.arguments)


def response_loop(c: Clients) -> str:
    """Return the answer after a call, with the items of the output sent back."""
    items: list[Any] = [USER]
    items += (response := respond(c, input=items, tools=[RESPONSE_TOOL])).output
    call = next(output for output in response.output if output.type == "function_call")
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    return respond(c, input=items, tools=[RESPONSE_TOOL]).output_text


def complete(c: Clients, **fields: Any) -> Any:
    """Return the choices of a completion by the model that counts."""
    fields = {"prompt": "a", "max_tokens": 3, **fields}
    return c.counting_openai.completions.create(model=NAME, **fields).choices


ROWS = (
    Row("chat.completions.create", lambda c: chat(c).message.content),
    Row("chat: developer message, content parts",
        lambda c: chat(c, messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ]).message.content),
    Row("chat: max_completion_tokens",
        lambda c: (chat(c, max_completion_tokens=2).message.content,
                   chat(c, max_completion_tokens=2).finish_reason), output=("It", "length")),
    Row("chat: stop", lambda c: chat(c, stop=[" in"]).message.content, output="It rains"),
    Row("chat: seed, user, metadata, service_tier",
        lambda c: chat(c, seed=1, user="u", metadata={"a": "b"}, service_tier="auto")
        .message.content),
    Row("chat: logprobs, top_logprobs",
        lambda c: [t.token for t in chat(c, logprobs=True, top_logprobs=2).logprobs.content[:2]],
        output=["I", "t"]),
    Row("chat: n=2", lambda c: len(c.counting_openai.chat.completions.create(
        model=NAME, messages=[USER], n=2, max_tokens=3).choices), output=2),
    Row("chat: stream, include_usage", streamed, output=(TEXT, len(TEXT) + 1)),
    Row("chat: reasoning of the model", lambda c: chat(c).message.reasoning_content,
        (THOUGHT + TEXT,), "hm"),
    Row("chat.completions.parse", lambda c: c.openai.chat.completions.parse(
        model=NAME, messages=[USER], response_format=Weather).choices[0].message.parsed,
        (ANSWER,), WEATHER),
    Row("chat: response_format json_object",
        lambda c: json.loads(chat(c, response_format={"type": "json_object"}).message.content),
        (ANSWER,), WEATHER.model_dump()),
    Row("chat.completions.stream with response_format", stream_helper, (ANSWER,),
        ("content.done", WEATHER)),
    Row("chat: tools", lambda c: call_of(chat(c, tools=[TOOL])), (CALL,),
        ("tool_calls", "weather", ULM)),
    Row("chat: tools, strict", lambda c: call_of(chat(c, tools=[STRICT_TOOL])), (CALL,),
        ("tool_calls", "weather", ULM)),
    Row("chat: tool_choice required", lambda c: call_of(
        chat(c, tools=[TOOL], tool_choice="required")), (CALL,), ("tool_calls", "weather", ULM)),
    Row("chat: tool_choice, a named function", lambda c: call_of(chat(c, tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}})), (CALL,),
        ("tool_calls", "weather", ULM)),
    Row("chat: tool_choice allowed_tools", lambda c: call_of(chat(c, tools=[TOOL], tool_choice={
        "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "weather"}}]}})), (CALL,),
        ("tool_calls", "weather", ULM)),
    Row("chat.completions.parse with pydantic_function_tool", parsed_tool, (CALL,),
        weather(city="Ulm")),
    Row("chat.completions.stream with tools", streamed_call, (CALL,), weather(city="Ulm")),
    Row("chat: tool loop", tool_loop, (CALL, TEXT)),
    Row("AsyncOpenAI: chat, stream", lambda c: asyncio.run(async_chat(c)), (TEXT, TEXT),
        (TEXT, TEXT)),
    Row("chat: image_url", lambda c: chat(c, messages=[{"role": "user", "content": [IMAGE]}]),
        refused="image_url"),
    Row("chat: modalities audio", lambda c: chat(c, modalities=["text", "audio"]),
        refused="modalities"),
    Row("chat: functions", lambda c: chat(c, functions=[TOOL["function"]]), refused="use tools"),
    Row("chat: custom tool", lambda c: chat(c, tools=[{"type": "custom", "custom": {"name": "c"}}]),
        refused="custom"),
    Row("chat: store", lambda c: chat(c, store=True), refused="store"),
    Row("responses.create", lambda c: respond(c, instructions="Be brief.").output_text),
    Row("responses: stream", response_events, output=(TEXT, "response.completed")),
    Row("responses: reasoning, include, truncation", lambda c: respond(
        c, reasoning={"effort": "low", "summary": "auto"}, truncation="auto",
        include=["reasoning.encrypted_content"]).output_text, (THOUGHT + TEXT,)),
    Row("responses.parse", lambda c: c.openai.responses.parse(
        model=NAME, input="hi", text_format=Weather).output_parsed, (ANSWER,), WEATHER),
    Row("responses.stream with text_format", response_stream, (ANSWER,), WEATHER),
    Row("responses: tools", response_call, (CALL,), ("weather", ULM)),
    Row("responses: tool_choice allowed_tools", lambda c: response_call(c, tool_choice={
        "type": "allowed_tools", "mode": "required",
        "tools": [{"type": "function", "name": "weather"}]}), (CALL,), ("weather", ULM)),
    Row("responses: tool loop with reasoning", response_loop, (THOUGHT + CALL, TEXT)),
    Row("responses: previous_response_id", lambda c: respond(c, previous_response_id="resp_1"),
        refused="previous_response_id"),
    Row("responses: store", lambda c: respond(c, store=True), refused="store"),
    Row("responses: background", lambda c: respond(c, background=True), refused="background"),
    Row("responses: web_search", lambda c: respond(c, tools=[{"type": "web_search"}]),
        refused="web_search"),
    Row("completions.create", lambda c: complete(c)[0].text, output="bcd"),
    Row("completions: list of prompts, token ids",
        lambda c: [x.text for p in (["a", "x"], [[97], [120]]) for x in complete(c, prompt=p)],
        output=["bcd", "yz{"] * 2),
    Row("completions: stream", lambda c: "".join(
        x.choices[0].text for x in c.counting_openai.completions.create(
            model=NAME, prompt="a", max_tokens=3, stream=True)), output="bcd"),
    Row("completions: echo, logprobs, max_tokens 0", lambda c: complete(
        c, prompt="abc", echo=True, logprobs=1, max_tokens=0)[0].logprobs.tokens,
        output=["a", "b", "c"]),
    Row("completions: suffix", lambda c: complete(c, suffix="z"), refused="suffix"),
    Row("embeddings.create", lambda c: c.openai.embeddings.create(
        model=NAME, input=["a", "b"]).data[1].embedding, output=[1.0, 0.0]),
    Row("embeddings: dimensions", lambda c: c.openai.embeddings.create(
        model=NAME, input="a", dimensions=1), refused="dimensions"),
    Row("models.list, models.retrieve", lambda c: (
        [m.id for m in c.openai.models.list()], c.openai.models.retrieve(NAME).id),
        output=([NAME], NAME)),
)  # fmt: skip
