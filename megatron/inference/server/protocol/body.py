# SPDX-License-Identifier: Apache-2.0
"""The body of a request: strict JSON, the types and bounds that several APIs share.

`parse_body` is the only place where a body is validated, and `Body` states the rule for unknown
fields.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.inference.server.protocol.api_error import ApiError

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

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
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


class Body(BaseModel):
    """A JSON object with strictly typed fields; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def parse_body(body: type[B], data: bytes) -> B:
    """Return the validated body of a request. Raises ApiError for invalid fields."""
    check_keys(data)
    try:
        return body.model_validate_json(data)
    except ValidationError as error:
        raise validation_error(
            error.errors(include_url=False, include_context=False, include_input=False)
        ) from None


def check_keys(data: bytes) -> None:
    """Raise ApiError for JSON with a duplicate key in an object. Invalid JSON passes."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        json_object = dict(pairs)
        if len(json_object) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    printable_key = key[:100].encode(errors="replace").decode()
                    raise ApiError(
                        400, f"the key {printable_key!r} is duplicated", param=printable_key
                    )
                seen.add(key)
        return json_object

    with contextlib.suppress(ValueError, RecursionError):
        json.loads(data, object_pairs_hook=unique)


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the answer to a body with invalid fields; it names the first invalid field.

    For a field of a union type it explains the alternative that matched deepest.
    """
    field = problems[0]["loc"][:1]
    deepest = max(
        (problem for problem in problems if problem["loc"][:1] == field),
        key=lambda problem: (len(problem["loc"]), problem["type"] != "string_type"),
    )
    # Drop the names of union members, which pydantic inserts into `loc`.
    path = [
        str(component)
        for component in deepest["loc"]
        if re.fullmatch(r"\d+|[a-z_]+", str(component))
    ]
    name = path[0] if path else None
    dotted_path = ".".join(path)
    kind = deepest["type"]
    if kind == "extra_forbidden":
        message = f"{dotted_path}: this server does not support this field: leave it out"
    elif kind == "json_invalid":
        message, name = "the body is not valid JSON", None
    else:
        message = f"{dotted_path}: {deepest['msg']}" if dotted_path else str(deepest["msg"])
    return ApiError(400, message, param=name)
