# SPDX-License-Identifier: Apache-2.0
"""The claims of the tests (`@pytest.mark.covers`), read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

#: (test, claim), a test as `tests/…/test_x.py::test_y`, whatever its parameters.
Claimed = frozenset[tuple[str, str]]


def declared(file: Path) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield (name, claims, condition on runs) of the tests of a file with claims.

    Raises:
        ValueError: a mark has an unknown argument.
    """
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
                named = {k.arg: ast.literal_eval(k.value) for k in mark.keywords}
                claims = tuple(ast.literal_eval(argument) for argument in mark.args)
                yield node.name, claims, named.pop("runs", "")
                if named:
                    raise ValueError(f"{file}: covers takes claims and runs, not {sorted(named)}")


def files_that_claim(root: Path) -> Iterator[Path]:
    """Yield the test files with `covers` marks."""
    for folder in ("tests", "experimental"):
        for file in sorted((root / folder).rglob("test_*.py")):
            if "mark.covers(" in file.read_text(encoding="utf-8"):
                yield file


def claimed_in(root: Path) -> Claimed:
    """Return the claims of all tests of a checkout."""
    return frozenset(
        (f"{file.relative_to(root).as_posix()}::{name}", claim)
        for file in files_that_claim(root)
        for name, claims, _ in declared(file)
        for claim in claims
    )
