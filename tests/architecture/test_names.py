# SPDX-License-Identifier: Apache-2.0
"""Names: no class of core has that of another, and none has a word that the glossary rules out."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from tools.code_figures import ROOT, Module, read_modules

GLOSSARY = ROOT / "docs" / "glossary.md"
#: Where an op's folder has its implementations: in plain torch, and in Triton.
IMPLEMENTATIONS = ({"__init__.py", "triton.py"}, {"reference.py", "triton.py"})


def ruled_out(text: str) -> set[str]:
    """Return the words of the glossary's second table."""
    rows = re.findall(r"^\| ([\w, ]+) \|", text.split("## Words that no name has")[1], re.MULTILINE)
    return {word for row in rows for word in row.split(", ")} - {"not"}


def names(module: Module) -> Iterator[str]:
    """Yield the names that a module gives: its own, of classes, functions, parameters, fields."""
    yield module.path.stem
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            yield node.name
            yield from (a.arg for a in (*arguments.args, *arguments.kwonlyargs))
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )


def breaches(modules: Iterable[Module], words: set[str]) -> list[str]:
    """List the names with one of the words, in the singular or the plural."""
    return [
        f"{module.name}: {name}"
        for module in modules
        for name in sorted(set(names(module)))
        if any(word in words or word.removesuffix("s") in words for word in parts_of(name))
    ]


def parts_of(name: str) -> list[str]:
    """Return the words of a name, in small letters."""
    return re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower().split("_")


def repeated_classes(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the classes that several modules define, but an op's implementations of one class."""
    found: dict[str, list[PurePosixPath]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(PurePosixPath(module.path.relative_to(ROOT)))
    return {
        name: [str(path) for path in paths]
        for name, paths in found.items()
        if len(paths) > 1 and not _one_op(paths)
    }


def _one_op(paths: list[PurePosixPath]) -> bool:
    folders = {path.parent for path in paths}
    return len(folders) == 1 and {path.name for path in paths} in IMPLEMENTATIONS


def planted(folder: Path, path: str, text: str) -> Module:
    """Return a module with a text."""
    (folder / path).write_text(text, encoding="utf-8")
    return Module(f"megatron.core.{Path(path).stem}", folder / path)


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules(ROOT)


def test_no_name_has_a_word_that_the_glossary_rules_out(modules: dict[str, Module]) -> None:
    words = ruled_out(GLOSSARY.read_text(encoding="utf-8"))
    assert {"mend", "remade", "remake", "want"} < words
    assert not breaches(modules.values(), words)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("mends.py", ""),
        ("planted.py", "def read(path, *, mend=''): ..."),
        ("planted.py", "class Wanted:\n    def wants(self): ..."),
        ("planted.py", "class Rows:\n    emptied_rows: int = 0"),
        ("planted.py", "class Rows:\n    def remade_rows(self): ..."),
    ],
)
def test_forbidden_word_in_a_name_is_reported(tmp_path: Path, path: str, text: str) -> None:
    words = ruled_out(GLOSSARY.read_text(encoding="utf-8"))
    assert len(breaches([planted(tmp_path, path, text)], words)) == 1
    fine = planted(tmp_path, "fine.py", "def recommend(amendment, wanton): ...")
    assert not breaches([fine], words)


def test_no_two_classes_of_core_have_one_name(modules: dict[str, Module]) -> None:
    core = [m for name, m in modules.items() if name.startswith("megatron.core")]
    assert not repeated_classes(core)
    (again,) = (m for m in core if m.name == "megatron.core.boxes")
    assert "Box" in repeated_classes([*core, again])
