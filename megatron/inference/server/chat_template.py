# SPDX-License-Identifier: Apache-2.0
"""Conversations, shared by all chat routes, and their prompts by the model's chat template."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.cli.tokenizers import Tokenizer
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.validation_error import printable
from megatron.inference.server.tool_parsers.formats import AnswerFormats
from megatron.training.data.chat import END_MARK, ChatTemplate, TemplateRefusal
from megatron.training.data.template_process import GENERATION_MARKS


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Args:
        name: name of the function.
        description: description for the model.
        parameters: JSON schema of the arguments, an object.
        strict: whether calls have to follow the schema.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(NO_PARAMETERS))
    strict: bool = False


NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call of an earlier turn; `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a conversation.

    Args:
        role: role for chat templates: system, developer, user, assistant or tool.
        text: text of the turn, or the result of a tool.
        calls: tool calls of the assistant.
        reasoning: reasoning of the assistant; None without reasoning.
        call_id: id of the call whose result a tool turn holds.
        name: name of the participant or of the tool, for templates that read it.
    """

    role: str
    text: str
    calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    call_id: str | None = None
    name: str | None = None


#: Where the answer begins: in a new turn of the assistant, as the continuation of the last turn, or
#: after the turns without a mark.
AnswerStart = Literal["new turn", "last turn", "none"]

#: Marks the end of the last turn in a rendered text, for its continuation.
CONTINUE_MARK = "\ue0f3"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The turns of a conversation, and constraints on the answer.

    Args:
        turns: turns so far.
        tools: tools that the model may call.
        choice: whether the answer may, must or must not call tools.
        forced_tool: name of the tool that the answer has to call; None for any tool.
        allowed_tools: names of the tools that the answer may call; None for all. The prompt lists
            all tools.
        parallel: whether an answer may have several calls.
        variables: variables of the chat template.
        hints: template variables by the field that sets them, as (variable, value); they apply if
            the template reads them.
        answer_start: where the answer begins.
        param: field of the request with the turns, for errors.
    """

    turns: Sequence[Turn]
    tools: Sequence[Tool] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    forced_tool: str | None = None
    allowed_tools: Collection[str] | None = None
    parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    answer_start: AnswerStart = "new turn"
    param: str = "messages"

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the answer may call."""
        if self.choice == "none":
            return ()
        return [
            tool
            for tool in self.tools
            if self.forced_tool in (None, tool.name)
            and (self.allowed_tools is None or tool.name in self.allowed_tools)
        ]


def check_tools(tools: Sequence[Tool], *, chosen: Collection[str], required: bool) -> None:
    """Raise ApiError for two tools of the same name, or a choice of a tool that is not listed."""
    names = [tool.name for tool in tools]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ApiError(400, f"tools: two tools have the name {duplicate}", param="tools")
    unknown = next((name for name in chosen if name not in names), None)
    if unknown is not None:
        raise ApiError(400, f"tool_choice: there is no tool {unknown}", param="tool_choice")
    if required and not names:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompt of a conversation.

    Args:
        tokens: token ids.
        in_reasoning: whether the prompt ends with the start mark of reasoning.
    """

    tokens: Sequence[int]
    in_reasoning: bool = False


class Conversations:
    """Render conversations with the server's chat template. Requests cannot set the template.

    Args:
        template: chat template; None if the model has no template.
        tokenizer: tokenizer of the model.
        formats: answer formats of the model.
        variables: names of template variables that requests may set.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        formats: AnswerFormats,
        *,
        variables: Sequence[str] = (),
    ) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._formats, self.variables = formats, frozenset(variables)

    async def prompt(self, conversation: Conversation) -> Prompt:
        """Return the prompt of a conversation, including the start of the answer's turn.

        Raises:
            ApiError: there is no template, or the template cannot render this conversation.
        """
        if self._template is None:
            raise ApiError(
                400,
                "the model has no chat template: start the server with --chat-template, or use "
                "/v1/completions",
            )
        self._check(conversation, self._template.source)
        # With tool_choice "none" the prompt does not list the tools.
        listed_tools = [] if conversation.choice == "none" else conversation.tools
        param = conversation.param
        messages = self._messages(conversation)
        hints = {name: value for name, value in conversation.hints.values() if self.reads(name)}
        tools = [_tool_json(tool) for tool in listed_tools]
        _check_marks(messages, param)
        _check_marks([tools, conversation.variables], "tools")
        continues = conversation.answer_start == "last turn"
        if continues:
            messages[-1]["content"] += CONTINUE_MARK
        try:
            # A separate process renders the template, with limits on time and memory.
            text = await asyncio.to_thread(
                self._template.render,
                messages,
                add_generation_prompt=conversation.answer_start == "new turn",
                tools=tools,
                variables={**hints, **conversation.variables},
            )
        except TemplateRefusal as error:
            # The message of the template's author, not the text of an internal exception.
            raise ApiError(
                400, f"{param}: the chat template rejects the messages: {error}", param=param
            ) from None
        except ValueError:
            raise ApiError(
                400, f"{param}: the chat template takes too long to render them", param=param
            ) from None
        reasoning_format = self._formats.reasoning
        if continues:
            text, mark, _ = text.partition(CONTINUE_MARK)
            if not mark:
                raise ApiError(
                    400,
                    "the chat template does not render the last message, so it cannot be continued",
                    param=param,
                )
            written = conversation.turns[-1].text
            in_reasoning = reasoning_format is not None and written.rfind(
                reasoning_format.begin
            ) > written.rfind(reasoning_format.end)
        else:
            in_reasoning = reasoning_format is not None and text.rstrip().endswith(
                reasoning_format.begin
            )
        tokens = await asyncio.to_thread(self._tokens, text)
        return Prompt(tokens=tokens, in_reasoning=in_reasoning)

    def reads(self, variable: str) -> bool:
        """Return whether the template reads a variable."""
        return self._template is not None and variable in self._template.source

    def _check(self, conversation: Conversation, source: str) -> None:
        """Raise ApiError for features that the template or the answer formats do not support."""
        for name in conversation.variables:
            if name not in self.variables:
                raise ApiError(
                    400,
                    f"chat_template_kwargs: {name!r:.100} is not allowed: the server allows "
                    "the variables listed in --chat-template-kwargs",
                    param="chat_template_kwargs",
                )
        if conversation.callable_tools and self._formats.tools is None:
            raise ApiError(
                400,
                "tools: this server does not parse tool calls: start it with --tool-call-parser",
                param="tools",
            )
        if conversation.callable_tools and "tools" not in source:
            raise ApiError(
                400,
                "tools: the chat template does not render them: start the server with a "
                "--chat-template that does",
                param="tools",
            )
        if any(turn.calls for turn in conversation.turns) and "tool_calls" not in source:
            raise ApiError(
                400,
                f"{conversation.param}: the chat template does not render tool calls: start the "
                "server with a --chat-template that does",
                param=conversation.param,
            )

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return the messages of a conversation for chat templates."""
        tool_format, reasoning_format = self._formats.tools, self._formats.reasoning
        kind = None if tool_format is None else tool_format.call_ids
        key = "reasoning_content" if reasoning_format is None else reasoning_format.message_key
        messages: list[dict[str, Any]] = []
        ids: dict[str, str] = {}  # template's id of a call, by the id for clients
        num_calls = 0
        for turn in conversation.turns:
            message: dict[str, Any] = {"role": turn.role, "content": turn.text}
            if turn.reasoning is not None:
                message[key] = turn.reasoning
            if self._formats.channels and turn.calls and turn.reasoning and turn.text:
                # gpt-oss's template accepts one text before a call, and renders it as reasoning.
                message |= {"content": "", key: f"{turn.reasoning}\n{turn.text}"}
            if turn.name is not None:
                message["name"] = turn.name
            if turn.call_id is not None:
                message["tool_call_id"] = ids.get(turn.call_id, turn.call_id)
            for call in turn.calls:
                ids[call.id] = _template_id(call, num_calls, kind)
                num_calls += 1
            if turn.calls:
                message["tool_calls"] = [
                    self._call(call, ids[call.id], conversation.param) for call in turn.calls
                ]
            messages.append(message)
        return messages

    def _call(self, call: ToolCall, call_id: str, param: str) -> dict[str, Any]:
        try:
            arguments = json.loads(call.arguments)
            # An escaped lone surrogate becomes a text that UTF-8 cannot encode.
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ApiError(
                400,
                f"{param}: the arguments of tool call {printable(call.id)} are not a JSON object",
                param=param,
            )
        as_text = self._formats.tools is not None and self._formats.tools.text_arguments
        function = {"name": call.name, "arguments": call.arguments if as_text else arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _tokens(self, text: str) -> list[int]:
        """Return the token ids of a rendered text, which already contains its special tokens."""
        for mark in GENERATION_MARKS:
            text = text.replace(mark, "")
        tokens: list[int] = []
        for index, segment in enumerate(text.split(END_MARK)):
            if index and self._tokenizer.eod is not None:
                tokens.append(self._tokenizer.eod)
            tokens += self._tokenizer.tokenize(segment, add_special_tokens=False) if segment else []
        return tokens


def _template_id(call: ToolCall, index: int, kind: str | None) -> str:
    """Return the id of a call in the form that the chat template requires.

    Args:
        call: the call.
        index: index of the call in its conversation.
        kind: see `ToolFormat.call_ids`.
    """
    if kind == "indexed":
        return f"functions.{call.name}:{index}"
    if kind == "alphanumeric" and not re.fullmatch("[a-zA-Z0-9]{9}", call.id):
        return hashlib.sha256(call.id.encode()).hexdigest()[:9]
    return call.id


def _tool_json(tool: Tool) -> dict[str, Any]:
    """Return a tool for chat templates, in the format of OpenAI."""
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _check_marks(value: Any, param: str) -> None:
    """Raise ApiError for text with a reserved character."""
    entries = value if isinstance(value, list) else [value]
    for index, entry in enumerate(entries):
        try:
            text = json.dumps(entry, ensure_ascii=False)
        except RecursionError:
            raise ApiError(400, f"{param}.{index}: nested too deep", param=param) from None
        if any(mark in text for mark in (END_MARK, CONTINUE_MARK, *GENERATION_MARKS)):
            raise ApiError(
                400,
                f"{param}.{index}: U+E0F0 to U+E0F3 are reserved: leave them out",
                param=param,
            )
