# SPDX-License-Identifier: Apache-2.0
"""Coverage counts the lines of ranks and of interpreted kernels, per package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.coverage_report import coverage_by_package, kernel_names, table

ROOT = Path(__file__).resolve().parents[2]
GROUPED = "megatron_core/megatron/core/ops/grouped_mm/triton.py"
LOOP = "megatron/training/loop.py"


def summary(covered: int, lines: int, covered_branches: int = 0, branches: int = 0) -> dict:
    """Return the summary of a function as `coverage json` writes it."""
    counts = {"covered_lines": covered, "num_statements": lines}
    branch_counts = {"covered_branches": covered_branches, "num_branches": branches}
    return {"summary": counts | branch_counts}


def test_kernels_count_apart_from_other_lines_of_a_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    assert "grouped_mm_kernel" in kernel_names(Path(GROUPED).read_text())
    files = {
        GROUPED: {"functions": {"grouped_mm_kernel": summary(1, 8, 1, 2), "": summary(3, 4)}},
        LOOP: {"functions": {"run": summary(5, 10, 1, 4)}},
    }
    packages = coverage_by_package({"files": files})
    ops, everything = packages["megatron.core.ops"], packages["all"]
    assert (ops.kernel_lines.covered, ops.kernel_lines.total) == (1, 8)
    assert (ops.lines.covered, ops.lines.total, ops.branches.total) == (3, 4, 0)
    assert (everything.lines.covered, everything.lines.total) == (8, 14)
    assert "| megatron.training | 50.0 % | 25.0 % |  |" in table(packages).splitlines()
    assert table(packages).splitlines()[-1].startswith("| all | 57.1 % | 25.0 % | 12.5 % |")


@pytest.mark.slow(seconds=10)
def test_lines_that_only_ranks_run_are_covered(tmp_path: Path):
    counts, report = tmp_path / "coverage", tmp_path / "coverage.json"
    coverage = [sys.executable, "-W", "ignore", "-m", "coverage"]
    test = "tests/unit_tests/core/comm/test_direct.py"
    for arguments in (
        ["run", "--branch", f"--data-file={counts}", "-m", "pytest", "-q", "-n", "0", test],
        ["combine", "-q", f"--data-file={counts}", str(tmp_path)],
        ["json", "-q", f"--data-file={counts}", "-o", str(report)],
    ):
        subprocess.run([*coverage, *arguments], cwd=ROOT, check=True, capture_output=True)
    files = json.loads(report.read_text())["files"]
    collectives = files["megatron_core/megatron/core/comm/collectives.py"]["functions"]
    launched = collectives["all_gather_async"]["summary"]
    assert launched["covered_lines"] > 0
    assert launched["covered_branches"] > 0
