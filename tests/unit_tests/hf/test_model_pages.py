# SPDX-License-Identifier: Apache-2.0
"""Each supported architecture has a page in docs/models and stands in the index."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.hf.architectures import ARCHITECTURES

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "models"


def test_every_architecture_has_a_page_without_problems() -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    index = pages.pop("README")
    fix = "run python -m tools.model_cards"
    assert pages.keys() == ARCHITECTURES.keys(), fix
    assert set(re.findall(r"^\| \[`(\w+)`\]", index, re.MULTILINE)) == ARCHITECTURES.keys(), fix
    assert not [name for name, text in pages.items() if "does not hold" in text]
    listed = (FOLDER.parent / "hugging-face.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", listed)) >= ARCHITECTURES.keys()
    unsupported = index.split("## Not supported")[1]
    assert not set(re.findall(r"^\| `(\w+)`", unsupported, re.MULTILINE)) & ARCHITECTURES.keys()
