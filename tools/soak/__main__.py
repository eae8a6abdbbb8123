# SPDX-License-Identifier: Apache-2.0
"""Kill a training run at random moments and see that nothing is lost and nothing differs.

python -m tools.soak                        200 kills, a seed of the day's own
python -m tools.soak --seed 7 --chain 3     one chain of kills again

A chain is one run: it is killed, started again with the same line, and so on to its end. After
every kill all checkpoints have to be there and whole, with the bits that they have in a run that
nothing happened to. Which process is killed, how and when is drawn from the seed; half of the
kills are timed within the measured duration of a save.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing import forkserver
from pathlib import Path

from tests.functional_tests.small_run import write_tokens
from tests.support import ranks
from tools.soak.chain import Chain, Result, Setting, measure
from tools.soak.checks import Reference
from tools.soak.choices import FLAVOURS
from tools.soak.job import SoakFailure
from tools.soak.pace import Measured
from tools.soak.report import complaint, inside, line, table

WARM = "tools.soak.warm"


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kills", type=int, default=200, help="how many (200)")
    add("--seed", type=int, help="of all choices; else a new one, which is printed")
    add("--ranks", type=int, default=2, help="processes of a run (2)")
    add("--iterations", type=int, default=24, help="length of a run (24)")
    add("--disk-milliseconds", type=float, default=10.0, help="what file operations cost more (10)")
    add("--chain", type=int, help="only this one")
    add("--flavour", action="append", choices=[f.name for f in FLAVOURS], help="only these runs")
    add("--seconds-limit", type=float, help="after which it counts as failed")
    add("--plant", metavar="MODULE:FUNCTION", help="called in every rank: a defect to be found")
    add("--folder", type=Path, help="for all files; else a temporary one")
    options = parser.parse_args(argv)
    if options.ranks < 2 or options.ranks % 2:
        parser.error("--ranks must be even: some runs are tensor parallel")
    return options


class Soak:
    """Chain after chain, until there were as many kills as asked for."""

    def __init__(self, options: argparse.Namespace, setting: Setting) -> None:
        self.options, self.setting = options, setting
        self.results: list[Result] = []
        self.chains = self.starts = 0
        self.chain: Chain | None = None
        self._references: dict[str, tuple[Reference, Measured]] = {}
        self._began = time.monotonic()

    def run(self) -> None:
        """Kill, check and print a line for each. Raises SoakFailure."""
        for chain in self._chains_to_run():
            self.chain = chain
            for result in chain.run(self.options.kills - len(self.results)):
                self.results.append(result)
                print(line(len(self.results), result), flush=True)
                limit = self.options.seconds_limit
                if limit is not None and time.monotonic() - self._began > limit:
                    raise SoakFailure("late", f"{len(self.results)} kills took {limit:g} s")
            self.chains += 1
            self.starts += chain.starts
            print(f"      chain {chain.number} ended exactly after {chain.starts} starts")
        self.chain = None
        if (short := complaint(self.results)) is not None:
            raise SoakFailure("late", short)

    def _chains_to_run(self) -> Iterator[Chain]:
        wanted = [f for f in FLAVOURS if f.name in (self.options.flavour or [f.name])]
        only = self.options.chain
        for number in count(1) if only is None else [only]:
            if len(self.results) >= self.options.kills:
                return
            flavour = wanted[(number - 1) % len(wanted)]
            if flavour.name not in self._references:
                measured = Measured()
                self._references[flavour.name] = (
                    measure(self.setting, flavour, measured),
                    measured,
                )
                print(
                    f"      {flavour.name}: a start takes {measured.of('start'):.2f} s, a save "
                    f"{measured.of('save'):.2f} s, from save to save {measured.of('between'):.2f} s"
                )
            reference, measured = self._references[flavour.name]
            yield Chain(
                setting=self.setting,
                number=number,
                flavour=flavour,
                reference=reference,
                measured=measured,
            )


def main(argv: list[str]) -> int:
    """Soak, and return the exit code."""
    options = parse(argv)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.folder)).resolve()
    print(f"soak: seed {seed}, {options.kills} kills, files in {folder}", flush=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload([*ranks.PRELOAD, WARM])
    forkserver.ensure_running()
    setting = Setting(
        seed=seed,
        ranks=options.ranks,
        iterations=options.iterations,
        disk_seconds=options.disk_milliseconds / 1000,
        plant=options.plant,
        data=write_tokens(folder / "tokens"),
        folder=folder,
    )
    soak, began = Soak(options, setting), time.monotonic()
    failure: SoakFailure | None = None
    try:
        soak.run()
    except SoakFailure as failed:
        failure = failed
    results = soak.results
    print(
        f"soak: {len(results)} kills ({inside(results)} while a save was under way), "
        f"{soak.chains} chains, {soak.starts} starts, {time.monotonic() - began:.0f} s, seed {seed}"
    )
    print(table(results))
    if failure is None:
        print("soak: 0 lost checkpoints, 0 inexact resumes")
        shutil.rmtree(folder)
        return 0
    print(f"soak: FAILED: {failure}")
    if soak.chain is not None:
        again = f"--seed {seed} --chain {soak.chain.number} --ranks {options.ranks}"
        again += f" --iterations {options.iterations} --kills {soak.chain.kills + 10}"
        print(f"soak: after kill {soak.chain.kills} of chain {soak.chain.number}; again:")
        print(f"  python -m tools.soak {again}")
    print(f"soak: files and logs are kept in {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
