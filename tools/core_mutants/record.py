# SPDX-License-Identifier: Apache-2.0
"""The committed record of mutants, and the search for a mutant whose code has moved."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.support.mutants import Mutation
from tests.support.mutation_operators import mutations, sample
from tests.support.source_text import modules_of, source_of
from tools.core_mutants.contexts import core_folder

CORE = "megatron.core"

KILLED, SURVIVED, NOT_COVERED = "killed", "survived", "not covered"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mutant, identified by its function and source text, not by its line number.

    Args:
        number: its name in the record; never given to another mutant.
        module: module where it was last located.
        function: qualified name.
        line: source line on which the replaced expression begins, stripped.
        before: source text of the replaced expression, white space as one blank.
        after: what replaces it.
        occurrence: 1 for the first such edit of such a line of the function.
        what: the edit in words.
        verdict: KILLED, SURVIVED, NOT_COVERED or, before it is judged, empty.
        by: for a killed mutant, the test that failed, or another reason.
        tests: number of tests that cover it.
        ran: number of covering tests that had ended when it was judged.
    """

    number: int
    module: str
    function: str
    line: str
    before: str
    after: str
    occurrence: int
    what: str
    verdict: str = ""
    by: str = ""
    tests: int = 0
    ran: int = 0

    def __str__(self) -> str:
        short = self.what if len(self.what) <= 100 else f"{self.what[:97]}..."
        return f"{self.number}. {self.module.removeprefix(f'{CORE}.')} {self.function}: {short}"


@dataclass(frozen=True)
class Site:
    """A mutation of the current code, with its key in a record."""

    mutation: Mutation
    line: str
    before: str
    occurrence: int


@dataclass(frozen=True)
class Record:
    """Mutants with existing code, and earlier mutants whose code is gone."""

    seed: int
    mutants: tuple[Mutant, ...]
    gone: tuple[Mutant, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        mutants = {name: tuple(Mutant(**m) for m in fields[name]) for name in ("mutants", "gone")}
        return cls(fields["seed"], **mutants)

    def write(self, path: Path) -> None:
        """Write a record."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def modules_to_mutate() -> list[str]:
    """Return the modules of megatron.core that do not import Triton: kernels need a GPU."""
    return [module for module in modules_of(CORE) if not _imports_triton(module)]


def _imports_triton(module: str) -> bool:
    for node in ast.walk(ast.parse(source_of(module)[0])):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] == "triton" for name in names):
            return True
    return False


def sites(modules: Iterable[str]) -> list[Site]:
    """Return every possible mutation of the modules."""
    all_sites = []
    for module in modules:
        text, _ = source_of(module)
        lines = text.splitlines()
        seen: dict[tuple[str, ...], int] = {}
        for mutation in mutations(module):
            line = lines[mutation.line - 1].strip()
            before = " ".join(text[mutation.start : mutation.stop].split())  # indents may change
            key = (mutation.function, line, before, mutation.text)
            seen[key] = seen.get(key, 0) + 1
            all_sites.append(Site(mutation, line, before, seen[key]))
    return all_sites


def draw(
    all_sites: Sequence[Site], count: int, *, seed: int, record: Record | None = None
) -> Record:
    """Draw mutants; keep the existing mutants of an earlier record and replace the others."""
    remaining, gone = [], list(record.gone if record else ())
    for mutant in record.mutants if record else ():
        site = locate(mutant, all_sites)
        if site is None:
            gone.append(mutant)
        else:
            remaining.append(replace(mutant, module=site.mutation.module))
    by_mutation = {site.mutation: site for site in all_sites}
    recorded_names = {_name(mutant) for mutant in (*remaining, *gone)}
    number = max((mutant.number for mutant in (*remaining, *gone)), default=0)
    for mutation in sample(by_mutation, len(by_mutation), seed=seed):
        if len(remaining) >= count:
            break
        mutant = _mutant(by_mutation[mutation], number + 1)
        if _name(mutant) not in recorded_names:
            remaining.append(mutant)
            number += 1
    return Record(seed, tuple(remaining), tuple(gone))


def _mutant(site: Site, number: int) -> Mutant:
    mutation = site.mutation
    return Mutant(
        number=number,
        module=mutation.module,
        function=mutation.function,
        line=site.line,
        before=site.before,
        after=mutation.text,
        occurrence=site.occurrence,
        what=mutation.what,
    )


def _name(mutant: Mutant) -> tuple[str | int, ...]:
    """Return what names a mutant without its module, which may have changed."""
    return (mutant.function, mutant.line, mutant.before, mutant.after, mutant.occurrence)


def locate(mutant: Mutant, all_sites: Iterable[Site]) -> Site | None:
    """Return the location of a mutant in the current code, or None if it is gone.

    The function is looked for by its qualified name in the module, then in all of core, then by the
    last part of its name, without leading underscores. The edit must be on the same line of source
    text. If the function has the same qualified name, the line may differ, if the function contains
    the edit only once.
    """
    same = [s for s in all_sites if (s.before, s.mutation.text) == (mutant.before, mutant.after)]
    in_module = [s for s in same if s.mutation.module == mutant.module]
    function_name = _function_name(mutant.function)
    named = [s for s in same if s.mutation.function == mutant.function]
    named_here = [s for s in in_module if s.mutation.function == mutant.function]
    alike = [s for s in in_module + same if _function_name(s.mutation.function) == function_name]
    for candidates in (named_here, named, alike):
        for site in candidates:
            if (site.line, site.occurrence) == (mutant.line, mutant.occurrence):
                return site
        if candidates is not alike and len(candidates) == 1:
            return candidates[0]
    return None


def _function_name(function: str) -> str:
    return function.rpartition(".")[2].lstrip("_")


def lines_of(site: Site) -> tuple[str, range, range]:
    """Return (file below megatron.core, lines of the expression, lines of its statement).

    The statement is needed because an expression may have no instructions of its own.
    """
    text, path = source_of(site.mutation.module)
    start, stop = site.mutation.line, text.count("\n", 0, site.mutation.stop) + 1
    around = range(start, stop + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= start and stop <= (node.end_lineno or 0):
            body = getattr(node, "body", None)  # of a compound statement, the head
            end = (node.end_lineno or 0) + 1
            if body and body[0].lineno > node.lineno:
                end = body[0].lineno
            if stop < end:
                around = range(node.lineno, end)  # inner ones come later
    name = Path(path).resolve().relative_to(core_folder()).as_posix()
    return name, range(start, stop + 1), around


def compare(old: Record, new: Record) -> tuple[list[str], bool]:
    """Say how verdicts have changed; and whether fewer mutants are killed than before."""
    now = {mutant.number: mutant for mutant in new.mutants}
    counts = [sum(m.verdict == KILLED for m in record.mutants) for record in (old, new)]
    lines = [f"killed before: {counts[0]} of {len(old.mutants)}"]
    lines.append(f"killed now: {counts[1]} of {len(new.mutants)}")
    for mutant in old.mutants:
        new_mutant = now.get(mutant.number)
        if new_mutant is None:
            lines.append(f"gone ({mutant.verdict} before): {mutant}")
        elif mutant.verdict == KILLED and new_mutant.verdict != KILLED:
            lines.append(f"killed before, {new_mutant.verdict or 'not judged'} now: {new_mutant}")
    before = {mutant.number for mutant in old.mutants}
    lines += [f"redrawn ({m.verdict}): {m}" for m in new.mutants if m.number not in before]
    return lines, counts[1] < counts[0]


def summary(record: Record) -> str:
    """Count the verdicts and list every mutant that no test kills."""
    phrases = [
        f"{sum(mutant.verdict == verdict for mutant in record.mutants)} {verdict or 'not judged'}"
        for verdict in (KILLED, SURVIVED, NOT_COVERED, "")
    ]
    lines = [f"{len(record.mutants)} mutants: " + ", ".join(phrases)]
    for mutant in record.mutants:
        if mutant.verdict in (SURVIVED, NOT_COVERED):
            seen = f", {mutant.ran} of {mutant.tests} tests ran" if mutant.tests else ""
            lines.append(f"{mutant.verdict}{seen}: {mutant}")
    return "\n".join(lines)
