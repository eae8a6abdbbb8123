# SPDX-License-Identifier: Apache-2.0
"""A package's `__all__` is its public interface: every name exists, and packages with lazy names
import nothing heavy."""

from __future__ import annotations

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


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


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


def test_name_that_is_also_a_module_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "clashing").mkdir()
    imports = "if TYPE_CHECKING:\n    from clashing.f import f as f\n"
    (tmp_path / "clashing" / "__init__.py").write_text(f"TYPE_CHECKING = False\n{imports}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="f"):
        lazy_exports("clashing")
