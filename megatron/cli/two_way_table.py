# SPDX-License-Identifier: Apache-2.0
"""Two-way tables between external names (flags, fields of config.json) and fields of `GPTConfig`.

`build` converts external values to the core's config, `describe` converts the config back. A
`ConfigSection` describes each dataclass of the core and when a model has it.
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

#: Returned by `Row.back` to omit a name, because its absence means the same value.
OMITTED = object()


def _value(source: Any, name: str) -> Any:
    return source[name]


def _same(value: Any, config: Any) -> Any:
    return value


@dataclass(frozen=True)
class Row:
    """One field of a model.

    Args:
        name: the external name; empty if the field has none and is derived from other values.
        path: section and field, `router.topk`; `attention.`, without a field, for a name that
            describes the whole section or is only checked.
        to: maps (source, external name) to the value of the field. Default: the source's value.
        back: maps (value of the field, or the section without a field; the whole `GPTConfig`)
            to the external value. Default: the field's value.
    """

    name: str
    path: str
    to: Callable[[Any, str], Any] = _value
    back: Callable[[Any, Any], Any] = _same


def at(
    path: str, *, to: Callable[[Any, str], Any] = _value, back: Callable[[Any, Any], Any] = _same
) -> Row:
    """Return a row to annotate an option with; the row takes the option's name.

    qk_layernorm: Annotated[bool, at("attention.qk_norm")] = False
    """
    return Row("", path, to, back)


def annotated_rows(schema: type) -> tuple[Row, ...]:
    """Return the rows that annotate the options of a schema's sections, in the options' order.

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
class ConfigSection:
    """A dataclass of the core's config.

    Args:
        at: path in `GPTConfig`, such as `moe.router`; empty for `GPTConfig` itself. Sections
            with the same path are alternatives.
        kind: the class as `module:name` inside `megatron.core`. It is imported when needed, so that
            invalid options are reported without importing torch.
        when: predicate on the source: whether the model has this section.
        fixed: fields with a constant value.
    """

    at: str
    kind: str
    when: Callable[[Any], bool] = lambda source: True
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def is_in(self, holder: Any) -> bool:
        """Return whether an object at this path matches this section."""
        same = type(holder).__name__ == self.kind.partition(":")[2]
        return same and all(getattr(holder, name) == value for name, value in self.fixed.items())


@dataclass(frozen=True)
class Table:
    """Rows and sections, the latter by the first component of the rows' paths."""

    sections: Mapping[str, ConfigSection]
    rows: tuple[Row, ...]


def build(table: Table, source: Any, *, at: str = "") -> Any:
    """Build the core's config at a path from a source; None if the model does not have it.

    Raises:
        ValueError: a value is not supported.
    """
    candidates = ((name, section) for name, section in table.sections.items() if section.at == at)
    name, section = next(
        ((name, section) for name, section in candidates if section.when(source)), ("", None)
    )
    if section is None:
        return None
    fields = dict(section.fixed)
    for row in table.rows:
        prefix, _, target = row.path.rpartition(".")
        if prefix == name and target:
            fields[target] = row.to(source, row.name)
        elif prefix == name and row.to is not _value:
            row.to(source, row.name)  # only checks
    for inner in dict.fromkeys(
        candidate.at for candidate in table.sections.values() if candidate.at
    ):
        parent, _, target = inner.rpartition(".")
        if parent == at:
            fields[target] = build(table, source, at=inner)
    module, _, class_name = section.kind.partition(":")
    kind = getattr(importlib.import_module(f"megatron.core.{module}"), class_name)
    # Alternatives at one path may have different inner sections.
    return kind(**{name: fields[name] for name in fields if name in kind.__dataclass_fields__})


def describe(table: Table, config: Any) -> dict[str, Any]:
    """Return the external values of a `GPTConfig` by name, without omitted ones."""
    values: dict[str, Any] = {}
    for row in table.rows:
        prefix, _, target = row.path.rpartition(".")
        section = table.sections[prefix]
        names = section.at.split(".") if section.at else []
        # Alternatives at one path may lack an inner section.
        holder = reduce(lambda outer, name: outer and vars(outer).get(name), names, config)
        if row.name and section.is_in(holder):
            value = row.back(getattr(holder, target) if target else holder, config)
            if value is not OMITTED:
                values[row.name] = value
    return values


def negated(source: Any, name: str) -> bool:
    """Return the opposite of a source's value, as `Row.to`."""
    return not source[name]


def opposite(value: bool, config: Any) -> bool:
    """Return the opposite of a field, as `Row.back`."""
    return not value


def constant(value: Any) -> Callable[..., Any]:
    """Return a function with a constant value, for `Row.to` and `Row.back`."""
    return lambda *_: value


def unless(default: Any) -> Callable[[Any, Any], Any]:
    """Return a `Row.back` that omits the name if the value is the default."""
    return lambda value, config: OMITTED if value == default else value


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return YaRN's magnitude 0.1 weight ln(factor) + 1 (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


def yarn_weight(square: float, factor: float) -> float:
    """Invert `yarn_magnitude(factor, weight) ** 2`; 0 without a solution or without scaling."""
    if square <= 1.0 or factor <= 1.0:
        return 0.0
    return round((math.sqrt(square) - 1.0) / (0.1 * math.log(factor)), 9)
