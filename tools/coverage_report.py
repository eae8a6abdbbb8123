# SPDX-License-Identifier: Apache-2.0
"""Print line and branch coverage per package; Triton kernels have a column of their own.

    python -m tools.coverage_report build/coverage/coverage.json

The file is the output of `coverage json`. A kernel counts where Triton's interpreter ran its
lines: it shows that a test reached them, and nothing about the code that Triton compiles.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Number of names in a package of the table: megatron.core.ops, megatron.training.config.
DEPTH = 3


@dataclass
class Count:
    """Covered and all lines or branches."""

    covered: int = 0
    total: int = 0

    def add(self, covered: int, total: int) -> None:
        """Add the counts of a file or function."""
        self.covered += covered
        self.total += total

    def __str__(self) -> str:
        return f"{100 * self.covered / self.total:.1f} %" if self.total else ""


@dataclass
class PackageCoverage:
    """Coverage of a package: lines and branches outside kernels, and lines of kernels."""

    lines: Count
    branches: Count
    kernel_lines: Count


def kernel_names(source: str) -> set[str]:
    """Return the names of the functions that `triton.jit` decorates."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def package_of(path: str) -> str:
    """Return the package of a file of the wheels, at most `DEPTH` names."""
    folders = Path(path).parent.parts
    return ".".join(folders[folders.index("megatron") :][:DEPTH])


def _functions(entry: Mapping[str, Any], path: str) -> Iterator[tuple[bool, Mapping[str, int]]]:
    """Yield for each function of a file, and for the code outside of functions, whether it is a
    kernel, and its summary."""
    kernels = kernel_names(Path(path).read_text(encoding="utf-8"))
    for name, function in entry["functions"].items():
        yield name in kernels, function["summary"]


def coverage_by_package(report: Mapping[str, Any]) -> dict[str, PackageCoverage]:
    """Sum the counts of a report of `coverage json` per package.

    Returns:
        the coverage of each package, and of all packages under the name "all".
    """
    packages: defaultdict[str, PackageCoverage] = defaultdict(
        lambda: PackageCoverage(Count(), Count(), Count())
    )
    for path, entry in report["files"].items():
        for is_kernel, summary in _functions(entry, path):
            for name in (package_of(path), "all"):
                package = packages[name]
                lines = package.kernel_lines if is_kernel else package.lines
                lines.add(summary["covered_lines"], summary["num_statements"])
                if not is_kernel:
                    branches = summary.get("covered_branches", 0), summary.get("num_branches", 0)
                    package.branches.add(*branches)
    return dict(sorted(packages.items()))


def table(packages: Mapping[str, PackageCoverage]) -> str:
    """Return a Markdown table, worst line coverage first, the sum last."""
    rows = sorted(
        (name == "all", package.lines.covered / max(1, package.lines.total), name)
        for name, package in packages.items()
    )
    lines = ["| package | lines | branches | lines of interpreted kernels |", "|---|---|---|---|"]
    for _, _, name in rows:
        package = packages[name]
        lines.append(f"| {name} | {package.lines} | {package.branches} | {package.kernel_lines} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table of a report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="output of `coverage json`")
    report = json.loads(parser.parse_args().report.read_text(encoding="utf-8"))
    print(table(coverage_by_package(report)))


if __name__ == "__main__":
    main()
