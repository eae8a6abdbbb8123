# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/responses`: answers as output items.

A request holds the whole conversation, or the new items after a stored response. A response can be
cancelled while it runs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from megatron.inference.server.chat_template import (
    Conversation,
    ToolCall,
    Turn,
    check_tools,
)
from megatron.inference.server.output_processor import Delta, Generation
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.body import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    AccountFields,
    Body,
    CallId,
    Effort,
    NoEffect,
    ServedValues,
    TemplateVariables,
    Text,
    ToolName,
    Verbosity,
)
from megatron.inference.server.protocol.chat_completions import Function, FunctionName
from megatron.inference.server.protocol.generation import (
    GenerationBody,
    JsonFormat,
    PrefixCacheFields,
    TextFormat,
    schema_format,
)
from megatron.inference.server.tool_parsers.tool_calls import OutputSegment

_Id = Annotated[str, Field(max_length=256)]
_Status = Literal["in_progress", "completed", "incomplete"]


class ContentPart(Body):
    """A part of a message or of an earlier answer."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    """Kind of the text."""
    text: Text
    """The text."""
    annotations: NoEffect = None
    logprobs: NoEffect = None
    prompt_cache_breakpoint: NoEffect = None


_ContentParts = Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES)]


class OldItem(Body):
    """Common fields of items of earlier outputs."""

    id: _Id | None = None
    """Id of the item; it is not used."""
    status: _Status | None = None
    """Status of the item; it is not used."""
    phase: NoEffect = None


class MessageItem(OldItem):
    """A turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    """Who wrote the message."""
    content: Text | _ContentParts
    """The text, or its parts."""


class ReasoningItem(OldItem):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: _ContentParts | None = None
    """The reasoning, if there is no content."""
    content: _ContentParts | None = None
    """The reasoning."""
    encrypted_content: Annotated[
        Any, ServedValues(("",), "send the content or the summary of the reasoning")
    ] = None


class CallItem(OldItem):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    """The id of the call, which its output repeats."""
    name: ToolName
    """Name of the function."""
    arguments: Text
    """The arguments as JSON."""
    namespace: NoEffect = None


class CallOutputItem(OldItem):
    """The result of a tool."""

    type: Literal["function_call_output"]
    call_id: CallId
    """The id of the call."""
    output: Text | _ContentParts
    """What the tool returned."""


def _kind(item: Any) -> str | None:
    """Return the type of an item; the default is a message."""
    if isinstance(item, dict):
        return item.get("type", "message")
    return getattr(item, "type", None)


_Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_kind),
]


_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[_Item])
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


class ResponseTool(Function):
    """A function that may be called."""

    type: Literal["function"]
    defer_loading: NoEffect = None


class ForcedFunction(FunctionName):
    """The function that has to be called."""

    type: Literal["function"]


class AllowedFunctions(Body):
    """The functions that may be called, out of all functions that the prompt lists."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """`required` forces a call."""
    tools: Annotated[list[ForcedFunction], Field(min_length=1, max_length=MAX_TOOLS)]
    """The functions."""


class NamedSchema(Body):
    """JSON that follows a schema, which is always enforced, as with `strict`."""

    type: Literal["json_schema"]
    name: _Id
    """Name of the schema."""
    description: Text | None = None
    """Description of the schema."""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    """The JSON Schema."""
    strict: bool | None = None
    """The schema is enforced whether it is set or not."""


class TextConfig(Body):
    """Constraints on the text."""

    format: Annotated[TextFormat | JsonFormat | NamedSchema, Field(discriminator="type")] | None = (
        None
    )
    """Restricts the text to JSON, or to JSON that follows a schema."""
    verbosity: Verbosity | None = None
    """Sets the template variable `verbosity`."""


class Reasoning(Body):
    """Effort of reasoning. Reasoning is returned as text, so there is no summary of it."""

    effort: Effort | None = None
    """Sets the template variable `reasoning_effort`."""
    summary: NoEffect = None
    generate_summary: NoEffect = None


class ResponseStreamOptions(Body):
    """Options of a streamed response."""

    include_obfuscation: NoEffect = None


#: Additional output that a request may include; without hosted tools there is none of it.
Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ResponseBody(AccountFields, PrefixCacheFields):
    """`POST /v1/responses`."""

    needs_language_model = True

    model: str | None = None
    """A served model name; another name is answered with 404."""
    input: (
        Text
        | Annotated[
            list[_Item],
            Field(min_length=1, max_length=MAX_MESSAGES),
        ]
    )
    """A text of the user, or the items of a conversation."""
    instructions: Text | None = None
    """A system message before the conversation."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Most new tokens; the default is `max_model_len` minus the prompt."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 selects the most probable token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Samples from the smallest set of tokens with this probability."""
    text: TextConfig | None = None
    """Constraints on the text."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ForcedFunction | AllowedFunctions | None = (
        None
    )
    """`none` hides the tools from the model, `required` and a named function force a call;
    `allowed_tools` restricts the calls to some of the tools."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    chat_template_kwargs: TemplateVariables | None = None
    """Variables of the chat template that --chat-template-kwargs lists."""
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    """Returned with the response."""
    stream: bool | None = None
    """Sends the response as server-sent events."""
    store: bool | None = None
    """Whether the response is stored; true, the default with `--response-store-mb`, needs that
    option."""
    previous_response_id: _Id | None = None
    """Id of a stored response whose conversation `input` continues; needs `--response-store-mb`."""
    reasoning: Reasoning | None = None
    """Effort of reasoning."""
    stream_options: ResponseStreamOptions | None = None
    """Options of the stream."""
    # Of the values for hosted tools none has an effect, as there are no hosted tools.
    include: list[Included] | None = None
    """Output of hosted tools. This server has no hosted tools, so no value has an effect."""
    truncation: Literal["auto", "disabled"] | None = None
    """Accepted. A prompt that is too long is refused."""
    top_logprobs: Annotated[Any, ServedValues((0,), "use /v1/chat/completions")] = None
    background: Annotated[Any, ServedValues((False,))] = None
    conversation_state: Annotated[
        Any, Field(alias="conversation"), ServedValues(fix="send the conversation as input")
    ] = None
    prompt: Annotated[Any, ServedValues(fix="send the text as input or instructions")] = None
    max_tool_calls: NoEffect = None
    context_management: NoEffect = None
    client_metadata: NoEffect = None

    @property
    def template_hints(self) -> Mapping[str, tuple[str, Any]]:
        """The effort and the verbosity."""
        effort = None if self.reasoning is None else self.reasoning.effort
        verbosity = None if self.text is None else self.text.verbosity
        hints = {
            "reasoning.effort": ("reasoning_effort", effort),
            "text.verbosity": ("verbosity", verbosity),
        }
        return {path: hint for path, hint in hints.items() if hint[1] is not None}

    def conversation(self) -> Conversation:
        """Return the conversation. Raises ApiError if it is invalid."""
        tools = [tool.tool() for tool in self.tools or ()]
        choice, forced_tool, allowed_tools = self.tool_choice or "auto", None, None
        if isinstance(choice, ForcedFunction):
            choice, forced_tool = "required", choice.name
            allowed_tools = [forced_tool]
        elif isinstance(choice, AllowedFunctions):
            allowed_tools = [tool.name for tool in choice.tools]
            choice = choice.mode
        check_tools(tools, chosen=allowed_tools or (), required=choice == "required")
        return Conversation(
            turns=self._turns(),
            param="input",
            tools=tools,
            choice=choice,
            forced_tool=forced_tool,
            allowed_tools=allowed_tools,
            parallel=self.parallel_tool_calls is not False,
            variables=self.chat_template_kwargs or {},
            hints=self.template_hints,
        )

    def input_items(self) -> list[dict[str, Any]]:
        """Return the items of the input as JSON, with ids."""
        if isinstance(self.input, str):
            content = [ContentPart(type="input_text", text=self.input)]
            items: Sequence[OldItem] = [MessageItem(role="user", content=content)]
        else:
            items = self.input
        fields = [entry.model_dump(exclude_none=True) for entry in items]
        return [
            {"id": f"{_ID_PREFIXES[entry['type']]}_{secrets.token_hex(12)}", **entry}
            for entry in fields
        ]

    def with_items(self, items: Sequence[dict[str, Any]]) -> ResponseBody:
        """Return the request with other items as its input. Raises ApiError for too many items."""
        if len(items) > MAX_MESSAGES:
            raise ApiError(
                400,
                f"the conversation has {len(items)} items: at most {MAX_MESSAGES} are allowed",
                param="previous_response_id",
            )
        return self.model_copy(update={"input": _ITEMS.validate_python(items)})

    def _turns(self) -> list[Turn]:
        """Return the turns; consecutive items of the assistant are merged into one turn."""
        turns = [Turn(role="system", text=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*turns, Turn(role="user", text=self.input)]
        for item in self.input:
            turn = _turn(item)
            previous = turns[-1] if turns else None
            if previous is not None and previous.role == turn.role == "assistant":
                turns[-1] = Turn(
                    role="assistant",
                    text=previous.text + turn.text,
                    calls=[*previous.calls, *turn.calls],
                    reasoning=(previous.reasoning or "") + (turn.reasoning or "") or None,
                )
            else:
                turns.append(turn)
        return turns

    def generation(self) -> GenerationBody:
        """Return the sampling fields and the format."""
        text_format: Any = None if self.text is None else self.text.format
        if isinstance(text_format, NamedSchema):
            text_format = schema_format(text_format.json_schema)
        return GenerationBody(
            cache_salt=self.cache_salt,
            temperature=self.temperature,
            top_p=self.top_p,
            response_format=text_format,
        )

    def request_fields(self, *, stored: bool) -> dict[str, Any]:
        """Return the fields of the request that a response repeats.

        Args:
            stored: whether the response will be stored.
        """
        request_json = self.model_dump(by_alias=True, exclude_none=True)
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "background": False,
            "reasoning": request_json.get("reasoning") or {"effort": None, "summary": None},
            "service_tier": "default",
            "truncation": self.truncation or "disabled",
            "user": self.user if isinstance(self.user, str) else None,
            "store": stored,
            "temperature": self.temperature if self.temperature is not None else 1.0,
            "text": request_json.get("text") or {"format": {"type": "text"}},
            "tool_choice": request_json.get("tool_choice", "auto"),
            "tools": request_json.get("tools", []),
            "top_p": self.top_p if self.top_p is not None else 1.0,
        }


def _joined_text(content: str | Sequence[ContentPart] | None) -> str:
    return (
        content
        if isinstance(content, str)
        else "".join(content_part.text for content_part in content or ())
    )


def _turn(item: MessageItem | ReasoningItem | CallItem | CallOutputItem) -> Turn:
    if isinstance(item, MessageItem):
        return Turn(role=item.role, text=_joined_text(item.content))
    if isinstance(item, ReasoningItem):
        reasoning = _joined_text(item.content) or _joined_text(item.summary)
        return Turn(role="assistant", text="", reasoning=reasoning)
    if isinstance(item, CallOutputItem):
        return Turn(role="tool", text=_joined_text(item.output), call_id=item.call_id)
    call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
    return Turn(role="assistant", text="", calls=[call])


class ResponseFormatter:
    """Formats a response as output items.

    Args:
        model: name of the model.
        generation: outputs of the request.
        request_fields: fields of the request that the response repeats.
        save: stores the complete response, and returns whether it fits the store; None without a
            store.
    """

    def __init__(
        self,
        model: str,
        generation: Generation,
        request_fields: dict[str, Any],
        *,
        save: Callable[[dict[str, Any]], bool] | None = None,
    ) -> None:
        self._usage, self._save = generation.usage, save
        self.id = f"resp_{secrets.token_hex(12)}"
        self._output: list[dict[str, Any]] = []
        self._fields = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            **request_fields,
        }
        self._number = 0
        self._kind = ""  # of the newest item; "" once the item has ended
        self._reasoning_tokens, self._in_reasoning = 0, False

    def response(self, status: str | None = None, **fields: Any) -> dict[str, Any]:
        """Return the response so far, after an optional change of its status."""
        if status is not None:
            self._fields |= {"status": status, **fields}
        input_tokens, output_tokens = self._usage.prompt_tokens, self._usage.completion_tokens
        usage = {
            "input_tokens": input_tokens,
            "input_tokens_details": {
                "cached_tokens": self._usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": input_tokens + output_tokens,
        }
        has_ended = self._fields["status"] != "in_progress"
        return {**self._fields, "output": self._output[:], "usage": usage if has_ended else None}

    def _saved(self, response: dict[str, Any]) -> dict[str, Any]:
        """Store a complete response; return it with its final field `store`."""
        if self._save is not None and not self._save(response):
            self._fields["store"] = response["store"] = False
        return response

    def complete(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the complete response from all of its deltas."""
        for delta in deltas:
            self.events(delta)
        return self.response()

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the events of a delta."""
        events: list[dict[str, Any]] = []
        if not self._number:
            for name in ("created", "in_progress"):
                events.append(self._event(f"response.{name}", response=self.response()))
        for segment in delta.segments:
            events += self._segment_events(segment)
            self._in_reasoning = segment.kind == "reasoning"
        self._reasoning_tokens += len(delta.scores) if self._in_reasoning else 0
        if delta.finish_reason == "length":
            events += self._end("incomplete")
            details = {"reason": "max_output_tokens"}
            response = self._saved(self.response("incomplete", incomplete_details=details))
            events.append(self._event("response.incomplete", response=response))
        elif delta.finish_reason:
            events += self._end()
            response = self._saved(self.response("completed"))
            events.append(self._event("response.completed", response=response))
        return events

    def closing_events(self) -> Sequence[dict[str, Any]]:
        """Return no events: the last delta has the event of the end."""
        return ()

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error, which ends the stream."""
        if self._fields["status"] == "cancelled":
            return self._event("response.incomplete", response=self.response())
        kind = "server_error" if error.status >= 500 else "invalid_prompt"
        error_fields = {"code": kind, "message": error.message}
        return self._event("response.failed", response=self.response("failed", error=error_fields))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the newest item."""
        position = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(f"response.{kind}", **position, **fields)

    def _segment_events(self, segment: OutputSegment) -> list[dict[str, Any]]:
        if segment.kind == "end":
            return self._end()
        if segment.kind == "call":
            call = {
                "call_id": f"call_{secrets.token_hex(12)}",
                "name": segment.text,
                "arguments": "",
            }
            return [*self._end(), self._start("function_call", "fc", **call)]
        item: dict[str, Any]
        if segment.kind == "arguments":
            self._output[-1]["arguments"] += segment.text
            return [self._item_event("function_call_arguments.delta", delta=segment.text)]
        events: list[dict[str, Any]] = []
        kind, content_type = "message", "output_text"
        if segment.kind == "reasoning":
            kind, content_type = "reasoning", "reasoning_text"
        if self._kind != kind:
            events += self._end()
            item = {"role": "assistant"} if kind == "message" else {"summary": []}
            events.append(
                self._start(kind, "msg" if kind == "message" else "rs", **item, content=[])
            )
            content: dict[str, Any] = {"type": content_type, "text": ""}
            content |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            self._output[-1]["content"].append(content)
            added = {**content}
            events.append(self._item_event("content_part.added", content_index=0, part=added))
        self._output[-1]["content"][0]["text"] += segment.text
        extra_fields = {"logprobs": []} if kind == "message" else {}
        delta = self._item_event(
            f"{content_type}.delta", content_index=0, delta=segment.text, **extra_fields
        )
        return [*events, delta]

    def _start(self, kind: str, prefix: str, **fields: Any) -> dict[str, Any]:
        """Start an item; return its event."""
        self._kind = kind
        item = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        self._output.append({**item, **fields})
        added = {**self._output[-1], "content": []} if "content" in fields else self._output[-1]
        return self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item={**added}
        )

    def _end(self, status: _Status = "completed") -> list[dict[str, Any]]:
        """End the newest item, if it is open; return the events."""
        kind, self._kind = self._kind, ""
        if not kind:
            return []
        item = self._output[-1]
        item["status"] = status
        events = []
        if kind == "function_call":
            call_fields = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._item_event("function_call_arguments.done", **call_fields))
        else:
            (content_part,) = item["content"]
            text_fields = {"content_index": 0, "text": content_part["text"]}
            text_fields |= {"logprobs": []} if kind == "message" else {}
            events.append(self._item_event(f"{content_part['type']}.done", **text_fields))
            events.append(
                self._item_event("content_part.done", content_index=0, part={**content_part})
            )
        output_index = len(self._output) - 1
        done_event = self._event(
            "response.output_item.done", output_index=output_index, item={**item}
        )
        return [*events, done_event]
