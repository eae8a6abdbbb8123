# SPDX-License-Identifier: Apache-2.0
"""The documented exit codes match the code, and a test produces every code."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from pathlib import Path

from megatron.cli import errors
from megatron.cli.errors import ExitCode

ROOT = Path(__file__).parents[3]


def _meanings() -> dict[str, str]:
    """Return each member's docstring as one line."""
    (body,) = (
        n.body
        for n in ast.parse(inspect.getsource(errors)).body
        if isinstance(n, ast.ClassDef) and n.name == "ExitCode"
    )
    pairs = itertools.pairwise(body)
    return {
        assignment.targets[0].id: " ".join(docstring.value.value.split())
        for assignment, docstring in pairs
        if isinstance(assignment, ast.Assign)
    }


def test_documented_exit_codes_match_the_code():
    page = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    table = page.partition("## Exit codes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.*) \|$", table, flags=re.MULTILINE)
    meanings = _meanings()
    assert [(int(code), name, text) for code, name, text in rows] == [
        (member.value, member.name, meanings[member.name]) for member in ExitCode
    ]


def test_every_exit_code_is_produced_by_a_test():
    """Tests that run the program name the expected code as `ExitCode.NAME`."""
    tests = "".join(
        p.read_text(encoding="utf-8") for p in ROOT.glob("tests/functional_tests/**/*.py")
    )
    missing = [m.name for m in ExitCode if m.value and f"ExitCode.{m.name}" not in tests]
    assert not missing
