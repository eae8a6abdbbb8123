# SPDX-License-Identifier: Apache-2.0
"""Fields of config.json one by one: an error names the field, its value and what is possible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn


class Fields:
    """Fields of a JSON object; null is absent.

    Args:
        raw: the object.
        where: its path, for errors.
        prefix: of the names in errors.
        defaults: of fields that are absent.
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
        """Raise ValueError for a field."""
        shown = repr(self.raw[name])[:100] if name in self.raw else "absent"
        raise ValueError(f"{self.where}: {self._prefix}{name} is {shown}: {why}")

    def find(self, name: str) -> Any:
        """Return a field, or what stands for it where it is absent, which may be None."""
        value = self.raw.get(name)
        return self._defaults.get(name) if value is None else value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number from `least` on. Raises ValueError."""
        value = self.find(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value < 1 << 31:
            kind = "a positive integer" if least else "an integer that is not negative"
            self.refuse(name, f"expected {kind}")
        return value

    def count_of(self, *names: str) -> int:
        """Return a positive number that has several names. Raises ValueError if they differ."""
        given = [name for name in names if self.find(name) is not None]
        values = [self.count(name) for name in given or names[:1]]
        if len(set(values)) > 1:
            self.refuse(given[1], f"{given[0]} is {values[0]}, which is the same field")
        return values[0]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number. Raises ValueError."""
        value = self.find(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < math.inf:
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
        """Return the fields of an object in a field, None if it is empty. Raises ValueError."""
        value = self.raw.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "expected an object")
        return Fields(value, self.where, prefix=f"{self._prefix}{name}.")

    def must_be(self, name: str, *values: Any) -> None:
        """Raise ValueError if a field is there and has none of these values."""
        value = self.raw.get(name)
        if value is not None and value not in values:
            self.refuse(name, f"supported is {' or '.join(map(repr, values))}")
