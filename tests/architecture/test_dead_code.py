# SPDX-License-Identifier: Apache-2.0
"""The wheels contain no dead code, and the search finds every kind of dead code and use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.dead_code import check

ROOT = Path(__file__).resolve().parents[2]
CORE = "megatron_core/megatron/core"
FILES = {
    "megatron/training/run.py": """
from megatron.core.ops import shared
from megatron.core.ops.model import Model

def main():
    shared()
    Model().live()

if __name__ == "__main__":
    main()
""",
    f"{CORE}/ops/__init__.py": """
from megatron.core.ops.model import shared, documented, undocumented
__all__ = ["documented", "shared", "undocumented"]
""",
    f"{CORE}/ops/model.py": '''
LIMIT, OLD = 1, 2
LEFT = 3

class Base:
    def of_base(self): ...

class Model(Base, list):
    def live(self, documented):
        """Mentions undocumented."""
        return getattr(self, "by_name"), self.of_base, LIMIT, documented
    def by_name(self): ...
    def forward(self): ...
    def dead(self): self.of_dead()
    def of_dead(self): ...
    def __len__(self): ...

def shared(): ...
def documented(): _of_documented()
def _of_documented(): ...
def undocumented(): ...
def loop(): loop()
def of_tool(): ...
''',
    f"{CORE}/ops/alone.py": "def f(): ...\n",
    "tools/tool.py": "import megatron.core.ops.model as m\nm.of_tool()\n",
    "tests/test_model.py": "from megatron.core.ops.model import undocumented\nundocumented()\n",
    "docs/ops.md": "Call `documented(x)`; an `undocumented thing` is not it.\n",
}
DEAD = {"LEFT", "Model.dead", "Model.of_dead", "undocumented", "loop"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


def allow(tree: Path, *names: str) -> None:
    """Write `names` to the list of allowed dead code."""
    entries = (f'[[allowed]]\nname = "{name}"\nreason = "a later issue"\n' for name in names)
    (tree / "tools/dead_allowed.toml").write_text("".join(entries), encoding="utf-8")


def names(lines: list[str]) -> set[str]:
    """Return the qualified name at the end of each line."""
    return {line.split()[1].removeprefix("megatron.core.ops.") for line in lines}


def test_wheels_contain_no_dead_code():
    assert check(ROOT) == []


def test_unreachable_code_is_reported(tree: Path):
    assert names(check(tree)) == {f"model.{name}" for name in DEAD} | {"alone"}


def test_findings_name_file_and_line(tree: Path):
    (line,) = [line for line in check(tree) if line.endswith("model.LEFT")]
    assert line.startswith(f"{CORE}/ops/model.py:3 ")


def test_allowed_names_keep_code_they_reach_alive(tree: Path):
    allow(tree, "megatron.core.ops.alone", "megatron.core.ops.model.Model.dead")
    assert names(check(tree)) == {"model.LEFT", "model.undocumented", "model.loop"}


@pytest.mark.parametrize("name", ["shared", "gone", "Model.of_base"])
def test_unneeded_allowed_entry_is_reported(tree: Path, name: str):
    allow(tree, f"megatron.core.ops.model.{name}")
    stale = [line for line in check(tree) if line.startswith("tools/dead_allowed.toml")]
    assert len(stale) == 1
    assert f"megatron.core.ops.model.{name}" in stale[0]


def test_allowed_entry_needs_a_reason(tree: Path):
    (tree / "tools/dead_allowed.toml").write_text('[[allowed]]\nname = "megatron.core"\n')
    with pytest.raises(ValueError, match=r"megatron\.core"):
        check(tree)
