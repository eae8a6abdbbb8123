# SPDX-License-Identifier: Apache-2.0
"""Two-way tables: rows between names outside (flags, fields of config.json) and `GPTConfig`.

`build` reads a table one way, from a source of values to the core's config; `describe` reads it the
other way. Which dataclasses of the core a model has is said by a `Part` of each.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

#: Returned by `Row.back` where nothing is to be said, as the value is what stands for silence.
LEFT_OUT = object()


def _value(source: Any, name: str) -> Any:
    return source[name]


def _same(value: Any, config: Any) -> Any:
    return value


@dataclass(frozen=True)
class Row:
    """One field of a model.

    Args:
        name: what it is called outside; empty where it is not said there but follows from others.
        path: the part of `GPTConfig` and the field there, `router.topk`; `attention.`, without a
            field, for a name that says something of the whole part, or is only checked.
        to: takes the source and the name; returns the field. As it is, by default.
        back: takes the field (without one, the part) and the whole `GPTConfig`; returns the value
            of the name. As it is, by default.
    """

    name: str
    path: str
    to: Callable[[Any, str], Any] = _value
    back: Callable[[Any, Any], Any] = _same


def at(
    path: str, *, to: Callable[[Any, str], Any] = _value, back: Callable[[Any, Any], Any] = _same
) -> Row:
    """Return the row of an option that is annotated with it, which gives it its name.

    qk_layernorm: Annotated[bool, at("attention.qk_norm")] = False
    """
    return Row("", path, to, back)


def annotated_rows(schema: type) -> tuple[Row, ...]:
    """Return the rows that the options of a schema's sections are annotated with, in their order.

    Args:
        schema: a dataclass whose fields are dataclasses of options.
    """
    sections = typing.get_type_hints(schema).values()
    return tuple(
        dataclasses.replace(row, name=name.replace("_", "-"))
        for section in sections
        for name, hint in typing.get_type_hints(section, include_extras=True).items()
        for row in getattr(hint, "__metadata__", ())
        if isinstance(row, Row)
    )


@dataclass(frozen=True)
class Part:
    """One dataclass of the core.

    Args:
        at: where it stands in `GPTConfig`, `moe.router`; empty is `GPTConfig` itself. Several parts
            of one place exclude each other.
        kind: the class as `module:name` inside `megatron.core`; it is imported when it is needed,
            as options that are wrong must not wait for torch.
        when: tells from a source whether the model has it.
        fixed: fields that have one value in this part.
    """

    at: str
    kind: str
    when: Callable[[Any], bool] = lambda source: True
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def is_in(self, holder: Any) -> bool:
        """Return whether an object at this place is this part."""
        same = type(holder).__name__ == self.kind.partition(":")[2]
        return same and all(getattr(holder, name) == value for name, value in self.fixed.items())


@dataclass(frozen=True)
class Table:
    """Rows and the parts that they are in, by the names that paths start by."""

    parts: Mapping[str, Part]
    rows: tuple[Row, ...]


def build(table: Table, source: Any, *, at: str = "") -> Any:
    """Return the core's config of the part at a place; None where the model has none.

    Raises:
        ValueError: a value that is not supported.
    """
    there = ((name, part) for name, part in table.parts.items() if part.at == at)
    name, part = next(((name, part) for name, part in there if part.when(source)), ("", None))
    if part is None:
        return None
    fields = dict(part.fixed)
    for row in table.rows:
        prefix, _, target = row.path.rpartition(".")
        if prefix == name and target:
            fields[target] = row.to(source, row.name)
        elif prefix == name and row.to is not _value:
            row.to(source, row.name)  # only checks
    for inner in dict.fromkeys(other.at for other in table.parts.values() if other.at):
        parent, _, target = inner.rpartition(".")
        if parent == at:
            fields[target] = build(table, source, at=inner)
    module, _, name = part.kind.partition(":")
    return getattr(importlib.import_module(f"megatron.core.{module}"), name)(**fields)


def describe(table: Table, config: Any) -> dict[str, Any]:
    """Return the values of a `GPTConfig` by the names of a table, without those left out."""
    found: dict[str, Any] = {}
    for row in table.rows:
        prefix, _, target = row.path.rpartition(".")
        part = table.parts[prefix]
        names = part.at.split(".") if part.at else []
        holder = reduce(lambda outer, name: outer and getattr(outer, name), names, config)
        if row.name and part.is_in(holder):
            value = row.back(getattr(holder, target) if target else holder, config)
            if value is not LEFT_OUT:
                found[row.name] = value
    return found


def negated(source: Any, name: str) -> bool:
    """Return the opposite of a source's value, as `Row.to`."""
    return not source[name]


def opposite(value: bool, config: Any) -> bool:
    """Return the opposite of a field, as `Row.back`."""
    return not value


def constant(value: Any) -> Callable[..., Any]:
    """Return what gives one value, as `Row.to` and as `Row.back`."""
    return lambda *_: value


def unless(default: Any) -> Callable[[Any, Any], Any]:
    """Return what leaves a name out at this value, as `Row.back`."""
    return lambda value, config: LEFT_OUT if value == default else value


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return what yarn multiplies by: 0.1 weight ln(factor) + 1 (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def yarn_weight(square: float, factor: float) -> float:
    """Return the weight whose magnitude has this square; 0 where none has, or nothing is scaled."""
    if square <= 1.0 or factor <= 1.0:
        return 0.0
    return round((math.sqrt(square) - 1.0) / (0.1 * math.log(factor)), 9)
