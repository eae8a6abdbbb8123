# SPDX-License-Identifier: Apache-2.0
"""Planted faults: does a test suite notice when one expression of the code under test is wrong?

A `Mutation` is one edit of the source text of one function. `planted` makes one from a snippet (a
fault that somebody thought of); `mutation_operators` lists small ones that nobody thought of.
`apply` carries one out in this process: the edited module is compiled and the code of the live
function objects is exchanged, so that every reference to them is mutated, wherever it was imported
to. Do that in a fresh rank, before a model is built.

The idea: DeMillo, Lipton, Sayward 1978, "Hints on test data selection".
"""

from __future__ import annotations

import ast
import gc
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from tests.support.source_text import definitions, source_of, span


@dataclass(frozen=True)
class Mutation:
    """Replace source[start:stop] of `module`, inside `function`, by `text`.

    `line` is the line number, `what` describes the edit; `key` identifies the edit independently of
    the other code of the module.
    """

    module: str
    function: str
    line: int
    start: int
    stop: int
    text: str
    what: str
    key: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.function}: {self.what}"


def apply(mutation: Mutation) -> None:
    """Exchange the code of the mutated function in this process.

    Raises:
        ValueError: no live function has that name, or the edit changes its closure.
    """
    text, path = source_of(mutation.module)
    edited = text[: mutation.start] + mutation.text + text[mutation.stop :]
    before = list(_functions(compile(text, path, "exec", dont_inherit=True)))
    after = list(_functions(compile(edited, path, "exec", dont_inherit=True)))
    pairs = [
        (old, new)
        for old, new in zip(before, after, strict=True)
        if old.co_qualname == mutation.function and _holds(text, old, mutation.line)
    ]
    exchanged = 0
    for candidate in gc.get_objects():
        if type(candidate) is FunctionType and candidate.__code__.co_filename == path:
            for old, new in pairs:
                if (candidate.__code__.co_qualname, candidate.__code__.co_firstlineno) == (
                    old.co_qualname,
                    old.co_firstlineno,
                ):
                    candidate.__code__ = new
                    exchanged += 1
    if not exchanged:
        raise ValueError(f"no live function for {mutation}")


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of the functions of a module or class body, in order, without nested ones."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: a function; a class body has it not
                yield constant
            else:
                yield from _functions(constant)


def _holds(text: str, code: CodeType, line: int) -> bool:
    lines = [number for _, _, number in code.co_lines() if number is not None]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            lines += [number for _, _, number in constant.co_lines() if number is not None]
    return min(lines) <= line <= max(lines)


def planted(module: str, function: str, before: str, after: str) -> Mutation:
    """Return the mutation that replaces the snippet `before`, which occurs once in `function`.

    Args:
        module: where the function is defined, or a package that exports it or its class.
        function: qualified name in the module, such as "Class.method".

    Raises:
        ValueError: no such function, or the snippet does not occur exactly once: the code has
            changed, and the fault must be rewritten.
    """
    exported = vars(importlib.import_module(module)).get(function.partition(".")[0])
    if exported is not None:
        module = exported.__module__
    text, _ = source_of(module)
    for name, node in definitions(ast.parse(text)):
        if name == function:
            start, stop = span(text, node)
            if text.count(before, start, stop) != 1:
                count = text.count(before, start, stop)
                raise ValueError(f"{module}.{function} holds {before!r} {count} times, not once")
            at = text.index(before, start, stop)
            line = text.count("\n", 0, at) + 1
            what = f"{before!r} -> {after!r}"
            return Mutation(module, function, line, at, at + len(before), after, what, what)
    raise ValueError(f"{module} has no function {function}")


@dataclass(frozen=True)
class Verdict:
    """The result of one mutant: the failure that noticed it, or None if it survived."""

    mutation: Mutation
    noticed: str | None


def survey(verdicts: Sequence[Verdict]) -> str:
    """Return a report: the share that was noticed, then every survivor."""
    survivors = [v.mutation for v in verdicts if v.noticed is None]
    killed = len(verdicts) - len(survivors)
    lines = [f"{killed} of {len(verdicts)} mutants noticed"]
    return "\n".join(lines + [f"survived: {mutation}" for mutation in survivors])


@dataclass(frozen=True)
class PlantedBug:
    """A row of a table of bugs: its edits (module of core, function, code, faulty code), and the
    settings that show it."""

    edits: tuple[tuple[str, str, str, str], ...]
    settings: dict[str, Any]

    def mutations(self) -> list[Mutation]:
        """Return the mutations that plant the bug; see `planted`."""
        return [planted(f"megatron.core.{module}", *edit) for module, *edit in self.edits]


_ROW = re.compile(r"([^\[]+) \[(.*?)\] (.*)")
_EDIT = re.compile(r"(\S+) (\S+): (.*) => (.*)")


def bug_table(text: str, **configs: Mapping[str, object]) -> dict[str, PlantedBug]:
    """Return the bugs of a table by name.

    A row is `NAME [SETTINGS] MODULE FUNCTION: CODE => FAULTY CODE`, with further edits after `&&`;
    an indented line continues it. A setting is `NAME=VALUE`, a name that is on, or one of
    `configs`.
    """
    bugs = {}
    for row in re.sub(r"\n +", " ", text.strip()).splitlines():
        match = _ROW.fullmatch(row)
        assert match is not None, row
        settings: dict[str, Any] = {}
        for word in match[2].split():
            name, _, value = word.partition("=")
            settings |= configs.get(word) or {name: _value(value)}
        edits = [_EDIT.fullmatch(edit) for edit in match[3].split(" && ")]
        assert all(edits), row
        bugs[match[1]] = PlantedBug(tuple(edit.groups() for edit in edits if edit), settings)
    return bugs


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text) if text else True
    except (ValueError, SyntaxError):
        return text
