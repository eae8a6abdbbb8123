# SPDX-License-Identifier: Apache-2.0
"""The fields of requests and their bounds. Unknown fields are rejected by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron.inference.server.chat_template import NO_PARAMETERS, Tool, ToolCall, Turn
from megatron.inference.server.middleware.request_guard import ApiError
from megatron.inference.server.output_processor import GenerationRequest

#: Most outputs of one prompt, and of all prompts of a request.
MAX_OUTPUTS, MAX_REQUEST_OUTPUTS = 16, 64
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 256
MAX_STOP_TOKENS = 64
MAX_PROMPTS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
#: Most characters of a prompt or a message; the limit of the body is usually lower.
MAX_TEXT = 8 << 20
MAX_TOKENS = 1 << 24
#: Most characters of a grammar or a regular expression.
MAX_GRAMMAR = 64 << 10
MAX_CHOICES = 1024
MAX_TOOLS = 128
#: Most tool calls of one message.
MAX_CALLS = 128

_Token = Annotated[int, Field(ge=0, lt=1 << 31)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_Tokens = Annotated[list[_Token], Field(min_length=1)]
Prompts = (
    _Text
    | _Tokens
    | Annotated[list[_Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
)
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
TemplateVariables = Annotated[
    dict[Annotated[str, Field(max_length=64)], bool | int | float | _Text | None],
    Field(max_length=16),
]


class Body(BaseModel):
    """A JSON object with strictly typed fields; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False


class SchemaFormat(Body):
    """A named JSON schema, which is always enforced, as with `strict`."""

    name: Annotated[str, Field(max_length=256)]
    description: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = {"type": "object"}
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaFormat


def schema_format(schema: dict[str, Any]) -> JsonSchemaFormat:
    """Return the format of JSON that follows a schema without a name."""
    return JsonSchemaFormat(type="json_schema", json_schema=SchemaFormat(name="", schema=schema))


class StructuredOutputs(Body):
    """The constraint on an output: exactly one field is set."""

    json_schema: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]],
            Field(min_length=1, max_length=MAX_CHOICES),
        ]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)] | None = None


class GenerationBody(Body):
    """The common fields of all routes that generate."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^\d{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[_Token], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_OUTPUTS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: (
        Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def json_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of outputs; None if they need not be JSON."""
        if isinstance(self.response_format, JsonSchemaFormat):
            return self.response_format.json_schema.json_schema
        if isinstance(self.response_format, JsonFormat):
            return {"type": "object"}
        return None if self.structured_outputs is None else self.structured_outputs.json_schema

    def sampling(self, *, seed: int, logprobs: int | None) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the request sets.

        Args:
            seed: seed if the request sets none.
            logprobs: number of alternatives to report per token.
        """
        names = ("temperature", "top_p", "min_p", "repetition_penalty")
        names += ("presence_penalty", "frequency_penalty", "seed")
        values = {name: getattr(self, name) for name in names}
        fields = {name: value for name, value in values.items() if value is not None}
        if self.top_k is not None:
            fields["top_k"] = max(self.top_k, 0)  # -1 keeps all, as 0 does
        if self.logit_bias:
            fields["logit_bias"] = [(int(t), bias) for t, bias in self.logit_bias.items()]
        return {"seed": seed, "logprobs": logprobs, **fields}

    def generation_request(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        default_stop_tokens: Sequence[int],
        max_new_tokens: int | None,
        sampling: dict[str, Any],
        names: Mapping[str, str],
        prompt_logprobs: bool = False,
        grammar: str | None = None,
    ) -> GenerationRequest:
        """Return the request for outputs.

        Args:
            prompts: token ids of each prompt.
            default_stop_tokens: stop tokens of the model, ignored with `ignore_eos`.
            max_new_tokens: see `GenerationRequest`.
            sampling: return value of `sampling`.
            names, prompt_logprobs, grammar: see `GenerationRequest`.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        stop_tokens = {
            *(self.stop_token_ids or ()),
            *(() if self.ignore_eos else default_stop_tokens),
        }
        return GenerationRequest(
            prompts=prompts,
            n=self.n or 1,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            stop_tokens=sorted(stop_tokens),
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            priority=self.priority or 0,
            names=names,
        )


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: _Text


class CalledFunction(Body):
    """The function of a tool call of an earlier turn."""

    name: ToolName
    arguments: _Text


class MessageCall(Body):
    """A tool call of an earlier turn."""

    id: CallId
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Body):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        _Text | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    tool_calls: Annotated[list[MessageCall], Field(min_length=1, max_length=MAX_CALLS)] | None = (
        None
    )
    tool_call_id: CallId | None = None
    reasoning_content: _Text | None = None
    refusal: None = None

    @property
    def text(self) -> str:
        """The joined text of all parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(text_part.text for text_part in self.content or ())

    def turn(self) -> Turn:
        """Return the turn of a conversation. Raises ApiError for an invalid message."""
        answers = self.tool_calls is not None or self.reasoning_content is not None
        problem = None
        if answers and self.role != "assistant":
            problem = "tool_calls and reasoning_content are allowed in assistant messages only"
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
            reasoning=self.reasoning_content,
            call_id=self.tool_call_id,
        )


_Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class Function(Body):
    """A function that may be called."""

    name: ToolName
    description: _Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

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


class FunctionName(Body):
    """The name of a function."""

    name: ToolName


class NamedChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: _Messages
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a conversation that the chat template renders."""

    model: str | None = None
    prompt: _Text | None = None
    messages: _Messages | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[_Token]
