# SPDX-License-Identifier: Apache-2.0
"""A conversation, whichever route it came by, and the prompt that the model's template makes of
it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.cli.tokenizers import Tokenizer
from megatron.inference.server.answer_formats import AnswerFormats
from megatron.inference.server.guard import ApiError
from megatron.training.data.chat import END_MARK, ChatTemplate, TemplateRefusal
from megatron.training.data.template_process import GENERATION_MARKS


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Args:
        name: of it.
        description: for the model.
        parameters: JSON Schema of an object.
        strict: calls follow the schema.
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
    """A call of a former turn; `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn of a conversation.

    Args:
        role: as templates know it: system, developer, user, assistant or tool.
        text: what is said, or what a tool has returned.
        calls: of tools, by the assistant.
        reasoning: of the assistant.
        call_id: of the call that a tool answers.
    """

    role: str
    text: str
    calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns, and what the answer to them may be.

    Args:
        turns: so far.
        tools: that may be called.
        choice: whether they may, or have to.
        only: the one tool that has to be called.
        parallel: an answer may have several calls.
        variables: of the template.
    """

    turns: Sequence[Turn]
    tools: Sequence[Tool] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """Those that the answer may call."""
        if self.choice == "none":
            return ()
        return [tool for tool in self.tools if self.only in (None, tool.name)]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a model continues.

    Args:
        tokens: of it.
        in_reasoning: it ends with what begins reasoning.
    """

    tokens: Sequence[int]
    in_reasoning: bool = False


class Conversations:
    """Render conversations by the server's own template; none ever comes from a request.

    Args:
        template: None where the model has none.
        tokenizer: of the model.
        formats: of the model's answers.
        variables: of the template that requests may set.
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
        """Return the prompt of a conversation, with what opens an answer.

        Raises:
            ApiError: there is no template, or it cannot render this conversation.
        """
        if self._template is None:
            raise ApiError(
                400,
                "the model has no chat template: start the server with --chat-template, or use "
                "/v1/completions",
            )
        self._check(conversation, self._template.source)
        # Without a choice to call them the model is not told of them.
        told = [] if conversation.choice == "none" else conversation.tools
        messages = [self._message(turn) for turn in conversation.turns]
        tools = [_described(tool) for tool in told]
        _check_marks(messages, "messages")
        _check_marks([tools, conversation.variables], "tools")
        try:
            # Its own process renders it, with limits of its own.
            text = await asyncio.to_thread(
                self._template.render,
                messages,
                add_generation_prompt=True,
                tools=tools,
                variables=conversation.variables,
            )
        except TemplateRefusal as error:
            # What the template's author says of messages; no text of an exception of ours.
            raise ApiError(
                400, f"the chat template refuses the messages: {error}", param="messages"
            ) from None
        except ValueError:
            raise ApiError(
                400, "the chat template takes too long for these messages", param="messages"
            ) from None
        tokens = await asyncio.to_thread(self._tokens, text)
        thinks = self._formats.reasoning
        begun = thinks is not None and text.rstrip().endswith(thinks.begin)
        return Prompt(tokens=tokens, in_reasoning=begun)

    def _check(self, conversation: Conversation, source: str) -> None:
        """Raise ApiError for what the model's template or formats know nothing of."""
        for name in conversation.variables:
            if name not in self.variables:
                raise ApiError(
                    400,
                    f"chat_template_kwargs: {name!r:.100} may not be set here: the server's "
                    "--chat-template-kwargs names those that may",
                    param="chat_template_kwargs",
                )
        if conversation.callable_tools and self._formats.tools is None:
            raise ApiError(
                400,
                "tools: this server reads no tool calls: start it with --tool-call-parser",
                param="tools",
            )
        if conversation.callable_tools and "tools" not in source:
            raise ApiError(
                400,
                "tools: the chat template does not write them: start the server with a "
                "--chat-template that does",
                param="tools",
            )
        if any(turn.calls for turn in conversation.turns) and "tool_calls" not in source:
            raise ApiError(
                400, "tool_calls: the chat template has no place for them", param="messages"
            )

    def _message(self, turn: Turn) -> dict[str, Any]:
        """Return a turn as templates know it."""
        found: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.reasoning is not None:
            found["reasoning_content"] = turn.reasoning
        if turn.call_id is not None:
            found["tool_call_id"] = turn.call_id
        if turn.calls:
            found["tool_calls"] = [self._call(call) for call in turn.calls]
        return found

    def _call(self, call: ToolCall) -> dict[str, Any]:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ApiError(400, "the arguments of a tool call are no JSON object", param="messages")
        as_text = self._formats.tools is not None and self._formats.tools.text_arguments
        function = {"name": call.name, "arguments": call.arguments if as_text else arguments}
        return {"id": call.id, "type": "function", "function": function}

    def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a rendered text, which holds its special tokens itself."""
        for mark in GENERATION_MARKS:
            text = text.replace(mark, "")
        found: list[int] = []
        for number, part in enumerate(text.split(END_MARK)):
            if number and self._tokenizer.eod is not None:
                found.append(self._tokenizer.eod)
            found += self._tokenizer.tokenize(part, add_special_tokens=False) if part else []
        return found


def _described(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates know it, in the shape of OpenAI."""
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _check_marks(found: Any, param: str) -> None:
    """Raise ApiError for a text with a character that is reserved."""
    places = found if isinstance(found, list) else [found]
    for number, place in enumerate(places):
        try:
            text = json.dumps(place, ensure_ascii=False)
        except RecursionError:
            raise ApiError(400, f"{param}.{number}: nested too deep", param=param) from None
        if any(mark in text for mark in (END_MARK, *GENERATION_MARKS)):
            raise ApiError(
                400,
                f"{param}.{number}: U+E0F0 to U+E0F2 are reserved: leave them out",
                param=param,
            )
