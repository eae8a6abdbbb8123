# SPDX-License-Identifier: Apache-2.0
"""What a section of options can say is wrong with one of its own values."""

from __future__ import annotations

import math


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def name_factors(flag: str, words: tuple[str, ...] | None) -> tuple[tuple[str, float], ...]:
    """Return the (pattern, factor) pairs of words such as `*.bias=0.5`.

    Raises:
        ValueError: a word is no such pair, or names a pattern again.
    """
    found: dict[str, float] = {}
    for word in words or ():
        pattern, _, text = word.rpartition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = -1.0
        require(
            pattern != "" and 0.0 <= factor < math.inf,
            f"{flag} {word}: give PATTERN=FACTOR, a pattern of weight names and a number from 0 up",
        )
        require(pattern not in found, f"{flag} has {pattern} twice: keep one")
        found[pattern] = factor
    return tuple(found.items())


def positive(section: object, *names: str) -> None:
    """Raise ValueError for the first named field that is set and not above zero."""
    for name in names:
        value = vars(section)[name]
        flag = name.replace("_", "-")
        require(value is None or value > 0, f"--{flag} is {value}: it must be above 0")


def not_negative(section: object, *names: str) -> None:
    """Raise ValueError for the first named field that is set and below zero."""
    for name in names:
        value = vars(section)[name]
        flag = name.replace("_", "-")
        require(value is None or value >= 0, f"--{flag} is {value}: it must not be negative")


def fraction(section: object, *names: str) -> None:
    """Raise ValueError for the first named field outside [0, 1)."""
    for name in names:
        value = vars(section)[name]
        flag = name.replace("_", "-")
        require(0.0 <= value < 1.0, f"--{flag} is {value}: it must lie in [0, 1)")
