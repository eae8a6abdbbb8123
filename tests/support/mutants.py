# SPDX-License-Identifier: Apache-2.0
"""Planted faults: does a test suite notice when one expression of the code under test is wrong?

A `Mutation` is one edit of the source text of one function. `planted` makes one from a snippet (a
fault that somebody thought of), `mutations` lists all small ones of a module (wrong sign, wrong
rank, condition negated, call dropped …), `sample` draws some. `apply` carries one out in this
process: the edited module is compiled and the code of the live function objects is exchanged, so
that every reference to them is mutated, wherever it was imported to. Do that in a fresh rank,
before a model is built.

The idea: DeMillo, Lipton, Sayward 1978, "Hints on test data selection".
"""

from __future__ import annotations

import ast
import copy
import gc
import hashlib
import importlib
import itertools
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

#: First and last character of a piece of source text.
Span = tuple[int, int]
#: Where the instructions lie that ran, by module name.
Ran = dict[str, set[Span]]


@dataclass(frozen=True)
class Mutation:
    """Replace source[start:stop] of `module`, inside `function`, by `text`.

    `line` is where, `what` says it for people; `key` names the edit independently of the rest of
    the module.
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


# --- applying
# ---------------------------------------------------------------------------------------


def source_of(module: str) -> tuple[str, str]:
    """Return the source text of a module and the path that it came from."""
    path = importlib.import_module(module).__file__
    assert path is not None
    return Path(path).read_text(encoding="utf-8"), path


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
    for found in gc.get_objects():
        if type(found) is FunctionType and found.__code__.co_filename == path:
            for old, new in pairs:
                if (found.__code__.co_qualname, found.__code__.co_firstlineno) == (
                    old.co_qualname,
                    old.co_firstlineno,
                ):
                    found.__code__ = new
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


# --- a fault somebody thought of
# --------------------------------------------------------------------


def planted(module: str, function: str, before: str, after: str) -> Mutation:
    """Return the mutation that replaces the snippet `before`, which occurs once in `function`.

    Args:
        module: where the function is defined, or a package that exports it or its class.
        function: qualified name in the module, such as "Class.method".

    Raises:
        ValueError: no such function, or the snippet is not there exactly once: the code has
        changed, and the
            fault must be written anew.
    """
    exported = vars(importlib.import_module(module)).get(function.partition(".")[0])
    if exported is not None:
        module = exported.__module__
    text, _ = source_of(module)
    for name, node in _definitions(ast.parse(text)):
        if name == function:
            start, stop = _span(text, node)
            if text.count(before, start, stop) != 1:
                found = text.count(before, start, stop)
                raise ValueError(f"{module}.{function} holds {before!r} {found} times, not once")
            at = text.index(before, start, stop)
            line = text.count("\n", 0, at) + 1
            what = f"{before!r} -> {after!r}"
            return Mutation(module, function, line, at, at + len(before), after, what, what)
    raise ValueError(f"{module} has no function {function}")


# --- small faults that nobody thought of
# ------------------------------------------------------------

_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_WORDS = {
    "sum": "max",
    "max": "sum",
    "partial": "identical",
    "identical": "partial",
    "SUM": "MAX",
    "MAX": "SUM",
    "min": "max",
    "lanes": "tp",
    "tp": "lanes",
    "PARTIAL": "REPLICATED",
    "REPLICATED": "PARTIAL",
    "SHARDED": "REPLICATED",
}
_COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "copy_to_group", "reduce_from_group"}
)


def modules_of(name: str) -> list[str]:
    """Return the modules of a package, or the module itself if it is none."""
    module = importlib.import_module(name)
    if module.__spec__ is None or module.__spec__.submodule_search_locations is None:
        return [name]
    inner = pkgutil.iter_modules(module.__path__)
    return [name] + [found for entry in inner for found in modules_of(f"{name}.{entry.name}")]


def mutations(module: str) -> list[Mutation]:
    """List all small mutations of a module's functions.

    Left out, because nothing a run computes depends on them: docstrings, annotations, defaults,
    assertions, and whatever only raises or words an error.
    """
    text, _ = source_of(module)
    found: list[Mutation] = []
    for name, definition in _definitions(ast.parse(text)):
        seen: dict[str, int] = {}
        for node in _mutable(definition):
            for changed, what in _variants(node):
                start, stop = _span(text, node)
                key = f"{module}|{name}|{text[start:stop]}|{what}"
                seen[key] = seen.get(key, 0) + 1
                found.append(
                    Mutation(
                        module,
                        name,
                        node.lineno,
                        start,
                        stop,
                        changed,
                        what,
                        f"{key}|{seen[key]}",
                    )
                )
    return found


def sample(found: Iterable[Mutation], count: int, *, seed: int) -> list[Mutation]:
    """Draw `count` mutations.

    The draw goes by a hash of (seed, edit), so it stays nearly the same when other code changes.
    """

    def drawn(mutation: Mutation) -> str:
        return hashlib.sha256(f"{seed}|{mutation.key}".encode()).hexdigest()

    return sorted(found, key=drawn)[:count]


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and of its classes with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{prefix}{node.name}.")


def _only_raises(body: Sequence[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Raise) for statement in body)


def _mutable(definition: ast.FunctionDef) -> Iterator[ast.expr | ast.stmt]:
    """Yield the nodes of a function's body that a mutation may change, outer ones first."""
    waiting: list[ast.AST] = list(definition.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and _only_raises(node.body):
            waiting[:0] = node.orelse
            continue
        if isinstance(node, ast.AnnAssign):
            waiting[:0] = [node.value] if node.value is not None else []
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            waiting[:0] = node.body
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        waiting[:0] = ast.iter_child_nodes(node)


def _variants(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield (new text, description) for every small fault of one node."""

    def altered(change: Callable[[Any], None], what: str) -> tuple[str, str]:
        other = copy.deepcopy(node)
        change(other)
        text = ast.unparse(other)
        return (f"({text})" if isinstance(node, ast.expr) else text), what

    old = ast.unparse(node).splitlines()[0]
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        swap = _ARITHMETIC[type(node.op)]
        yield altered(lambda n: setattr(n, "op", swap()), f"{old}: to {swap.__name__}")
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        swap = _COMPARISONS[type(node.ops[0])]
        yield altered(lambda n: setattr(n, "ops", [swap()]), f"{old}: to {swap.__name__}")
    if isinstance(node, ast.BoolOp):
        swap = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield altered(lambda n: setattr(n, "op", swap()), f"{old}: to {swap.__name__}")
    if isinstance(node, ast.IfExp):
        yield altered(_negate, f"{old}: condition negated")
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "pass", f"{old}: call dropped"
    if isinstance(node, ast.Constant):
        yield from _other_constant(node)
    if isinstance(node, ast.Attribute) and node.attr in _WORDS and node.attr.isupper():
        word = _WORDS[node.attr]
        yield altered(lambda n: setattr(n, "attr", word), f"{old}: to {word}")
    if isinstance(node, ast.Attribute) and node.attr == "rank":
        group = ast.unparse(node.value)
        if group.endswith("group"):
            yield f"(({group}.rank + 1) % {group}.size)", f"{old}: the next rank"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        if node.func.id in _COLLECTIVES:
            yield f"({ast.unparse(node.args[0])})", f"{old}: skipped"
        if node.func.id in ("min", "max"):
            yield altered(lambda n: setattr(n.func, "id", _WORDS[n.func.id]), f"{old}: min/max")


def _negate(node: Any) -> None:
    node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)


def _other_constant(node: ast.Constant) -> Iterator[tuple[str, str]]:
    value = node.value
    if isinstance(value, bool):
        yield repr(not value), f"{value} to {not value}"
    elif isinstance(value, int):
        yield repr(value + 1), f"{value} to {value + 1}"
    elif isinstance(value, float) and value:
        yield repr(2 * value), f"{value} to {2 * value}"
    elif isinstance(value, str) and value in _WORDS:
        yield repr(_WORDS[value]), f"{value!r} to {_WORDS[value]!r}"


def _span(text: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Return where a node starts and ends in the text (ast counts columns in UTF-8 bytes)."""
    offset = _offsets(text)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def _offsets(text: str) -> Callable[[int, int], int]:
    """Return the function from (line, column in UTF-8 bytes) to the index in the text."""
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(len(line) for line in lines)]

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    return offset


# --- what runs, and what became of the mutants
# ------------------------------------------------


def spans_run(modules: Collection[str], run: Callable[[], Any]) -> Ran:
    """Call `run` and return where the instructions lie that this thread executed in `modules`."""
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
    return {module: _spans_of(source_of(module)[0], found) for module, found in seen.items()}


def _spans_of(text: str, instructions: Iterable[tuple[CodeType, int]]) -> set[Span]:
    """Return where instructions, each a code object and an offset in bytes, lie in the text."""
    offset = _offsets(text)
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
    """Return where all instructions of a source text lie."""
    waiting = [compile(text, "text", "exec", dont_inherit=True)]
    instructions = []
    while waiting:
        code = waiting.pop()
        instructions += [(code, at) for at in range(0, len(code.co_code), 2)]
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return _spans_of(text, instructions)


def executed(found: Iterable[Mutation], ran: Ran) -> list[Mutation]:
    """Return the mutations of expressions that ran.

    An expression ran if an instruction inside of it did. One without instructions of its own, such
    as a folded constant, ran if the innermost instruction around it did.
    """
    kept = []
    possible = {module: _all_spans(source_of(module)[0]) for module in ran}
    for mutation in found:
        everything = possible.get(mutation.module, set())
        inside = {s for s in everything if mutation.start <= s[0] and s[1] <= mutation.stop}
        if not inside:
            around = [s for s in everything if s[0] <= mutation.start and mutation.stop <= s[1]]
            inside = {min(around, key=lambda s: s[1] - s[0])} if around else set()
        if inside & ran.get(mutation.module, set()):
            kept.append(mutation)
    return kept


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: how it was noticed, or None if it survived."""

    mutation: Mutation
    noticed: str | None


def survey(verdicts: Sequence[Verdict]) -> str:
    """Return a report: the share that was noticed, then every survivor."""
    survivors = [v.mutation for v in verdicts if v.noticed is None]
    killed = len(verdicts) - len(survivors)
    lines = [f"{killed} of {len(verdicts)} mutants noticed"]
    return "\n".join(lines + [f"survived: {mutation}" for mutation in survivors])
