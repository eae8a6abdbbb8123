# SPDX-License-Identifier: Apache-2.0
"""The body of a request: strict JSON, the types and bounds that several APIs share.

`parse_body` is the only place where a body is validated. The rules for all APIs:

- A null is an absent field.
- A field that cannot change the answer is accepted (`NoEffect`).
- A field that the server can serve for some values only is refused for the others
  (`ServedValues`).
- An unknown field whose name resembles a known field is refused, as it may be misspelled.
- Any other unknown field is ignored and reported, or refused if the server has strict fields.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from megatron.inference.server.protocol.api_error import ApiError
from megatron.inference.server.protocol.validation_error import (
    MISSPELLED,
    UNKNOWN,
    misspelled,
    param_of,
    printable,
    short_json,
    validation_error,
)

B = TypeVar("B", bound="Body")

#: Most outputs of one prompt, and of all prompts of a request.
MAX_OUTPUTS, MAX_REQUEST_OUTPUTS = 16, 64
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 256
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
#: Most characters of a prompt or a message; the limit of the body is usually lower.
MAX_TEXT = 8 << 20
MAX_TOKENS = 1 << 24
MAX_TOOLS = 128
#: Most tool calls of one message.
MAX_CALLS = 128

#: Title of token ids in the schemas.
TOKEN_ID = "token id"
Token = Annotated[int, Field(ge=0, lt=1 << 31, title=TOKEN_ID)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Prompts = (
    Text
    | Tokens
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
)
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
TemplateVariables = Annotated[
    dict[Annotated[str, Field(max_length=64)], bool | int | float | Text | None],
    Field(max_length=16),
]


#: Most distinct unknown fields of a body, and the longest name that is compared with known names.
MAX_UNKNOWN_FIELDS, MAX_COMPARED_NAME = 64, 64
#: Smallest similarity (`difflib`) of an unknown name to the known name that was probably meant.
_SIMILARITY = 0.83

#: A field that cannot change the answer of this server: any value is accepted.
NoEffect = Annotated[Any, Field(description="Accepted. It does not change the answer.")]


# Compared by identity: `typing` caches Annotated by equality, and (0,) equals (False,).
@dataclass(frozen=True, eq=False)
class ServedValues:
    """Annotation of a field that the server can serve for some values only.

    Args:
        values: JSON values that are served; with no values every use of the field is refused.
        fix: what the user can do instead, for the error.
    """

    values: tuple[Any, ...] = ()
    fix: str = "leave it out"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of the annotated type, followed by the check."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON schema: an enumeration of the values."""
        return {"enum": [*self.values, None], "description": f"Other values: {self.fix}."}

    def _check(self, value: Any) -> Any:
        # A boolean is not a number in JSON.
        if any(
            value == served and isinstance(value, bool) == isinstance(served, bool)
            for served in self.values
        ):
            return value
        value_text = short_json(value)
        reason = "this server does not support this value"
        raise PydanticCustomError(
            "not_served",
            "{reason} ({value_text}): {fix}",
            {"reason": reason, "value_text": value_text, "fix": self.fix},
        )


#: Effort of reasoning and length of answers, for templates that read them.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class Body(BaseModel):
    """A JSON object with strictly typed fields; see the rules of this module.

    Attributes:
        ignores_unknown_fields: whether an unknown field can be ignored at all.
        needs_language_model: whether the route generates text.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    ignores_unknown_fields: ClassVar[bool] = True
    needs_language_model: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        present = {name: value for name, value in fields.items() if value is not None}
        if not _required_fields(cls) <= present.keys():
            _explain_missing_field(cls, present)
        return present

    @property
    def template_hints(self) -> Mapping[str, tuple[str, Any]]:
        """Fields that set a variable of the chat template if the template reads it, by path: the
        variable and its value."""
        return {}


def _field_names(body: type[Body], *, required: bool = False) -> list[str]:
    """Return the names of the fields of a body, or of its required fields."""
    fields = body.model_fields.items()
    return [field.alias or name for name, field in fields if field.is_required() or not required]


@functools.cache
def _required_fields(body: type[Body]) -> frozenset[str]:
    return frozenset(_field_names(body, required=True))


def _explain_missing_field(body: type[Body], fields: Mapping[str, Any]) -> None:
    """Raise an error for an unknown field in place of a required field, if there is one."""
    kind = body.model_fields.get("type")
    if kind is not None and "type" in fields and fields["type"] not in get_args(kind.annotation):
        return  # an object of another type
    field_names = _field_names(body)
    unknown = [name for name in fields if name not in field_names][:MAX_UNKNOWN_FIELDS]
    for name in unknown:
        similar = similar_field(body, name)
        if similar is not None and similar not in fields:
            context = {"name": name, "similar": similar}
            raise PydanticCustomError(MISSPELLED, "a misspelled field", context)
    if unknown:
        missing = next(name for name in _field_names(body, required=True) if name not in fields)
        context = {"name": missing, "unknown": printable(unknown[0])}
        raise PydanticCustomError(
            UNKNOWN, "Field required, and {unknown} is an unknown field", context
        )


class AccountFields(Body):
    """OpenAI's fields about the user, billing and caching, which do not change the answer."""

    user: NoEffect = None
    service_tier: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None


def parse_body(body: type[B], data: bytes, *, strict_fields: bool = False) -> tuple[B, list[str]]:
    """Return the validated body of a request, and the paths of the fields that are ignored.

    Args:
        body: class of the body.
        data: bytes of the body.
        strict_fields: refuse unknown fields.

    Raises:
        ApiError: a field is invalid, cannot be served, or is unknown and must not be ignored.
    """
    infinite = check_keys(data)
    try:
        parsed = body.model_validate_json(data)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), data) from None
    if infinite:  # in a field of any type, as fields of numbers refuse it themselves
        number = printable(infinite[0])
        raise ApiError(400, f"the body has the number {number}: use a finite number")
    # An ignored field is reported once for all items of a list; an error names the first item.
    prefixes: dict[tuple[type[Body], str, str], str] = {}
    for owner, prefix, name in _unknown_fields(parsed, ""):
        prefixes.setdefault((owner, re.sub(r"\.\d+(?=\.)", "", prefix), name), prefix)
    if len(prefixes) > MAX_UNKNOWN_FIELDS:
        raise ApiError(400, f"the body has more than {MAX_UNKNOWN_FIELDS} unknown fields")
    for (owner, _, name), prefix in prefixes.items():
        similar = similar_field(owner, name)
        if similar is not None:
            message = misspelled(prefix + printable(name), prefix + similar)
        elif strict_fields or not body.ignores_unknown_fields:
            message = f"{prefix + printable(name)}: this server does not support this field: "
            message += "leave it out"
        else:
            continue
        raise ApiError(400, message, param=prefix.split(".")[0] or param_of(name))
    return parsed, list(dict.fromkeys(prefix + printable(name) for _, prefix, name in prefixes))


def _unknown_fields(body: Body, prefix: str) -> Iterator[tuple[type[Body], str, str]]:
    """Yield the unknown fields of a body and of its parts: the class, the path of the part, which
    ends with a dot, and the name."""
    for name in body.model_extra or ():
        yield type(body), prefix, name
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        path = f"{prefix}{field.alias or name}."
        if isinstance(value, Body):
            yield from _unknown_fields(value, path)
        # Lists of token ids are long and have no fields.
        elif isinstance(value, list) and value and not isinstance(value[0], int):
            for index, nested in enumerate(value):
                if isinstance(nested, Body):
                    yield from _unknown_fields(nested, f"{path}{index}.")


@functools.lru_cache(maxsize=4096)
def similar_field(body: type[Body], name: str) -> str | None:
    """Return the known field that an unknown name probably means; None if there is none.

    Camel case, dashes and blanks are the same name; other names are compared by `difflib`.
    """
    if len(name) > MAX_COMPARED_NAME:
        return None
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    snake_case = snake_case.replace("-", "_").replace(" ", "_").lower()
    return next(
        iter(difflib.get_close_matches(snake_case, _field_names(body), 1, _SIMILARITY)), None
    )


def check_keys(data: bytes) -> list[str]:
    """Raise ApiError for JSON with a duplicate key in an object; return its infinite numbers.

    Invalid JSON passes.
    """

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        json_object = dict(pairs)
        if len(json_object) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    message = f"the key {printable(key)} is duplicated: give it once"
                    raise ApiError(400, message, param=param_of(key))
                seen.add(key)
        return json_object

    infinite: list[str] = []

    def note(number: str) -> float:
        if not math.isfinite(value := float(number)):
            infinite.append(number)
        return value

    with contextlib.suppress(ValueError, RecursionError):
        json.loads(data, object_pairs_hook=unique, parse_constant=note, parse_float=note)
    return infinite
