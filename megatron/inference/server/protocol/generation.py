# SPDX-License-Identifier: Apache-2.0
"""The fields of a body that all APIs with generated text share."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron.core.inference.requests import EngineRequest
from megatron.core.inference.sampling import SamplingParams
from megatron.inference.server.output_processor import GenerationRequest
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.body import (
    MAX_OUTPUTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TEXT,
    MAX_TOKENS,
    Body,
    NoEffect,
    ServedValues,
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
    continuous_usage_stats: bool = False
    include_obfuscation: NoEffect = None


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


class ForeignFields(Body):
    """Fields of other servers that would change the answer, by the values that turn them off."""

    typical_p: Annotated[Any, ServedValues((1,))] = None
    top_a: Annotated[Any, ServedValues((0,))] = None
    tfs: Annotated[Any, ServedValues((1,))] = None
    mirostat: Annotated[Any, ServedValues((0, False))] = None
    mirostat_mode: Annotated[Any, ServedValues((0,))] = None
    dry_multiplier: Annotated[Any, ServedValues((0,))] = None
    xtc_probability: Annotated[Any, ServedValues((0,))] = None
    no_repeat_ngram_size: Annotated[Any, ServedValues((0,))] = None
    num_beams: Annotated[Any, ServedValues((1,), "use n and use_beam_search")] = None
    max_new_tokens: Annotated[Any, ServedValues(fix="use max_tokens")] = None
    max_length: Annotated[Any, ServedValues(fix="use max_tokens")] = None
    n_predict: Annotated[Any, ServedValues(fix="use max_tokens")] = None
    min_new_tokens: Annotated[Any, ServedValues((0,), "use min_tokens")] = None
    repeat_penalty: Annotated[Any, ServedValues((1,), "use repetition_penalty")] = None
    temp: Annotated[Any, ServedValues(fix="use temperature")] = None
    stop_sequences: Annotated[Any, ServedValues(([],), "use stop")] = None
    grammar: Annotated[Any, ServedValues(("",), "use structured_outputs.grammar")] = None
    do_sample: Annotated[Any, ServedValues((True,), "use temperature: 0 for greedy")] = None


class GenerationBody(ForeignFields):
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
    user: NoEffect = None
    metadata: NoEffect = None
    service_tier: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None
    prediction: NoEffect = None

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream reports the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check_stream_options(self) -> None:
        """Raise ApiError for stream options without `stream`."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")

    @property
    def constrains_output(self) -> bool:
        """Whether the body may ask for a grammar."""
        return self.response_format is not None or self.structured_outputs is not None

    @property
    def json_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema of outputs; None if they need not be JSON."""
        if isinstance(self.response_format, JsonSchemaFormat):
            return self.response_format.json_schema.json_schema
        if isinstance(self.response_format, JsonFormat):
            return {"type": "object"}
        return None if self.structured_outputs is None else self.structured_outputs.json_schema

    def sampling(self, *, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters: the fields of the body with the names of its fields.

        Args:
            logprobs: number of alternatives to report per token.
        """
        fields = {f.name: getattr(self, f.name, None) for f in dataclasses.fields(SamplingParams)}
        if self.top_k is not None:
            fields["top_k"] = max(self.top_k, 0)  # -1 keeps all, as 0 does
        if self.logit_bias is not None:
            fields["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.seed is None:
            fields["seed"] = secrets.randbits(63)
        # Each API has its own field for the number of alternatives.
        fields["logprobs"] = logprobs
        return SamplingParams(**{k: value for k, value in fields.items() if value is not None})

    def generation_request(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        default_stop_tokens: Sequence[int],
        max_new_tokens: int,
        logprobs: int | None,
        names: Mapping[str, str],
        **engine_fields: Any,
    ) -> GenerationRequest:
        """Return the engine's requests, one for each output.

        Args:
            prompts: token ids of each prompt.
            default_stop_tokens: stop tokens of the model, ignored with `ignore_eos`.
            max_new_tokens: most tokens of each output.
            logprobs: number of alternatives to report per token.
            names: see `GenerationRequest`.
            engine_fields: other fields of `EngineRequest`.
        """
        stop_tokens = {
            *(self.stop_token_ids or ()),
            *(() if self.ignore_eos else default_stop_tokens),
        }
        request = EngineRequest(
            prompt=(),
            max_new_tokens=max_new_tokens,
            sampling=self.sampling(logprobs=logprobs),
            stop_tokens=tuple(sorted(stop_tokens)),
            priority=self.priority or 0,
            **engine_fields,
        )
        n = self.n or 1
        outputs = [tuple(prompt) for prompt in prompts for _ in range(n)]
        return GenerationRequest(
            requests=[
                dataclasses.replace(request, prompt=prompt, sequence=sequence)
                for sequence, prompt in enumerate(outputs)
            ],
            n=n,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            names=names,
        )
