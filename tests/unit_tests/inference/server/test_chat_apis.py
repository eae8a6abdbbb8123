# SPDX-License-Identifier: Apache-2.0
"""The chat, responses and messages APIs with the clients of OpenAI and Anthropic: one answer in
three forms, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.http_server import Served, prompt_of, served, until
from tests.support.scripted_model import TEMPLATE, Scripted

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Tells it."}
USER = [{"role": "user", "content": "hi"}]
ANSWER = "<think>\nHm é</think>\n\nWait…\n" + (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ü", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
#: Favours closing characters where the grammar forbids the model's choice.
CLOSING_BIAS = {str(ord(c)): 4 for c in '"}],'}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer in no API's form; `reason` is the API's word for why it ended."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reason: str
    output_tokens: int


class Chat:
    """OpenAI's `/v1/chat/completions`."""

    path, limit = "/v1/chat/completions", "max_tokens"
    body: Mapping[str, Any] = {"model": "next-byte", "messages": USER, "temperature": 0}
    finished, cut, called = "stop", "length", "tool_calls"
    required: Any = "required"
    named: Mapping[str, Any] = {"type": "function", "function": {"name": "weather"}}
    #: The event that ends a call, and the number of its kind in `ANSWER`.
    closing_event = ("tool_calls.function.arguments.done", 2)

    def tool(self, name: str = "weather", **fields: Any) -> dict[str, Any]:
        function = {**WEATHER, "name": name, "parameters": CITY, **fields}
        return {"type": "function", "function": function}

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        shape = {"name": "c", "strict": True, "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": shape}}

    def create(self, server: Served, **fields: Any) -> Any:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return self.request(client, {**self.body, self.limit: 900, **fields})

    def request(self, client: Any, fields: dict[str, Any]) -> Any:
        if not fields.pop("stream", False):
            return client.chat.completions.create(**fields), []
        with client.chat.completions.stream(
            **fields, stream_options={"include_usage": True}
        ) as stream:
            kinds = [event.type for event in stream]
            return stream.get_final_completion(), kinds

    def answer(self, server: Served, **fields: Any) -> tuple[Answer, list[str]]:
        completion, kinds = self.create(server, **fields)
        (choice,) = completion.choices
        calls = choice.message.tool_calls or ()
        answer = Answer(
            reasoning=getattr(choice.message, "reasoning_content", ""),
            text=choice.message.content or "",
            calls=tuple((c.function.name, json.loads(c.function.arguments)) for c in calls),
            reason=choice.finish_reason,
            output_tokens=completion.usage.completion_tokens,
        )
        return answer, kinds

    def turns(self) -> dict[str, Any]:
        """Return fields with a call, its reasoning and its result."""
        function = {"name": "weather", "arguments": '{"city":"U"}'}
        called = {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}
        spoken = {"role": "assistant", "content": "Wait…", "reasoning_content": "Hm é", **called}
        rain = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]}
        return {"messages": [{"role": "system", "content": "Be brief."}, *USER, spoken, rain]}


class Responses(Chat):
    """OpenAI's `/v1/responses`."""

    path, limit = "/v1/responses", "max_output_tokens"
    body: Mapping[str, Any] = {
        "model": "next-byte",
        "input": "hi",
        "temperature": 0,
        "metadata": {"a": "b"},
    }
    finished, cut, called = "completed", "max_output_tokens", "completed"
    named: Mapping[str, Any] = {"type": "function", "name": "weather"}
    closing_event = ("response.output_item.done", 4)

    def tool(self, name: str = "weather", **fields: Any) -> dict[str, Any]:
        tool = {**WEATHER, "type": "function", "name": name, "parameters": CITY, "strict": False}
        return {**tool, **fields}

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        shape = {"type": "json_schema", "name": "c", "strict": True, "schema": schema}
        return {"text": {"format": shape}}

    def request(self, client: Any, fields: dict[str, Any]) -> Any:
        if not fields.pop("stream", False):
            return client.responses.create(**fields), []
        with client.responses.stream(**fields) as stream:
            events = list(stream)
            assert [event.sequence_number for event in events] == list(range(len(events)))
            return stream.get_final_response(), [event.type for event in events]

    def answer(self, server: Served, **fields: Any) -> tuple[Answer, list[str]]:
        response, kinds = self.create(server, **fields)
        assert response.metadata == {"a": "b"}
        items: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
        for item in response.output:
            items[item.type].append(item)
        incomplete = response.incomplete_details
        assert (response.status == "incomplete") == (incomplete is not None)
        answer = Answer(
            reasoning="".join(item.content[0].text for item in items["reasoning"]),
            text=response.output_text,
            calls=tuple((c.name, json.loads(c.arguments)) for c in items["function_call"]),
            reason=response.status if incomplete is None else incomplete.reason,
            output_tokens=response.usage.output_tokens,
        )
        return answer, kinds

    def turns(self) -> dict[str, Any]:
        thought = {"type": "reasoning_text", "text": "Hm é"}
        spoken = {"type": "output_text", "text": "Wait…", "annotations": []}
        called = {"name": "weather", "arguments": '{"city":"U"}', "call_id": "c1"}
        items = [
            *USER,
            {"type": "reasoning", "id": "r1", "summary": [], "content": [thought]},
            {"type": "message", "id": "m1", "role": "assistant", "content": [spoken]},
            {"type": "function_call", **called},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ]
        return {"instructions": "Be brief.", "input": items}


class Messages(Chat):
    """Anthropic's `/v1/messages`."""

    path = "/v1/messages"
    finished, cut, called = "end_turn", "max_tokens", "tool_use"
    required: Mapping[str, Any] = {"type": "any"}
    named: Mapping[str, Any] = {"type": "tool", "name": "weather"}
    closing_event = ("content_block_stop", 4)

    def tool(self, name: str = "weather", **fields: Any) -> dict[str, Any]:
        return {**WEATHER, "name": name, "input_schema": CITY, **fields}

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def create(self, server: Served, **fields: Any) -> Any:
        fields = {**self.body, self.limit: 900, **fields}
        # The client has no argument for `temperature`.
        fields["extra_body"] = {"temperature": fields.pop("temperature")}
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            if not fields.pop("stream", False):
                return client.messages.create(**fields), []
            with client.messages.stream(**fields) as stream:
                kinds = [event.type for event in stream]
                return stream.get_final_message(), kinds

    def answer(self, server: Served, **fields: Any) -> tuple[Answer, list[str]]:
        message, kinds = self.create(server, **fields)
        blocks: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
        for block in message.content:
            blocks[block.type].append(block)
        answer = Answer(
            reasoning="".join(block.thinking for block in blocks["thinking"]),
            text="".join(block.text for block in blocks["text"]),
            calls=tuple((block.name, block.input) for block in blocks["tool_use"]),
            reason=message.stop_reason,
            output_tokens=message.usage.output_tokens,
        )
        return answer, kinds

    def turns(self) -> dict[str, Any]:
        spoken = [
            {"type": "thinking", "thinking": "Hm é", "signature": ""},
            {"type": "text", "text": "Wait…"},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "U"}},
        ]
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
        turns = [{"role": "assistant", "content": spoken}, {"role": "user", "content": [result]}]
        return {"system": "Be brief.", "messages": [*USER, *turns]}


CHAT, RESPONSES, MESSAGES = Chat(), Responses(), Messages()
all_apis = pytest.mark.parametrize(
    "api", [CHAT, RESPONSES, MESSAGES], ids=lambda api: type(api).__name__
)


@pytest.fixture
def server(chat_server: Served) -> Served:
    return chat_server


@all_apis
def test_streamed_answer_equals_the_whole_answer(server: Served, api: Chat) -> None:
    tools = [api.tool(), api.tool("now")]
    server.model.say(ANSWER)
    whole, _ = api.answer(server, tools=tools)
    server.model.say(ANSWER)
    streamed, kinds = api.answer(server, tools=tools, stream=True)
    assert (
        whole
        == streamed
        == Answer(
            reasoning="Hm é",
            text="Wait…",
            calls=(("weather", {"city": "Ü", "days": 2}), ("now", {})),
            reason=api.called,
            output_tokens=len(ANSWER.encode()) + 1,
        )
    )
    kind, count = api.closing_event
    assert kinds.count(kind) == count


@all_apis
def test_reason_says_why_the_answer_ended(server: Served, api: Chat) -> None:
    for fields, reason, text in (({}, api.finished, "one two"), ({api.limit: 3}, api.cut, "one")):
        server.model.say("one two")
        answer, _ = api.answer(server, **fields)
        assert (answer.reason, answer.text) == (reason, text)
    # An incomplete call does not count as a call.
    server.model.say(ANSWER)
    answer, _ = api.answer(server, tools=[api.tool()], **{api.limit: 60})
    assert answer.reason == api.cut


@all_apis
def test_earlier_turns_and_tools_reach_the_template(server: Served, api: Chat) -> None:
    prompt = prompt_of(
        server, api.path, **{**api.body, api.limit: 9, **api.turns()}, tools=[api.tool()]
    )
    assert '"name": "weather", "parameters": {"type": "object"' in prompt
    assert '"description": "Tells it."' in prompt
    called = 'called weather {"city": "U"}'
    assert f"[system Be brief.][user hi][assistant Wait… thought Hm é {called}]" in prompt
    assert prompt.endswith("[tool rain of c1][answer]")


@all_apis
@pytest.mark.parametrize("named", [False, True])
def test_required_calls_follow_their_schemas(server: Served, api: Chat, named: bool) -> None:
    """Without the grammar, the model would generate another text."""
    server.model.say("<think>Hm</think>\nNo, I rather would not.")
    choice = api.named if named else api.required
    answer, _ = api.answer(server, tools=[api.tool()], tool_choice=choice)
    assert (answer.reason, answer.text) == (api.called, "")
    for name, arguments in answer.calls:
        assert name == "weather"
        assert arguments.keys() == {"city", "days"}
        assert len(arguments["city"]) <= 4
        assert arguments["days"] in (1, 2)


@all_apis
@pytest.mark.parametrize("prefix", ["<think>Hm</think>", ""])
def test_json_follows_its_schema_and_reasoning(server: Served, api: Chat, prefix: str) -> None:
    server.model.say(prefix + '{"city": "U", "days": 7}')
    answer, _ = api.answer(server, **api.schema(CITY))
    assert answer.reasoning == ("Hm" if prefix else "")
    assert json.loads(answer.text)["days"] in (1, 2)


@all_apis
def test_error_within_a_stream_is_an_event(
    server: Served, api: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("at 0x7f00")

    monkeypatch.setattr("megatron.inference.server.output_processor.Generation._delta", fails)
    text = server.post(api.path, **api.body, **{api.limit: 9}, stream=True).text
    *event, data = text.strip().split("\n")
    fields = json.loads(data.removeprefix("data: "))
    assert "0x7f00" not in text
    if api is RESPONSES:
        assert (event, fields["response"]["status"]) == (["event: response.failed"], "failed")
    elif api is MESSAGES:
        assert (event, fields["error"]["type"]) == (["event: error"], "api_error")
    else:
        assert (event, fields["error"]["type"]) == ([], "server_error")


# --- chat ----------------------------------------------------------------------------------------


def test_calls_are_text_without_tools(server: Served) -> None:
    for fields in ({}, {"tools": [CHAT.tool()], "tool_choice": "none"}):
        server.model.say(ANSWER)
        answer, _ = CHAT.answer(server, **fields)
        assert (answer.text, answer.calls) == (ANSWER.split("</think>\n\n")[1], ())
        assert answer.reason == "stop"
    tools = {"tools": [CHAT.tool()], "tool_choice": "none"}
    assert "weather" not in prompt_of(server, CHAT.path, **CHAT.body, max_tokens=9, **tools)


def test_chat_tokens_have_logprobs(server: Served) -> None:
    server.model.say(ANSWER)
    completion, _ = CHAT.create(server, logprobs=True, tools=[CHAT.tool()])
    assert len(completion.choices[0].logprobs.content) == len(ANSWER.encode()) + 1


def test_only_strict_tools_enforce_their_schema(server: Served) -> None:
    for strict in (False, True):
        server.model.say(
            'Wait. <tool_call>\n{"name": "weather", "arguments": {"town": []}}\n</tool_call>'
        )
        tools = [CHAT.tool(strict=strict)]
        answer, _ = CHAT.answer(server, tools=tools, logit_bias=CLOSING_BIAS)
        ((_, arguments),) = answer.calls
        assert answer.text == "Wait."
        assert (arguments.keys() == {"city", "days"}) == strict


def test_template_variable_begins_the_reasoning(server: Served) -> None:
    fields = {**CHAT.body, "max_tokens": 9, "chat_template_kwargs": {"enable_thinking": True}}
    assert prompt_of(server, CHAT.path, **fields).endswith("[answer]<think>\n")
    server.model.say("Hm</think>\nYes")
    message = server.ok(CHAT.path, **{**fields, "max_tokens": 90})["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes")


def test_truncated_argument_is_closed_only_at_a_normal_end() -> None:
    """A truncated value must not look complete."""
    cut = "<function=weather>\n<parameter=days>\n2\n</parameter>\n<parameter=city>\nUlm"
    with served(
        Scripted(),
        template={"source": TEMPLATE, "name": "shows all"},
        formats={"tools": "qwen3_coder", "reasoning": None},
    ) as server:
        for fields in ({}, {"max_tokens": len(cut)}, {"stop": "lm"}):
            server.model.say(cut)
            request = {**CHAT.body, "max_tokens": 900, "tools": [CHAT.tool()], **fields}
            (choice,) = server.ok(CHAT.path, **request)["choices"]
            (call,) = choice["message"]["tool_calls"]
            text = '{"days": 2, "city": "U' + ("" if "stop" in fields else "lm")
            assert call["function"]["arguments"] == text + ("" if fields else '"}')


# --- responses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_output_tokens", [300, 30, 12])
def test_events_validate_against_openais_schema(server: Served, max_output_tokens: int) -> None:
    """The client validates nothing: a missing field of an event fails only when it is read."""
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    fields = {**RESPONSES.body, "tools": [RESPONSES.tool()], "max_output_tokens": max_output_tokens}
    server.model.say(ANSWER)
    response = server.ok(RESPONSES.path, **fields)
    assert Response.model_validate(response).status in ("completed", "incomplete")
    server.model.say(ANSWER)
    lines = server.post(RESPONSES.path, **fields, stream=True).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    for event in events:
        assert event_type.validate_python(event).type == event["type"]
    texts = {f"response.output_text.{end}" for end in ("delta", "done") if max_output_tokens > 12}
    assert {event["type"] for event in events if event.get("logprobs") == []} == texts
    assert {event["type"] for event in events if "logprobs" in event} == texts
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    assert "response.reasoning_text.delta" in kinds


def test_running_response_is_cancelled(server: Served, client: openai.OpenAI) -> None:
    server.model.say("a" * 4000)
    stream = client.responses.create(**RESPONSES.body, max_output_tokens=4000, stream=True)
    name = next(stream).response.id
    before = server.engine.stats.steps
    assert client.responses.cancel(name).status == "cancelled"
    assert list(stream)[-1].response.status == "cancelled"
    until(lambda: server.engine.unfinished == 0)
    assert server.engine.stats.steps < before + 3900
    for response_id in (name, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel(response_id)


# --- messages ------------------------------------------------------------------------------------


def test_stop_sequence_is_named(server: Served) -> None:
    server.model.say("one two")
    message, _ = MESSAGES.create(server, stop_sequences=["tw"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "tw")
    assert message.content[0].text == "one "


def test_counted_tokens_are_the_tokens_used(server: Served) -> None:
    fields = {"tools": [MESSAGES.tool()], "messages": [{"role": "user", "content": "q" * 64}]}
    server.model.say("ok")
    MESSAGES.create(server, **fields)  # leaves its prompt in the prefix cache
    server.model.say("ok")
    usage = MESSAGES.create(server, **fields)[0].usage
    assert usage.cache_read_input_tokens > 0
    counted = server.ok(f"{MESSAGES.path}/count_tokens", model="next-byte", **fields)
    assert counted["input_tokens"] == usage.input_tokens + usage.cache_read_input_tokens


def test_thinking_and_error_results_reach_the_template(server: Served) -> None:
    turns = MESSAGES.turns()["messages"]
    turns[-1]["content"][0]["is_error"] = True
    turns[-1]["content"].append({"type": "text", "text": "so?"})
    fields = {**MESSAGES.body, "messages": turns, "max_tokens": 9, "thinking": {"type": "adaptive"}}
    prompt = prompt_of(server, MESSAGES.path, **fields, tools=[MESSAGES.tool()])
    assert prompt.endswith("[tool Error: rain of c1][user so?][answer]<think>\n")


def test_arguments_that_are_not_json_are_returned_unparsed(server: Served) -> None:
    server.model.say('<tool_call>{"name": "weather", "arguments": {oops}}</tool_call>')
    answer, _ = MESSAGES.answer(server, tools=[MESSAGES.tool()])
    assert answer.calls == (("weather", {"unparsed": "{oops}"}),)


def test_other_errors_have_anthropics_error_shape() -> None:
    with served(key="secret") as server:
        server.http.headers["x-api-key"] = "secret"
        fields = {**MESSAGES.body, "max_tokens": 9}
        for response, status, kind in (
            (server.post(MESSAGES.path, **{**fields, "model": "other"}), 404, "not_found_error"),
            (server.http.post(MESSAGES.path, content=b"a" * 200_000), 413, "request_too_large"),
            (
                server.http.post(MESSAGES.path, headers={"x-api-key": "wrong"}),
                401,
                "authentication_error",
            ),
            (server.http.get(MESSAGES.path), 405, "invalid_request_error"),
        ):
            assert response.status_code == status
            body = response.json()
            assert (body["type"], body["error"]["type"]) == ("error", kind)
            assert body["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("begun_by_prompt", [False, True], ids=["by the model", "by the prompt"])
def test_reasoning_ends_at_its_budget(begun_by_prompt: bool) -> None:
    """The budget ends the reasoning of a model that would continue, after completing the current
    character. The scripted text continues after the mark that closes the reasoning."""
    end, budget = "</think>", len(b"abcdefg ") + 1
    script = ("" if begun_by_prompt else "<think>") + "abcdefg é" + "#" * len(end) + '\n{"a": 1}'
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    shape = MESSAGES.schema({**schema, "additionalProperties": False})
    source = TEMPLATE if begun_by_prompt else TEMPLATE.replace("enable_thinking", "false")
    with served(
        Scripted(),
        template={"source": source, "name": "shows all"},
        formats={"tools": None, "reasoning": "qwen3"},
    ) as server:
        for fields in ({}, shape):
            before = server.engine.stats.forced
            server.model.say(script)
            thinking = {"type": "enabled", "budget_tokens": budget}
            answer, _ = MESSAGES.answer(server, **fields, thinking=thinking)
            assert (answer.reasoning, answer.text) == ("abcdefg é", '{"a": 1}')
            assert server.engine.stats.forced >= before + len(end)
            # An answer that ends its reasoning within the budget is unchanged.
            server.model.say(script.replace("#" * len(end), end))
            thinking["budget_tokens"] = 200
            assert MESSAGES.answer(server, **fields, thinking=thinking)[0] == answer
