# SPDX-License-Identifier: Apache-2.0
"""The expressions of a module that ran: a test cannot notice a mutant of any other expression.

Coverage by lines is not enough: a line may hold a branch that was not taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from types import CodeType, FrameType
from typing import Any

from tests.support.mutants import Mutation
from tests.support.source_text import Span, offsets, source_of

#: Source spans of the executed instructions, by module name.
Ran = dict[str, set[Span]]


def spans_run(modules: Collection[str], run: Callable[[], Any]) -> Ran:
    """Call `run` and return the source spans that this thread executed in `modules`."""
    names = {source_of(module)[1]: module for module in modules}
    seen: dict[str, set[tuple[CodeType, int]]] = {module: set() for module in modules}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            seen[names[frame.f_code.co_filename]].add((frame.f_code, frame.f_lasti))
        return local

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        if frame.f_code.co_filename not in names:
            return None
        frame.f_trace_opcodes = True
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return {
        module: _spans_of(source_of(module)[0], instructions)
        for module, instructions in seen.items()
    }


def _spans_of(text: str, instructions: Iterable[tuple[CodeType, int]]) -> set[Span]:
    """Return the source spans of instructions, each a code object and a byte offset."""
    offset = offsets(text)
    by_code: dict[CodeType, set[int]] = {}
    for code, at in instructions:
        by_code.setdefault(code, set()).add(at // 2)
    spans = set()
    for code, chosen in by_code.items():
        for index, (line, end_line, column, end_column) in enumerate(code.co_positions()):
            if index in chosen and None not in (line, end_line, column, end_column):
                spans.add((offset(line, column), offset(end_line, end_column)))
    return spans


def _all_spans(text: str) -> set[Span]:
    """Return the source spans of all instructions of a module."""
    waiting = [compile(text, "text", "exec", dont_inherit=True)]
    instructions = []
    while waiting:
        code = waiting.pop()
        instructions += [(code, at) for at in range(0, len(code.co_code), 2)]
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return _spans_of(text, instructions)


def executed(mutants: Iterable[Mutation], ran: Ran) -> list[Mutation]:
    """Return the mutations of expressions that ran.

    An expression ran if an instruction inside it ran. An expression without its own instructions,
    such as a folded constant, ran if the innermost enclosing instruction ran.
    """
    executed_mutants = []
    possible = {module: _all_spans(source_of(module)[0]) for module in ran}
    for mutation in mutants:
        everything = possible.get(mutation.module, set())
        inside = {s for s in everything if mutation.start <= s[0] and s[1] <= mutation.stop}
        if not inside:
            around = [s for s in everything if s[0] <= mutation.start and mutation.stop <= s[1]]
            inside = {min(around, key=lambda s: s[1] - s[0])} if around else set()
        if inside & ran.get(mutation.module, set()):
            executed_mutants.append(mutation)
    return executed_mutants
