# SPDX-License-Identifier: Apache-2.0
"""No two classes of core share a name. `tools.language` checks the words in names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePosixPath

from tools.code_figures import ROOT, Module, read_modules

#: The files of an op's folder that implement it in plain torch and in Triton.
IMPLEMENTATIONS = (
    {"__init__.py", "triton.py"},
    {"reference.py", "triton.py"},
    {"cpu.py", "triton.py"},
)


def repeated_classes(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the classes that several modules define, except the implementations of one op."""
    paths_by_class: dict[str, list[PurePosixPath]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                paths_by_class[node.name].append(PurePosixPath(module.path.relative_to(ROOT)))
    return {
        name: [str(path) for path in paths]
        for name, paths in paths_by_class.items()
        if len(paths) > 1 and not _implement_one_op(paths)
    }


def _implement_one_op(paths: list[PurePosixPath]) -> bool:
    folders = {path.parent for path in paths}
    return len(folders) == 1 and {path.name for path in paths} in IMPLEMENTATIONS


def test_core_classes_have_distinct_names() -> None:
    modules = read_modules(ROOT)
    core = [m for name, m in modules.items() if name.startswith("megatron.core")]
    assert not repeated_classes(core)
    (duplicate,) = (m for m in core if m.name == "megatron.core.boxes")
    assert "Box" in repeated_classes([*core, duplicate])
