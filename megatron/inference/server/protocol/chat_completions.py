# SPDX-License-Identifier: Apache-2.0
"""OpenAI's `/v1/chat/completions`: the body and the response."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron.cli.tokenizers import Tokenizer
from megatron.inference.server.chat_template import (
    NO_PARAMETERS,
    AnswerStart,
    Conversation,
    Tool,
    ToolCall,
    Turn,
    check_tools,
)
from megatron.inference.server.output_processor import Delta, TokenScore, Usage
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.beam_search import BeamSearchBody
from megatron.inference.server.protocol.body import (
    MAX_CALLS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
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
from megatron.inference.server.protocol.completions import ChoicesFormatter, ending
from megatron.inference.server.protocol.token_text import (
    prompt_logprobs,
    token_bytes,
    token_text,
)
from megatron.inference.server.tool_parsers.tool_calls import OutputSegment


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text
    """The text."""
    cache_control: NoEffect = None


class CalledFunction(Body):
    """The function of a tool call of an earlier turn."""

    name: ToolName
    """Name of the function."""
    arguments: Text
    """The arguments as JSON."""


class MessageCall(Body):
    """A tool call of an earlier turn."""

    id: CallId
    """The id of the call, which the message with its output repeats."""
    type: Literal["function"]
    function: CalledFunction
    """The called function."""
    index: NoEffect = None


class ChatMessage(Body):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who wrote the message."""
    content: (
        Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    """The text, or its parts."""
    name: Annotated[str, Field(max_length=256)] | None = None
    """Name of the writer, for the chat template."""
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_CALLS)] | None = None
    """Calls of an assistant message."""
    tool_call_id: CallId | None = None
    """In a message of role tool: the id of the call."""
    reasoning_content: Text | None = None
    """Reasoning of an assistant message, for the chat template."""
    reasoning: Text | None = None
    """Another name of `reasoning_content`."""
    refusal: Text | None = None
    """The text of an assistant message without content."""
    annotations: NoEffect = None
    cache_control: NoEffect = None
    audio: Annotated[Any, ServedValues(fix="this server reads texts only")] = None
    function_call: Annotated[Any, ServedValues(fix="use tool_calls")] = None

    @property
    def text(self) -> str:
        """The joined text of all parts; the refusal of a message without content."""
        if isinstance(self.content, str):
            return self.content
        return "".join(text_part.text for text_part in self.content or ()) or self.refusal or ""

    def turn(self) -> Turn:
        """Return the turn of a conversation. Raises ApiError for an invalid message."""
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        answers = bool(self.tool_calls) or reasoning is not None or self.refusal is not None
        problem = None
        if answers and self.role != "assistant":
            problem = (
                "tool_calls, reasoning_content and refusal are allowed in assistant messages only"
            )
        elif self.content is None and not answers:
            problem = "a message has no content"
        elif (self.role == "tool") != (self.tool_call_id is not None):
            problem = "tool_call_id is required in messages of role tool and not allowed in others"
        if problem is not None:
            raise ApiError(400, f"messages: {problem}", param="messages")
        calls = [
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in self.tool_calls or ()
        ]
        return Turn(
            role=self.role,
            text=self.text,
            calls=calls,
            reasoning=reasoning,
            call_id=self.tool_call_id,
            name=self.name,
        )


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class Function(Body):
    """A function that may be called."""

    name: ToolName
    """Name of the function."""
    description: Text | None = None
    """Description, for the chat template."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments; none by default."""
    strict: bool | None = None
    """true: the arguments of calls follow the schema."""

    def tool(self) -> Tool:
        """Return the tool of a conversation."""
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.parameters or NO_PARAMETERS,
            strict=bool(self.strict),
        )


class FunctionTool(Body):
    """A tool, which has to be a function."""

    type: Literal["function"]
    function: Function
    """The function."""
    cache_control: NoEffect = None


class FunctionName(Body):
    """The name of a function."""

    name: ToolName
    """Name of a function of `tools`."""


class NamedChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName
    """The function."""


class AllowedTools(Body):
    """The functions that may be called, and whether one must be called."""

    mode: Literal["auto", "required"]
    """`required` forces a call."""
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]
    """The functions."""


class AllowedChoice(Body):
    """The functions that may be called, out of all functions that the prompt lists."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """The functions, and whether one must be called."""


class ChatBody(BeamSearchBody):
    """`POST /v1/chat/completions`."""

    messages: Messages
    """The conversation, which the chat template renders."""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    """`none` hides the tools from the model, `required` and a named function force a call;
    `allowed_tools` restricts the calls to some of the tools."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""
    chat_template_kwargs: TemplateVariables | None = None
    """Variables of the chat template that --chat-template-kwargs lists."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Most new tokens; the default is `max_model_len` minus the prompt."""
    logprobs: bool | None = None
    """Reports the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of alternatives that are reported for each token."""
    add_generation_prompt: bool = True
    """false: the prompt does not end with the start of the answer's turn."""
    continue_final_message: bool = False
    """The answer continues the last message, a text of the assistant; needs `add_generation_prompt:
    false`."""
    add_special_tokens: Annotated[Any, ServedValues((False,), "write them in the template")] = None
    echo: Annotated[Any, ServedValues((False,), "use /v1/completions")] = None
    include_reasoning: Annotated[Any, ServedValues((True,))] = None
    chat_template: Annotated[Any, ServedValues(fix="start the server with --chat-template")] = None
    reasoning_effort: Effort | None = None
    """Sets the template variable `reasoning_effort`."""
    verbosity: Verbosity | None = None
    """Sets the template variable `verbosity`."""
    modalities: Annotated[Any, ServedValues((["text"],))] = None
    store: Annotated[Any, ServedValues((False,), "responses are stored by /v1/responses")] = None
    audio: Annotated[Any, ServedValues(fix="this server writes texts only")] = None
    web_search_options: Annotated[Any, ServedValues(fix="give a tool")] = None
    functions: Annotated[Any, ServedValues(([],), "use tools")] = None
    function_call: Annotated[Any, ServedValues(("none",), "use tool_choice")] = None

    @property
    def template_hints(self) -> Mapping[str, tuple[str, Any]]:
        """The effort and the verbosity."""
        hints = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {name: (name, value) for name, value in hints.items() if value is not None}

    @property
    def token_limit(self) -> int | None:
        """The limit of new tokens. Raises ApiError for two different limits."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(
                400,
                "max_tokens and max_completion_tokens are the same limit: give one of them",
                param="max_tokens",
            )
        return next(iter(limits), None)

    def conversation(self) -> Conversation:
        """Return the conversation of a request. Raises ApiError for invalid tools."""
        tools = [tool.function.tool() for tool in self.tools or ()]
        choice, forced_tool, allowed_tools = self.tool_choice or "auto", None, None
        if isinstance(choice, NamedChoice):
            choice, forced_tool = "required", choice.function.name
            allowed_tools = [forced_tool]
        elif isinstance(choice, AllowedChoice):
            allowed_tools = [tool.function.name for tool in choice.allowed_tools.tools]
            choice = choice.allowed_tools.mode
        check_tools(tools, chosen=allowed_tools or (), required=choice == "required")
        return Conversation(
            turns=[message.turn() for message in self.messages],
            tools=tools,
            choice=choice,
            forced_tool=forced_tool,
            allowed_tools=allowed_tools,
            parallel=self.parallel_tool_calls is not False,
            variables=self.chat_template_kwargs or {},
            hints=self.template_hints,
            answer_start=self._answer_start(),
        )

    def _answer_start(self) -> AnswerStart:
        """Return how the prompt ends. Raises ApiError for contradicting fields."""
        if not self.continue_final_message:
            return "new turn" if self.add_generation_prompt else "none"
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message needs add_generation_prompt: false",
                param="continue_final_message",
            )
        if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
            raise ApiError(
                400,
                "continue_final_message needs a text of the assistant as the last message",
                param="continue_final_message",
            )
        return "last turn"


class ChatFormatter(ChoicesFormatter):
    """Formats the response of `/v1/chat/completions`.

    Args:
        body: body of the request.
        usage: token counts of the request, which grow with each delta.
        model: name of the model.
        tokenizer: tokenizer of the model.
        prompt: token ids of the prompt.
        request_id: id of the request, for errors.
    """

    def __init__(
        self,
        body: ChatBody,
        usage: Usage,
        *,
        model: str,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        request_id: str,
    ) -> None:
        super().__init__(
            usage,
            outputs=body.n or 1,
            kind="chat.completion",
            chunk_kind="chat.completion.chunk",
            id_prefix="chatcmpl",
            model=model,
            usage_chunks=body.usage_chunks,
            request_id=request_id,
        )
        self._tokenizer, self._logprobs = tokenizer, bool(body.logprobs)
        self._num_top, self._prompt_logprobs = body.top_logprobs or 0, body.prompt_logprobs
        self._prompt = prompt if body.return_token_ids else None
        self._started: set[int] = set()
        self._epochs: dict[int, list[int]] = {}
        self._calls = [-1] * self.outputs  # index of the newest call

    def complete(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the complete response, with the prompt's tokens and scores if requested."""
        response = super().complete(deltas)
        if self._prompt is not None:
            response["prompt_token_ids"] = list(self._prompt)
        if self._prompt_logprobs is not None:
            scores = deltas[0].prompt_scores or ()
            response["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, scores, self._prompt_logprobs
            )
        return response

    def choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the choice of a complete output from all of its deltas."""
        index = deltas[-1].index
        texts = {"text": "", "reasoning": ""}
        calls: list[dict[str, Any]] = []
        for segment in (segment for delta in deltas for segment in delta.segments):
            if segment.kind == "call":
                calls.append(self._call(segment.text))
            elif segment.kind == "arguments":
                calls[-1]["function"]["arguments"] += segment.text
            elif segment.kind in texts:
                texts[segment.kind] += segment.text
        scores = [score for delta in deltas for score in delta.scores]
        message = {
            "role": "assistant",
            "content": None if calls and not texts["text"] else texts["text"],
            "refusal": None,
        }
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._scores(scores),
            "weight_epochs": [epoch for delta in deltas for epoch in delta.epochs],
            **self._token_ids(scores),
            **ending(deltas[-1]),
        }

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of a delta. The first choice of an output has the role, the last has
        only the finish reason."""
        choices = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            prompt = {} if self._prompt is None else {"prompt_token_ids": list(self._prompt)}
            role = {"role": "assistant", "content": ""}
            choices.append(self._chunk_choice(delta.index, role, **prompt))
        # The epochs of tokens without text yet are sent with the next chunk.
        epochs = [*self._epochs.pop(delta.index, ()), *delta.epochs]
        chunk_fields = [
            fields for segment in delta.segments if (fields := self._fields(delta.index, segment))
        ]
        reports_tokens = self._logprobs or self._prompt is not None
        if not chunk_fields and reports_tokens and delta.scores:
            chunk_fields.append({"content": ""})
        for fields in chunk_fields:
            choices.append(self._chunk_choice(delta.index, fields))
        if chunk_fields:  # only one chunk of a step reports its tokens
            token_fields = {"logprobs": self._scores(delta.scores), "weight_epochs": epochs}
            token_fields |= self._token_ids(delta.scores)
            choices[-len(chunk_fields)] |= token_fields
            epochs = []
        if delta.finish_reason:
            fields = {**ending(delta), "weight_epochs": epochs}
            choices.append(self._chunk_choice(delta.index, {}, **fields))
        else:
            self._epochs[delta.index] = epochs
        return choices

    def _fields(self, index: int, segment: OutputSegment) -> dict[str, Any] | None:
        """Return the chunk's fields for a part; None for no chunk."""
        if segment.kind == "text":
            return {"content": segment.text}
        if segment.kind == "reasoning":
            return {"reasoning_content": segment.text}
        if segment.kind == "call":
            self._calls[index] += 1
            return {"tool_calls": [{"index": self._calls[index], **self._call(segment.text)}]}
        if segment.kind == "arguments":
            call = {"index": self._calls[index], "function": {"arguments": segment.text}}
            return {"tool_calls": [call]}
        return None

    def _call(self, name: str) -> dict[str, Any]:
        """Return a new tool call without arguments."""
        function = {"name": name, "arguments": ""}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

    def _chunk_choice(self, index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}

    def _token_ids(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        """Return the field `token_ids` if it is requested."""
        return {} if self._prompt is None else {"token_ids": [score.id for score in scores]}

    def _scores(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None

        def token_score(token: int, logprob: float | None) -> dict[str, Any]:
            text, in_bytes = (show(self._tokenizer, token) for show in (token_text, token_bytes))
            return {"token": text, "logprob": logprob, "bytes": in_bytes}

        return {
            "content": [
                {
                    **token_score(score.id, score.logprob),
                    "top_logprobs": [token_score(*top) for top in score.top[: self._num_top]],
                }
                for score in scores
            ],
            "refusal": None,
        }
