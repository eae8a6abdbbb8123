# SPDX-License-Identifier: Apache-2.0
"""Small faults that nobody thought of: wrong sign, wrong rank, condition negated, call dropped …"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tests.support.mutants import Mutation
from tests.support.source_text import definitions, source_of, span

_ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_WORDS = {
    "sum": "max", "max": "sum", "partial": "identical", "identical": "partial", "SUM": "MAX",
    "MAX": "SUM", "min": "max", "dense_dp": "tp", "tp": "dense_dp", "PARTIAL": "REPLICATED",
    "REPLICATED": "PARTIAL", "SHARDED": "REPLICATED",
}  # fmt: skip
_COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "copy_to_group", "reduce_from_group"}
)


def mutations(module: str) -> list[Mutation]:
    """List all small mutations of a module's functions.

    Left out, because nothing a run computes depends on them: docstrings, annotations, defaults,
    assertions, and whatever only raises or words an error.
    """
    text, _ = source_of(module)
    mutants: list[Mutation] = []
    for name, definition in definitions(ast.parse(text)):
        seen: dict[str, int] = {}
        for node in _mutable(definition):
            for changed, what in _variants(node):
                start, stop = span(text, node)
                key = f"{module}|{name}|{text[start:stop]}|{what}"
                seen[key] = seen.get(key, 0) + 1
                mutants.append(
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
    return mutants


def sample(mutants: Iterable[Mutation], count: int, *, seed: int) -> list[Mutation]:
    """Draw `count` mutations.

    The draw goes by a hash of (seed, edit), so it stays nearly the same when other code changes.
    """

    def drawn(mutation: Mutation) -> str:
        return hashlib.sha256(f"{seed}|{mutation.key}".encode()).hexdigest()

    return sorted(mutants, key=drawn)[:count]


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
        changed_node = copy.deepcopy(node)
        change(changed_node)
        text = ast.unparse(changed_node)
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
