# SPDX-License-Identifier: Apache-2.0
"""Conversations and tool loops of the official clients, as their documentation writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.http_server import Served, error_of, prompt_of

NAME = "next-byte"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
RAIN = "It rains in Ulm."
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LIMIT = {"/v1/chat/completions": {"max_tokens": 60}, "/v1/responses": {"max_output_tokens": 60}}
QUESTION = {"role": "user", "content": "How is the weather in Ulm?"}


@pytest.fixture
def server(chat_server: Served) -> Served:
    """A server that calls tools and reasons; `say` sets its next answer."""
    return chat_server


@pytest.fixture
def openai_client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def get_weather(server: Served, city: str) -> str:
    """Return the weather; the next answer of the model repeats it."""
    server.model.say(RAIN)
    return f"rain in {city}"


def test_chat_messages_of_the_client_are_sent_back(
    server: Served, openai_client: openai.OpenAI
) -> None:
    messages: list[Any] = [QUESTION]
    server.model.say("<think>\nhm\n</think>\nWhich Ulm?")
    for _ in range(2):
        answer = openai_client.chat.completions.create(
            model=NAME, messages=messages, temperature=0, store=False, user="u"
        )
        messages.append(answer.choices[0].message.model_dump())
        messages.append({"role": "user", "content": "The one on the Danube."})
        server.model.say(RAIN)
    assert messages[1]["content"] == "Which Ulm?"
    assert messages[3]["content"] == RAIN


@pytest.mark.parametrize("as_dict", [True, False])
def test_chat_tool_loop(server: Served, openai_client: openai.OpenAI, *, as_dict: bool) -> None:
    function = {"name": "get_weather", "description": "Weather of a city.", "parameters": CITY}
    messages: list[Any] = [QUESTION]
    server.model.say(CALL)
    while True:
        answer = openai_client.chat.completions.create(
            model=NAME,
            messages=messages,
            tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
            temperature=0,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump() if as_dict else message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            weather = get_weather(server, **json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather})
    assert message.content == RAIN
    assert len(messages) == 4


@pytest.mark.parametrize("as_dict", [True, False])
def test_responses_tool_loop(
    server: Served, openai_client: openai.OpenAI, *, as_dict: bool
) -> None:
    tools: list[Any] = [{"type": "function", "name": "get_weather", "parameters": CITY}]
    inputs: list[Any] = [QUESTION]
    server.model.say(f"<think>\nI call it.\n</think>\n{CALL}")
    while True:
        response = openai_client.responses.create(
            model=NAME,
            input=inputs,
            tools=tools,
            temperature=0,
            include=[],
            reasoning={"summary": "auto"},
            truncation="auto",
        )
        inputs += [output.model_dump() if as_dict else output for output in response.output]
        calls = [output for output in response.output if output.type == "function_call"]
        if not calls:
            break
        for call in calls:
            weather = get_weather(server, **json.loads(call.arguments))
            inputs.append({"type": "function_call_output", "call_id": call.call_id})
            inputs[-1]["output"] = weather
    assert response.output_text == RAIN


def test_anthropic_tool_runner(server: Served) -> None:
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city.

        Args:
            city: name of the city.
        """
        return get_weather(server, city)

    server.model.say(CALL.replace("get_weather", "weather"))
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model=NAME,
            max_tokens=200,
            tools=[weather],
            messages=[QUESTION],  # type: ignore[list-item]
            extra_body={"temperature": 0},
        )
        messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert messages[-1].content[0].text == RAIN  # type: ignore[union-attr]


def test_anthropic_conversation_with_cache_control(server: Served) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi", **cached}]}]
    server.model.say("<think>\nhm\n</think>\nhello")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        for _ in range(2):
            answer = client.messages.create(
                model=NAME,
                max_tokens=100,
                system=[{"type": "text", "text": "Be brief.", **cached}],  # type: ignore[list-item]
                messages=messages,
                thinking={"type": "adaptive"},
                metadata={"user_id": "u"},
                extra_body={"temperature": 0},
            )
            messages += [{"role": "assistant", "content": answer.content}]
            messages += [{"role": "user", "content": "again"}]
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert len(messages) == 5


def test_answer_ends_where_the_context_ends(server: Served) -> None:
    """Anthropic's clients need no tokenizer to ask for all tokens that fit."""
    body = {"model": NAME, "messages": [QUESTION], "temperature": 0}
    for script, limit, reason in (
        (RAIN, 128_000, "end_turn"),
        ("a" * 6000, 128_000, "model_context_window_exceeded"),
        ("a" * 6000, 9, "max_tokens"),
    ):
        server.model.say(script)
        answer = server.ok("/v1/messages", max_tokens=limit, **body)
        assert answer["stop_reason"] == reason
        if reason == "model_context_window_exceeded":
            assert sum(answer["usage"].values()) == 5000


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_only_allowed_tools_are_called(server: Served, route: str, mode: str) -> None:
    tools = [{"name": name, "parameters": CITY} for name in ("get_weather", "get_time")]
    chosen: dict[str, Any] = {"mode": mode}
    if route == "/v1/responses":
        body: dict[str, Any] = {"input": "hi"}
        body["tools"] = [{"type": "function", **tool} for tool in tools]
        chosen["tools"] = [{"type": "function", "name": "get_time"}]
        body["tool_choice"] = {"type": "allowed_tools", **chosen}
    else:
        body = {"messages": [QUESTION]}
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        chosen["tools"] = [{"type": "function", "function": {"name": "get_time"}}]
        body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": chosen}
    # The prompt lists all tools, so that its prefix stays in the cache.
    prompt = prompt_of(server, route, **body, **({} if mode == "auto" else LIMIT[route]))
    assert "get_weather" in prompt
    server.model.say(CALL)
    answer = json.dumps(server.ok(route, temperature=0, **body))
    called = '"name": "get_weather", "arg' in answer.replace("\\", "")
    if mode == "auto":  # the call of a tool that is not allowed stays in the text
        assert "<tool_call>" in answer
    else:
        assert "<tool_call>" not in answer
        assert not called
    chosen["tools"][0].get("function", chosen["tools"][0])["name"] = "get_date"
    error = error_of(server.post(route, **body))
    assert error["param"] == "tool_choice"
    assert "get_date" in error["message"]


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "custom", "name": "a"}])
def test_type_that_is_not_served_is_in_the_error(server: Served, tool: dict[str, Any]) -> None:
    error = error_of(server.post("/v1/responses", input="hi", tools=[tool]))
    assert error["message"].startswith("tools.0.type")
    assert tool["type"] in error["message"]
