# SPDX-License-Identifier: Apache-2.0
"""Relative errors use the metric, which refuses a reference that is only noise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
METRIC = TESTS / "support/closeness.py"


def largest(node: ast.AST) -> bool:
    """Whether an expression is `x.abs().max()`, as a tensor or as a number."""
    return ast.unparse(node).replace(".item()", "").rstrip(")").endswith(".abs().max(")


def ratios(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that divide by a tensor's largest value, or bound a difference by it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and largest(node.right):
            yield node.lineno
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE):
            for expression in ast.walk(node.comparators[0]):
                is_product = isinstance(expression, ast.BinOp) and isinstance(
                    expression.op, ast.Mult
                )
                if is_product and (largest(expression.left) or largest(expression.right)):
                    yield node.lineno


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("e = (a - b).abs().max() / b.abs().max()", 1),
        ("e = float((a - b).abs().max()) / float(b.abs().max())", 1),
        ("e = (a - b).abs().max().item() / b.abs().max().item()", 1),
        ("assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name", 1),
        ("assert float((a - b).abs().max()) < 1e-5 * float(b.abs().max())", 1),
        ("assert (a - b).abs().max() > 1e-3 * b.abs().max()", 0),
        ("assert (a - b).abs().max() < 1e-5", 0),
    ],
)
def test_explicit_error_ratios_are_counted(text, count):
    assert len(list(ratios(ast.parse(text)))) == count


def test_relative_errors_use_the_metric():
    lines = [
        f"{path.relative_to(TESTS.parent)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != METRIC and ".abs().max()" in (text := path.read_text(encoding="utf-8"))
        for line in ratios(ast.parse(text))
    ]
    assert not lines, f"use tests.support.closeness, which checks for noise: {lines}"
