# SPDX-License-Identifier: Apache-2.0
"""The language figures, which `make lint` holds to bounds, find every kind of occurrence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.language import __main__ as language

CORE = "megatron_core/megatron/core/comm/planted.py"
APP = "megatron/training/config/planted_too.py"
OP = "megatron_core/megatron/core/ops/swiglu/triton.py"
TEST = "tests/parity/test_planted.py"
LONG_SENTENCE = " ".join(["word"] * 36) + "."


def plant(root: Path, path: str, text: str) -> None:
    """Write one file below `root`."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


def run(root: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Return the exit status of the tool over `root` and its output."""
    status = language.main(["--root", str(root), *options])
    return status, capsys.readouterr().out


OCCURRENCES = [
    ("never", CORE, "x = 1\nfound = x\n", f"{CORE}:2: found: what it holds"),
    ("never", CORE, "def f(given): ...\n", f"{CORE}:1: given: arguments"),
    ("never", CORE, "def f(*wanted): ...\n", f"{CORE}:1: wanted"),
    ("never", CORE, "def told(): ...\n", f"{CORE}:1: told"),
    ("never", CORE, "class Wanted: ...\n", f"{CORE}:1: Wanted"),
    ("never", CORE, "class Box:\n    kept: int\n", f"{CORE}:2: kept"),
    ("never", CORE, "x = [known for known in ()]\n", f"{CORE}:1: known"),
    ("never", CORE, "import os as shown\n", f"{CORE}:1: shown"),
    ("never", CORE, "x = dict(made=1)\n", f"{CORE}:1: made"),
    ("never", CORE, "match 1:\n    case found: ...\n", f"{CORE}:2: found"),
    ("never", CORE, "class InnerLanes: ...\n", f"{CORE}:1: InnerLanes: data-parallel rank"),
    ("never", CORE, "def read(path, *, mend=''): ...\n", f"{CORE}:1: mend: fix"),
    ("never", CORE, "class Rows:\n    emptied_rows: int = 0\n", f"{CORE}:2: emptied_rows"),
    ("never", CORE, "class Rows:\n    def remade_rows(self): ...\n", f"{CORE}:2: remade_rows"),
    ("never", "megatron/training/mends.py", "", "mends.py:1: mends: fix"),
    ("never", "megatron/training/witness.py", "", "witness.py:1: witness: coverage recorder"),
    ("counted", CORE, "for part in (): ...\n", f"{CORE}:1: part: shard"),
    ("inside", CORE, "last_block = 1\n", f"{CORE}:1: last_block: last_*"),
    ("attributes", CORE, "def f(self):\n    self.place = 1\n", f"{CORE}:2: place: position"),
    ("empty", CORE, "data = 1\n", f"{CORE}:1: data"),
    ("pronouns", CORE, '"""Do it.\n\nFor those of others."""\n', f"{CORE}:3: those of"),
    ("long", "docs/page.md", f"# A\n\n- {LONG_SENTENCE}\n", "docs/page.md:3: "),
    ("very_long", "docs/page.md", LONG_SENTENCE.replace(".", " a" * 15 + "."), "docs/page.md:1: "),
    ("dangling", CORE, '"""See `no_such_name`."""\n', f"{CORE}:1: no_such_name"),
    ("dangling", CORE, "x = 1  # as in `no.such.module`\n", f"{CORE}:1: no.such.module"),
    ("dangling", CORE, '"""See\n`planted.absent`."""\nabsent = 0\n', None),
    ("dangling", APP, '"""See `planted_too.f`."""\n\ndef g(f): ...\n', None),
    (
        "dangling",
        APP,
        '"""See `planted_too.f`, `gone`."""\n',
        f"{APP}:1: gone: nothing defines gone",
    ),
    ("dangling", OP, '"""See `cpu.g`."""\ng = 0\n', f"{OP}:1: cpu.g: "),
    ("dangling", "docs/page.md", "See `docs/absent.md`.\n", "docs/page.md:1: docs/absent.md"),
    ("test_names", TEST, f"def test_{'x' * 56}(): ...\n", f"{TEST}:1: test_x"),
    ("test_rows", TEST, "def test_row_33(): ...\n", f"{TEST}:1: test_row_33"),
]


@pytest.mark.parametrize(("figure", "path", "text", "line"), OCCURRENCES)
def test_planted_occurrence_is_listed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    figure: str,
    path: str,
    text: str,
    line: str | None,
) -> None:
    plant(tmp_path, path, text)
    status, output = run(tmp_path, capsys, "--list", figure)
    assert status == 0
    assert (line in output) if line is not None else not output
    # Without a bound, the same line fails the check.
    status, output = run(tmp_path, capsys)
    assert status == (line is not None)
    assert line is None or line in output


def test_names_of_the_field_are_not_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '"""Gather `blocks` in `planted.gather`, see `docs/page.md` and `torch.cat`."""\n'
    text += "import torch\n\ndef gather(blocks, *, group): ...\n"
    text += "recommend = wanton = foundry = planets = 0\n"
    plant(tmp_path, CORE, text)
    plant(tmp_path, "docs/page.md", f"Short. `planted.py`\n\n```\n{LONG_SENTENCE}\n```\n")
    plant(tmp_path, TEST, f"def test_{'x' * 55}(): ...\n")
    bounds = '["core/comm"]\ncomments = 0.0\n'
    plant(tmp_path, language.BOUNDS, bounds)
    assert run(tmp_path, capsys, "--quiet") == (0, "language: fine\n")


def test_classes_and_modules_with_equal_names_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(tmp_path, CORE, "class Box: ...\n")
    plant(tmp_path, APP, "class Box: ...\n")
    plant(tmp_path, "tests/parity/boxes.py", "class Box: ...\n")
    for name in ("cpu", "triton"):
        plant(tmp_path, f"megatron_core/megatron/core/ops/rope/{name}.py", "class Rope: ...\n")
    output = run(tmp_path, capsys, "--list", "classes_twice")[1]
    assert [line.split(": ")[:2] for line in output.splitlines()] == [
        [f"{CORE}:1", "Box"],
        [f"{APP}:1", "Box"],
    ]
    plant(tmp_path, "megatron/training/planted.py", "")
    text = "from megatron.core.comm import planted\nfrom megatron.training.planted import f\n"
    plant(tmp_path, APP, text + "from megatron.core.ops.rope import cpu\n")
    output = run(tmp_path, capsys, "--list", "side_by_side")[1]
    assert output.startswith(f"{APP}:2: megatron.training.planted: megatron.core.comm.planted")
    assert len(output.splitlines()) == 1


def test_bounds_only_become_tighter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path, APP, "found = given = 1\n")
    assert run(tmp_path, capsys, "--record")[0] == 0
    bounds = (tmp_path / language.BOUNDS).read_text(encoding="utf-8")
    assert '["training/config"]' in bounds
    assert "never = 2" in bounds

    plant(tmp_path, APP, "blocks = given = 1\n")
    status, output = run(tmp_path, capsys)
    assert status == 1
    assert "never 1 is below 2" in output
    assert run(tmp_path, capsys, "--record")[0] == 0

    plant(tmp_path, APP, "found = given = 1\n")
    for options in ((), ("--record",)):
        status, output = run(tmp_path, capsys, *options)
        assert status == 1
        assert "training/config: never 2, bound 1" in output
        assert f"{APP}:1: found" in output
