# SPDX-License-Identifier: Apache-2.0
"""Options described by a schema of dataclasses, and the parsing of their values.

A schema is a dataclass whose fields are options or sections (dataclasses of options). The command
line and YAML files are both parsed by `Option.parse`, so that a value means the same in either.
Megatron's names of values are accepted as well. This module depends on the standard library only.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from megatron.cli.megatron_names import our_value, value_reason

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a schema.

    Args:
        name: the flag without leading dashes, `num-layers`.
        section: field of the schema that contains the option; None for the schema itself.
        field: name of the dataclass field, `num_layers`.
        kind: type of one value: bool, int, float or str.
        choices: allowed values; empty for any value.
        optional: whether `none` (null in YAML) is allowed.
        many: whether the value is a tuple.
        required: whether the option has no default.
        default: the default value.
        one_way: whether a switch has no negative form.
    """

    name: str
    section: str | None
    field: str
    kind: type
    choices: tuple[str, ...] = ()
    optional: bool = False
    many: bool = False
    required: bool = False
    default: Any = None
    one_way: bool = False

    def parse(self, texts: list[str], where: str) -> Any:
        """Parse the value of this option.

        Args:
            texts: the text of each value; exactly one unless `many`.
            where: prefix of errors, `--num-layers` or `run.yaml:3: num-layers`.

        Raises:
            ValueError: wrong number of values, wrong type or not one of the choices.
        """
        if self.many:
            if not texts:
                raise ValueError(f"{where} needs at least one value")
            if self.optional and len(texts) == 1 and texts[0].lower() in _NONE:
                return None
            return tuple(self._parse_value(text, where) for text in texts)
        if len(texts) != 1:
            raise ValueError(f"{where} takes one value, not {len(texts)}")
        return self._parse_value(texts[0], where)

    def _parse_value(self, text: str, where: str) -> Any:
        if self.optional and text not in self.choices and text.lower() in _NONE:
            return None
        if self.choices:
            choice = our_value(self.name, text)
            if choice not in self.choices:
                fix = f"use one of {', '.join(self.choices)}{value_reason(self.name, text)}"
                raise ValueError(f"{where} is {text!r}: {fix}")
            return choice
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise ValueError(f"{where} is {text!r}: use true or false")
            return text.lower() == "true"
        if self.kind is str:
            return self.literal(text, where)
        try:
            value = self.kind(our_value(self.name, text))
        except ValueError:
            raise ValueError(f"{where} is {text!r}: expected {_NOUN[self.kind]}") from None
        if not math.isfinite(value):
            raise ValueError(f"{where} is {text!r}: expected a finite number")
        return value

    def from_json(self, value: Any, where: str) -> Any:
        """Return the option's value from JSON. Raises ValueError for a wrong type."""
        if value is None and self.optional:
            return None
        items = value if isinstance(value, list) else [value]
        texts = [item if isinstance(item, str) else json.dumps(item) for item in items]
        if self.kind is str and not self.choices and texts:
            literals = [self.literal(text, where) for text in texts]
            return tuple(literals) if self.many else literals[0]
        return self.parse(texts, where)

    def literal(self, text: str, where: str) -> str:
        """Return a text unchanged. Refuse a password, because options are logged and saved."""
        if _PASSWORD.search(text):
            raise ValueError(
                f"{where} contains a user and a password, and options are logged and saved: set "
                "them in the environment variables of that service"
            )
        return text


_NONE = ("none", "null", "~")
_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_NOUN: Mapping[type, str] = types.MappingProxyType({int: "an integer", float: "a number"})


def options(schema: type) -> list[Option]:
    """Return the options of a schema in the order of its fields."""
    schema_options: list[Option] = []
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(typing.cast(Any, schema)):
        if dataclasses.is_dataclass(hints[field.name]):
            schema_options.extend(_section_options(hints[field.name], field.name))
    schema_options.extend(_section_options(schema, None))
    names = [option.name for option in schema_options]
    assert len(set(names)) == len(names), f"two options share a name: {sorted(names)}"
    return schema_options


def _spelled(field: str) -> str:
    """Return the flag of a field. A trailing `_` avoids a Python keyword, as in `from_`."""
    return field.removesuffix("_").replace("_", "-")


def _section_options(section: type, name: str | None) -> list[Option]:
    hints = typing.get_type_hints(section)
    section_options = []
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        required = field.default is dataclasses.MISSING
        section_options.append(
            Option(
                name=_spelled(field.name),
                section=name,
                field=field.name,
                required=required,
                default=None if required else field.default,
                **_shape(hints[field.name]),
            )
        )
    return section_options


def _shape(hint: Any) -> dict[str, Any]:
    """Return the fields of `Option` that an annotation determines."""
    shape: dict[str, Any] = {}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [a for a in typing.get_args(hint) if a is not type(None)]
        shape["optional"] = True
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
        shape["many"] = True
    if typing.get_origin(hint) is Literal:
        return {**shape, "kind": str, "choices": typing.get_args(hint)}
    assert hint in (bool, int, float, str), f"a schema field cannot be {hint}"
    return {**shape, "kind": hint}


def option_docs(schema: type) -> dict[str, str]:
    """Return the docstring below each field of a schema, by option name."""
    docs = _field_docs(schema)
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(typing.cast(Any, schema)):
        if dataclasses.is_dataclass(hints[field.name]):
            docs.update(_field_docs(hints[field.name]))
    return {_spelled(name): doc for name, doc in docs.items()}


def section_titles(schema: type) -> dict[str, str]:
    """Return the first line of each section's docstring, by the section's name."""
    hints = typing.get_type_hints(schema)
    return {
        field.name: str(inspect.getdoc(hints[field.name])).splitlines()[0]
        for field in dataclasses.fields(schema)
        if dataclasses.is_dataclass(hints[field.name])
    }


def _field_docs(section: type) -> dict[str, str]:
    """Return the docstring written below each field of a dataclass, by field name."""
    body = ast.parse(inspect.getsource(inspect.getmodule(section))).body  # type: ignore[arg-type]
    docs: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == section.__name__:
            for field, doc in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(doc, ast.Expr)
                    and isinstance(doc.value, ast.Constant)
                ):
                    docs[field.target.id] = inspect.cleandoc(str(doc.value.value))
    return docs


def build(
    schema: type[T], values: Mapping[str, Any], *, replaced: Mapping[str, str] | None = None
) -> T:
    """Build a schema's object from option values; absent options take their defaults.

    Args:
        schema: dataclass of options or of sections of options.
        values: values by option name.
        replaced: required options that are derived from another option, with its name. The error
            for a missing option names the latter.

    Raises:
        ValueError: required options are missing, or sections refuse their values; one message
            lists all problems.
    """
    schema_options = options(schema)
    required = [o.name for o in schema_options if o.required]
    if any(name not in values for name in required):
        names_to_give = [(replaced or {}).get(name, name) for name in required]
        missing = [f"--{name}" for name in names_to_give if values.get(name) is None]
        raise ValueError(
            f"missing {', '.join(missing)}: give {'it' if len(missing) == 1 else 'them'}"
        )
    hints = typing.get_type_hints(schema)
    arguments: dict[str, Any] = {}
    problems: list[str] = []
    for field in dataclasses.fields(typing.cast(Any, schema)):
        if dataclasses.is_dataclass(hints[field.name]):
            inner = {
                o.field: values[o.name]
                for o in schema_options
                if o.section == field.name and o.name in values
            }
            try:
                arguments[field.name] = hints[field.name](**inner)
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    arguments.update(
        {o.field: values[o.name] for o in schema_options if o.section is None and o.name in values}
    )
    return schema(**arguments)


def flatten(config: object) -> dict[str, Any]:
    """Return the option values of a schema's object by name, in the order of its fields."""
    values = {}
    for option in options(type(config)):
        holder = config if option.section is None else vars(config)[option.section]
        values[option.name] = vars(holder)[option.field]
    return values


def suggest(
    name: str, option_names: Iterable[str], *, prefix: str = "", harmless: Iterable[str] = ()
) -> str:
    """Return `: did you mean X?` if a name may be a misspelling of option names, else "".

    A name that is merely similar is not suggested: it would be another option, and change results.

    Args:
        name: the unknown name.
        option_names: names of options.
        prefix: prefix of each suggested name.
        harmless: names without effect on results; the nearest one is suggested.
    """
    near = [option for option in option_names if _is_misspelling(name, option)]
    near = near or difflib.get_close_matches(name, list(harmless), n=1, cutoff=0.8)
    suggestions = " or ".join(f"{prefix}{option}" for option in near)
    return f": did you mean {suggestions}?" if near else ""


#: Minimum length of a word that may have a typo: shorter ones, such as q, kv and qk, differ by one
#: letter and mean different things.
_SHORTEST_TYPO = 4


def _is_misspelling(name: str, option: str) -> bool:
    """Return whether a name equals an option's, except for one typo in one word, or for dashes."""
    words, expected = name.split("-"), option.split("-")
    if "".join(words) == "".join(expected):
        return True
    if len(words) != len(expected):
        return False
    pairs = [(a, b) for a, b in zip(words, expected, strict=True) if a != b]
    if len(pairs) != 1 or min(map(len, pairs[0])) < _SHORTEST_TYPO:
        return False
    return _is_one_typo(*pairs[0])


def _is_one_typo(a: str, b: str) -> bool:
    """Return whether one letter is added, missing, replaced, or swapped with the next."""
    if abs(len(a) - len(b)) > 1:
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if start is None:
        return len(a) != len(b)
    a_tail, b_tail = a[start:], b[start:]
    swapped = a_tail[1::-1] + a_tail[2:] if len(a_tail) > 1 else a_tail
    return b_tail in (a_tail[1:], swapped) or a_tail == b_tail[1:] or a_tail[1:] == b_tail[1:]
