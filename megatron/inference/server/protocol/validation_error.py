# SPDX-License-Identifier: Apache-2.0
"""The answer to an invalid body: one line with the path of the field, the value and the fix.

pydantic reports a problem for each member of a union type. The answer is about the members that
match the value best; if they all reject its type, the answer lists the accepted types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.inference.server.protocol.api_error import ApiError

#: Types of the errors for an unknown field where a required field is missing. Their context has the
#: name of the unknown field, and the name of the field that it resembles or that is missing.
MISSPELLED, UNKNOWN = "misspelled", "unknown_field"

#: Most nested arrays and objects of a body, a limit of pydantic's parser.
MAX_DEPTH = 200

#: What a member of a union type accepts, by the type of pydantic's error.
_ACCEPTED: dict[str, tuple[str, ...]] = {
    "string_type": ("a string",),
    "bool_type": ("true", "false"),
    "int_type": ("an integer",),
    "float_type": ("a number",),
    "list_type": ("an array",),
    "dict_type": ("an object",),
    "model_type": ("an object",),
    "model_attributes_type": ("an object",),
    "union_tag_not_found": ("an object with a type",),
}
#: Types of errors about the value, which their message does not contain.
_CONSTRAINTS = frozenset(
    {
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "string_pattern_mismatch",
        "string_too_long",
        "string_too_short",
    }
)


def printable(name: str) -> str:
    """Return a name from a request in printable ASCII, of at most 100 characters of the name.

    An empty name, and a name with blanks or commas, is quoted: a header cannot end in a blank.
    """
    escaped = name[:100].encode("unicode_escape").decode()
    return escaped if escaped and not set(" ,") & set(escaped) else f'"{escaped}"'


def param_of(name: str) -> str:
    """Return a name from a request as the `param` of an error; lone surrogates are escaped."""
    return name[:100].encode(errors="backslashreplace").decode()


def short_json(value: Any) -> str:
    """Return a value of a request as JSON, of at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def misspelled(path: str, similar: str) -> str:
    """Return the message about an unknown field that resembles a known field."""
    return f"{path}: this field is unknown: use {similar}"


def _values(expected: str) -> list[str]:
    """Return the values of pydantic's list of expected values, quoted strings or numbers."""
    return re.findall(r"'[^']*'|\d+", expected)


@dataclass(frozen=True)
class _Problem:
    """A problem of pydantic.

    Args:
        details: the problem.
        path: keys and indices of the value in the request.
        members: members of union types on the path, as (position in the path, name).
    """

    details: Mapping[str, Any]
    path: tuple[str | int, ...]
    members: tuple[tuple[int, str], ...]

    @staticmethod
    def of(details: Mapping[str, Any], document: Any) -> _Problem:
        """Return a problem of the body `document`: pydantic's `loc` contains the keys and indices,
        and also the names of union members."""
        path: list[str | int] = []
        members: list[tuple[int, str]] = []
        value: Any = document
        loc = details["loc"]
        for position, component in enumerate(loc):
            is_missing = details["type"] == "missing" and position == len(loc) - 1
            is_index = isinstance(value, list) and isinstance(component, int)
            if is_index or (isinstance(value, dict) and component in value):
                path.append(component)
                value = value[component]
            elif is_missing:
                path.append(component)
            elif component != "[key]":
                members.append((len(path), str(component)))
        if details["type"] in (MISSPELLED, UNKNOWN):
            path.append(details["ctx"]["name"])
        elif details["type"] == "union_tag_invalid":
            path.append("type")
        return _Problem(details, tuple(path), tuple(members))

    def progress(self, start: int) -> tuple[int, ...]:
        """Return how far the value at `path[:start]` was valid, in lexicographic order."""
        components = [1 + c if isinstance(c, int) else 1 for c in self.path[start:]]
        # An array that is too long is valid otherwise, as far as its first item.
        return (*components, *([1, 0] if self.details["type"] == "too_long" else ()))

    def accepted(self) -> list[str]:
        """Return what the member accepts in place of the value; empty for another problem."""
        if self.details["type"] == "literal_error":
            return _values(self.details["ctx"]["expected"])
        if self.details["type"] == "union_tag_invalid":
            return _values(self.details["ctx"]["expected_tags"])
        return list(_ACCEPTED.get(self.details["type"], ()))


def validation_error(problems: Sequence[Mapping[str, Any]], json_bytes: bytes) -> ApiError:
    """Return the answer to a body with invalid fields; it names the first invalid field.

    Args:
        problems: problems that pydantic reports.
        json_bytes: bytes of the body.
    """
    if problems[0]["type"] == "json_invalid":
        return ApiError(400, _json_problem(str(problems[0]["ctx"]["error"]), json_bytes))
    document = json.loads(json_bytes)
    all_problems = [_Problem.of(problem, document) for problem in problems]
    best = _best_members(all_problems)
    # The `type` of an object explains more than the fields that this type lacks.
    if len(best) == 1:
        kind = (*best[0].path[:-1], "type")
        best = [p for p in all_problems if (p.path, p.members) == (kind, best[0].members)] or best
    best = [problem for problem in best if problem.path == best[0].path]
    # A member that accepts the type of the value explains more than one that does not.
    chosen = next((problem for problem in best if not problem.accepted()), best[0])
    path = ".".join(printable(str(component)) for component in chosen.path) or "the body"
    param = param_of(str(chosen.path[0])) if chosen.path else None
    details = chosen.details
    if details["type"] == MISSPELLED:
        similar = ".".join([*map(str, chosen.path[:-1]), details["ctx"]["similar"]])
        return ApiError(400, misspelled(path, similar), param=param)
    accepted = list(dict.fromkeys(text for problem in best for text in problem.accepted()))
    if not chosen.accepted():
        message = f"{path}: {details['msg']}"
        if details["type"] in _CONSTRAINTS:
            message += f", not {short_json(details['input'])}"
        return ApiError(400, message, param=param)
    choices = " or ".join(filter(None, [", ".join(accepted[:-1]), accepted[-1]]))
    value = details["input"]
    if details["type"] == "union_tag_invalid":
        value = details["ctx"]["tag"]
    message = f"{path}: Input should be {choices}, not {short_json(value)}"
    return ApiError(400, message, param=param)


def _best_members(problems: Sequence[_Problem]) -> Sequence[_Problem]:
    """Return the first problem; within a union type, the first problem of each member that matches
    best."""
    depth = 0
    while depth < len(problems[0].members):
        start = problems[0].members[depth][0]
        position = problems[0].path[:start]
        members: dict[str, list[_Problem]] = {}
        for problem in problems:
            union = problem.members[depth] if len(problem.members) > depth else None
            if union is not None and (union[0], problem.path[:start]) == (start, position):
                members.setdefault(union[1], []).append(problem)
        # An object whose `type` names another member.
        mismatched = {
            member: problem
            for member, member_problems in members.items()
            for problem in member_problems
            if problem.path == (*position, "type") and problem.details["type"] == "literal_error"
        }
        depth += 1
        firsts = [problems for member, problems in members.items() if member not in mismatched]
        best = max((problems[0].progress(start) for problems in firsts), default=())
        if mismatched and not best:
            return list(mismatched.values())
        firsts = [problems for problems in firsts if problems[0].progress(start) == best]
        if len(firsts) > 1:
            return [problems[0] for problems in firsts]
        problems = firsts[0]
    return problems[:1]


def _json_problem(reason: str, json_bytes: bytes) -> str:
    """Return the message about a body that is not JSON.

    Args:
        reason: reason of pydantic's parser, with the line and the column.
        json_bytes: bytes of the body.
    """
    if reason.startswith("recursion limit"):
        return f"the body has more than {MAX_DEPTH} levels of arrays and objects: use fewer levels"
    if reason.startswith("invalid unicode"):
        return f"the body is not UTF-8: {reason}"
    if "hex escape" in reason:
        try:
            text = json.dumps(json.loads(json_bytes), ensure_ascii=False)
        except (ValueError, RecursionError):
            text = ""
        if surrogate := re.search("[\ud800-\udfff]", text):
            return (
                f"the body has the lone surrogate \\u{ord(surrogate[0]):04x}: leave it out, or "
                "give both surrogates of the character"
            )
    return f"the body is not valid JSON: {reason}"
