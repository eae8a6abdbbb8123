# SPDX-License-Identifier: Apache-2.0
"""The fields of a body that all APIs with generated text share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron.inference.server.middleware.api_error import ApiError
from megatron.inference.server.output_processor import GenerationRequest
from megatron.inference.server.protocol.body import (
    MAX_OUTPUTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TEXT,
    MAX_TOKENS,
    Body,
    Token,
)

MAX_STOP_TOKENS = 64
MAX_BIASES = 1024
#: Most characters of a grammar or a regular expression.
MAX_GRAMMAR = 64 << 10
MAX_CHOICES = 1024

_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False


class SchemaFormat(Body):
    """A named JSON schema, which is always enforced, as with `strict`."""

    name: Annotated[str, Field(max_length=256)]
    description: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    json_schema: dict[str, Any] = Field({"type": "object"}, alias="schema")
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
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS)] | None = None
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
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream reports the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream_options(self) -> None:
        """Raise ApiError for stream options without `stream`."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")

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
