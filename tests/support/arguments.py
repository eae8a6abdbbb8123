# SPDX-License-Identifier: Apache-2.0
"""Command lines put together from parts, of which the later ones win."""

from __future__ import annotations

from collections.abc import Sequence


def last_wins(words: Sequence[str]) -> list[str]:
    """Return arguments without the flags that a later one overrides; a program refuses both.

    `--name` and `--no-name` override each other, as do `a_b` and `a-b`.
    """
    flags: dict[str, list[str]] = {}
    loose: list[str] = []
    current = loose
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("_", "-").removeprefix("no-")
            flags.pop(name, None)
            current = flags[name] = []
        current.append(word)
    return loose + [word for group in flags.values() for word in group]
