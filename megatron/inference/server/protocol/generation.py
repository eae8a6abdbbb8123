# SPDX-License-Identifier: Apache-2.0
"""The fields of a body that all APIs with generated text share."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron.cli.tokenizers import Tokenizer
from megatron.core.inference.requests import EngineRequest
from megatron.core.inference.sampling import SamplingParams
from megatron.inference.server.output_processor import GenerationRequest
from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.body import (
    MAX_LOGPROBS,
    MAX_OUTPUTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_TEXT,
    MAX_TOKENS,
    AccountFields,
    Body,
    NoEffect,
    ServedValues,
    Text,
    Token,
)
from megatron.inference.server.protocol.validation_error import short_json

MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 64
MAX_BIASES = 1024
#: Most characters of a grammar or a regular expression.
MAX_GRAMMAR = 64 << 10
MAX_CHOICES = 1024

UsageChunks = Literal["none", "last", "all"]
#: The names of fields of `EngineRequest` in all APIs, where they differ.
ENGINE_FIELD_NAMES: Mapping[str, str] = {
    "min_new_tokens": "min_tokens",
    "allowed_tokens": "allowed_token_ids",
    "banned_sequences": "bad_words",
}

_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    """The last chunk reports the usage."""
    continuous_usage_stats: bool = False
    """Every chunk reports the usage so far."""
    include_obfuscation: NoEffect = None


class SchemaFormat(Body):
    """A named JSON schema, which is always enforced, as with `strict`."""

    name: Annotated[str, Field(max_length=256)]
    """Name of the schema."""
    description: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    """Description of the schema."""
    json_schema: dict[str, Any] = Field({"type": "object"}, alias="schema")
    """The JSON Schema."""
    strict: bool | None = None
    """The schema is enforced whether it is set or not."""


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
    """The schema and its name."""


def schema_format(schema: dict[str, Any]) -> JsonSchemaFormat:
    """Return the format of JSON that follows a schema without a name."""
    return JsonSchemaFormat(type="json_schema", json_schema=SchemaFormat(name="", schema=schema))


_Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]
_Choices = Annotated[list[_Grammar], Field(min_length=1, max_length=MAX_CHOICES)]
_WhiteSpace = Annotated[str, Field(min_length=1, max_length=256)]


class StructuredOutputs(Body):
    """The constraint on an output: exactly one of `json`, `regex`, `choice` and `grammar` is set;
    `whitespace_pattern` is the regular expression of white space between JSON tokens."""

    json_schema: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    """A JSON Schema."""
    regex: _Grammar | None = None
    """A regular expression of the whole output."""
    choice: _Choices | None = None
    """The possible outputs."""
    grammar: _Grammar | None = None
    """A Lark grammar."""
    whitespace_pattern: _WhiteSpace | None = None
    """Regular expression of the white space between JSON tokens; by default at most one blank."""


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
    min_length: Annotated[Any, ServedValues((0,), "use min_tokens")] = None
    repeat_penalty: Annotated[Any, ServedValues((1,), "use repetition_penalty")] = None
    temp: Annotated[Any, ServedValues(fix="use temperature")] = None
    stop_sequences: Annotated[Any, ServedValues(([],), "use stop")] = None
    grammar: Annotated[Any, ServedValues(("",), "use structured_outputs.grammar")] = None


class PrefixCacheFields(Body):
    """The field of all routes that generate text which selects the cached prefixes."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The request shares cached prefixes only with requests of the same salt, so that tenants
    cannot test what others have sent."""


class GenerationBody(ForeignFields, AccountFields, PrefixCacheFields):
    """The common fields of all routes that generate."""

    needs_language_model = True

    model: str | None = None
    """A served model name; another name is answered with 404."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Most new tokens. The prompt and the new tokens have at most `max_model_len` tokens."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 selects the most probable token."""
    do_sample: bool | None = None
    """false: the temperature is 0, and a positive `temperature` is refused."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Samples from the smallest set of tokens with this probability."""
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """Samples from so many tokens; 0 and -1 turn it off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drops tokens below this fraction of the largest probability."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """Divides positive logits, and multiplies negative ones, of tokens of the prompt and the
    output."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logits of tokens of the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logits for each occurrence in the output."""
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
    """Added to the logits, by token id; up to 1,024 tokens."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    """Seed of the samples; without it they differ between requests."""
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    """Strings that end an output; they may begin and end inside tokens."""
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS)] | None = None
    """Further tokens that end an output."""
    ignore_eos: bool | None = None
    """The model's stop tokens do not end an output."""
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    """Lower numbers are served first; the default is 0."""
    n: Annotated[int, Field(ge=1, le=MAX_OUTPUTS)] | None = None
    """Outputs per prompt; up to 64 outputs per request."""
    stream: bool | None = None
    """Sends the output as server-sent events."""
    stream_options: StreamOptions | None = None
    """Options of the stream; needs `stream`."""
    response_format: (
        Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None
    """Restricts an output to JSON, or to JSON that follows a schema."""
    structured_outputs: StructuredOutputs | None = None
    """Restricts an output by one of `json`, `regex`, `choice` and `grammar`."""
    # Earlier names of the fields of `structured_outputs`.
    guided_json: dict[str, Any] | Text | None = None
    """Earlier name of `structured_outputs.json`."""
    guided_regex: _Grammar | None = None
    """Earlier name of `structured_outputs.regex`."""
    guided_choice: _Choices | None = None
    """Earlier name of `structured_outputs.choice`."""
    guided_grammar: _Grammar | None = None
    """Earlier name of `structured_outputs.grammar`."""
    guided_whitespace_pattern: _WhiteSpace | None = None
    """Earlier name of `structured_outputs.whitespace_pattern`."""
    guided_decoding_backend: NoEffect = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    """No stop token and no stop string ends an output before so many tokens; up to `max_tokens`."""
    allowed_token_ids: Annotated[list[Token], Field(min_length=1)] | None = None
    """The only tokens of an output."""
    bad_words: Annotated[list[_Stop], Field(max_length=MAX_BAD_WORDS)] | None = None
    """Texts that are banned as their tokens, with and without a blank before them."""
    include_stop_str_in_output: bool = False
    """The text ends with the stop string."""
    skip_special_tokens: bool = True
    """false: the text contains special tokens by name."""
    spaces_between_special_tokens: NoEffect = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    """Keeps the last tokens of the prompt; -1 keeps as many as fit."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Number of alternatives that are reported for each prompt token; not in streams."""
    return_token_ids: bool = False
    """Reports `token_ids` of each choice, and `prompt_token_ids`."""
    return_tokens_as_token_ids: Annotated[Any, ServedValues((False,), "use return_token_ids")] = (
        None
    )
    request_id: NoEffect = None
    metadata: NoEffect = None
    prediction: NoEffect = None

    @property
    def usage_chunks(self) -> UsageChunks:
        """The chunks of a stream that report the usage."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "none"
        return "all" if options.continuous_usage_stats else "last"

    def check_stream(self) -> None:
        """Raise ApiError for options of streams without `stream`, and the reverse."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs needs stream: false", param="prompt_logprobs")

    @model_validator(mode="after")
    def _merge_guided_fields(self) -> GenerationBody:
        """Set `structured_outputs` from the fields `guided_*`."""
        names = ("json", "regex", "choice", "grammar", "whitespace_pattern")
        fields = {name: getattr(self, f"guided_{name}") for name in names}
        guided = {name: value for name, value in fields.items() if value is not None}
        if not guided:
            return self
        name = f"guided_{next(iter(guided))}"
        if self.structured_outputs is not None:
            raise ApiError(400, f"{name}: give structured_outputs or this field", param=name)
        if isinstance(schema := guided.get("json"), str):
            try:
                guided["json"] = json.loads(schema)
            except (ValueError, RecursionError):
                raise ApiError(400, f"{name} is not valid JSON", param=name) from None
            if not isinstance(guided["json"], dict):
                value = short_json(guided["json"])
                raise ApiError(400, f"{name} is {value}: give a JSON object", param=name)
        self.structured_outputs = StructuredOutputs(**guided)
        return self

    def grammar_field(self, kind: str) -> str:
        """Return the field of the request with the `kind` of `structured_outputs`."""
        is_guided = getattr(self, f"guided_{kind}") is not None
        return f"guided_{kind}" if is_guided else f"structured_outputs.{kind}"

    @model_validator(mode="after")
    def _select_greedy(self) -> GenerationBody:
        """Set the temperature from `do_sample`."""
        if self.do_sample is False:
            if self.temperature:
                raise ApiError(
                    400,
                    f"do_sample is false and temperature is {self.temperature:g}: leave one of "
                    "them out",
                    param="do_sample",
                )
            self.temperature = 0.0
        return self

    def token_constraints(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the fields of `EngineRequest` that restrict the tokens of an output.

        A bad word is banned as the tokens of the word, and of the word after a blank.
        """
        banned = []
        for word in self.bad_words or ():
            for text in dict.fromkeys((word, f" {word.lstrip()}")):
                tokens = tokenizer.tokenize(text, add_special_tokens=False)
                if tokens and tokens not in banned:
                    banned.append(tokens)
        return {
            "min_new_tokens": self.min_tokens or 0,
            "allowed_tokens": tuple(self.allowed_token_ids or ()),
            "banned_sequences": tuple(map(tuple, banned)),
        }

    def truncate(
        self, tokens: Sequence[int], max_length: int | None, max_new_tokens: int | None
    ) -> Sequence[int]:
        """Return the last tokens of a prompt, as many as `truncate_prompt_tokens`.

        Args:
            tokens: token ids of the prompt.
            max_length: longest sequence of the model; -1 leaves room for the new tokens in it.
            max_new_tokens: most new tokens; None reserves one token.
        """
        count = self.truncate_prompt_tokens
        if count == -1 and max_length is not None:
            count = max(1, max_length - (1 if max_new_tokens is None else max_new_tokens))
        if count is None or count < 0:
            return tokens
        if count == 0:
            raise ApiError(
                400,
                "truncate_prompt_tokens is 0: give a positive number, or -1",
                param="truncate_prompt_tokens",
            )
        return tokens[-count:]

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
        # Each API has its own field for the number of alternatives. The prompt may need more.
        fields["logprobs"] = logprobs
        if self.prompt_logprobs is not None:
            fields["logprobs"] = max(self.prompt_logprobs, logprobs or 0)
        return SamplingParams(**{k: value for k, value in fields.items() if value is not None})

    def generation_request(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        default_stop_tokens: Sequence[int],
        max_new_tokens: int,
        logprobs: int | None,
        names: Mapping[str, str],
        prompt_logprobs: bool = False,
        **engine_fields: Any,
    ) -> GenerationRequest:
        """Return the engine's requests, one for each output.

        Args:
            prompts: token ids of each prompt.
            default_stop_tokens: stop tokens of the model, ignored with `ignore_eos`.
            max_new_tokens: most tokens of each output.
            logprobs: number of alternatives to report per token.
            names: see `GenerationRequest`.
            prompt_logprobs: report the prompt's log-probabilities even if the field of this name
                does not ask for them.
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
            cache_salt=self.cache_salt or "",
            prompt_logprobs=prompt_logprobs or self.prompt_logprobs is not None,
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
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            names={**ENGINE_FIELD_NAMES, **names},
        )
