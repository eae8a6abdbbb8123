# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md shows the current packages and calls, and names existing files."""

from __future__ import annotations

import re

from tools.draw_architecture import CORE, PAGE, ROOT, packages, page, reduced


def test_diagrams_match_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python -m tools.draw_architecture"


def test_reduced_graph_keeps_reachability() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    graph_of_packages = packages(ROOT)
    assert "core.models" in graph_of_packages["training"]
    assert not graph_of_packages["core.boxes"]


def test_files_named_on_the_page_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 30
    applications = ROOT / "megatron"
    folders = (CORE, applications, *CORE.iterdir(), *applications.iterdir())
    missing = [name for name in named if not any((folder / name).exists() for folder in folders)]
    assert not missing
