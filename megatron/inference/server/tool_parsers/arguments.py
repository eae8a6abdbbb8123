# SPDX-License-Identifier: Apache-2.0
"""Values of tool parameters: the JSON types of a schema, and conversion of model output to JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Schemas derived from Python signatures use the names of Python types.
_JSON_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "str": "string",
        "int": "integer",
        "float": "number",
        "bool": "boolean",
        "list": "array",
        "tuple": "array",
        "dict": "object",
    }
)

_PYTHON_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|(?P<word>[A-Za-z]+)|(?P<number>-?[0-9][0-9.eE+-]*)|(?P<mark>[\[\](){},:]))\s*""",
    re.DOTALL,
)
_PYTHON_WORDS: Mapping[str, str] = MappingProxyType(
    {"True": "true", "False": "false", "None": "null"}
    | {word: word for word in ("true", "false", "null")}
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))|([\"\x00-\x1f])",
    re.DOTALL,
)
_NAMED_ESCAPES: Mapping[str, str] = MappingProxyType(
    {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
    | {"\\": "\\", "'": "'", '"': '"', "\n": ""}
)


def value_types(schema: Any) -> set[str] | None:
    """Return the JSON types that a schema allows; None if it does not specify types."""
    if not isinstance(schema, Mapping):
        return None
    types = schema.get("type")
    if isinstance(types, str):
        return {_JSON_TYPES.get(types, types)}
    if isinstance(types, list):
        return {_JSON_TYPES.get(str(name), str(name)) for name in types}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_type(value) for value in values}
    branches = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(branches, list):
        allowed = [value_types(branch) for branch in branches]
        return None if None in allowed else {kind for kinds in allowed for kind in kinds or ()}
    return None


def parameter_json(text: str, types: set[str] | None) -> str:
    """Return the JSON of a parameter's text.

    The text is parsed as JSON or as a Python literal. If the type of its value is not allowed, the
    text becomes a JSON string. Null is allowed for every parameter that is not a string, as models
    write it for omitted parameters.

    Args:
        text: text of the model.
        types: JSON types that the schema allows; None for any type.
    """
    stripped = text.strip()
    for candidate in (stripped, _python_as_json(stripped)):
        if candidate is not None and _allows(types, _json_type(candidate)):
            return candidate
    if types is not None and "string" not in types:
        respelled = _respelled(stripped.lower(), types)
        if respelled is not None:
            return respelled
    return json.dumps(text, ensure_ascii=False)


def arguments_json(text: str) -> str | None:
    """Return the arguments of a call as the JSON text of an object; None if they are invalid.

    Args:
        text: JSON text: an object, a string with the JSON of an object, an empty string, or null.
    """
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text = value
            value = json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return None
    if value is None:
        return "{}"
    return text if isinstance(value, dict) else None


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _no_number(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _json_type(text: str) -> str | None:
    """Return the JSON type of a text; None if the text is not JSON."""
    try:
        return _type(json.loads(text, parse_constant=_no_number))
    except (ValueError, RecursionError):
        return None


def _allows(types: set[str] | None, kind: str | None) -> bool:
    if kind is None or types is None or kind in types:
        return kind is not None
    return (kind == "integer" and "number" in types) or (kind == "null" and "string" not in types)


def _respelled(text: str, types: set[str]) -> str | None:
    """Return the JSON of a lower-case word or number that JSON spells differently; None
    for other text."""
    if text in ("null", "none"):
        return "null"
    if text in ("true", "false") and "boolean" in types:
        return text
    try:
        if "integer" in types:
            return str(int(text))
        if "number" in types and math.isfinite(float(text)):
            return repr(float(text))
    except ValueError:
        pass
    return None


def _python_as_json(text: str) -> str | None:
    """Return the JSON of a Python literal: True, False, None, a list, a tuple or a dict; None for
    other text. The text is not evaluated, and the caller has to check that the JSON is valid."""
    if not text or text[0] not in "TFN[{(":
        return None
    json_tokens: list[str] = []
    position = 0
    while position < len(text):
        token = _PYTHON_TOKEN.match(text, position)
        if token is None:
            return None
        position = token.end()
        if token["string"]:
            json_tokens.append(_python_string(token["string"][1:-1]))
        elif token["word"]:
            if token["word"] not in _PYTHON_WORDS:
                return None
            json_tokens.append(_PYTHON_WORDS[token["word"]])
        elif token["number"]:
            json_tokens.append(token["number"])
        else:
            _add_mark(json_tokens, token["mark"])
    return "".join(json_tokens)


def _add_mark(json_tokens: list[str], mark: str) -> None:
    """Append a bracket, a comma or a colon to JSON tokens. A comma before a closing bracket is
    dropped, and a key before a colon is quoted."""
    if mark in "])}" and json_tokens and json_tokens[-1] == ", ":
        json_tokens.pop()
    if mark == ":" and json_tokens and json_tokens[-1][0] not in '"]}':
        json_tokens[-1] = f'"{json_tokens[-1]}"'
    json_tokens.append({"(": "[", ")": "]", ",": ", ", ":": ": "}.get(mark, mark))


def _python_string(text: str) -> str:
    """Return the JSON of the content of a string literal."""

    def as_json(escape: re.Match[str]) -> str:
        two, four, eight, octal, char, raw = escape.groups()
        if four is not None:
            return f"\\u{four}"  # also half of a surrogate pair
        if raw is None and char is not None:
            raw = _NAMED_ESCAPES.get(char, "\\" + char)
        elif raw is None:
            code = int(octal, 8) if octal is not None else int(two or eight, 16)
            raw = chr(code) if code <= 0x10FFFF else "\ufffd"
        return json.dumps(raw)[1:-1]

    return f'"{_ESCAPE.sub(as_json, text)}"'
