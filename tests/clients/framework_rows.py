# SPDX-License-Identifier: Apache-2.0
"""Rows of LangChain, LiteLLM and Instructor, which call the routes through other clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from tests.clients.conftest import NAME, Clients
from tests.clients.matrix import ANSWER, CALL, TEXT, THOUGHT, Row
from tests.clients.openai_rows import TOOL, ULM, USER, WEATHER, Weather, weather

WEATHER_CALL = '<tool_call>\n{"name": "Weather", "arguments": ' + ANSWER + "}\n</tool_call>"
CACHED = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}


def bind_tools_loop(c: Clients) -> tuple[Any, str]:
    """Return the arguments of a call and the answer to its result."""
    from langchain_core.messages import HumanMessage, ToolMessage

    model = c.langchain().bind_tools([weather])
    messages: list[Any] = [HumanMessage("How is the weather in Ulm?")]
    messages.append(message := model.invoke(messages))
    (call,) = message.tool_calls
    messages.append(ToolMessage("rain", tool_call_id=call["id"]))
    return call["args"], model.invoke(messages).content


def structured(c: Clients, method: str, **options: Any) -> Any:
    """Return LangChain's structured output."""
    return c.langchain().with_structured_output(Weather, method=method, **options).invoke("hi")


def langchain_stream(c: Clients) -> tuple[str, int]:
    """Return the joined stream of LangChain, and its usage."""
    from functools import reduce

    whole = reduce(lambda a, b: a + b, c.langchain(stream_usage=True).stream("hi"))
    return whole.content, whole.usage_metadata["output_tokens"]


def langchain_embeddings(c: Clients) -> list[float]:
    """Return an embedding of LangChain."""
    from langchain_openai import OpenAIEmbeddings

    # Without this option LangChain sends token ids of OpenAI's tokenizer.
    embeddings = OpenAIEmbeddings(
        model=NAME,
        base_url=f"{c.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,
    )
    return embeddings.embed_documents(["a", "b"])[1]


LANGCHAIN = (
    Row("ChatOpenAI.invoke", lambda c: c.langchain().invoke("hi").content),
    Row("ChatOpenAI: temperature, seed, max_tokens, stop", lambda c: c.langchain(
        temperature=0, seed=1, max_tokens=50).invoke("hi", stop=[" in"]).content,
        output="It rains"),
    Row("ChatOpenAI.stream with stream_usage", langchain_stream, output=(TEXT, len(TEXT) + 1)),
    Row("ChatOpenAI.ainvoke", lambda c: asyncio.run(c.langchain().ainvoke("hi")).content),
    Row("ChatOpenAI.batch", lambda c: [m.content for m in c.langchain().batch(
        ["a", "b"], {"max_concurrency": 1})], output=[TEXT, TEXT]),
    Row("bind_tools, ToolMessage", bind_tools_loop, (CALL, TEXT), (ULM, TEXT)),
    Row("bind_tools with tool_choice any", lambda c: c.langchain().bind_tools(
        [weather], tool_choice="any").invoke("hi").tool_calls[0]["args"], (CALL,), ULM),
    Row("bind_tools with strict, parallel_tool_calls", lambda c: c.langchain().bind_tools(
        [weather], strict=True, parallel_tool_calls=False).invoke("hi").tool_calls[0]["args"],
        (CALL,), ULM),
    Row("with_structured_output json_schema", lambda c: structured(c, "json_schema"),
        (ANSWER,), WEATHER),
    Row("with_structured_output json_schema, strict",
        lambda c: structured(c, "json_schema", strict=True), (ANSWER,), WEATHER),
    Row("with_structured_output json_mode", lambda c: structured(c, "json_mode"),
        (ANSWER,), WEATHER),
    Row("with_structured_output function_calling", lambda c: structured(c, "function_calling"),
        (WEATHER_CALL,), WEATHER),
    Row("ChatOpenAI: use_responses_api", lambda c: c.langchain(
        use_responses_api=True).invoke("hi").text),
    Row("ChatOpenAI: use_responses_api, stream, tools", lambda c: [
        call["args"] for call in __import__("functools").reduce(lambda a, b: a + b, c.langchain(
            use_responses_api=True).bind_tools([weather]).stream("hi")).tool_calls],
        (CALL,), [ULM]),
    Row("ChatOpenAI: logprobs", lambda c: c.langchain(logprobs=True, top_logprobs=2).invoke(
        "hi").response_metadata["logprobs"]["content"][0]["token"], output="I"),
    Row("OpenAIEmbeddings.embed_documents", langchain_embeddings, output=[1.0, 0.0]),
)  # fmt: skip


def completion(c: Clients, provider: str, **fields: Any) -> Any:
    """Return the first choice of LiteLLM's completion."""
    return c.litellm(provider, **{"messages": [USER], **fields}).choices[0]


def litellm_call(c: Clients, provider: str, **fields: Any) -> tuple[str, Any]:
    """Return why a completion with a tool has ended, and the arguments of the call."""
    choice = completion(c, provider, tools=[TOOL], **fields)
    return choice.finish_reason, json.loads(choice.message.tool_calls[0].function.arguments)


def litellm_stream(c: Clients, provider: str, **fields: Any) -> str:
    """Return the text of LiteLLM's stream."""
    chunks = c.litellm(provider, messages=[USER], stream=True, **fields)
    return "".join(x.choices[0].delta.content or "" for x in chunks if x.choices)


def litellm_loop(c: Clients, provider: str) -> str:
    """Return the answer after a call, with LiteLLM's message sent back."""
    message = completion(c, provider, tools=[TOOL]).message
    tool_message = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    return completion(
        c, provider, messages=[USER, message, tool_message], tools=[TOOL]
    ).message.content


_CACHED = [{"role": "system", "content": [CACHED]}, {"role": "user", "content": [CACHED]}]


def _provider_rows(provider: str) -> tuple[Row, ...]:
    """Return the rows of a provider's path."""
    return (
        Row(f"{provider}/: completion", lambda c: completion(c, provider).message.content),
        Row(f"{provider}/: temperature, max_tokens, stop, user", lambda c: completion(
            c, provider, temperature=0.5, max_tokens=50, stop=[" in"], user="u").message.content,
            output="It rains"),
        Row(f"{provider}/: stream", lambda c: litellm_stream(
            c, provider, stream_options={"include_usage": True})),
        Row(f"{provider}/: tools", lambda c: litellm_call(c, provider), (CALL,),
            ("tool_calls", ULM)),
        Row(f"{provider}/: tool_choice required", lambda c: litellm_call(
            c, provider, tool_choice="required"), (CALL,), ("tool_calls", ULM)),
        Row(f"{provider}/: tool loop", lambda c: litellm_loop(c, provider), (CALL, TEXT)),
        Row(f"{provider}/: cache_control", lambda c: completion(
            c, provider, messages=_CACHED).message.content),
    )  # fmt: skip


LITELLM = (
    *_provider_rows("openai"),
    *_provider_rows("hosted_vllm"),
    *_provider_rows("anthropic"),
    *(Row(f"{provider}/: response_format, a model of pydantic", lambda c, p=provider: completion(
        c, p, response_format=Weather).message.content, (ANSWER,), ANSWER)
      for provider in ("openai", "hosted_vllm")),
    Row("hosted_vllm/: reasoning_content", lambda c: completion(
        c, "hosted_vllm").message.reasoning_content, (THOUGHT + TEXT,), "hm"),
    Row("anthropic/: thinking", lambda c: completion(c, "anthropic", thinking={
        "type": "enabled", "budget_tokens": 50}, max_tokens=100,
        allowed_openai_params=["thinking"]).message.reasoning_content,
        (THOUGHT.removeprefix("<think>\n") + TEXT,), "hm"),
    Row("openai/: acompletion", lambda c: asyncio.run(c.litellm(
        "openai", "acompletion", messages=[USER])).choices[0].message.content),
    Row("openai/: responses", lambda c: c.litellm(
        "openai", "responses", input="hi").output[0].content[0].text),
    Row("openai/: embedding", lambda c: c.litellm(
        "openai", "embedding", input=["a"]).data[0]["embedding"], output=[1.0, 0.0]),
    Row("hosted_vllm/: embedding", lambda c: c.litellm(
        "hosted_vllm", "embedding", input=["a"]).data[0]["embedding"], output=[1.0, 0.0]),
    Row("text-completion-openai/: text_completion", lambda c: c.litellm(
        "text-completion-openai", "text_completion", prompt="a").choices[0].text),
)  # fmt: skip


def extract(
    c: Clients, mode: str, client: str = "openai", kind: Any = Weather, max_retries: int = 0
) -> dict[str, Any]:
    """Return the fields that Instructor reads from an answer."""
    limits = {"max_tokens": 100} if client == "anthropic" else {}
    instructor = c.instructor(mode, client)
    return instructor.chat.completions.create(
        model=NAME, response_model=kind, messages=[USER], max_retries=max_retries, **limits
    ).model_dump()


def extract_again(c: Clients) -> Any:
    """Return the value after an answer that the validator of a field refuses."""
    from pydantic import field_validator

    class Colder(Weather):
        """Weather of a city that is not hot."""

        @field_validator("degrees")
        @classmethod
        def _check(cls, degrees: int) -> int:
            if degrees > 40:
                raise ValueError("too hot")
            return degrees

    return extract(c, "TOOLS", kind=Colder, max_retries=2)


def partial(c: Clients) -> Any:
    """Return the value value of Instructor's partial stream."""
    *_, value = c.instructor("TOOLS").chat.completions.create_partial(
        model=NAME, response_model=Weather, messages=[USER]
    )
    return value.model_dump()


DEGREES = WEATHER.model_dump()
_HOT = WEATHER_CALL.replace("7", "70").replace("Weather", "Colder")
_COLDER = WEATHER_CALL.replace("Weather", "Colder")
_FENCED = f"```json\n{ANSWER}\n```"
_MANY = '<tool_call>\n{"name": "IterableWeather", "arguments": {"tasks": [' + (
    ANSWER + "]}}\n</tool_call>"
)  # fmt: skip

INSTRUCTOR = (
    Row("TOOLS", lambda c: extract(c, "TOOLS"), (WEATHER_CALL,), DEGREES),
    Row("TOOLS_STRICT", lambda c: extract(c, "TOOLS_STRICT"), (WEATHER_CALL,), DEGREES),
    Row("TOOLS with a retry", extract_again, (_HOT, _COLDER), DEGREES),
    Row("TOOLS, create_partial", partial,
        (WEATHER_CALL.replace("Weather", "PartialWeather"),), DEGREES),
    Row("TOOLS, Iterable", lambda c: [w.model_dump() for w in c.instructor(
        "TOOLS").chat.completions.create(model=NAME, response_model=Iterable[Weather],
        messages=[USER])], (_MANY,), [DEGREES]),
    Row("JSON", lambda c: extract(c, "JSON"), (ANSWER,), DEGREES),
    Row("JSON_SCHEMA", lambda c: extract(c, "JSON_SCHEMA"), (ANSWER,), DEGREES),
    Row("MD_JSON", lambda c: extract(c, "MD_JSON"), (_FENCED,), DEGREES),
    Row("ANTHROPIC_TOOLS", lambda c: extract(c, "ANTHROPIC_TOOLS", "anthropic"),
        (WEATHER_CALL,), DEGREES),
    Row("ANTHROPIC_JSON", lambda c: extract(c, "ANTHROPIC_JSON", "anthropic"), (ANSWER,),
        DEGREES),
)  # fmt: skip
