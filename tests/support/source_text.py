# SPDX-License-Identifier: Apache-2.0
"""Positions of definitions and expressions in the source text of a module."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import pkgutil
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

#: Start and end offset of a range of source text.
Span = tuple[int, int]


def source_of(module: str) -> tuple[str, str]:
    """Return the source text of a module and the path that it comes from; do not import it."""
    path = _spec_of(module).origin
    assert path is not None
    return Path(path).read_text(encoding="utf-8"), path


def modules_of(name: str) -> list[str]:
    """Return the modules of a package, or the module itself if it is none; import packages only."""
    folders = _spec_of(name).submodule_search_locations
    if folders is None:
        return [name]
    inner = pkgutil.iter_modules(folders)
    return [name] + [module for entry in inner for module in modules_of(f"{name}.{entry.name}")]


def _spec_of(module: str) -> ModuleSpec:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no module {module}"
    return spec


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and of its classes with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{prefix}{node.name}.")


def span(text: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Return the start and end offset of a node (ast counts columns in UTF-8 bytes)."""
    offset = offsets(text)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def offsets(text: str) -> Callable[[int, int], int]:
    """Return the function from (line, column in UTF-8 bytes) to the index in the text."""
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(len(line) for line in lines)]

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    return offset
