# SPDX-License-Identifier: Apache-2.0
"""Checks of single option values, called by `__post_init__` of the option classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_all(*checks: Callable[[], object]) -> None:
    """Run every check and raise one ValueError with the messages of all failed checks."""
    messages = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            messages.append(str(error))
    require(not messages, "; ".join(messages))


def name_factors(flag: str, words: tuple[str, ...] | None) -> tuple[tuple[str, float], ...]:
    """Parse PATTERN=FACTOR arguments such as `*.bias=0.5` into (pattern, factor) pairs.

    Raises:
        ValueError: an argument has another form, or repeats a pattern.
    """
    factors: dict[str, float] = {}
    for word in words or ():
        pattern, _, text = word.rpartition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = -1.0
        require(
            pattern != "" and 0.0 <= factor < math.inf,
            f"{flag} {word}: give PATTERN=FACTOR, a pattern of weight names and a number of at "
            "least 0",
        )
        require(pattern not in factors, f"{flag} has {pattern} twice: keep one")
        factors[pattern] = factor
    return tuple(factors.items())


def positive(section: object, *names: str) -> None:
    """Raise ValueError for every named field that is set and not above zero."""
    _check_fields(section, names, lambda value: value > 0, "it must be above 0")


def not_negative(section: object, *names: str) -> None:
    """Raise ValueError for every named field that is set and below zero."""
    _check_fields(section, names, lambda value: value >= 0, "it must not be negative")


def fraction(section: object, *names: str) -> None:
    """Raise ValueError for every named field outside [0, 1)."""
    _check_fields(section, names, lambda value: 0.0 <= value < 1.0, "it must lie in [0, 1)")


def _check_fields(
    section: object, names: Sequence[str], holds: Callable[[float], bool], must: str
) -> None:
    """Raise ValueError for every named field that is set and does not satisfy `holds`."""
    value_by_flag = {name.replace("_", "-"): vars(section)[name] for name in names}
    wrong = [
        f"--{f} is {v}: {must}" for f, v in value_by_flag.items() if v is not None and not holds(v)
    ]
    require(not wrong, "; ".join(wrong))
