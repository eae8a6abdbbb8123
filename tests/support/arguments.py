# SPDX-License-Identifier: Apache-2.0
"""Command lines joined from several groups of flags, where a later flag wins."""

from __future__ import annotations

from collections.abc import Sequence


def last_wins(words: Sequence[str]) -> list[str]:
    """Remove the flags that a later flag overrides, because a program refuses repeated flags.

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
