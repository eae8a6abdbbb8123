# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md shows the packages and calls of today, and names files that are there."""

from __future__ import annotations

import re

from tools.draw_architecture import CORE, PAGE, ROOT, packages, page, reduced


def test_the_pictures_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python -m tools.draw_architecture"


def test_a_reduction_keeps_what_is_reached_and_drops_shortcuts() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    found = packages(ROOT)
    assert "core.models" in found["training"]
    assert not found["core.boxes"]


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 30
    applications = ROOT / "megatron"
    folders = (CORE, applications, *CORE.iterdir(), *applications.iterdir())
    missing = [name for name in named if not any((folder / name).exists() for folder in folders)]
    assert not missing
