# SPDX-License-Identifier: Apache-2.0
"""Check the house style, except for the entries of `budgets.toml`, and the static gate of
`security_rules.py`, except for the entries of `unsafe_allowed.toml`.

    python tools/style_check.py [--root DIR]

Prints one line per breach and exits 1 if there is any. An exception that is no longer needed is a
breach too, so both lists only shrink.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from security_rules import plain_files, unsafe
from style_rules import (
    HARD_LIMITS,
    RULES,
    Finding,
    Source,
    documented_names,
    experiment_imports,
)

TREES = ("megatron_core/megatron", "megatron", "experimental", "tests", "tools")
BUDGETS, UNSAFE_ALLOWED = "tools/budgets.toml", "tools/unsafe_allowed.toml"


@dataclass(frozen=True)
class Allowance:
    """One exception: allows findings of `rule` at `where`, up to `limit` if the rule measures."""

    rule: str
    where: str
    reason: str
    limit: int | None = None
    file: str = BUDGETS

    def covers(self, finding: Finding) -> bool:
        """Tell whether this exception allows `finding`."""
        if (finding.rule, finding.where) != (self.rule, self.where):
            return False
        if finding.measured is None:
            return True
        return self.limit is not None and finding.measured <= self.limit


def read_allowances(root: Path, file: str) -> list[Allowance]:
    """Read a list of exceptions.

    Raises:
        ValueError: an entry without a reason, over a hard limit, or in the wrong list.
    """
    path = root / file
    if not path.is_file():
        return []
    allowances = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("exception", []):
        allowance = Allowance(**entry, file=file)
        if (allowance.rule in ("unsafe", "plain-file")) != (file == UNSAFE_ALLOWED):
            raise ValueError(f"{path.name}: {allowance.rule} does not belong into this list")
        if len(allowance.reason.split()) < 3:
            raise ValueError(f"{path.name}: {allowance.where}: give a reason of a few words")
        hard = HARD_LIMITS.get(allowance.rule)
        if hard is not None and (allowance.limit or 0) > hard:
            raise ValueError(
                f"{path.name}: {allowance.where}: limit {allowance.limit} is over the hard {hard}"
            )
        allowances.append(allowance)
    return allowances


def sources(root: Path) -> Iterator[Source]:
    """Yield every Python file of the checked trees, in order."""
    for tree in TREES:
        for file in sorted((root / tree).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            text = file.read_text(encoding="utf-8")
            yield Source(path, text, ast.parse(text, filename=path))


def check(root: Path) -> list[Finding]:
    """Return every breach under `root` that no exception allows, and every needless exception."""
    allowances = read_allowances(root, BUDGETS) + read_allowances(root, UNSAFE_ALLOWED)
    used: set[Allowance] = set()
    breaches = []
    rules = (*RULES, unsafe, plain_files)
    imports = partial(experiment_imports, documented=documented_names(root))
    for source in sources(root):
        for finding in (f for rule in (*rules, imports) for f in rule(source)):
            covering = [a for a in allowances if a.covers(finding)]
            used.update(covering)
            if not covering:
                breaches.append(finding)
    breaches += [
        Finding("unused-exception", a.file, 1, f"{a.rule} at {a.where} is not needed: delete it")
        for a in allowances
        if a not in used
    ]
    if list((root / "megatron").glob("__init__.py")) + list(
        (root / "megatron_core/megatron").glob("__init__.py")
    ):
        text = "megatron is shared by two distributions: delete its __init__.py"
        breaches.append(Finding("namespace", "megatron/__init__.py", 1, text))
    return breaches


def main() -> int:
    """Run the check from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Check the house style.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root
    try:
        breaches = check(root)
    except (ValueError, SyntaxError) as error:
        print(f"style: {error}", file=sys.stderr)
        return 1
    for breach in breaches:
        print(breach)
    print(f"style: {len(breaches)} breaches" if breaches else "style: fine")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
