# SPDX-License-Identifier: Apache-2.0
"""A package's `__all__` is its public interface: every name exists, type checkers see the
same names, and packages with lazy names import nothing heavy."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.lazy_exports import lazy_exports

ROOT = Path(__file__).resolve().parents[2]
TREES = (ROOT / "megatron_core/megatron/core", ROOT / "megatron/hf", ROOT / "megatron/inference")


def packages() -> dict[str, Path]:
    """Return the `__init__.py` of each package that has an `__all__`, by the package's name."""
    files = [file for tree in TREES for file in tree.rglob("__init__.py")]
    names = [str(file.parent).rpartition("/megatron/")[2].replace("/", ".") for file in files]
    return {
        f"megatron.{name}": file
        for name, file in zip(names, files, strict=True)
        if "__all__" in file.read_text(encoding="utf-8")
    }


PACKAGES = packages()
LAZY = [name for name, file in PACKAGES.items() if "lazy_exports(" in file.read_text("utf-8")]


def names_of_type_checkers(file: Path) -> set[str]:
    """Return the names that the block `if TYPE_CHECKING:` of the file imports."""
    blocks = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_see_the_lazy_names(package: str) -> None:
    module = importlib.import_module(package)
    eager = set(module.__all__) & vars(module).keys()
    assert names_of_type_checkers(PACKAGES[package]) == set(module.__all__) - eager
    assert set(module.__all__) <= set(dir(module))


def test_packages_with_lazy_names_import_no_torch() -> None:
    assert len(LAZY) >= 10
    code = (
        f"import sys, {', '.join(LAZY)}\n"
        "imported = {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {imported}' if imported else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="GPTModle"):
        importlib.import_module("megatron.core.models").GPTModle  # noqa: B018


@pytest.mark.parametrize("modules", [{"a": ("f",), "b": ("f",)}, {"f": ("f",)}])
def test_name_in_two_modules_is_refused(modules: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="f"):
        lazy_exports("package", modules)
