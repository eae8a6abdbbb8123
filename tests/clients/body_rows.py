# SPDX-License-Identifier: Apache-2.0
"""Rows of programs that are not Python packages, by the shape of the bodies that they send."""

from __future__ import annotations

import json
from typing import Any

from tests.clients.conftest import NAME, Clients
from tests.clients.matrix import CALL, TEXT, Row
from tests.clients.openai_rows import CITY, RESPONSE_TOOL

BASH = {
    "name": "weather",
    "description": "Runs a command.",
    "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **CITY},
    "cache_control": {"type": "ephemeral"},
}
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: dict[str, Any] = {
    "model": NAME,
    "max_tokens": 200,
    "system": [
        {"type": "text", "text": "You are an agent.", **CACHED},
        {"type": "text", "text": "Working directory: /src", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nnone\n</system-reminder>"},
                {"type": "text", "text": "hi", **CACHED},
            ],
        }
    ],
    "tools": [BASH],
    "metadata": {"user_id": "user_1_account_2_session_3"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
BETAS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "x-app": "cli",
    "x-api-key": "none",
}
CODEX: dict[str, Any] = {
    "model": NAME,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "<permissions>\nread\n</permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [{**RESPONSE_TOOL, "description": "Runs a command.", "strict": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-a",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "a"},
}  # fmt: skip

#: Fields that set a variable of the chat template, if the template reads it.
HINTS = {"output_config.effort", "reasoning.effort", "text.verbosity"}


def events(c: Clients, path: str, headers: dict[str, str], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    answer = c.server.http.post(path, json=fields, headers=headers)
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
    ignored = set(filter(None, answer.headers.get("x-ignored-fields", "").split(", ")))
    assert ignored <= HINTS
    lines = [x.removeprefix("data: ") for x in answer.text.split("\n") if x.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def claude_code(c: Clients, **fields: Any) -> tuple[str, str]:
    """Return the text or the arguments of a stream, and why it has ended."""
    stream = events(c, "/v1/messages?beta=true", BETAS, **{**CLAUDE_CODE, **fields})
    deltas = [e["delta"] for e in stream if e["type"] == "content_block_delta"]
    text = "".join(d.get("text", "") + d.get("partial_json", "") for d in deltas)
    return text, next(e for e in stream if e["type"] == "message_delta")["delta"]["stop_reason"]


def codex(c: Clients, **fields: Any) -> list[str]:
    """Return the types of the items of a stream."""
    stream = events(c, "/v1/responses", {"originator": "codex_cli"}, **{**CODEX, **fields})
    items = [e["item"] for e in stream if e["type"] == "response.output_item.done"]
    assert stream[-1]["type"] == "response.completed"
    return [output["type"] for output in items]


def codex_loop(c: Clients) -> list[str]:
    """Return the types of items of the answer to a call's result."""
    call = {"type": "function_call", "name": "weather", "arguments": "{}", "call_id": "call_1"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    return codex(c, input=[*CODEX["input"], call, output])


def load(c: Clients, path: str, **fields: Any) -> int:
    """Return the tokens that a load generator counts in a stream."""
    fields = {"model": NAME, "stream": True, "ignore_eos": True, **fields}
    answer = c.counting.http.post(path, json=fields)
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
    assert "x-ignored-fields" not in answer.headers, answer.headers["x-ignored-fields"]
    chunks = [json.loads(x[6:]) for x in answer.text.split("\n") if x.startswith("data: {")]
    return chunks[-1]["usage"]["completion_tokens"]


#: The template begins the reasoning of an answer.
HM = "hm\n</think>\n"
USAGE = {"stream_options": {"include_usage": True}}
CONTENT_LIST = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
PLAIN = [{"role": "user", "content": "hi"}]

LOAD = (
    Row("vLLM bench serve, backend openai", lambda c: load(
        c, "/v1/completions", prompt="a", max_tokens=9, temperature=0.0, repetition_penalty=1.0,
        logprobs=None, **USAGE), output=9),
    Row("vLLM bench serve, backend openai-chat", lambda c: load(
        c, "/v1/chat/completions", messages=CONTENT_LIST, max_completion_tokens=9, temperature=0.0,
        **USAGE), output=9),
    Row("vLLM bench serve, sampling options", lambda c: load(
        c, "/v1/completions", prompt="a", max_tokens=9, temperature=0.7, top_p=0.9, top_k=20,
        min_p=0.01, frequency_penalty=0.1, presence_penalty=0.1, repetition_penalty=1.1,
        **USAGE), output=9),
    Row("SGLang bench_serving, backend vllm", lambda c: load(
        c, "/v1/completions", prompt="a", temperature=0.0, best_of=1, max_tokens=9, **USAGE),
        output=9),
    Row("SGLang bench_serving, backend vllm-chat", lambda c: load(
        c, "/v1/chat/completions", messages=PLAIN, temperature=0.0, max_completion_tokens=9,
        **USAGE), output=9),
    Row("GuideLLM, completions", lambda c: load(
        c, "/v1/completions", prompt="a", max_tokens=9, stop=None,
        stream_options={"include_usage": True, "continuous_usage_stats": True}), output=9),
)  # fmt: skip

AGENTS = (
    Row("Claude Code: a turn", claude_code, (HM + TEXT,), (TEXT, "end_turn")),
    Row("Claude Code: a tool call", claude_code, (HM + CALL,), ('{"city": "Ulm"}', "tool_use")),
    Row("Claude Code: the title of a conversation", lambda c: claude_code(
        c, tools=[], thinking={"type": "disabled"}, temperature=1, max_tokens=32),
        output=(TEXT, "end_turn")),
    Row("Claude Code: a warm-up of one token", lambda c: claude_code(
        c, tools=[], max_tokens=1, stream=True)[1], output="max_tokens"),
    Row("Claude Code: count_tokens", lambda c: c.server.ok("/v1/messages/count_tokens", **{
        k: CLAUDE_CODE[k] for k in ("model", "messages", "tools", "system")})[
        "input_tokens"] > 100, output=True),
    Row("Claude Code: web search", lambda c: claude_code(
        c, tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]),
        refused="web_search"),
    Row("Codex: a turn", codex, output=["message"]),
    Row("Codex: a tool call", codex, (CALL,), ["function_call"]),
    Row("Codex: the result of a call", codex_loop, output=["message"]),
    Row("Codex: apply_patch with a grammar", lambda c: codex(c, tools=[{
        "type": "custom", "name": "apply_patch", "description": "d",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}]),
        refused="custom"),
    Row("Codex: web search", lambda c: codex(c, tools=[
        {"type": "web_search", "external_web_access": False}]), refused="web_search"),
)  # fmt: skip
