# SPDX-License-Identifier: Apache-2.0
"""Measure the language of names, docstrings, comments and pages, and hold it to bounds.

    python -m tools.language                                   figures with their bounds
    python -m tools.language --list never --package core/comm  each occurrence and the term to use
    python -m tools.language --record                          lower the bounds to today's figures

The bounds of `bounds.toml` are a ratchet for each package: a figure above its bound fails with
file, line and term; one below fails too, until the bound is lowered. Words are in `words.toml`.

    never          names that are a word of the lists `private` and `never`
    counted        names that are a word of the list `counted`
    inside         names with a word of `never` or `counted`, alone or within a longer name
    attributes     attributes that are assigned under such a name
    empty          names that carry nothing: data, result, obj
    pronouns       pronoun phrases in docstrings
    long           sentences of pages with over 35 words; very_long: over 50
    comments       comment lines for 100 lines of code, at least, where streams and orders matter
    classes_twice  classes of core and apps that share a name
    side_by_side   unrelated modules of one file name that one file imports
    dangling       back-quoted names and paths that lead nowhere
    test_names     names of tests over 60 characters; test_rows: names by a number
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.language import pages, source_facts, tree_facts
from tools.language.source_facts import Facts

TREES = ("megatron_core/megatron", "megatron", "experimental", "tests", "tools")
TOOL = Path(__file__).resolve().parent
BOUNDS, CACHE = "tools/language/bounds.toml", "build/language.json"
FIGURES = {
    "never": "bound",
    "counted": "bound",
    "inside": "bound",
    "attributes": "stored",
    "empty": "bound",
    "pronouns": "docstrings",
    "long": "sentences",
    "very_long": "sentences",
    "classes_twice": None,
    "side_by_side": None,
    "dangling": None,
    "test_names": None,
    "test_rows": None,
}
#: How far comments may rise over their bound, which is rounded down to a tenth.
COMMENT_SLACK = 0.5
LISTED = 20
Bounds = dict[str, dict[str, float]]


@dataclass(frozen=True, order=True)
class Occurrence:
    """One place that a figure counts."""

    package: str
    path: str
    line: int
    text: str
    term: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}: {self.term}"


def package_of(path: str) -> str:
    """Return the package that a bound is for: core/comm, training/config, tests/parity, a page."""
    if not path.endswith(".py"):
        return path
    core = "megatron_core/megatron/"
    folders = path.removeprefix(core).removeprefix("megatron/").split("/")[:-1]
    return "/".join(folders[: 3 if folders[:2] == ["tests", "unit_tests"] else 2])


@dataclass
class Measured:
    """The figures of a tree: occurrences by figure, and what there is of each kind by package."""

    occurrences: dict[str, list[Occurrence]]
    totals: dict[str, Counter[str]]

    def values(self) -> Bounds:
        """Return package -> figure -> count, without zeros; comments are for 100 lines of code."""
        values: Bounds = defaultdict(dict)
        for figure in FIGURES:
            counts = Counter(occurrence.package for occurrence in self.occurrences[figure])
            for package, count in counts.items():
                values[package][figure] = count
        for package, code in self.totals["code"].items():
            tenths = 1000 * self.totals["comments"][package] // max(code, 1)
            values[package]["comments"] = tenths / 10
        return values


def read_files(root: Path) -> dict[str, Facts]:
    """Return path -> facts of every file; facts of unchanged files come from the cache."""
    tool = b"".join(p.read_bytes() for p in sorted(TOOL.glob("*.*")) if p.name != "bounds.toml")
    words = tomllib.loads((TOOL / "words.toml").read_text(encoding="utf-8"))
    cache = root / CACHE
    earlier = json.loads(cache.read_text(encoding="utf-8")) if cache.is_file() else {}
    files, keys = {}, {}
    python = [file for tree in TREES for file in sorted((root / tree).rglob("*.py"))]
    texts = sorted(root.glob("*.md")) + sorted((root / "docs").glob("*.md"))
    for file in python + [page for page in texts if page.name != "CHANGELOG.md"]:
        path = file.relative_to(root).as_posix()
        content = file.read_bytes()
        key = keys[path] = hashlib.blake2b(path.encode() + content, key=_key(tool)).hexdigest()
        if path in earlier and earlier[path][0] == key:
            files[path] = earlier[path][1]
        elif file.suffix == ".py":
            files[path] = source_facts.read_facts(path, content.decode(), words)
        else:
            files[path] = pages.read_page(path, content.decode())
    if files.keys() != earlier.keys() or any(earlier[path][0] != keys[path] for path in files):
        cache.parent.mkdir(exist_ok=True)
        text = json.dumps({path: (keys[path], files[path]) for path in files})
        cache.write_text(text, encoding="utf-8")
    return files


def _key(tool: bytes) -> bytes:
    return hashlib.blake2b(tool, digest_size=32).digest()


def measure(root: Path) -> Measured:
    """Measure the tree at `root`."""
    files = read_files(root)
    occurrences: dict[str, list[Occurrence]] = {figure: [] for figure in FIGURES}
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    external = tomllib.loads((TOOL / "external.toml").read_text(encoding="utf-8"))
    tree = [
        *tree_facts.repeated_classes(files),
        *tree_facts.modules_side_by_side(files),
        *tree_facts.dangling(root, files, external),
    ]
    for path, facts in files.items():
        tree += [(figure, path, *details) for figure, *details in facts["entries"]]
        for kind, total in facts.items():
            if isinstance(total, int):
                totals[kind][package_of(path)] += total
    for figure, path, *details in tree:
        occurrences[figure].append(Occurrence(package_of(path), path, *details))
    return Measured({figure: sorted(matches) for figure, matches in occurrences.items()}, totals)


def compare(root: Path, measured: Measured, bounds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of every figure above its bound, and of every bound that can be lowered.

    Occurrences in the files that changed last come first.
    """

    def age(occurrence: Occurrence) -> float:
        return -(root / occurrence.path).stat().st_mtime

    lines = []
    values = measured.values()
    for package in sorted(values.keys() | bounds.keys()):
        of_package, bound_of = values.get(package, {}), bounds.get(package, {})
        for figure in sorted(of_package.keys() | bound_of.keys()):
            value, bound = of_package.get(figure, 0), bound_of.get(figure, 0)
            if figure == "comments":
                if value < bound:
                    lines.append(f"{package}: {value} comment lines for 100 of code, under {bound}")
                elif value >= bound + COMMENT_SLACK:
                    lines.append(f"{package}: comments {value} over {bound}: run with --record")
            elif value > bound:
                lines.append(f"{package}: {figure} {value}, bound {bound}; one of")
                matches = [o for o in measured.occurrences[figure] if o.package == package]
                lines += [f"  {occurrence}" for occurrence in sorted(matches, key=age)[:LISTED]]
                if len(matches) > LISTED:
                    lines.append(f"  ... all: --list {figure} --package {package}")
            elif value < bound:
                lines.append(f"{package}: {figure} {value} is below {bound}: run with --record")
    return lines


def lowered(values: Bounds, bounds: Mapping[str, Mapping[str, float]]) -> Bounds:
    """Return bounds tightened to today's figures; a new package gets its figures as bounds."""
    after: Bounds = {}
    for package, figures in sorted(values.items()):
        old = bounds.get(package)
        for figure, value in sorted(figures.items()):
            pick = max if figure == "comments" else min
            bound = value if old is None else pick(value, old.get(figure, 0))
            if bound:
                after.setdefault(package, {})[figure] = bound
    return after


def write_bounds(path: Path, bounds: Bounds) -> None:
    """Write the bounds, a table for each package, so that changes to two packages merge."""
    lines = ["# SPDX-License-Identifier: Apache-2.0"]
    lines += ["# Bounds of `python -m tools.language`, which --record lowers; absent means zero."]
    for package, figures in bounds.items():
        lines += ["", f'["{package}"]', *(f"{name} = {bound}" for name, bound in figures.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def print_table(measured: Measured, bounds: Bounds) -> None:
    """Print each figure of the wheels and of the whole tree, with its share and its bound."""

    def row(title: str, figure: str, packages: set[str]) -> None:
        count = sum(o.package in packages for o in measured.occurrences[figure])
        bound = sum(int(bounds.get(package, {}).get(figure, 0)) for package in packages)
        kind = FIGURES[figure]
        total = sum(measured.totals[kind][package] for package in packages) if kind else 0
        share = f"{100 * count / total:7.2f} % of {total} {kind}" if total else ""
        print(f"{figure:14} {title:12} {count:6} bound {bound:6} {share}")

    everything = set(measured.values()) | set(bounds)
    for kind in measured.totals.values():
        everything |= set(kind)
    tops = ("core", "cli", "hf", "inference", "training")
    wheels = {package for package in everything if package.split("/")[0] in tops}
    for figure in FIGURES:
        row("core, apps", figure, wheels)
        row("elsewhere", figure, everything - wheels)
    for package, figures in sorted(measured.values().items()):
        if "comments" in figures:
            bound = bounds.get(package, {}).get("comments", 0)
            print(f"{'comments':14} {package:22} {figures['comments']:5} bound {bound:5}")


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.language", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--root", type=Path, default=TOOL.parents[1], help="of the repository")
    parser.add_argument("--list", choices=FIGURES, help="print each occurrence of a figure")
    parser.add_argument("--package", help="of --list: core/comm, or core for all of core")
    parser.add_argument("--record", action="store_true", help="lower the bounds")
    parser.add_argument("--quiet", action="store_true", help="without the table")
    options = parser.parse_args(argv)
    measured = measure(options.root)
    if options.list:
        for occurrence in measured.occurrences[options.list]:
            if f"{occurrence.package}/".startswith(f"{options.package or occurrence.package}/"):
                print(occurrence)
        return 0
    path = options.root / BOUNDS
    bounds = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if options.record:
        bounds = lowered(measured.values(), bounds)
        write_bounds(path, bounds)
    if not options.quiet:
        print_table(measured, bounds)
    lines = compare(options.root, measured, bounds)
    print("\n".join([*lines, "language: over the bounds" if lines else "language: fine"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
