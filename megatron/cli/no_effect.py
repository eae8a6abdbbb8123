# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron that are accepted because they change nothing that a program does.

A flag has no effect if what it asks for happens anyway, or if it only concerns reports or speed.
Its values are read like those of an option, so that another value, which would have an effect, is
refused. A program hands in its own table of such flags; they are not options and not in its help.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from megatron.cli.schema import Option

Kind: TypeAlias = Literal["already so", "reporting only", "speed only"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_TYPES: Mapping[str, type] = {"INT": int, "FLOAT": float, "TEXT": str}


@dataclass(frozen=True, kw_only=True)
class NoEffectFlag:
    """A flag that has no effect.

    Args:
        name: without dashes in front.
        kind: what makes it harmless.
        reason: what happens here instead.
        values: the values that have no effect, joined by `|`; INT, FLOAT or TEXT for any of that
            type; empty for a switch.
        unless: switch with which the flag would have an effect, so that both together are refused.
        note: line of its own to say at the start of a run; None = the list of flags is enough.
    """

    name: str
    kind: Kind
    reason: str
    values: str = ""
    unless: str | None = None
    note: str | None = None

    @property
    def option(self) -> Option:
        """Return how to read the flag and its value."""
        if not self.values:
            return Option(name=self.name, section=None, field=self.name, kind=bool, one_way=True)
        kind = _TYPES.get(self.values)
        choices = () if kind else tuple(self.values.split("|"))
        return Option(
            name=self.name, section=None, field=self.name, kind=kind or str, choices=choices
        )

    def problem(self, value: Any, given: Mapping[str, Any], *, strict: bool) -> str | None:
        """Return what is wrong with the flag among the options that are given, if anything is."""
        if value is False:
            return f"{self.name} is false: leave it out: {self.reason}"
        if self.unless is not None and given.get(self.unless):
            return f"--{self.name} contradicts --{self.unless}: keep one"
        if strict:
            return (
                f"--{self.name} has no effect here ({self.kind}: {self.reason}): leave it out, as "
                "--strict-flags asks"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class NoEffectTable:
    """The flags of Megatron that a program accepts without effect.

    Args:
        flags: they.
    """

    flags: Sequence[NoEffectFlag] = ()


def take_out(given: MutableMapping[str, Any], table: NoEffectTable, *, strict: bool) -> list[str]:
    """Remove the flags without effect from the values that are given.

    Args:
        given: values by name, of options and of these flags.
        table: the program's flags without effect.
        strict: whether to refuse them.

    Returns lines to say at the start: the list of them, and the note of each flag that has one.

    Raises:
        ValueError: flags are refused, with or without `strict`; all of them in one line.
    """
    found = [(flag, given.pop(flag.name)) for flag in table.flags if flag.name in given]
    problems = [flag.problem(value, given, strict=strict) for flag, value in found]
    if refused := [text for text in problems if text is not None]:
        raise ValueError("; ".join(refused))
    parts = []
    for kind in KINDS:
        names = [f"--{flag.name}" for flag, _ in found if flag.kind == kind]
        if names:
            parts.append(f"{' '.join(names)} ({kind})")
    lines = [f"no effect here: {', '.join(parts)}"] if parts else []
    notes = [f"--{flag.name} {value}: {flag.note}" for flag, value in found if flag.note]
    return lines + notes
