# SPDX-License-Identifier: Apache-2.0
"""Typed access to the fields of config.json; errors name the field, its value and valid values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn


class Fields:
    """The fields of a JSON object. A field that is null counts as absent.

    Args:
        raw: the object.
        where: path of the file, for errors.
        prefix: prefix of field names in errors.
        defaults: values of absent fields.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str,
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.raw, self.where, self._prefix = raw, where, prefix
        self._defaults = defaults or {}

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise ValueError for the value of a field."""
        value_text = repr(self.raw[name])[:100] if name in self.raw else "absent"
        raise ValueError(f"{self.where}: {self._prefix}{name} is {value_text}: {why}")

    def find(self, name: str) -> Any:
        """Return the value of a field, or its default, or None."""
        value = self.raw.get(name)
        return self._defaults.get(name) if value is None else value

    def count(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least `minimum`. Raises ValueError."""
        value = self.find(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not minimum <= value < 1 << 31:
            kind = "a positive integer" if minimum else "an integer that is not negative"
            self.refuse(name, f"expected {kind}")
        return value

    def count_of(self, *names: str) -> int:
        """Return a positive integer that has several names. Raises ValueError if they differ."""
        present = [name for name in names if self.find(name) is not None]
        values = [self.count(name) for name in present or names[:1]]
        if len(set(values)) > 1:
            self.refuse(present[1], f"{present[0]} is {values[0]}, which is the same field")
        return values[0]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Raises ValueError."""
        value = self.find(name)
        if value is None and default is not None:
            return default
        is_bool = isinstance(value, bool)  # a bool is an int too
        if is_bool or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.refuse(name, "expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false. Raises ValueError."""
        value = self.find(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "expected true or false")
        return value

    def inner(self, name: str) -> Fields | None:
        """Return the fields of a nested object, None if absent or empty. Raises ValueError."""
        value = self.raw.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "expected an object")
        return Fields(value, self.where, prefix=f"{self._prefix}{name}.")

    def must_be(self, name: str, *values: Any) -> None:
        """Raise ValueError if a field is present with a value other than these."""
        value = self.raw.get(name)
        if value is not None and value not in values:
            self.refuse(name, f"supported is {' or '.join(map(repr, values))}")
