# SPDX-License-Identifier: Apache-2.0
"""Random mutants of megatron.core: a restructuring must not reduce the number of killed mutants.

python -m tools.core_mutants contexts             which test executes which lines, in build/
python -m tools.core_mutants draw                 60 mutants; replaces those whose code is gone
python -m tools.core_mutants locate               where the mutants of the record are now
python -m tools.core_mutants judge                run the tests of each, write its verdict
python -m tools.core_mutants judge --compare OLD  and compare with a former record
python -m tools.core_mutants judge --recheck      only by the test that has killed it before
python -m tools.core_mutants compare OLD          compare only

A mutant is killed if one of the tests that execute its lines fails, or hangs. They run in a copy of
the checkout, first the previous killer, then the fastest tests, two mutants at a time, for at most
90 seconds each; otherwise the mutant survives. On a busy machine, judge mutants again whose time
ran out: judge --rest --seconds 300. --recheck needs no contexts and takes minutes; a mutant that
survives it must be judged by all of its tests. Programs that tests start by a command line are not
traced, and modules that import Triton are not mutated. `contexts` must be of the same commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from tools.core_mutants.contexts import OUT, Contexts
from tools.core_mutants.judge import (
    ROOT,
    SECONDS,
    cases,
    checkouts,
    failing_without,
    judge,
    rechecks,
    unconfirmed,
)
from tools.core_mutants.record import (
    Mutant,
    Record,
    Site,
    compare,
    draw,
    locate,
    modules_to_mutate,
    sites,
    summary,
)

RECORD = Path(__file__).with_name("record.json")
CONTEXTS = ROOT / "build" / "core_mutants" / "contexts.jsonl"
TESTS = ("tests/unit_tests/core", "tests/parity", "tests/unit_tests/training",
         "tests/functional_tests")  # fmt: skip
COUNT, SEED = 60, 19


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.core_mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("contexts", help="run the tests under coverage")
    add.add_argument("tests", nargs="*", default=TESTS, help="files or folders")
    add = commands.add_parser("draw", help="draw mutants, or replace those that are gone")
    add.add_argument("--count", type=int, default=COUNT)
    add.add_argument("--seed", type=int, default=SEED)
    commands.add_parser("locate", help="say where the mutants are now")
    add = commands.add_parser("judge", help="run the tests of every mutant")
    add.add_argument("--only", type=int, nargs="+", help="these numbers")
    add.add_argument("--rest", action="store_true", help="not judged, or time ran out")
    add.add_argument("--recheck", action="store_true", help="only by what has killed it before")
    add.add_argument("--seconds", type=float, default=SECONDS, help="for each (90), more if busy")
    add.add_argument("--compare", type=Path, metavar="OLD", help="a former record")
    add.add_argument("--at-once", type=int, default=2, help="mutants at a time (2)")
    add = commands.add_parser("compare", help="compare with a former record")
    add.add_argument("old", type=Path)
    for command in commands.choices.values():
        command.add_argument("--record", type=Path, default=RECORD)
    return parser.parse_args(argv)


def run_contexts(options: argparse.Namespace) -> int:
    """Run the tests under coverage."""
    CONTEXTS.parent.mkdir(parents=True, exist_ok=True)
    CONTEXTS.unlink(missing_ok=True)
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    line += ["-p", "tools.core_mutants.contexts", "-n", "2", "--dist", "worksteal"]
    line += ["-m", "not slow and not gpu", *options.tests]
    ended = subprocess.run(line, cwd=ROOT, env={**os.environ, OUT: str(CONTEXTS)}, check=False)
    contexts = Contexts.read(CONTEXTS)
    print(f"{len(contexts.seconds)} tests passed, {sum(contexts.seconds.values()):.0f} s")
    return ended.returncode


def run_draw(options: argparse.Namespace) -> int:
    """Draw mutants."""
    former = Record.read(options.record) if options.record.exists() else None
    record = draw(sites(modules_to_mutate()), options.count, seed=options.seed, record=former)
    record.write(options.record)
    before = {mutant.number for mutant in former.mutants} if former else set()
    for mutant in record.mutants:
        if mutant.number not in before:
            print(f"drawn: {mutant}")
    for mutant in record.gone:
        print(f"gone: {mutant}")
    return 0


def run_locate(options: argparse.Namespace) -> int:
    """Say where the mutants are."""
    all_sites, missing = sites(modules_to_mutate()), 0
    for mutant in Record.read(options.record).mutants:
        site = locate(mutant, all_sites)
        missing += site is None
        print(f"gone: {mutant}" if site is None else f"{mutant.number}. {site.mutation}")
    return int(missing > 0)


def run_judge(options: argparse.Namespace) -> int:
    """Judge mutants and write their verdicts into the record."""
    begin = time.monotonic()
    record = Record.read(options.record)
    contexts = Contexts() if options.recheck else Contexts.read(CONTEXTS)
    selected = [m for m in record.mutants if not options.only or m.number in options.only]
    all_sites: list[Site] = sites(modules_to_mutate())
    look_up = rechecks if options.recheck else cases
    chosen = look_up(selected, lambda mutant: locate(mutant, all_sites), contexts)
    if options.rest:
        chosen = [case for case in chosen if case.is_open]
    verdicts = {mutant.number: mutant for mutant in record.mutants}

    def write() -> None:
        replace(record, mutants=tuple(verdicts.values())).write(options.record)

    def record_verdict(mutant: Mutant) -> None:
        verdicts[mutant.number] = mutant
        write()
        by = f" by {mutant.by}" if mutant.by else ""
        print(f"{time.monotonic() - begin:.0f} s: {mutant}: {mutant.verdict}{by}", flush=True)

    with checkouts(options.at_once) as free:
        checkout = free.get()
        if failing := failing_without([c for c in chosen if c.tests][:5], checkout):
            print("without a mutant fail:", *failing, sep="\n")
            return 1
        free.put(checkout)
        judge(chosen, contexts, free, record_verdict, seconds=options.seconds)
        doubtful = unconfirmed([verdicts[case.mutant.number] for case in chosen], free.get())
    for mutant in doubtful:
        print(f"not confirmed, fails without the mutant too: {mutant}: {mutant.by}")
        verdicts[mutant.number] = replace(mutant, verdict="", by="")
        write()
    print(summary(Record.read(options.record)))
    failed = bool(doubtful)
    if options.compare:
        failed |= _compare(options.compare, options.record)
    return int(failed)


def _compare(old: Path, new: Path) -> bool:
    lines, fewer = compare(Record.read(old), Record.read(new))
    print(*lines, sep="\n")
    return fewer


def main(argv: list[str]) -> int:
    """Run a command and return the exit code."""
    options = parse(argv)
    if options.command == "compare":
        return int(_compare(options.old, options.record))
    commands = {"contexts": run_contexts, "draw": run_draw}
    commands |= {"locate": run_locate, "judge": run_judge}
    return commands[options.command](options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
