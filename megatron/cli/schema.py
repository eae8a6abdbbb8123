# SPDX-License-Identifier: Apache-2.0
"""Reading a schema of dataclasses: which options it has, and a text turned into the value of one.

A schema is a dataclass whose fields are options, or sections (dataclasses of options). The
command line and YAML files both go through `Option.parse`, so a value means the same in either;
Megatron's names of values stand for ours.
Nothing here needs a library.
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
        name: flag spelling without dashes in front, `num-layers`.
        section: field of the root that holds the option; None if the root itself does.
        field: name of the dataclass field, `num_layers`.
        kind: bool, int, float or str; the type of one value.
        choices: allowed values; empty = any.
        optional: whether `none` (null in YAML) is a value.
        many: whether the value is a tuple.
        required: whether there is no default.
        default: the default, where there is one.
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
        """Turn the texts of this option's value into the value.

        Args:
            texts: one text, or any number of them for `many`.
            where: what to name in an error, `--num-layers` or `run.yaml:3: num-layers`.

        Raises:
            ValueError: wrong number of values, wrong type or not one of the choices.
        """
        if self.many:
            if not texts:
                raise ValueError(f"{where} needs at least one value")
            if self.optional and len(texts) == 1 and texts[0].lower() in _NONE:
                return None
            return tuple(self._one(text, where) for text in texts)
        if len(texts) != 1:
            raise ValueError(f"{where} takes one value, not {len(texts)}")
        return self._one(texts[0], where)

    def _one(self, text: str, where: str) -> Any:
        if self.optional and text not in self.choices and text.lower() in _NONE:
            return None
        if self.choices:
            ours = our_value(self.name, text)
            if ours not in self.choices:
                mend = f"use one of {', '.join(self.choices)}{value_reason(self.name, text)}"
                raise ValueError(f"{where} is {text!r}: {mend}")
            return ours
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
        """Return the value that was saved as JSON. Raises ValueError for one of another type."""
        if value is None and self.optional:
            return None
        items = value if isinstance(value, list) else [value]
        texts = [item if isinstance(item, str) else json.dumps(item) for item in items]
        if self.kind is str and not self.choices and texts:
            found = [self.literal(text, where) for text in texts]
            return tuple(found) if self.many else found[0]
        return self.parse(texts, where)

    def literal(self, text: str, where: str) -> str:
        """Return a text as it is. Raises ValueError if it holds a password: options are shown."""
        if _PASSWORD.search(text):
            raise ValueError(
                f"{where} holds a user and a password, and options are shown and saved: give them "
                "by the environment variables of that service"
            )
        return text


_NONE = ("none", "null", "~")
_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_NOUN: Mapping[type, str] = types.MappingProxyType({int: "an integer", float: "a number"})


def options(schema: type) -> list[Option]:
    """List the options of a schema in the order of its fields."""
    found: list[Option] = []
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            found.extend(_section_options(hints[field.name], field.name))
    found.extend(_section_options(schema, None))
    names = [option.name for option in found]
    assert len(set(names)) == len(names), f"two options share a name: {sorted(names)}"
    return found


def _spelled(field: str) -> str:
    """Return the flag of a field; `from_` is named so only because `from` is a word of Python."""
    return field.removesuffix("_").replace("_", "-")


def _section_options(section: type, name: str | None) -> list[Option]:
    hints = typing.get_type_hints(section)
    found = []
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        required = field.default is dataclasses.MISSING
        found.append(
            Option(
                name=_spelled(field.name),
                section=name,
                field=field.name,
                required=required,
                default=None if required else field.default,
                **_shape(hints[field.name]),
            )
        )
    return found


def _shape(hint: Any) -> dict[str, Any]:
    """Describe an annotation: kind, choices, optional, many."""
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
    found = _field_docs(schema)
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            found.update(_field_docs(hints[field.name]))
    return {_spelled(name): doc for name, doc in found.items()}


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
    found: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == section.__name__:
            for field, doc in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(doc, ast.Expr)
                    and isinstance(doc.value, ast.Constant)
                ):
                    found[field.target.id] = inspect.cleandoc(str(doc.value.value))
    return found


def build(
    schema: type[T], values: Mapping[str, Any], *, replaced: Mapping[str, str] | None = None
) -> T:
    """Make a schema's object from values by option name; what is absent takes its default.

    Args:
        schema: dataclass of options or of sections of options.
        values: by option name.
        replaced: of required options those that follow from another one, which is to be given.

    Raises:
        ValueError: every required option that is absent, or what a section's own check finds, all
            of them in one message.
    """
    known = options(schema)
    required = [o.name for o in known if o.required]
    if any(name not in values for name in required):
        wanted = [(replaced or {}).get(name, name) for name in required]
        missing = [f"--{name}" for name in wanted if values.get(name) is None]
        raise ValueError(
            f"missing {', '.join(missing)}: give {'it' if len(missing) == 1 else 'them'}"
        )
    hints = typing.get_type_hints(schema)
    given: dict[str, Any] = {}
    problems: list[str] = []
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            inner = {
                o.field: values[o.name]
                for o in known
                if o.section == field.name and o.name in values
            }
            try:
                given[field.name] = hints[field.name](**inner)
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    given.update({o.field: values[o.name] for o in known if o.section is None and o.name in values})
    return schema(**given)


def flatten(config: object) -> dict[str, Any]:
    """Return the values of a schema's object by option name, in the order of its fields."""
    found = {}
    for option in options(type(config)):
        holder = config if option.section is None else vars(config)[option.section]
        found[option.name] = vars(holder)[option.field]
    return found


def suggest(
    name: str, known: Iterable[str], *, prefix: str = "", harmless: Iterable[str] = ()
) -> str:
    """Return `: did you mean X?` for the names that an unknown one may misspell, or nothing.

    A name that is merely alike is not suggested: it would be another option, and change results.

    Args:
        name: the unknown one.
        known: names of options.
        prefix: what to show before a name.
        harmless: names that change nothing, of which the nearest is suggested.
    """
    near = [option for option in known if _is_misspelling(name, option)]
    near = near or difflib.get_close_matches(name, list(harmless), n=1, cutoff=0.8)
    shown = " or ".join(f"{prefix}{option}" for option in near)
    return f": did you mean {shown}?" if near else ""


#: Letters of the shortest word that may have a typo: shorter ones, such as q, kv and qk, differ by
#: one letter and mean different things.
_SHORTEST_TYPO = 4


def _is_misspelling(name: str, option: str) -> bool:
    """Return whether a name is that of an option but for one typo in one word, or for dashes."""
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
    rest, other = a[start:], b[start:]
    swapped = rest[1::-1] + rest[2:] if len(rest) > 1 else rest
    return other in (rest[1:], swapped) or rest == other[1:] or rest[1:] == other[1:]
