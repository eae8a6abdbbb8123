# SPDX-License-Identifier: Apache-2.0
"""Anthropic's routes: `/v1/messages`, a conversation's answer as blocks of content, and
`/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron.inference.server.chat_template import Conversation, Tool, ToolCall, Turn, check_tools
from megatron.inference.server.output_processor import Delta, Usage
from megatron.inference.server.protocol.api_error import ANTHROPIC_ROUTES, ApiError
from megatron.inference.server.protocol.body import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
    MAX_TOOLS,
    Body,
    CallId,
    Effort,
    NoEffect,
    ServedValues,
    Text,
    ToolName,
)
from megatron.inference.server.protocol.chat_completions import TextPart
from megatron.inference.server.protocol.generation import (
    GenerationBody,
    PrefixCacheFields,
    schema_format,
)
from megatron.inference.server.tool_parsers.tool_calls import OutputSegment

#: The variable of a chat template that `thinking` sets.
THINKING_VARIABLE = "enable_thinking"

_Texts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES)]


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; this server does not sign it."""

    type: Literal["thinking"]
    thinking: Text
    """The reasoning."""
    signature: NoEffect = None


class ToolUseBlock(Body):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    """The id of the call, which its result repeats."""
    name: ToolName
    """Name of the tool."""
    input: dict[str, Any]
    """The arguments."""
    cache_control: NoEffect = None
    caller: NoEffect = None


class ToolResultBlock(Body):
    """The result of a tool; with `is_error` the model sees it as an error."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    """The id of the call."""
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] = ""
    """What the tool returned."""
    is_error: bool | None = None
    """The text begins with `Error: `."""
    cache_control: NoEffect = None


class AnthropicMessage(Body):
    """A turn of a conversation."""

    role: Literal["user", "assistant"]
    """Who wrote the message."""
    content: (
        Text
        | Annotated[
            list[
                Annotated[
                    TextPart | ThinkingBlock | ToolUseBlock | ToolResultBlock,
                    Field(discriminator="type"),
                ]
            ],
            Field(min_length=1, max_length=MAX_CALLS),
        ]
    )
    """The text, or its blocks."""

    def turns(self) -> list[Turn]:
        """Return the turns of a conversation; each tool result is a separate turn."""
        if isinstance(self.content, str):
            return [Turn(role=self.role, text=self.content)]
        if self.role == "assistant":
            return [self._answer(self.content)]
        turns = []
        for block in self.content:
            if isinstance(block, TextPart):
                if turns and turns[-1].role == "user":
                    turns[-1] = Turn(role="user", text=turns[-1].text + block.text)
                else:
                    turns.append(Turn(role="user", text=block.text))
            elif isinstance(block, ToolResultBlock):
                text = ("Error: " if block.is_error else "") + _joined_text(block.content)
                turns.append(Turn(role="tool", text=text, call_id=block.tool_use_id))
            else:
                raise ApiError(
                    400,
                    f"messages: {block.type} is allowed in assistant messages only",
                    param="messages",
                )
        return turns

    def _answer(self, blocks: Sequence[Any]) -> Turn:
        thoughts, texts, calls = [], [], []
        for block in blocks:
            if isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
            elif isinstance(block, TextPart):
                texts.append(block.text)
            else:
                raise ApiError(
                    400, "messages: tool_result is allowed in user messages only", param="messages"
                )
        reasoning = "".join(thoughts) if thoughts else None
        return Turn(role="assistant", text="".join(texts), calls=calls, reasoning=reasoning)


class AnthropicTool(Body):
    """A function that may be called."""

    type: Literal["custom"] | None = None
    """Kind of the tool."""
    name: ToolName
    """Name of the tool."""
    description: Text | None = None
    """Description, for the chat template."""
    input_schema: dict[str, Any]
    """JSON Schema of the arguments."""
    strict: bool | None = None
    """true: the arguments of calls follow the schema."""
    cache_control: NoEffect = None
    eager_input_streaming: NoEffect = None
    defer_loading: NoEffect = None
    allowed_callers: NoEffect = None
    input_examples: NoEffect = None


class ToolUse(Body):
    """Whether the answer may or must call tools."""

    type: Literal["auto", "any", "none", "tool"]
    """`none` hides the tools from the model, `any` and `tool` force a call."""
    name: ToolName | None = None
    """The tool of type `tool`."""
    disable_parallel_tool_use: bool | None = None
    """At most one call."""


class Thinking(Body):
    """Whether the model reasons, and with `enabled` the most tokens of reasoning."""

    type: Literal["adaptive", "disabled", "enabled"]
    """Sets the template variable `enable_thinking`, which is false for `disabled`."""
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Most tokens of reasoning, below `max_tokens`; needs `enabled` and --reasoning-parser."""
    display: NoEffect = None

    def check(self, max_tokens: int | None) -> None:
        """Raise ApiError for a budget without `enabled`, or one that leaves no tokens for the
        answer."""
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ApiError(400, "thinking: budget_tokens needs type enabled", param="thinking")
        if max_tokens is not None and (self.budget_tokens or 0) >= max_tokens:
            raise ApiError(
                400,
                f"thinking: budget_tokens is {self.budget_tokens} and max_tokens "
                f"{max_tokens}: leave some tokens for the response",
                param="thinking",
            )


class OutputFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON Schema."""


class OutputConfig(Body):
    """Constraints on the answer, and the effort of reasoning."""

    format: OutputFormat | None = None
    """Restricts the text to JSON that follows a schema."""
    effort: Effort | None = None
    """Sets the template variable `reasoning_effort`."""


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    """A served model name; another name is answered with 404."""
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation; a last text of the assistant is continued, without tools."""
    system: Text | _Texts | None = None
    """A system message before the conversation."""
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    """Tools that the model may call."""
    tool_choice: ToolUse | None = None
    """Whether the answer may or must call tools."""
    thinking: Thinking | None = None
    """Whether the model reasons."""
    output_config: OutputConfig | None = None
    """Format of the text, and effort of reasoning."""
    cache_control: NoEffect = None
    context_management: NoEffect = None
    mcp_servers: Annotated[Any, ServedValues(([],), "give the tools of the servers")] = None
    speed: NoEffect = None

    @property
    def template_hints(self) -> Mapping[str, tuple[str, Any]]:
        """The effort, and whether the model reasons."""
        hints: dict[str, tuple[str, Any]] = {}
        if self.output_config is not None and self.output_config.effort is not None:
            hints["output_config.effort"] = ("reasoning_effort", self.output_config.effort)
        if self.thinking is not None:
            hints["thinking.type"] = (THINKING_VARIABLE, self.thinking.type != "disabled")
        return hints

    def conversation(self, max_tokens: int | None = None) -> Conversation:
        """Return the conversation. Raises ApiError if it is invalid.

        Args:
            max_tokens: most tokens of the answer; None without an answer.
        """
        turns = [] if self.system is None else [Turn(role="system", text=_joined_text(self.system))]
        turns += [turn for message in self.messages for turn in message.turns()]
        continues = turns[-1].role == "assistant"
        if continues and (turns[-1].calls or self.tools):
            raise ApiError(
                400,
                "messages: the last message is the assistant's: it can be continued only if it is "
                "a text and there are no tools",
            )
        tools = [
            Tool(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=bool(tool.strict),
            )
            for tool in self.tools or ()
        ]
        use = self.tool_choice or ToolUse(type="auto")
        if (use.type == "tool") != (use.name is not None):
            raise ApiError(400, "tool_choice: name needs type tool", param="tool_choice")
        choices: dict[str, Literal["auto", "none", "required"]]
        choices = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}
        choice = choices[use.type]
        chosen = () if use.name is None else (use.name,)
        check_tools(tools, chosen=chosen, required=choice == "required")
        if self.thinking is not None:
            self.thinking.check(max_tokens)
        return Conversation(
            turns=turns,
            tools=tools,
            choice=choice,
            forced_tool=use.name,
            parallel=not use.disable_parallel_tool_use,
            hints=self.template_hints,
            answer_start="last turn" if continues else "new turn",
        )


class MessagesBody(CountBody, PrefixCacheFields):
    """`POST /v1/messages`."""

    needs_language_model = True

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Most new tokens."""
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
            Field(max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    """Strings that end the answer."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 selects the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Samples from the smallest set of tokens with this probability."""
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Samples from so many tokens; 0 turns it off."""
    output_format: OutputFormat | None = None
    """Earlier name of `output_config.format`."""
    stream: bool | None = None
    """Sends the answer as server-sent events."""
    metadata: NoEffect = None
    service_tier: NoEffect = None
    inference_geo: NoEffect = None
    container: Annotated[Any, ServedValues()] = None

    @property
    def format_field(self) -> str:
        """The field with the format of the text."""
        config = self.output_config
        return "output_format" if config is None or config.format is None else "output_config"

    def generation(self) -> GenerationBody:
        """Return the sampling fields and the format."""
        config = self.output_config
        # `output_format` is the name of the format before it became part of the configuration.
        output_format = (None if config is None else config.format) or self.output_format
        return GenerationBody(
            response_format=None
            if output_format is None
            else schema_format(output_format.json_schema),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            cache_salt=self.cache_salt,
        )


def _joined_text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(text_part.text for text_part in content)


class MessageFormatter:
    """Formats a response as content blocks.

    Args:
        model: name of the model.
        usage: token counts of the request, which grow with each delta.
        request_id: id of the request.
        ends_at_context: whether the model's context ends before `max_tokens`.
    """

    def __init__(
        self, model: str, usage: Usage, request_id: str, *, ends_at_context: bool = False
    ) -> None:
        self._usage, self._request_id = usage, request_id
        limit = "model_context_window_exceeded" if ends_at_context else "max_tokens"
        self._stop_reasons = {"tool_calls": "tool_use", "length": limit}
        self._message = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._started = False
        self._index, self._kind = -1, ""  # of the newest block; "" once the block has ended

    def complete(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the complete message from all of its deltas."""
        blocks: list[dict[str, Any]] = []
        ending: dict[str, Any] = {}
        for event in (event for delta in deltas for event in self.events(delta)):
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"]})
                blocks[-1] |= {"input": ""} if blocks[-1]["type"] == "tool_use" else {}
            elif event["type"] == "content_block_delta":
                (text,) = (v for k, v in event["delta"].items() if k != "type")
                open_block = blocks[-1]
                open_block["input" if open_block["type"] == "tool_use" else open_block["type"]] += (
                    text
                )
            elif event["type"] == "message_delta":
                ending = event["delta"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _object(block["input"])
        return {**self._message, "content": blocks, **ending, "usage": self._count()}

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the events of a delta."""
        events: list[dict[str, Any]] = []
        if not self._started:
            self._started = True
            usage = {**self._count(), "output_tokens": 0}
            events.append({"type": "message_start", "message": {**self._message, "usage": usage}})
        for segment in delta.segments:
            events += self._segment_events(segment)
        if delta.finish_reason:
            events += self._end()
            reason = self._stop_reasons.get(delta.finish_reason, "end_turn")
            ending = {
                "stop_reason": reason if delta.stop is None else "stop_sequence",
                "stop_sequence": delta.stop,
            }
            events.append({"type": "message_delta", "delta": ending, "usage": self._count()})
            events.append({"type": "message_stop"})
        return events

    def closing_events(self) -> Sequence[dict[str, Any]]:
        """Return no events: the last delta has the event of the end."""
        return ()

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error, which ends the stream."""
        return error.to_json(self._request_id, ANTHROPIC_ROUTES)

    def _segment_events(self, segment: OutputSegment) -> list[dict[str, Any]]:
        if segment.kind == "end":
            return self._end()
        if segment.kind == "call":
            call = {"id": f"toolu_{secrets.token_hex(12)}", "name": segment.text, "input": {}}
            return [*self._end(), self._start("tool_use", **call)]
        if segment.kind == "arguments":
            return [self._delta("input_json_delta", partial_json=segment.text)]
        kind, empty = ("thinking", {"thinking": "", "signature": ""})
        if segment.kind == "text":
            kind, empty = ("text", {"text": ""})
        opening = [] if self._kind == kind else [*self._end(), self._start(kind, **empty)]
        return [*opening, self._delta(f"{kind}_delta", **{kind: segment.text})]

    def _start(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._index, self._kind = self._index + 1, kind
        block = {"type": kind, **fields}
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _end(self) -> list[dict[str, Any]]:
        """Return the event that ends the newest block, if it has not ended."""
        open_kind, self._kind = self._kind, ""
        return [{"type": "content_block_stop", "index": self._index}] if open_kind else []

    def _count(self) -> dict[str, int]:
        """Return token counts; `input_tokens` excludes tokens found in the prefix cache."""
        return {
            "input_tokens": self._usage.prompt_tokens - self._usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._usage.cached_tokens,
            "output_tokens": self._usage.completion_tokens,
        }


def _object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; other text than a JSON object is under `unparsed`."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"unparsed": text}
